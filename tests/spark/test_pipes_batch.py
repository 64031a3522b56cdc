"""Settings and metadata of `PipesBatch`; tests/docs reads its records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Message

from dagster_rebalance import ConfigurationError, IllegalStateError, OffsetRange, PipesBatch
from dagster_rebalance.core.batches.pipes_payload import sent_positions
from dagster_rebalance.spark import pipes_batch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = PipesBatch("b-1", "etl", (OffsetRange("orders", 0, 5, 9),), "read_uncommitted")


@pytest.mark.parametrize("own", [None, "read_committed"])
def test_isolation_level_defaults_to_that_of_the_group(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        pipes_batch, "read_ranges", lambda *given, **more: asked.append((given, more))
    )
    session: Any = object()
    kafka = {"bootstrap.servers": "broker:9092", **({"isolation.level": own} if own else {})}
    BATCH.dataframe(session, kafka, options={"includeHeaders": "true"}, allow_plaintext=True)
    (((of, ranges, settings), more),) = asked
    assert of is session
    assert ranges == BATCH.offset_ranges
    assert settings == {**kafka, "isolation.level": own or "read_uncommitted"}
    assert more == {"connector_options": {"includeHeaders": "true"}, "allow_plaintext": True}


def test_batch_from_extras_has_the_metadata_of_a_batch() -> None:
    batch = PipesBatch.from_extras(BATCH.extras)
    assert type(batch) is PipesBatch
    assert batch == BATCH
    shown = {
        "batch": "b-1",
        "ranges": {"raw_value": "- `orders-0 [5, 9)`", "type": "md"},
        "offsets": 4,
    }
    assert batch.metadata() == shown
    assert batch.metadata(row_count=0) == {**shown, "dagster/row_count": 0}


class Pipes:
    """The context of Dagster Pipes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def report_custom_message(self, payload: Any) -> None:  # noqa: ANN401 - any JSON
        self.messages.append(json.loads(json.dumps(payload)))


def message(offset: int) -> Message:
    return Message(topic="orders", partition=0, offset=offset, value=b"x")


def test_job_reports_the_records_that_it_sets_aside() -> None:
    batch, pipes = replace(BATCH, takes_letters=True), Pipes()
    assert PipesBatch.from_extras(batch.extras).takes_letters
    with batch.letters(pipes) as letters:
        assert letters.set_aside(message(5), KeyError("customer")) == 1
        assert letters.set_aside([message(6), message(7)], "late") == 2
        with pytest.raises(IllegalStateError, match="a str cannot be set aside"):
            letters.set_aside("text", "late")
    assert sent_positions(pipes.messages) == [
        ("orders", 0, 5, "KeyError: 'customer'"),
        ("orders", 0, 6, "late"),
        ("orders", 0, 7, "late"),
    ]
    assert batch.metadata(set_aside=letters.count)["set_aside"] == 3


def test_job_that_fails_reports_no_end() -> None:
    pipes = Pipes()
    with pytest.raises(ZeroDivisionError), replace(BATCH, takes_letters=True).letters(pipes):
        _ = 1 / 0
    with pytest.raises(IllegalStateError, match="are not complete"):
        sent_positions(pipes.messages)


def test_job_whose_run_stores_no_letters_is_refused() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"kafka_batch\.run_pipes"),
        BATCH.letters(Pipes()),
    ):
        pass


@pytest.mark.spark
def test_good_rows_are_returned_and_the_others_reported(session: SparkSession) -> None:
    frame = session.sql(
        "SELECT 'orders' AS topic, 0 AS partition, id AS offset, "
        "if(id % 2 = 0, NULL, concat('odd ', id)) AS reason FROM range(5, 9)"
    )
    pipes = Pipes()
    with replace(BATCH, takes_letters=True).letters(pipes) as letters:
        good = letters.good_rows(frame, error="reason")
        assert letters.set_aside(frame.where("offset = 6"), ValueError("even")) == 1
        with pytest.raises(IllegalStateError, match="offset 8 has no reason"):
            letters.set_aside(frame.where("offset = 8"), "reason")
    assert sorted(row.offset for row in good.collect()) == [6, 8]
    assert good.columns == ["topic", "partition", "offset"]
    assert sorted(sent_positions(pipes.messages)) == [
        ("orders", 0, 5, "odd 5"),
        ("orders", 0, 6, "ValueError: even"),
        ("orders", 0, 7, "odd 7"),
    ]

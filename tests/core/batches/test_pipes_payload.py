"""A batch is sent through the extras of Dagster Pipes as text, and parsed without a change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dagster_rebalance.core.batches.pipes_payload import (
    EXTRAS_KEY,
    MAX_SENT_REASON,
    SentBatch,
    end_message,
    position_messages,
    sent_positions,
)
from dagster_rebalance.core.batches.record_filter import RecordPredicate
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from tests.core.world import span

BATCH = SentBatch("b-1", "etl", (span(0, 0, 10), span(1, 5, 6)), "read_uncommitted")


def damaged(**changes: object) -> dict[str, Any]:
    """The extras of a batch with other fields."""
    return {EXTRAS_KEY: {**BATCH.extras[EXTRAS_KEY], **changes}}


def test_batch_survives_extras_and_json() -> None:
    sent = json.loads(json.dumps({"mine": 1, **BATCH.extras}))
    assert SentBatch.from_extras(sent) == BATCH
    assert BATCH.records == 11


def test_batch_of_a_bisection_names_the_ranges_that_failed() -> None:
    assert BATCH.failed_ranges == ()
    part = replace(BATCH, batch_id="b-1.t0-a", offset_ranges=(span(0, 0, 5),))
    assert part.failed_ranges == (span(0, 0, 10),)


def test_filter_survives_extras_in_a_form_that_earlier_versions_refuse() -> None:
    batch = replace(BATCH, only=RecordPredicate({"kind": "order"}, tombstones=False))
    sent = json.loads(json.dumps(batch.extras))
    assert SentBatch.from_extras(sent) == batch
    assert (sent[EXTRAS_KEY]["form"], BATCH.extras[EXTRAS_KEY]["form"]) == (2, 1)


@pytest.mark.parametrize(("batch_id", "is_rerun"), [("b-1", False), ("r.x7.12", True)])
def test_batch_id_distinguishes_reruns(batch_id: str, is_rerun: bool) -> None:  # noqa: FBT001 - a table
    assert SentBatch(batch_id, "etl", BATCH.offset_ranges).is_rerun is is_rerun


@pytest.mark.parametrize("extras", [{}, {"mine": 1}, {EXTRAS_KEY: "b-1"}])
def test_extras_without_batch_name_remedy(extras: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"extras=kafka_batch\.pipes_extras\(\)"):
        SentBatch.from_extras(extras)


@pytest.mark.parametrize("form", [None, 3])
def test_extras_of_another_version_are_refused(form: int | None) -> None:
    with pytest.raises(ConfigurationError, match="the same version of dagster-rebalance"):
        SentBatch.from_extras(damaged(form=form))


@pytest.mark.parametrize(
    "ranges",
    [
        None,
        [{"topic": "orders"}],
        [{"topic": "orders", "partition": 0, "start": "0", "until": 5}],
        [{"topic": "orders", "partition": 0, "start": 5, "until": 5}],
        ["orders:0:0:5"],
    ],
)
def test_damaged_extras_are_refused(ranges: object) -> None:
    with pytest.raises(ConfigurationError, match="is damaged"):
        SentBatch.from_extras(damaged(ranges=ranges))


def test_extras_without_batch_id_are_refused() -> None:
    extras = BATCH.extras
    del extras[EXTRAS_KEY]["batch_id"]
    with pytest.raises(ConfigurationError, match="is damaged"):
        SentBatch.from_extras(extras)


def sent(job: str, number: int, total: int | None = None) -> list[dict[str, Any]]:
    positions = [("orders", 0, offset, "bad" * 100) for offset in range(number)]
    ends = [] if total is None else [end_message(job, total)]
    return [*position_messages(job, positions), *ends]


def test_positions_of_all_messages_are_returned_with_short_reasons() -> None:
    messages = [{"other": 1}, "text", *sent("a", 120, 120), *sent("b", 0, 0)]
    assert len(messages) == 7
    found = sent_positions(messages)
    assert [offset for _, _, offset, _ in found] == [*range(120)]
    assert {len(reason) for *_, reason in found} == {MAX_SENT_REASON}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"other": 1}],
        sent("a", 3),
        sent("a", 3, 4),
        sent("a", 120, 120)[1:],
        [*sent("a", 3, 3), *sent("b", 1)],
        [*sent("a", 3, 3), end_message("b", 1)],
    ],
)
def test_missing_message_is_refused(messages: list[object]) -> None:
    with pytest.raises(IllegalStateError, match="are not complete"):
        sent_positions(messages)


@pytest.mark.parametrize(
    "damaged", [{}, 5, {"job": "a", "positions": [[1]]}, {"job": "a", "total": "x"}]
)
def test_damaged_message_is_refused(damaged: object) -> None:
    with pytest.raises(IllegalStateError, match="is damaged"):
        sent_positions([{"dagster_rebalance_letters": damaged}])

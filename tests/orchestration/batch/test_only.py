"""`only`: every reader of a batch returns the same records, and counts the others once."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

from collections.abc import Iterable
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Message

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource, RecordFilter
from dagster_rebalance.orchestration.resources.registry import plain_json
from tests.orchestration.parts import span

RANGES = (span(0, 0, 5), span(1, 10, 12), span(0, 5, 8))
ORDERS = RecordFilter(header_in={"kind": ["order", "refund"]}, tombstones=False)
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}}'


def message(number: int, offset: int, kind: str | None, value: bytes | None) -> Message:
    headers: Any = None if kind is None else [("kind", b"other"), ("kind", kind.encode())]
    return Message(
        topic="orders", partition=number, offset=offset, key=b"k", value=value, headers=headers
    )


MESSAGES = (
    message(0, 0, "order", b'{"n": 0}'),
    message(0, 1, None, b"{}"),
    message(0, 4, "refund", b'{"n": 4}'),
    message(1, 10, "order", None),
    message(1, 11, "audit", b"{}"),
    message(0, 6, "order", b'{"n": 6}'),
    message(0, 7, "x", b"{}"),
)
KEPT = [(0, 0), (0, 4), (0, 6)]


def places(messages: Iterable[Message]) -> list[tuple[int, int]]:
    return sorted((one.partition() or 0, one.offset() or 0) for one in messages)


def test_each_reader_returns_the_records_that_pass() -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES, only=ORDERS)
    value = plain_json(SCHEMA)
    assert places(batch.messages()) == KEPT
    assert places(one.message for one in batch.decoded_messages(value=value)) == KEPT
    for table in (batch.arrow().read_all(), batch.arrow(value=value).read_all()):
        rows = table.select(["partition", "offset"]).to_pylist()
        assert sorted((row["partition"], row["offset"]) for row in rows) == KEPT
    assert batch.metadata()["left_out"] == 4


def test_records_left_out_are_counted_once_in_any_order_of_reads() -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES, only=ORDERS)
    assert "left_out" not in batch.metadata()
    assert places(batch.messages(RANGES[2])) == [(0, 6)]
    assert batch.left_out_records == 1
    assert places(batch.messages(RANGES[0])) == [(0, 0), (0, 4)]
    assert batch.left_out_records == 2
    assert places(batch.messages()) == KEPT
    assert batch.metadata(row_count=3)["left_out"] == 4


def test_batch_is_left_out_without_a_record_that_passes() -> None:
    batch = KafkaBatch.for_testing(RANGES[1:2], messages=MESSAGES[3:5], only=ORDERS)
    assert batch.is_left_out()
    assert batch.left_out_records == 2
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES, only=ORDERS)
    assert not batch.is_left_out()
    assert batch.left_out_records == 0
    assert places(batch.messages()) == KEPT  # continues the read
    assert places(batch.messages()) == KEPT
    assert batch.left_out_records == 4
    assert not batch.is_left_out()
    assert places(batch.messages(RANGES[2])) == [(0, 6)]
    assert not KafkaBatch.for_testing(RANGES, messages=MESSAGES).is_left_out()


def test_batch_without_filter_counts_nothing() -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES)
    assert len(places(batch.messages())) == len(MESSAGES)
    assert "left_out" not in batch.metadata()


def test_record_set_aside_passed_the_filter() -> None:
    """Letters are read again by offset, without the filter and without a second count."""
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES, only=ORDERS)
    table = batch.arrow().read_all()
    assert batch.set_aside(table.slice(0, 1), ValueError("bad")) == 1
    assert [letter.value for letter in batch.letters] == [b'{"n": 0}']
    assert batch.left_out_records == 4


def test_asset_receives_a_filter_through_dagster() -> None:
    seen = []

    @dg.asset
    def orders(kafka: KafkaConsumerResource) -> None:
        seen.append(kafka.predicate())

    for only in (ORDERS, None):
        kafka = KafkaConsumerResource(
            bootstrap_servers="none:1", group_id="etl", topics=["orders"], only=only
        )
        assert dg.materialize([orders], resources={"kafka": kafka}).success
    assert seen == [ORDERS.predicate(), None]


@pytest.mark.parametrize(
    ("only", "remedy"),
    [
        ({}, "give header_equals"),
        ({"header_equal": {"kind": "a"}}, "its conditions are header_equals"),
        ({"key_prefix": dg.EnvVar("PREFIX")}, "must be a text"),
    ],
)
def test_filter_that_cannot_work_is_refused_at_load(only: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        KafkaConsumerResource.model_validate(
            {"bootstrap_servers": "none:1", "group_id": "etl", "topics": ["orders"], "only": only}
        )

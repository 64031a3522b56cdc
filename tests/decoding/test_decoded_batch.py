"""Decoded records of a batch without Spark: messages, Arrow and dead letters."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Message
from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from dagster_rebalance import (
    BrokerError,
    ConfigurationError,
    IllegalStateError,
    KafkaBatch,
    KafkaConsumerResource,
    OffsetRange,
    SchemaRegistryResource,
    UndecodableError,
    plain_json,
)
from dagster_rebalance.decoding.decoder import KnownSchemas
from dagster_rebalance.orchestration.batch import records
from tests.decoding.records import ORDER, avro, batch

if TYPE_CHECKING:
    from tests.decoding.http_registry import HttpRegistry

PEN = {"id": 1, "item": "pen"}


@pytest.fixture
def its(registry: HttpRegistry) -> SchemaRegistryResource:
    """Return a registry with the schema of orders in both subjects of the topic."""
    assert registry.register("orders-value", ORDER) == 1
    assert registry.register("orders-key", ORDER) == 1
    return SchemaRegistryResource(url=registry.url, client_config={"max.retries": "0"})


def test_payload_of_confluents_serializer_is_decoded(
    registry: HttpRegistry, its: SchemaRegistryResource
) -> None:
    config = {"subject.name.strategy": topic_subject_name_strategy}
    serialize = AvroSerializer(
        SchemaRegistryClient({"url": registry.url}), json.dumps(ORDER), conf=config
    )
    payload = serialize(PEN, SerializationContext("orders", MessageField.VALUE))
    assert isinstance(payload, bytes)
    (found,) = batch(payload).decoded_messages(value=its.avro())
    assert (found.value, found.key, found.undecodable) == (PEN, None, None)
    assert found.message.value() == payload


def test_tombstones_and_parts_without_decoder_are_not_decoded(its: SchemaRegistryResource) -> None:
    good = avro(1, ORDER, PEN)
    given = batch(good, None, keys=[good, b"plain"])
    assert [one.value for one in given.decoded_messages(value=its.avro())] == [PEN, None]
    assert [one.key for one in given.decoded_messages(value=its.avro())] == [good, b"plain"]
    both = given.decoded_messages(value=its.avro(), key=its.avro(), keep_undecodable=True)
    assert [one.key for one in both] == [PEN, None]
    assert list(given.decoded_messages([], value=its.avro())) == []


def test_undecodable_record_fails_the_batch_is_kept_or_becomes_a_letter(
    its: SchemaRegistryResource,
) -> None:
    """A letter is stored before any later record is returned."""
    good, poison = avro(1, ORDER, PEN), b"poison"
    given = batch(good, poison, good)
    with pytest.raises(
        UndecodableError, match=r"orders-0 offset 1 cannot be decoded: value: .*112"
    ):
        list(given.decoded_messages(value=its.avro()))
    kept = list(given.decoded_messages(value=its.avro(), keep_undecodable=True))
    assert [one.value for one in kept] == [PEN, None, PEN]
    assert "byte 112" in str(kept[1].undecodable)
    assert not list(given.letters)
    reading = given.decoded_messages(value=its.avro(), dead_letters="dead")
    assert next(reading).value == PEN
    stored = [(letter.key, letter.value) for letter in given.letters]
    assert stored == [("orders-0-1", poison)]
    assert [one.message.offset() for one in reading] == [2]
    again = batch(good, poison, good)
    table = again.arrow(value=its.avro(), dead_letters="dead").read_all()
    assert table.column("offset").to_pylist() == [0, 2]
    assert again.letters == given.letters


def test_record_with_unsupported_schema_is_undecodable_alone(
    registry: HttpRegistry, its: SchemaRegistryResource
) -> None:
    rules = {"domainRules": [{"name": "r", "kind": "TRANSFORM", "mode": "READ", "type": "ENCRYPT"}]}
    encrypted = registry.register("cards-value", ORDER, ruleSet=rules)
    given = batch(avro(1, ORDER, PEN), avro(encrypted, ORDER, PEN), avro(1, ORDER, PEN))
    kept = list(given.decoded_messages(value=its.avro(), keep_undecodable=True))
    assert [one.value for one in kept] == [PEN, None, PEN]
    assert "has rules (data contracts)" in str(kept[1].undecodable)
    decoder = its.avro().decoder("value", frozenset({"orders"}))
    (known,) = records.with_known_schemas([decoder], {"value": [1, encrypted]})
    assert isinstance(known.writer, KnownSchemas)
    assert "has rules (data contracts)" in known.writer.problems[encrypted]


def test_registry_outage_stores_no_letters(
    registry: HttpRegistry, its: SchemaRegistryResource
) -> None:
    given = batch(avro(1, ORDER, PEN))
    reading = given.decoded_messages(value=its.avro(reader=json.dumps(ORDER)), dead_letters="dead")
    registry.answer = (503, "text/html", "away")
    with pytest.raises(BrokerError, match="HTTP 503"):
        list(reading)
    assert len(given.letters) == 0


def test_arrow_has_the_columns_of_spark(its: SchemaRegistryResource) -> None:
    message = Message(
        topic="orders", partition=0, offset=1, key=b"k", value=b"v", timestamp=(1, 5),
        headers=[("trace", b"\x01"), ("trace", None)],
    )  # fmt: skip
    ranges = [OffsetRange("orders", 0, 0, 1), OffsetRange("orders", 0, 1, 9)]
    given = KafkaBatch.for_testing(ranges, messages=[message])
    (row,) = given.arrow().read_all().to_pylist()
    assert row.pop("timestamp").timestamp() == 0.005
    assert row == {
        "key": b"k",
        "value": b"v",
        "topic": "orders",
        "partition": 0,
        "offset": 1,
        "timestampType": 0,
        "headers": [{"key": "trace", "value": b"\x01"}, {"key": "trace", "value": None}],
        "range_start": 1,
        "range_until": 9,
    }
    assert given.arrow(ranges[0]).read_all().num_rows == 0
    assert given.arrow([], value=its.avro()).schema.field("value").type.num_fields == 2


@pytest.mark.parametrize(
    ("timestamp", "micros"),
    [
        ((1, 1_764_000_000_000), 1_764_000_000_000_000),
        ((1, 1_764_000_000_000_000_000), None),  # nanoseconds
        ((2, 2**63 - 1), None),
        ((1, -(2**63)), None),
        ((0, 0), None),
    ],
)
def test_timestamp_beyond_microseconds_is_null(
    its: SchemaRegistryResource, timestamp: tuple[int, int], micros: int | None
) -> None:
    given = batch(avro(1, ORDER, PEN), b"poison", timestamp=timestamp)
    for table in (
        given.arrow().read_all(),
        given.arrow(value=its.avro(), keep_undecodable=True).read_all(),
    ):
        assert table.column("timestamp").cast("int64").to_pylist() == [micros] * 2
        assert table.column("timestampType").to_pylist() == [timestamp[0] - 1] * 2
    read = list(given.decoded_messages(value=its.avro(), keep_undecodable=True))
    assert [one.message.timestamp() for one in read] == [timestamp] * 2


def test_letter_of_a_record_with_unusual_metadata_is_stored(
    its: SchemaRegistryResource,
) -> None:
    odd = {"timestamp": (1, 2**63 - 1), "headers": [("na\ufffd", None), ("", b"")]}
    given = batch(b"poison", keys=[b"\xff\x00"], **odd)
    assert list(given.decoded_messages(value=its.avro(), dead_letters="dead")) == []
    (letter,) = given.letters
    assert (letter.headers, letter.record_key) == (tuple(odd["headers"]), b"\xff\x00")
    assert letter.timestamp_ms == 2**63 - 1
    again = batch(b"poison", keys=[b"\xff\x00"], **odd)
    assert again.arrow(value=its.avro(), dead_letters="dead").read_all().num_rows == 0
    assert again.letters == (replace(letter, timestamp_ms=None),)


@pytest.mark.parametrize(
    "odd",
    [
        {"headers": {"a": b"1"}},
        {"headers": [("a", 1)]},
        {"headers": [("a",)]},
        {"headers": [(b"a", b"1")]},
        {"headers": [("\ud800", b"1")]},
        {"key": {"id": 1}},
        {"value": "\ud800"},
    ],
)
def test_impossible_message_for_testing_is_refused(odd: dict[str, Any]) -> None:
    message = Message(topic="orders", partition=0, offset=1, **odd)
    with pytest.raises(IllegalStateError, match="orders-0 offset 1 has a form that Kafka's"):
        KafkaBatch.for_testing([OffsetRange("orders", 0, 0, 2)], messages=[message])


def test_text_value_of_a_message_for_testing_is_decoded(its: SchemaRegistryResource) -> None:
    given = batch(avro(1, ORDER, PEN).decode("latin-1"))  # type: ignore[arg-type]
    assert [one.value for one in given.decoded_messages(value=its.avro())] == [PEN]


def test_empty_ranges_have_the_columns_of_the_missing_topic(
    registry: HttpRegistry, its: SchemaRegistryResource
) -> None:
    registry.register("refunds-value", {**ORDER, "fields": ORDER["fields"][:1]})

    def columns(*topics: str, subject: str | None = None) -> int:
        kafka = KafkaConsumerResource(bootstrap_servers="x", group_id="g", topics=[*topics])
        batch = KafkaBatch(kafka=kafka, batch_id="b", ranges=["orders:0:0:1"])
        reader = batch.arrow([], value=its.avro(subject=subject))
        assert reader.read_all().num_rows == 0
        fields: int = reader.schema.field("value").type.num_fields
        return fields

    assert columns("orders", "refunds") == 1
    assert columns("orders") == 2
    assert columns("^orders") == 2
    with pytest.raises(
        ConfigurationError, match=r"of payments, refunds, whose .* name the subject"
    ):
        columns("orders", "payments", "refunds")
    assert columns("orders", "payments", "refunds", subject="refunds-value") == 1


def test_large_records_are_read_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.batch.arrow_records.MAX_CHUNK_BYTES", 10)
    reading = batch(*[b"12345"] * 5, None).arrow()
    assert [one.num_rows for one in reading] == [2, 2, 2]


def test_arrow_keeps_undecodable_records(its: SchemaRegistryResource) -> None:
    reading = batch(avro(1, ORDER, PEN), b"poison").arrow(value=its.avro(), keep_undecodable=True)
    table = reading.read_all()
    assert table.column("value").to_pylist() == [PEN, None]
    undecodable = table.column("undecodable").to_pylist()
    assert undecodable[0] is None
    assert (undecodable[1]["key"], undecodable[1]["value"]) == (None, b"poison")
    with pytest.raises(UndecodableError, match="offset 0 cannot be decoded"):
        batch(b"poison").arrow(value=its.avro()).read_all()


def test_missing_pyarrow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        batch(b"v").arrow()


def test_invalid_arguments_are_refused_before_the_read(
    registry: HttpRegistry, its: SchemaRegistryResource
) -> None:
    given = batch(b"v")
    for arguments, words in (
        ({"dead_letters": "dead"}, "there is nothing to decode"),
        (
            {"value": its.avro(), "dead_letters": "d", "keep_undecodable": True},
            "exclude each other",
        ),
        ({"value": its.avro(), "dead_letters": "a b"}, "cannot be the name of a topic"),
        ({"value": its.avro(), "dead_letters": "orders"}, "is a topic of the group"),
        ({"value": its.avro(subject="nothing")}, "has no subject nothing"),
        ({"value": its.avro(reader="{")}, "the reader's schema of the value of orders"),
        ({"value": plain_json("7")}, "unusable JSON schema"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            given.decoded_messages(**arguments)
    two = [OffsetRange("a", 0, 0, 1), OffsetRange("b", 0, 0, 1)]
    mixed = KafkaBatch.for_testing(two, messages=[])
    with pytest.raises(
        ConfigurationError, match="records may be of a, b, whose schemas may differ"
    ):
        mixed.decoded_messages(value=its.avro())
    registry.register("a-value", ORDER)
    assert list(mixed.decoded_messages(two[0], value=its.avro())) == []


def test_plain_json_needs_no_registry() -> None:
    schema = '{"type": "object", "properties": {"id": {"type": "integer"}}}'
    given = batch(b'{"id": 1}', b'{"id": "x"}').decoded_messages(
        value=plain_json(schema), keep_undecodable=True
    )
    assert [one.value for one in given] == [{"id": 1}, None]

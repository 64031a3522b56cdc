"""Protobuf: message indexes, columns, and refused payloads."""

from __future__ import annotations

import base64
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import descriptor_pool, message_factory

from dagster_rebalance.core.model.errors import ConfigurationError, UndecodableError
from dagster_rebalance.decoding.decoder import Decoder
from dagster_rebalance.kafka.schema_registry import Registry
from tests.decoding.records import decoded_array, framed, proto_file, proto_message

if TYPE_CHECKING:
    from google.protobuf import descriptor_pb2

    from tests.decoding.http_registry import HttpRegistry

STAMP = "google/protobuf/timestamp.proto"


def shop() -> descriptor_pb2.FileDescriptorProto:
    """Return a file whose second message has a nested message with bytes."""
    line = proto_message("Line", raw="bytes", number="uint64")
    order = proto_message(
        "Order", id="int64", lines=".shop.Order.Line[]", at=".google.protobuf.Timestamp"
    )
    order.nested_type.append(line)
    order.enum_type.add(name="State").value.add(name="NEW", number=0)
    order.field.add(name="state", number=9, label=1, type=14, type_name=".shop.Order.State")
    order.field.add(name="paid", number=10, label=1, type=8, proto3_optional=True, oneof_index=0)
    order.oneof_decl.add(name="_paid")
    parent = proto_message("Parent", name="string", child=".shop.Parent")
    return proto_file("shop", [proto_message("Refund", id="int64"), order, parent], STAMP)


def registered(registry: HttpRegistry, subject: str, file: Any, **more: Any) -> int:  # noqa: ANN401 - protobuf's
    """Register a file as confluent-kafka's serializer does, and return its id."""
    text = base64.b64encode(file.SerializeToString()).decode()
    return registry.register(subject, text, "PROTOBUF", **more)


def written(file: Any, name: str, /, **fields: Any) -> bytes:  # noqa: ANN401 - protobuf's
    from google.protobuf import timestamp_pb2  # noqa: PLC0415 - the file that the others import

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))(**fields)
    return bytes(made.SerializeToString())


def decoder(registry: HttpRegistry, subject: str, message: str = "") -> Decoder:
    """Return a decoder for the latest schema of a subject."""
    client = Registry({"url": registry.url})
    schema = client.of_subject("PROTOBUF", subject, None)
    return Decoder("value", "protobuf", schema, lambda of: client.by_id("PROTOBUF", of), message)


def test_message_indexes_select_a_nested_message(registry: HttpRegistry) -> None:
    file = shop()
    schema_id = registered(registry, "lines", file)
    opened = decoder(registry, "lines", "shop.Order.Line").open()
    assert opened.column.ddl == "STRUCT<`raw`: BINARY, `number`: DECIMAL(20,0)>"
    data = written(file, "shop.Order.Line", raw=b"\xff\x00", number=2**64 - 1)
    array, reasons = decoded_array(
        opened,
        [
            framed(schema_id, data, b"\x04\x02\x00"),
            framed(schema_id, data, b"\x02\x02"),
            framed(schema_id, data, b"\x00"),
            framed(schema_id, data, b"\x04\x02\x0e"),
            framed(schema_id, b"", b"\x04"),
            framed(schema_id, b"\xff", b"\x04\x02\x00"),
        ],
        [()] * 6,
    )
    assert array.to_pylist()[0] == {"raw": b"\xff\x00", "number": 2**64 - 1}
    assert reasons[0] is None
    for reason, words in zip(
        reasons[1:],
        (
            "a message shop.Order, and shop.Order.Line is expected",
            "a message shop.Refund",
            "lead to no message",
            "indexes are truncated",
            "not a message shop.Order.Line",
        ),
        strict=True,
    ):
        assert words in str(reason)


def test_message_becomes_a_struct(registry: HttpRegistry) -> None:
    file = shop()
    schema_id = registered(registry, "orders", file)
    opened = decoder(registry, "orders", "shop.Order").open()
    data = written(
        file, "shop.Order", id=1, lines=[{"raw": b"a"}], at={"seconds": 1, "nanos": 2000}
    )
    unknown = data + b"\x48\x07"  # an enum's number of a newer schema
    array, reasons = decoded_array(
        opened, [framed(schema_id, one, b"\x02\x02") for one in (data, unknown)], [(), ()]
    )
    assert reasons == [None, None]
    assert array.to_pylist()[0] == {
        "id": 1,
        "lines": [{"raw": b"a", "number": 0}],
        "at": datetime(1970, 1, 1, 0, 0, 1, 2, tzinfo=timezone.utc),
        "state": "NEW",
        "paid": None,
    }
    assert array.to_pylist()[1]["state"] == "7"
    parent = decoder(registry, "orders", "shop.Parent").open()
    assert parent.column.ddl == "STRUCT<`name`: STRING, `child`: STRING>"
    family = written(file, "shop.Parent", name="a", child={"name": "b"})
    assert parent(framed(schema_id, family, b"\x02\x04")) == {"name": "a", "child": '{"name": "b"}'}


@pytest.mark.parametrize("name", ["HasField", "ListFields", "DESCRIPTOR", "FromString", "None"])
def test_field_may_be_named_like_a_message_attribute(registry: HttpRegistry, name: str) -> None:
    message = proto_message("Order", **{"id": "int64", name: ".shop.Line"})
    file = proto_file("shop", [message, proto_message("Line", number="int64")])
    schema_id = registered(registry, "orders", file)
    data = b"\x08\x05\x12\x02\x08\x07"
    opened = decoder(registry, "orders", "shop.Order").open()
    assert opened(framed(schema_id, data, b"\x00")) == {"id": 5, name: {"number": 7}}
    assert opened(framed(schema_id, data[:2], b"\x00")) == {"id": 5, name: None}


def test_first_alias_of_an_enum_number_is_its_name(registry: HttpRegistry) -> None:
    file = shop()
    state = file.message_type[1].enum_type[0]
    state.options.allow_alias = True
    state.value.add(name="FRESH", number=0)
    schema_id = registered(registry, "orders", file)
    opened = decoder(registry, "orders", "shop.Order").open()
    data = written(file, "shop.Order", id=1)
    assert opened(framed(schema_id, data, b"\x02\x02"))["state"] == "NEW"


def test_newer_message_is_read_by_the_reader_schema(registry: HttpRegistry) -> None:
    old = proto_file("shop", [proto_message("Order", id="int64")])
    new = proto_file("shop", [proto_message("Order", id="int64", item="string")])
    ids = [registered(registry, "orders", one) for one in (new, old)]
    opened = decoder(registry, "orders").open()
    assert opened.column.ddl == "STRUCT<`id`: BIGINT>"
    data = written(new, "shop.Order", id=5, item="pen")
    assert opened(framed(ids[0], data, b"\x00")) == {"id": 5}


def test_references_are_fetched_recursively(registry: HttpRegistry) -> None:
    money = proto_file("money", [proto_message("Money", units="int64")])
    line = proto_file("line", [proto_message("Line", price=".money.Money")], "money.proto")
    order = proto_file(
        "shop", [proto_message("Order", line=".line.Line", price=".money.Money")],
        "line.proto", "money.proto",
    )  # fmt: skip
    registered(registry, "money", money)
    registered(registry, "line", line, references=[("money.proto", "money", 1)])
    registered(
        registry, "orders", order,
        references=[("line.proto", "line", 1), ("money.proto", "money", 1)],
    )  # fmt: skip
    assert decoder(registry, "orders").open().column.ddl == (
        "STRUCT<`line`: STRUCT<`price`: STRUCT<`units`: BIGINT>>, `price`: STRUCT<`units`: BIGINT>>"
    )


def test_registry_without_serialized_schemas_is_refused(registry: HttpRegistry) -> None:
    as_text = registry.register("orders", 'syntax = "proto3"; message Order {}', "PROTOBUF")
    with pytest.raises(ConfigurationError, match="format=serialized"):
        decoder(registry, "orders")
    file = proto_file("shop", [proto_message("A")], "nowhere.proto")
    without_import = registered(registry, "others", file)
    with pytest.raises(ConfigurationError, match=r"imports nowhere\.proto"):
        decoder(registry, "others")
    client = Registry({"url": registry.url})
    for schema_id, words in (
        (as_text, "format=serialized"),
        (without_import, r"imports nowhere\.proto"),
    ):
        with pytest.raises(UndecodableError, match=words):
            client.by_id("PROTOBUF", schema_id)
    registered(registry, "good", shop())
    with pytest.raises(UndecodableError, match=r"no message shop\.Gone; it has shop\.Refund"):
        decoder(registry, "good", "shop.Gone").open()

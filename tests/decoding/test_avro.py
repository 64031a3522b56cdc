"""Avro: columns, schema evolution, and refused payloads."""

from __future__ import annotations

import json
import math
import struct
import uuid
from datetime import date, datetime, time, timezone
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from tests.decoding.records import ORDER, Json, avro, decoded_array, framed

AT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
NODE = {
    "type": "record",
    "name": "Node",
    "fields": [{"name": "v", "type": "int"}, {"name": "next", "type": ["null", "Node"]}],
}


def record(**fields: Json) -> dict[str, Any]:
    """Return a schema with these fields; a default is given as a pair."""
    return {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": name, "type": kind[0], "default": kind[1]}
            if isinstance(kind, tuple)
            else {"name": name, "type": kind}
            for name, kind in fields.items()
        ],
    }


def decoder(reader: Json, *writers: Json, **more: Json) -> Decoder:
    """Return a decoder for writers' schemas with ids from 1; by default for the reader's."""
    known = {at: SchemaText(json.dumps(one)) for at, one in enumerate(writers or (reader,), 1)}
    return Decoder("value", "avro", SchemaText(json.dumps(reader), **more), KnownSchemas(known))


def read(reader: Json, value: object, writer: Json = None) -> Json:
    """Return a value that Arrow must be able to hold."""
    written = reader if writer is None else writer
    array, reasons = decoded_array(decoder(reader, written).open(), [avro(1, written, value)], [()])
    assert reasons == [None]
    return array.to_pylist()[0]


@pytest.mark.parametrize(
    ("kind", "value", "found", "ddl"),
    [
        ("long", 1 << 40, 1 << 40, "BIGINT"),
        ("bytes", b"\xff", b"\xff", "BINARY"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
         Decimal("-1.25"), Decimal("-1.25"), "DECIMAL(6,2)"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 60, "scale": 2},
         Decimal("1.25"), "1.25", "STRING"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 60, "scale": 8},
         Decimal(0), "0.00000000", "STRING"),
        ({"type": "int", "logicalType": "date"}, AT.date(), AT.date(), "DATE"),
        ({"type": "long", "logicalType": "timestamp-micros"}, AT, AT, "TIMESTAMP_LTZ"),
        ({"type": "long", "logicalType": "local-timestamp-micros"},
         AT.replace(tzinfo=None), AT.replace(tzinfo=None), "TIMESTAMP_NTZ"),
        ({"type": "int", "logicalType": "time-millis"}, time(0, 0, 1), 1000, "INT"),
        ({"type": "long", "logicalType": "time-micros"}, time(0, 0, 1), 1_000_000, "BIGINT"),
        ({"type": "long", "logicalType": "of-tomorrow"}, 7, 7, "BIGINT"),
        ({"type": "string", "logicalType": "uuid"},
         uuid.UUID(int=5), str(uuid.UUID(int=5)), "STRING"),
        ({"type": "fixed", "name": "F", "size": 2}, b"ab", b"ab", "BINARY"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B", "STRING"),
        ({"type": "map", "values": "int"}, {"a": 1}, [("a", 1)], "MAP<STRING, INT>"),
        ({"type": "array", "items": ["null", "int"]}, [1, None], [1, None], "ARRAY<INT>"),
        (["null", "int", "long"], 1 << 40, 1 << 40, "BIGINT"),
        (["null", "string", "long"], 7, {"member0": None, "member1": 7},
         "STRUCT<`member0`: STRING, `member1`: BIGINT>"),
        ([{"type": "enum", "name": "E", "symbols": ["A"]}, "string"], ("E", "A"),
         {"member0": "A", "member1": None}, "STRUCT<`member0`: STRING, `member1`: STRING>"),
        (["null", NODE], {"v": 1, "next": {"v": 2, "next": None}},
         {"v": 1, "next": '{"v": 2, "next": null}'}, "STRUCT<`v`: INT, `next`: STRING>"),
        ({"type": "record", "name": "Empty", "fields": []}, {}, "{}", "STRING"),
    ],
)  # fmt: skip
def test_column_of_each_type_is_that_of_from_avro(
    kind: Json, value: object, found: object, ddl: str
) -> None:
    schema = record(field=kind)
    column = decoder(schema).open().column
    assert column.ddl == f"STRUCT<`field`: {ddl}>"
    assert read(schema, {"field": value}) == {"field": found}


@pytest.mark.parametrize(
    ("kind", "default", "found"),
    [
        ({"type": "long", "logicalType": "timestamp-millis"}, 1000,
         datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)),
        ({"type": "int", "logicalType": "date"}, 1, date(1970, 1, 2)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1}, "\u000f",
         Decimal("1.5")),
        ({"type": "int", "logicalType": "time-millis"}, 5, 5),
        (["null", "string"], None, None),
        (["double", "string"], 0, {"member0": 0.0, "member1": None}),
        (["null", "double", "long"], 5, {"member0": 5.0, "member1": None}),
        (["string", "float"], "x", {"member0": "x", "member1": None}),
        (["string", {"type": "record", "name": "A", "fields": []}], "x",
         {"member0": "x", "member1": None}),
        ({"type": "array", "items": {"type": "int", "logicalType": "date"}}, [0],
         [date(1970, 1, 1)]),
        ({"type": "record", "name": "In", "fields": [{"name": "b", "type": "bytes"}]},
         {"b": "\xff"}, {"b": b"\xff"}),
    ],
)  # fmt: skip
def test_reader_default_is_decoded_as_its_type(kind: Json, default: object, found: object) -> None:
    """Fastavro would return the JSON of the default: 1000 milliseconds as 1000 microseconds."""
    writer = record(old="int")
    assert read(record(old="int", new=(kind, default)), {"old": 1}, writer)["new"] == found


def test_records_of_several_writer_schemas_are_resolved() -> None:
    first = record(id="int", gone="string")
    second = record(id="long", note=(["null", "string"], None))
    reader = record(number="long", note=(["null", "string"], None))
    reader["fields"][0]["aliases"] = ["id"]
    opened = decoder(reader, first, second).open()
    payloads = [
        avro(1, first, {"id": 1, "gone": "x"}),
        avro(2, second, {"id": 1 << 40, "note": "n"}),
    ]
    array, reasons = decoded_array(opened, payloads, [(), ()])
    assert reasons == [None, None]
    assert array.to_pylist() == [{"number": 1, "note": None}, {"number": 1 << 40, "note": "n"}]


def test_new_enum_symbol_becomes_reader_default_or_is_refused() -> None:
    old = {"type": "enum", "name": "E", "symbols": ["A"], "default": "A"}
    new = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    assert read(record(e=old), {"e": "B"}, record(e=new)) == {"e": "A"}
    del old["default"]
    with pytest.raises(UndecodableError, match="does not fit schema 1"):
        decoder(record(e=old), record(e=new)).open()(avro(1, record(e=new), {"e": "B"}))


def test_union_of_references_has_a_member_per_type() -> None:
    other = {"type": "record", "name": "Refund", "fields": [{"name": "id", "type": "long"}]}
    references = (("shop.Order", json.dumps(ORDER)), ("Refund", json.dumps(other)))
    reader = decoder(["shop.Order", "Refund"], ORDER, other, references=references)
    array, reasons = decoded_array(
        reader.open(),
        [avro(1, ORDER, {"id": 1, "item": "pen"}), avro(2, other, {"id": 2})],
        [(), ()],
    )
    assert reasons == [None, None]
    assert array.to_pylist() == [
        {"member0": {"id": 1, "item": "pen"}, "member1": None},
        {"member0": None, "member1": {"id": 2}},
    ]


V1 = {**record(id="long", note=(["null", "string"], None)), "name": "Order", "namespace": "shop.v1"}
V2 = {**record(id="long", amount="double"), "name": "Order", "namespace": "shop.v2"}
REFUND = {**record(id="long"), "name": "Refund", "namespace": "shop"}
SECOND = ("shop.v2.Order", {"id": 1, "amount": 9.5})


@pytest.mark.parametrize(
    ("writer", "reader", "value", "member"),
    [
        ([V1, V2], [V1, V2, REFUND], SECOND, "member1"),
        ([V1, V2], [REFUND, V2, V1], SECOND, "member1"),
        (V2, [V1, V2, REFUND], SECOND[1], "member1"),
        ([V2, REFUND], [V1, {**V2, "name": "Sale", "aliases": ["Order"]}], SECOND, "member1"),
        (
            [REFUND, V2],
            [V1, {**V2, "name": "new.Sale", "aliases": ["shop.v2.Order"]}],
            SECOND,
            "member1",
        ),
    ],
)
def test_union_of_same_simple_names_resolves_by_namespace(
    writer: Json, reader: Json, value: object, member: str
) -> None:
    found = read(reader, value, writer)
    assert [name for name, one in found.items() if one is not None] == [member]
    assert found[member] == SECOND[1]
    payload = avro(1, writer, value)
    assert decoder(reader, writer).open(as_python=True).try_decode(payload) == (SECOND[1], None)
    nested = read(record(new=("int", 3), o=reader), {"o": value}, record(o=writer))
    assert nested == {"new": 3, "o": found}


def test_enum_and_fixed_of_same_simple_name_are_distinguished() -> None:
    both = [
        {"type": "enum", "name": "a.Kind", "symbols": ["A"]},
        {"type": "fixed", "name": "b.Kind", "size": 1},
    ]
    writer = record(first=both, second=["b.Kind", "a.Kind"])
    found = read(
        record(new=("int", 3), first=both, second=["a.Kind", "b.Kind"]),
        {"first": ("b.Kind", b"x"), "second": ("a.Kind", "A")},
        writer,
    )
    assert found["first"] == {"member0": None, "member1": b"x"}
    assert found["second"] == {"member0": "A", "member1": None}


def test_type_missing_in_reader_union_does_not_match_its_namesake() -> None:
    writer = [V1, V2]
    opened = decoder([V1, REFUND], writer).open()
    value, why = opened.try_decode(avro(1, writer, SECOND))
    assert value is None
    assert "does not fit schema 1" in str(why)


def test_reference_shared_by_two_references_is_resolved() -> None:
    address = {"type": "record", "name": "Address", "fields": [{"name": "city", "type": "string"}]}
    seller = {"type": "record", "name": "Seller", "fields": [{"name": "at", "type": "Address"}]}
    texts = (("Address", json.dumps(address)), ("Seller", json.dumps(seller)))
    reader = decoder(record(seller="Seller", to="Address"), references=texts)
    whole = record(seller={**seller, "fields": [{"name": "at", "type": address}]}, to="Address")
    reader = Decoder("value", "avro", reader.schema, KnownSchemas({1: reader.schema}))
    value = {"seller": {"at": {"city": "Ulm"}}, "to": {"city": "Bonn"}}
    assert reader.open()(avro(1, whole, value)) == value


GOOD = avro(1, ORDER, {"id": 1, "item": "pen"})


def test_reference_to_a_type_nested_in_another_reference_is_resolved() -> None:
    money = {**record(x="int"), "name": "a.Money"}
    first = {**record(id="int", money=money), "name": "a.First"}
    second = {**record(id="int", money="a.Money", more="int"), "name": "b.Second"}
    refund = {**record(of=["b.Second", "a.First"]), "name": "Refund"}
    texts = [(one["name"], json.dumps(one)) for one in (first, second, refund)]
    reader = SchemaText('["Refund", "a.First", "b.Second"]', tuple(texts))
    alone = {**record(id="int", money=money, more="int"), "name": "b.Second"}
    known = KnownSchemas({1: SchemaText(json.dumps(alone))})
    value = {"id": 1, "money": {"x": 3}, "more": 2}
    opened = Decoder("value", "avro", reader, known).open()
    assert opened.try_decode(avro(1, alone, value)) == ({"member2": value}, None)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "is empty"),
        (b"{}", "byte 123 and not with magic byte 0"),
        (b"\x00\x00\x00", "3 bytes, too few"),
        (b"\x01" + bytes(16), "magic byte 1, the frame with the GUID"),
        (GOOD[:-1], "does not fit schema 1: EOFError"),
        (GOOD + b"x", "1 bytes are left over"),
        (b"\x00\x00\x00\x00\x07" + GOOD[5:], "no schema 7"),
        (GOOD[:6] + b"\x02\xff", "does not fit schema 1: UnicodeDecodeError"),
    ],
)
def test_undecodable_payload_has_a_reason_and_leaves_others_decoded(
    payload: bytes, reason: str
) -> None:
    known = KnownSchemas({1: SchemaText(json.dumps(ORDER))}, {7: "there is no schema 7"})
    opened = Decoder("value", "avro", known.by_id[1], known).open()
    array, reasons = decoded_array(opened, [GOOD, payload, None, GOOD], [()] * 4)
    good = {"id": 1, "item": "pen"}
    assert array.to_pylist() == [good, None, None, good]
    assert [why is None for why in reasons] == [True, False, True, True]
    assert reason in str(reasons[1])


def test_value_too_large_for_its_column_is_refused_alone() -> None:
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
    wide = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    payloads = [avro(1, record(d=wide), {"d": Decimal(text)}) for text in ("1.25", "12345.25")]
    array, reasons = decoded_array(
        decoder(record(d=kind), record(d=wide)).open(), payloads, [(), ()]
    )
    assert array.to_pylist() == [{"d": Decimal("1.25")}, None]
    assert reasons[0] is None
    assert "does not fit its column" in str(reasons[1])
    assert pa.types.is_decimal(array.type.field("d").type)


def test_memory_error_fails_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's second pass would otherwise drop the record, although the first stored no letter."""
    opened = decoder(ORDER).open()

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("fastavro.schemaless_reader", full)
        with pytest.raises(MemoryError):
            decoded_array(opened, [GOOD[:-1]], [()])

    def full_arrow(*_: object) -> None:
        raise pa.ArrowMemoryError

    monkeypatch.setattr(pa, "array", full_arrow)
    with pytest.raises(MemoryError):
        decoded_array(opened, [GOOD], [()])


def test_schema_guid_in_a_header_is_refused() -> None:
    with pytest.raises(UndecodableError, match="__value_schema_id"):
        decoder(ORDER).open()(GOOD[5:], ["trace", "__value_schema_id"])


@pytest.mark.parametrize("text", ["", "{", '"unknown.Type"', '{"type": "record"}', '"fixed"'])
def test_invalid_reader_schema_is_refused(text: str) -> None:
    with pytest.raises(UndecodableError, match="unusable Avro schema"):
        Decoder("value", "avro", SchemaText(text), KnownSchemas()).open()


IN_MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
DATE = {"type": "int", "logicalType": "date"}


A = {**record(x="int"), "name": "A"}
C = {**record(y="int"), "name": "C"}
KIND = {"type": "enum", "name": "Kind", "symbols": ["a", "b"]}
CHOICE = (["string", "int"], "s")
OF_A = {"member0": {"x": 1}, "member1": None}
B = {**A, "name": "B"}
EPOCH_1_S = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
LOCAL_MILLIS = {"type": "long", "logicalType": "local-timestamp-millis"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
NESTED = record(at=(IN_MILLIS, 1000), raw=("bytes", "\xff")) | {"name": "In"}
LATER = record(id="int", at=(IN_MILLIS, 1000))


@pytest.mark.parametrize(
    ("writer", "value", "reader", "found"),
    [
        # A number without a logical type is a time in the reader's unit.
        (record(t="long"), {"t": 1000}, record(t=IN_MILLIS), {"t": EPOCH_1_S}),
        (record(t="int"), {"t": 1000}, record(t=LOCAL_MILLIS),
         {"t": EPOCH_1_S.replace(tzinfo=None)}),
        (record(t=IN_MILLIS), {"t": AT.replace(microsecond=0)}, record(t=MICROS),
         {"t": AT.replace(microsecond=0)}),
        (record(t="int"), {"t": 5}, record(t={"type": "int", "logicalType": "time-millis"}),
         {"t": 5}),
        # Defaults are decoded as their types, also inside of a default, an array and a union.
        (record(old="int"), {"old": 1}, record(old="int", new=(NESTED, {})),
         {"old": 1, "new": {"at": EPOCH_1_S, "raw": b"\xff"}}),
        ({"type": "array", "items": record(id="int")}, [{"id": 1}],
         {"type": "array", "items": LATER}, [{"id": 1, "at": EPOCH_1_S}]),
        (record(id="int"), {"id": 1}, ["null", LATER], {"id": 1, "at": EPOCH_1_S}),
        # A record in a new union or a new namespace is found by its name.
        (record(u=A), {"u": {"x": 1}}, record(u=["null", B, A]),
         {"u": {"member0": None, "member1": {"x": 1}}}),
        ([REFUND, V2], SECOND, [{**V2, "namespace": "shop.v3"}, REFUND],
         {"member0": SECOND[1], "member1": None}),
        # A new field in front of a type moves the place of its definition.
        (record(event=[A, C]), {"event": ("A", {"x": 1})},
         record(previous=(["null", A], None), event=["A", C]),
         {"previous": None, "event": OF_A}),
        (record(previous=["null", A], event=["A", C]),
         {"previous": {"x": 2}, "event": ("A", {"x": 1})},
         record(event=[A, C]), {"event": OF_A}),
        (record(shipping=A), {"shipping": {"x": 1}},
         record(billing=(["null", A], None), shipping=["null", "A"]),
         {"billing": None, "shipping": {"x": 1}}),
        (record(billing=["null", A], shipping=["null", "A"]),
         {"billing": {"x": 2}, "shipping": {"x": 1}}, record(shipping=A), {"shipping": {"x": 1}}),
        (record(first=KIND, kind=["null", "Kind"]), {"first": "a", "kind": "b"},
         record(kind=["null", KIND], more=CHOICE),
         {"kind": "b", "more": {"member0": "s", "member1": None}}),
        (record(kind=["null", KIND]), {"kind": "b"},
         record(first=(KIND, "a"), kind=["null", "Kind"], more=CHOICE),
         {"first": "a", "kind": "b", "more": {"member0": "s", "member1": None}}),
        (record(p=A, q="A"), {"p": {"x": 1}, "q": {"x": 2}},
         record(q=["null", A]), {"q": {"x": 2}}),
        (record(q=["null", A]), {"q": {"x": 2}},
         record(p=(A, {"x": 1}), q="A"), {"p": {"x": 1}, "q": {"x": 2}}),
        (record(p=NODE, q="Node"), {"p": {"v": 1, "next": None}, "q": {"v": 2, "next": None}},
         record(q=NODE), {"q": {"v": 2, "next": None}}),
        (record(p=["null", A], q="A"), {"p": None, "q": {"x": 2}},
         record(p=["null", C], q=A), {"p": None, "q": {"x": 2}}),
    ],
)  # fmt: skip
def test_writer_schema_is_resolved(writer: Json, value: object, reader: Json, found: Json) -> None:
    assert read(reader, value, writer) == found
    plain = decoder(reader, writer).open(as_python=True).try_decode(avro(1, writer, value))
    assert plain[1] is None


def test_type_missing_in_reader_is_refused_alone() -> None:
    writer, reader = record(u=["null", A, "long"]), record(u=["string", "long"])
    opened = decoder(reader, writer).open()
    assert opened(avro(1, writer, {"u": 5})) == {"u": {"member1": 5}}
    _, why = opened.try_decode(avro(1, writer, {"u": {"x": 1}}))
    assert "it has record where the reader's schema has string or long" in str(why)


BYTES_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
FIXED = {"type": "fixed", "name": "F", "size": 2}
OF_ALL = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]


@pytest.mark.parametrize(
    ("branches", "data", "member", "found"),
    [
        (["null", DATE, "long"], b"\x04\x0a", 1, 5),
        (["int", {"type": "long", "logicalType": "time-micros"}], b"\x02\x0a", 1, 5),
        (["float", "double", "string"], b"\x02" + struct.pack("<d", 0.1), 1, 0.1),
        (["float", "double", "string"], b"\x02" + struct.pack("<d", 1e300), 1, 1e300),
        (["float", "double", "string"], b"\x00" + struct.pack("<f", 0.5), 0, 0.5),
        (["null", "double", "long"], b"\x04\x82\x80\x80\x80\x80\x80\x80\x20", 1, (1 << 53) + 1),
        (["null", "float", "int"], b"\x04\x82\x80\x80\x10", 1, (1 << 24) + 1),
        (OF_ALL, b"\x0e\x04DE", 6, "DE"),
        (OF_ALL, b"\x0c\x04DE", 5, b"DE"),
        (["null", "string", "bytes"], b"\x04\x04\xff\xfe", 1, b"\xff\xfe"),
        (["null", "string", "bytes"], b"\x04\x06abc", 1, b"abc"),
        (["null", BYTES_DECIMAL, "string"], b"\x04\x06abc", 1, "abc"),
        (["null", "string", KIND], b"\x04\x02", 1, "b"),
        (["null", "bytes", FIXED], b"\x04ab", 1, b"ab"),
    ],
)
def test_union_value_keeps_its_type(
    branches: Json, data: bytes, member: int, found: object
) -> None:
    """Fastavro alone would promote it to the first branch that fits, and lose digits."""
    for more in ({}, {"b": ("int", 0)}):
        opened = decoder(record(u=branches, **more), record(u=branches)).open()
        array, reasons = decoded_array(opened, [framed(1, data)], [()])
        assert reasons == [None]
        values = array.to_pylist()[0]["u"].items()
        assert {name: one for name, one in values if one is not None} == {f"member{member}": found}


@pytest.mark.parametrize(
    ("written", "value", "reader", "member", "found"),
    [
        (KIND, "b", ["null", KIND, "string"], 0, "b"),
        (KIND, "b", ["null", "string", KIND], 1, "b"),
        (KIND, "b", ["null", KIND, "long"], 0, "b"),
        (["null", KIND], "b", ["null", "string", KIND], 1, "b"),
        (FIXED, b"ab", ["null", "bytes", FIXED], 1, b"ab"),
        (FIXED, b"ab", ["null", FIXED, "long"], 0, b"ab"),
        ("int", 5, ["null", "double", "long"], 1, 5),
        ("float", 0.5, ["string", "double"], 1, 0.5),
        ("string", "ab", ["long", "bytes"], 1, b"ab"),
        (["int", "string"], 5, ["string", "double", "boolean"], 1, 5.0),
    ],
)
def test_type_moved_into_a_union_is_in_the_nearest_branch(
    written: Json, value: object, reader: Json, member: int, found: object
) -> None:
    values = read(record(u=reader), {"u": value}, record(u=written))["u"].items()
    assert {name: one for name, one in values if one is not None} == {f"member{member}": found}


def test_json_text_of_a_recursive_record_has_no_branch_numbers() -> None:
    node = record(next=["null", "R"], other=["int", "string"])
    value = {"next": {"next": {"next": None, "other": 3}, "other": "x"}, "other": 1}
    found = read(node, value)["next"]
    assert json.loads(found) == value["next"]


def test_json_text_of_a_recursive_record_has_nan_and_infinities_as_text() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    node = record(next=["null", "R"], d="double")
    value = {"next": {"next": {"next": None, "d": -math.inf}, "d": math.nan}, "d": math.inf}
    found = json.loads(read(node, value)["next"], parse_constant=refuse)
    assert found == {"next": {"next": None, "d": "-Infinity"}, "d": "NaN"}


@pytest.mark.parametrize("levels", [5_000, 500_000])
def test_deeply_nested_payload_is_refused(levels: int) -> None:
    """Fastavro reads recursively in C, and would overflow the stack."""
    opened = decoder(NODE).open()
    value, reason = opened.try_decode(framed(1, b"\x02\x02" * levels + b"\x02\x00"))
    assert value is None
    assert reason == "value: it nests more than 100 records in each other"
    assert opened.try_decode(framed(1, b"\x02\x02" * 90 + b"\x02\x00"))[1] is None


@pytest.mark.parametrize(
    ("items", "reader"),
    [
        ("null", record(i=("int", 0), a={"type": "array", "items": "null"})),
        ("null", record(i=("int", 0))),
        ({**record(n="null"), "name": "In"}, None),
        ({"type": "fixed", "name": "F", "size": 0}, None),
    ],
)
def test_too_many_items_without_bytes_are_refused(items: Json, reader: Json) -> None:
    writer = record(a={"type": "array", "items": items})
    opened = decoder(reader or writer, writer).open()
    for block in (
        b"\x80\x80\x80\x80\x80\x40",
        b"\xff\xff\xff\xff\xff\x3f\x00",
        b"\x80\x64" * 5_000,
    ):
        value, why = opened.try_decode(framed(1, block + b"\x00"))
        assert value is None
        assert why == "value: it has more than 10000 items that take no byte"
    assert opened.try_decode(framed(1, b"\x06\x03\x00\x00"))[1] is None


def doubling(levels: int, *leaf: Json) -> dict[str, Any]:
    """Return optional records, each with twice as many values as the one before."""
    fields: list[Any] = [{"name": "leaf", "type": one} for one in leaf]
    parts: list[Any] = []
    for level in range(levels):
        parts.append({"type": "record", "name": f"R{level}", "fields": fields})
        fields = [{"name": name, "type": f"R{level}"} for name in "ab"]
    return record(**{f"f{at}": ["null", part] for at, part in enumerate(parts)})


@pytest.mark.parametrize("leaf", [(), ("null",), ({"type": "fixed", "name": "F", "size": 0},)])
def test_doubling_records_without_bytes_are_refused(leaf: tuple[Any, ...]) -> None:
    """A payload of 60 bytes may hold 2^60 values."""
    opened = decoder(record(), doubling(60, *leaf)).open()
    value, why = opened.try_decode(framed(1, b"\x00" * 59 + b"\x02"))
    assert value is None
    assert why == "value: it has more than 10000 items that take no byte"
    assert opened.try_decode(framed(1, b"\x00" * 10 + b"\x02" + b"\x00" * 49))[1] is None


def test_doubling_records_with_bytes_end_with_the_payload() -> None:
    opened = decoder(record(), doubling(60, "int")).open()
    assert "does not fit schema 1" in str(opened.try_decode(framed(1, b"\x00" * 59 + b"\x02"))[1])
    four = b"\x00\x00\x02" + b"\x02" * 4 + b"\x00" * 57
    assert opened.try_decode(framed(1, four))[1] is None


def test_items_without_bytes_are_allowed_in_proportion_to_the_payload() -> None:
    item = {**record(v="int", n="null"), "name": "Item"}
    writer = record(a={"type": "array", "items": item})
    assert read(writer, {"a": [{"v": 1, "n": None}] * 20_000}) is not None
    wide = {**record(v="int", **{f"n{at}": "null" for at in range(100)}), "name": "Item"}
    opened = decoder(record(), record(a={"type": "array", "items": wide})).open()
    why = opened.try_decode(framed(1, b"\x80\x64" + b"\x02" * 6400 + b"\x00"))[1]
    assert why == "value: it has more than 10000 items that take no byte"


def test_truncated_payload_of_a_record_in_itself_is_refused() -> None:
    """Fastavro may read booleans after the end of the payload without end, and crash."""
    endless = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "flag", "type": "boolean"}, {"name": "inner", "type": "R"}],
    }
    why = decoder(endless).open().try_decode(framed(1, b"\x00\x01"))[1]
    assert why == "value: it is truncated, or has a branch that its schema does not have"


def test_long_chain_of_records_is_refused() -> None:
    parts = [
        {"type": "record", "name": f"R{at}", "fields": [{"name": "f", "type": f"R{at - 1}"}]}
        for at in range(1, 3_000)
    ]
    parts.insert(0, {**record(v="int"), "name": "R0"})
    chain = record(**{f"f{at}": ["null", part] for at, part in enumerate(parts)})
    opened = decoder(record(), chain).open()
    why = opened.try_decode(framed(1, b"\x00" * 2_999 + b"\x02\x02"))[1]
    assert why == "value: it nests more than 100 records in each other"


TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [
        {"name": "before", "type": {"type": "map", "values": ["null", "string", "double"]}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "raw", "type": {"type": "fixed", "name": "Raw", "size": 3}},
        {"name": "is", "type": ["boolean", "float", "bytes"]},
        {"name": "children", "type": {"type": "array", "items": "Tree"}},
        {"name": "named", "type": {"type": "map", "values": "Tree"}},
    ],
}


def test_size_check_passes_over_all_types() -> None:
    leaf = {"before": {"a": "x", "b": 0.5}, "kind": "B", "raw": b"abc", "is": 0.5}
    value: dict[str, Any] = {**leaf, "children": [], "named": {}}
    for _ in range(90):
        value = {**leaf, "children": [], "named": {"only": value}}
    payload = avro(1, TREE, {**leaf, "children": [value], "named": {}})
    opened = decoder(TREE).open()
    assert opened.try_decode(payload)[1] is None
    assert "it is truncated" in str(opened.try_decode(payload[:-4])[1])
    for _ in range(20):
        value = {**leaf, "children": [value], "named": {}}
    assert "nests more than 100" in str(opened.try_decode(avro(1, TREE, value))[1])


@pytest.mark.parametrize("rest", [b"\xff" * 400_000, b"\x80" * 10 + b"\x00" + b"\x02\x02" * 5_000])
def test_overlong_number_is_refused(rest: bytes) -> None:
    value, why = decoder(NODE).open().try_decode(framed(1, rest))
    assert value is None
    assert "a number of more than 10 bytes" in str(why)


@pytest.mark.parametrize(
    "invalid",
    [
        {},
        {"precision": 0},
        {"precision": True},
        {"precision": "4"},
        {"precision": 4, "scale": 5},
        {"precision": 4, "scale": -1},
        {"precision": 40, "type": "fixed", "size": 2, "name": "F"},
    ],
)
def test_invalid_decimal_is_bytes(invalid: dict[str, Any]) -> None:
    """Avro's specification: ignore the logical type."""
    kind = {"type": "bytes", "logicalType": "decimal", **invalid}
    opened = decoder(record(d=kind)).open()
    assert opened.column.ddl == "STRUCT<`d`: BINARY>"
    del kind["logicalType"]
    assert opened(avro(1, record(d=kind), {"d": b"ab"})) == {"d": b"ab"}


@pytest.mark.parametrize("kind", ["bytes", "fixed"])
def test_schema_with_excessive_decimal_precision_is_refused(kind: str) -> None:
    one = {"type": kind, "name": "D", "size": 1 << 30, "logicalType": "decimal"}
    small, large = ({**one, "precision": digits} for digits in (10_000, 10_001))
    for within in (large, {"type": "array", "items": ["null", {"type": "map", "values": large}]}):
        opened = decoder(record(), record(d=within)).open()
        value, why = opened.try_decode(framed(1, b"\x02\x05"))
        assert value is None
        assert "a decimal has a precision of 10001; the maximum is 10000" in str(why)
        with pytest.raises(UndecodableError, match="precision of 10001"):
            decoder(record(d=within)).open()
    assert decoder(record(d=small)).open().column.ddl == "STRUCT<`d`: STRING>"


@pytest.mark.parametrize("as_python", [True, False])
@pytest.mark.parametrize("precision", [4, 60])
def test_decimal_beyond_its_precision_is_refused(*, precision: int, as_python: bool) -> None:
    """Fastavro would round it."""
    kind = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 2}
    opened = decoder(record(d=kind)).open(as_python=as_python)
    for sign in (1, -1):
        largest = (sign * (10**precision - 1)).to_bytes(32, "big", signed=True)
        value, why = opened.try_decode(framed(1, b"\x40" + largest))
        exact = Decimal(sign * (10**precision - 1)).scaleb(-2, Context(prec=precision))
        assert why is None
        assert value["d"] == (exact if as_python or precision == 4 else format(exact, "f"))
        larger = (sign * 10**precision).to_bytes(32, "big", signed=True)
        value, why = opened.try_decode(framed(1, b"\x40" + larger))
        assert value is None
        assert f"more digits than its precision of {precision}" in str(why)


UUID = {"type": "string", "logicalType": "uuid"}


@pytest.mark.parametrize("as_python", [True, False])
@pytest.mark.parametrize(
    ("reader", "writer"), [(UUID, UUID), ("string", UUID), (UUID, "string"), (["null", UUID], UUID)]
)
def test_uuid_keeps_its_spelling(*, reader: Json, writer: Json, as_python: bool) -> None:
    for text in ("{0000000A-0000-0000-0000-00000000000F}", "0000000a0000000000000000000000ff"):
        payload = avro(1, record(id="string"), {"id": text})
        opened = decoder(record(id=reader), record(id=writer)).open(as_python=as_python)
        assert opened.try_decode(payload) == ({"id": text}, None)


@pytest.mark.parametrize("as_python", [True, False])
@pytest.mark.parametrize("kind", ["timestamp", "local-timestamp"])
def test_nanoseconds_are_refused_in_another_unit(*, kind: str, as_python: bool) -> None:
    nanos = {"type": "long", "logicalType": f"{kind}-nanos"}
    payload = avro(1, record(t="long"), {"t": 5_000})
    for unit in ("micros", "millis"):
        wanted = {"type": "long", "logicalType": f"{kind}-{unit}"}
        for unlike in (wanted, ["null", wanted]):
            opened = decoder(record(t=unlike), record(t=nanos)).open(as_python=as_python)
            value, why = opened.try_decode(payload)
            assert value is None
            assert f"{kind}-nanos" in str(why)
    for reader in (nanos, "long"):
        opened = decoder(record(t=reader), record(t=nanos)).open(as_python=as_python)
        assert opened.try_decode(payload) == ({"t": 5_000}, None)


@pytest.mark.parametrize(
    ("plain", "logical", "day"),
    [("int", "time-millis", 86_400_000), ("long", "time-micros", 86_400_000_000)],
)
def test_time_outside_of_a_day_is_refused(plain: str, logical: str, day: int) -> None:
    """Fastavro would wrap it."""
    opened = decoder(record(t={"type": plain, "logicalType": logical})).open()
    for inside in (0, day - 1):
        assert opened(avro(1, record(t=plain), {"t": inside})) == {"t": inside}
    for outside in (-1, day):
        _, why = opened.try_decode(avro(1, record(t=plain), {"t": outside}))
        assert "outside of one day" in str(why)


def test_records_do_not_share_defaults() -> None:
    array = {"type": "array", "items": "string"}
    inner = {**record(names=(array, [])), "name": "In"}
    reader = record(
        i="int",
        tags=(array, []),
        inner=(inner, {"names": ["a"]}),
        by_name=({"type": "map", "values": "int"}, {}),
    )
    writer = record(i="int")
    opened = decoder(reader, writer).open(as_python=True)
    first = opened(avro(1, writer, {"i": 1}))
    first["tags"].append("x")
    first["inner"]["names"].append("x")
    first["by_name"]["x"] = 1
    second = opened(avro(1, writer, {"i": 2}))
    assert second == {"i": 2, "tags": [], "inner": {"names": ["a"]}, "by_name": {}}


def test_union_of_both_time_types_is_refused() -> None:
    millis = {"type": "int", "logicalType": "time-millis"}
    micros = {"type": "long", "logicalType": "time-micros"}
    with pytest.raises(
        UndecodableError, match=r"time-millis and time-micros.*: remove one of them"
    ):
        decoder(record(at=["null", millis, micros])).open()
    assert decoder(record(at=["null", micros])).open().column.ddl == "STRUCT<`at`: BIGINT>"

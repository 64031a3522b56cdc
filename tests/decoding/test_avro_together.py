"""Avro payloads that are decoded together, against the decoder of single payloads."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rebalance.decoding.avro_columns import column_of
from dagster_rebalance.decoding.avro_schemas import parse, resolve_many
from dagster_rebalance.decoding.avro_vectors import UnsupportedError, VectorReader
from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from tests.decoding.records import ORDER, Json, avro, decoded_array, framed
from tests.decoding.schema_pairs import pairs, payload_of, values_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.decoding.decoder import OpenDecoder


def opened(reader: Json, *writers: Json) -> OpenDecoder:
    """Return a decoder for writers' schemas with ids from 1."""
    known = {at: SchemaText(json.dumps(one)) for at, one in enumerate(writers, 1)}
    problems = {7: "there is no schema 7"}
    return Decoder(
        "value", "avro", SchemaText(json.dumps(reader)), KnownSchemas(known, problems)
    ).open()


def counted(decoder: OpenDecoder, payloads: Sequence[bytes | None]) -> tuple[Json, list[Any], int]:
    """Return the decoded payloads, the reasons, and how many payloads were decoded together."""
    together = 0

    def many(group: Json) -> tuple[Json, Sequence[int]] | None:
        nonlocal together
        assert decoder.decode_many is not None
        decoded = decoder.decode_many(group)
        together += 0 if decoded is None else len(group) - len(decoded[1])
        return decoded

    array, reasons = decoded_array(
        replace(decoder, decode_many=many), payloads, [()] * len(payloads)
    )
    return array, reasons, together


@pytest.mark.parametrize("has_numpy", [True, False])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_payloads_decoded_together_equal_those_decoded_alone(
    data: st.DataObject, *, has_numpy: bool
) -> None:
    writer, reader = data.draw(pairs())
    other = data.draw(st.sampled_from([writer, reader]))
    payloads: list[bytes | None] = []
    for schema_id, schema in ((1, writer), (2, other)):
        for value in data.draw(st.lists(values_of(schema), max_size=6)):
            payload = payload_of(schema_id, schema, value)
            damage = data.draw(st.sampled_from(["", "", "", "cut", "longer", "flipped", "id"]))
            if damage == "cut":
                payload = payload[: data.draw(st.integers(0, len(payload)))]
            elif damage == "longer":
                payload += data.draw(st.binary(min_size=1, max_size=20))
            elif damage == "flipped":
                at = data.draw(st.integers(0, len(payload) - 1))
                payload = (
                    payload[:at] + data.draw(st.binary(min_size=1, max_size=1)) + payload[at + 1 :]
                )
            elif damage == "id":
                payload = framed(7, payload[5:])
            payloads.append(payload)
    payloads = data.draw(st.permutations([*payloads, None]))
    decoder = opened(reader, writer, other)
    with pytest.MonkeyPatch.context() as patched:
        if not has_numpy:
            patched.setitem(sys.modules, "numpy", None)
        array, reasons = decoded_array(decoder, payloads, [()] * len(payloads))
    alone = decoded_array(replace(decoder, decode_many=None), payloads, [()] * len(payloads))
    assert list(map(_without_address, reasons)) == list(map(_without_address, alone[1]))
    assert array.type == alone[0].type
    assert array.equals(alone[0]) or str(array) == str(alone[0])  # NaN


def _without_address(reason: str | None) -> str:
    return re.sub("0x[0-9a-f]+", "", str(reason))


PEN = {"id": 1, "item": "pen"}
GOOD = avro(1, ORDER, PEN)


def test_good_payloads_are_decoded_together() -> None:
    array, reasons, together = counted(opened(ORDER, ORDER), [GOOD] * 1_200)
    assert (array.to_pylist(), reasons) == ([PEN] * 1_200, [None] * 1_200)
    assert together == 1_200


def test_long_and_short_texts_are_decoded_together() -> None:
    orders = [{"id": at, "item": "é" * length} for at, length in enumerate((0, 3, 90_000, 1))]
    array, reasons, together = counted(
        opened(ORDER, ORDER), [avro(1, ORDER, order) for order in orders]
    )
    assert (array.to_pylist(), reasons, together) == (orders, [None] * 4, 4)


def test_damaged_payload_is_decoded_alone() -> None:
    array, reasons, together = counted(opened(ORDER, ORDER), [*[GOOD] * 700, GOOD[:-1], None])
    assert array.to_pylist() == [*[PEN] * 700, None, None]
    assert reasons[699] is None
    assert "EOFError" in str(reasons[700])
    assert together == 700


@pytest.mark.parametrize("has_numpy", [True, False])
def test_payload_that_takes_the_next_one_is_detected(
    monkeypatch: pytest.MonkeyPatch, *, has_numpy: bool
) -> None:
    """Its string ends exactly where the mark of its successor begins."""
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    decoder = opened(ORDER, ORDER)
    taken = avro(1, ORDER, {"id": 1, "item": "x" * (8 + len(GOOD) - 5)})[:7]
    array, reasons, together = counted(decoder, [taken, GOOD, GOOD])
    assert array.to_pylist() == [None, PEN, PEN]
    assert "EOFError" in str(reasons[0])
    assert together == (2 if has_numpy else 0)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ({"type": "int", "logicalType": "date"}, -719_162, 2_932_896),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            -62_135_596_800_000,
            253_402_300_799_999,
        ),
        (
            {"type": "long", "logicalType": "local-timestamp-micros"},
            -62_135_596_800_000_000,
            253_402_300_799_999_999,
        ),
        ({"type": "int", "logicalType": "time-millis"}, 0, 86_399_999),
        ({"type": "long", "logicalType": "time-micros"}, 0, 86_399_999_999),
    ],
)
def test_times_are_read_as_numbers_within_the_bounds_of_python(
    kind: Json, first: int, last: int
) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "t", "type": kind}]}
    decoder = opened(schema, schema)
    payloads: list[bytes | None] = [
        payload_of(1, schema, {"t": number}) for number in (first, last)
    ]
    array, reasons, together = counted(decoder, payloads)
    alone = decoded_array(replace(decoder, decode_many=None), payloads, [(), ()])
    assert (array, reasons) == alone
    assert (reasons, together) == ([None, None], 2)
    for beyond in (first - 1, last + 1):
        array, reasons, together = counted(decoder, [payload_of(1, schema, {"t": beyond})])
        assert together == 0
        assert reasons != [None]


NESTED = {"type": "record", "name": "In", "fields": [{"name": "x", "type": "int"}]}


@pytest.mark.parametrize(
    ("kind", "is_supported"),
    [
        *[
            (kind, True)
            for kind in ("boolean", "int", "long", "float", "double", "bytes", "string")
        ],
        (["null", "string"], True),
        (["double", "null"], True),
        (["null", NESTED], True),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, True),
        ({"type": "fixed", "name": "F", "size": 2}, True),
        ({"type": "long", "logicalType": "timestamp-micros"}, True),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, True),
        ({"type": "bytes", "logicalType": "decimal", "precision": 60, "scale": 2}, False),
        ({"type": "array", "items": "int"}, False),
        ({"type": "map", "values": "int"}, False),
        (["null", "int", "string"], False),
        ("null", False),
    ],
)
def test_schema_is_read_by_column_only_if_all_of_its_types_are(
    kind: Json, *, is_supported: bool
) -> None:
    fields = [{"name": "a", "type": "int"}, {"name": "b", "type": kind}]
    schema = parse(SchemaText(json.dumps({"type": "record", "name": "R", "fields": fields})))
    pair, _ = resolve_many(schema, schema, {}, 8)
    column = column_of(schema.root, schema.names)
    if is_supported:
        VectorReader(pair, column)
        return
    with pytest.raises(UnsupportedError):
        VectorReader(pair, column)


def test_missing_numpy_leaves_the_columns_to_fastavro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    array, reasons, together = counted(opened(ORDER, ORDER), [*[GOOD] * 700, GOOD[:-1]])
    assert array.to_pylist() == [*[PEN] * 700, None]
    assert "EOFError" in str(reasons[700])
    assert together == 500

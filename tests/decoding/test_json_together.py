"""JSON payloads that are decoded by column, against the decoder of single payloads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from tests.decoding.records import Json, decoded_array, framed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.decoding.decoder import OpenDecoder

NAMES = ("a", "b", "c")
SCALARS = ("string", "integer", "number", "boolean")
NUMBERS = (
    *("0", "1", "-1", "-0", "1.0", "-0.0", "1e3", "1E+2", "1e400", "1e-400", "0.1", "01", "1."),
    *("+1", ".5", "1e", "--1", "9223372036854775807"),
    *("NaN", "-NaN", "+NaN", "nan", "Infinity", "-Infinity", "Inf", "-Inf", "inf"),
    *(
        "9223372036854775808",
        "123456789012345678901234567890",
        "0.1234567890123456789",
        "1" * 400,
        f"{'1' * 400}.5",
    ),
    *("16777217", "9007199254740993", "4.9e-324", "0x1", "1_0", "2.2250738585072011e-308"),
    *("0.30000000000000004", "179769313486231570000", "-9223372036854775809", "1" * 5_000),
)
TEXTS = (
    *('""', '"x"', '"é"', '"null"', r'"\u00e9"', r'"\ud83d\ude00"', r'"\ud83d"', r'"\ude00"'),
    *(r'"\u0000"', r'"\n"', '"\n"', '"\t"', r'"\x"', '"}"', '"{"', "'x'", '"x', r'"\/"', '"1e5"'),
    *('": -0,"', '"2026-01-01T00:00:00Z"', '"\ufeff"', '"\x7f"', '"\u2028"'),
)
SCALAR_TEXTS = {
    "integer": st.integers(-(2**63), 2**63 - 1).map(str),
    "number": st.floats(allow_nan=False, allow_infinity=False).map(repr),
    "string": st.text(max_size=5).map(json.dumps)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\')).map(
        lambda text: f'"{text}"'
    ),
    "boolean": st.sampled_from(["true", "false"]),
    "null": st.just("null"),
}
OTHERS = ("null", "true", "false", "True", "nul", "[]", "{}", "[1]", '{"a": 1}', "")


@st.composite
def schemas(draw: st.DrawFn, levels: int, more: Json) -> Json:
    kinds = [*SCALARS, "object", "array"] if levels else list(SCALARS)
    kind = draw(st.sampled_from(kinds))
    schema: Json = {"type": kind}
    if kind == "object":
        schema = draw(objects(levels - 1, more))
    elif kind == "array":
        schema["items"] = draw(schemas(levels - 1, more))
    form = draw(st.sampled_from(["", "", "", "list", "oneOf", "anyOf", "title"]))
    if form == "list":
        schema["type"] = draw(st.permutations([schema["type"], "null"]))
    elif form in {"oneOf", "anyOf"}:
        schema = {form: draw(st.permutations([schema, {"type": "null"}]))}
    elif form == "title":
        schema |= {"title": "t", "default": None, "format": "uuid", "$comment": "c"}
    return schema


@st.composite
def objects(draw: st.DrawFn, levels: int = 2, more: Json = None) -> Json:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    schema: Json = {
        "type": "object",
        "properties": {name: draw(schemas(levels, more)) for name in names},
        "required": draw(st.lists(st.sampled_from(names), unique=True)),
    }
    return schema if more is None else schema | {"additionalProperties": more}


@st.composite
def texts_of(draw: st.DrawFn, schema: Json) -> str:
    """Return a value of a schema as text, which is often invalid."""
    for choice in ("oneOf", "anyOf"):
        if choice in schema:
            return draw(texts_of(draw(st.sampled_from(schema[choice]))))
    kind = schema["type"]
    kind = draw(st.sampled_from(kind)) if isinstance(kind, list) else kind
    if draw(st.integers(0, 20)) == 0:
        unusual = {"integer": NUMBERS, "number": NUMBERS, "string": TEXTS}
        own = unusual.get(kind, OTHERS)
        return draw(st.sampled_from(own) | st.sampled_from([*NUMBERS, *TEXTS, *OTHERS]))
    space = draw(st.sampled_from(["", "", " ", "\n", "\r", "\t", "\x0b"]))
    if kind == "object":
        names = [name for name in schema["properties"] if draw(st.integers(0, 8))]
        parts = [(name, draw(texts_of(schema["properties"][name]))) for name in names]
        if draw(st.integers(0, 15)) == 0:
            name = draw(st.sampled_from([*NAMES, "d", "", "A"]))
            parts.append((name, draw(st.sampled_from([*NUMBERS, *TEXTS, *OTHERS]))))
        parts = draw(st.permutations(parts))
        inner = f",{space}".join(f'"{name}":{space}{text}' for name, text in parts)
        return f"{{{inner}}}"
    if kind == "array":
        items = [draw(texts_of(schema["items"])) for _ in range(draw(st.integers(0, 3)))]
        return f"[{f',{space}'.join(items)}]"
    return draw(SCALAR_TEXTS[kind])


@st.composite
def damaged(draw: st.DrawFn, payload: bytes, others: Sequence[bytes]) -> bytes:
    damage = draw(st.sampled_from([""] * 12 + ["cut", "longer", "flipped", "twice", "wrapped"]))
    if damage == "cut":
        return payload[: draw(st.integers(0, len(payload)))]
    if damage == "longer":
        return payload + draw(st.sampled_from([b" ", b"\n", b"}", b"{}", b",{}", b"\x00", b"#"]))
    if damage == "flipped" and payload:
        at = draw(st.integers(0, len(payload) - 1))
        return payload[:at] + draw(st.binary(min_size=1, max_size=1)) + payload[at + 1 :]
    if damage == "twice":
        between = draw(st.sampled_from([b"", b" ", b"\n"]))
        return payload + between + draw(st.sampled_from([payload, *others]))
    return b"[" + payload if damage == "wrapped" else payload


def opened(schema: Json, *, is_framed: bool) -> OpenDecoder:
    text = SchemaText(json.dumps(schema))
    other = SchemaText('{"type": "object"}')
    known = KnownSchemas({1: text, 2: other}, {7: "there is no schema 7"})
    return Decoder("value", "json" if is_framed else "plain_json", text, known).open()


def check(decoder: OpenDecoder, payloads: Sequence[bytes | None]) -> int:
    """Compare both decoders, and return how many payloads were decoded by column."""
    together = 0

    def many(group: Json) -> Any:  # noqa: ANN401 - of pyarrow, which has no types
        nonlocal together
        assert decoder.decode_many is not None
        decoded = decoder.decode_many(group)
        together += 0 if decoded is None else len(group) - len(decoded[1])
        return decoded

    names = [()] * len(payloads)
    array, reasons = decoded_array(replace(decoder, decode_many=many), payloads, names)
    alone, its_reasons = decoded_array(replace(decoder, decode_many=None), payloads, names)
    assert reasons == its_reasons
    assert array.type == alone.type
    assert repr(array.to_pylist()) == repr(alone.to_pylist())  # distinguishes -0.0
    return together


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_payloads_decoded_by_column_equal_those_decoded_alone(data: st.DataObject) -> None:
    schema = data.draw(objects(more=data.draw(st.sampled_from([None, True, False]))))
    is_framed = data.draw(st.booleans())
    payloads: list[bytes | None] = []
    for _ in range(data.draw(st.integers(0, 12))):
        text = data.draw(texts_of(schema)).encode(errors="surrogatepass")
        payload = data.draw(damaged(text, [one[-5:] for one in payloads if one]))
        if is_framed:
            payload = framed(data.draw(st.sampled_from([1] * 9 + [2, 7])), payload)
        payloads.append(payload)
    payloads = data.draw(st.permutations([*payloads, None]))
    check(opened(schema, is_framed=is_framed), payloads)


PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": "number"},
        "note": {"type": ["null", "string"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"oneOf": [{"type": "null"}, PLACE]},
    },
    "required": ["id"],
}
GOOD = b'{"id": 1, "price": 0.5, "note": null, "tags": ["a"], "place": {"x": 2}, "more": [{}]}'


def test_good_payloads_are_decoded_by_column() -> None:
    assert check(opened(ORDER, is_framed=False), [GOOD] * 1_000) == 1_000
    assert check(opened(ORDER, is_framed=True), [framed(1, GOOD)] * 1_000) == 1_000


@pytest.mark.parametrize(
    "payload",
    [
        b'{"id": 1',
        b'{"id": 1.0}',
        b'{"id": 1}{"id": 2}',
        b'{"id": 1e3}',
        b'{"id": null}',
        b'{"price": 1}',
        b'{"id": 1, "id": 2}',
        b'{"id": 1, "tags": [null]}',
        b'{"id": 1, "place": {"x": null}}',
        b'{"id": 1, "x": 1e400}',
        b'{"id": 1, "x": %s}' % (b"1" * 5_000),
        b'{"id": 1, "x": %s}' % (b"[" * 301 + b"]" * 301),
        b'{"id": 1, "note": "\\ude00"}',
        b'{"id": 1, "note": "\xff"}',
        b'{"id": 1, "price": -0}',
        b'{"id": 1,\n"price": 1}',
        b' {"id": 1}',
        b"null",
        b"",
        None,
    ],
)
def test_unusual_payload_is_decoded_alone(payload: bytes | None) -> None:
    payloads = [*[GOOD] * 500, payload, *[GOOD] * 499]
    together = check(opened(ORDER, is_framed=False), payloads)
    assert 950 <= together <= 999


@pytest.mark.parametrize(
    "place",
    ['"id": 1, "price": %s', '"id":%s', '"id": 1, "tags": [%s]', '"id": 1, "more": [1,%s]'],
)
def test_unusual_value_has_the_result_of_a_payload_alone(place: str) -> None:
    decoder = opened(ORDER, is_framed=False)
    for text in (*NUMBERS, *TEXTS, *OTHERS):
        check(decoder, [f"{{{place % text}}}".encode(), GOOD])


@pytest.mark.parametrize(
    "change",
    [
        {"minProperties": 1},
        {"patternProperties": {"x": {"type": "string"}}},
        {"additionalProperties": {"type": "string"}},
        {"allOf": [{"required": ["price"]}]},
        {"required": ["other"]},
        {"type": ["object", "null"]},
        {"properties": {"id": {"type": "integer", "minimum": 0}}},
        {"properties": {"id": {"type": "string", "pattern": "x"}}},
        {"properties": {"id": {"enum": [1]}}},
        {"properties": {"id": {}}},
        {"properties": {"id": True}},
        {"properties": {"id": {"type": ["integer", "string"]}}},
        {"properties": {"id": {"$ref": "#/definitions/id"}}, "definitions": {"id": {}}},
        {"properties": {"id": {"type": "array"}}},
        {"properties": {"id": {"oneOf": [{"type": "null"}, {"type": ["null", "string"]}]}}},
        {"properties": {"id": PLACE | {"additionalProperties": False}}},
    ],
)
def test_schema_with_other_rules_is_not_read_by_column(change: Json) -> None:
    assert opened(ORDER | {"required": []} | change, is_framed=False).decode_many is None

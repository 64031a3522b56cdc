"""JSON: columns, validation, and refused payloads."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from tests.decoding.records import Json, decoded_array, framed

ORDER = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": ["null", "number"]},
        "item": {"oneOf": [{"type": "null"}, {"type": "string"}]},
        "tags": {"type": "object", "additionalProperties": {"type": "integer"}},
        "lines": {"type": "array", "items": {"$ref": "#/definitions/line"}},
        "free": {"type": "object"},
        "either": {"type": ["string", "integer"]},
        "sold": {"type": "boolean"},
    },
    "definitions": {
        "line": {"type": "object", "properties": {"sub": {"$ref": "#/definitions/line"}}}
    },
}


def text(schema: Json, *references: tuple[str, Any]) -> SchemaText:
    return SchemaText(json.dumps(schema), tuple((n, json.dumps(one)) for n, one in references))


def decoder(reader: SchemaText, *writers: SchemaText) -> Decoder:
    """Return a decoder for writers' schemas with ids from 1."""
    known = KnownSchemas(dict(enumerate(writers or (reader,), 1)))
    return Decoder("value", "json", reader, known)


def payload(value: object, schema_id: int = 1) -> bytes:
    return framed(schema_id, json.dumps(value).encode())


def test_column_of_each_json_type() -> None:
    opened = decoder(text(ORDER)).open()
    assert opened.column.ddl == (
        "STRUCT<`id`: BIGINT, `price`: DOUBLE, `item`: STRING, `tags`: MAP<STRING, BIGINT>, "
        "`lines`: ARRAY<STRUCT<`sub`: STRING>>, `free`: STRING, `either`: STRING, `sold`: BOOLEAN>"
    )
    value: dict[str, Any] = {
        "id": 1.0,
        "price": 2,
        "item": None,
        "tags": {"a": 1},
        "lines": [{"sub": {"sub": {}}}],
        "free": {"x": [1]},
        "either": 7,
        "more": "left out",
    }
    array, reasons = decoded_array(opened, [payload(value)], [()])
    assert reasons == [None]
    assert array.to_pylist() == [
        {
            "id": 1,
            "price": 2.0,
            "item": None,
            "tags": [("a", 1)],
            "lines": [{"sub": '{"sub": {}}'}],
            "free": '{"x": [1]}',
            "either": "7",
            "sold": None,
        }
    ]


@pytest.mark.parametrize(
    ("number", "found"),
    [
        ("9007199254740993.0", 9007199254740993),
        ("9.007199254740993e15", 9007199254740993),
        ("1.2345678901234567e18", 1234567890123456700),
        ("-1E3", -1000),
        ("9007199254740993.5", None),
        ("1e-400", None),
        ("1e-99999999999999999999", None),
    ],
)
def test_integer_is_exact_or_refused(number: str, found: int | None) -> None:
    schema = {"type": "object", "properties": {"i": {"type": "integer"}}}
    opened = decoder(text(schema)).open()
    value, why = opened.try_decode(framed(1, f'{{"i": {number}}}'.encode()))
    assert value == (None if found is None else {"i": found})
    assert (why is None) == (found is not None)


@pytest.mark.parametrize("own", [{}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}])
@pytest.mark.parametrize(
    ("number", "rule", "is_valid"),
    [
        ("19.99", 0.01, True),
        ("0.07", 0.01, True),
        ("0.071", 0.01, False),
        ("1e308", 5e-324, True),
        ("0.07000000000000000001", 0.01, False),
        ("9007199254740993.0", 2, False),
        ("1e-999999999", 0.01, False),
        ("1e-99999999999999999999", 0.01, False),
        ("15", 5, True),
        ("16", 5, False),
        ("740295e24", 5, True),
        ("73344443922802487.50", 5, False),
    ],
)
def test_multiple_of_is_checked_in_exact_decimals(
    *, own: dict[str, str], number: str, rule: float, is_valid: bool
) -> None:
    """19.99 / 0.01 is 1998.9999999999998 in doubles."""
    amount = {"oneOf": [{"type": "null"}, {"type": "number", "multipleOf": rule}]} | own
    properties = {"x": {"$ref": "amount.json"}, "multipleOf": True}
    schema = {"type": "object", "properties": properties}
    opened = decoder(text(schema | own, ("amount.json", amount))).open()
    _, why = opened.try_decode(framed(1, f'{{"x": {number}}}'.encode()))
    assert (why is None) == is_valid, why


def test_json_text_keeps_the_digits_of_numbers() -> None:
    schema = {"type": "object", "properties": {"a": {}, "n": {"type": "number"}}}
    opened = decoder(text(schema)).open()
    free = '{"x\\"": [9007199254740993.0, 1.5, "y", null], "z": 1.00000000000000000001, "e": {}}'
    value, why = opened.try_decode(
        framed(1, f'{{"n": 0.10000000000000000001, "a": {free}}}'.encode())
    )
    assert (value, why) == ({"n": 0.1, "a": free}, None)
    as_python = decoder(text(schema)).open(as_python=True)
    number = as_python(framed(1, b'{"n": 0.10000000000000000001}'))["n"]
    assert (number, pickle.loads(pickle.dumps(number))) == (0.1, 0.1)  # noqa: S301 - of the test


@pytest.mark.parametrize("choice", ["oneOf", "anyOf"])
def test_optional_field_of_confluents_java_serializer_is_a_column(choice: str) -> None:
    none = {"type": "null", "title": "Not included"}
    properties = {
        "name": {choice: [none, {"type": "string"}]},
        "id": {choice: [{"type": "integer"}, none]},
    }
    opened = decoder(text({"type": "object", "properties": properties})).open()
    assert opened.column.ddl == "STRUCT<`name`: STRING, `id`: BIGINT>"
    values: list[dict[str, Any]] = [{"name": "bob", "id": 5}, {"name": None, "id": None}]
    array, reasons = decoded_array(opened, map(payload, values), [()] * 2)
    assert (array.to_pylist(), reasons) == (values, [None, None])


DRAFT_2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
INTEGER = {"type": "integer"}
BASE = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
BESIDE: dict[str, Any] = {"properties": {"b": INTEGER}, "definitions": {"base": BASE}}
REF = {"$ref": "#/definitions/base"}
OTHER = {"type": "object", "properties": {"c": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "ddl"),
    [
        ({"type": "object", "allOf": [REF], **BESIDE}, "STRUCT<`b`: BIGINT, `a`: BIGINT>"),
        ({"type": "object", "allOf": [BASE, OTHER], **BESIDE},
         "STRUCT<`b`: BIGINT, `a`: BIGINT, `c`: BIGINT>"),
        ({"allOf": [BASE], **BESIDE}, "STRUCT<`a`: BIGINT, `b`: BIGINT>"),
        ({"anyOf": [{"type": "null"}, REF], **BESIDE}, "STRUCT<`a`: BIGINT, `b`: BIGINT>"),
        ({**REF, **BESIDE, **DRAFT_2020}, "STRUCT<`a`: BIGINT, `b`: BIGINT>"),
        ({**REF, **BESIDE}, "STRUCT<`a`: BIGINT>"),
        ({"type": "object", "anyOf": [BASE, OTHER], **BESIDE}, "STRING"),
        ({"type": "object", "allOf": [{"anyOf": [BASE, OTHER]}], **BESIDE}, "STRING"),
        ({"type": "object", "anyOf": [{"required": ["b"]}, {"required": ["c"]}], **BESIDE},
         "STRUCT<`b`: BIGINT>"),
        ({"type": "object", "anyOf": [{"properties": {"b": {"const": 2}}}, {}], **BESIDE},
         "STRUCT<`b`: BIGINT>"),
        ({"type": "object", "allOf": [{"properties": {"c": {"$ref": "#"}}}], **BESIDE},
         "STRUCT<`b`: BIGINT, `c`: STRING>"),
    ],
)  # fmt: skip
def test_object_has_the_properties_of_all_its_schemas(schema: dict[str, Any], ddl: str) -> None:
    opened = decoder(text(schema)).open()
    assert opened.column.ddl == ddl
    value = {"a": 1, "b": 2}
    array, reasons = decoded_array(opened, [payload(value)], [()])
    assert reasons == [None]
    (found,) = array.to_pylist()
    assert found in (json.dumps(value), {name: value.get(name) for name in found})


def test_object_must_have_the_required_properties_of_all_its_schemas() -> None:
    reader, writer = text({"type": "object", "allOf": [REF], **BESIDE}), text({"type": "object"})
    with pytest.raises(UndecodableError, match="it lacks a, which the reader's schema requires"):
        decoder(reader, writer).open()(payload({"b": 2}))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (payload({"price": 1}), r"does not fit its schema: \$ against the rule required"),
        (payload({"id": "secret"}), r"\$\.id against the rule type"),
        (framed(1, b'{"id": 1'), "not JSON: JSONDecodeError"),
        (framed(1, b'{"id": NaN}'), "NaN is not JSON"),
        (framed(1, b'{"id": 1, "price": 1e400}'), "larger than a double"),
        (framed(1, b'{"id": 1, "item": "\xff"}'), "not JSON: UnicodeDecodeError"),
        (framed(1, b"[" * 100_000), "not JSON: RecursionError"),
        (payload({"id": 1 << 70}), "does not fit its column"),
        (b'{"id": 1}', "byte 123"),
    ],
)
def test_invalid_payload_has_a_reason_and_leaves_others_decoded(given: bytes, reason: str) -> None:
    """The reason names the place and the rule, but never the value."""
    array, reasons = decoded_array(
        decoder(text(ORDER)).open(), [payload({"id": 1}), given, payload({"id": 2})], [()] * 3
    )
    assert [one and one["id"] for one in array.to_pylist()] == [1, None, 2]
    assert [why is None for why in reasons] == [True, False, True]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(reasons[1])
    assert "secret" not in str(reasons[1])


@pytest.mark.parametrize(
    ("rules", "value", "rule"),
    [
        ({"pattern": "^([a-zA-Z0-9_.-]+)+@x$"}, "a" * 60, "pattern"),
        ({"pattern": "(a|a)" * 60 + "$"}, "a" * 61 + "b", "pattern"),
        ({"pattern": "." * 100_000 + "b"}, "a" * 1_000_000, None),
        ({"pattern": ".*a.{250}b.{250}c"}, "a" * 1_000_000, None),
        ({"pattern": "^(?=(a+)+$)"}, "a" * 60 + "!", None),
        ({"patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False},
         {"a" * 60: 1}, "type"),
        ({"patternProperties": {r"^(a+)+\1$": {"type": "string"}}, "additionalProperties": False},
         {"a" * 60 + "!": 1}, None),
        ({"propertyNames": {"pattern": "^(a+)+$"}}, {"a" * 60 + "!": 1}, "propertyNames"),
        ({"uniqueItems": True}, [{"a": number} for number in range(100_000)], None),
        ({"uniqueItems": True}, [{"a": 1}, {"a": 1}], "uniqueItems"),
    ],
)  # fmt: skip
def test_rule_is_checked_in_linear_time_or_ignored(
    rules: dict[str, Any], value: object, rule: str | None
) -> None:
    free = text({"type": "object"})
    for inner in (rules, {"$schema": "http://json-schema.org/draft-06/schema#", **rules}):
        writer = text({"properties": {"v": {"allOf": [inner]}}})
        _, why = decoder(free, free, writer).open().try_decode(payload({"v": value}, 2))
        assert (why is None) == (rule is None), why
        assert rule is None or f"the rule {rule}" in str(why)


OPERATOR = {"left": {"$ref": "#/definitions/e"}, "right": {"$ref": "#/definitions/e"}}
EXPRESSION: dict[str, Any] = {
    "$ref": "#/definitions/e",
    "definitions": {
        "e": {
            "oneOf": [
                {"type": "object", "required": ["n"], "additionalProperties": False,
                 "properties": {"n": {"type": "number"}}},
                *({"type": "object", "required": ["left", "right"],
                   "properties": {**OPERATOR, "op": {"const": name}}} for name in ("add", "mul")),
            ]
        }
    },
}  # fmt: skip


def expression(levels: int, leaf: object) -> dict[str, Any]:
    value: dict[str, Any] = {"n": leaf}
    for _ in range(levels):
        value = {"op": "mul", "left": value, "right": {"n": 2}}
    return value


def test_recursive_schema_is_validated_once_per_part() -> None:
    opened = decoder(text({}), text({}), text(EXPRESSION)).open()
    assert opened.try_decode(payload(expression(60, 1), 2))[1] is None
    assert opened.try_decode(payload(expression(60, "secret"), 2))[1] == (
        "value: it does not fit its schema"
    )


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("place", ["", "items", "additionalProperties"])
@pytest.mark.parametrize("own", [{}, DRAFT_2020, {"$id": "http://shop.example.com/x.json"}])
def test_schema_with_doubling_steps_is_refused(
    keyword: str, place: str, own: dict[str, Any]
) -> None:
    levels = 40
    doubled: dict[str, Any] = {f"a{levels}": {"type": "string"}}
    for at in range(levels):
        part: dict[str, Any] = {"$ref": f"#/definitions/a{at + 1}"}
        part = {place: part} if place else part
        doubled[f"a{at}"] = {keyword: [part, dict(part)]}
    schema = {"allOf": [{"$ref": "#/definitions/a0"}], "definitions": doubled, **own}
    opened = decoder(text({}), text({}), text(schema)).open()
    _, why = opened.try_decode(payload(1, 2))
    assert "its validation may take more than 500,000,000 steps" in str(why)


@pytest.mark.parametrize("keyword", ["unevaluatedProperties", "unevaluatedItems"])
def test_expensive_unevaluated_schema_is_refused_before_compilation(keyword: str) -> None:
    definitions: dict[str, Any] = {"a20": {"type": "string"}}
    for at in range(20):
        part = {"$ref": f"#/definitions/a{at + 1}"}
        definitions[f"a{at}"] = {"anyOf": [part, part], keyword: part}
    schema = {"$ref": "#/definitions/a0", "definitions": definitions, **DRAFT_2020}
    opened = decoder(text({}), text({}), text(schema)).open()
    assert "may take more than 500,000,000 steps" in str(opened.try_decode(payload(1, 2))[1])


def test_union_of_200_types_is_validated() -> None:
    types = [
        {"type": "object", "required": ["type", f"f{at}"],
         "properties": {"type": {"const": f"t{at}"}, **{f"f{at + n}": INTEGER for n in range(30)}}}
        for at in range(200)
    ]  # fmt: skip
    opened = decoder(text({}), text({"oneOf": types})).open()
    value = {"type": "t7", "f7": 1, "f8": 2}
    assert opened.try_decode(payload(value))[1] is None
    assert opened.try_decode(payload(value | {"f8": "x"}))[1] is not None


def test_commas_in_a_string_are_not_counted_as_values() -> None:
    schema = text({"anyOf": [{"type": "object"} for _ in range(1_000)]})
    _, why = decoder(schema, schema).open().try_decode(payload({"csv": "," * 600_000}))
    assert why is None


def test_deeply_nested_value_is_refused() -> None:
    opened = decoder(text({}), text({"items": {"$ref": "#"}})).open()
    assert opened.try_decode(framed(1, b"[" * 290 + b"]" * 290))[1] is None
    assert opened.try_decode(framed(1, b"[" + b"[]," * 1000 + b"1]"))[1] is None
    _, why = opened.try_decode(framed(1, b"[" * 600 + b"]" * 600))
    assert "nests more than 300 lists and objects" in str(why)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_any_unicode_encoding_is_decoded(encoding: str) -> None:
    opened = decoder(text({"type": "object", "properties": {"a": {}, "n": {}}})).open()
    given = '{"a": "é", "n": [1.00000000000000000001]}'
    assert opened.try_decode(framed(1, given.encode(encoding))) == (
        {"a": '"\\u00e9"', "n": "[1.00000000000000000001]"},
        None,
    )


def test_schemas_may_be_deep_except_for_one_value() -> None:
    for form, is_refused in (("properties", False), ("allOf", True)):
        definitions: dict[str, Any] = {"a900": {"type": "string"}}
        for at in range(900):
            inner = {"$ref": f"#/definitions/a{at + 1}"}
            definitions[f"a{at}"] = {form: [inner] if form == "allOf" else {"x": inner}}
        writer = text({"allOf": [{"$ref": "#/definitions/a0"}], "definitions": definitions})
        _, why = decoder(text({}), text({}), writer).open().try_decode(payload({"x": {"x": {}}}, 2))
        assert (why is not None) == is_refused, why
        assert not is_refused or "more than 50 schemas for one value" in str(why)


def test_half_of_a_surrogate_pair_is_validated() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}, "b": {}}}
    opened = decoder(text(schema)).open()
    assert opened.try_decode(framed(1, b'{"b": ["\\ud83d"]}')) == ({"b": '["\\ud83d"]'}, None)
    assert "rule maxLength" in str(opened.try_decode(framed(1, b'{"a": "abc\\ud83d"}'))[1])


def test_properties_may_be_named_like_rules() -> None:
    names: dict[str, Any] = {
        "pattern": {"type": "string", "pattern": "^A.[0-9]{1,2}$"},
        "uniqueItems": {"type": "integer"},
        "patternProperties": {"type": "string", "x.y": "?"},
        "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    }
    opened = decoder(text({"type": "object", "properties": names})).open()
    assert opened.column.ddl == (
        "STRUCT<`pattern`: STRING, `uniqueItems`: BIGINT, `patternProperties`: STRING, "
        "`contentEncoding`: STRING>"
    )
    fitting = {"pattern": "AB1", "uniqueItems": 1, "contentEncoding": "no base64"}
    assert opened.try_decode(payload(fitting))[1] is None
    assert r"$.pattern against the rule pattern" in str(
        opened.try_decode(payload({"pattern": "AB"}))[1]
    )


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-04/schema#",
        "https://json-schema.org/draft/2020-12/schema",
    ],
)
def test_schema_may_refer_to_a_metaschema(dialect: str) -> None:
    schema = {"type": "object", "properties": {"schema": {"$ref": dialect}, "id": INTEGER}}
    opened = decoder(text(schema)).open()
    assert opened.column.ddl.startswith("STRUCT<`schema`: ST")
    assert opened.try_decode(payload({"id": 1, "schema": {"type": "string"}}))[1] is None
    assert "it does not fit its schema" in str(
        opened.try_decode(payload({"schema": {"type": 5}}))[1]
    )


@pytest.mark.parametrize("dialect", ["http://json-schema.org/schema#", "http://team.example.com/x"])
def test_unknown_dialect_is_draft_7(dialect: str) -> None:
    opened = decoder(text({"$schema": dialect, **BASE})).open()
    assert opened.try_decode(payload({"a": 1})) == ({"a": 1}, None)
    assert opened.try_decode(payload({"a": "x"}))[1] is not None


def test_reader_schema_applies_to_python_values() -> None:
    reader = text(
        {
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": {"type": "integer"},
                "tags": {"type": "object", "additionalProperties": {"type": "integer"}},
                "line": {"type": "object", "properties": {"sub": {"type": "string"}}},
                "free": {"type": "object"},
                "either": {"type": ["string", "integer"]},
            },
        }
    )
    opened = decoder(reader, text({})).open(as_python=True)
    value = {"id": 5, "tags": {"a": 1}, "line": {"sub": "s"}, "free": {"b": [1.5]}, "either": 7}
    more = value | {"secret": "x", "line": {"sub": "s", "secret": "x"}}
    assert opened.try_decode(payload(more)) == (value, None)
    assert opened.try_decode(payload({"id": 1.0})) == ({"id": 1}, None)
    for wrong, why in (
        ({"tags": {}}, "it lacks id, which the reader's schema requires"),
        ({"id": "x"}, "has str where the reader's schema has integer"),
        ([1], "has list where the reader's schema has dict"),
        (value | {"tags": {"a": "x"}}, "has str where the reader's schema has integer"),
    ):
        found, reason = opened.try_decode(payload(wrong))
        assert found is None
        assert why in str(reason)


@pytest.mark.parametrize("own", [None, "http://shop.example.com/order.json"])
def test_references_are_resolved_without_network(own: str | None) -> None:
    address = {"type": "object", "properties": {"city": {"type": "string"}}}
    order: dict[str, Any] = {"type": "object", "properties": {"to": {"$ref": "address.json"}}}
    if own:
        order["$id"] = own
    opened = decoder(text(order, ("address.json", address))).open()
    assert opened.column.ddl == "STRUCT<`to`: STRUCT<`city`: STRING>>"
    with pytest.raises(UndecodableError, match="rule type"):
        opened(payload({"to": {"city": 1}}))
    with pytest.raises(UndecodableError, match="unusable JSON schema"):
        decoder(text(order)).open()


def test_longest_matching_reference_wins() -> None:
    order = {"type": "object", "properties": {"a": {"$ref": "money/type.json"}}}
    references = (("type.json", {"type": "string"}), ("money/type.json", {"type": "integer"}))
    for own in ({}, {"$id": "http://shop.example.com/order.json"}):
        assert decoder(text(order | own, *references)).open()(payload({"a": 5})) == {"a": 5}


def test_reason_is_printable_and_limited() -> None:
    opened = decoder(text({"type": "object", "additionalProperties": {"type": "integer"}})).open()
    _, alone = opened.try_decode(framed(1, b'{"\\ud800": "x"}'))
    _, long = opened.try_decode(payload({"a" * 1_000_000: "x"}))
    assert alone is not None
    assert "against the rule type" in alone.encode().decode()
    _, escape = opened.try_decode(payload({"\x1b]0;owned\x07": "x"}))
    assert str(escape).endswith(r"$.\x1b]0;owned\x07 against the rule type")
    assert len(str(long)) == 2_000


@pytest.mark.parametrize("wrong", ["", "{", '{"type": "nothing"}', "7"])
def test_invalid_reader_schema_is_refused(wrong: str) -> None:
    with pytest.raises(UndecodableError, match="unusable JSON schema"):
        decoder(SchemaText(wrong)).open()

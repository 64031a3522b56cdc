"""The validator agrees with jsonschema on random schemas and values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.json_validation import JsonValidator
from dagster_rebalance.decoding.wire_format import SchemaText

if TYPE_CHECKING:
    from tests.decoding.records import Json

NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(-4, 4) | st.sampled_from([0.5, 1.5, 2.0])
LEAVES = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "ab", "é"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
RULES: st.SearchStrategy[Any] = st.booleans() | st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "minimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 0.5, 0.25]),
        "maxLength": st.integers(0, 2),
        "pattern": st.sampled_from(["^a", "b$", "a|b"]),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "maxItems": st.integers(0, 2),
        "uniqueItems": st.booleans(),
    },
)


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    below = inner | st.just({"$ref": "#"})  # in the same place, it would have no end
    return st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, below, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "[bc]"]), below),
            "additionalProperties": below,
            "propertyNames": below,
            "items": below | st.lists(below, min_size=1, max_size=3),
            "contains": below,
            "dependencies": st.dictionaries(NAMES, inner, max_size=1),
            **dict.fromkeys(("allOf", "anyOf", "oneOf"), several),
            **dict.fromkeys(("not", "if", "then", "else"), inner),
        },
    )


SCHEMAS = st.recursive(RULES, _combined, max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, VALUES)
def test_validator_agrees_with_jsonschema(schema: Json, value: object) -> None:
    check, text, reason = (
        JsonValidator(SchemaText(json.dumps(schema))),
        json.dumps(value).encode(),
        "",
    )
    try:
        check.validate(value, text, is_exact=True)
    except UndecodableError as problem:
        reason = str(problem)
    assert Draft7Validator(schema).is_valid(value) == (reason == ""), reason
    assert reason == "" or "does not fit its schema" in reason

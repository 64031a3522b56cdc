"""The JSON schema by which `dg` checks a file, so that it names the word that is wrong.

Dagster lets each value also be text, because a template is one: a schema with `anyOf`. With it any
word will do for a choice or a number, and of a block with one wrong word a validator can say only
that it is neither a block nor text.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

_TEXT = {"type": "string"}
_NUMBERS = {"number", "integer", "boolean"}
_TEMPLATE = {"type": "string", "pattern": r"\{[{%]"}


@cache
def with_precise_schema(model: type[BaseModel]) -> type[BaseModel]:
    """The same model, with a schema that takes text for a choice or a number only as a template."""

    class Precise(model):  # type: ignore[valid-type,misc] # mypy wants a class, not a value
        @classmethod
        def model_json_schema(cls, *arguments: Any, **more: Any) -> dict[str, Any]:
            schema = super().model_json_schema(*arguments, **more)
            precise: dict[str, Any] = _precise(schema, schema.pop("$defs", {}))
            return precise

    Precise.__name__ = model.__name__
    return Precise


def _precise(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_precise(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
        del schema["$ref"]
    precise = {name: _precise(value, definitions) for name, value in schema.items()}
    ways = precise.get("anyOf", [])
    blocks = [way for way in ways if way.get("type") in {"object", "array"}]
    if len(blocks) == 1 and all(way.keys() == {"type"} for way in ways if way not in blocks):
        del precise["anyOf"]
        return {**blocks[0], **precise, "type": [way["type"] for way in ways]}
    if any("enum" in way or way.get("type") in _NUMBERS for way in ways):
        precise["anyOf"] = [_TEMPLATE if way == _TEXT else way for way in ways]
    return precise

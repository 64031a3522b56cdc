"""The limit of columns: a registered schema of 2 kB may name one type 2^90 times."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance import ConfigurationError, SchemaRegistryResource, plain_json
from tests.decoding.records import proto_file, proto_message
from tests.decoding.test_protobuf import registered

if TYPE_CHECKING:
    from tests.decoding.http_registry import HttpRegistry

LEVELS = 90
TOO_MANY = r"the value of orders.*more than 20,000 columns"


def test_avro_schema_with_too_many_columns_is_refused(registry: HttpRegistry) -> None:
    schema: object = {"type": "record", "name": "a0", "fields": []}
    for at in range(LEVELS):
        fields = [{"name": "l", "type": schema}, {"name": "r", "type": f"a{at}"}]
        schema = {"type": "record", "name": f"a{at + 1}", "fields": fields}
    registry.register("deep", schema)
    encoding = SchemaRegistryResource(url=registry.url).avro(subject="deep")
    with pytest.raises(ConfigurationError, match=r"\(subject deep, version latest\).*columns"):
        encoding.decoder("value", frozenset({"orders"}))


def test_protobuf_schema_with_too_many_columns_is_refused(registry: HttpRegistry) -> None:
    messages = [
        proto_message(f"A{at}", l=f".shop.A{at + 1}", r=f".shop.A{at + 1}") for at in range(LEVELS)
    ]
    file = proto_file("shop", [*messages, proto_message(f"A{LEVELS}", x="int64")])
    registered(registry, "orders-value", file)
    encoding = SchemaRegistryResource(url=registry.url).protobuf()
    with pytest.raises(ConfigurationError, match=TOO_MANY):
        encoding.decoder("value", frozenset({"orders"}))


@pytest.mark.parametrize(
    "form",
    [
        {"type": "object", "properties": {"l": 0, "r": 0}},
        {"type": "object", "properties": {"l": 0}, "allOf": [{"properties": {"r": 0}}]},
        {"type": "object", "properties": {"x": {}}, "allOf": [0, 0]},
    ],
)
def test_json_schema_with_too_many_columns_is_refused(form: dict[str, object]) -> None:
    levels = 20  # below the depth that is refused
    definitions: dict[str, object] = {f"a{levels}": {"type": "string"}}
    for at in range(levels):
        inner = json.dumps({"$ref": f"#/definitions/a{at + 1}"})
        definitions[f"a{at}"] = json.loads(json.dumps(form).replace("0", inner))
    schema = {"allOf": [{"$ref": "#/definitions/a0"}], "definitions": definitions}
    with pytest.raises(ConfigurationError, match=TOO_MANY):
        plain_json(json.dumps(schema)).decoder("value", frozenset({"orders"}))


def test_schema_with_a_thousand_columns_is_accepted() -> None:
    names = {f"c{at}": {"type": ["null", "string"]} for at in range(1_000)}
    schema = {"type": "object", "properties": names}
    decoder = plain_json(json.dumps(schema)).decoder("value", frozenset({"orders"}))
    assert decoder.open().column.ddl.count("STRING") == 1_000

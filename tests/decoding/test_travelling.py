"""Decoding on Spark's executors, which have the libraries of the formats but not this package."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyspark.cloudpickle import cloudpickle

from dagster_rebalance import ConfigurationError, SchemaRegistryResource
from dagster_rebalance.decoding.batches import batch_decoder, undecodable_finder
from dagster_rebalance.decoding.decoder import Decoder, Format, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from dagster_rebalance.kafka.schema_registry import Registry
from dagster_rebalance.orchestration.batch.records import with_known_schemas
from dagster_rebalance.spark.decoded_frame import pickle_by_value
from tests.decoding.http_registry import PASSWORD, USER
from tests.decoding.records import ORDER, avro, framed, proto_file, proto_message
from tests.decoding.test_protobuf import registered, written

if TYPE_CHECKING:
    from pathlib import Path

    from tests.decoding.http_registry import HttpRegistry

ELSEWHERE = """
import pickle, sys
sys.modules["dagster_rebalance"] = None
import pyarrow as pa
function, payloads = pickle.load(open(sys.argv[1], "rb"))
count = len(payloads)
columns = {
    "key": pa.nulls(count, pa.binary()),
    "value": pa.array(payloads, pa.binary()),
    "topic": pa.array(["orders"] * count),
    "partition": pa.array([0] * count),
    "offset": pa.array(range(count)),
    "timestamp": pa.nulls(count, pa.timestamp("us", "UTC")),
    "headers": pa.nulls(count, pa.string()),
}
batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
shown = "value" if "value" in (found := next(iter(function([batch])))).schema.names else "offset"
print(found.column(shown).to_pylist())
"""


@pytest.mark.parametrize("kind", ["avro", "protobuf", "json", "reasons"])
def test_executor_code_is_pickled_without_the_package(
    kind: str, registry: HttpRegistry, tmp_path: Path
) -> None:
    good, schema = avro(1, ORDER, {"id": 1, "item": "pen"}), SchemaText(json.dumps(ORDER))
    format_: Format = "avro"
    if kind == "protobuf":
        file = proto_file("shop", [proto_message("Order", id="int64")])
        registered(registry, "orders", file)
        schema, format_ = (
            Registry({"url": registry.url}).of_subject("PROTOBUF", "orders", 1),
            "protobuf",
        )
        good = framed(1, written(file, "shop.Order", id=1), b"\x00")
    elif kind == "json":
        schema = SchemaText('{"type": "object", "properties": {"id": {"type": "integer"}}}')
        good, format_ = framed(1, b'{"id": 1}'), "json"
    decoders = [Decoder("value", format_, schema, KnownSchemas({1: schema}))]
    finds = kind == "reasons"
    function = undecodable_finder(decoders) if finds else batch_decoder(decoders, "keep")
    pickle_by_value()
    (tmp_path / "work").write_bytes(cloudpickle.dumps((function, [good, b"poison"])))  # type: ignore[no-untyped-call]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "work")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    item = ", 'item': 'pen'" if kind == "avro" else ""
    found = "[1]" if finds else f"[{{'id': 1{item}}}, None]"
    assert done.stdout.strip() == found


def test_plan_has_neither_login_nor_address_of_the_registry(registry: HttpRegistry) -> None:
    registry.login = "password"
    schema_id = registry.register("orders-value", ORDER)
    its = SchemaRegistryResource(url=registry.url, username=USER, password=PASSWORD)
    decoder = its.avro().decoder("value", frozenset({"orders"}))
    known = with_known_schemas([decoder], {"value": [schema_id, 99]})
    pickle_by_value()
    sent = cloudpickle.dumps(batch_decoder(known, "fail"))  # type: ignore[no-untyped-call]
    assert b"Order" in sent
    for secret in (PASSWORD, registry.url.removeprefix("http://")):
        assert secret.encode() not in sent


def test_more_than_100_unknown_schemas_fail_the_batch(registry: HttpRegistry) -> None:
    registry.register("orders-value", ORDER)
    its = SchemaRegistryResource(url=registry.url)
    decoder = its.avro().decoder("value", frozenset({"orders"}))
    with pytest.raises(ConfigurationError, match="more than 100 schemas"):
        with_known_schemas([decoder], {"value": range(2, 1000)})
    assert len(registry.requests) < 110

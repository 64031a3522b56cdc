"""docs/decoding.md: its examples load and work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance import (
    KafkaConsumerResource,
    KafkaSparkResource,
    SchemaRegistryResource,
    build_kafka_batch_defs,
)
from tests.decoding.http_registry import http_registry
from tests.decoding.records import ORDER, avro, batch
from tests.docs.blocks import ROOT, block_with, run_block

if TYPE_CHECKING:
    import pytest

PAGE = "docs/decoding.md"


def pasted(block: str) -> dict[str, Any]:
    """The names of a block as a user pastes it."""
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, block, names)
    return names


def test_spark_decoding_example_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGISTRY_PASSWORD", raising=False)
    names = pasted(block_with(PAGE, "python", "def orders("))
    kafka = KafkaConsumerResource(bootstrap_servers="nowhere:9092", group_id="a", topics=["b"])
    defs = build_kafka_batch_defs(
        kafka=kafka,
        assets=[names["orders"]],
        spark=KafkaSparkResource(),
        resources={"registry": names["registry"]},
    )
    dg.Definitions.validate_loadable(defs)


def test_decoding_example_without_spark_reads_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = pasted((ROOT / "docs/decoding/without_spark.py").read_text())
    with http_registry() as registry:
        schema_id = registry.register("orders-value", json.dumps(ORDER))
        given = batch(avro(schema_id, ORDER, {"id": 77, "item": "pen"}), None)
        done = dg.materialize(
            [names["refunds"]],
            resources={
                "kafka_batch": given,
                "registry": SchemaRegistryResource(url=registry.url),
            },
        )
    (made,) = done.asset_materializations_for_node("refunds")
    assert made.metadata["dagster/row_count"].value == 1
    assert "0 77" in capsys.readouterr().out

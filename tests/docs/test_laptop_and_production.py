"""docs/laptop-and-production.md: the code loads with the variables of either environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from tests.docs.blocks import ROOT, block_with, run_block

if TYPE_CHECKING:
    import pytest

PAGE = "docs/laptop-and-production.md"
VARIABLES = {
    "laptop": {"KAFKA_BROKERS": "localhost:9092", "SPARK_CONNECT_URL": ""},
    "production": {
        "ENVIRONMENT": "production",
        "KAFKA_BROKERS": "kafka:9092",
        "KAFKA_GROUP": "orders",
        "KAFKA_USERNAME": "orders",
        "KAFKA_PASSWORD": "secret",
        "SPARK_CONNECT_URL": "sc://spark.example.com:15002/;use_ssl=true",
    },
}
OPTIONAL = ("ENVIRONMENT", "KAFKA_GROUP", "KAFKA_USERNAME", "KAFKA_PASSWORD")


def _loaded(monkeypatch: pytest.MonkeyPatch, environment: str) -> tuple[dg.Definitions, Any]:
    """Return the definitions, and their resources as a run has them."""
    for name in OPTIONAL:
        monkeypatch.delenv(name, raising=False)
    for name, value in VARIABLES[environment].items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, block_with(PAGE, "python", "IS_PRODUCTION"), names)
    defs: dg.Definitions = names["defs"]
    dg.Definitions.validate_loadable(defs)
    keys = ("kafka", "spark")
    with dg.build_resources({key: (defs.resources or {})[key] for key in keys}) as resources:
        return defs, resources


def test_the_laptop_has_a_group_and_a_spark_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _, resources = _loaded(monkeypatch, "laptop")
    assert resources.spark.is_local
    assert resources.kafka.group_id == "orders-laptop"
    assert resources.kafka.security_protocol is None


def test_production_has_the_login_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    _, resources = _loaded(monkeypatch, "production")
    assert not resources.spark.is_local
    assert resources.kafka.group_id == "orders"
    assert resources.kafka.security_protocol == "SASL_SSL"


def test_each_variable_of_the_code_is_in_the_table() -> None:
    text = (ROOT / PAGE).read_text()
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    named = {name for variables in VARIABLES.values() for name in variables}
    assert all(f"`{name}`" in table for name in named | {"ORDERS_PATH"})

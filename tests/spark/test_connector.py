"""Which Kafka connector belongs to which pyspark."""

from __future__ import annotations

from importlib import metadata, util

import pytest

from dagster_rebalance.core.errors import ConfigurationError
from dagster_rebalance.spark import connector


def test_the_connector_has_the_version_of_the_installed_pyspark() -> None:
    """A connector of another Spark fails at run time with missing methods."""
    assert (
        connector.kafka_connector_package()
        == f"org.apache.spark:spark-sql-kafka-0-10_2.13:{metadata.version('pyspark')}"
    )


@pytest.mark.parametrize("version", ["3.5.6", "5.0.0", "4.1.0.dev1", "4.0"])
def test_another_spark_is_refused_by_its_version(version: str) -> None:
    """A coordinate that does not exist would be found out only when a run starts."""
    with pytest.raises(ConfigurationError, match=rf"pyspark {version} .*pyspark>=4.0,<5"):
        connector.connector_coordinate(version, "2.13")


def test_a_missing_pyspark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is optional: who lacks it must learn what to install."""

    def nothing_is_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing_is_installed)
    with pytest.raises(ConfigurationError, match=r"dagster-rebalance\[spark\]"):
        connector.kafka_connector_package()


def test_a_pyspark_without_jars_is_taken_to_have_the_scala_of_spark_4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Connect-only client has no jars to ask, but its server still needs the connector."""
    monkeypatch.setattr(util, "find_spec", lambda _name: None)
    assert connector.installed_scala_version() == "2.13"

"""Which Kafka connector belongs to which pyspark."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, util
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from dagster_rebalance import KafkaSparkResource
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.session import connector

if TYPE_CHECKING:
    from pathlib import Path

NOTHING_IS_SERVED = """
<ivysettings>
  <settings defaultResolver="empty"/>
  <resolvers><filesystem name="empty">
    <ivy pattern="{folder}/[artifact].xml"/><artifact pattern="{folder}/[artifact].jar"/>
  </filesystem></resolvers>
</ivysettings>
"""
USED = """
import sys
from dagster_rebalance import KafkaSparkResource
settings = {"spark.jars.ivySettings": sys.argv[1], "spark.jars.ivy": sys.argv[2]}
KafkaSparkResource(spark_config=settings).spark_session
"""


def test_the_connector_has_the_version_of_the_installed_pyspark() -> None:
    """A connector of another Spark fails at run time with missing methods."""
    assert (
        connector.kafka_connector_package()
        == f"org.apache.spark:spark-sql-kafka-0-10_2.13:{metadata.version('pyspark')}"
    )


DELTA = {"spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension"}
LAKE = {"spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog"}


@pytest.mark.parametrize(
    ("version", "config", "packages"),
    [
        ("4.0.0", {}, []),
        ("4.0.0", DELTA, ["io.delta:delta-spark_2.13:4.0.0"]),
        (
            "4.1.1",
            {**DELTA, **LAKE},
            [
                "io.delta:delta-spark_4.1_2.13:4.1.0",
                "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
            ],
        ),
        ("4.1.1", {**DELTA, "spark.jars.packages": "io.delta:delta-spark_2.13:4.0.1"}, []),
        ("4.2.0", {**LAKE, "spark.jars": "/jars/iceberg-spark-runtime-4.2_2.13-1.12.0.jar"}, []),
        ("4.2.0", {"spark.app.name": "plain"}, []),
    ],
)
def test_a_table_format_comes_in_the_version_for_the_installed_spark(
    monkeypatch: pytest.MonkeyPatch, version: str, config: dict[str, str], packages: list[str]
) -> None:
    """That of another minor fails at run time with missing methods, and all partitions stop."""
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    assert connector.table_packages(config) == packages


def test_a_spark_without_a_known_table_format_is_refused_where_definitions_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the session is on a server, which has packages of its own."""
    monkeypatch.setattr(metadata, "version", lambda _name: "4.2.0")
    with pytest.raises(ConfigurationError, match=r"Delta Lake.*pyspark 4\.2\.0.*==4\.1\.1"):
        KafkaSparkResource(spark_config=DELTA)
    KafkaSparkResource(spark_config=DELTA, remote="sc://spark.example.com:15002")


def test_the_newest_pyspark_of_the_extra_has_both_table_formats() -> None:
    """Else the first batch of whoever installs the extra fails."""
    minor = connector.ADVISED.rpartition(".")[0]
    assert minor in connector.DELTA_LAKE
    assert minor in connector.ICEBERG


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


def test_the_extra_ends_with_a_spark_whose_connector_can_be_fetched() -> None:
    """Pip takes the newest that it may: else a user's first run ends with a missing jar."""
    (wanted,) = (
        Requirement(text)
        for text in metadata.requires("dagster-rebalance") or ()
        if text.startswith("pyspark")
    )
    *minor, patch = connector.ADVISED.split(".")
    assert connector.ADVISED in connector.FETCHED
    assert wanted.specifier.contains(connector.ADVISED)
    assert not wanted.specifier.contains(".".join([*minor, str(int(patch) + 1)]))


@pytest.mark.spark
def test_a_connector_that_cannot_be_fetched_is_told_with_the_way_out(tmp_path: Path) -> None:
    """Spark's own error says that a gateway exited; the cause stands above it, in Ivy's words."""
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(NOTHING_IS_SERVED.format(folder=tmp_path))
    used = subprocess.run(
        [sys.executable, "-c", USED, settings, tmp_path / "ivy"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = used.stderr.splitlines()[-1]
    assert "ConfigurationError: Spark did not start" in said
    assert f"It tried to fetch {connector.kafka_connector_package()}." in said
    assert f"pip install 'pyspark[connect]=={connector.ADVISED}'" in said
    assert "UNRESOLVED DEPENDENCIES" in used.stderr.partition("Traceback")[0]

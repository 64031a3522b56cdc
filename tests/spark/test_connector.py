"""Packages of the Kafka connector and of table formats."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, util
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from dagster_rebalance import KafkaSparkResource
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark import launch

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


def test_connector_has_the_version_of_the_installed_pyspark() -> None:
    assert (
        launch.kafka_connector_package()
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
def test_table_format_has_the_version_for_the_installed_spark(
    monkeypatch: pytest.MonkeyPatch, version: str, config: dict[str, str], packages: list[str]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    assert launch.table_packages(config) == packages


def test_unknown_table_format_is_refused_when_definitions_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: "4.2.0")
    with pytest.raises(ConfigurationError, match=r"Delta Lake.*pyspark 4\.2\.0.*==4\.1\.1"):
        KafkaSparkResource(spark_config=DELTA)
    KafkaSparkResource(spark_config=DELTA, remote="sc://spark.example.com:15002")


def test_advised_pyspark_has_both_table_formats() -> None:
    minor = launch.ADVISED.rpartition(".")[0]
    assert minor in launch.DELTA_LAKE
    assert minor in launch.ICEBERG


@pytest.mark.parametrize("version", ["3.5.6", "5.0.0", "4.1.0.dev1", "4.0"])
def test_unsupported_spark_is_refused(version: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"pyspark {version} .*pyspark>=4.0,<5"):
        launch.connector_coordinate(version, "2.13")


def test_missing_pyspark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:

    def nothing_is_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing_is_installed)
    with pytest.raises(ConfigurationError, match=r"dagster-rebalance\[spark\]"):
        launch.kafka_connector_package()


def test_pyspark_without_jars_has_the_scala_of_spark_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: None)
    assert launch.installed_scala_version() == "2.13"


def test_extra_allows_no_spark_without_a_fetchable_connector() -> None:
    (wanted,) = (
        Requirement(text)
        for text in metadata.requires("dagster-rebalance") or ()
        if text.startswith("pyspark")
    )
    *minor, patch = launch.ADVISED.split(".")
    assert launch.ADVISED in launch.FETCHED
    assert wanted.specifier.contains(launch.ADVISED)
    assert not wanted.specifier.contains(".".join([*minor, str(int(patch) + 1)]))


@pytest.mark.spark
def test_unavailable_connector_is_explained(tmp_path: Path) -> None:
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(NOTHING_IS_SERVED.format(folder=tmp_path))
    used = subprocess.run(
        [sys.executable, "-c", USED, settings, tmp_path / "ivy"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    error = used.stderr.splitlines()[-1]
    assert "ConfigurationError: Spark did not start" in error
    assert f"It tried to fetch {launch.kafka_connector_package()}." in error
    assert f"pip install 'pyspark[connect]=={launch.ADVISED}'" in error
    assert "UNRESOLVED DEPENDENCIES" in used.stderr.partition("Traceback")[0]

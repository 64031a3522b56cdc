"""Builds of Spark's Kafka connector and of table formats for the installed pyspark.

pyspark ships without the connector. A session (or the Spark Connect server) names it in
`spark.jars.packages`, in exactly Spark's version and for Spark's Scala version, and Delta Lake and
Iceberg in a version for Spark's minor.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SPARK_4_SCALA_VERSION = "2.13"
FETCHED = ("4.0.0", "4.1.1", "4.2.0")
"""The newest release of each minor of Spark whose connector and its dependencies could be fetched
from Maven Central (docs/reading.md)."""
ADVISED = "4.1.1"
"""The newest release that the extra allows: Spark 4.2 had neither Delta Lake nor Iceberg."""
DELTA_LAKE = {
    "4.0": "io.delta:delta-spark_2.13:4.0.0",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.1.0",
}
"""Delta Lake for each minor of Spark."""
ICEBERG = {
    "4.0": "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0",
    "4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
}
"""Iceberg for each minor of Spark."""
# Name, packages of its classes in settings, name of its jars, and coordinates.
_TABLE_FORMATS = (
    ("Delta Lake", ("io.delta.", "org.apache.spark.sql.delta."), "delta-spark", DELTA_LAKE),
    ("Iceberg", ("org.apache.iceberg.",), "iceberg-spark-runtime", ICEBERG),
)
_JARS = ("spark.jars", "spark.jars.packages")
_NO_JVM = "JAVA_GATEWAY_EXITED"


def kafka_connector_package() -> str:
    """Return the Maven coordinate of the Kafka connector for the installed pyspark.

    For pyspark 4.0.0 it is `org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0`.

    Raises:
        ConfigurationError: pyspark is missing, or is not a release of Spark 4.
    """
    return connector_coordinate(installed_pyspark_version(), installed_scala_version())


def connector_coordinate(pyspark_version: str, scala_version: str) -> str:
    """Return the coordinate for a pyspark and a Scala version; only Spark 4 is supported."""
    if re.fullmatch(r"4\.\d+\.\d+", pyspark_version) is None:
        msg = (
            f"pyspark {pyspark_version} is installed, but dagster-rebalance needs a release of "
            "Spark 4 (pyspark>=4.0,<5): install one with `pip install 'dagster-rebalance[spark]'`."
        )
        raise ConfigurationError(msg)
    return f"org.apache.spark:spark-sql-kafka-0-10_{scala_version}:{pyspark_version}"


def table_packages(config: Mapping[str, str]) -> list[str]:
    """Return the Maven coordinates that the settings of a session lack for its table formats.

    A session uses a format if one of its settings names a class of it. Jars in the installed Spark
    count as given.

    Raises:
        ConfigurationError: No package is known for the installed pyspark, or it is not installed.
    """
    # An environment variable has no value before a run.
    texts = {key: value for key, value in config.items() if type(value) is str}
    given = ",".join(texts.get(name, "") for name in _JARS)
    missing = []
    classes = ",".join(value for key, value in texts.items() if key not in _JARS)
    for name, packages, jar, known in _TABLE_FORMATS:
        is_used = any(package in classes for package in packages)
        if is_used and jar not in given and not any(_jars(jar)):
            version = installed_pyspark_version()
            minor = version.rpartition(".")[0]
            if minor not in known:
                msg = (
                    f"spark_config uses {name}, but no package of it is known for pyspark "
                    f"{version}: install another one (pip install 'pyspark[connect]=={ADVISED}'), "
                    "or name the package in spark.jars.packages"
                )
                raise ConfigurationError(msg)
            missing.append(known[minor])
    return missing


def coordinates_text(known: Mapping[str, str]) -> str:
    """Return the packages and their Spark versions for a message."""
    return ", ".join(f"{package} for Spark {minor}" for minor, package in known.items())


def explained_start(error: Exception, packages: str | None) -> ConfigurationError | None:
    """Return an error that explains why a session did not start; None if the JVM is not the cause.

    `packages` are the coordinates that the session fetches.
    """
    if _NO_JVM not in str(error):
        return None
    fetched = (
        f"It tried to fetch {packages}. If stderr says UNRESOLVED DEPENDENCIES, a jar is not "
        "available: install a pyspark whose connector is (the newest known are "
        f"{', '.join(FETCHED)}; pip install 'pyspark[connect]=={ADVISED}'), name the settings of "
        "your mirror in spark.jars.ivySettings, or give the jars as files in spark.jars. "
        if packages
        else ""
    )
    msg = (
        "Spark did not start: its Java process exited. The cause is in the stderr of this process, "
        f"above this error. {fetched}Spark 4 needs Java 17 to 23."
    )
    return ConfigurationError(msg)


def installed_pyspark_version() -> str:
    """Return the version of the installed pyspark or pyspark-client without importing it.

    Raises:
        ConfigurationError: Neither is installed.
    """
    for distribution in ("pyspark", "pyspark-client"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    msg = (
        "pyspark is not installed: install the extra with `pip install 'dagster-rebalance[spark]'`."
    )
    raise ConfigurationError(msg)


def installed_scala_version() -> str:
    """Return the Scala version of the installed Spark's jars, or Spark 4's if it has none."""
    for jar in _jars("spark-core_"):
        if match := re.match(r"spark-core_(\d+\.\d+)-", jar.name):
            return match[1]
    return _SPARK_4_SCALA_VERSION


def _jars(name: str) -> Iterator[Path]:
    spec = util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from (Path(place) / "jars").glob(f"{name}*.jar")

"""Which builds of Spark's Kafka connector and of table formats belong to the installed pyspark.

pyspark ships without the connector: it must be named in `spark.jars.packages` of the session (or of
the Spark Connect server), in exactly Spark's version and built for Spark's Scala version. So must
Delta Lake and Iceberg, in a version for Spark's minor. Owns these coordinates and the decision
which pyspark is supported. Starts nothing.
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

# Spark 4 is built for this Scala version only; a pyspark without jars (the Connect-only client)
# cannot be asked.
SPARK_4_SCALA_VERSION = "2.13"

FETCHED = ("4.0.0", "4.1.1", "4.2.0")
"""The newest of each minor of Spark whose connector, with all that it depends on, could be fetched
from Maven Central (docs/spark.md)."""

ADVISED = "4.1.1"
"""The extra ends with it: for Spark 4.2 there was neither Delta Lake nor Iceberg."""

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

# What settings of a session name, what its jars are called, and the packages.
_TABLE_FORMATS = (
    ("Delta Lake", ("io.delta.", "org.apache.spark.sql.delta."), "delta-spark", DELTA_LAKE),
    ("Iceberg", ("org.apache.iceberg.",), "iceberg-spark-runtime", ICEBERG),
)
_JARS = ("spark.jars", "spark.jars.packages")
_NO_JVM = "JAVA_GATEWAY_EXITED"


def kafka_connector_package() -> str:
    """The Maven coordinate of the Kafka connector for the installed pyspark.

    Returns:
        For pyspark 4.0.0: `org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0`.

    Raises:
        ConfigurationError: pyspark is missing, or is not a release of Spark 4.
    """
    return connector_coordinate(installed_pyspark_version(), installed_scala_version())


def connector_coordinate(pyspark_version: str, scala_version: str) -> str:
    """The Maven coordinate of the Kafka connector for a pyspark and a Scala version.

    Raises:
        ConfigurationError: The version is not a release of Spark 4.
    """
    if re.fullmatch(r"4\.\d+\.\d+", pyspark_version) is None:
        msg = (
            f"pyspark {pyspark_version} is installed, but dagster-rebalance needs a release of "
            "Spark 4 (pyspark>=4.0,<5): "
            "install one with `pip install 'dagster-rebalance[spark]'`."
        )
        raise ConfigurationError(msg)
    return f"org.apache.spark:spark-sql-kafka-0-10_{scala_version}:{pyspark_version}"


def table_packages(config: Mapping[str, str]) -> list[str]:
    """The Maven coordinates of the table formats that a session uses and does not name.

    A session uses a format if one of its settings names a class of it. Jars that came with the
    installed Spark count as named.

    Args:
        config: The settings of the session.

    Raises:
        ConfigurationError: No package is known for the installed pyspark, or none is installed.
    """
    # A variable of the environment has no value before a run.
    texts = {key: value for key, value in config.items() if type(value) is str}
    given = ",".join(texts.get(name, "") for name in _JARS)
    wanted = []
    classes = ",".join(value for key, value in texts.items() if key not in _JARS)
    for name, packages, jar, known in _TABLE_FORMATS:
        used = any(package in classes for package in packages)
        if used and jar not in given and not any(_jars(jar)):
            version = installed_pyspark_version()
            minor = version.rpartition(".")[0]
            if minor not in known:
                msg = (
                    f"spark_config uses {name}, of which no package is known for pyspark "
                    f"{version}: install one that has it (pip install 'pyspark[connect]=={ADVISED}'"
                    f"), or name the package in spark.jars.packages"
                )
                raise ConfigurationError(msg)
            wanted.append(known[minor])
    return wanted


def coordinates_text(known: Mapping[str, str]) -> str:
    """Say which package belongs to which Spark, for people."""
    return ", ".join(f"{package} for Spark {minor}" for minor, package in known.items())


def explained_start(error: Exception, packages: str | None) -> ConfigurationError | None:
    """Say what a session means that did not start, and what to do.

    Args:
        error: pyspark's own.
        packages: The coordinates that the session was to fetch.

    Returns:
        None where the JVM was not the cause.
    """
    if _NO_JVM not in str(error):
        return None
    fetched = (
        f"It was to fetch {packages}. Where that says UNRESOLVED DEPENDENCIES, a jar is not served "
        "from here: take a pyspark whose connector is (the newest known are "
        f"{', '.join(FETCHED)}; pip install 'pyspark[connect]=={ADVISED}'), name the settings of "
        "your mirror in spark.jars.ivySettings, or give the jars as files in spark.jars. "
        if packages
        else ""
    )
    msg = (
        "Spark did not start: its Java program ended at once. Why is in the stderr of this "
        f"process, above this. {fetched}Spark 4 needs Java 17 to 23."
    )
    return ConfigurationError(msg)


def installed_pyspark_version() -> str:
    """Return the version of the installed pyspark without importing it.

    The Connect-only pyspark-client counts, too.

    Raises:
        ConfigurationError: Neither is installed.
    """
    for distribution in ("pyspark", "pyspark-client"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    msg = (
        "pyspark is not installed, so no Spark session can be made: install the extra with `pip "
        "install 'dagster-rebalance[spark]'`."
    )
    raise ConfigurationError(msg)


def installed_scala_version() -> str:
    """Return the Scala version of the installed Spark, read off its jars.

    Where pyspark came without jars, it is the only Scala version of Spark 4.
    """
    names = (jar.name for jar in _jars("spark-core_"))
    found = [
        match.group(1) for name in names if (match := re.match(r"spark-core_(\d+\.\d+)-", name))
    ]
    return found[0] if found else SPARK_4_SCALA_VERSION


def _jars(name: str) -> Iterator[Path]:
    """The jars of the installed Spark whose names begin like this."""
    spec = util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from (Path(place) / "jars").glob(f"{name}*.jar")

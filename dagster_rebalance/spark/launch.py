"""The start of a Spark session: its packages, its settings in a file, and its Python.

pyspark ships without the Kafka connector. A session (or the Spark Connect server) names it in
`spark.jars.packages`, in exactly Spark's version and for Spark's Scala version. Delta Lake and
Iceberg need a version for Spark's minor version.

pyspark puts each setting on the JVM's command line, which every user of the machine can read. The
settings therefore go into a file that only this user can read, until the session has started. JVM
options are always on the command line, so a secret in them is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import sys
import tempfile
from contextlib import contextmanager, suppress
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
_SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_FILE = "--properties-file"
_JVM_OPTIONS = "JavaOptions"
_PYTHON = "PYSPARK_PYTHON"
_REMOTE = "SPARK_REMOTE"
_PACKAGES = "spark.jars.packages"
_IVY = "spark.jars.ivy"
_IVY_OF_SPARK = ".ivy2.5.2"
_LOCK = "dagster-rebalance.lock"
_SECRET_OPTION = re.compile(r"-D\S*(password|secret|token|jaas)\S*=", re.IGNORECASE)


def kafka_connector_package() -> str:
    """Return the Maven coordinate of the Kafka connector for the installed pyspark.

    For pyspark 4.0.0 it is `org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0`.
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

    A session uses a format if one of its settings names a class of the format. Coordinates of jars
    in the installed Spark are not needed.
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
    """Return the version of the installed pyspark or pyspark-client without importing it."""
    for distribution in ("pyspark", "pyspark-client"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    msg = (
        "pyspark is not installed: install the extra with `pip install 'dagster-rebalance[spark]'`."
    )
    raise ConfigurationError(msg)


def installed_scala_version() -> str:
    """Return the Scala version of the installed Spark's jars; without jars, that of Spark 4."""
    for jar in _jars("spark-core_"):
        if match := re.match(r"spark-core_(\d+\.\d+)-", jar.name):
            return match[1]
    return _SPARK_4_SCALA_VERSION


def _jars(name: str) -> Iterator[Path]:
    spec = util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from (Path(place) / "jars").glob(f"{name}*.jar")


@contextmanager
def settings_in_a_file(config: Mapping[str, object]) -> Iterator[None]:
    """Pass settings in a private file to a JVM that pyspark starts in the block.

    Spark still reads spark-defaults.conf.
    """
    for key, value in config.items():
        if key.endswith(_JVM_OPTIONS) and _SECRET_OPTION.search(str(value)):
            msg = (
                f"{key} has a secret, which would be on the command line of a JVM: give the JVM a "
                "file with it."
            )
            raise ConfigurationError(msg)
    before = os.environ.get(_SUBMIT_ARGUMENTS)
    if _FILE in (before or ""):
        msg = (
            f"{_SUBMIT_ARGUMENTS} has {_FILE}, which Spark accepts only once: give those settings "
            "in spark_config, or in conf/spark-defaults.conf."
        )
        raise ConfigurationError(msg)
    # mkstemp makes a file that only its owner can read.
    handle, name = tempfile.mkstemp(prefix="dagster-rebalance-spark-", suffix=".conf")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(
                f"{_escaped(key)}={_escaped(str(value))}\n" for key, value in config.items()
            )
        os.environ[_SUBMIT_ARGUMENTS] = (
            f"--load-spark-defaults {_FILE} {shlex.quote(name)} {before or 'pyspark-shell'}"
        )
        yield
    finally:
        if before is None:
            os.environ.pop(_SUBMIT_ARGUMENTS, None)
        else:
            os.environ[_SUBMIT_ARGUMENTS] = before
        Path(name).unlink()


@contextmanager
def one_fetch_at_a_time(config: Mapping[str, str]) -> Iterator[None]:
    """Lock Ivy's cache against other sessions of this machine that fetch packages.

    If two processes fill one cache, one of them reads files that the other is still writing.
    """
    if not config.get(_PACKAGES):
        yield
        return
    folder = Path(config.get(_IVY) or Path.home() / _IVY_OF_SPARK)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def workers_of_this_python() -> Iterator[None]:
    """Let a session that starts in the block use the Python of this process, with its libraries.

    pyspark would use the first python3 of the PATH. If PYSPARK_PYTHON is set, it takes precedence.
    """
    if _PYTHON in os.environ:
        yield
        return
    os.environ[_PYTHON] = sys.executable
    try:
        yield
    finally:
        del os.environ[_PYTHON]


@contextmanager
def only_the_given_server() -> Iterator[None]:
    """Unset SPARK_REMOTE while a session starts in the block.

    The resource decides whether there is a server. If the variable is set, even to an empty text,
    pyspark starts no local session.
    """
    hidden = os.environ.pop(_REMOTE, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_REMOTE] = hidden


def _escaped(text: str) -> str:
    units = text.encode("utf-16-be")
    numbers = [int.from_bytes(units[index : index + 2], "big") for index in range(0, len(units), 2)]
    return "".join(
        chr(number) if chr(number).isascii() and chr(number).isalnum() else f"\\u{number:04x}"
        for number in numbers
    )

"""A Spark Connect server on a free port of 127.0.0.1, from the installed pyspark.

It has Spark's Kafka connector, and optionally Delta Lake and Iceberg.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.spark import launch
from dagster_rebalance.testing.local.host import accepts_connections, free_port, private_folder
from dagster_rebalance.testing.local.jars import (
    Coordinates,
    JarSet,
    fetch,
    print_on_stderr,
    pyspark_folder,
)
from dagster_rebalance.testing.local.java import find_java
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

START_LIMIT_S = 240.0
SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


def kafka_connector() -> JarSet:
    """Return the jars of Spark's Kafka connector for the installed pyspark, without Spark's own."""
    spark = version("pyspark")
    artifact = Coordinates("org.apache.spark", "spark-sql-kafka-0-10_2.13", spark)
    return JarSet(
        f"spark-kafka-{spark}", (artifact,), excluded=("org.apache.hadoop", "org.scala-lang")
    )


def _table_format(
    name: str, package_by_minor: Mapping[str, str], excluded: tuple[str, ...] = ()
) -> JarSet:
    """Return the jars for the minor version of the installed Spark, or else for Spark 4.0."""
    package = package_by_minor["4.0"]
    with suppress(PackageNotFoundError):
        package = package_by_minor.get(version("pyspark").rpartition(".")[0], package)
    artifact = Coordinates(*package.split(":"))
    return JarSet(f"{name}-{artifact.version}", (artifact,), excluded)


DELTA_LAKE = _table_format(
    "delta", launch.DELTA_LAKE, ("org.antlr", "org.apache.spark", "org.scala-lang")
)
"""Delta Lake for the installed Spark, 4.0 or 4.1."""

ICEBERG = _table_format("iceberg", launch.ICEBERG)
"""Iceberg for the installed Spark, 4.0 or 4.1."""


def table_settings(warehouse: Path) -> dict[str, str]:
    """Return the Spark settings for tables of both formats.

    Delta Lake tables are in Spark's own catalog, or at a path. Iceberg tables are in the catalog
    `lake` below the folder `warehouse`, which only one Spark application may use at a time.
    """
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": warehouse.as_uri(),
        # By default Delta Lake reads its log in 50 tasks.
        "spark.databricks.delta.snapshotPartitions": "2",
    }


@dataclass
class SparkConnectServer:
    """A Spark Connect server, as a context manager. Its files are removed on exit.

    It has no authentication: all users of this machine can run code through it, as you.

    Example:
        ```python
        with SparkConnectServer() as server:
            spark = SparkSession.builder.remote(server.remote).getOrCreate()
        ```

    Attributes:
        master: Spark master.
        memory: The driver's memory.
        settings: Spark settings; they override those of this kit.
        libraries: Jars besides the Kafka connector, such as `DELTA_LAKE`.
        tell: Receives progress messages while the jars are downloaded for the first time.
    """

    master: str = "local[2]"
    memory: str = "1g"
    settings: Mapping[str, str] = field(default_factory=dict)
    libraries: Sequence[JarSet] = ()
    tell: Callable[[str], None] = print_on_stderr
    port: int = field(init=False, default_factory=free_port)
    _folder: Path | None = field(init=False, default=None)
    _process: ChildProcess | None = field(init=False, default=None)
    _launch: Callable[[], ChildProcess] = field(init=False, repr=False)

    @property
    def remote(self) -> str:
        """The value for `SparkSession.builder.remote` and the variable SPARK_REMOTE."""
        return f"sc://127.0.0.1:{self.port}"

    @property
    def process(self) -> ChildProcess:
        """The server's process.

        Raises:
            IllegalStateError: The server is not started.
        """
        if self._process is None:
            msg = "The Spark Connect server is not started: enter it with `with`, or call start()."
            raise IllegalStateError(msg)
        return self._process

    @property
    def logs(self) -> list[Path]:
        """The log file of the server."""
        return [self.process.log]

    def start(self) -> Self:
        """Download the jars if necessary, start the server, and wait until it accepts connections.

        Raises:
            DagsterRebalanceError: The server did not start; the message has the end of its log.
        """
        spark = pyspark_folder()
        own_jars = [
            jar
            for jars in (kafka_connector(), *self.libraries)
            for jar in fetch(jars, tell=self.tell)
            if not (spark / "jars" / jar.name).exists()
        ]
        self._folder = private_folder("spark")
        try:
            self._launch = partial(self._launched, spark, own_jars, self._folder)
            self.restart()
        except BaseException:
            self.stop()
            raise
        return self

    def restart(self) -> None:
        """Restart the server on the same port, also after `kill`.

        Raises:
            DagsterRebalanceError: The server did not start; the message has the end of its log.
        """
        if self._process is not None:
            self._process.stop_at_once()
        self._process = self._launch()
        self._process.wait_until_ready(
            lambda: accepts_connections(self.port), timeout_s=START_LIMIT_S
        )

    def _launched(self, spark: Path, jars: list[Path], folder: Path) -> ChildProcess:
        command: list[str | Path] = [
            spark / "bin" / "spark-submit",
            "--class",
            SERVER_CLASS,
            "--name",
            "dagster-rebalance",
        ]
        command += ["--jars", ",".join(map(str, jars))]
        for key, value in {**self._own_settings(folder), **self.settings}.items():
            command += ["--conf", f"{key}={value}"]
        env = {
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(spark),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        return ChildProcess(
            "Spark Connect", command, log=folder / "spark-connect.log", env=env, cwd=folder
        )

    def _own_settings(self, folder: Path) -> dict[str, str]:
        return {
            "spark.master": self.master,
            "spark.driver.memory": self.memory,
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        self.process.kill()

    def stop(self) -> None:
        """Kill the server and remove its files."""
        if self._process is not None:
            self._process.stop_at_once()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

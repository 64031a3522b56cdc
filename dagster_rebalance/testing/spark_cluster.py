"""A standalone Spark cluster on free ports of 127.0.0.1, from the installed pyspark.

It has a master, and workers that start executors for the Spark applications that use its URL.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from dagster_rebalance.testing.local.host import free_port, private_folder
from dagster_rebalance.testing.local.jars import fetch, print_on_stderr, pyspark_folder
from dagster_rebalance.testing.local.java import find_java
from dagster_rebalance.testing.processes import ChildProcess
from dagster_rebalance.testing.spark_connect import START_LIMIT_S, kafka_connector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

HOST = "127.0.0.1"
DAEMON_MEMORY = "256m"
_ANSWER_LIMIT_S = 60.0


@dataclass
class SparkCluster:
    """A standalone Spark cluster, as a context manager. Its files are removed on exit.

    It has no authentication: all users of this machine can run code through it, as you.

    Example:
        ```python
        with SparkCluster() as cluster:
            spark = KafkaSparkResource(master=cluster.url, spark_config=cluster.session_settings())
        ```

    Attributes:
        workers: Number of workers.
        cores: Cores of each worker for executors. It may be more than the machine has.
        memory: Memory of each worker for executors.
        tell: Receives progress messages while the jars are downloaded for the first time.
    """

    workers: int = 2
    cores: int = 2
    memory: str = "2g"
    tell: Callable[[str], None] = print_on_stderr
    port: int = field(init=False, default_factory=free_port)
    _pages: list[int] = field(init=False, default_factory=list)
    _processes: list[ChildProcess] = field(init=False, default_factory=list)
    _folder: Path | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        """The value for `master` of `KafkaSparkResource` and of `SparkConnectServer`."""
        return f"spark://{HOST}:{self.port}"

    @property
    def logs(self) -> list[Path]:
        """The log files of the master and the workers."""
        return [process.log for process in self._processes]

    def session_settings(self) -> dict[str, str]:
        """Return the Spark settings of a session on this cluster.

        They include Spark's Kafka connector, and `spark.cores.max`: without it an application takes
        all cores of a standalone cluster, and the next one waits until it ends.
        """
        return {
            "spark.jars": ",".join(map(str, fetch(kafka_connector(), tell=self.tell))),
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.cores.max": "1",
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }

    def executors(self) -> int:
        """Return the number of running executors.

        Raises:
            OSError: A worker does not answer.
        """
        return sum(len(_state(page)["executors"]) for page in self._pages[1:])

    def start(self) -> Self:
        """Start the master and the workers, and wait until all workers have registered.

        Raises:
            DagsterRebalanceError: A process did not start; the message has the end of its log.
        """
        self._folder = private_folder("spark-cluster")
        try:
            self._start_all(self._folder)
        except BaseException:
            self.stop()
            raise
        return self

    def _start_all(self, folder: Path) -> None:
        master = self._start_one(folder, "master.Master", self.port)
        master.wait_until_ready(lambda: self._alive_workers() == 0, timeout_s=START_LIMIT_S)
        resources = ["--cores", str(self.cores), "--memory", self.memory]
        for number in range(self.workers):
            work_dir = ["--work-dir", str(folder / f"work-{number}")]
            self._start_one(folder, "worker.Worker", free_port(), *resources, *work_dir, self.url)
        for worker in self._processes[1:]:
            worker.wait_until_ready(
                lambda: self._alive_workers() == self.workers, timeout_s=START_LIMIT_S
            )

    def _alive_workers(self) -> int | None:
        """Return the number of registered workers; None while the master does not answer."""
        try:
            alive: int = _state(self._pages[0])["aliveworkers"]
        except OSError:
            return None
        return alive

    def _start_one(self, folder: Path, program: str, port: int, *further: str) -> ChildProcess:
        spark, page = pyspark_folder(), free_port()
        command: list[str | Path] = [spark / "bin" / "spark-class"]
        command += [f"org.apache.spark.deploy.{program}", "--host", HOST, "--port", str(port)]
        command += ["--webui-port", str(page), *further]
        env = {
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(spark),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
            "PYSPARK_PYTHON": sys.executable,
        }
        name = f"{program.rpartition('.')[2].lower()}-{len(self._processes)}"
        log = folder / f"spark-{name}.log"
        process = ChildProcess(f"Spark's {name}", command, log=log, env=env, cwd=folder)
        self._processes.append(process)
        self._pages.append(page)
        return process

    def stop(self) -> None:
        """Kill the workers with their executors, and the master, and remove their files."""
        for process in reversed(self._processes):
            process.stop_at_once()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _state(page: int) -> dict[str, Any]:
    """Return the state of a master or a worker from its web page."""
    with urlopen(f"http://{HOST}:{page}/json/", timeout=_ANSWER_LIMIT_S) as answer:
        state: dict[str, Any] = json.load(answer)
    return state

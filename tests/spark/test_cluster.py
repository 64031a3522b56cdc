"""A standalone cluster, whose executors end with their driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.spark_cluster import SparkCluster
from dagster_rebalance.testing.spark_connect import SparkConnectServer
from tests.spark.lakes import connected
from tests.spark.producing import produce
from tests.spark.slow_write import files_in_work

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(900)]

RECORDS = 200
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster() as cluster:
        yield cluster


@pytest.fixture
def topic(kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> str:
    name = kafka_topic()
    produce(kafka_broker.client_config(), name, map(str, range(RECORDS)))
    return name


@contextmanager
def run(
    cluster: SparkCluster, kafka: KafkaCluster, topic: str, folder: Path, ms: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process of a run in a new process group, and kill it at the end."""
    settings = json.dumps(cluster.session_settings())
    given = [cluster.url, settings, kafka.bootstrap_servers, topic, str(RECORDS), str(folder)]
    command = [sys.executable, "-m", "tests.spark.cluster_run", *given, str(ms)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_executors_of_a_killed_run_end_and_its_replay_writes_once(
    cluster: SparkCluster, kafka_broker: KafkaCluster, topic: str, tmp_path: Path
) -> None:
    """The JVM of the driver is killed with the run, so no process is left to stop them."""
    out = tmp_path / "out"
    with run(cluster, kafka_broker, topic, out, ms=5_000) as first:
        wait_until(
            lambda: files_in_work(tmp_path) > 0, timeout_s=LIMIT_S, what="an executor to write"
        )
        assert cluster.executors() == 1
        os.killpg(first.pid, signal.SIGKILL)
    wait_until(lambda: cluster.executors() == 0, timeout_s=LIMIT_S, what="the executor to end")
    assert not list(out.rglob("*.parquet"))
    with run(cluster, kafka_broker, topic, out, ms=0) as again:
        assert again.wait(LIMIT_S) == 0
    rows = ds.dataset(out, format="parquet").to_table(columns=["offset"])
    assert sorted(rows["offset"].to_pylist()) == list(range(RECORDS))


def test_connect_server_on_a_cluster_reads_kafka(
    cluster: SparkCluster, kafka_broker: KafkaCluster, topic: str
) -> None:
    settings = {key: cluster.session_settings()[key] for key in ("spark.cores.max",)}
    with SparkConnectServer(master=cluster.url, settings=settings) as server:
        with connected(server) as session:
            options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers}
            read = session.read.format("kafka").options(**options, subscribe=topic).load()
            assert read.count() == RECORDS
        assert cluster.executors() == 1

"""A standalone cluster: its executors end with their driver, and serve a Connect server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from dagster_rebalance import OffsetRange
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import read_ranges
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.spark_cluster import SparkCluster
from dagster_rebalance.testing.spark_connect import SparkConnectServer
from tests.spark.lakes import connected
from tests.spark.producing import produce
from tests.spark.slow_write import files_in_work

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(900)]

RECORDS = 200
LIMIT_S = 240.0


def test_executors_of_a_killed_run_end_and_a_connect_server_replays_its_batch(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    """The JVM of the driver is killed with the run, so no process is left to stop them."""
    topic, out = kafka_topic(), tmp_path / "out"
    produce(kafka_broker.client_config(), topic, map(str, range(RECORDS)))
    with SparkCluster(workers=1) as cluster:
        flags = {"spark.executor.defaultJavaOptions": os.environ["SPARK_SUBMIT_OPTS"]}
        settings = json.dumps({**cluster.session_settings(), **flags})
        given = [cluster.url, settings, kafka_broker.bootstrap_servers, topic, str(RECORDS)]
        command = [sys.executable, "-m", "tests.spark.cluster_run", *given, str(out)]
        with subprocess.Popen(command, start_new_session=True) as run:
            try:
                wait_until(
                    lambda: written(out) and files_in_work(tmp_path) > 0,
                    timeout_s=LIMIT_S,
                    what="an executor to write the second batch",
                )
                assert cluster.executors() == 1
            finally:
                os.killpg(run.pid, signal.SIGKILL)
        wait_until(lambda: cluster.executors() == 0, timeout_s=LIMIT_S, what="the executor to end")
        assert written(out) == [*range(RECORDS // 2)]
        on_server = {"spark.cores.max": cluster.session_settings()["spark.cores.max"], **flags}
        with (
            SparkConnectServer(master=cluster.url, settings=on_server) as server,
            connected(server) as session,
        ):
            range_ = OffsetRange(topic, 0, RECORDS // 2, RECORDS)
            frame = read_ranges(session, [range_], kafka_broker.client_config())
            frame = frame.selectExpr("*", "'' AS slept")
            assert write_parquet_by_range(frame, str(out)) == RECORDS // 2
            assert cluster.executors() == 1
    assert written(out) == [*range(RECORDS)]


def written(out: Path) -> list[int]:
    """Return the offsets in the published files."""
    files = [str(file) for file in out.rglob("*.parquet")]
    return (
        sorted(ds.dataset(files, format="parquet").to_table()["offset"].to_pylist())
        if files
        else []
    )

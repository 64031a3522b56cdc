"""Spark work ends with its run: cancelled, killed, or declared dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.connect.session import SparkSession

from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.spark import spark_jobs
from dagster_rebalance.spark.connect_sessions import (
    connect_session_id,
    remote_with_session,
    stop_session,
)
from dagster_rebalance.testing.local.host import accepts_connections
from tests.spark.slow_write import (
    STOP_LIMIT_S,
    wait_until_stopped,
    wait_until_working,
    write_slowly,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.spark_connect import SparkConnectServer

pytestmark = pytest.mark.spark


@contextmanager
def process(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start a Python process, and kill it at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def test_work_of_a_killed_client_is_stopped_by_another_process(
    spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    run_id = str(uuid.uuid4())
    remote = f"{spark_connect_server.remote}/;user_id=team"
    url = remote_with_session(remote, connect_session_id(run_id))
    with process("tests.spark.connect_client", url, tmp_path) as client:
        wait_until_working(tmp_path / "first")
        client.kill()
        client.wait()
    KafkaSparkResource(remote=remote).stop_abandoned_work(run_id)
    wait_until_stopped(tmp_path / "first")


def test_stopped_session_refuses_its_client(
    spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    session_id = str(uuid.uuid4())
    with process(
        "tests.spark.connect_client",
        remote_with_session(spark_connect_server.remote, session_id),
        tmp_path,
    ) as client:
        wait_until_working(tmp_path / "first")
        stop_session(spark_connect_server.remote, session_id)
        output, _ = client.communicate(timeout=200)
    assert output.splitlines()[0].startswith("first (org.apache.spark.SparkSQLException)")
    assert "SESSION_CLOSED" in output.splitlines()[1]
    wait_until_stopped(tmp_path)


def test_session_stopped_before_it_exists_refuses_its_client(
    spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    session_id = str(uuid.uuid4())
    stop_session(spark_connect_server.remote, session_id)
    stop_session(spark_connect_server.remote, session_id)
    with process(
        "tests.spark.connect_client",
        remote_with_session(spark_connect_server.remote, session_id),
        tmp_path,
    ) as client:
        output, _ = client.communicate(timeout=200)
    assert output.count("SESSION_CLOSED") == 2


def test_interrupt_of_a_batch_leaves_other_work_running(
    spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    session = SparkSession.builder.remote(spark_connect_server.remote).create()
    failures: dict[str, str] = {}

    def work(batch_id: str) -> None:
        spark_jobs.tag_batch(session, batch_id)  # type: ignore[arg-type]
        try:
            write_slowly(session, tmp_path / batch_id)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - compared below
            failures[batch_id] = str(error)

    threads = [
        threading.Thread(target=work, args=(batch_id,), daemon=True)
        for batch_id in ("stopped", "going-on")
    ]
    for thread in threads:
        thread.start()
    for batch_id in ("stopped", "going-on"):
        wait_until_working(tmp_path / batch_id)
    spark_jobs.interrupt(session, spark_jobs.batch_tag("stopped"))  # type: ignore[arg-type]
    wait_until_stopped(tmp_path / "stopped")
    threads[0].join(STOP_LIMIT_S)
    assert "OPERATION_CANCELED" in failures["stopped"]
    assert "going-on" not in failures
    session.interruptAll()
    threads[1].join(STOP_LIMIT_S)
    session.stop()


def test_batch_read_in_another_thread_is_interrupted(
    spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    session = SparkSession.builder.remote(spark_connect_server.remote).create()

    def work() -> None:
        spark_jobs.tag_batch(session, "in-a-thread")  # type: ignore[arg-type]
        with suppress(Exception):
            write_slowly(session, tmp_path / "out")  # type: ignore[arg-type]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until_working(tmp_path / "out")
    spark_jobs.settle_batch("in-a-thread", is_done=False)
    wait_until_stopped(tmp_path / "out")
    thread.join(STOP_LIMIT_S)
    session.stop()


def test_work_without_the_tag_of_a_batch_is_interrupted(
    spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    spark = KafkaSparkResource(remote=spark_connect_server.remote)
    # Not made by the resource, whose session would prevent classic sessions in this process.
    session = SparkSession.builder.remote(spark_connect_server.remote).create()
    session.addTag(spark._tag)
    spark._session = session
    stopper = threading.Thread(target=_interrupt, args=(spark, tmp_path / "out"), daemon=True)
    stopper.start()
    with pytest.raises(Exception, match="OPERATION_CANCELED"):
        write_slowly(session, tmp_path / "out")  # type: ignore[arg-type]
    stopper.join(STOP_LIMIT_S)
    wait_until_stopped(tmp_path / "out")
    assert session.range(3).count() == 3
    session.stop()


def _interrupt(spark: KafkaSparkResource, out: Path) -> None:
    wait_until_working(out)
    spark.interrupt_work()


@pytest.mark.parametrize(
    ("where", "number"), [("connect", signal.SIGTERM), ("local", signal.SIGINT)]
)
def test_cancelled_run_stops_its_spark_jobs(
    where: str, number: signal.Signals, spark_connect_server: SparkConnectServer, tmp_path: Path
) -> None:
    remote = spark_connect_server.remote if where == "connect" else where
    with process(
        "tests.spark.cancelled_run", remote, tmp_path / "out", str(uuid.uuid4()), str(int(number))
    ) as run:
        wait_until_working(tmp_path / "out")
        sent_at = time.monotonic()
        output, _ = run.communicate("cancel\n", timeout=200)
        took_s = time.monotonic() - sent_at
    assert output.split() == ["CANCELED", "INTERRUPT"]
    assert took_s < STOP_LIMIT_S
    wait_until_stopped(tmp_path / "out")


def test_run_continues_in_a_new_session_after_a_server_restart(
    spark_connect_server: SparkConnectServer,
) -> None:
    """The new session has the run's id, so other processes can still end it."""
    run_id, server = str(uuid.uuid4()), spark_connect_server
    with process("tests.spark.lost_session", server.remote, run_id) as run:
        stdin, stdout = run.stdin, run.stdout
        assert stdin is not None
        assert stdout is not None

        def batch() -> str:
            stdin.write("\n")
            stdin.flush()
            return stdout.readline().strip()

        assert batch() == "3"
        assert accepts_connections(server.port)
        server.kill()
        try:
            assert not accepts_connections(server.port)
        finally:
            server.restart()  # other tests share it
        assert "NO_ACTIVE_SESSION" in batch()
        assert batch() == "3"
        KafkaSparkResource(remote=server.remote).stop_abandoned_work(run_id)
        assert "SESSION_CLOSED" in batch()
        stdin.close()
        assert run.wait(120) == 0

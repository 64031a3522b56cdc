"""A Spark Connect server that is restarted under a run that goes on."""

from __future__ import annotations

import uuid

import pytest

from dagster_rebalance.orchestration.resources.spark import stop_abandoned_work
from dagster_rebalance.testing.spark_connect import SparkConnectServer
from tests.spark.test_ended_work import process

pytestmark = pytest.mark.spark


def test_run_continues_in_a_new_session_after_a_server_restart() -> None:
    """The new session has the run's id, so other processes can still end it."""
    run_id = str(uuid.uuid4())
    with (
        SparkConnectServer() as server,
        process("tests.spark.lost_session", server.remote, run_id) as run,
    ):
        given, said = run.stdin, run.stdout
        assert given is not None
        assert said is not None

        def batch() -> str:
            given.write("\n")
            given.flush()
            return said.readline().strip()

        assert batch() == "3"
        server.kill()
        server.restart()
        assert "NO_ACTIVE_SESSION" in batch()
        assert batch() == "3"
        stop_abandoned_work(server.remote, run_id)
        assert "SESSION_CLOSED" in batch()
        given.close()
        assert run.wait(60) == 0

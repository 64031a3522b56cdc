"""A local Spark whose JVM dies, or that an asset stops."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext

from dagster_rebalance.spark.spark_jobs import jvm_has_died

pytestmark = pytest.mark.spark


def played(form: str) -> dict[str, Any]:
    """Return the outcome of a run, in a process with an empty SPARK_REMOTE."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.dead_jvm", form],
        env={**os.environ, "SPARK_REMOTE": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_streaming_run_replaces_a_stopped_session_and_leaves_when_its_jvm_dies() -> None:
    """The batch whose JVM dies counts no attempt."""
    assert played("stream") == {
        "succeeded": True,
        "batches": [5, 5, 5],
        "committed": 10,
        "left": [{"failed": 0, "interrupted": 1}],
    }


def test_batch_run_counts_no_attempt_when_its_jvm_dies() -> None:
    found = played("batch")
    assert not found["succeeded"]
    assert {"INTERRUPTED", "FINISHED"} <= set(found["marks"])


def test_process_without_pyspark_has_no_dead_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark")
    assert not jvm_has_died()


@pytest.mark.parametrize(
    ("answer", "has_died"), [(b"!yv\n", False), (b"", True)], ids=["answers", "closes"]
)
def test_jvm_that_closes_a_new_connection_has_died(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, *, has_died: bool
) -> None:
    """While a killed process ends, the system still accepts connections to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        place = SimpleNamespace(address=address, port=port, auth_token="token")  # noqa: S106 - of the test
        process = SimpleNamespace(poll=lambda: None)
        gateway = SimpleNamespace(proc=process, gateway_parameters=place)
        monkeypatch.setattr(SparkContext, "_gateway", gateway)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert jvm_has_died() is has_died
        thread.join(120)

"""A local Spark whose JVM dies, or that an asset stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dagster_rebalance.spark.session.jobs import jvm_has_died

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def played(form: str) -> dict[str, Any]:
    """Return the outcome of a run, in a process with an empty SPARK_REMOTE."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.dead_jvm", form],
        env={**os.environ, "SPARK_REMOTE": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_streaming_run_leaves_when_its_jvm_dies_without_counting_an_attempt() -> None:
    assert played("stream") == {
        "succeeded": True,
        "batches": [5, 5],
        "committed": 5,
        "left": [{"failed": 0, "interrupted": 1}],
    }


def test_batch_run_counts_no_attempt_when_its_jvm_dies() -> None:
    found = played("batch")
    assert not found["succeeded"]
    assert {"INTERRUPTED", "FINISHED"} <= set(found["marks"])


def test_session_stopped_by_an_asset_is_replaced_in_the_next_batch() -> None:
    assert played("stopped") == {
        "succeeded": True,
        "batches": [5, 5, 5],
        "committed": 15,
        "left": [],
    }


def test_process_without_pyspark_has_no_dead_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark")
    assert not jvm_has_died()

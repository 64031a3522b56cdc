"""A local Spark whose JVM dies, or that a body stops, is no fault of the records."""

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
    """Return what became of a run, whose process has the empty variable of pyspark's as well."""
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


def test_a_streaming_run_whose_jvm_was_killed_leaves_and_its_batch_was_no_attempt() -> None:
    """Each batch after it failed as well, until the partitions stopped or had dead letters."""
    assert played("stream") == {
        "succeeded": True,
        "batches": [5, 5],
        "committed": 5,
        "left": [{"failed": 0, "interrupted": 1}],
    }


def test_the_run_of_a_batch_whose_jvm_was_killed_is_no_attempt() -> None:
    """It fails in Dagster, and its process says that it was interrupted."""
    found = played("batch")
    assert not found["succeeded"]
    assert {"INTERRUPTED", "FINISHED"} <= set(found["marks"])


def test_a_session_that_a_body_has_stopped_is_replaced_in_the_next_batch() -> None:
    """`spark.stop()` stands at the end of many a script."""
    assert played("stopped") == {
        "succeeded": True,
        "batches": [5, 5, 5],
        "committed": 15,
        "left": [],
    }


def test_a_process_without_a_local_spark_has_lost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pyspark is not imported at all."""
    monkeypatch.delitem(sys.modules, "pyspark")
    assert not jvm_has_died()

"""The text of an error, and the run that a failed attempt belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.progress import Exhausted, ToRequest, progress_of
from dagster_rebalance.core.runs.retry import (
    FailedAttempt,
    Place,
    RetryBackoff,
    error_text,
    why_blocked,
    with_error,
)
from dagster_rebalance.core.runs.run_index import RunIndex
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch

RANGE = OffsetRange("orders", 3, 0, 10)
OLD, NEW = "old-run", "new-run"
FAILED = FailedAttempt(OLD, 2, "ValueError: no price (assets.py:41 in clean)")


def run(state: RunState) -> RunSnapshot:
    """The streaming run that has the claim."""
    return RunSnapshot(NEW, "", (), state, error="its process was killed")


def test_error_text_has_innermost_frames_first() -> None:
    places = [Place(f"/app/{name}.py", line, "f") for line, name in enumerate("abcde", 1)]
    assert error_text("ValueError: bad", places) == (
        "ValueError: bad (e.py:5 in f, d.py:4 in f, c.py:3 in f)"
    )
    assert error_text("ValueError: bad") == "ValueError: bad"


def test_error_text_is_short_and_printable() -> None:
    place = Place("C:\\app\\a\x1b[2J.py", 1, "f" * 1_000)
    text = error_text("ValueError: \x1b[31mred\n\n  next " + "x" * 10_000, [place] * 50)
    assert text.isprintable()
    assert text.startswith("ValueError: \\x1b[31mred next xxx")
    assert len(text) < 700
    assert " ... (a\\x1b[2J.py:1 in fff" in text


def test_error_text_keeps_root_cause_after_long_message() -> None:
    causes = ["KeyError: 'a'", "OSError: " + "y" * 10_000, "ConnectionError: refused"]
    text = error_text("RuntimeError: " + "x" * 10_000, causes=causes)
    assert text.startswith("RuntimeError: xxx")
    assert "xx ...; caused by OSError: yyy" in text
    assert text.endswith("yy ...; caused by ConnectionError: refused")
    assert len(text) < 450


def test_error_text_leaves_out_frames_in_a_message() -> None:
    """Those of Spark's workers are longer than the whole text."""
    frame = '  File "worker.py", line 17, in main\n    process()\n    ^^^^^^^^^\n'
    trace = f"Traceback (most recent call last):\n{frame * 50}"
    message = f"PythonException: see below.\n{trace}OSError: down\n\n{trace}KeyError: 'price'\n"
    assert error_text(message) == "PythonException: see below. OSError: down KeyError: 'price'"


def test_failed_attempt_keeps_run_and_error_after_takeover() -> None:
    batch = StreamBatch(NEW, 1, attempt=3)
    seen = with_error(batch.as_runs((RANGE,), run(RunState.STARTED), None), FAILED)
    assert [(one.attempt, one.run_id, one.error) for one in seen] == [
        (1, NEW, ""),
        (2, OLD, FAILED.error),
        (3, NEW, "its process was killed"),
    ]
    again = with_error(
        batch.as_runs((RANGE,), run(RunState.STARTED), BatchOutcome.INTERRUPTED), FAILED
    )
    progress = progress_of(RANGE, str(batch), RunIndex(again), max_attempts=2)
    assert isinstance(progress, Exhausted)
    assert (progress.run_id, progress.reason) == (OLD, FAILED.error)
    assert why_blocked(RANGE, progress, str(batch), RetryBackoff()) == (
        f"orders-3: 2 attempts on orders-3 [0, 10) failed, the last one in streaming run {OLD}: "
        f"{FAILED.error}. Fix the cause. It is retried 30 s after the last try; "
        "`dagster-rebalance retry orders:3` retries it now"
    )


def test_single_attempt_is_described_in_singular() -> None:
    batch = StreamBatch(OLD, 1, attempt=1)
    seen = batch.as_runs((RANGE,), run(RunState.FAILED), BatchOutcome.FAILED)
    progress = progress_of(RANGE, str(batch), RunIndex(seen), max_attempts=1)
    assert isinstance(progress, Exhausted)
    assert why_blocked(RANGE, progress, str(batch), RetryBackoff()).startswith(
        f"orders-3: 1 attempt on orders-3 [0, 10) failed, in streaming run {progress.run_id}"
    )


def test_attempt_of_dead_process_has_error_of_its_run() -> None:
    batch = StreamBatch(NEW, 1, attempt=2)
    seen = with_error(batch.as_runs((RANGE,), run(RunState.FAILED), None), FAILED)
    assert [(one.run_id, one.error) for one in seen] == [
        (NEW, ""),
        (NEW, "its process was killed"),
    ]
    progress = progress_of(RANGE, str(batch), RunIndex(seen), max_attempts=3)
    assert isinstance(progress, ToRequest)
    assert progress.streak is not None
    assert progress.streak.reason == "its process was killed"


def test_live_run_keeps_its_id() -> None:
    """Members wait for this run, even if a reset of the group restarts the attempts."""
    lives = replace(run(RunState.FAILED), is_over=False)
    batch = StreamBatch(NEW, 1, attempt=2)
    *_, last = with_error(batch.as_runs((RANGE,), lives, None), FAILED)
    assert (last.is_live, last.run_id) == (True, NEW)


@pytest.mark.parametrize("failed", [None, FailedAttempt(OLD, 1, "another one")])
def test_attempt_without_stored_error_is_unchanged(failed: FailedAttempt | None) -> None:
    batch = StreamBatch(NEW, 1, attempt=2)
    *_, last = with_error(
        batch.as_runs((RANGE,), run(RunState.STARTED), BatchOutcome.FAILED), failed
    )
    assert (last.state, last.run_id, last.error) == (RunState.FAILED, NEW, "")

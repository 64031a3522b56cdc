"""The text of an error, and the run that a failed attempt belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.core.runs.failed_attempt import FailedAttempt, Place, error_text, with_error
from dagster_rebalance.core.runs.progress import Exhausted, ToRequest, progress_of
from dagster_rebalance.core.runs.retry import why_blocked
from dagster_rebalance.core.runs.stream_batch import Outcome, StreamBatch

RANGE = OffsetRange("orders", 3, 0, 10)
OLD, NEW = "old-run", "new-run"
FAILED = FailedAttempt(OLD, 2, "ValueError: no price (assets.py:41 in clean)")


def run(state: RunState) -> RunSeen:
    """The streaming run that has the claim."""
    return RunSeen(NEW, "", (), state, error="its process was killed")


def test_a_text_has_the_innermost_places_first() -> None:
    """They are the nearest to the cause."""
    places = [Place(f"/app/{name}.py", line, "f") for line, name in enumerate("abcde", 1)]
    assert error_text("ValueError: bad", places) == (
        "ValueError: bad (e.py:5 in f, d.py:4 in f, c.py:3 in f)"
    )
    assert error_text("ValueError: bad") == "ValueError: bad"


def test_a_text_is_one_short_line_without_control_characters() -> None:
    """A message may have a whole record in it, and a record the escape of a terminal."""
    place = Place("C:\\app\\a\x1b[2J.py", 1, "f" * 1_000)
    text = error_text("ValueError: \x1b[31mred\n\n  next " + "x" * 10_000, [place] * 50)
    assert text.isprintable()
    assert text.startswith("ValueError: \\x1b[31mred next xxx")
    assert len(text) < 700
    assert " ... (a\\x1b[2J.py:1 in fff" in text


def test_a_text_keeps_the_root_cause_behind_a_long_message() -> None:
    """The root cause is what a person fixes."""
    causes = ["KeyError: 'a'", "OSError: " + "y" * 10_000, "ConnectionError: refused"]
    text = error_text("RuntimeError: " + "x" * 10_000, causes=causes)
    assert text.startswith("RuntimeError: xxx")
    assert "xx ...; caused by OSError: yyy" in text
    assert text.endswith("yy ...; caused by ConnectionError: refused")
    assert len(text) < 450


def test_a_failed_attempt_has_its_error_and_its_run_after_the_next_run_took_the_range() -> None:
    """The claim of the new run counts the attempts before it, and does not name their runs."""
    batch = StreamBatch(NEW, 1, attempt=3)
    seen = with_error(batch.seen((RANGE,), run(RunState.STARTED), None), FAILED)
    assert [(one.attempt, one.run_id, one.error) for one in seen] == [
        (1, NEW, ""),
        (2, OLD, FAILED.error),
        (3, NEW, "its process was killed"),
    ]
    again = with_error(batch.seen((RANGE,), run(RunState.STARTED), Outcome.INTERRUPTED), FAILED)
    progress = progress_of(RANGE, str(batch), again, max_attempts=2)
    assert isinstance(progress, Exhausted)
    assert (progress.run_id, progress.why) == (OLD, FAILED.error)
    assert why_blocked(RANGE, progress, str(batch)) == (
        f"orders-3: 2 attempts on orders-3 [0, 10) failed, the last one in streaming run {OLD}: "
        f"{FAILED.error}. Fix the cause. It is tried again; `dagster-rebalance retry orders:3` "
        "tries it now"
    )


def test_an_attempt_whose_process_died_has_the_error_of_its_run() -> None:
    """A note with its number is of an earlier life of the range."""
    batch = StreamBatch(NEW, 1, attempt=2)
    seen = with_error(batch.seen((RANGE,), run(RunState.FAILED), None), FAILED)
    assert [(one.run_id, one.error) for one in seen] == [
        (NEW, ""),
        (NEW, "its process was killed"),
    ]
    progress = progress_of(RANGE, str(batch), seen, max_attempts=3)
    assert isinstance(progress, ToRequest)
    assert progress.trouble is not None
    assert progress.trouble.why == "its process was killed"


def test_a_run_that_may_still_work_keeps_its_id() -> None:
    """Dagster may show a live run as failed, and a reset of the group begins the attempts again.

    Its members waited for the run of the note, which they could not end.
    """
    lives = replace(run(RunState.FAILED), is_over=False)
    batch = StreamBatch(NEW, 1, attempt=2)
    *_, last = with_error(batch.seen((RANGE,), lives, None), FAILED)
    assert (last.is_live, last.run_id) == (True, NEW)


@pytest.mark.parametrize("failed", [None, FailedAttempt(OLD, 1, "another one")])
def test_an_attempt_without_its_note_keeps_what_is_known(failed: FailedAttempt | None) -> None:
    """Dagster+ keeps no notes."""
    batch = StreamBatch(NEW, 1, attempt=2)
    *_, last = with_error(batch.seen((RANGE,), run(RunState.STARTED), Outcome.FAILED), failed)
    assert (last.state, last.run_id, last.error) == (RunState.FAILED, NEW, "")

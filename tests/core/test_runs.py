"""What the runs of a batch say about one of its ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.runs import GaveUp, InFlight, Progress, RunSeen, RunState, Succeeded, ToRequest, progress_of, unclaimed_workers
from tests.core.world import span

RANGE = span(0, 0, 10)
S = RunState


def run(run_id: str, state: RunState, **more: bool | str) -> RunSeen:
    """A run of batch b on RANGE and on another partition."""
    return replace(RunSeen(run_id, "b", (RANGE, span(1, 5, 9)), state), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runs", "progress"),
    [
        ([], ToRequest(1)),
        ([run("r1", S.WAITING)], InFlight(("r1",), ("r1",))),
        ([run("r1", S.STARTING)], InFlight(("r1",))),
        ([run("r1", S.STARTED)], InFlight(("r1",))),
        ([run("r1", S.CANCELING)], InFlight(("r1",))),
        ([run("r1", S.SUCCEEDED)], Succeeded("r1")),
        ([run("r1", S.FAILED)], ToRequest(2)),
        ([run("r1", S.CANCELED)], ToRequest(2)),
        ([run("r1", S.FAILED), run("r2", S.CANCELED), run("r3", S.FAILED)], GaveUp(("r1", "r2", "r3"), is_cancelled=True)),
        ([run("r1", S.FAILED), run("r2", S.FAILED), run("r3", S.FAILED)], GaveUp(("r1", "r2", "r3"))),
        # Refused and taken back: not an attempt, but the next run key must still be a new one.
        ([run("r1", S.FAILED, is_refused=True)], ToRequest(2)),
        ([run("r1", S.CANCELED, is_taken_back=True)] * 5, ToRequest(6)),
        ([run("r1", S.FAILED), run("r2", S.FAILED, is_refused=True), run("r3", S.FAILED)], ToRequest(4)),
        (
            [run("r1", S.FAILED), run("r2", S.CANCELED, is_taken_back=True), run("r3", S.FAILED), run("r4", S.FAILED)],
            GaveUp(("r1", "r3", "r4")),
        ),
        # Dagster's own retries are not attempts of ours.
        ([run("r1", S.FAILED, awaits_retry=True)], InFlight(("r1",))),
        ([run("r1", S.FAILED), run("r2", S.STARTED, parent_id="r1")], InFlight(("r2",))),
        ([run("r1", S.FAILED), run("r2", S.FAILED, parent_id="r1"), run("r3", S.FAILED, parent_id="r1")], ToRequest(2)),
        # A refused run that has not ended is waited for: it may be the one whose start the other saw.
        ([run("r1", S.STARTED, is_refused=True)], InFlight(("r1",))),
        # A person executes a run again with all of its ranges; when it has to refuse itself, this one is tried again, once.
        (
            [run("r1", S.FAILED), run("r2", S.FAILED), run("r3", S.FAILED), run("r4", S.FAILED, parent_id="r1", is_refused=True)],
            ToRequest(4),
        ),
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED),
                run("r3", S.FAILED),
                run("r4", S.FAILED, parent_id="r1", is_refused=True),
                run("r5", S.FAILED),
            ],
            GaveUp(("r1", "r2", "r3", "r5")),
        ),
        # One success is enough, whatever else there is.
        ([run("r1", S.SUCCEEDED), run("r2", S.STARTED)], Succeeded("r1")),
        ([run("r1", S.FAILED), run("r2", S.FAILED), run("r3", S.FAILED), run("r4", S.SUCCEEDED, parent_id="r1")], Succeeded("r4")),
        # Taken back too late.
        ([run("r1", S.SUCCEEDED, is_taken_back=True)], Succeeded("r1")),
    ],
)
def test_progress_is_read_from_all_runs_of_the_batch(runs: list[RunSeen], progress: Progress) -> None:
    """Each row is a state of affairs that an owner may find."""
    assert progress_of(RANGE, "b", runs, max_attempts=3) == progress


@pytest.mark.parametrize(
    "other",
    [
        replace(run("r1", S.SUCCEEDED), batch_id="c"),
        replace(run("r1", S.SUCCEEDED), ranges=(span(0, 0, 9),)),
        replace(run("r1", S.SUCCEEDED), ranges=(span(1, 0, 10),)),
    ],
)
def test_a_run_counts_only_for_its_batch_and_exactly_its_ranges(other: RunSeen) -> None:
    """A success on other bounds says nothing about these."""
    assert progress_of(RANGE, "b", [other], max_attempts=3) == ToRequest(1)


@pytest.mark.parametrize(
    ("state", "range_", "batch_id", "blocks"),
    [
        (S.STARTED, span(0, 5, 15), "b", True),
        (S.CANCELING, span(0, 5, 15), "b", True),
        (S.STARTED, span(0, 0, 10), "other", True),
        (S.STARTED, span(0, 0, 10), "b", False),
        (S.WAITING, span(0, 5, 15), "b", False),
        (S.STARTING, span(0, 5, 15), "b", False),
        (S.SUCCEEDED, span(0, 5, 15), "b", False),
        (S.STARTED, span(1, 5, 15), "b", False),
        (S.STARTED, span(0, 100, 110), "b", False),
    ],
)
def test_a_run_at_work_without_a_claim_is_found(state: RunState, range_: object, batch_id: str, blocks: bool) -> None:  # noqa: FBT001
    """An operator moved the offset under it: nothing may start there until it ended."""
    worker = RunSeen("r1", batch_id, (range_,), state)  # type: ignore[arg-type]
    assert unclaimed_workers([span(0, 0, 50)], [(span(0, 0, 10), "b")], [worker]) == (("r1",) if blocks else ())

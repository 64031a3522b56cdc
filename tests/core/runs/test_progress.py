"""Progress of a claimed range, derived from the runs of its batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.progress import (
    Exhausted,
    FailureKind,
    FailureStreak,
    InFlight,
    Progress,
    Succeeded,
    ToRequest,
    progress_of,
)
from dagster_rebalance.core.runs.run_index import RunIndex
from tests.core.world import span

RANGE = span(0, 0, 10)
S = RunState
F, N, R, T = (
    FailureKind.FAILED,
    FailureKind.NOT_STARTED,
    FailureKind.REFUSED,
    FailureKind.INTERRUPTED,
)


def run(run_id: str, state: RunState, **more: object) -> RunSnapshot:
    """A run of batch b on RANGE and on another partition."""
    return replace(RunSnapshot(run_id, "b", (RANGE, span(1, 5, 9)), state), **more)  # type: ignore[arg-type]


CREATED = run("r1", S.CREATED, attempt=1)


@pytest.mark.parametrize(
    ("runs", "progress"),
    [
        ([], ToRequest(1)),
        ([run("r1", S.WAITING)], InFlight(("r1",), ("r1",))),
        ([run("r1", S.STARTING)], InFlight(("r1",), launching=("r1",))),
        ([run("r1", S.STARTED)], InFlight(("r1",), started=("r1",))),
        ([run("r1", S.CANCELING)], InFlight(("r1",))),
        ([run("r1", S.SUCCEEDED)], Succeeded("r1")),
        ([run("r1", S.FAILED)], ToRequest(2, 1, FailureStreak(F, 1, "r1"))),
        ([run("r1", S.CANCELED)], ToRequest(2, 1, FailureStreak(F, 1, "r1"))),
        ([run("r1", S.CANCELED, has_started=False)], ToRequest(2, 1, FailureStreak(F, 1, "r1"))),
        (
            [run("r1", S.FAILED), run("r2", S.CANCELED), run("r3", S.FAILED)],
            Exhausted(("r1", "r2", "r3"), is_cancelled=True, attempt=4),
        ),
        (
            [run("r1", S.FAILED), run("r2", S.FAILED), run("r3", S.FAILED)],
            Exhausted(("r1", "r2", "r3"), attempt=4),
        ),
        # Runs that never started are not attempts.
        ([run("r1", S.FAILED, has_started=False)], ToRequest(2, 0, FailureStreak(N, 1, "r1"))),
        (
            [run(f"r{n}", S.FAILED, has_started=False) for n in range(9)],
            ToRequest(10, 0, FailureStreak(N, 9, "r8")),
        ),
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED, has_started=False),
                run("r3", S.FAILED, has_started=False),
                run("r4", S.FAILED),
            ],
            ToRequest(5, 2, FailureStreak(F, 2, "r4")),
        ),
        # A created run that its sensor did not submit is requested again.
        ([CREATED], InFlight(("r1",), ("r1",), unsubmitted=CREATED)),
        ([CREATED, run("r2", S.WAITING)], InFlight(("r1", "r2"), ("r1", "r2"))),
        ([run("r1", S.CREATED, attempt=1, parent_id="r0")], InFlight(("r1",), ("r1",))),
        ([run("r1", S.CREATED)], InFlight(("r1",), ("r1",))),
        # Another sensor has created it, and this sensor's run with the same key has ended.
        ([CREATED, run("r2", S.FAILED, attempt=1, is_cancelled_by_member=True)], ToRequest(2)),
        ([CREATED, run("r2", S.FAILED, attempt=1)], ToRequest(2, 1, FailureStreak(F, 1, "r2"))),
        (
            [CREATED, run("r2", S.STARTED, attempt=1)],
            InFlight(("r1", "r2"), ("r1",), started=("r2",)),
        ),
        (
            [run("r0", S.FAILED, attempt=2), CREATED],
            InFlight(("r1",), ("r1",), unsubmitted=CREATED, is_retry=True),
        ),
        # With deleted runs, the next number is above that of each remaining run.
        ([run("r3", S.FAILED, attempt=3)], ToRequest(4, 1, FailureStreak(F, 1, "r3"))),
        (
            [run("r1", S.FAILED, attempt=1), run("r3", S.FAILED, attempt=3)],
            ToRequest(4, 2, FailureStreak(F, 2, "r3")),
        ),
        # Refused and cancelled runs are not attempts, but the next run key must be new.
        (
            [run("r1", S.FAILED, is_refused=True, refusal="no claim")],
            ToRequest(2, 0, FailureStreak(R, 1, "r1", "no claim")),
        ),
        ([run("r1", S.CANCELED, is_cancelled_by_member=True)] * 5, ToRequest(6)),
        # Interrupted runs are not attempts, but consecutive ones are counted.
        (
            [run("r1", S.FAILED), *(run(f"r{n}", S.FAILED, is_interrupted=True) for n in (2, 3))],
            ToRequest(4, 1, FailureStreak(T, 2, "r3")),
        ),
        ([run("r1", S.FAILED, is_interrupted=True, is_cancelled_by_member=True)], ToRequest(2)),
        # Consecutive runs of different kinds are counted together.
        (
            [
                run("r1", S.FAILED, is_interrupted=True),
                run("r2", S.FAILED, has_started=False),
                run("r3", S.FAILED, is_refused=True),
                run("r4", S.FAILED, is_interrupted=True),
            ],
            ToRequest(5, 0, FailureStreak(T, 4, "r4")),
        ),
        (
            [run("r1", S.FAILED), run("r2", S.FAILED, is_refused=True), run("r3", S.FAILED)],
            ToRequest(4, 2, FailureStreak(F, 2, "r3")),
        ),
        (
            [
                run("r1", S.FAILED, is_refused=True),
                run("r2", S.CANCELED, is_cancelled_by_member=True),
                run("r3", S.FAILED, is_refused=True),
            ],
            ToRequest(4, 0, FailureStreak(R, 2, "r3")),
        ),
        (
            [
                run("r1", S.FAILED),
                run("r2", S.CANCELED, is_cancelled_by_member=True),
                run("r3", S.FAILED),
                run("r4", S.FAILED),
            ],
            Exhausted(("r1", "r3", "r4"), attempt=5),
        ),
        # Dagster's own retries are not attempts.
        ([run("r1", S.FAILED, awaits_retry=True)], InFlight(("r1",))),
        (
            [run("r1", S.FAILED), run("r2", S.STARTED, parent_id="r1")],
            InFlight(("r2",), started=("r2",), is_retry=True),
        ),
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED, parent_id="r1"),
                run("r3", S.FAILED, parent_id="r1"),
            ],
            ToRequest(2, 1, FailureStreak(F, 1, "r1")),
        ),
        # A refused run that has not ended is still in flight.
        ([run("r1", S.STARTED, is_refused=True)], InFlight(("r1",), started=("r1",))),
        # A refused manual re-execution requests the range once more.
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED),
                run("r3", S.FAILED),
                run("r4", S.FAILED, parent_id="r1", is_refused=True),
            ],
            ToRequest(4, 3),
        ),
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED),
                run("r3", S.FAILED),
                run("r4", S.FAILED, parent_id="r1", is_refused=True),
                run("r5", S.FAILED),
            ],
            Exhausted(("r1", "r2", "r3", "r5"), attempt=5),
        ),
        # A refused automatic re-execution does not.
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED, parent_id="r1", is_refused=True, is_automatic=True),
            ],
            ToRequest(2, 1, FailureStreak(F, 1, "r1")),
        ),
        (
            [
                *(run(f"r{n}", S.FAILED) for n in (1, 2, 3)),
                run("r4", S.FAILED, parent_id="r3", is_refused=True, is_automatic=True),
            ],
            Exhausted(("r1", "r2", "r3"), attempt=4),
        ),
        # The newest failed re-execution is shown.
        (
            [
                *(run(f"r{n}", S.FAILED) for n in (1, 2)),
                run("r3", S.FAILED, parent_id="r2"),
                run("r4", S.FAILED),
                run("r5", S.FAILED, parent_id="r2"),
                run("r6", S.FAILED, parent_id="r4", is_refused=True, is_automatic=True),
            ],
            Exhausted(("r1", "r2", "r4"), attempt=4, re_executed=("r5",)),
        ),
        # One success is enough, whatever else there is.
        ([run("r1", S.SUCCEEDED), run("r2", S.STARTED)], Succeeded("r1")),
        (
            [
                run("r1", S.FAILED),
                run("r2", S.FAILED),
                run("r3", S.FAILED),
                run("r4", S.SUCCEEDED, parent_id="r1"),
            ],
            Succeeded("r4"),
        ),
        # A late success of a run that a member ended as dead does not count.
        ([run("r1", S.SUCCEEDED, is_written_off=True)], ToRequest(2, 1, FailureStreak(F, 1, "r1"))),
        ([run("r1", S.SUCCEEDED, is_written_off=True, is_cancelled_by_member=True)], ToRequest(2)),
        (
            [run("r1", S.SUCCEEDED, is_written_off=True), run("r2", S.STARTED)],
            InFlight(("r2",), started=("r2",), is_retry=True),
        ),
        # The cancellation came too late.
        ([run("r1", S.SUCCEEDED, is_cancelled_by_member=True)], Succeeded("r1")),
    ],
)
def test_progress_follows_from_runs_of_batch(runs: list[RunSnapshot], progress: Progress) -> None:
    assert progress_of(RANGE, "b", RunIndex(runs), max_attempts=3) == progress


@pytest.mark.parametrize(
    "other",
    [
        replace(run("r1", S.SUCCEEDED), batch_id="c"),
        replace(run("r1", S.SUCCEEDED), ranges=(span(0, 0, 9),)),
        replace(run("r1", S.SUCCEEDED), ranges=(span(1, 0, 10),)),
    ],
)
def test_run_counts_only_for_its_batch_and_exact_range(other: RunSnapshot) -> None:
    assert progress_of(RANGE, "b", RunIndex([other]), max_attempts=3) == ToRequest(1)


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
def test_working_run_without_claim_is_found(
    *, state: RunState, range_: object, batch_id: str, blocks: bool
) -> None:
    """An operator may move the offset while the run works."""
    worker = RunSnapshot("r1", batch_id, (range_,), state)  # type: ignore[arg-type]
    found = RunIndex([worker]).unclaimed(span(0, 0, 50), [(span(0, 0, 10), "b")])
    assert found == (("r1",) if blocks else ())


def part(
    run_id: str,
    state: RunState,
    done: str = "",
    undone: str = "",
    left_out: str = "",
    **more: object,
) -> RunSnapshot:
    """A run of a job with the assets a, b and c."""
    return run(
        run_id,
        state,
        done=frozenset(done),
        undone=frozenset(undone),
        left_out=tuple(left_out),
        parent_id="r1",
        **more,
    )


FIRST = replace(part("r1", S.FAILED, done="a", undone="b"), parent_id="")


@pytest.mark.parametrize(
    ("runs", "lacking"),
    [
        # Only what succeeded before is done again: the rest was never there.
        ([FIRST, part("r2", S.SUCCEEDED, done="a", left_out="bc")], "bc"),
        # As Dagster re-executes from the failure.
        ([FIRST, part("r2", S.SUCCEEDED, done="bc", left_out="a")], ""),
        # Piece by piece.
        # r3 has made what r2 left out, and spoilt what r2 had made
        (
            [
                FIRST,
                part("r2", S.SUCCEEDED, done="b", left_out="a"),
                part("r3", S.FAILED, done="a", undone="b"),
            ],
            "b",
        ),
        (
            [
                FIRST,
                part("r2", S.SUCCEEDED, done="b", left_out="ac"),
                part("r3", S.SUCCEEDED, done="c", left_out="ab"),
            ],
            "",
        ),
        # The newest run that tried an asset decides: a later failure may have damaged the
        # output of an earlier success.
        (
            [
                FIRST,
                part("r2", S.FAILED, undone="a"),
                part("r3", S.SUCCEEDED, done="bc", left_out="a"),
            ],
            "a",
        ),
        # The run that did the rest was deleted.
        ([part("r3", S.SUCCEEDED, done="bc", left_out="a")], "a"),
        # A run with everything is enough, whatever the others left out.
        ([FIRST, part("r2", S.SUCCEEDED, done="a", left_out="bc"), run("r3", S.SUCCEEDED)], ""),
    ],
)
def test_range_is_done_once_every_asset_succeeded(runs: list[RunSnapshot], lacking: str) -> None:
    found = progress_of(RANGE, "b", RunIndex(runs), max_attempts=3)
    assert isinstance(found, Succeeded) == (not lacking)
    assert not isinstance(found, ToRequest) or found.left_out == tuple(lacking)


_LIVES: dict[str, dict[str, Any]] = {
    "failed": {},
    "canceled": {"state": S.CANCELED},
    "refused": {"is_refused": True},
    "taken back": {"state": S.CANCELED, "is_cancelled_by_member": True},
    "interrupted": {"is_interrupted": True},
    "not started": {"has_started": False},
    "created": {"state": S.CREATED},
    "retry": {"parent_id": "r0"},
}


@given(
    st.lists(
        st.sampled_from(sorted(_LIVES)),
        max_size=8,
    ),
    st.data(),
)
def test_progress_with_deleted_runs_requests_unused_run_key(
    lives: list[str], data: st.DataObject
) -> None:
    all_runs = [
        replace(run(f"r{n}", S.FAILED, attempt=n), **_LIVES[life])
        for n, life in enumerate(lives, 1)
    ]
    kept = data.draw(st.lists(st.sampled_from(all_runs), unique=True)) if all_runs else []
    kept.sort(key=lambda left: int(left.run_id[1:]))
    found = progress_of(RANGE, "b", RunIndex(kept), max_attempts=3)
    keys = {left.attempt for left in kept}
    match found:
        case InFlight(run_ids, unsubmitted=again):
            assert all(left.state is S.CREATED for left in kept if left.run_id in run_ids)
            assert again is not None
        case ToRequest(attempt=attempt) | Exhausted(attempt=attempt):
            assert attempt not in keys
        case _:
            pytest.fail(f"{found} from {kept}")

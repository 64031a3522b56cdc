"""The next steps of the reruns of a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot, RunState
from dagster_rebalance.core.operators.rerun_schedule import Cancel, RerunSteps, steps
from dagster_rebalance.core.runs.progress import MOST_IN_A_ROW
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from tests.core.world import span

S = RunState
RERUN = Rerun("abc", "ada", "the fix", 1_700_000_000.0, runs_at_once=2, batches=4)
BATCHES = tuple(RerunBatch(RERUN, n, (span(n, 0, 10), span(n, 10, 20))) for n in range(1, 5))
SAID = "rerun abc by ada: the fix: {} of 4 runs done, {} live"


def run(number: int, state: RunState, run_id: str = "", *, attempt: int = 1) -> RunSnapshot:
    """A run of a batch."""
    batch = BATCHES[number - 1]
    return RunSnapshot(run_id or f"run-{number}", batch.batch_id, batch.ranges, state, attempt)


def order(action: Action, partitions: str) -> Directive:
    """A directive of an operator."""
    return Directive(action, partitions, "bob", 1_700_000_000.0, "the table is moved")


def offered(found: RerunSteps) -> list[str]:
    """The batches for which a run is to be started."""
    return [batch_request.batch_id for batch_request in found.batch_requests]


def test_steps_start_runs_up_to_the_limit() -> None:
    found = steps(BATCHES, [], [])
    assert found.batch_requests == tuple(BatchRequest(b.batch_id, 1, b.ranges) for b in BATCHES[:2])
    assert found.notes == (SAID.format(0, 0),)
    found = steps(BATCHES, [run(1, S.STARTED)], [])
    assert offered(found) == ["r.abc.2"]
    assert found.notes == (SAID.format(0, 1),)
    assert offered(steps(BATCHES, [run(1, S.STARTED), run(2, S.WAITING)], [])) == []


def test_succeeded_batch_is_done_and_the_next_one_starts() -> None:
    found = steps(BATCHES, [run(1, S.SUCCEEDED), run(2, S.STARTED)], [])
    assert found.done == ((BATCHES[0], "run-1"),)
    assert offered(found) == ["r.abc.3"]
    assert found.notes == (SAID.format(1, 1),)
    assert steps((), [], []) == RerunSteps((), (), (), ())


def test_failed_run_halts_its_rerun_until_it_is_re_executed() -> None:
    failed = run(1, S.FAILED, "failed-run")
    found = steps(BATCHES, [failed], [])
    assert offered(found) == []
    (note,) = found.notes
    assert note == (
        f"{SAID.format(0, 0)}; halted, because run failed-r did not succeed: re-execute "
        "failed runs, or cancel the rest with dagster-rebalance rerun --cancel abc"
    )
    again = replace(run(1, S.STARTED, "again"), parent_id="failed-run")
    assert offered(steps(BATCHES, [failed, again], [])) == []
    found = steps(BATCHES, [failed, replace(again, state=S.SUCCEEDED)], [])
    assert found.done == ((BATCHES[0], "again"),)
    assert offered(found) == ["r.abc.2", "r.abc.3"]


def test_repeated_refusals_halt_a_rerun() -> None:
    refused = [
        replace(run(1, S.FAILED, f"run-{n}", attempt=n), is_refused=True)
        for n in range(1, MOST_IN_A_ROW + 1)
    ]
    assert steps(BATCHES, refused[:1], []).batch_requests[0].attempt == 2
    found = steps(BATCHES, refused, [])
    assert offered(found) == []
    assert "halted" in found.notes[0]


def test_unsubmitted_run_of_a_rerun_is_requested_again() -> None:
    found = steps(BATCHES, [run(1, S.CREATED, attempt=3), run(2, S.STARTED)], [])
    assert found.batch_requests == (BatchRequest("r.abc.1", 3, BATCHES[0].ranges),)


@pytest.mark.parametrize(
    ("action", "state", "cancels"),
    [
        (Action.PAUSE, S.WAITING, (Cancel("run-1", only_unstarted=True),)),
        (Action.PAUSE, S.STARTING, (Cancel("run-1", only_unstarted=True),)),
        (Action.PAUSE, S.STARTED, ()),
        (Action.STOP, S.STARTED, (Cancel("run-1", only_unstarted=False),)),
        (Action.STOP, S.SUCCEEDED, ()),
    ],
)
def test_directive_cancels_and_blocks_batches_of_a_rerun(
    action: Action, state: RunState, cancels: tuple[Cancel, ...]
) -> None:
    found = steps(BATCHES, [run(1, state)], [order(action, "orders:1")])
    assert found.cancels == cancels
    assert "r.abc.1" not in offered(found)
    assert "r.abc.2" in offered(found)  # it has other partitions
    assert "orders:1 is " in found.notes[0]
    assert "dagster-rebalance resume orders:1" in found.notes[0]


def test_stop_wins_over_pause() -> None:
    wide = RerunBatch(RERUN, 1, (span(1, 0, 10), span(2, 0, 10)))
    at_work = RunSnapshot("run-1", wide.batch_id, wide.ranges, S.STARTED, 1)
    orders = [order(Action.PAUSE, "orders:1"), order(Action.STOP, "orders:2")]
    assert steps([wide], [at_work], orders).cancels == (Cancel("run-1", only_unstarted=False),)
    unsubmitted = replace(at_work, state=S.CREATED)
    assert steps([wide], [unsubmitted], orders).batch_requests == ()


def test_reruns_have_separate_limits() -> None:
    other = replace(RERUN, rerun_id="xyz", runs_at_once=1, batches=2)
    theirs = [RerunBatch(other, n, (span(9, n, n + 1),)) for n in (1, 2)]
    found = steps([*BATCHES, *theirs], [run(1, S.FAILED)], [])
    assert offered(found) == ["r.xyz.1"]
    assert len(found.notes) == 2


def test_partly_processed_batch_is_not_done() -> None:
    part = replace(run(1, S.SUCCEEDED, "part"), ranges=BATCHES[0].ranges[:1])
    found = steps(BATCHES[:1], [part], [])
    assert found.done == ()
    assert offered(found) == ["r.abc.1"]
    rest = replace(run(1, S.STARTED, "rest"), ranges=BATCHES[0].ranges[1:])
    assert offered(steps(BATCHES[:1], [part, rest], [])) == []

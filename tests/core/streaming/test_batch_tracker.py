"""The batches of a streaming run, and the reuse of its readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.offsets import Log
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunState
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from dagster_rebalance.core.streaming import batch_tracker
from dagster_rebalance.core.streaming.batch_tracker import BatchTracker, ReaderReuse, WorkerAction
from tests.core.world import span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.streaming.batch_tracker import BegunBatch

FIRST, SECOND = "s.r1.1.1", "s.r1.2.3"
RANGE, OTHER = span(0, 0, 5), span(1, 0, 5)
LOGS = {tp(0): Log("an id", 1), tp(1): Log("an id", 2)}
ORDERS = Log("an id", 3)


def begin(work: BatchTracker, *ranges: OffsetRange, now: float = 0.0) -> BegunBatch | None:
    """Begin the first batch, if it is not begun yet."""
    request = BatchRequest(FIRST, 1, ranges or (RANGE,))
    return work.begin([request], {FIRST}, LOGS.__getitem__, now)


def test_worker_begins_one_batch_at_a_time() -> None:
    work = BatchTracker("r1")
    assert work.begin([], set(), LOGS.__getitem__) is None
    begun = work.begin(
        [BatchRequest(FIRST, 1, (RANGE,)), BatchRequest(SECOND, 1, (OTHER,))],
        {FIRST, SECOND},
        LOGS.__getitem__,
    )
    assert begun is not None
    assert begun.batch_id == FIRST
    assert begun.logs == {tp(0): LOGS[tp(0)]}
    assert (
        work.begin([BatchRequest(SECOND, 1, (OTHER,))], {FIRST, SECOND}, LOGS.__getitem__) is None
    )


def test_worker_begins_no_batch_twice() -> None:
    work = BatchTracker("r1")
    stale = BatchRequest(FIRST, 1, (RANGE,))
    work.begin([stale], {FIRST}, LOGS.__getitem__)
    work.end(BatchOutcome.SUCCEEDED)
    assert work.begin([stale], {FIRST}, LOGS.__getitem__) is None
    later = BatchRequest(FIRST, 1, (OTHER,))  # Kafka has stored this claim later
    begun = work.begin([stale, later], {FIRST}, LOGS.__getitem__)
    assert begun is not None
    assert begun.ranges == (OTHER,)


def test_end_without_a_batch_changes_nothing() -> None:
    assert BatchTracker("r1").end(BatchOutcome.SUCCEEDED) is None


def test_heartbeat_changes_with_each_read() -> None:
    work = BatchTracker("r1")
    begin(work)
    signs = {work.read([FIRST], ())[-1].heartbeat for _ in range(3)}
    assert len(signs) == 3


def test_read_of_an_unbegun_claim_has_only_earlier_attempts() -> None:
    seen = BatchTracker("r1").read([SECOND, "b-1", "s.r2.1.1"], [(SECOND, RANGE), ("b-1", OTHER)])
    assert [(run.batch_id, run.state, run.ranges) for run in seen] == [
        (SECOND, RunState.FAILED, (RANGE,)),
        (SECOND, RunState.FAILED, (RANGE,)),
    ]


def test_unclaimed_batch_is_forgotten_after_its_report() -> None:
    work = BatchTracker("r1")
    begin(work)
    work.end(BatchOutcome.SUCCEEDED)
    work.publish_outcomes_of([(FIRST, RANGE)])
    work.begin([], set(), LOGS.__getitem__)
    assert work.unreported == {(FIRST, RANGE): BatchOutcome.SUCCEEDED}
    work.mark_reported([(FIRST, RANGE)])
    work.begin([], set(), LOGS.__getitem__)
    assert work.unreported == {}
    (seen,) = work.read([FIRST], [(FIRST, RANGE)])
    assert seen.state is RunState.SUCCEEDED, "the partition may come back with the claim"


def test_batch_begun_in_parts_is_known_by_all_parts() -> None:
    work = BatchTracker("r1")
    claims = [(FIRST, RANGE), (FIRST, OTHER)]
    begin(work)
    work.end(BatchOutcome.SUCCEEDED)
    assert [run.ranges for run in work.read([FIRST], claims)] == [(RANGE,)]
    begin(work, OTHER)
    assert [(run.ranges, run.state) for run in work.read([FIRST], claims)] == [
        ((RANGE,), RunState.SUCCEEDED),
        ((OTHER,), RunState.STARTED),
    ]
    work.publish_outcomes_of(claims)
    assert work.unreported == {(FIRST, RANGE): BatchOutcome.SUCCEEDED}
    work.end(BatchOutcome.DROPPED)
    assert work.unreported == {
        (FIRST, RANGE): BatchOutcome.SUCCEEDED,
        (FIRST, OTHER): BatchOutcome.DROPPED,
    }


def test_abandoned_claim_is_unreported_until_its_batch_ends() -> None:
    work = BatchTracker("r1")
    begin(work)
    work.publish_outcomes_of([(FIRST, RANGE), (SECOND, OTHER), (FIRST, OTHER)])
    assert work.unreported == {
        (SECOND, OTHER): BatchOutcome.DROPPED,
        (FIRST, OTHER): BatchOutcome.DROPPED,
    }
    work.end(BatchOutcome.SUCCEEDED)
    assert work.unreported[(FIRST, RANGE)] is BatchOutcome.SUCCEEDED


def test_running_batch_cannot_be_marked_as_reported() -> None:
    work = BatchTracker("r1")
    begin(work)
    work.publish_outcomes_of([(FIRST, RANGE)])
    work.mark_reported([(FIRST, RANGE)])
    work.end(BatchOutcome.SUCCEEDED)
    assert work.unreported == {(FIRST, RANGE): BatchOutcome.SUCCEEDED}


def test_oldest_reported_outcomes_are_forgotten() -> None:
    work = BatchTracker("r1")
    claims = [(f"s.r1.{number}.1", RANGE) for number in range(batch_tracker._MAX_REPORTED_KEPT + 5)]
    for claim in claims:
        work.publish_outcomes_of([claim])
        work.mark_reported([claim])
    assert list(work._reported) == claims[5:]


def test_failure_is_unreported_at_once() -> None:
    work = BatchTracker("r1")
    begin(work)
    work.end(BatchOutcome.FAILED)
    assert work.unreported == {(FIRST, RANGE): BatchOutcome.FAILED}


def begun(**limits: float) -> BatchTracker:
    """A run whose batch was begun at 100."""
    work = BatchTracker("r1", **limits)
    begin(work, now=100.0)
    return work


def test_late_batch_is_interrupted_and_a_failed_attempt() -> None:
    work = begun(limit_s=60.0)
    assert work.next_action(159.0) is WorkerAction.NOTHING
    assert work.next_action(160.0) is WorkerAction.INTERRUPT
    assert work.next_action(160.5) is WorkerAction.NOTHING
    assert work.next_action(161.5) is WorkerAction.INTERRUPT, "the first signal may be lost"
    ended = work.end(BatchOutcome.INTERRUPTED)
    assert ended is not None
    assert (ended.outcome, ended.is_late) == (BatchOutcome.FAILED, True)
    assert work.next_action(500.0) is WorkerAction.NOTHING


def test_late_batch_that_succeeds_is_a_success() -> None:
    work = begun(limit_s=60.0)
    work.next_action(160.0)
    ended = work.end(BatchOutcome.SUCCEEDED)
    assert ended is not None
    assert ended.outcome is BatchOutcome.SUCCEEDED


def test_batch_that_ignores_its_interruption_ends_the_process() -> None:
    work = begun(patience_s=30.0)
    work.interrupt(110.0)
    work.interrupt(120.0)
    assert work.next_action(120.5) is WorkerAction.NOTHING
    assert work.next_action(121.5) is WorkerAction.INTERRUPT
    assert work.next_action(140.0) is WorkerAction.END_PROCESS, (
        "it counts from the first interruption"
    )
    ended = work.end(BatchOutcome.INTERRUPTED)
    assert ended is not None
    assert ended.outcome is BatchOutcome.INTERRUPTED


def test_interrupt_without_a_batch_does_nothing() -> None:
    work = BatchTracker("r1", limit_s=1.0, patience_s=1.0)
    work.interrupt(1.0)
    work.mark_unwanted()
    assert work.next_action(100.0) is WorkerAction.NOTHING


def test_reader_is_reused_while_each_log_is_the_same() -> None:
    known = ReaderReuse()
    assert known.advance({tp(0): ORDERS}) == 0
    assert known.advance({tp(1): Log("an id", 7)}) == 0
    assert known.advance({tp(0): ORDERS, tp(1): Log("an id", 7)}) == 0


@pytest.mark.parametrize("other", [Log("an id", 4), Log("another id", 3)])
def test_reader_is_replaced_after_an_election_or_recreation(other: Log) -> None:
    known = ReaderReuse()
    known.advance({tp(0): ORDERS, tp(1): ORDERS})
    assert known.advance({tp(1): other}) == 1
    assert known.advance({tp(0): ORDERS, tp(1): other}) == 1
    assert known.advance({tp(0): other}) == 2, "its log was another one when they read it"


@pytest.mark.parametrize("unknown", [Log("an id", None), Log("", 3)])
def test_reader_is_never_reused_without_topic_ids(unknown: Log) -> None:
    known = ReaderReuse()
    assert known.advance({tp(0): unknown, tp(1): ORDERS}) is None
    assert known.advance({tp(1): ORDERS}) == 0

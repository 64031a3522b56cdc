"""Run requests: repeated with one key until their run exists."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.engine import run_requests
from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot, RunState
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    FailureKind,
    FailureStreak,
    InFlight,
    Progress,
    Succeeded,
    ToRequest,
)
from dagster_rebalance.core.runs.retry import NEVER
from tests.core.world import span, tp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

NOW = 100.0


def due_requests(
    partitions: Iterable[OwnedPartition],
    *,
    max_runs: int = 4,
    max_attempts: int = 3,
    directives: Sequence[Directive] = (),
    worker: str = "",
) -> tuple[BatchRequest, ...]:
    """The requests due now."""
    return run_requests.due_requests(
        partitions,
        NOW,
        max_runs=max_runs,
        max_attempts=max_attempts,
        directives=directives,
        worker=worker,
    )


def owned(
    number: int, *work: tuple[str, int, Progress], phase: Phase = Phase.OWNED, due_at: float = 0.0
) -> OwnedPartition:
    """A partition at offset 0 with claims (batch id, until, progress)."""
    ledger = OffsetLedger(tp(number), 1, 0)
    for batch_id, until, progress in work:
        ledger = ledger.with_claim(batch_id, until)
        ledger = ledger.with_progress(1, ledger.entries[-1].range, progress, due_at=due_at)
    return OwnedPartition(tp(number), 1, phase, stored=encode(StoredPartition(0)), ledger=ledger)


def test_ranges_of_a_batch_with_the_same_attempt_are_one_request() -> None:
    both = [owned(1, ("b", 5, ToRequest())), owned(0, ("b", 9, ToRequest()))]
    assert due_requests(both) == (BatchRequest("b", 1, (span(0, 0, 9), span(1, 0, 5))),)
    assert due_requests(both)[0].run_key == due_requests(reversed(both))[0].run_key


def test_ranges_of_a_batch_with_different_attempts_are_separate_requests() -> None:
    parts = [owned(0, ("b", 9, ToRequest(1))), owned(1, ("b", 5, ToRequest(2)))]
    assert due_requests(parts) == (
        BatchRequest("b", 1, (span(0, 0, 9),)),
        BatchRequest("b", 2, (span(1, 0, 5),)),
    )


def test_run_key_changes_with_attempt_and_ranges() -> None:
    batch_request = BatchRequest("b", 1, (span(0, 0, 9),))
    keys = {
        batch_request.run_key,
        replace(batch_request, attempt=2).run_key,
        replace(batch_request, ranges=(span(0, 0, 8),)).run_key,
        replace(batch_request, batch_id="c").run_key,
    }
    assert len(keys) == 4
    assert batch_request.run_key == BatchRequest("b", 1, (span(0, 0, 9),)).run_key
    assert batch_request.run_key.startswith("b.")


def test_range_with_a_run_is_not_requested() -> None:
    assert (
        due_requests(
            [
                owned(
                    0,
                    ("a", 1, Succeeded("r")),
                    ("b", 2, InFlight(("r",))),
                    ("c", 3, DeadLettered("r")),
                )
            ]
        )
        == ()
    )
    for phase in set(Phase) - {Phase.OWNED, Phase.STOPPED}:
        assert due_requests([owned(0, ("a", 1, ToRequest()), phase=phase)]) == ()


def test_stopped_partition_requests_only_its_first_undone_range() -> None:
    work = (
        ("a", 1, Succeeded("r")),
        ("b", 2, Exhausted(("r1", "r2"), attempt=3)),
        ("c", 3, ToRequest()),
    )
    assert due_requests([owned(0, *work, phase=Phase.STOPPED)]) == (
        BatchRequest("b", 3, (span(0, 1, 2),)),
    )
    assert due_requests([owned(0, *work[:1], phase=Phase.STOPPED)]) == ()


def test_range_is_not_requested_before_it_is_due() -> None:
    later = owned(0, ("b", 9, ToRequest(2, 1)), due_at=NOW + 1)
    assert due_requests([later, owned(1, ("b", 5, ToRequest(2, 1)))]) == (
        BatchRequest("b", 2, (span(1, 0, 5),)),
    )
    assert run_requests.runs_in_flight([later], NOW) == frozenset()
    assert run_requests.runs_in_flight([later], NOW + 1) == {"a retry"}


def test_few_failed_ranges_are_requested_alone() -> None:
    failed = [owned(number, ("b", 9, ToRequest(2, 1))) for number in range(3)]
    assert due_requests(failed) == tuple(
        BatchRequest("b", 2, (span(number, 0, 9),)) for number in range(3)
    )


def test_failed_batch_of_hundreds_of_ranges_is_divided() -> None:
    failed = [owned(number, ("b", 9, ToRequest(2, 1))) for number in range(200)]
    found = due_requests(failed, max_runs=100)
    assert [len(request.ranges) for request in found] == [25] * 8
    assert sorted(range_ for request in found for range_ in request.ranges) == [
        span(number, 0, 9) for number in range(200)
    ]
    assert {(request.attempt, request.failures) for request in found} == {(2, 1)}
    assert found[0].ranges[:2] == (span(0, 0, 9), span(8, 0, 9))


def test_divided_batch_keeps_its_requests_while_others_of_the_batch_begin_or_move() -> None:
    failed = [owned(number, ("b", 9, ToRequest(2, 1))) for number in range(64)]
    first, *others = due_requests(failed, max_runs=100)
    begun = [
        owned(number, ("b", 9, InFlight(("r",)))) if number % 8 == 0 else one
        for number, one in enumerate(failed)
    ]
    assert due_requests(begun, max_runs=100) == tuple(others)
    assert due_requests(failed, max_runs=1) == (first,)


def test_last_attempt_on_a_range_is_alone() -> None:
    failed = [owned(number, ("b", 9, ToRequest(3, 2))) for number in range(64)]
    alone = due_requests(failed, max_runs=100)
    assert [len(request.ranges) for request in alone] == [1] * 64
    assert len(due_requests(failed, max_runs=100, max_attempts=4)) == 64
    twice = [owned(number, ("b", 9, ToRequest(2, 1))) for number in range(64)]
    assert len(due_requests(twice, max_runs=100)) == 8
    assert len(due_requests(twice, max_runs=100, max_attempts=2)) == 64


def test_batch_that_was_interrupted_twice_is_divided_in_a_streaming_run() -> None:
    def interrupted(times: int) -> list[OwnedPartition]:
        streak = FailureStreak(FailureKind.INTERRUPTED, times, "r1")
        return [owned(number, ("b", 9, ToRequest(1, 0, streak))) for number in range(64)]

    assert len(due_requests(interrupted(1), max_runs=100, worker="w")) == 1
    assert len(due_requests(interrupted(2), max_runs=100, worker="w")) == 8
    assert len(due_requests(interrupted(3), max_runs=100, worker="w")) == 64
    assert len(due_requests(interrupted(4), max_runs=100)) == 1


def test_ranges_that_did_not_fail_are_one_request() -> None:
    both = [
        owned(number, ("b", 9, ToRequest(2, 0, FailureStreak(FailureKind.NOT_STARTED, 1, "r1"))))
        for number in range(2)
    ]
    assert due_requests(both) == (BatchRequest("b", 2, (span(0, 0, 9), span(1, 0, 9))),)


def test_failed_ranges_wait_for_free_runs_longest_waiting_first() -> None:
    failed = [owned(number, ("b", 9, ToRequest(2, 1)), due_at=NOW - number) for number in range(4)]
    busy = owned(4, ("c", 9, InFlight(("r7",))))
    new = owned(5, ("d", 9, ToRequest()))
    assert due_requests([*failed, busy, new], max_runs=4) == (
        BatchRequest("d", 1, (span(5, 0, 9),)),
        BatchRequest("b", 2, (span(3, 0, 9),)),
        BatchRequest("b", 2, (span(2, 0, 9),)),
    )
    assert due_requests([*failed, busy], max_runs=1) == ()


def test_unsubmitted_run_is_requested_with_its_own_key() -> None:
    run = RunSnapshot("r1", "b", (span(0, 0, 9), span(1, 0, 5)), RunState.CREATED, attempt=2)
    again = InFlight(("r1",), ("r1",), unsubmitted=run)
    assert due_requests([owned(0, ("b", 9, again))]) == (BatchRequest("b", 2, run.ranges),)
    assert due_requests([owned(0, ("b", 9, again)), owned(1, ("b", 5, again))]) == (
        BatchRequest("b", 2, run.ranges),
    )
    assert due_requests([owned(0, ("b", 9, again), phase=Phase.DRAINING)]) == ()


def test_unsubmitted_run_of_the_former_batch_is_requested() -> None:
    run = RunSnapshot("r1", "b", (span(0, 0, 9),), RunState.CREATED, attempt=2)
    taken = OwnedPartition(
        tp(0),
        1,
        Phase.OWNED,
        stored=encode(StoredPartition(0)),
        ledger=OffsetLedger(tp(0), 1, 0).with_claim("s.r7.1.1", 9, previous_batch_id="b"),
    )
    assert due_requests([taken]) == ()
    again = InFlight(("r1",), ("r1",), unsubmitted=run)
    assert taken.ledger is not None
    taken = taken._replace(ledger=taken.ledger.with_progress(1, span(0, 0, 9), again))
    assert due_requests([taken]) == (BatchRequest("b", 2, run.ranges),)
    requested = run_requests.requested_ranges(due_requests([taken]))
    assert run_requests.requested_range(taken, requested, NOW) == (
        span(0, 0, 9),
        BatchRequest("b", 2, run.ranges),
    )


def test_unsubmitted_run_with_a_paused_partition_is_not_requested() -> None:
    run = RunSnapshot("r1", "b", (span(0, 0, 9), span(1, 0, 5)), RunState.CREATED)
    again = InFlight(("r1",), ("r1",), unsubmitted=run)
    pause = Directive(Action.PAUSE, "orders:1", "ada", NOW, "the table is moved")
    mine, paused = owned(0, ("b", 9, again)), owned(1, ("b", 5, again))._replace(directive=pause)
    assert due_requests([mine, paused], directives=[pause]) == ()
    assert due_requests([mine], directives=[pause]) == ()
    resume = replace(pause, action=Action.RESUME)
    assert due_requests([mine], directives=[pause, resume]) == (BatchRequest("b", 0, run.ranges),)


def test_batch_with_a_pending_claim_is_not_requested() -> None:
    written = owned(0, ("b", 9, ToRequest()))
    unwritten = owned(1)
    unwritten = unwritten._replace(pending=unwritten.claim_write("b", 5, now=0.0))
    assert due_requests([written, unwritten]) == ()
    assert due_requests([written, owned(1, ("b", 5, ToRequest()))]) == (
        BatchRequest("b", 1, (span(0, 0, 9), span(1, 0, 5))),
    )
    assert due_requests([written, unwritten._replace(phase=Phase.DRAINING)]) == (
        BatchRequest("b", 1, (span(0, 0, 9),)),
    )


def test_runs_in_flight_are_those_that_take_room() -> None:
    pending = owned(5)
    partitions = [
        owned(0, ("requested", 1, ToRequest()), ("works", 2, InFlight(("r",)))),
        owned(
            1,
            ("failed", 1, Exhausted(("r",))),
            ("behind", 2, ToRequest()),
            phase=Phase.STOPPED,
            due_at=NEVER,
        ),
        owned(
            2, ("draining", 1, InFlight(("r2",))), ("left", 2, ToRequest()), phase=Phase.DRAINING
        ),
        owned(3, ("done", 1, Succeeded("r"))),
        pending._replace(pending=pending.claim_write("claiming", 5, now=0.0)),
        pending._replace(pending=pending.first_write(0.0)),
    ]
    assert run_requests.runs_in_flight(partitions, NOW) == {
        "requested",
        "r",
        "r2",
        "claiming",
    }


def test_each_run_of_a_failed_batch_is_a_run_in_flight() -> None:
    again = [
        owned(number, ("b", 9, InFlight((f"r{number}",), is_retry=True))) for number in range(2)
    ]
    assert run_requests.runs_in_flight(again, NOW) == {"r0", "r1"}
    part = owned(2, ("b.n0-9", 9, InFlight(("r2",))))
    assert run_requests.runs_in_flight([part], NOW) == {"r2"}


def test_failed_ranges_leave_one_of_several_runs_to_new_batches() -> None:
    failed = [owned(number, ("b", 9, ToRequest(2, 1))) for number in range(8)]
    working = [
        owned(number, ("b", 9, InFlight((f"r{number}",), is_retry=True))) for number in (8, 9)
    ]
    assert len(due_requests(failed, max_runs=4)) == 3
    assert len(due_requests([*failed, *working], max_runs=4)) == 1
    assert len(due_requests(failed, max_runs=1)) == 1
    assert run_requests.runs_in_flight([*failed, *working], NOW) == {"r8", "r9"}


def test_new_batches_leave_one_run_to_failed_ranges() -> None:
    failed = [owned(number, (f"b{number}", 9, ToRequest(2, 1))) for number in range(8)]
    new = [owned(number, (f"n{number}", 9, InFlight((f"r{number}",)))) for number in (8, 9, 10)]
    assert run_requests.runs_in_flight([*failed, *new], NOW) == {"r8", "r9", "r10", "a retry"}
    assert run_requests.runs_in_flight([*failed, *new], NOW, retries=False) == {"r8", "r9", "r10"}
    assert len(due_requests([*failed, *new], max_runs=4)) == 1


def test_directives_are_compared_once_with_an_unsubmitted_run_of_many_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans, asked = tuple(span(number, 0, 5) for number in range(50)), []
    run = RunSnapshot("r1", "b", spans, RunState.CREATED, attempt=1)
    monkeypatch.setattr(run_requests, "in_force", lambda *which: asked.append(which))
    again = InFlight(("r1",), ("r1",), unsubmitted=run)
    partitions = [owned(number, ("b", 5, again)) for number in range(50)]
    assert due_requests(partitions) == (BatchRequest("b", 1, spans),)
    assert len(asked) == len(spans)

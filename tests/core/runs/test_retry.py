"""Delays between runs on one range, and stops of its partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import summary
from dagster_rebalance.core.runs.progress import (
    Exhausted,
    FailureKind,
    FailureStreak,
    InFlight,
    Succeeded,
    ToRequest,
    blocking,
)
from dagster_rebalance.core.runs.retry import NEVER, RetryBackoff, why_blocked
from tests.core.world import Member, World, span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.run_snapshot import BatchRequest

BACKOFF = RetryBackoff()
NOTHING: tuple[BatchRequest, ...] = ()
ONE_RUN = BatchLimits(max_ranges_per_run=3, max_runs_in_flight=1)
RUN = "ab12cd34"
STOP = FailureStreak(FailureKind.REFUSED, 5, RUN, "Kafka is away")


def failed(count: int, kind: FailureKind = FailureKind.FAILED) -> ToRequest:
    """A range whose newest runs ended in one way."""
    return ToRequest(
        count + 1,
        count if kind is FailureKind.FAILED else 0,
        FailureStreak(kind, count, RUN, "Kafka is away"),
    )


@pytest.mark.parametrize("kind", list(FailureKind))
def test_delay_grows_with_consecutive_failures_up_to_limit(kind: FailureKind) -> None:
    waits = [
        BACKOFF.wait_s(failed(count, kind), has_dead_letters=False)
        for count in (1, 2, 3, 4, 5, 10_000)
    ]
    assert waits == [5.0, 30.0, 180.0, 900.0, 900.0, 900.0]


def test_progress_without_failure_has_no_delay() -> None:
    assert BACKOFF.wait_s(ToRequest(4), has_dead_letters=False) == 0.0
    assert BACKOFF.wait_s(InFlight(("r",)), has_dead_letters=False) == 0.0


def test_exhausted_range_is_retried_unless_disabled_or_cancelled() -> None:
    exhausted = Exhausted(("r1", "r2", "r3"), attempt=4)
    assert BACKOFF.wait_s(exhausted, has_dead_letters=False) == 180.0
    assert BACKOFF.wait_s(exhausted, has_dead_letters=True) == NEVER
    assert BACKOFF.wait_s(Exhausted(("r1",), is_cancelled=True), has_dead_letters=False) == NEVER
    assert RetryBackoff(retry_stopped=False).wait_s(exhausted, has_dead_letters=False) == NEVER


@pytest.mark.parametrize(("first_s", "limit_s"), [(-1.0, 5.0), (10.0, 5.0)])
def test_invalid_backoff_is_refused(first_s: float, limit_s: float) -> None:
    with pytest.raises(ConfigurationError, match="retry_delay_s"):
        RetryBackoff(first_s, limit_s)


def test_partition_is_blocked_after_five_consecutive_non_attempts() -> None:
    for kind in (FailureKind.NOT_STARTED, FailureKind.REFUSED, FailureKind.INTERRUPTED):
        assert blocking(failed(4, kind)) is None
        assert blocking(failed(5, kind)) == failed(5, kind).streak
    assert blocking(failed(99)) is None
    assert blocking(ToRequest(9)) is None
    assert blocking(Succeeded("r")) is None
    assert blocking(InFlight(("r",), stop_cause=STOP)) == STOP


@pytest.mark.parametrize(
    ("blocked", "words"),
    [
        (Exhausted((RUN,)), ("orders-0: run ab12cd34 failed on orders-0 [0, 10). Fix",)),
        (
            Exhausted((RUN,), reason="ValueError: no price"),
            ("run ab12cd34 failed on orders-0 [0, 10): ValueError: no price. Fix",),
        ),
        (
            Exhausted(("r1", RUN)),
            ("2 runs failed on orders-0 [0, 10), the last one is ab12cd34", "re-execute that run"),
        ),
        (
            Exhausted(("r1", "r2"), re_executed=(RUN,)),
            ("orders-0: 3 runs failed on orders-0 [0, 10), the last one is ab12cd34",),
        ),
        (Exhausted((RUN,), left_out=("b", "c")), ("left out b, c", "re-execute that run")),
        (
            Exhausted(("r1", RUN), is_cancelled=True),
            ("A user cancelled one of them, so it is not retried automatically. Fix the cause",),
        ),
        (
            FailureStreak(FailureKind.NOT_STARTED, 5, RUN),
            (
                "do not start",
                RUN,
                "not attempts",
                "`dagster-rebalance retry orders:0` tries it now",
            ),
        ),
        (
            STOP,
            (
                "refuse themselves",
                RUN,
                "Kafka is away",
                "`dagster-rebalance retry orders:0` tries it now",
            ),
        ),
        (FailureStreak(FailureKind.REFUSED, 5, RUN), ("no reason given",)),
        (
            FailureStreak(FailureKind.INTERRUPTED, 5, RUN),
            (
                "5 consecutive runs",
                "ended by a signal",
                RUN,
                "not attempts",
                "drained",
                "`dagster-rebalance retry orders:0` tries it now",
            ),
        ),
    ],
)
def test_stop_reason_names_cause_and_remedy(
    blocked: Exhausted | FailureStreak, words: tuple[str, ...]
) -> None:
    text = why_blocked(span(0, 0, 10), blocked, "b")
    assert text.startswith("orders-0: ")
    assert all(word in text for word in words)


def started(world: World, member: Member) -> str:
    """The one run that a tick starts; it passes its check."""
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    return run_id


def test_next_attempt_is_requested_after_delay() -> None:
    world = World(records=10)
    member = world.member(owns=1, backoff=BACKOFF)
    world.dagster.move(started(world, member), RunState.FAILED)
    world.wait(1, member)
    assert member.engine.batch_requests == NOTHING
    assert (
        "run run1 for [0, 10) failed; next run (attempt 2) in 5 s"
        in summary(member.engine, world.now)[1]
    )
    world.wait(5, member)
    assert [batch_request.attempt for batch_request in member.engine.batch_requests] == [2]


def test_new_owner_retries_failed_range_at_once() -> None:
    world = World(records=10)
    first = world.member(owns=1, backoff=BACKOFF)
    world.dagster.move(started(world, first), RunState.FAILED)
    world.wait(1, first)
    second = world.member(owns=1, backoff=BACKOFF)
    world.wait(1, second)
    assert [batch_request.attempt for batch_request in second.engine.batch_requests] == [2]


def test_new_owner_delays_runs_that_do_not_start() -> None:
    world = World(records=10)
    first = world.member(owns=1, backoff=BACKOFF)
    (run_id,) = first.tick()
    world.dagster.move(run_id, RunState.FAILED, has_started=False)
    world.wait(1, first)
    second = world.member(owns=1, backoff=BACKOFF)
    world.wait(1, second)
    assert second.engine.batch_requests == NOTHING
    world.wait(5, second)
    assert [batch_request.attempt for batch_request in second.engine.batch_requests] == [2]


def test_failed_launches_stop_partition_without_dead_letter() -> None:
    """An outage of the launcher must not commit good data as a dead letter."""
    world = World(records=10)
    member = world.member(
        owns=1,
        settings=EngineSettings(max_attempts=1, dead_letter_topic="dead"),
        backoff=RetryBackoff(1.0, 1.0),
    )
    for _ in range(5):
        (run_id,) = member.tick()
        world.dagster.move(run_id, RunState.FAILED, has_started=False)
        world.wait(2, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert "do not start" in member.shown[-1][1]
    assert not world.kafka.letters
    run_id = started(world, member)
    world.wait(1, member)
    assert member.shown[-1] == (tp(0), "")
    world.succeed(run_id)
    world.wait(2, member)
    assert world.kafka.offset(0) == 10


def test_repeated_refusals_stop_partition_with_reason() -> None:
    world = World(records=10)
    member = world.member(owns=1, backoff=RetryBackoff(1.0, 1.0))
    for _ in range(5):
        (run_id,) = member.tick()
        world.dagster.move(
            run_id, RunState.FAILED, is_refused=True, refusal="Kafka could not be asked"
        )
        world.wait(3, member)
    assert "Kafka could not be asked" in member.shown[-1][1]
    run_id = started(world, member)
    world.wait(1, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED, (
        "whether its work will go well is not known yet"
    )
    world.succeed(run_id)
    world.wait(2, member)
    assert member.shown[-1] == (tp(0), "")
    assert world.kafka.offset(0) == 10


def test_stop_stays_shown_while_stopped_range_is_retried() -> None:
    world = World(records=10)
    member = world.member(
        owns=1, settings=EngineSettings(max_attempts=1), backoff=RetryBackoff(2.0, 2.0)
    )
    world.dagster.move(started(world, member), RunState.FAILED)
    world.wait(1, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert member.tick() == []
    world.wait(3, member)
    run_id = started(world, member)
    world.wait(1, member)
    assert [reason for _, reason in member.shown if not reason] == []
    assert "run run2 works on [0, 10)" in summary(member.engine, world.now)[1]
    world.succeed(run_id)
    world.wait(2, member)
    assert (world.kafka.offset(0), member.shown[-1]) == (10, (tp(0), ""))


def test_bad_range_stops_only_its_partition() -> None:
    world = World(records=10, partitions=3)
    member = world.member(
        owns=3,
        settings=EngineSettings(max_attempts=2, limits=ONE_RUN),
        backoff=RetryBackoff(0.5, 0.5, retry_stopped=False),
    )
    (first,) = member.tick()
    world.start(first)
    world.dagster.move(first, RunState.FAILED)
    world.wait(3, member)
    for _ in range(3):
        run_id = started(world, member)
        if world.dagster.runs[run_id].ranges == (span(1, 0, 10),):
            world.dagster.move(run_id, RunState.FAILED)
        else:
            world.succeed(run_id)
        world.wait(3, member)
    assert [world.kafka.offset(number) for number in range(3)] == [10, 0, 10]
    assert {
        partition
        for partition, owned in member.engine.partitions.items()
        if owned.phase is Phase.STOPPED
    } == {tp(1)}


def test_ignored_run_request_is_shown_and_repeated() -> None:
    """Dagster skips the key of a run whose tags were changed."""
    world = World(records=10)
    member = world.member(owns=1, settings=EngineSettings(stalled_after_s=60.0))
    (batch_request,) = member.engine.batch_requests
    world.dagster.keys.add(batch_request.run_key)
    for _ in range(13):
        assert member.tick() == []
        world.wait(5, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert f"dagster/run_key={batch_request.run_key}" in member.shown[-1][1]
    assert member.engine.batch_requests == (batch_request,)
    world.dagster.keys.clear()
    member.tick()
    world.wait(1, member)
    assert member.shown[-1] == (tp(0), "")


def test_time_without_ticks_is_not_counted_as_stalled() -> None:
    world = World(records=10)
    member = world.member(owns=1, settings=EngineSettings(stalled_after_s=60.0, lease_s=1000.0))
    member.feed(events.TickArrived())
    world.wait(100, member)
    member.feed(events.TickArrived())
    world.wait(2, member)
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED


def test_unsubmitted_run_is_requested_until_queued() -> None:
    world = World(records=10)
    member = world.member(owns=1)
    (batch_request,) = member.engine.batch_requests
    (run_id,) = member.tick(state=RunState.CREATED)
    world.dagster.move(run_id, RunState.CREATED, attempt=1)
    world.wait(1, member)
    assert member.engine.batch_requests == (batch_request,)
    assert "created but not submitted" in summary(member.engine, world.now)[1]
    world.dagster.move(run_id, RunState.WAITING)
    world.wait(1, member)
    assert member.engine.batch_requests == NOTHING


def test_partial_re_execution_does_not_commit_offsets() -> None:
    world = World(records=10)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1))
    first = started(world, member)
    world.dagster.move(
        first, RunState.FAILED, done=frozenset({"orders"}), undone=frozenset({"totals"})
    )
    world.wait(1, member)
    part = world.dagster.add("b1", (span(0, 0, 10),))
    world.dagster.move(
        part, RunState.SUCCEEDED, parent_id=first, left_out=("totals",), done=frozenset({"orders"})
    )
    world.wait(11, member)
    assert world.kafka.offset(0) == 0
    assert "left out totals" in member.shown[-1][1]
    rest = world.dagster.add("b1", (span(0, 0, 10),))
    assert world.check(rest) is None
    world.dagster.move(
        rest, RunState.SUCCEEDED, parent_id=first, left_out=("orders",), done=frozenset({"totals"})
    )
    world.wait(11, member)
    assert world.kafka.offset(0) == 10

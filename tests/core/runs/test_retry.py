"""Delays between runs on one range, and stops of its partition."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.run_snapshot import RunState
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
from tests.core.story import play
from tests.core.world import World, span
from tests.story import stories

BACKOFF = RetryBackoff()
SOME = {
    "SLOW": EngineSettings(backoff=RetryBackoff(5.0, 600.0)),
    "QUICK": EngineSettings(backoff=RetryBackoff(1.0, 1.0)),
    "LETTERS": EngineSettings(
        max_attempts=1, dead_letter_topic="dead", backoff=RetryBackoff(1.0, 1.0)
    ),
    "ONE": EngineSettings(max_attempts=1, backoff=RetryBackoff(2.0, 2.0)),
    "TOGETHER": EngineSettings(
        max_attempts=2,
        limits=BatchLimits(max_ranges_per_run=3, max_runs_in_flight=1),
        backoff=RetryBackoff(0.5, 0.5, retry_stopped=False),
    ),
    "STALLED": EngineSettings(stalled_after_s=60.0),
    "PATIENT": EngineSettings(stalled_after_s=60.0, lease_s=1000.0),
}
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
        BACKOFF.wait_s(failed(count, kind), is_settled=False) for count in (1, 2, 3, 4, 5, 10_000)
    ]
    assert waits == [5.0, 30.0, 180.0, 900.0, 900.0, 900.0]


def test_progress_without_failure_has_no_delay() -> None:
    assert BACKOFF.wait_s(ToRequest(4), is_settled=False) == 0.0
    assert BACKOFF.wait_s(InFlight(("r",)), is_settled=False) == 0.0


def test_exhausted_range_is_retried_unless_disabled_or_cancelled() -> None:
    exhausted = Exhausted(("r1", "r2", "r3"), attempt=4)
    assert BACKOFF.wait_s(exhausted, is_settled=False) == 180.0
    assert BACKOFF.wait_s(exhausted, is_settled=True) == NEVER
    assert BACKOFF.wait_s(Exhausted(("r1",), is_cancelled=True), is_settled=False) == NEVER
    assert RetryBackoff(retry_stopped=False).wait_s(exhausted, is_settled=False) == NEVER


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
                "`dagster-rebalance retry orders:0` retries it now",
            ),
        ),
        (
            STOP,
            (
                "the start check refuses the runs",
                RUN,
                "Kafka is away",
                "`dagster-rebalance retry orders:0` retries it now",
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
                "It is retried 900 s after the last try",
                "`dagster-rebalance retry orders:0` retries it now",
            ),
        ),
    ],
)
def test_stop_reason_names_cause_and_remedy(
    blocked: Exhausted | FailureStreak, words: tuple[str, ...]
) -> None:
    text = why_blocked(span(0, 0, 10), blocked, "b", RetryBackoff())
    assert text.startswith("orders-0: ")
    assert ". " not in text.problem, "it is a cell of a table"
    assert "ix the cause" in text.remedy or "Check for" in text.remedy
    assert all(word in text for word in words)


def five(*marks: str) -> str:
    """Five runs fail one after the other."""
    runs = (f"tick | run run{n} FAILED {' '.join(marks)} | wait 3" for n in range(1, 6))
    return "\n".join(runs)


@stories(f"""
## next_attempt_is_requested_after_its_delay
join m 1 SLOW | tick | start run1 | run run1 FAILED | wait 1 | requests = none
summary ~ run run1 for [0, 10) failed; next run (attempt 2) in 5 s
wait 5 | requests = b1.2 0[0,10)

## new_owner_retries_a_failed_range_at_once
join m 1 SLOW | tick | start run1 | run run1 FAILED | wait 1
join n 1 SLOW | wait 1 | requests = b1.2 0[0,10)

## new_owner_delays_runs_that_do_not_start
join m 1 SLOW | tick | run run1 FAILED has_started=0 | wait 1
join n 1 SLOW | wait 1 | requests = none | wait 5 | requests = b1.2 0[0,10)

## failed_launches_stop_a_partition_without_a_dead_letter
# An outage of the launcher must not commit good data as a dead letter.
join m 1 LETTERS
{five("has_started=0")}
phase = STOPPED | news ~ do not start | letters = none
tick | start run6 | wait 1 | news = resumed | succeed run6 | wait 2 | offset 0 = 10

## repeated_refusals_stop_a_partition_with_their_reason
join m 1 QUICK
{five("is_refused=1", "'refusal=Kafka could not be asked'")}
news ~ Kafka could not be asked
tick | start run6 | wait 1 | phase = STOPPED # its outcome is not known yet
succeed run6 | wait 2 | news = resumed | offset 0 = 10

## stop_stays_shown_while_the_range_is_retried
join m 1 ONE | tick | start run1 | run run1 FAILED | wait 1 | phase = STOPPED
tick | made = none | wait 3 | tick | start run2 | wait 1 | shown !~ resumed
summary ~ run run2 works on [0, 10) | succeed run2 | wait 2 | offset 0 = 10 | news = resumed

## bad_range_stops_only_its_partition
world 10 3 | join m 3 TOGETHER | tick | start run1 | run run1 FAILED | wait 3
tick | start run2 | ranges run2 = 0[0,10) | succeed run2 | wait 3
tick | start run3 | ranges run3 = 1[0,10) | run run3 FAILED | wait 3
tick | start run4 | ranges run4 = 2[0,10) | succeed run4 | wait 3
offset 0 = 10 | offset 1 = 0 | offset 2 = 10
phase 0 = OWNED | phase 1 = STOPPED | phase 2 = OWNED

## ignored_run_request_is_shown_and_repeated
# Dagster skips the key of a run whose tags were changed.
join m 1 STALLED | skip_keys | turns 65 | runs = none | phase = STOPPED
news ~ dagster/run_key=b1.88c45434.1 were
requests = b1.1 0[0,10) | delete | tick | wait 1 | news = resumed

## time_without_ticks_is_not_counted_as_stalled
join m 1 PATIENT | ticks | wait 100 | ticks | wait 2 | phase = OWNED

## unsubmitted_run_is_requested_until_it_is_queued
join m 1 | tick CREATED | attempt run1 1 | wait 1 | requests = b1.1 0[0,10)
summary ~ created but not submitted | run run1 WAITING | wait 1 | requests = none
""")
def test_retries_and_stops(story: str) -> None:
    play("world 10\n" + story, SOME)


def test_partial_re_execution_does_not_commit_offsets() -> None:
    world = World(records=10)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1))
    (first,) = member.tick()
    assert world.start(first) is None
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

"""Sentences about holds, partitions and members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.commands import Cause, ReadStoredOffsets, RecordCommit
from dagster_rebalance.core.model.events import (
    LeaveRequested,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import (
    Bounds,
    Log,
    OffsetAndMetadata,
    TopicPartition,
    names_of,
)
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.partitions.owned import OpenTransaction, OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.partitions.unrecorded import Unrecorded
from dagster_rebalance.core.reporting.explain import (
    explain_hold,
    explain_partition,
    headline,
    summary,
)
from dagster_rebalance.core.revokes.hold import Forecast, Hold
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
from tests.core.engine.test_run_requests import owned
from tests.core.streams import Stream
from tests.core.world import World, span, tp

RUN = "ab12cd34-5678"
NOT_STARTED = "2 runs requested, not started yet"
A_RUN_EACH = EngineSettings(limits=BatchLimits(max_ranges_per_run=1))
HOLD = Hold(Cause.REVOKE, {tp(4): 1, tp(5): 1}, requested_at=100.0, budget=HoldBudget(300, 10))
RECORD = RecordCommit(
    span(4, 0, 9), epoch=1, batch_id="b", run_id=RUN, lag=0, claim_to_commit_s=None, drain_s=None
)


def draining(number: int, *work: tuple[str, int, object], **more: object) -> OwnedPartition:
    """A partition that has to be given up."""
    return owned(number, *work, phase=Phase.DRAINING)._replace(**{"runs_are_known": True, **more})  # type: ignore[arg-type]


def said(*partitions: OwnedPartition, now: float = 112.0, hold: Hold = HOLD) -> str:
    """The sentence of the hold of orders-4 and orders-5."""
    return explain_hold(hold, {owned.partition: owned for owned in partitions}, now, Forecast())


def test_hold_names_its_runs_and_times() -> None:
    assert said(draining(4, ("b", 240, InFlight((RUN,)))), owned(5, phase=Phase.DRAINED)) == (
        "holding orders-4, orders-5 for 12 s: waiting for run ab12cd34 on orders-4 [0, 240); 278 s "
        "left"
    )


def test_hold_estimates_its_duration() -> None:
    world = World(records=85)
    member = world.member(
        owns=1, settings=EngineSettings(limits=BatchLimits(max_records_per_range=10))
    )
    for _ in range(3):
        (run_id,) = member.tick()
        world.start(run_id)
        world.wait(30, member)
        world.succeed(run_id)
        world.wait(1, member)
    (run_id,) = member.tick()
    world.start(run_id)
    member.feed(RevokeRequested((tp(0),)))
    world.wait(12, member)
    (_, hold, *_) = summary(member.engine, world.now)
    assert hold == (
        "holding orders-0 for 12 s: waiting for run run4 on orders-0 [30, 40), likely for 18 s "
        "more (batches took 30 s); 278 s left"
    )


@pytest.mark.parametrize(
    ("partition", "reason"),
    [
        (draining(4, ("b", 9, Succeeded(RUN))), "Kafka to confirm the commit of orders-4 [0, 9)"),
        (
            draining(4, pending=draining(4, ("b", 9, Succeeded(RUN))).commit_write(0.0)),
            "Kafka to confirm the commit of orders-4 [0, 9)",
        ),
        (
            draining(4, unrecorded=Unrecorded((RECORD,))),
            "Dagster to record the commit of orders-4 [0, 9)",
        ),
        (
            draining(4, ("b", 9, ToRequest()), runs_are_known=False),
            "Dagster to list the runs on orders-4",
        ),
    ],
)
def test_hold_names_the_answers_it_waits_for(partition: OwnedPartition, reason: str) -> None:
    assert (
        said(partition) == f"holding orders-4, orders-5 for 12 s: waiting for {reason}; 278 s left"
    )


def test_hold_with_nothing_left() -> None:
    assert (
        said(owned(5, phase=Phase.DRAINED))
        == "holding orders-4, orders-5 for 12 s: nothing left to wait for; 278 s left"
    )


def of_all(*partitions: OwnedPartition) -> str:
    """The reasons why a hold of many partitions waits."""
    hold = replace(HOLD, epochs={owned.partition: 1 for owned in partitions})
    _, _, waits = said(*partitions, hold=hold).partition("waiting for ")
    return waits.removesuffix("; 278 s left")


def test_hold_names_equal_waits_once() -> None:
    unknown = [draining(n, ("b", 9, ToRequest()), runs_are_known=False) for n in range(1000)]
    assert of_all(*unknown) == "Dagster to list the runs on orders-0..999"
    one_run = [draining(n, ("b", 9, InFlight((RUN,)))) for n in range(4)]
    assert of_all(*one_run) == "run ab12cd34 on orders-0..3"
    done = [draining(n, ("b", 9, Succeeded(RUN))) for n in (0, 7)]
    assert of_all(*one_run, *done[1:]) == (
        "run ab12cd34 on orders-0..3, Kafka to confirm the commit of orders-7 [0, 9)"
    )
    assert of_all(*done) == "Kafka to confirm the commit of orders-0, orders-7"
    recorded = [
        draining(n, unrecorded=Unrecorded((replace(RECORD, range=span(n, 0, 9)),)))
        for n in range(3)
    ]
    assert of_all(*recorded) == "Dagster to record the commit of orders-0..2"


def test_hold_names_ten_waits() -> None:
    waits = of_all(*(draining(n, ("b", 9, InFlight((f"run{n}",)))) for n in range(1000)))
    assert waits.startswith("run run0 on orders-0 [0, 9), run run1 on orders-1 [0, 9), ")
    assert waits.endswith("run run9 on orders-9 [0, 9) and 990 more")


def test_hold_past_its_deadline_names_its_end() -> None:
    waits = draining(4, ("b", 9, InFlight((RUN, "other"))))
    assert said(waits, now=392.0).endswith(
        "runs ab12cd34, other on orders-4 [0, 9); past its deadline, released in 8 s at the latest"
    )
    assert said(waits, now=500.0).endswith("released in 0 s at the latest")


def test_hold_of_a_leave() -> None:
    assert said(hold=replace(HOLD, cause=Cause.LEAVE)).startswith(
        "leaving the group with orders-4, orders-5 for 12 s: "
    )


FAILED = FailureStreak(FailureKind.FAILED, 1, RUN)


def due(due_at: float, progress: Progress) -> OwnedPartition:
    """A partition with a range that may be asked for at a time."""
    partition = owned(4, ("b", 9, progress))
    assert partition.ledger is not None
    (entry,) = partition.ledger.entries
    return partition._replace(
        ledger=partition.ledger._replace(entries=(entry._replace(due_at=due_at),))
    )


def stopped(partition: OwnedPartition) -> OwnedPartition:
    """The same partition, stopped."""
    return partition._replace(phase=Phase.STOPPED, stop_reason="orders-4: no way")


IDLE = owned(4)._replace(bounds=Bounds(0, 0))


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (OwnedPartition(tp(4), 1), "starting: reads its committed offset"),
        (
            owned(4, phase=Phase.RESTORING),
            "starting: reads the runs of its claims and the directives from Dagster",
        ),
        (
            owned(4, phase=Phase.RESTORING)._replace(blocked_by=(RUN,)),
            "starting: waits for run ab12cd34, working on it without a claim",
        ),
        (IDLE, "idle at the end, offset 0"),
        (
            IDLE._replace(open_transaction=OpenTransaction(0, 7, since=2.0)),
            "7 offsets wait for a transaction that has been open at offset 0 for 8 s",
        ),
        (owned(4), "waits for Kafka's end offset"),
        (
            IDLE._replace(bounds=Bounds(0, 30), backlog_since=2.0),
            (
                "30 offsets wait (8 s so far) for a free run, for min_records, or for a tick "
                "of the sensor"
            ),
        ),
        (
            IDLE._replace(bounds=Bounds(0, 1)),
            ("1 offset waits for a free run, for min_records, or for a tick of the sensor"),
        ),
        (
            owned(4, ("b7", 9, ToRequest(2))),
            "[0, 9): waits for Dagster to start its run (attempt 2)",
        ),
        (
            owned(4, ("b7", 9, ToRequest(2, 1, FAILED))),
            "[0, 9): waits for a free run (attempt 2)",
        ),
        (
            due(35.0, ToRequest(2, 1, FAILED)),
            "run ab12cd34 for [0, 9) failed; next run (attempt 2) in 25 s",
        ),
        (
            due(35.0, ToRequest(2, 1, FAILED, ("totals",))),
            (
                "run ab12cd34 for [0, 9) failed, and a run that succeeded left out totals; next "
                "run (attempt 2) in 25 s"
            ),
        ),
        (
            due(35.0, ToRequest(2, 0, FailureStreak(FailureKind.REFUSED, 1, RUN, "no claim"))),
            (
                "run ab12cd34 for [0, 9) was refused by its start check: no claim; "
                "next run (attempt 2) in 25 s"
            ),
        ),
        (
            owned(
                4,
                (
                    "b",
                    9,
                    InFlight(
                        (RUN,),
                        (RUN,),
                        unsubmitted=RunSnapshot(
                            RUN, "b", (span(4, 0, 9),), RunState.CREATED, attempt=1
                        ),
                    ),
                ),
            ),
            "run ab12cd34 for [0, 9) is created but not submitted, and is requested again",
        ),
        (stopped(due(35.0, Exhausted((RUN,)))), "stopped: no way; [0, 9) is retried in 25 s"),
        (
            stopped(due(10.0, Exhausted((RUN,)))),
            "stopped: no way; [0, 9) is retried: waits for a free run",
        ),
        (stopped(due(NEVER, Exhausted((RUN,)))), "stopped: no way"),
        (owned(4, ("b", 9, InFlight((RUN,)))), "run ab12cd34 works on [0, 9)"),
        (
            owned(4, ("b", 9, InFlight((RUN,), unconfirmed=(RUN,), deleted=(RUN,)))),
            (
                "run ab12cd34 for [0, 9) was deleted from Dagster, and its process may still be "
                "running"
            ),
        ),
        (
            owned(4, ("b", 9, InFlight((RUN,), unconfirmed=(RUN,)))),
            ("run ab12cd34 for [0, 9) has ended in Dagster, and its process may still be running"),
        ),
        (
            owned(4, ("b", 9, InFlight((RUN,), (RUN,)))),
            "run ab12cd34 for [0, 9) waits in Dagster's queue",
        ),
        (
            owned(4, ("b", 9, InFlight((RUN,), launching=(RUN,)))),
            "run ab12cd34 for [0, 9): being launched",
        ),
        (
            owned(4, ("b", 9, InFlight(("r1", RUN), (RUN,), ("r1",)))),
            "runs r1, ab12cd34 for [0, 9): being launched",
        ),
        (
            owned(4, ("b", 9, InFlight((RUN,))), ("c", 12, Succeeded("s"))),
            "run ab12cd34 works on [0, 9); [9, 12) has succeeded and is committed in order",
        ),
        (owned(4, ("b", 9, Exhausted(("r1", "r2", RUN)))), "3 runs failed on [0, 9)"),
        (
            owned(4, ("b", 9, DeadLettered(RUN))),
            "[0, 9) is a dead letter and is committed in order",
        ),
        (
            owned(4)._replace(pending=owned(4, ("b", 9, Succeeded(RUN))).commit_write(7.5)),
            "the commit at 9 has waited 2.5 s for Kafka's confirmation",
        ),
        (
            owned(4)._replace(pending=owned(4).claim_write("b", 9, 7.5)),
            "the claim up to 9 has waited 2.5 s for Kafka's confirmation",
        ),
        (
            owned(4)._replace(pending=owned(4)._replace(stored=None).first_write(7.5)),
            "the start position 0 has waited 2.5 s for Kafka's confirmation",
        ),
        (
            owned(4)._replace(pending=owned(4)._replace(log=Log("id", 3)).first_write(7.5)),
            "the identity of the log at offset 0 has waited 2.5 s for Kafka's confirmation",
        ),
        (
            owned(4)._replace(
                pending=owned(4, ("b", 9, ToRequest(1))).reassign_write(span(4, 0, 9), "c", 7.5),
            ),
            "the claim of [0, 9) for another batch has waited 2.5 s for Kafka's confirmation",
        ),
        (
            owned(4)._replace(unrecorded=Unrecorded((RECORD,), issued=1)),
            "the commit of [0, 9) is not recorded by Dagster yet",
        ),
        (
            owned(4, phase=Phase.STOPPED)._replace(stop_reason="orders-4: 3 runs failed. Mend it"),
            "stopped: 3 runs failed. Mend it",
        ),
        (
            draining(4, ("b", 9, InFlight((RUN,)))),
            "being released, waits for run ab12cd34 on orders-4 [0, 9)",
        ),
        (
            owned(4, phase=Phase.DRAINED),
            "drained, waits for the other partitions of the hold",
        ),
        (owned(4, phase=Phase.LOST), "lost: this member no longer owns it"),
    ],
)
def test_explain_partition_in_each_state(partition: OwnedPartition, sentence: str) -> None:
    assert explain_partition(partition, 10.0) == f"orders-4: {sentence}"


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (
            owned(4, ("b", 9, ToRequest(2))),
            "[0, 9): next, after the current batch (attempt 2)",
        ),
        (
            owned(4, ("a", 5, Exhausted((RUN,))), ("b", 9, ToRequest())),
            "1 run failed on [0, 5); [5, 9): waits for [0, 5) (attempt 1)",
        ),
        (
            owned(4, ("a", 5, InFlight((RUN,))), ("b", 7, Succeeded(RUN)), ("c", 9, ToRequest())),
            (
                "run ab12cd34 works on [0, 5); [5, 7) has succeeded and is committed in order; "
                "[7, 9): waits for [0, 5) (attempt 1)"
            ),
        ),
        (
            due(35.0, ToRequest(2, 1, FAILED)),
            "run ab12cd34 for [0, 9) failed; next try (attempt 2) in 25 s",
        ),
        (
            stopped(due(10.0, Exhausted((RUN,)))),
            "stopped: no way; [0, 9) is retried after the current batch",
        ),
        (
            IDLE._replace(bounds=Bounds(0, 7), backlog_since=4.0),
            "7 offsets wait (6 s so far) for the end of the current batch, or for min_records",
        ),
    ],
)
def test_explain_partition_of_a_streaming_run(partition: OwnedPartition, sentence: str) -> None:
    said = explain_partition(partition, 10.0, streams=True)
    assert said == f"orders-4: {sentence}"


def test_running_batch_has_an_age() -> None:
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    assert summary(stream.engine, world.now)[0].endswith("lag 10; no batch running")
    stream.turn()
    world.wait(312, stream)
    (first,) = summary(stream.engine, world.now)
    assert first.endswith("lag 10; a batch running on 2 partitions for 312 s")
    said = explain_partition(stream.engine.partitions[tp(0)], world.now, streams=True)
    assert said == "orders-0: run r1 works on [0, 5) (for 312 s)"
    assert headline(stream.engine) == "2 owned, lag 10, 1 run"


def test_run_has_the_age_that_dagster_reports() -> None:
    world = World(records=5)
    first = world.member(owns=1)
    (run_id,) = first.tick()
    world.start(run_id)
    world.dagster.runs[run_id] = replace(world.dagster.runs[run_id], working_s=700.0)
    second = world.member(owns=1)
    world.wait(1, second)
    assert "1 run working for 70" in summary(second.engine, world.now)[0]


def test_summary_of_a_streaming_run_counts_other_runs_separately() -> None:
    world = World(records=5)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2")
    first.turn()
    first.feed(PartitionsLost((tp(0),)))
    second.feed(PartitionsAssigned((tp(0),)))
    second.turn()
    (said, *_) = summary(second.engine, world.now)
    assert said.endswith("; no batch running, 1 other run working")


def test_failures_of_a_streaming_run_are_attempts() -> None:
    batch = "s.r1.3.3"
    exhausted = owned(4, (batch, 9, Exhausted((RUN, RUN))))
    assert explain_partition(exhausted, 10.0) == "orders-4: 2 attempts failed on [0, 9)"


def test_named_joins_consecutive_partitions() -> None:
    assert names_of([]) == "no partitions"
    assert names_of([tp(1), tp(0)]) == "orders-0, orders-1"
    names = [tp(2), tp(0), tp(1), tp(7), TopicPartition("payments", 8), tp(10), tp(9), tp(8)]
    assert names_of(names) == "orders-0..2, orders-7..10, payments-8"
    assert names_of(names, most=1) == "orders-0..2 and 5 more"


def test_summary_of_a_working_member_is_one_line() -> None:
    world = World(records=85, partitions=4)
    member = world.member(owns=4, settings=A_RUN_EACH)
    world.wait(1, member)
    for run_id in member.tick()[:2]:
        world.start(run_id)
    world.wait(1, member)
    assert summary(member.engine, world.now) == (
        f"owns orders-0..3 (4 partitions), lag 340; 2 runs working for 2 s, {NOT_STARTED}",
    )
    assert headline(member.engine) == "4 owned, lag 340, 4 runs"


def test_summary_names_every_anomaly() -> None:
    world = World(records=85, partitions=4)
    assert summary(world.member().engine, world.now) == ("owns no partitions",)
    assert headline(world.member().engine) == "0 owned"
    member = world.member(owns=3, settings=A_RUN_EACH)
    run_id, *_ = member.tick()
    world.start(run_id)
    world.wait(1, member)
    range_ = world.dagster.runs[run_id].ranges[0]
    member.feed(RevokeRequested((range_.topic_partition,)))
    member.fails.add(ReadStoredOffsets)
    member.feed(PartitionsAssigned((tp(3),)))
    halted = next(o for o in member.engine.partitions.values() if o.phase is Phase.OWNED)
    member.engine.partitions[halted.partition] = halted._replace(
        phase=Phase.STOPPED, stop_reason="no way"
    )
    (stopped_run,) = halted.live_runs
    assert summary(member.engine, world.now) == (
        f"owns orders-0..3 (4 partitions), lag at least 255; 1 run working for 1 s, {NOT_STARTED}",
        f"holding {range_.topic_partition} for 0 s: waiting for run run1 on {range_}; 290 s left",
        (
            f"{halted.partition}: stopped: no way; run {stopped_run} for [0, 85) waits in "
            "Dagster's queue"
        ),
        "orders-3: starting: reads its committed offset",
    )
    assert headline(member.engine) == "1 stopped, holding 1, 4 owned, lag at least 255, 3 runs"


def test_unknown_lag_is_not_shown_as_0() -> None:
    member = World(records=85).member()
    member.fails.add(ReadStoredOffsets)
    member.feed(PartitionsAssigned((tp(0),)))
    assert headline(member.engine) == "1 owned, lag not known yet"
    assert summary(member.engine, 0.0)[0].startswith("owns orders-0 (1 partition), lag not known")


def test_summary_names_the_reason_of_a_leave() -> None:
    world = World(records=85)
    member = world.member(owns=1)
    member.tick()
    member.feed(LeaveRequested("a reload"))
    assert "leaving the group: a reload" in summary(member.engine, world.now)
    assert ", leaving, 1 owned" in headline(member.engine)


def test_retry_of_a_stopped_bisection_names_only_the_next_attempt() -> None:
    partition = owned(4, ("b.n0-9", 4, Exhausted((RUN,))), ("b.s0-9", 9, ToRequest()))
    said = explain_partition(stopped(partition), 10.0)
    assert "[0, 4)" in said
    assert "[4, 9)" not in said


def test_explain_partition_without_a_member() -> None:
    exhausted = stopped(due(35.0, Exhausted((RUN,))))
    said = explain_partition(exhausted, 10.0, has_members=False)
    assert said == "orders-4: stopped: no way; [0, 9) is retried by the next member"
    created = RunSnapshot(RUN, "b", (span(4, 0, 9),), RunState.CREATED, attempt=1)
    partition = owned(4, ("b", 9, InFlight((RUN,), (RUN,), unsubmitted=created)))
    assert explain_partition(partition, 10.0, has_members=False) == (
        "orders-4: run ab12cd34 for [0, 9) is created but not submitted, and waits for the next "
        "member"
    )
    assert explain_partition(partition, 10.0, streams=True) == (
        "orders-4: run ab12cd34 for [0, 9) is created but not submitted, and is cancelled"
    )


def test_summary_explains_ten_partitions() -> None:
    world = World(partitions=1_000)
    for number in range(1_000):
        world.kafka.stored[tp(number)] = OffsetAndMetadata(5, "text of another application")
    member = world.member(owns=1_000)
    lines = summary(member.engine, world.now)
    assert len(lines) == 12
    assert lines[-1] == "and 990 more stopped, 0 more starting"
    assert sum(map(len, lines)) < 5_000

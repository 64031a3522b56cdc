"""Member events: their names, fields and order do not change."""

from __future__ import annotations

import enum
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.member_events import (
    EVENT_SPECS,
    EventKind,
    MemberEvent,
    json_value,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.reporting.event_recorder import record_events
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from tests.core.story import play
from tests.core.streams import Stream
from tests.core.world import Member, World, span, tp
from tests.story import stories

if TYPE_CHECKING:
    import pytest

ONE_RUN = EngineSettings(limits=BatchLimits(max_ranges_per_run=8, max_runs_in_flight=1))
SOME = {
    "ONE": EngineSettings(max_attempts=1),
    "LETTERS": EngineSettings(max_attempts=1, dead_letter_topic="dead"),
}


def at_work(world: World, owns: int = 1) -> tuple[Member, str]:
    """A member with one batch, and the run that works on it."""
    member = world.member(owns=owns, settings=ONE_RUN)
    world.wait(1.25, member)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    return member, run_id


def test_batch_has_its_events_once_and_in_order() -> None:
    world = World(records=100, partitions=2)
    member, run_id = at_work(world, owns=2)
    world.succeed(run_id)
    world.wait(1, member)
    assert [one.kind for one in member.member_events] == [
        EventKind.PARTITIONS_ASSIGNED,
        EventKind.BATCH_CLAIMED,
        EventKind.ATTEMPT_STARTED,
        EventKind.ATTEMPT_ENDED,
        *[EventKind.OFFSETS_COMMITTED] * 2,
        *[EventKind.OFFSETS_RECORDED] * 2,
    ]
    ranges = (span(0, 0, 100), span(1, 0, 100))
    assert member.event_fields(EventKind.BATCH_CLAIMED) == [
        {"batch_id": "b1", "ranges": ranges, "offsets": 200, "is_again": False}
    ]
    assert member.event_fields(EventKind.ATTEMPT_ENDED) == [
        {"batch_id": "b1", "attempt_run_id": run_id, "ranges": ranges, "outcome": "succeeded"}
    ]
    committed = member.event_fields(EventKind.OFFSETS_COMMITTED)[1]
    assert 1 <= committed.pop("claim_to_commit_s") <= 3
    assert committed == {
        "topic": "orders",
        "partition": 1,
        "start": 0,
        "until": 100,
        "offsets": 100,
        "batch_id": "b1",
        "attempt_run_id": run_id,
        "lag": 0,
        "is_dead_letter": False,
    }


def test_retry_of_a_streaming_run_is_a_claim_again() -> None:
    world = World(records=10)
    stream = Stream(world, "stream", owns=[0])
    while stream.turn() is None:
        pass
    stream.end(BatchOutcome.FAILED)
    while stream.turn() is None:
        pass
    stream.end()
    stream.turn()
    assert [said["is_again"] for said in stream.event_fields(EventKind.BATCH_CLAIMED)] == [
        False,
        True,
    ]
    outcomes = [said["outcome"] for said in stream.event_fields(EventKind.ATTEMPT_ENDED)]
    assert outcomes == ["failed", "succeeded"]
    assert len({said["batch_id"] for said in stream.event_fields(EventKind.ATTEMPT_STARTED)}) == 2
    assert len(stream.event_fields(EventKind.OFFSETS_COMMITTED)) == 1


def test_failed_write_has_an_event_with_the_reason() -> None:
    world = World(records=100)
    member = world.member(owns=1)
    write = commands.OffsetWrite(tp(0), 1, None, OffsetAndMetadata(5))
    _, told = record_events(
        member.engine,
        [
            events.OffsetsWritten(
                (write,),
                ((write, events.WriteFailure.CHANGED), (write, events.WriteFailure.RETRIABLE)),
                ((write, "no rights"),),
            )
        ],
        world.now,
    )
    failed = [one.fields for one in told if one.kind is EventKind.WRITE_FAILED]
    assert [fields["failure"] for fields in failed] == ["changed", "retriable", "refused"]
    assert not any(one.kind is EventKind.OFFSETS_COMMITTED for one in told), "nothing was pending"


def test_late_answer_to_another_write_has_no_event() -> None:
    world = World()
    member = world.member(owns=1)
    world.wait(1, member)
    world.kafka.produce(tp(0), 100)
    member.fails.add(commands.WriteOffsets)
    world.wait(5, member)
    pending = member.engine.partitions[tp(0)].pending
    assert pending is not None
    assert pending.claimed_batch
    late = replace(pending.write, new=OffsetAndMetadata(5))
    _, told = record_events(member.engine, [events.OffsetsWritten((late,))], world.now)
    assert told == ()


@stories("""
## outcomes_of_attempts
at_work 1 | run run1 FAILED | wait 1 | values ATTEMPT_ENDED outcome = failed
at_work 1 | run run1 FAILED has_started=0 | wait 1 | values ATTEMPT_ENDED outcome = not_started
at_work 1 | run run1 FAILED is_refused=1 | wait 1 | values ATTEMPT_ENDED outcome = refused
at_work 1 | run run1 FAILED is_interrupted=1 | wait 1 | values ATTEMPT_ENDED outcome = interrupted
at_work 1 | run run1 CANCELED is_cancelled_by_member=1 | wait 1
values ATTEMPT_ENDED outcome = taken_back

## attempt_started_is_recorded_once
at_work 1 | wait 20 | values ATTEMPT_STARTED attempt_run_id = run1
values ATTEMPT_ENDED outcome = none

## adopted_claim_has_no_claim_to_commit_time
at_work 1 | lose 0 | values PARTITIONS_LOST partitions = ['orders-0']
values PARTITIONS_LOST reason = session
join n 1 | wait 1 | values BATCH_ADOPTED batch_id = b1 | values BATCH_ADOPTED run_ids = ['run1']
succeed run1 | wait 1 | values OFFSETS_COMMITTED claim_to_commit_s = None

## hold_has_events_when_it_waits_and_ends
at_work 1 | revoke 0 | wait 3 | values REVOKE_REQUESTED partitions = ['orders-0']
values HOLD_WAITING run_ids = ['run1'] | values HOLD_ENDED outcome = none
succeed run1 | wait 1 | values HOLD_ENDED outcome = drained | values HOLD_ENDED cause = revoke
values HOLD_ENDED partitions = ['orders-0'] | values HOLD_ENDED seconds = 3.25

## end_of_a_hold_names_handed_over_partitions
at_work 1 | leave "a newer process" successor | wait 1
values MEMBER_LEAVING reason = a newer process | values HOLD_ENDED outcome = handed over
values HOLD_ENDED handed_over = ['orders-0'] | values HOLD_ENDED run_ids = ['run1']

## stop_and_resume_have_events
at_work 1 ONE | run run1 FAILED | wait 1 | values PARTITION_STOPPED topic = orders
values PARTITION_STOPPED partition = 0 | values PARTITION_STOPPED reason ~ run1
add b1 0 0 100 SUCCEEDED | wait 20 | values PARTITION_RESUMED is_released = False

## first_position_has_no_event
world 0 | join m 1 | wait 3 | offset 0 = 0 | kinds = PARTITIONS_ASSIGNED

## dead_letter_has_events_when_it_is_stored_and_when_it_failed
at_work 1 LETTERS | fails StoreDeadLetter | run run1 FAILED | wait 1 | failed_letter "no leader"
values DEAD_LETTER_FAILED reason = no leader | answers | wait 10
values DEAD_LETTER_STORED until = 100 | values DEAD_LETTER_STORED attempt_run_id = run1
values OFFSETS_COMMITTED is_dead_letter = True

## directive_has_an_event
world 0 2 | join m 2 | wait 1 | order PAUSE orders:1 ann | wait 10
values DIRECTIVES_CHANGED partitions = ['orders-1']
values DIRECTIVES_CHANGED order ~ the warehouse is away

## cancelled_run_has_an_event
join m 1 | wait 1.25 | tick | wait 1 | revoke 0 | values RUNS_CANCELLED run_ids = ['run1']

## dead_run_has_an_event
at_work 1 | wait_in_steps 400 | values RUNS_DEAD run_ids ~ run1
""")
def test_member_events(story: str) -> None:
    play(story, SOME)


def test_successful_attempt_has_the_level_debug() -> None:
    fields = {"batch_id": "b", "attempt_run_id": "r", "ranges": ()}
    good = MemberEvent(EventKind.ATTEMPT_ENDED, "", {**fields, "outcome": "succeeded"})
    bad = replace(good, fields={**fields, "outcome": "failed"})
    assert (good.level, bad.level) == (logging.DEBUG, logging.INFO)


def test_fields_of_each_event_do_not_hide_those_of_a_log_record() -> None:
    assert set(EVENT_SPECS) == set(EventKind)
    record = vars(logging.makeLogRecord({}))
    reserved = {*record, "message", "asctime", "event_name", "group_id", "member"}
    for kind in EVENT_SPECS.values():
        assert not reserved & set(kind.fields)
        assert len(set(kind.fields)) == len(kind.fields)


def test_plain_returns_json_values() -> None:

    class Color(enum.Enum):
        RED = "red"

    assert json_value((Color.RED, tp(1), span(0, 1, 2), 1, 2.5, True, None, "text")) == [
        *("red", "orders-1", "orders-0 [1, 2)", 1, 2.5, True, None, "text")
    ]


def test_repeated_cancellation_has_one_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(records=100)
    member = world.member(owns=1)
    world.wait(1.25, member)
    member.tick()
    world.wait(1, member)
    monkeypatch.setattr(world.dagster, "cancel", lambda *_, **__: None)
    member.feed(events.RevokeRequested((tp(0),)))
    world.wait(10, member)
    assert len(member.given(commands.CancelRuns)) > 2
    assert len(member.event_fields(EventKind.RUNS_CANCELLED)) == 1

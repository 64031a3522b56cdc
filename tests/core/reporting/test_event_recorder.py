"""Member events: their names, fields and order do not change."""

from __future__ import annotations

import enum
import logging
from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.member_events import (
    EVENT_SPECS,
    EventKind,
    MemberEvent,
    json_value,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.reporting.event_recorder import record_events
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from tests.core.streams import Stream
from tests.core.world import Member, World, span, tp

ONE_RUN = EngineSettings(limits=BatchLimits(max_ranges_per_run=8, max_runs_in_flight=1))


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


@pytest.mark.parametrize(
    ("state", "marks", "outcome"),
    [
        (RunState.FAILED, {}, "failed"),
        (RunState.FAILED, {"has_started": False}, "not_started"),
        (RunState.FAILED, {"is_refused": True}, "refused"),
        (RunState.FAILED, {"is_interrupted": True}, "interrupted"),
        (RunState.CANCELED, {"is_cancelled_by_member": True}, "taken_back"),
    ],
)
def test_attempt_ended_has_an_outcome(
    state: RunState, marks: dict[str, bool], outcome: str
) -> None:
    world = World(records=100)
    member, run_id = at_work(world)
    world.dagster.move(run_id, state, **marks)
    world.wait(1, member)
    assert [said["outcome"] for said in member.event_fields(EventKind.ATTEMPT_ENDED)] == [outcome]


def test_attempt_started_is_recorded_once() -> None:
    world = World(records=100)
    member, _ = at_work(world)
    world.wait(20, member)
    assert len(member.event_fields(EventKind.ATTEMPT_STARTED)) == 1
    assert member.event_fields(EventKind.ATTEMPT_ENDED) == []


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


def test_adopted_claim_has_no_claim_to_commit_time() -> None:
    world = World(records=100)
    first, run_id = at_work(world)
    first.feed(events.PartitionsLost((tp(0),)))
    second = world.member(owns=1)
    world.wait(1, second)
    (adopted,) = second.event_fields(EventKind.BATCH_ADOPTED)
    assert (adopted["batch_id"], adopted["run_ids"]) == ("b1", (run_id,))
    world.succeed(run_id)
    world.wait(1, second)
    (committed,) = second.event_fields(EventKind.OFFSETS_COMMITTED)
    assert committed["claim_to_commit_s"] is None
    assert first.event_fields(EventKind.PARTITIONS_LOST) == [
        {"partitions": (tp(0),), "reason": events.LostReason.SESSION}
    ]


def test_hold_has_events_when_it_waits_and_ends() -> None:
    world = World(records=100)
    member, run_id = at_work(world)
    member.feed(events.RevokeRequested((tp(0),)))
    world.wait(3, member)
    assert member.event_fields(EventKind.REVOKE_REQUESTED) == [{"partitions": (tp(0),)}]
    assert [said["run_ids"] for said in member.event_fields(EventKind.HOLD_WAITING)] == [(run_id,)]
    assert member.event_fields(EventKind.HOLD_ENDED) == []
    world.succeed(run_id)
    world.wait(1, member)
    (ended,) = member.event_fields(EventKind.HOLD_ENDED)
    assert (json_value(ended["outcome"]), json_value(ended["cause"])) == ("drained", "revoke")
    assert json_value(ended["partitions"]) == ["orders-0"]
    assert 3 <= ended["seconds"] <= 5


def test_hold_ended_names_handed_over_partitions() -> None:
    world = World(records=100)
    member, run_id = at_work(world)
    member.feed(events.LeaveRequested("a newer process", has_successor=True))
    world.wait(1, member)
    assert member.event_fields(EventKind.MEMBER_LEAVING) == [{"reason": "a newer process"}]
    (ended,) = member.event_fields(EventKind.HOLD_ENDED)
    assert json_value(ended["outcome"]) == "handed over"
    assert (ended["handed_over"], ended["run_ids"]) == ((tp(0),), (run_id,))


def test_stop_and_resume_have_events() -> None:
    world = World(records=100)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1))
    world.wait(1.25, member)
    (run_id,) = member.tick()
    world.start(run_id)
    world.wait(1, member)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    (stopped,) = member.event_fields(EventKind.PARTITION_STOPPED)
    assert (stopped["topic"], stopped["partition"]) == ("orders", 0)
    assert run_id in stopped["reason"]
    world.dagster.add("b1", (span(0, 0, 100),), RunState.SUCCEEDED)
    world.wait(20, member)
    assert [said["is_released"] for said in member.event_fields(EventKind.PARTITION_RESUMED)] == [
        False
    ]


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


def test_first_position_has_no_event() -> None:
    world = World(partitions=1)
    member = world.member(owns=1)
    world.wait(3, member)
    assert world.kafka.offset(0) == 0
    assert [one.kind for one in member.member_events] == [EventKind.PARTITIONS_ASSIGNED]


def test_dead_letter_has_events_when_stored_and_failed() -> None:
    world = World(records=100)
    settings = EngineSettings(max_attempts=1, dead_letter_topic="dead")
    member = world.member(owns=1, settings=settings)
    world.wait(1.25, member)
    (run_id,) = member.tick()
    world.start(run_id)
    world.wait(1, member)
    member.fails.add(commands.StoreDeadLetter)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    (letter,) = set(member.given(commands.StoreDeadLetter))
    assert isinstance(letter, commands.StoreDeadLetter)
    member.feed(events.DeadLetterFailed(letter, "no leader"))
    assert [said["reason"] for said in member.event_fields(EventKind.DEAD_LETTER_FAILED)] == [
        "no leader"
    ]
    member.fails.clear()
    world.wait(10, member)
    (stored,) = member.event_fields(EventKind.DEAD_LETTER_STORED)
    assert (stored["until"], stored["attempt_run_id"]) == (100, run_id)
    assert [
        said["is_dead_letter"] for said in member.event_fields(EventKind.OFFSETS_COMMITTED)
    ] == [True]


def test_directive_has_an_event() -> None:
    world = World(partitions=2)
    member = world.member(owns=2)
    world.wait(1, member)
    world.orders.append(Directive(Action.PAUSE, "orders:1", "ann", 1.0, "a table moves"))
    world.wait(10, member)
    (ordered,) = member.event_fields(EventKind.DIRECTIVES_CHANGED)
    assert ordered["partitions"] == (tp(1),)
    assert "a table moves" in ordered["order"]


def test_cancelled_and_dead_runs_have_events() -> None:
    world = World(records=100)
    member = world.member(owns=1)
    world.wait(1.25, member)
    (run_id,) = member.tick()
    world.wait(1, member)
    member.feed(events.RevokeRequested((tp(0),)))
    (cancelled,) = member.event_fields(EventKind.RUNS_CANCELLED)
    assert cancelled["run_ids"] == (run_id,)
    other = World(records=100)
    silent, _ = at_work(other)
    other.wait(400, silent, step=5)
    assert silent.event_fields(EventKind.RUNS_DEAD)


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

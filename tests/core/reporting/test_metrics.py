"""Metrics: the measurements of each member event, the gauges, and the number of series."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.member_events import EventKind, MemberEvent
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.reporting.metrics import (
    CAUSE,
    OUTCOME,
    PARTITION,
    REASON,
    STATE,
    TOPIC,
    Form,
    MemberState,
    Metric,
    measurements,
    read_gauge,
)
from tests.core.reporting.test_event_recorder import at_work
from tests.core.world import World, tp

if TYPE_CHECKING:
    from tests.core.world import Member


def counted(member: Member, metric: Metric) -> list[tuple[float, dict[str, str]]]:
    """The measurements of a member for a metric so far."""
    return [
        (one.value, dict(one.attributes))
        for member_event in member.member_events
        for one in measurements(member_event)
        if one.metric is metric
    ]


def read(member: Member, metric: Metric, most: int = 100) -> list[tuple[float, dict[str, str]]]:
    """A gauge of a member as of now."""
    state = MemberState(
        tuple(member.engine.partitions.values()), member.engine.holds, member.world.now
    )
    found = read_gauge(metric, state, now=member.world.now, max_partitions=most)
    return [(one.value, dict(one.attributes)) for one in found]


def test_batch_is_counted_with_offsets_commits_and_seconds() -> None:
    world = World(records=100, partitions=2)
    member, run_id = at_work(world, owns=2)
    world.succeed(run_id)
    world.wait(1, member)
    assert counted(member, Metric.PARTITIONS_ASSIGNED) == [(2, {TOPIC: "orders"})]
    assert counted(member, Metric.BATCHES) == [(1, {})]
    assert counted(member, Metric.ATTEMPTS) == [(1, {OUTCOME: "succeeded"})]
    assert counted(member, Metric.OFFSETS_COMMITTED) == [(100, {TOPIC: "orders"})] * 2
    assert counted(member, Metric.COMMITS) == [(1, {TOPIC: "orders"})] * 2
    times = counted(member, Metric.CLAIM_TO_COMMIT)
    assert len(times) == 2
    assert all(1 <= seconds <= 3 for seconds, _ in times)


def test_adopted_claim_has_no_duration() -> None:
    world = World(records=100)
    first, run_id = at_work(world)
    first.feed(events.PartitionsLost((tp(0),), events.LostReason.FENCED))
    second = world.member(owns=1)
    world.wait(1, second)
    world.succeed(run_id)
    world.wait(1, second)
    assert counted(second, Metric.COMMITS) == [(1, {TOPIC: "orders"})]
    assert counted(second, Metric.CLAIM_TO_COMMIT) == []
    assert counted(first, Metric.PARTITIONS_LOST) == [(1, {TOPIC: "orders", REASON: "fenced"})]


def test_hold_is_a_gauge_and_then_a_duration() -> None:
    world = World(records=100)
    member, run_id = at_work(world)
    assert read(member, Metric.HOLDS) == []
    member.feed(events.RevokeRequested((tp(0),)))
    world.wait(10, member)
    assert read(member, Metric.HOLDS) == [(1, {CAUSE: "revoke"})]
    ((remaining, _),) = read(member, Metric.HOLD_REMAINING)
    assert remaining == pytest.approx(290)
    assert read(member, Metric.PARTITIONS) == [(1, {TOPIC: "orders", STATE: "draining"})]
    assert counted(member, Metric.PARTITIONS_ASKED_BACK) == [(1, {TOPIC: "orders"})]
    world.succeed(run_id)
    world.wait(1, member)
    assert read(member, Metric.HOLDS) == []
    ((seconds, attributes),) = counted(member, Metric.HOLD_DURATION)
    assert 10 <= seconds <= 12
    assert attributes == {CAUSE: "revoke", OUTCOME: "drained"}


def test_lag_and_in_flight_gauges() -> None:
    world = World(records=100, partitions=2)
    world.kafka.produce(tp(1), 50)
    member, _ = at_work(world, owns=2)
    assert read(member, Metric.LAG) == [(250, {TOPIC: "orders"})]
    assert read(member, Metric.LAG_MAX) == [(150, {TOPIC: "orders"})]
    assert read(member, Metric.PARTITION_LAG) == [
        (100, {TOPIC: "orders", PARTITION: "0"}),
        (150, {TOPIC: "orders", PARTITION: "1"}),
    ]
    assert read(member, Metric.OFFSETS_IN_FLIGHT) == [(250, {TOPIC: "orders"})]
    assert read(member, Metric.BATCHES_IN_FLIGHT) == [(1, {})]
    assert read(member, Metric.MEMBERS) == [(1, {})]


def test_partition_lag_is_limited() -> None:
    world = World(records=1, partitions=3)
    member = world.member(owns=3)
    world.wait(1, member)
    assert len(read(member, Metric.PARTITION_LAG, most=3)) == 3
    assert read(member, Metric.PARTITION_LAG, most=2) == []
    assert read(member, Metric.PARTITION_LAG, most=0) == []
    for metric in Metric:
        if metric.value.form is Form.GAUGE:
            assert len(read(member, metric, most=2)) <= 1, metric


def test_unknown_lag_has_no_measurement() -> None:
    world = World(records=100)
    member = world.member()
    member.engine.handle(events.PartitionsAssigned((tp(0),)), world.now)
    assert read(member, Metric.LAG) == read(member, Metric.LAG_MAX) == []
    assert read(member, Metric.PARTITION_LAG) == []
    assert read(member, Metric.PARTITIONS) == [(1, {TOPIC: "orders", STATE: "restoring"})]


def test_paused_partition_has_the_state_paused() -> None:
    world = World(partitions=1)
    world.orders.append(Directive(Action.PAUSE, "*", "ann", 1.0, "a table moves"))
    member = world.member(owns=1)
    world.wait(2, member)
    assert read(member, Metric.PARTITIONS) == [(1, {TOPIC: "orders", STATE: "paused"})]


def test_silence_of_a_hanging_member_grows() -> None:
    found = read_gauge(Metric.SILENCE, MemberState(at=100.0), now=160.0, max_partitions=0)
    assert [one.value for one in found] == [60.0]


def test_each_member_event_is_counted() -> None:
    at = {"topic": "orders", "partition": 0}
    letter = {**at, "start": 0, "until": 1, "batch_id": "b", "attempt_run_id": "r"}
    cases: list[tuple[EventKind, dict[str, Any], Metric, float, dict[str, str]]] = [
        (EventKind.PARTITION_STOPPED, {**at, "reason": "r"}, Metric.STOPS, 1, {TOPIC: "orders"}),
        (
            EventKind.WRITE_FAILED,
            {**at, "failure": "changed"},
            Metric.WRITES_FAILED,
            1,
            {TOPIC: "orders", REASON: "changed"},
        ),
        (
            EventKind.DEAD_LETTER_STORED,
            letter,
            Metric.DEAD_LETTERS,
            1,
            {TOPIC: "orders", OUTCOME: "stored"},
        ),
        (
            EventKind.DEAD_LETTER_FAILED,
            {**letter, "reason": "r"},
            Metric.DEAD_LETTERS,
            1,
            {TOPIC: "orders", OUTCOME: "failed"},
        ),
        (
            EventKind.RUNS_CANCELLED,
            {"run_ids": ("a", "b"), "reason": "r"},
            Metric.RUNS_CANCELLED,
            2,
            {},
        ),
        (EventKind.RUNS_DEAD, {"run_ids": ("a",)}, Metric.RUNS_DEAD, 1, {}),
    ]
    for what, fields, metric, value, attributes in cases:
        assert list(measurements(MemberEvent(what, "", fields))) == [(metric, value, attributes)]
    assert list(measurements(MemberEvent(EventKind.NOTED, "anything"))) == []


def test_failed_attempt_and_stop_are_counted() -> None:
    world = World(records=100)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1))
    world.wait(1.25, member)
    (run_id,) = member.tick()
    world.start(run_id)
    world.wait(1, member)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    assert counted(member, Metric.ATTEMPTS) == [(1, {OUTCOME: "failed"})]
    assert counted(member, Metric.STOPS) == [(1, {TOPIC: "orders"})]
    assert read(member, Metric.PARTITIONS) == [(1, {TOPIC: "orders", STATE: "stopped"})]


@pytest.mark.parametrize("metric", Metric, ids=lambda metric: metric.value.name)
def test_metric_has_an_opentelemetry_name(metric: Metric) -> None:
    kind = metric.value
    assert re.fullmatch(r"dagster_rebalance(\.[a-z_]+)+", kind.name)
    assert kind.unit == "s" or re.fullmatch(r"\{[a-z]+\}", kind.unit)
    assert (kind.form is Form.HISTOGRAM) == bool(kind.buckets)
    assert list(kind.buckets) == sorted(kind.buckets)
    assert not any("run" in attribute or "batch" in attribute for attribute in kind.attributes)
    assert (PARTITION in kind.attributes) == (metric is Metric.PARTITION_LAG)


def test_metric_names_are_unique() -> None:
    names = [metric.value.name for metric in Metric]
    assert len(set(names)) == len(names)


def test_batch_age_is_that_of_the_oldest_batch() -> None:
    world = World(records=100, partitions=2)
    member, _ = at_work(world, owns=2)
    world.wait(30, member)
    ((age, attributes),) = read(member, Metric.BATCH_AGE)
    assert 30 <= age <= 40
    assert attributes == {}
    assert read(World().member(owns=1), Metric.BATCH_AGE) == []

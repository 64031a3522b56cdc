"""Filter scans: ranges without a hit are committed without a run, the others are claimed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.filter_scans import SCAN_PATIENCE_S
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.reporting.explain import explain_partition
from dagster_rebalance.core.reporting.metrics import Metric, measurements
from tests.core.streams import Stream
from tests.core.world import Member, World, span, tp

if TYPE_CHECKING:
    from collections.abc import Sequence

FILTERED = EngineSettings(has_filter=True, limits=BatchLimits(max_records_per_range=10))
PAUSE = Directive(Action.PAUSE, "orders:0", "me", 1_700_000_000.0, "maintenance")


def scans(member: Member) -> list[tuple[int, Sequence[object]]]:
    found = member.given(commands.ScanRanges)
    return [(one.number, one.ranges) for one in found if isinstance(one, commands.ScanRanges)]


def stopped_short(member: Member) -> None:
    """Scans begin, and have no answer yet."""
    member.unanswered.add(commands.ScanRanges)


def test_range_without_a_hit_is_committed_and_recorded_without_a_run() -> None:
    world = World(records=25, partitions=2)
    world.hits = {(tp(1), 24)}
    member = world.member(owns=2, settings=FILTERED)
    world.wait(5, member)
    assert (world.kafka.offset(0), world.kafka.offset(1)) == (25, 20)
    assert [request.ranges for request in member.engine.batch_requests] == [(span(1, 20, 25),)]
    assert scans(member)[0] == (1, (span(0, 0, 10), span(1, 0, 10)))
    assert {record.run_id for record in world.dagster.recorded} == {LEFT_OUT}
    assert sum(record.left_out for record in world.dagster.recorded) == 45
    assert not world.dagster.runs
    found = [one for event in member.member_events for one in measurements(event)]
    assert sum(one.value for one in found if one.metric is Metric.OFFSETS_LEFT_OUT) == 45
    run_id, *_ = member.tick()
    world.start(run_id)
    world.succeed(run_id)
    world.wait(5, member)
    assert world.kafka.offset(1) == 25
    assert world.dagster.recorded[-1].left_out == 0


def test_each_record_is_scanned_once() -> None:
    world = World(records=10)
    member = world.member(owns=1, settings=FILTERED)
    for _ in range(3):
        world.wait(3, member)
        world.kafka.produce(tp(0), 10)
    world.wait(3, member)
    starts = [range_ for _, ranges in scans(member) for range_ in ranges]
    assert starts == [span(0, start, start + 10) for start in (0, 10, 20, 30)]


def test_member_without_filter_scans_nothing() -> None:
    world = World(records=10)
    member = world.member(owns=1)
    world.wait(3, member)
    assert not scans(member)
    world = World(records=10)
    stream = Stream(world, "s1", owns=[0], settings=FILTERED)
    assert stream.turn() is not None
    assert not scans(stream)


def test_scan_waits_as_the_batch_of_the_range_would() -> None:
    limits = BatchLimits(min_records=5, max_wait_s=30.0)
    world = World(records=1)
    member = world.member(owns=1, settings=replace(FILTERED, limits=limits))
    world.wait(2, member)
    assert world.kafka.offset(0) == 1, "the first batch never waits"
    world.kafka.produce(tp(0), 3)
    world.wait(10, member)
    member.feed(events.TickArrived())
    world.wait(10, member)
    assert len(scans(member)) == 1
    member.feed(events.TickArrived())
    world.wait(12, member)
    assert scans(member)[1:] == [(2, (span(0, 1, 4),))]
    world.kafka.produce(tp(0), 5)
    world.wait(2, member)
    assert world.kafka.offset(0) == 9


def test_partition_without_a_ledger_has_nothing_to_leave_out() -> None:
    with pytest.raises(IllegalStateError, match="before its committed offset is known"):
        OwnedPartition(tp(0), 1).left_out(5)


def test_revoke_during_a_scan_releases_at_once() -> None:
    world = World(records=10)
    member = world.member(settings=FILTERED)
    stopped_short(member)
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(1, member)
    assert explain_partition(member.engine.partitions[tp(0)], world.now) == (
        "orders-0: 10 offsets wait: the filter `only` is applied up to offset 10"
    )
    assert world.kafka.claims(0) == []
    member.feed(events.RevokeRequested((tp(0),)))
    assert not member.engine.partitions
    member.feed(events.RangesScanned(1, ((span(0, 0, 10), False),)))
    assert world.kafka.offset(0) == 0


def test_result_for_an_earlier_epoch_changes_nothing() -> None:
    world = World(records=10)
    member = world.member(owns=1, settings=FILTERED)
    stopped_short(member)
    world.kafka.produce(tp(0), 10)
    world.wait(2, member)
    member.feed(events.PartitionsLost((tp(0),)))
    member.feed(events.PartitionsAssigned((tp(0),)))
    member.feed(events.RangesScanned(2, ((span(0, 10, 20), False),)))
    assert world.kafka.offset(0) == 10
    assert len(scans(member)) == 3


def test_result_waits_while_the_partition_is_paused() -> None:
    world = World(records=10)
    member = world.member(settings=FILTERED)
    stopped_short(member)
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(1, member)
    world.orders.append(PAUSE)
    world.wait(4, member)
    member.feed(events.RangesScanned(1, ((span(0, 0, 10), False),)))
    assert world.kafka.offset(0) == 0
    world.orders.clear()
    world.wait(4, member)
    assert world.kafka.offset(0) == 10


def test_range_of_a_scan_without_an_answer_is_claimed() -> None:
    world = World(records=10)
    member = world.member(settings=FILTERED)
    stopped_short(member)
    member.feed(events.PartitionsAssigned((tp(0),)))
    for _ in range(2):
        world.wait(SCAN_PATIENCE_S / 2 - 1, member)
        member.feed(events.TickArrived())
        assert world.kafka.claims(0) == []
    world.wait(4, member)
    assert world.kafka.claims(0) == [(10, "b1")]


def test_first_part_of_a_slow_scan_is_committed_and_the_rest_scanned() -> None:
    world = World(records=10)
    member = world.member(settings=FILTERED)
    stopped_short(member)
    member.feed(events.PartitionsAssigned((tp(0),)))
    member.feed(events.RangesScanned(1, ((span(0, 0, 4), False),)))
    assert world.kafka.offset(0) == 4
    world.wait(2, member)
    assert scans(member)[-1] == (2, (span(0, 4, 10),))


def test_partitions_beyond_three_scans_wait_for_a_result() -> None:
    world = World(records=0, partitions=4)
    member = world.member(owns=4, settings=FILTERED)
    stopped_short(member)
    for number in range(4):
        world.kafka.produce(tp(number), 10)
        world.wait(2, member)
    assert len(scans(member)) == 3
    member.feed(events.RangesScanned(2, ((span(1, 0, 10), True),)))
    assert scans(member)[-1] == (4, (span(3, 0, 10),))


def test_scanned_range_behind_a_claim_is_committed_after_it() -> None:
    limits = replace(FILTERED.limits, max_claims_per_partition=2)
    world = World(records=10)
    world.hits = {(tp(0), 3)}
    member = world.member(owns=1, settings=replace(FILTERED, limits=limits))
    world.kafka.produce(tp(0), 10)
    world.wait(3, member)
    assert world.kafka.claims(0) == [(10, "b1")]
    assert scans(member)[-1] == (2, (span(0, 10, 20),))
    (run_id,) = member.tick()
    world.start(run_id)
    world.succeed(run_id)
    world.wait(3, member)
    assert world.kafka.offset(0) == 20


def test_next_owner_records_a_commit_without_a_run() -> None:
    world = World(records=10)
    member = world.member(settings=FILTERED)
    member.fails.add(commands.RecordCommits)
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(2, member)
    assert world.kafka.offset(0) == 10
    member.feed(events.PartitionsLost((tp(0),)))
    assert world.dagster.recorded == []
    successor = world.member(owns=1, settings=FILTERED)
    world.wait(3, successor)
    (record,) = world.dagster.recorded
    assert (record.range, record.run_id, record.is_late) == (span(0, 0, 10), LEFT_OUT, True)


def test_commit_without_a_run_that_waits_for_kafka_is_explained() -> None:
    world = World(records=10)
    member = world.member(settings=FILTERED)
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(2, member)
    world.kafka.produce(tp(0), 10)
    member.fails.add(commands.WriteOffsets)
    world.wait(3, member)
    shown = explain_partition(member.engine.partitions[tp(0)], world.now)
    assert "[10, 20) has no record that the filter `only` processes, and is committed" in shown

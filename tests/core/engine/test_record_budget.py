"""The budget bounds the records of a member; what waits joins later commits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.record_budget import DueRecords, RecordBudget
from dagster_rebalance.core.model.commands import RecordCommit, RecordCommits
from dagster_rebalance.core.partitions.assigned import AssignedPartitions
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.partitions.unrecorded import Unrecorded
from tests.core.story import play
from tests.core.streams import Stream
from tests.core.world import World, span, tp

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTINGS = EngineSettings(
    limits=BatchLimits(max_records_per_range=10, max_ranges_per_run=100),
    records_per_minute=60.0,
    record_every_s=30.0,
)


def test_budget_allows_its_capacity_and_then_its_rate() -> None:
    budget = RecordBudget(60.0, 0.0)
    assert [budget.take(1, 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert budget.next_at(1, 0.0) == pytest.approx(1.0)
    assert not budget.take(1, 0.9)
    assert budget.take(1, 1.1)
    assert [budget.take(1, 1e6) for _ in range(11)] == [True] * 10 + [False]


def test_budget_of_a_small_share_has_a_few_tokens_and_its_part_of_the_rate() -> None:
    budget = RecordBudget(60.0, 0.0)
    budget.set_share(0.1, 0.0)
    assert [budget.take(1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert budget.next_at(1, 100.0) == pytest.approx(110.0)


def test_budget_for_more_records_than_fit_takes_all_and_is_in_debt() -> None:
    budget = RecordBudget(60.0, 0.0)
    assert budget.take(20, 0.0)
    assert not budget.take(1, 10.5)
    assert budget.take(1, 11.5)


def test_budget_without_a_limit_allows_everything() -> None:
    budget = RecordBudget(float("inf"), 0.0)
    budget.set_share(0.5, 0.0)
    assert all(budget.take(1_000, now) for now in (0.0, 0.0, 5.0))
    assert budget.next_at(1, 5.0) == 5.0


def test_budget_pays_owed_records_with_half_of_its_rate() -> None:
    budget = RecordBudget(60.0, 0.0)
    assert budget.take(10, 0.0)
    budget.owe(3, 0.0)
    assert [budget.next_at(one, 0.0) for one in (1, 3, 4)] == [2.0, 6.0, 7.0]
    assert not budget.take(1, 1.9)
    assert budget.take(1, 2.1)
    assert budget.take(2, 6.1)
    assert budget.take(1, 7.1)


def test_budget_owes_at_most_a_full_bucket() -> None:
    budget = RecordBudget(60.0, 0.0)
    assert budget.take(10, 0.0)
    budget.owe(1_000, 0.0)
    assert budget.next_at(10, 0.0) == 20.0
    assert budget.next_at(10, 20.0) == 20.0


def test_budget_without_a_limit_owes_nothing() -> None:
    budget = RecordBudget(float("inf"), 0.0)
    budget.owe(1_000, 0.0)
    assert budget.take(1_000, 0.0)
    assert budget.next_at(1_000, 1.0) == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 4), st.integers(0, 3)), max_size=60))
def test_commits_get_at_least_half_of_the_rate(steps: list[tuple[float, int, int]]) -> None:
    budget, now = RecordBudget(60.0, 0.0), 0.0
    for wait_s, records, owed in steps:
        now += wait_s
        budget.owe(owed, now)
        at = budget.next_at(records, now)
        assert at <= now + 2 * records
        assert budget.take(records, at + 1e-6)
        now = at + 1e-6


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 4)), max_size=60))
def test_budget_allows_at_most_its_rate_over_any_time(takes: list[tuple[float, int]]) -> None:
    budget, now, taken = RecordBudget(60.0, 0.0), 0.0, 0
    for wait_s, records in takes:
        now += wait_s
        taken += records if budget.take(records, now) else 0
        assert taken <= 10 + now + 1e-6


def unrecorded(
    number: int, made_at: float | None = 0.0, *, due_at: float = 0.0, is_dead_letter: bool = False
) -> OwnedPartition:
    commit = RecordCommit(
        span(number, 0, 9),
        number,
        "b",
        "r",
        0,
        None,
        None,
        is_late=made_at is None,
        is_dead_letter=is_dead_letter,
        committed_at=made_at,
    )
    records = Unrecorded((commit,), due_at=due_at)
    return OwnedPartition(tp(number), number, Phase.OWNED, unrecorded=records)


def due_records(owned: Iterable[OwnedPartition]) -> tuple[DueRecords, AssignedPartitions]:
    partitions = AssignedPartitions()
    partitions.update((one.partition, one) for one in owned)
    return DueRecords(SETTINGS, partitions, RecordBudget(60.0, 0.0)), partitions


def numbers(records: Iterable[RecordCommit]) -> list[int]:
    return [record.range.partition for record in records]


def test_due_records_beyond_the_budget_wait_in_the_order_of_their_due_times() -> None:
    owned = [unrecorded(number, 100.0 - number) for number in range(1, 15)]
    owned.append(unrecorded(20, None))
    due, partitions = due_records(owned)
    issued = due.issue(partitions.values(), 200.0)
    assert numbers(issued) == [20, *range(14, 5, -1)]
    assert due.next_due(200.0) == pytest.approx(201.0)
    assert due.issue((), 200.5) == ()
    assert numbers(due.issue((), 202.0)) == [5, 4]


def test_due_records_of_released_partitions_and_dead_letters_need_no_budget() -> None:
    owned = [unrecorded(number, 1.0) for number in range(1, 13)]
    due, partitions = due_records(owned)
    due.issue(partitions.values(), 10.0)
    partitions[tp(11)] = partitions[tp(11)]._replace(phase=Phase.DRAINING)
    partitions[tp(30)] = unrecorded(30, 1.0, is_dead_letter=True)
    concerned = partitions.known([tp(11), tp(30)])
    assert numbers(due.issue(concerned, 10.0)) == [11, 30]
    assert numbers(due.issue((), 12.5)) == [12]


def test_due_records_of_a_lost_partition_are_forgotten() -> None:
    owned = [unrecorded(number, 1.0) for number in range(1, 13)]
    due, partitions = due_records(owned)
    due.issue(partitions.values(), 10.0)
    del partitions[tp(11)]
    assert numbers(due.issue((), 11.5)) == [12]
    assert due.next_due(11.5) == float("inf")
    partitions.clear()
    assert due.issue((), 12.0) == ()


def test_unanswered_record_is_issued_again_without_a_token() -> None:
    due, partitions = due_records(unrecorded(number, 1.0) for number in range(1, 11))
    assert len(due.issue(partitions.values(), 10.0)) == 10
    assert due.issue(partitions.values(), 10.5) == ()
    assert len(due.issue(partitions.values(), 11.0)) == 10


def test_share_of_the_budget_is_that_of_the_partitions() -> None:
    due, partitions = due_records(unrecorded(number, 1.0) for number in range(1, 20))
    due.group_partitions = 190
    assert len(due.issue(partitions.values(), 0.0)) == 5
    assert due.next_due(0.0) == pytest.approx(10.0)


def test_engine_records_within_the_budget_and_joins_what_waits() -> None:
    script = play("world 100 30 | join m 30 BASE", {"BASE": SETTINGS})
    for _ in range(10):
        script.play("tick STARTED")
        for run_id in script.made:
            script.world.succeed(run_id)
        script.play("wait 6")
    assert all(script.world.kafka.offset(number) == 100 for number in range(30))
    recorded = script.world.dagster.recorded
    assert len(recorded) <= 10 + 61
    assert {record.range.partition for record in recorded} == set(range(30))
    script.play("wait_in_steps 50")
    ends = {record.range.topic_partition: record.range.until for record in recorded}
    assert set(ends.values()) == {100}
    assert sum(len(record.range) for record in recorded) == 3_000
    times = [len(one.commits) for one in script.member.given(RecordCommits)]  # type: ignore[union-attr]
    assert max(times) <= 10


def test_engine_with_a_tenth_of_the_partitions_has_a_tenth_of_the_budget() -> None:
    script = play("world 10 30 | join m 0 BASE", {"BASE": SETTINGS})
    script.member.engine.count_group(300)
    script.play("assign " + " ".join(map(str, range(30))) + " | wait 1 | tick STARTED")
    for run_id in script.made:
        script.world.succeed(run_id)
    script.play("wait 6")
    assert len(script.world.kafka.commits) >= 6
    assert len(script.world.dagster.recorded) == 5


CRASHING = replace(SETTINGS, record_every_s=600.0, records_per_minute=4.0)


def commit_a_batch(stream: Stream) -> None:
    while stream.turn() is None:
        pass
    stream.end()
    stream.turn()


def test_commits_of_a_crash_loop_do_not_wait_for_the_budget() -> None:
    """Each owner finds the unrecorded commits of those before it, and adds its own."""
    partitions = 60
    world = World(records=10, partitions=partitions)
    for crash in range(1, 12):
        stream = Stream(world, f"s{crash}", owns=range(partitions), settings=CRASHING)
        commit_a_batch(stream)
        offsets = {world.kafka.offset(number) for number in range(partitions)}
        assert offsets == {10 * crash}
        stream.die()
        stream.is_fenced = True
        for number in range(partitions):
            world.kafka.produce(tp(number), 10)
    recorded = world.dagster.recorded
    assert len({one.range for one in recorded}) == len(recorded) <= 11 * partitions


@given(
    claims=st.integers(0, 40),
    parts=st.integers(1, 4),
    grows=st.booleans(),
    is_dead_letter=st.booleans(),
)
def test_record_that_a_commit_waits_for_needs_no_budget(
    claims: int, parts: int, *, grows: bool, is_dead_letter: bool
) -> None:
    late = unrecorded(0, None).unrecorded.parts * (parts - 1)
    records = Unrecorded((*late, *unrecorded(0, 0.0 if grows else None).unrecorded.parts))
    if not records.has_room(claims, is_dead_letter=is_dead_letter):
        assert records.leaves_little_room(claims)


def test_due_records_that_fill_the_note_need_no_budget() -> None:
    due, partitions = due_records(unrecorded(number, None) for number in range(20))
    assert len(due.issue(partitions.values(), 0.0)) == 10
    waiting = partitions[tp(15)]
    records = replace(waiting.unrecorded, parts=waiting.unrecorded.parts * 2)
    partitions[tp(15)] = waiting._replace(unrecorded=records)
    assert numbers(due.issue(partitions.known([tp(15), tp(16)]), 0.0)) == [15, 15]


def test_records_that_do_not_wait_are_counted_by_the_engine() -> None:
    member = World().member(settings=SETTINGS)
    counted = member.engine.record_budget
    assert counted.take(10, 0.0)
    before = counted.next_at(1, 0.0)
    member.engine.owe_records(5, 0.0)
    assert counted.next_at(1, 0.0) > before

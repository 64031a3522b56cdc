"""The agenda has the partitions that have changed or are due, and no other."""

from __future__ import annotations

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.engine.agenda import Agenda
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.partitions.assigned import AssignedPartitions
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.unrecorded import Unrecorded
from tests.core.world import span, tp


def recorded_at(number: int, at: float) -> OwnedPartition:
    """A partition whose commits are recorded at a time."""
    commit = RecordCommit(span(number, 0, 9), number, "b", "r", 0, None, None)
    return OwnedPartition(tp(number), number, unrecorded=Unrecorded((commit,), due_at=at))


def agenda_of(*owned: OwnedPartition) -> tuple[Agenda, AssignedPartitions]:
    partitions = AssignedPartitions()
    for one in owned:
        partitions[one.partition] = one
    return Agenda(EngineSettings(), partitions), partitions


def taken(agenda: Agenda, now: float) -> list[int]:
    """The taken partitions."""
    return [owned.partition.partition for owned in agenda.take(now)]


def test_agenda_with_changes_returns_them_once_by_epoch() -> None:
    agenda, partitions = agenda_of(recorded_at(2, 50.0), recorded_at(1, 40.0))
    assert taken(agenda, 0.0) == [1, 2]
    assert taken(agenda, 1.0) == []
    partitions[tp(2)] = recorded_at(2, 50.0)._replace(stop_reason="changed")
    assert taken(agenda, 1.0) == [2]


def test_agenda_returns_partitions_at_their_due_time() -> None:
    agenda, _ = agenda_of(*(recorded_at(number, 10.0 * number) for number in (1, 2, 3)))
    taken(agenda, 0.0)
    assert 9.9 < agenda.next_due < 10.0
    assert taken(agenda, 9.9) == []
    assert taken(agenda, 10.1) == [1]
    assert taken(agenda, 30.1) == [2, 3]
    assert agenda.next_due == float("inf")


def test_agenda_with_a_later_due_time_forgets_the_earlier_one() -> None:
    agenda, partitions = agenda_of(recorded_at(1, 10.0))
    taken(agenda, 0.0)
    partitions[tp(1)] = recorded_at(1, 90.0)
    taken(agenda, 1.0)
    assert agenda.next_due > 80.0
    del partitions[tp(1)]
    taken(agenda, 2.0)
    assert agenda.next_due == float("inf")


def test_agenda_after_many_changes_keeps_one_due_time_per_partition() -> None:
    agenda, partitions = agenda_of(recorded_at(1, 1e6), recorded_at(2, 2e6))
    for number in range(1_000):
        partitions[tp(1)] = recorded_at(1, 1e6 + number)
        taken(agenda, 0.0)
        assert agenda.next_due > 1e6 - 1
    assert len(agenda._heap) < 100

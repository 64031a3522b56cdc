"""The story of per-batch runs reads the catalogue of real members."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import dagster as dg
import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.commands import Cause, HoldOutcome, Receipt, RecordCommit
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from proofs.demo.per_batch.board import LaneBoard
from proofs.demo.per_batch.state import Watcher
from proofs.interrupts import Interrupts
from proofs.witness.catalogue import HoldSeen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka.admin import AdminClient

PARTITIONS = [TopicPartition("orders", number) for number in range(3)]
FIRST, SECOND, THIRD = PARTITIONS


class Group:
    """A fake AdminClient with the assignments of the group."""

    def __init__(self) -> None:
        self.assigned: dict[str, list[TopicPartition]] | None = None

    def describe_consumer_groups(
        self, groups: list[str], *, request_timeout: float
    ) -> dict[str, Future[SimpleNamespace]]:
        """The members that the test wants."""
        assert request_timeout > 0
        answer: Future[SimpleNamespace] = Future()
        if self.assigned is None:
            answer.set_exception(KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND)))
        else:
            members = [
                SimpleNamespace(
                    member_id=name, assignment=SimpleNamespace(topic_partitions=partitions)
                )
                for name, partitions in self.assigned.items()
            ]
            answer.set_result(SimpleNamespace(members=members))
        return {groups[0]: answer}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """Return an instance."""
    with dg.instance_for_test() as made:
        yield made


@pytest.fixture
def kafka() -> Group:
    """Kafka's view of the group."""
    return Group()


@pytest.fixture
def watcher(instance: dg.DagsterInstance, kafka: Group) -> Watcher:
    """Follows the group `shop`."""
    return Watcher(
        instance,
        "shop",
        [str(partition) for partition in PARTITIONS],
        cast("AdminClient", kafka),
        Interrupts(),
    )


def _member(instance: dg.DagsterInstance, name: str) -> Catalogue:
    return Catalogue(
        instance, GroupAssets.of("shop"), MemberIdentity(name, "sensor", f"incarnation of {name}")
    )


def _receipt(*partitions: TopicPartition, outcome: HoldOutcome = HoldOutcome.DRAINED) -> Receipt:
    return Receipt(outcome, Cause.REVOKE, partitions, 12.0, {}, ("run-1", "run-2"), (), ())


def test_partitions_have_no_owner_before_the_first_member(watcher: Watcher) -> None:
    snapshot = watcher.look([5, 5, 0])
    assert [lane.owner for lane in snapshot.lanes] == ["", "", ""]
    assert snapshot.lag == 10
    assert LaneBoard(snapshot).in_words() == "no owner: orders-0..2; lag 10; 0 runs at work"


def test_partition_belongs_to_its_assigned_member_until_its_hold_ends(
    instance: dg.DagsterInstance, watcher: Watcher
) -> None:
    blue, green = _member(instance, "blue"), _member(instance, "green")
    blue.record_assigned(PARTITIONS, "id-of-blue")
    assert {lane.owner for lane in watcher.look([0, 0, 0]).lanes} == {"blue"}
    blue.record_receipt(_receipt(SECOND, THIRD))
    assert [lane.owner for lane in watcher.look([0, 0, 0]).lanes] == ["blue", "", ""]
    green.record_assigned([SECOND], "id-of-green")
    blue.record_receipt(_receipt(SECOND, outcome=HoldOutcome.NOTHING_TO_DO))
    blue.record_left("its process ends")
    assert [lane.owner for lane in watcher.look([0, 0, 0]).lanes] == ["", "green", ""]


def test_partition_that_kafka_revokes_drains(
    instance: dg.DagsterInstance, kafka: Group, watcher: Watcher
) -> None:
    _member(instance, "blue").record_assigned([FIRST, SECOND], "id-of-blue")
    kafka.assigned = {"id-of-blue": [FIRST], "id-of-an-unknown-member": [THIRD]}
    assert [lane.is_draining for lane in watcher.look([0, 0, 0]).lanes] == [False, True, False]


def test_partitions_of_a_leaving_member_drain(
    instance: dg.DagsterInstance, kafka: Group, watcher: Watcher
) -> None:
    _member(instance, "blue").record_assigned([FIRST, SECOND], "id-of-blue")
    kafka.assigned = {"id-of-blue": [FIRST, SECOND]}
    watcher.leaving.add("blue")
    assert [lane.is_draining for lane in watcher.look([0, 0, 0]).lanes] == [True, True, False]


def test_commits_and_receipts_are_read_once(instance: dg.DagsterInstance, watcher: Watcher) -> None:
    blue = _member(instance, "blue")
    for range_ in (OffsetRange("orders", 0, 0, 4), OffsetRange("orders", 0, 4, 9)):
        blue.record_commits([RecordCommit(range_, 1, "batch", "run", 0, None, None)])
    blue.record_receipt(_receipt(SECOND))
    watcher.look([10, 0, 0])
    snapshot = watcher.look([10, 0, 0])
    assert [(one.member, one.range.start, one.range.until) for one in watcher.recorded] == [
        ("blue", 0, 4),
        ("blue", 4, 9),
    ]
    assert (snapshot.lanes[0].committed, snapshot.lanes[0].lag) == (9, 1)
    (hold,) = watcher.holds
    assert hold == HoldSeen(
        "blue", "drained", "revoke", ("orders-1",), seconds=12.0, ended_at=hold.ended_at, runs=2
    )

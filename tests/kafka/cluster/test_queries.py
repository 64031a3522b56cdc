"""Queries to a cluster with an undescribable topic, a moving leader or a silent controller."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition, Uuid
from confluent_kafka.admin import AclOperation

from dagster_rebalance.core.model import offsets
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.group_ports import PartitionInfo
from dagster_rebalance.testing.fake_group import ManualClock
from tests.kafka.admins import use_admin

if TYPE_CHECKING:
    from collections.abc import Mapping


class FakeAdmin:
    """A client whose brokers know two topics, and cannot describe one of them."""

    def list_topics(self, timeout: float) -> SimpleNamespace:
        described = SimpleNamespace(id=0, leader=1, replicas=[1], isrs=[1])
        topics = {
            "orders": SimpleNamespace(error=None, partitions={0: described}),
            "broken": SimpleNamespace(
                error=KafkaError(KafkaError.LEADER_NOT_AVAILABLE, "no leader"), partitions={}
            ),
        }
        return SimpleNamespace(topics=topics)

    def describe_topics(
        self, *_: object, request_timeout: float, **__: object
    ) -> dict[str, object]:
        return {}


class MovingLeader(FakeAdmin):
    """A client that finds the leader of a partition once it has new metadata."""

    def __init__(self) -> None:
        self.looks = 0

    def list_topics(self, timeout: float) -> SimpleNamespace:
        self.looks += 1
        return super().list_topics(timeout)

    def list_offsets(
        self, request: Mapping[TopicPartition, object], **_: object
    ) -> dict[TopicPartition, Future[SimpleNamespace]]:
        answer: Future[SimpleNamespace] = Future()
        if self.looks:
            answer.set_result(SimpleNamespace(offset=7, leader_epoch=1))
        else:
            answer.set_exception(KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)))
        return dict.fromkeys(request, answer)

    def poll(self, _timeout: float) -> None:
        """Nothing."""


class LostController(FakeAdmin):
    """A client whose metadata names an unavailable controller.

    It names one that answers once the client has asked for metadata `looks` times.
    """

    def __init__(self, clock: ManualClock, *, looks: int) -> None:
        self.clock = clock
        self.asked_for_s: list[float] = []
        self._looks = looks

    def list_topics(self, timeout: float) -> SimpleNamespace:
        self._looks -= 1
        return super().list_topics(timeout)

    def describe_topics(
        self, *_: object, request_timeout: float, **__: object
    ) -> dict[str, object]:
        self.asked_for_s.append(request_timeout)
        answer: Future[SimpleNamespace] = Future()
        if self._looks > 0:
            self.clock.advance(request_timeout)
            answer.set_exception(
                KafkaException(
                    KafkaError(KafkaError._TIMED_OUT, "Timed out waiting for controller")
                )
            )
        else:
            answer.set_result(
                SimpleNamespace(topic_id=Uuid(1, 2), authorized_operations=[AclOperation.READ])
            )
        return {"orders": answer}

    def poll(self, _timeout: float) -> None:
        """Nothing."""


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(
        validated({"bootstrap.servers": "broker:9092", "group.id": "etl"}, hold_limit_s=1)
    )
    use_admin(cluster, FakeAdmin())
    return cluster


def test_topic_queries_skip_a_topic_that_cannot_be_described(cluster: Cluster) -> None:
    orders = [PartitionInfo("orders", 0, 1, (1,), (1,))]
    assert cluster.list_topics() == {"orders": orders}
    assert cluster.partitions_for("orders") == orders
    cluster.check(["orders"])


def test_end_offsets_are_retried_with_new_metadata(cluster: Cluster) -> None:
    admin = use_admin(cluster, MovingLeader())
    orders = offsets.TopicPartition("orders", 0)
    assert cluster.end_offsets([orders]) == {orders: 7}
    assert admin.looks == 1


def test_topic_ids_are_retried_while_the_controller_is_unavailable() -> None:
    clock = ManualClock()
    cluster = Cluster(
        validated({"bootstrap.servers": "broker:9092", "group.id": "etl"}, hold_limit_s=1),
        clock=clock,
    )
    admin = use_admin(cluster, LostController(clock, looks=2))
    assert cluster.topic_ids(["orders"]) == {"orders": str(Uuid(1, 2))}
    assert admin.asked_for_s == [0.25, 0.5, 1.0]
    cluster.check(["orders"])


def test_topic_ids_count_for_a_while_if_their_read_takes_long() -> None:
    """A member with thousands of partitions needs them in each part of its restore."""
    clock = ManualClock()
    cluster = Cluster(
        validated({"bootstrap.servers": "broker:9092", "group.id": "etl"}, hold_limit_s=1),
        clock=clock,
    )
    ids = {"orders": str(Uuid(1, 2))}
    admin = use_admin(cluster, LostController(clock, looks=1))
    assert cluster.topic_ids(["orders"]) == ids  # after 0.25 s
    for after_s, reads in ((2.4, 2), (0.2, 3), (0.0, 4)):
        clock.advance(after_s)
        assert cluster.topic_ids(["orders"]) == ids
        assert len(admin.asked_for_s) == reads
    admin = use_admin(cluster, LostController(clock, looks=2))
    for after_s, reads in ((0.0, 3), (2.9, 3), (0.2, 4)):
        clock.advance(after_s)
        assert cluster.topic_ids(["orders"]) == ids
        assert len(admin.asked_for_s) == reads
    cluster.topic_ids(["others"])
    assert len(admin.asked_for_s) == 5


def test_topic_ids_time_out_while_the_controller_is_unavailable() -> None:
    clock = ManualClock()
    cluster = Cluster(
        validated({"bootstrap.servers": "broker:9092", "group.id": "etl"}, hold_limit_s=1),
        clock=clock,
    )
    admin = use_admin(cluster, LostController(clock, looks=100))
    with pytest.raises(BrokerError, match="waiting for controller") as problem:
        cluster.topic_ids(["orders"], 2.5)
    assert problem.value.retriable
    assert admin.asked_for_s == [0.25, 0.5, 1.0, 0.75]


def test_topic_queries_raise_for_a_wanted_topic_that_cannot_be_described(cluster: Cluster) -> None:
    for ask in (
        lambda: cluster.partitions_for("broken"),
        lambda: cluster.check(["orders", "broken"]),
    ):
        with pytest.raises(BrokerError, match=r"'broken'.*no leader"):
            ask()
    with pytest.raises(BrokerError, match=r"'missing'.*create the topic"):
        cluster.partitions_for("missing")

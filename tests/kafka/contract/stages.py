"""Stages for the contract: a fake group, librdkafka's mock cluster and a real broker."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Protocol

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientsPartition

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.member.member import Member
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.eviction import evict

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.events import (
        PartitionsAssigned,
        PartitionsLost,
        RevokeRequested,
    )
    from dagster_rebalance.kafka.group_ports import GroupEvent, GroupMember
    from dagster_rebalance.testing.broker import KafkaCluster

PROBE_INTERVAL_S = 0.3
TIMEOUT_S = 120.0


class Stage(Protocol):
    """A group with one topic of four partitions."""

    topic: str

    def new_member(self) -> GroupMember:
        """A member that has not subscribed yet."""

    def evict(self, member: GroupMember) -> None:
        """Remove a member from the group, without notice to the member."""

    def add_topic(self, name: str = "") -> str:
        """Create another topic of four partitions; by default with a unique name."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and return when the broker has deleted its offsets."""


class FakeStage:
    """`dagster_rebalance.testing.fake_group`."""

    def __init__(self) -> None:
        self.topic = "orders"
        self.group = FakeGroup({self.topic: 4}, probe_interval_s=PROBE_INTERVAL_S)

    def new_member(self) -> GroupMember:
        return self.group.member()

    def evict(self, member: GroupMember) -> None:
        (fake,) = (other for other in self.group.members if other is member)
        self.group.fence(fake)

    def add_topic(self, name: str = "payments") -> str:
        self.group.add_partitions(name, 4)
        return name

    def delete_topic(self, topic: str) -> None:
        self.group.delete_topic(topic)


class KafkaStage:
    """A real member on a broker, real or mocked by librdkafka.

    Args:
        bootstrap_servers: The broker.
        topic: A topic of four partitions.
        protocol: `consumer`, `classic` (cooperative-sticky) or `range` (classic and eager).
        cluster: The broker's cluster; None for the mock, which deletes no topics.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        protocol: str,
        cluster: KafkaCluster | None = None,
    ) -> None:
        self.topic = topic
        self._cluster = cluster
        self.protocol = "consumer" if protocol == "consumer" else "classic"
        self.hold_limit_s = 30.0
        self.discovery_interval_s = 30.0
        self.config = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"g-{uuid.uuid4().hex[:8]}",
            "group.protocol": self.protocol,
        }
        if self.protocol == "classic":
            self.config.update({"session.timeout.ms": "6000", "heartbeat.interval.ms": "300"})
        if protocol == "range":
            self.config["partition.assignment.strategy"] = "range"

    def new_member(self) -> GroupMember:
        settings = validated(self.config, hold_limit_s=self.hold_limit_s)
        return Member(
            settings,
            probe_interval_s=PROBE_INTERVAL_S,
            discovery_interval_s=self.discovery_interval_s,
        )

    def evict(self, member: GroupMember) -> None:
        """Leave the group in the name of the member."""
        evict(
            self.config["bootstrap.servers"],
            self.config["group.id"],
            member.member_id,
            self.protocol,
        )

    def add_topic(self, name: str = "") -> str:
        assert self._cluster is not None, "the mock cluster creates no topics on request"
        name = name or f"a-second-{uuid.uuid4().hex[:8]}"
        self._cluster.create_topic(name, 4)
        return name

    def delete_topic(self, topic: str) -> None:
        """Delete it, and wait until its offsets are gone."""
        assert self._cluster is not None, "the mock cluster deletes no topics"
        self._cluster.delete_topic(topic)
        outsider = Consumer(
            {
                "bootstrap.servers": self.config["bootstrap.servers"],
                "group.id": self.config["group.id"],
            }
        )
        partitions = [ClientsPartition(topic, number) for number in range(4)]
        wait_until(
            lambda: all(tp.offset < 0 for tp in outsider.committed(partitions, timeout=120)),
            timeout_s=TIMEOUT_S,
            what="the offsets of the topic to be deleted",
        )
        outsider.close()


class MockCluster:
    """librdkafka's mock cluster. It lives as long as the client that brought it."""

    def __init__(self) -> None:
        self._host = Consumer(
            {"test.mock.num.brokers": 1, "group.id": "host", "allow.auto.create.topics": True}
        )
        self.bootstrap_servers = ",".join(
            str(broker).split("/")[0]
            for broker in self._host.list_topics(timeout=120).brokers.values()
        )

    def topic(self) -> str:
        """Create a topic of four partitions, by the first request for it."""
        name = f"mock-{uuid.uuid4().hex[:8]}"
        self._host.list_topics(name, timeout=120)
        return name

    def close(self) -> None:
        self._host.close()


class Actor:
    """A member under test, and its events."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.member = stage.new_member()
        self.events: list[GroupEvent] = []

    def subscribe(self, *more: str) -> Actor:
        self.member.subscribe([self.stage.topic, *more])
        return self

    def poll(self) -> None:
        self.events += self.member.poll(0.05)

    @property
    def owns(self) -> frozenset[TopicPartition]:
        return self.member.assignment()

    @property
    def everything(self) -> frozenset[TopicPartition]:
        """All partitions of the topic of the stage."""
        return frozenset(TopicPartition(self.stage.topic, number) for number in range(4))

    def partitions_of(
        self, kind: type[PartitionsAssigned | RevokeRequested | PartitionsLost]
    ) -> list[TopicPartition]:
        """Every partition that events of a kind named, in order and with repetitions."""
        return [tp for event in self.events if isinstance(event, kind) for tp in event.partitions]


def play(until: Callable[[], object], *actors: Actor, what: str) -> None:
    """Poll all members until a condition holds."""

    def step() -> bool:
        for actor in actors:
            actor.poll()
        return bool(until())

    wait_until(step, timeout_s=TIMEOUT_S, what=what, interval_s=0.0)


def pass_time(*actors: Actor, polls: int = 10) -> None:
    """Poll all members for a while."""
    for _ in range(polls):
        for actor in actors:
            actor.poll()


def share(*actors: Actor, what: str = "all to share the partitions", partitions: int = 4) -> None:
    """Poll all members and release their holds until each partition has one owner."""
    everything = [TopicPartition(actors[0].stage.topic, number) for number in range(partitions)]

    def shared() -> bool:
        for actor in actors:
            if actor.member.held:
                actor.member.release()
        return all(actor.owns for actor in actors) and everything == sorted(
            tp for actor in actors for tp in actor.owns
        )

    play(shared, *actors, what=what)

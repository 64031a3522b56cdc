"""An eager group becomes cooperative, member by member, while records come in.

It goes by way of the consumer protocol, on a real broker.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.errors import BrokerError, RebalanceInProgressError
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

QUICK = {"group.protocol": "classic", "session.timeout.ms": "6000", "heartbeat.interval.ms": "300"}
RANGE = {**QUICK, "partition.assignment.strategy": "range"}
COOPERATIVE = {**QUICK, "partition.assignment.strategy": "cooperative-sticky"}
CONSUMER = {"group.protocol": "consumer"}


class Deployment:
    """Two members of a group, and records that come in all the time."""

    def __init__(self, kafka: KafkaCluster, topic: str, settings: dict[str, str]) -> None:
        self.topic = topic
        self.seen: Counter[tuple[int, int]] = Counter()
        self.produced = 0
        self.refused: set[RebalanceAwareConsumer] = set()
        self._base = {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": unique_name("group"),
            "auto.offset.reset": "earliest",
        }
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0})
        self.members = [self.join(settings), self.join(settings)]
        self.play(self.shared, "both to share the partitions")

    def join(self, settings: dict[str, str]) -> RebalanceAwareConsumer:
        member = RebalanceAwareConsumer({**self._base, **settings}, hold_limit_s=30)
        member.subscribe([self.topic])
        return member

    def replace(self, number: int, settings: dict[str, str]) -> None:
        self.members[number].close()
        self.members[number] = self.join(settings)
        self.play(self.shared, "both to share the partitions after a bounce")

    def shared(self) -> bool:
        return [len(member.assignment()) for member in self.members] == [2, 2]

    def everything_read(self) -> bool:
        return len(self.seen) == self.produced

    def play(self, until: Callable[[], bool], what: str, *, produce: bool = True) -> None:

        def step() -> bool:
            if produce:
                for partition in range(4):
                    self._producer.produce(self.topic, b"record", partition=partition)
                    self.produced += 1
                assert self._producer.flush(120) == 0
            for member in self.members:
                records = member.poll(0.05)
                self.seen.update(
                    (record.partition() or 0, record.offset() or 0) for record in records
                )
                if records or member in self.refused:
                    self.commit(member)
            return until() and not self.refused

        wait_until(step, timeout_s=120, what=what, interval_s=0)

    def commit(self, member: RebalanceAwareConsumer) -> None:
        self.refused.discard(member)
        try:
            member.commit_sync()
        except RebalanceInProgressError:
            self.refused.add(member)

    def close(self) -> None:
        for member in self.members:
            member.close(5.0)


@pytest.fixture
def deployment(kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> Iterator[Deployment]:
    made = Deployment(kafka_broker, kafka_topic(4), RANGE)
    yield made
    made.close()


def test_eager_group_moves_to_cooperative_in_two_rolling_bounces(deployment: Deployment) -> None:
    """By way of the consumer protocol; every record is read once."""
    for settings in (CONSUMER, COOPERATIVE):
        for number in (0, 1):
            deployment.replace(number, settings)
    deployment.play(deployment.everything_read, "every record to be read", produce=False)
    assert set(deployment.seen.values()) == {1}


def test_cooperative_member_is_refused_by_an_eager_group(deployment: Deployment) -> None:
    deployment.members[0].close()
    with pytest.raises(
        BrokerError,
        match=(
            r"INCONSISTENT_GROUP_PROTOCOL.*the group is in use with another protocol "
            r"or assignment strategy"
        ),
    ):
        deployment.replace(0, COOPERATIVE)
    assert not deployment.members[0].assignment()
    deployment.members[0].close()
    deployment.members = deployment.members[1:]
    deployment.play(
        lambda: len(deployment.members[0].assignment()) == 4, "the old member to own everything"
    )
    deployment.play(deployment.everything_read, "every record to be read", produce=False)
    assert set(deployment.seen.values()) == {1}

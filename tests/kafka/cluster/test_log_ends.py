"""Ends of logs that a consumer reports, and those that the admin client must find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException

from dagster_rebalance.core.model.offsets import LogPosition, TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.log_ends import LogEnds
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.testing.fake_group import ManualClock
from tests.kafka.admins import use_admin
from tests.kafka.cluster.test_queries import MovingLeader

if TYPE_CHECKING:
    import confluent_kafka

SETTINGS = validated({"bootstrap.servers": "broker:9092", "group.id": "etl"}, hold_limit_s=1)
MANY = [TopicPartition("orders", number) for number in range(250)]


class FakeAnswer:
    """The end of one log, 10 more than the number of its partition; even leaders have an epoch."""

    def __init__(self, asked: confluent_kafka.TopicPartition) -> None:
        self.topic, self.partition = asked.topic, asked.partition
        self.error = KafkaError(KafkaError._UNKNOWN_PARTITION) if asked.partition == 7 else None
        end = asked.partition + 10
        self.offset = -1 if self.error else end if asked.offset == OFFSET_END else asked.partition
        self.leader_epoch = -1 if asked.partition % 2 else 3


class FakeConsumer:
    """A consumer that answers after a while, or whose coordinator is silent."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.took_s = clock, 0.0
        self.sizes: list[int] = []
        self.is_silent = False

    def poll(self, _timeout: float) -> None:
        """Nothing."""

    def offsets_for_times(
        self, asked: list[confluent_kafka.TopicPartition], *, timeout: float
    ) -> list[FakeAnswer]:
        assert timeout > 0
        self.sizes.append(len(asked))
        if self.is_silent:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        assert {one.offset for one in asked} in ({OFFSET_END}, {OFFSET_BEGINNING})
        self.clock.advance(min(timeout, self.took_s))
        if timeout < self.took_s:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return [FakeAnswer(one) for one in asked]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def consumer(clock: ManualClock) -> FakeConsumer:
    return FakeConsumer(clock)


@pytest.fixture
def ends(clock: ManualClock, consumer: FakeConsumer) -> LogEnds:
    ends = LogEnds(SETTINGS, clock, reads_committed=True)
    vars(ends)["_client"] = consumer
    return ends


def test_log_ends_of_many_partitions_take_several_requests(
    ends: LogEnds, consumer: FakeConsumer
) -> None:
    found = ends.read(MANY, 1.0)
    assert consumer.sizes == [100, 100, 50]
    assert found.keys() == {*MANY} - {MANY[7]}
    assert (found[MANY[2]], found[MANY[3]]) == (LogPosition(12, 3), LogPosition(13))


def test_log_ends_without_an_answer_are_not_requested_again_for_a_while(
    ends: LogEnds, consumer: FakeConsumer, clock: ManualClock
) -> None:
    """A silent leader delays the requests to all others."""
    consumer.is_silent = True
    assert ends.read(MANY, 1.0) == {}
    assert ends.read(MANY, 1.0) == {}
    assert consumer.sizes == [100]
    consumer.is_silent = False
    clock.advance(10.0)
    assert len(ends.read(MANY, 1.0)) == 249


def test_log_ends_without_time_are_not_requested(ends: LogEnds, consumer: FakeConsumer) -> None:
    assert ends.read(MANY, 0.0) == {}
    assert consumer.sizes == []


def test_log_ends_of_more_partitions_have_more_time(ends: LogEnds, consumer: FakeConsumer) -> None:
    consumer.took_s = 0.15
    many = [TopicPartition("orders", number) for number in range(8, 1208)]
    assert len(ends.read(many, 1.0)) == 1200
    consumer.took_s = 0.9
    assert len(ends.read(many, 1.0)) == 200
    consumer.took_s = 1.1
    assert ends.read(many, 1.0) == {}


def test_consumer_reads_the_first_offsets_of_many_partitions(consumer: FakeConsumer) -> None:
    cluster = Cluster(SETTINGS, pause=lambda _: None)
    use_admin(cluster, MovingLeader())
    vars(cluster._ends)["_client"] = consumer
    assert cluster.beginning_offsets(MANY) == {tp: tp.partition for tp in MANY}
    assert cluster.beginning_offsets(MANY[:2]) == dict.fromkeys(MANY[:2], 7), "the admin client's"
    assert consumer.sizes == [100, 100, 50]


def test_consumer_without_isolation_reads_the_high_watermarks_of_many_partitions(
    consumer: FakeConsumer,
) -> None:
    cluster = Cluster(SETTINGS, pause=lambda _: None)
    use_admin(cluster, MovingLeader())
    assert (cluster._ends._level, cluster._marks._level) == ("read_committed", "read_uncommitted")
    vars(cluster._marks)["_client"] = consumer
    ends = {tp: 7 if tp.partition == 7 else tp.partition + 10 for tp in MANY}
    assert cluster.high_watermarks(MANY) == ends
    assert consumer.sizes == [100, 100, 50]


def test_admin_client_reads_the_ends_that_the_consumer_does_not_report(
    consumer: FakeConsumer,
) -> None:
    cluster = Cluster(SETTINGS, pause=lambda _: None)
    admin = use_admin(cluster, MovingLeader())
    vars(cluster._ends)["_client"] = consumer
    found = cluster.log_ends(MANY[6:9])
    assert found == {
        MANY[6]: LogPosition(16, 3),
        MANY[7]: LogPosition(7, 1),
        MANY[8]: LogPosition(18, 3),
    }
    assert admin.looks == 1

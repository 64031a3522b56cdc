"""Records through `poll()` on a real broker, in both protocols."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from dagster_rebalance.testing.deadline import wait_until
from tests.kafka.readers import CommitOnRevoke, Readers

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = [
    pytest.mark.broker,
    pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True),
]


def test_hold_delivers_retained_partitions_exactly_once(group: Readers) -> None:
    """The promise of KIP-983 on a real broker."""
    blue = group.reader()
    group.produce(100)
    group.play(lambda: blue.count == 400, blue, what="all records")
    green = group.reader()
    group.play(blue.consumer.get_to_be_revoked_partitions, blue, green, what="a revoke request")
    held = blue.consumer.get_to_be_revoked_partitions()
    assert blue.consumer.delay_revoke(held)
    kept = blue.consumer.assignment() - held
    at_request = {tp: len(blue.offsets[tp.partition]) for tp in held}
    group.produce(500)
    produced = 600

    def hold() -> bool:
        assert blue.consumer.delay_revoke(held)
        return all(len(blue.offsets[tp.partition]) == produced for tp in kept)

    group.play(hold, blue, green, what="all records of the retained partitions during the hold")
    assert {tp: len(blue.offsets[tp.partition]) for tp in held} == at_request
    assert not green.consumer.assignment()
    blue.consumer.commit_sync()
    group.play(lambda: green.count == 1000, blue, green, what="the rest for the next owner")
    for number in range(4):
        assert blue.offsets[number] + green.offsets[number] == list(range(produced))


def test_positions_are_committed_with_their_leader_epoch(group: Readers) -> None:
    blue = group.reader()
    group.produce(3)
    group.play(lambda: blue.count == 12, blue, what="all records")
    blue.consumer.commit_sync()
    partitions = [blue.tp(number) for number in range(4)]
    assert blue.consumer.committed(partitions) == dict.fromkeys(
        partitions, OffsetAndMetadata(3, leader_epoch=0)
    )


def test_iteration_reads_every_record_once_until_woken(group: Readers) -> None:
    blue = group.reader()
    group.produce(50)
    read: dict[int, list[int]] = {number: [] for number in range(4)}
    for record in blue.consumer:
        read[record.partition() or 0].append(record.offset() or 0)
        if sum(map(len, read.values())) == 200:
            blue.consumer.commit_sync()
            blue.consumer.wakeup()
    assert all(offsets == list(range(50)) for offsets in read.values())


def test_reassigned_partition_is_read_again(group: Readers) -> None:
    """The client remembers a pause over an unassign."""
    blue = group.reader(CommitOnRevoke())
    group.produce(50)
    group.play(lambda: blue.count == 200, blue, what="all records")
    green = group.reader(CommitOnRevoke())
    group.play(
        lambda: len(green.consumer.assignment()) == len(blue.consumer.assignment()) == 2,
        blue,
        green,
        what="both to have a share",
    )
    green.consumer.close()
    group.play(lambda: len(blue.consumer.assignment()) == 4, blue, what="everything to be back")
    group.produce(50)
    group.play(lambda: blue.count == 400, blue, what="the records of all partitions")
    assert all(offsets == list(range(100)) for offsets in blue.offsets.values())


class Chooser(RebalanceListener):
    """Starts one partition elsewhere, and keeps another one silent."""

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        for tp in partitions:
            if tp.partition == 1:
                consumer.seek(tp, OffsetAndMetadata(60))
                assert consumer.position(tp) == 60
            if tp.partition == 2:
                consumer.pause([tp])
            if tp.partition == 3:
                consumer.seek_to_end([tp])

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""


def test_seek_and_pause_in_the_listener_precede_the_first_record(group: Readers) -> None:
    group.produce(100)
    blue = group.reader(Chooser())
    group.play(
        lambda: len(blue.offsets[0]) == 100 and len(blue.offsets[1]) == 40,
        blue,
        what="the records that were chosen",
    )
    blue.poll()
    assert blue.offsets[1] == list(range(60, 100))
    assert not blue.offsets[2]
    assert not blue.offsets[3]
    assert blue.consumer.position(blue.tp(3)) == 100
    blue.consumer.resume([blue.tp(2)])
    group.play(
        lambda: len(blue.offsets[2]) == 100,
        blue,
        what="the records of the partition that was paused",
    )


def test_resume_reads_records_that_a_pause_dropped(group: Readers) -> None:
    group.produce(2000)
    blue = group.reader()

    def some() -> bool:
        return all(blue.offsets.values())

    def step() -> bool:
        for message in blue.consumer.poll(0.1, max_records=50):
            blue.offsets[message.partition() or 0].append(message.offset() or 0)
        return some()

    wait_until(step, timeout_s=120, what="some records of each partition", interval_s=0)
    quiet = [blue.tp(0), blue.tp(1)]
    blue.consumer.pause(quiet)
    before = [len(blue.offsets[tp.partition]) for tp in quiet]
    group.play(
        lambda: len(blue.offsets[2]) == len(blue.offsets[3]) == 2000,
        blue,
        what="the records of the others",
    )
    assert [len(blue.offsets[tp.partition]) for tp in quiet] == before
    blue.consumer.resume(quiet)
    group.play(lambda: blue.count == 8000, blue, what="all records")
    assert all(offsets == list(range(2000)) for offsets in blue.offsets.values())


def test_metrics_have_the_statistics_of_both_clients(group: Readers) -> None:
    group.produce(10)
    blue = group.reader(statistics_interval_ms="100")
    group.play(
        lambda: all(blue.consumer.metrics().values()) and blue.count == 40, blue, what="statistics"
    )
    metrics = blue.consumer.metrics()
    assert metrics["member"]["cgrp"]["state"] == "up"
    assert metrics["fetcher"]["client_id"].endswith("-fetch")


def test_deleted_offset_without_reset_raises(group: Readers) -> None:
    group.produce(10)
    blue = group.reader(auto_offset_reset="error")
    with pytest.raises(BrokerError, match="forbids choosing one"):
        group.play(lambda: False, blue, what="the error")
    blue.consumer.commit_sync({blue.tp(number): OffsetAndMetadata(4) for number in range(4)})
    for number in range(4):
        blue.consumer.seek(blue.tp(number), 4)

    def all_read() -> bool:
        with suppress(BrokerError):  # the errors of other partitions may come behind the first one
            blue.poll()
        return blue.count == 24

    wait_until(
        all_read, timeout_s=120, what="the records after the offsets that were chosen", interval_s=0
    )


def test_member_reports_no_deleted_offset(
    group: Readers, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    """It pauses its partitions at offset 0 a moment after their assignment."""
    topic = kafka_topic(40)
    everything = [TopicPartition(topic, number) for number in range(40)]
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})
    for tp in everything:
        producer.produce(topic, b"record", partition=tp.partition)
    assert producer.flush(120) == 0
    admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    ends = [ClientPartition(topic, tp.partition, 1) for tp in everything]
    for deleted in admin.delete_records(ends).values():
        deleted.result(120)
    config = {**group.config, "auto.offset.reset": "error"}
    with RebalanceAwareConsumer(config, fetch=False) as consumer:
        for _ in range(4):
            consumer.subscribe([topic])
            wait_until(
                lambda: consumer.poll(0.1) or consumer.assignment(),
                timeout_s=120,
                what="an assignment",
                interval_s=0,
            )
            consumer.commit_sync(dict.fromkeys(everything, OffsetAndMetadata(1)))
            for _ in range(5):
                consumer.poll(0.1)
            consumer.unsubscribe()

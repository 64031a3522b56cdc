"""The commits and owners of a group in Kafka's offsets topic."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from proofs.witness.offsets_topic import (
    Commit,
    MemberAssigned,
    StoredOffset,
    commits_in,
    parse,
    partition_of,
    read_group,
    read_stored_offsets,
)
from proofs.witness.owners import Owners
from tests.kafka.readers import commit_by_hand

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _key(version: int = 1) -> bytes:
    return struct.pack(">h", version) + _string("shop") + _string("orders") + struct.pack(">i", 3)


VALUES = {
    0: struct.pack(">hq", 0, 42) + _string("claim") + struct.pack(">q", 1_500),
    1: struct.pack(">hq", 1, 42) + _string("claim") + struct.pack(">qq", 1_500, 9_999),
    2: struct.pack(">hq", 2, 42) + _string("claim") + struct.pack(">q", 1_500),
    3: struct.pack(">hqi", 3, 42, 7) + _string("claim") + struct.pack(">q", 1_500),
    4: struct.pack(">hqi", 4, 42, 7) + b"\x06claim" + struct.pack(">q", 1_500) + b"\x00",
}


@pytest.mark.parametrize("version", VALUES)
def test_offset_is_read_in_every_format_of_kafka(version: int) -> None:
    assert parse(_key(), VALUES[version]) == StoredOffset("shop", "orders", 3, 42, 1.5, "claim")


def test_long_metadata_does_not_shift_later_fields() -> None:
    value = (
        struct.pack(">hqi", 4, 42, 7)
        + b"\xad\x02"
        + b"x" * 300
        + struct.pack(">q", 1_500)
        + b"\x00"
    )
    assert parse(_key(), value) == StoredOffset("shop", "orders", 3, 42, 1.5, "x" * 300)


@pytest.mark.parametrize(
    ("key", "value"),
    [(_key(7), b"anything"), (_key(), None)],
    ids=["a target assignment", "a removed offset"],
)
def test_other_records_are_ignored(key: bytes, value: bytes | None) -> None:
    assert parse(key, value) is None


MEMBER_KEY = struct.pack(">h", 8) + _string("shop") + _string("blue")
GROUP_KEY = struct.pack(">h", 2) + _string("shop")


def _topic(*partitions: int) -> bytes:
    """The partitions of one topic, in a compact array of one."""
    return (
        b"\x02"
        + b"u" * 16
        + bytes([len(partitions) + 1])
        + struct.pack(f">{len(partitions)}i", *partitions)
        + b"\x00"
    )


def test_member_owns_partitions_until_it_has_revoked_them() -> None:
    value = struct.pack(">hiib", 0, 3, 2, 1) + _topic(0, 200) + _topic(7) + b"\x00"
    assert parse(MEMBER_KEY, value, 1.5) == MemberAssigned(
        "shop", "blue", frozenset({0, 7, 200}), 1.5, asked_back=frozenset({7})
    )
    assert parse(MEMBER_KEY, None, 1.5) == MemberAssigned("shop", "blue", None, 1.5)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (_key(), struct.pack(">hq", 5, 42), "an offset of orders-3 in format 5"),
        (MEMBER_KEY, struct.pack(">h", 1), "a member's assignment in format 1"),
        (GROUP_KEY, struct.pack(">h", 4), "a group's members in format 4"),
    ],
)
def test_unknown_format_raises(key: bytes, value: bytes, what: str) -> None:
    with pytest.raises(BrokerError, match=what):
        parse(key, value)


def _stored(*offsets: int, partition: int = 0) -> list[StoredOffset]:
    return [
        StoredOffset("shop", "orders", partition, offset, float(number))
        for number, offset in enumerate(offsets)
    ]


def test_commit_is_only_an_offset_that_grew() -> None:
    commits, went_back = commits_in(_stored(0, 0, 10, 10, 10, 25))
    assert commits == [
        Commit(OffsetRange("orders", 0, 0, 10), 2.0),
        Commit(OffsetRange("orders", 0, 10, 25), 5.0),
    ]
    assert went_back == []


def test_commit_without_a_first_position_counts_from_the_beginning() -> None:
    assert commits_in(_stored(10))[0] == [Commit(OffsetRange("orders", 0, 0, 10), 0.0)]


def test_offset_that_went_back_is_reported() -> None:
    commits, went_back = commits_in(_stored(10, 5, 10))
    assert went_back == ["the offset of orders-0 went back from 10 to 5"]
    assert [commit.range.start for commit in commits] == [0, 5]


def test_partitions_do_not_affect_each_other() -> None:
    mixed = [
        one for pair in zip(_stored(0, 10), _stored(4, 4, partition=1), strict=True) for one in pair
    ]
    assert [commit.range for commit in commits_in(mixed)[0]] == [
        OffsetRange("orders", 1, 0, 4),
        OffsetRange("orders", 0, 0, 10),
    ]


@pytest.mark.parametrize(
    ("group", "partition"),
    [("", 0), ("abc", 4), ("polygenelubricants", 0), ("orders-stream", 6), ("größe", 7)],
)
def test_partition_of_a_group_is_that_of_its_hash_in_java(group: str, partition: int) -> None:
    assert partition_of(group, 50) == partition


@pytest.mark.broker
def test_offsets_of_a_real_group_are_read_in_order(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic, group = kafka_topic(partitions=2, prefix="stored"), unique_name("group")
    config = {**kafka_broker.client_config(), "group.id": group, "enable.auto.commit": False}
    for partition, offset, metadata in ((0, 0, "claim"), (1, 7, ""), (0, 12, "x" * 4000)):
        commit_by_hand(config, TopicPartition(topic, partition, offset, metadata))
    stored = read_stored_offsets(kafka_broker.bootstrap_servers, group)
    assert [(one.topic, one.partition, one.offset) for one in stored] == [
        (topic, 0, 0),
        (topic, 1, 7),
        (topic, 0, 12),
    ]
    assert stored[0].at <= stored[1].at <= stored[2].at
    assert [one.metadata for one in stored] == ["claim", "", "x" * 4000]


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_owners_are_read_from_the_records_of_a_real_broker(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, protocol: str
) -> None:
    topic, group = kafka_topic(partitions=3, prefix="owned"), unique_name("group")
    servers = kafka_broker.bootstrap_servers
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "group.protocol": protocol,
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])

    def has_all() -> bool:
        consumer.poll(0.1)
        return len(consumer.assignment()) == 3

    wait_until(has_all, timeout_s=120, what="the partitions to be assigned", interval_s=0.01)
    member = consumer.memberid()
    consumer.commit(offsets=[TopicPartition(topic, 1, 5)], asynchronous=False)
    consumer.close()
    owners, seen = Owners(), []
    for record in read_group(servers, group):
        owners.take(record)
        seen.append((type(record), [owners.of(partition) for partition in range(4)]))
    (stored_at,) = [number for number, (kind, _) in enumerate(seen) if kind is StoredOffset]
    assert seen[stored_at][1] == [member, member, member, None]
    assert seen[-1][1] == [None] * 4, "they have no owner after it left"

"""Kafka's topic `__consumer_offsets` shows what a group stored and who had its partitions.

One partition of the topic has the records of a group; the group's coordinator wrote them in the
order in which things happened. Owns the format of these records. Knows nothing of this package's
members: it is an independent witness of what they did.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OFFSETS_TOPIC = "__consumer_offsets"
_OFFSET_KEYS, _GROUP_KEY, _MEMBER_KEY = (0, 1), 2, 8
_LEADER_EPOCH_SINCE, _COMPACT_SINCE, _NEWEST_VALUE = 3, 4, 4
_GROUP_VALUE, _MEMBER_VALUE = 3, 0
_UUID_BYTES = 16
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """One record of an offset: somebody wrote it, whether it moved the offset or not.

    Attributes:
        group: The consumer group.
        topic: The topic.
        partition: The partition.
        offset: The next offset to be read.
        at: When Kafka stored it, in seconds since 1970.
        metadata: What was stored with it.
    """

    group: str
    topic: str
    partition: int
    offset: int
    at: float
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class MemberAssigned:
    """What a member of a group in the consumer protocol has from now on (KIP-848).

    What it has to give up is still its own.

    Attributes:
        group: The consumer group.
        member_id: The member.
        partitions: The numbers of its partitions, whatever their topic is; None when it is no
            member any more.
        at: When Kafka stored it, in seconds since 1970.
        asked_back: Those of them that it has to give up.
    """

    group: str
    member_id: str
    partitions: frozenset[int] | None
    at: float
    asked_back: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerationAssigned:
    """What the members of a group in the classic protocol are assigned from now on.

    Attributes:
        group: The consumer group.
        members: The numbers of each member's partitions, whatever their topic is.
        at: When Kafka stored it, in seconds since 1970.
    """

    group: str
    members: Mapping[str, frozenset[int]]
    at: float


GroupRecord: TypeAlias = StoredOffset | MemberAssigned | GenerationAssigned


@dataclass(frozen=True, slots=True)
class Commit:
    """An offset that moved.

    Attributes:
        range: What was committed by it.
        at: When Kafka stored it, in seconds since 1970.
    """

    range: OffsetRange
    at: float


class _Reader:
    """Takes fields off the front of a record."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, kind: str) -> int:
        """A big-endian integer, by its `struct` letter."""
        (value,) = struct.unpack_from(f">{kind}", self._data, self._at)
        self._at += struct.calcsize(kind)
        return int(value)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return self._at >= len(self._data)

    def string(self) -> str:
        """A string with its length in two bytes before it; empty for none."""
        return self.bytes(self.number("h")).decode()

    def compact_string(self) -> str:
        """A string with its length and one in a varint before it."""
        return self.bytes(self.varint() - 1).decode()

    def varint(self) -> int:
        """A number without a sign, seven bits in each byte."""
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - the high bit says that another byte follows
                return value
            shift += 7

    def bytes(self, length: int) -> bytes:
        """So many bytes as they are; none for a length below 0."""
        data = self._data[self._at : self._at + max(0, length)]
        self._at += len(data)
        return data


def parse(key: bytes, value: bytes | None, at: float = 0.0) -> GroupRecord | None:
    """Read a record of `__consumer_offsets`.

    The result is None for a record that removes an offset, or that says nothing of offsets and
    owners.

    Args:
        key: The record's key.
        value: The record's value.
        at: When Kafka stored it, in seconds since 1970.

    Raises:
        BrokerError: It is in a format that came after Kafka 4.1.
    """
    fields = _Reader(key)
    kind = fields.number("h")
    if kind in _OFFSET_KEYS and value is not None:
        return _offset(fields, _Reader(value))
    if kind == _MEMBER_KEY:
        group, member_id = fields.string(), fields.string()
        if value is None:
            return MemberAssigned(group, member_id, None, at)
        kept, asked_back = _member_partitions(_Reader(value))
        return MemberAssigned(group, member_id, kept | asked_back, at, asked_back)
    if kind == _GROUP_KEY:
        return GenerationAssigned(
            fields.string(), {} if value is None else dict(_generation(_Reader(value))), at
        )
    return None


def _offset(key: _Reader, fields: _Reader) -> StoredOffset:
    group, topic, partition = key.string(), key.string(), key.number("i")
    version = fields.number("h")
    _refuse_newer(version, _NEWEST_VALUE, f"an offset of {topic}-{partition}")
    offset = fields.number("q")
    if version >= _LEADER_EPOCH_SINCE:
        fields.number("i")
    metadata = fields.compact_string() if version >= _COMPACT_SINCE else fields.string()
    # The Python client stores the zero byte that ends a string in C with it.
    return StoredOffset(
        group, topic, partition, offset, fields.number("q") / 1000, metadata.rstrip("\0")
    )


def _member_partitions(fields: _Reader) -> tuple[frozenset[int], frozenset[int]]:
    """What a member keeps, and what it was asked to give up and has not given up yet."""
    _refuse_newer(fields.number("h"), _MEMBER_VALUE, "a member's assignment")
    fields.bytes(struct.calcsize(">iib"))  # its epoch, the one before it, and its state
    return _numbers(fields), _numbers(fields)


def _numbers(fields: _Reader) -> frozenset[int]:
    found: set[int] = set()
    for _topic in range(fields.varint() - 1):
        fields.bytes(_UUID_BYTES)
        found |= {fields.number("i") for _ in range(fields.varint() - 1)}
        fields.varint()  # tagged fields: there are none
    return frozenset(found)


def _generation(fields: _Reader) -> Iterator[tuple[str, frozenset[int]]]:
    _refuse_newer(fields.number("h"), _GROUP_VALUE, "a group's members")
    fields.string()
    fields.number("i")
    fields.string()
    fields.string()
    fields.number("q")
    for _ in range(fields.number("i")):
        member_id, _instance, _client, _host = (fields.string() for _ in range(4))
        fields.number("q")  # two time-outs
        fields.bytes(fields.number("i"))  # what it subscribed to
        yield member_id, _assigned(_Reader(fields.bytes(fields.number("i"))))


def _assigned(fields: _Reader) -> frozenset[int]:
    """An assignment of the clients' own protocol, the same in each version of it."""
    if fields.is_empty:
        return frozenset()
    fields.number("h")
    found: set[int] = set()
    for _ in range(fields.number("i")):
        fields.string()
        found |= {fields.number("i") for _ in range(fields.number("i"))}
    return frozenset(found)


def _refuse_newer(version: int, newest: int, what: str) -> None:
    if version > newest:
        msg = f"{OFFSETS_TOPIC} has {what} in format {version}, which is newer than Kafka 4.1's"
        raise BrokerError(msg)


def commits_in(stored: Iterable[StoredOffset]) -> tuple[list[Commit], list[str]]:
    """The commits among stored offsets: those that moved an offset forward.

    Claims and first positions move none.

    Args:
        stored: Of one group, in the order of the topic. Each partition begins at offset 0.

    Returns:
        The commits, and a sentence for each offset that went back.
    """
    commits, went_back = [], []
    last: dict[tuple[str, int], int] = {}
    for one in stored:
        before = last.get((one.topic, one.partition), 0)
        if one.offset > before:
            commits.append(
                Commit(OffsetRange(one.topic, one.partition, before, one.offset), one.at)
            )
        elif one.offset < before:
            went_back.append(
                f"the offset of {one.topic}-{one.partition} went back from {before} to {one.offset}"
            )
        last[one.topic, one.partition] = one.offset
    return commits, went_back


def read_stored_offsets(bootstrap_servers: str, group: str) -> list[StoredOffset]:
    """Every offset that a group ever stored, oldest first.

    Raises:
        BrokerError: The topic could not be read to its end.
    """
    return [
        record
        for record in read_group(bootstrap_servers, group)
        if isinstance(record, StoredOffset)
    ]


def read_group(bootstrap_servers: str, group: str) -> list[GroupRecord]:
    """Everything that Kafka ever stored of a group's offsets and owners, oldest first.

    Raises:
        BrokerError: The topic could not be read to its end.
    """
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": f"reader-{uuid.uuid4()}",
        "enable.auto.commit": False,
    }
    consumer = Consumer({**settings, "enable.partition.eof": True})
    try:
        records = [
            parse(key, message.value(), message.timestamp()[1] / 1000)
            for message in _all_records(consumer)
            if (key := message.key())
        ]
    except KafkaException as error:
        msg = f"{OFFSETS_TOPIC} could not be read: {error.args[0].str()}"
        raise BrokerError(msg) from error
    finally:
        consumer.close()
    return [record for record in records if record is not None and record.group == group]


def _all_records(consumer: Consumer) -> Iterator[Message]:
    numbers = consumer.list_topics(OFFSETS_TOPIC, _LIMIT_S).topics[OFFSETS_TOPIC].partitions
    for number in numbers:
        partition = TopicPartition(OFFSETS_TOPIC, number, 0)
        # As far as it goes now: a group that goes on to commit would always be a little ahead.
        first, end = consumer.get_watermark_offsets(partition, _LIMIT_S)
        consumer.assign([partition])
        while first < end:
            message = consumer.poll(_LIMIT_S)
            if message is None:
                msg = (
                    f"{OFFSETS_TOPIC}-{number} could not be read to its end: "
                    f"nothing came for {_LIMIT_S:g} s"
                )
                raise BrokerError(msg)
            error = message.error()
            if error is None:
                yield message
                first = int(message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                break
            else:
                raise KafkaException(error)

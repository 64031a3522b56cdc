"""The format of Kafka's topic `__consumer_offsets`: stored offsets and assignments of groups.

All records of a group are in one partition, in the order of events. The module imports no code of
the members that it verifies.
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
_AT_MOST, _ROUND_S = 10_000, 0.1


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """One stored offset, whether it moved or not.

    Attributes:
        group: The consumer group.
        topic: The topic.
        partition: The partition.
        offset: The next offset to read.
        at: Kafka's timestamp, in seconds since 1970.
        metadata: The stored metadata.
    """

    group: str
    topic: str
    partition: int
    offset: int
    at: float
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class MemberAssigned:
    """The assignment of a member with the consumer protocol (KIP-848), with partitions to revoke.

    Attributes:
        group: The consumer group.
        member_id: The member.
        partitions: Numbers of its partitions in all topics; None if it has left.
        at: Kafka's timestamp, in seconds since 1970.
        asked_back: The partitions that it has to revoke.
    """

    group: str
    member_id: str
    partitions: frozenset[int] | None
    at: float
    asked_back: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerationAssigned:
    """The assignment of all members with the classic protocol.

    Attributes:
        group: The consumer group.
        members: Numbers of each member's partitions in all topics.
        at: Kafka's timestamp, in seconds since 1970.
    """

    group: str
    members: Mapping[str, frozenset[int]]
    at: float


GroupRecord: TypeAlias = StoredOffset | MemberAssigned | GenerationAssigned


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed range, and Kafka's timestamp in seconds since 1970."""

    range: OffsetRange
    at: float


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f">{kind}", self._data, self._at)
        self._at += struct.calcsize(kind)
        return int(value)

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def string(self) -> str:
        """Read a string with a two-byte length; None if it is null."""
        return self.bytes(self.number("h")).decode()

    def compact_string(self) -> str:
        """Read a string with a varint of its length plus one."""
        return self.bytes(self.varint() - 1).decode()

    def varint(self) -> int:
        """Read an unsigned varint."""
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - the high bit says that another byte follows
                return value
            shift += 7

    def bytes(self, length: int) -> bytes:
        """Read `size` bytes; none for a negative size."""
        data = self._data[self._at : self._at + max(0, length)]
        self._at += len(data)
        return data


def parse(key: bytes, value: bytes | None, at: float = 0.0) -> GroupRecord | None:
    """Parse a record of `__consumer_offsets`.

    Returns None for tombstones and for other kinds of records.

    Raises:
        BrokerError: The format is newer than Kafka 4.1.
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
    """Return a member's partitions, and those of them that it still has to revoke."""
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
        fields.number("q")  # two timeouts
        fields.bytes(fields.number("i"))  # its subscription
        yield member_id, _assigned(_Reader(fields.bytes(fields.number("i"))))


def _assigned(fields: _Reader) -> frozenset[int]:
    """Parse an assignment in the clients' protocol, which is the same in all versions."""
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
    """Return the commits among stored offsets, and a sentence for each offset that decreased.

    Claims and first positions move no offset. `stored` is in the order of the topic; partitions
    begin at offset 0.
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
    """Return all stored offsets of a group, oldest first.

    Raises:
        BrokerError: The topic could not be read to its end.
    """
    return [
        record
        for record in read_group(bootstrap_servers, group)
        if isinstance(record, StoredOffset)
    ]


def read_group(bootstrap_servers: str, group: str) -> list[GroupRecord]:
    """Return all stored offsets and assignments of a group, oldest first.

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
            for message in _records_of(consumer, group)
            if (key := message.key())
        ]
    except KafkaException as error:
        msg = f"{OFFSETS_TOPIC} could not be read: {error.args[0].str()}"
        raise BrokerError(msg) from error
    finally:
        consumer.close()
    return [record for record in records if record is not None and record.group == group]


def partition_of(group: str, partitions: int) -> int:
    """Return the partition of the topic that has the records of a group, as Kafka's broker does."""
    code = 0
    for (unit,) in struct.iter_unpack(">H", group.encode("utf-16-be")):
        code = (31 * code + unit) & 0xFFFFFFFF
    signed = code - (1 << 32) if code >> 31 else code
    return 0 if signed == -(1 << 31) else abs(signed) % partitions


def _records_of(consumer: Consumer, group: str) -> Iterator[Message]:
    numbers = consumer.list_topics(OFFSETS_TOPIC, _LIMIT_S).topics[OFFSETS_TOPIC].partitions
    number = partition_of(group, len(numbers))
    partition = TopicPartition(OFFSETS_TOPIC, number, 0)
    # As far as it goes now: a group that goes on to commit would always be a little ahead.
    first, end = consumer.get_watermark_offsets(partition, _LIMIT_S)
    consumer.assign([partition])
    while first < end:
        messages = consumer.consume(_AT_MOST, _ROUND_S)
        if not messages:
            messages = consumer.consume(1, _LIMIT_S)
        if not messages:
            msg = (
                f"{OFFSETS_TOPIC}-{number} could not be read to its end: "
                f"nothing came for {_LIMIT_S:g} s"
            )
            raise BrokerError(msg)
        for message in messages:
            error = message.error()
            if error is None:
                yield message
                first = int(message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                return
            else:
                raise KafkaException(error)

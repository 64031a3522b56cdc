"""What a consumer group really committed, read from Kafka's own topic `__consumer_offsets`.

Owns the format of that topic's records. Knows nothing of this package's members: it is an independent witness of what they did.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from dagster_rebalance.core.errors import BrokerError
from dagster_rebalance.core.partition import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OFFSETS_TOPIC = "__consumer_offsets"
_OFFSET_KEY_VERSIONS = (0, 1)
_LEADER_EPOCH_SINCE, _COMPACT_SINCE, _NEWEST_VALUE = 3, 4, 4
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
    """

    group: str
    topic: str
    partition: int
    offset: int
    at: float


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

    def string(self) -> str:
        """A string with its length in two bytes before it."""
        return self._text(self.number("h"))

    def compact_string(self) -> str:
        """A string with its length and one in a varint before it."""
        length = shift = 0
        while True:
            byte = self.number("B")
            length |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - the high bit says that another byte follows
                return self._text(length - 1)
            shift += 7

    def _text(self, length: int) -> str:
        text = self._data[self._at : self._at + length].decode()
        self._at += length
        return text


def parse(key: bytes, value: bytes | None) -> StoredOffset | None:
    """Read a record of `__consumer_offsets`; None for one that is not an offset, or that removes one.

    Raises:
        BrokerError: The offset is in a format that came after Kafka 4.1.
    """
    fields = _Reader(key)
    if fields.number("h") not in _OFFSET_KEY_VERSIONS or value is None:
        return None
    group, topic, partition = fields.string(), fields.string(), fields.number("i")
    fields = _Reader(value)
    version = fields.number("h")
    if version > _NEWEST_VALUE:
        msg = f"{OFFSETS_TOPIC} has an offset of {topic}-{partition} in format {version}, which is newer than Kafka 4.1's"
        raise BrokerError(msg)
    offset = fields.number("q")
    if version >= _LEADER_EPOCH_SINCE:
        fields.number("i")
    _metadata = fields.compact_string() if version >= _COMPACT_SINCE else fields.string()
    return StoredOffset(group, topic, partition, offset, fields.number("q") / 1000)


def commits_in(stored: Iterable[StoredOffset], *, begin: int = 0) -> tuple[list[Commit], list[str]]:
    """The commits among stored offsets: those that moved an offset forward. Claims and first positions move none.

    Args:
        stored: Of one group, in the order of the topic.
        begin: The offset that each partition began with.

    Returns:
        The commits, and a sentence for each offset that went back.
    """
    commits, went_back = [], []
    last: dict[tuple[str, int], int] = {}
    for one in stored:
        before = last.get((one.topic, one.partition), begin)
        if one.offset > before:
            commits.append(Commit(OffsetRange(one.topic, one.partition, before, one.offset), one.at))
        elif one.offset < before:
            went_back.append(f"the offset of {one.topic}-{one.partition} went back from {before} to {one.offset}")
        last[one.topic, one.partition] = one.offset
    return commits, went_back


def read_stored_offsets(bootstrap_servers: str, group: str) -> list[StoredOffset]:
    """Every offset that a group ever stored, oldest first.

    Raises:
        BrokerError: The topic could not be read to its end.
    """
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": f"reader-{uuid.uuid4()}", "enable.auto.commit": False}
    consumer = Consumer({**settings, "enable.partition.eof": True})
    try:
        records = [parse(message.key() or b"", message.value()) for message in _all_records(consumer) if message.key()]
    except KafkaException as error:
        msg = f"{OFFSETS_TOPIC} could not be read: {error.args[0].str()}"
        raise BrokerError(msg) from error
    finally:
        consumer.close()
    return [record for record in records if record is not None and record.group == group]


def _all_records(consumer: Consumer) -> Iterator[Message]:
    numbers = consumer.list_topics(OFFSETS_TOPIC, _LIMIT_S).topics[OFFSETS_TOPIC].partitions
    for number in numbers:
        consumer.assign([TopicPartition(OFFSETS_TOPIC, number, 0)])
        while True:
            message = consumer.poll(_LIMIT_S)
            if message is None:
                msg = f"{OFFSETS_TOPIC}-{number} could not be read to its end: nothing came for {_LIMIT_S:g} s"
                raise BrokerError(msg)
            error = message.error()
            if error is None:
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                break
            else:
                raise KafkaException(error)

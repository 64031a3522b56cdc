"""Partitions and offsets: the words that everything else is written in.

Owns the half-open offset range, and what may be the name of a topic. An offset to commit is always
the *next* offset to be read; only `next_offset` adds one to an offset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_OFFSET = 2**63 - 1
"""The largest that Kafka can store."""

_PARTITION = re.compile(r"(?P<topic>.+)-(?P<number>[0-9]{1,10})", re.DOTALL)
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")


def is_topic_name(text: str) -> bool:
    """Whether Kafka allows it as the name of a topic.

    Such a name needs no escaping in a path, in SQL, or in a key of Dagster.
    """
    return _TOPIC.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def named(partitions: Iterable[TopicPartition], most: int = 20) -> str:
    """Partitions as a person would write them: `orders-0..3, orders-7`.

    Args:
        partitions: In any order.
        most: How many rows are named; three or more partitions that follow each other are one row.
    """
    rows: list[list[TopicPartition]] = []
    for partition in sorted(partitions):
        if rows and partition == TopicPartition(
            rows[-1][0].topic, rows[-1][0].partition + len(rows[-1])
        ):
            rows[-1].append(partition)
        else:
            rows.append([partition])
    left = sum(map(len, rows[most:]))
    return (
        ", ".join(map(_row, rows[:most])) + (f" and {left} more" if left else "") or "no partitions"
    )


def _row(row: list[TopicPartition]) -> str:
    return ", ".join(map(str, row)) if len(row) <= 2 else f"{row[0]}..{row[-1].partition}"  # noqa: PLR2004 - two are shorter in full


def partitions_named(names: object) -> Iterator[TopicPartition]:
    """The partitions in a list of their names, such as `orders-3`; what is none is left out."""
    for name in names if isinstance(names, list) else ():
        found = _PARTITION.fullmatch(str(name))
        if found is not None:
            yield TopicPartition(found["topic"], int(found["number"]))


def next_offset(offset: int) -> int:
    """The offset to commit once the record at `offset` and all before it are finished."""
    return offset + 1


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    """What a group has committed for a partition.

    Attributes:
        offset: The next offset to be read.
        metadata: Free text stored beside it, at most 4,095 characters by default.
        leader_epoch: The leader epoch of the last record before `offset`, where it is known
            (KIP-320).
    """

    offset: int
    metadata: str = ""
    leader_epoch: int | None = None


def is_same_commit(one: OffsetAndMetadata | None, other: OffsetAndMetadata | None) -> bool:
    """Whether both are one commit, or none.

    The leader epoch does not count: not every broker returns it.
    """
    return (one and (one.offset, one.metadata)) == (other and (other.offset, other.metadata))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets that Kafka has of a partition.

    Attributes:
        start: The first one.
        until: The one behind the last. In a topic with an open transaction it is where the
            transaction begins.
        leader_epoch: The leader epoch in which they were told; None where it is not known.
        high_watermark: The one behind the last record, also of open transactions; None where it was
            not asked for.
    """

    start: int
    until: int
    leader_epoch: int | None = None
    high_watermark: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the leader has told them; else they are `ANY_BOUNDS`."""
        return self.until != MAX_OFFSET


ANY_BOUNDS = Bounds(0, MAX_OFFSET)
"""Those of a partition whose leader does not tell them: no offset is out of range."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in the log of a partition.

    Attributes:
        offset: The next offset.
        leader_epoch: The leader epoch in which the log was known to reach it, where it is known.
    """

    offset: int
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """Which log an offset belongs to: two logs can have different records at the same offset.

    Attributes:
        topic_id: Kafka gives each topic a new one, also when a topic of the same name is made
            again; empty where it is not known.
        leader_epoch: Grows with each election of a leader. In this epoch the log was known to reach
            the offset, and every offset that is named beside it; None where it is not known.
    """

    topic_id: str = ""
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """An offset range is the offsets `start <= offset < until` of one partition.

    It is the unit of claim, adoption, commit and output.

    Raises:
        ValueError: `start` is negative or not below `until`, `until` is larger than Kafka's
            offsets, or Kafka has no topic of such a name.
    """

    topic: str
    partition: int
    start: int
    until: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.until:
            msg = (
                f"a range of {self.topic}-{self.partition} must have 0 <= start < until, not "
                f"[{self.start}, {self.until})"
            )
            raise ValueError(msg)
        if self.until > MAX_OFFSET:
            msg = (
                f"a range of {self.topic}-{self.partition} cannot end above {MAX_OFFSET}, the "
                "largest offset of Kafka"
            )
            raise ValueError(msg)
        if not is_topic_name(self.topic):
            msg = (
                f"{self.topic[:249]!r} cannot be the name of a topic: Kafka takes up to 249 "
                "letters, digits, dots, dashes and underscores"
            )
            raise ValueError(msg)

    def __len__(self) -> int:
        return self.until - self.start

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} [{self.start}, {self.until})"

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition that the offsets belong to."""
        return TopicPartition(self.topic, self.partition)

    @property
    def fields(self) -> dict[str, str | int]:
        """Its parts by name."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "start": self.start,
            "until": self.until,
        }

    @property
    def key(self) -> str:
        """A name for the range, to key an output by: `orders-3-120-240`.

        It is unique in a Kafka cluster while the topic lives: a topic that is made again has the
        same ranges with other records.
        """
        return f"{self.topic}-{self.partition}-{self.start}-{self.until}"

    def overlaps(self, other: OffsetRange) -> bool:
        """Whether both ranges have an offset in common."""
        return (
            self.topic_partition == other.topic_partition
            and self.start < other.until
            and other.start < self.until
        )

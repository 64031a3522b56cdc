"""Topics, partitions and half-open offset ranges.

An offset to commit is always the *next* offset to read; only `next_offset` adds one to an offset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_OFFSET = 2**63 - 1
"""The largest offset that Kafka can store."""

_RANGES_SHOWN = 4
_NAMES_KEPT = 100
_LONGEST_SPAN = 1_000_000
_PARTITION = re.compile(r"(?P<topic>.+)-(?P<number>[0-9]{1,10})", re.DOTALL)
_SPAN = re.compile(r"(?P<topic>.+)-(?P<first>[0-9]{1,10})\.\.(?P<last>[0-9]{1,10})", re.DOTALL)
_OFFSETS = re.compile(
    r"(?P<topic>.+)[:-](?P<number>[0-9]{1,10})@(?P<start>[0-9]{1,19})(-(?P<until>[0-9]{1,19}))?",
    re.DOTALL,
)
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")


def is_topic_name(text: str) -> bool:
    """Return whether Kafka allows a topic name.

    Such a name needs no escaping in paths, SQL and Dagster keys.
    """
    return _TOPIC.fullmatch(text) is not None


class TopicPartition(NamedTuple):
    """One partition of one topic.

    A named tuple, because the key of most mappings must be hashed and compared without Python code.
    """

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def names_of(partitions: Iterable[TopicPartition], most: int = 20) -> str:
    """Format up to `most` spans of partitions for messages: `orders-0..3, orders-7`."""
    rows = _spans(partitions)
    left = sum(last - first + 1 for _, first, last in rows[most:])
    texts = (_row(*row) for row in rows[:most])
    return ", ".join(texts) + (f" and {left} more" if left else "") or "no partitions"


def _spans(partitions: Iterable[TopicPartition]) -> list[tuple[str, int, int]]:
    """Return topics with the first and last of consecutive partitions."""
    rows: list[tuple[str, int, int]] = []
    for topic, number in sorted(partitions):
        if rows and rows[-1][0] == topic and rows[-1][2] == number - 1:
            rows[-1] = (topic, rows[-1][1], number)
        else:
            rows.append((topic, number, number))
    return rows


def listed(partitions: Iterable[TopicPartition]) -> list[str]:
    """Return the names of partitions; if there are many, with spans such as `orders-0..9999`."""
    named = list(partitions)
    if len(named) <= _NAMES_KEPT:
        return [str(partition) for partition in named]
    return [row for span in _spans(named) for row in _row(*span).split(", ")]


def parse_listed(names: object) -> Iterator[TopicPartition]:
    """Yield the partitions in the result of `listed`, ignoring all other values."""
    for name in names if isinstance(names, list) else ():
        span = _SPAN.fullmatch(str(name))
        if span is None:
            yield from parse_partitions([name])
        elif int(span["last"]) - int(span["first"]) < _LONGEST_SPAN:
            for number in range(int(span["first"]), int(span["last"]) + 1):
                yield TopicPartition(span["topic"], number)


def _row(topic: str, first: int, last: int) -> str:
    """Format a span; two partitions are shorter in full."""
    if first == last:
        return f"{topic}-{first}"
    return f"{topic}-{first}{', ' + topic + '-' if last == first + 1 else '..'}{last}"


def parse_partitions(names: object) -> Iterator[TopicPartition]:
    """Yield the partitions in a list of names such as `orders-3`, ignoring all other values."""
    for name in names if isinstance(names, list) else ():
        match = _PARTITION.fullmatch(str(name))
        if match is not None:
            yield TopicPartition(match["topic"], int(match["number"]))


def next_offset(offset: int) -> int:
    """Return the offset to commit once the record at `offset` and all before it are processed."""
    return offset + 1


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    """Committed offset of a partition.

    Attributes:
        offset: The next offset to read.
        metadata: Free text stored with the offset, at most 4,095 characters by default.
        leader_epoch: The leader epoch of the last record before `offset`, if known (KIP-320).
    """

    offset: int
    metadata: str = ""
    leader_epoch: int | None = None


def is_same_commit(one: OffsetAndMetadata | None, other: OffsetAndMetadata | None) -> bool:
    """Return whether both are the same commit, or both None.

    Leader epochs are not compared, because not every broker returns them.
    """
    return (one and (one.offset, one.metadata)) == (other and (other.offset, other.metadata))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the log of a partition.

    Attributes:
        start: The first offset.
        until: The end offset; with an open transaction, the last stable offset.
        leader_epoch: The leader epoch in the response, or None.
        high_watermark: The end offset including open transactions; None if it was not requested.
    """

    start: int
    until: int
    leader_epoch: int | None = None
    high_watermark: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the leader has answered. If not, these bounds are `ANY_BOUNDS`."""
        return self.until != MAX_OFFSET


ANY_BOUNDS = Bounds(0, MAX_OFFSET)
"""The bounds of a partition whose leader does not answer: no offset is out of range."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Offset in the log of a partition, and a leader epoch in which the log reached this offset."""

    offset: int
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """Identity of a log: two logs may have different records at the same offset.

    Attributes:
        topic_id: Unique for each topic, also when a topic of the same name is recreated; empty if
            unknown.
        leader_epoch: An epoch in which the log reached the stored offsets. It increases with each
            leader election.
    """

    topic_id: str = ""
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets `start <= offset < until` of one partition.

    It is the unit of claim, adoption, commit and output.

    Raises:
        ValueError: `start` is negative or not below `until`, `until` exceeds Kafka's largest
            offset, or `topic` is not a valid topic name.
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
        """The partition of the range."""
        return TopicPartition(self.topic, self.partition)

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields of the range by name."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "start": self.start,
            "until": self.until,
        }

    @property
    def key(self) -> str:
        """Key of the range for output: `orders-3-120-240`.

        It is unique in a Kafka cluster while the topic exists. A recreated topic has the same keys
        for other records.
        """
        return f"{self.topic}-{self.partition}-{self.start}-{self.until}"

    def overlaps(self, other: OffsetRange) -> bool:
        """Return whether both ranges have an offset in common."""
        return (
            self.topic_partition == other.topic_partition
            and self.start < other.until
            and other.start < self.until
        )


def parse_offsets(text: str) -> OffsetRange:
    """Parse one offset, `orders:3@1207`, or a half-open range, `orders:3@1207-1300`.

    Raises:
        ValueError: The text is neither, or the range is invalid.
    """
    match = _OFFSETS.fullmatch(text)
    if match is None:
        msg = f"{text!r} is no offset such as orders:3@1207, and no range such as orders:3@120-240"
        raise ValueError(msg)
    start = int(match["start"])
    until = next_offset(start) if match["until"] is None else int(match["until"])
    return OffsetRange(match["topic"], int(match["number"]), start, until)


def in_short(ranges: Sequence[OffsetRange]) -> str:
    """Format ranges for messages, tags and logs, at most the first four of them."""
    shown = [*map(str, ranges[:_RANGES_SHOWN])]
    if len(ranges) > _RANGES_SHOWN:
        shown.append(f"and {len(ranges) - _RANGES_SHOWN} more")
    return ", ".join(shown)

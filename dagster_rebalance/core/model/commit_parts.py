"""Packed form of the commits that share one record.

A record of a busy partition joins hundreds of commits, and a member has a growing record for each
partition. In this form each commit takes a few bytes: varints of the differences to the previous
commit, in one column per field, which compresses well. A run id is stored once.

Beyond a limit, neighbours of one run are merged into one part, such as "batches 17 to 22". The
newest parts are never merged (`_NEVER_MERGED`).
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.offsets import MAX_OFFSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NEVER_MERGED = 8
"""The ends of these parts stay exact, so that `RecordCommit.without` finds each end that another
record can have.

The owner after this member reads one committed offset and records up to it. While the owner reads,
a commit of this member may be on its way, so the record of this member may go beyond that offset,
but only by commits that Kafka accepts from a member that has to give the partition up: the work
that was claimed at that time. Only the parts of a streaming run have neighbours of one run, and it
has one claim on a partition. Kafka refuses all later commits of the member, and the member drops
what it cannot commit."""
_FEWEST_PARTS = 2 * _NEVER_MERGED
_MOST_PARTS = 2_500
"""With the default `record_every_s` of streaming runs: four batches a second."""
_PARTS_OF_MEMBER = 8 * _MOST_PARTS
_TENTHS = 10
_COLUMNS = 6
_MOST_BYTES = 2**20
"""Limit of the unpacked size, because users can write into Dagster's storage."""


def most_parts(partitions: int) -> int:
    """Return the limit of the parts of a record, for a member with this many partitions."""
    return max(_FEWEST_PARTS, min(_MOST_PARTS, _PARTS_OF_MEMBER // max(1, partitions)))


class CommitPart(NamedTuple):
    """A commit, or several consecutive commits of one run.

    Attributes:
        until: The end offset of the last commit.
        number: The number of the last commit's batch in its streaming run; 0 if unknown.
        first_number: The number of the first commit's batch.
        at: The time of the last commit, in seconds; None if unknown.
        commits: The number of commits.
    """

    until: int
    run_id: str
    number: int = 0
    first_number: int = 0
    at: float | None = None
    commits: int = 1

    def merged(self, following: CommitPart) -> CommitPart:
        """Return this part merged with the following part of the same run."""
        return following._replace(
            first_number=self.first_number, commits=self.commits + following.commits
        )


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Consecutive parts as bytes.

    Attributes:
        first_at: The time that the times of the parts are relative to; None if they are unknown.
        runs: The runs of the parts.
        columns: The fields of all parts: end, run, first batch number, time, number of commits and
            last batch number.
        size: The number of parts.
        tail: End, batch number and time of the last part, which the next one is relative to.
    """

    first_at: float | None = None
    runs: tuple[str, ...] = ()
    columns: tuple[bytes, ...] = (b"",) * _COLUMNS
    size: int = 0
    tail: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, parts: Iterable[CommitPart]) -> PackedParts:
        """Pack parts."""
        result = cls()
        for part in parts:
            result = result.append(part)
        return result

    def append(self, part: CommitPart) -> PackedParts:
        """Return the parts with one more."""
        until, number, tenths = self.tail
        first_at = self.first_at if self.size else part.at
        now = tenths
        if first_at is not None and part.at is not None:
            now = round((part.at - first_at) * _TENTHS)
        runs = self.runs if part.run_id in self.runs else (*self.runs, part.run_id)
        fields = (
            part.until - until,
            runs.index(part.run_id),
            _unsigned(part.first_number - number),
            _unsigned(now - tenths),
            part.commits - 1,
            _unsigned(part.number - part.first_number),
        )
        columns = zip(self.columns, fields, strict=True)
        return PackedParts(
            first_at,
            runs,
            tuple(column + _varint(value) for column, value in columns),
            self.size + 1,
            (part.until, part.number, now),
        )

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[CommitPart]:
        ends, runs, firsts, times, others, lasts = (_read(c, self.size)[0] for c in self.columns)
        number = 0
        for end, run, first, tenths, more, last in zip(
            accumulate(ends),
            runs,
            firsts,
            accumulate(map(_signed, times)),
            others,
            lasts,
            strict=True,
        ):
            first_number = number + _signed(first)
            number = first_number + _signed(last)
            at = None if self.first_at is None else self.first_at + tenths / _TENTHS
            yield CommitPart(end, self.runs[run], number, first_number, at, more + 1)

    @property
    def text(self) -> str:
        """The columns as compressed text, for `unpacked`."""
        plain = _varint(self.size) + b"".join(self.columns)
        return base64.b64encode(zlib.compress(plain, 9)).decode()


@dataclass(frozen=True, slots=True)
class CommitParts:
    """Consecutive commits, oldest first, to which more are appended.

    Attributes:
        commits: How many commits the parts have.
        old: The oldest parts.
        growing: The part after them, which grows to `stride` commits.
        recent: The newest commits.
        stride: How many commits are merged.
        merges_from: The size of `old` from which merging is tried again. Commits of different runs
            are not merged, and trying for each commit would be in vain.
    """

    commits: int = 0
    old: PackedParts = PackedParts()
    growing: CommitPart | None = None
    recent: tuple[CommitPart, ...] = ()
    stride: int = 1
    merges_from: int = 0

    @classmethod
    def of(cls, parts: Iterable[CommitPart]) -> CommitParts:
        """Return parts as they are."""
        found = tuple(parts)
        old, recent = found[:-_NEVER_MERGED], found[-_NEVER_MERGED:]
        return cls(sum(part.commits for part in found), PackedParts.of(old), recent=recent)

    def append(self, part: CommitPart, most: int) -> CommitParts:
        """Return the parts with one more commit. Old ones are merged if they are about `most`.

        Most calls change a few fields, so the cost does not grow with the number of parts.
        """
        commits = self.commits + part.commits
        recent = (*self.recent, part)
        if len(recent) <= _NEVER_MERGED:
            return replace(self, commits=commits, recent=recent)
        leaving, growing, recent = recent[0], self.growing, recent[1:]
        if growing is None:
            return replace(self, commits=commits, growing=leaving, recent=recent)
        if growing.run_id == leaving.run_id and growing.commits < self.stride:
            grown = growing.merged(leaving)
            return replace(self, commits=commits, growing=grown, recent=recent)
        full = replace(
            self, commits=commits, old=self.old.append(growing), growing=leaving, recent=recent
        )
        room = max(1, most - _NEVER_MERGED - 1)
        return full if full.old.size < max(room, full.merges_from) else full.merged(room)

    def merged(self, room: int) -> CommitParts:
        """Merge old neighbours of one run into parts of about the same number of commits."""
        parts = list(self.old)
        stride = max(2 * self.stride, -(-2 * sum(part.commits for part in parts) // room))
        kept: list[CommitPart] = []
        for part in parts:
            if kept and kept[-1].run_id == part.run_id and kept[-1].commits < stride:
                kept[-1] = kept[-1].merged(part)
            else:
                kept.append(part)
        merges_from = 2 * len(kept) if 4 * len(kept) > 3 * room else 0
        return replace(self, old=PackedParts.of(kept), stride=stride, merges_from=merges_from)

    @property
    def until(self) -> int:
        """The end of the newest commit; 0 without commits."""
        return self.recent[-1].until if self.recent else 0

    def after(self, until: int) -> CommitParts:
        """Return the parts that end after an offset."""
        return CommitParts.of(part for part in self if part.until > until)

    def packed(self, seconds: float | None = None) -> PackedParts:
        """Return all parts as bytes, with times moved by `seconds`, or without times if None."""
        return PackedParts.of(
            part._replace(at=None if part.at is None or seconds is None else part.at + seconds)
            for part in self
        )

    def __len__(self) -> int:
        return self.old.size + (self.growing is not None) + len(self.recent)

    def __iter__(self) -> Iterator[CommitPart]:
        yield from self.old
        if self.growing is not None:
            yield self.growing
        yield from self.recent


NO_COMMITS = CommitParts()


def unpacked(text: str, runs: Sequence[str], first_at: float | None) -> PackedParts:
    """Return the parts of a `PackedParts.text`.

    Raises:
        ValueError: The text is damaged.
    """
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        (size,), at = _read(plain, 1)
        columns = []
        for _ in range(_COLUMNS):
            begin = at
            _, at = _read(plain, size, begin)
            columns.append(plain[begin:at])
        found = PackedParts(first_at, tuple(runs), tuple(columns), size)
        ends = [part.until for part in found]
    except (binascii.Error, zlib.error, IndexError) as error:
        msg = f"the commits of a record are damaged: {error}"
        raise ValueError(msg) from error
    if ends != sorted(set(ends)) or any(end > MAX_OFFSET for end in ends[-1:]):
        msg = "the commits of a record in Dagster are damaged: their end offsets do not increase"
        raise ValueError(msg)
    return found


def _unsigned(value: int) -> int:
    """Map small numbers of either sign to small numbers."""
    return value * 2 if value >= 0 else -value * 2 - 1


def _signed(value: int) -> int:
    return -(value + 1) // 2 if value % 2 else value // 2


def _varint(value: int) -> bytes:
    """Return a number in 7 bits per byte, lowest bits first; the last byte is below 128."""
    if value < 0x80:  # noqa: PLR2004 - one byte
        return bytes((value,))
    result = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - as above
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _read(data: bytes, count: int, at: int = 0) -> tuple[list[int], int]:
    """Return `count` numbers, and the position after them.

    Raises:
        IndexError: The data ends too early.
    """
    values = []
    for _ in range(count):
        value = shift = 0
        while data[at] & 0x80:
            value |= (data[at] & 0x7F) << shift
            shift += 7
            at += 1
        values.append(value | data[at] << shift)
        at += 1
    return values, at

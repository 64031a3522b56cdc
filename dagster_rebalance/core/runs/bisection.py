"""Bisection: the search for the record that makes an asset function raise.

With `on_failure="bisect"`, a range whose attempts are exhausted is halved until one record is left.
The range is the root of a binary tree, and each attempt has exactly one node of that tree. The
claims of the partition have the state of the search, in offset order:

- `NEXT`: the next attempt, or the attempt at work. Once a streaming run has claimed it for an
  attempt, it is `TRIED`.
- `SUSPECT`: the rest of the smallest interval that is known to fail. Once the part before it is
  committed, its first half is attempted.
- `REST`: the rest of the range. Each of its largest nodes is attempted as a whole.

The batch id of such a claim ends with the kind of the part and the bounds of the bisected range. So
the state survives a crash, and each run can compute the attempts that contain its own (`larger`).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.model.offsets import OffsetRange

_ID = re.compile(
    r"(?P<batch>.+)\.(?P<kind>[ntsr])(?P<start>[0-9a-f]{1,16})-(?P<until>[0-9a-f]{1,16})"
)

Bounds = tuple[int, int]
"""The first offset of a node, and its end."""


class PartKind(enum.Enum):
    """What is known about a part of a bisected range."""

    NEXT = "n"
    TRIED = "t"
    SUSPECT = "s"
    REST = "r"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bisected range, as its batch id describes it.

    Attributes:
        batch_id: The batch id without the description of the part.
        start: The first offset of the bisected range.
        until: The end of the bisected range.
    """

    batch_id: str
    kind: PartKind
    start: int
    until: int

    def __str__(self) -> str:
        return f"{self.batch_id}.{self.kind.value}{self.start:x}-{self.until:x}"

    @classmethod
    def parse(cls, batch_id: str) -> Part | None:
        """Parse a batch id; None if it has no part of a bisected range."""
        return _parsed(batch_id)

    def bisected(self, range_: OffsetRange) -> OffsetRange:
        """Return the bisected range, given a part of it."""
        return replace(range_, start=self.start, until=self.until)

    def of(self, kind: PartKind, batch_id: str = "") -> str:
        """Return the batch id of another part of the same range."""
        return str(Part(batch_id or self.batch_id, kind, self.start, self.until))

    def node_at(self, offset: int) -> Bounds:
        """Return the largest node that begins at an offset of the range."""
        return next(node for node in self._path(offset) if node[0] == offset)

    def larger(self, range_: OffsetRange) -> tuple[OffsetRange, ...]:
        """Return the nodes that contain an attempted range, without itself, largest first."""
        own = (range_.start, range_.until)
        return tuple(
            replace(range_, start=start, until=until)
            for start, until in self._path(range_.start)
            if until >= range_.until and (start, until) != own
        )

    def _path(self, offset: int) -> Iterator[Bounds]:
        """Yield the nodes that contain an offset, largest first."""
        start, until = self.start, self.until
        while True:
            yield start, until
            if until - start <= 1:
                return
            middle = halves(start, until)
            start, until = (start, middle) if offset < middle else (middle, until)


@lru_cache(maxsize=10_000)
def _parsed(batch_id: str) -> Part | None:
    match = _ID.fullmatch(batch_id)
    if match is None:
        return None
    start, until = int(match["start"], 16), int(match["until"], 16)
    return Part(match["batch"], PartKind(match["kind"]), start, until)


def halves(start: int, until: int) -> int:
    """Return the offset that separates the halves of a node of at least two offsets."""
    return (start + until) // 2


def is_waiting(batch_id: str) -> bool:
    """Return whether a claim belongs to a part that is not attempted as it is."""
    part = Part.parse(batch_id)
    return part is not None and part.kind in {PartKind.SUSPECT, PartKind.REST}


def tried_as(batch_id: str, other_id: str) -> str:
    """Return the id with which a streaming run claims a batch for an attempt.

    `batch_id` is its own next id. The part, if any, is that of the batch `other_id`.
    """
    part = Part.parse(other_id)
    return batch_id if part is None else part.of(PartKind.TRIED, batch_id)


def whole_batch(batch_id: str) -> str:
    """Return the batch whose runs attempted the bisected range as a whole; empty for none.

    An operator may have re-executed one of these runs before the range was halved.
    """
    part = Part.parse(batch_id)
    return part.batch_id if part is not None and part.kind is PartKind.NEXT else ""

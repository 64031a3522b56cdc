"""Ranges of the batches that share one materialization of a user's asset.

Beyond a limit per partition, neighbouring ranges are merged. A merged range is shown as several
ranges, and is never taken for one: a rerun repeats ranges with the same bounds.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from itertools import islice
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.commit_parts import NO_COMMITS, CommitPart, most_parts
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dagster_rebalance.core.model.commit_parts import CommitParts

_LINES_SHOWN = 20
_SHARE = 5
"""Only a record of commits that lacks its parts needs the ranges, so fewer are kept exactly."""
_MOST_PACKED = 5_000
_MOST_BYTES = 2**24
"""Limit of the unpacked size: people can write into Dagster's storage. 10,000 partitions with the
longest topic name take 3 MB."""


class JoinedRanges:
    """Consecutive ranges of each partition, with a new span after each gap."""

    def __init__(self) -> None:
        self._spans: dict[TopicPartition, list[tuple[int, CommitParts]]] = {}

    def add(self, ranges: Iterable[OffsetRange], number: int) -> None:
        """Add the ranges of the batch with this number in its run."""
        for range_ in ranges:
            spans = self._spans.setdefault(range_.topic_partition, [])
            if not spans or spans[-1][1].until != range_.start:
                spans.append((range_.start, NO_COMMITS))
            start, parts = spans[-1]
            part = CommitPart(range_.until, "", number, number)
            spans[-1] = start, parts.append(part, most_parts(len(self._spans)) // _SHARE)

    def touches(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether any range is in one of the partitions."""
        return not self._spans.keys().isdisjoint(partitions)

    @property
    def offsets(self) -> int:
        """The number of offsets."""
        return sum(parts.until - start for _, start, parts in self._all())

    def __str__(self) -> str:
        lines = [_line(*span) for span in islice(self._all(), _LINES_SHOWN)]
        more = sum(map(len, self._spans.values())) - len(lines)
        return "\n".join((*lines, *([f"- and {more} more"] if more else [])))

    def packed(self) -> str:
        """Return the ranges as compressed text; of many, only the spans."""
        is_short = sum(len(parts) for _, _, parts in self._all()) <= _MOST_PACKED
        lines = (
            f"{partition.topic} {partition.partition} {start} "
            + " ".join(
                _steps(start, parts) if is_short else [_step(parts.until - start, parts.commits)]
            )
            for partition, start, parts in self._all()
        )
        return base64.b64encode(zlib.compress("\n".join(lines).encode(), 9)).decode()

    def _all(self) -> Iterator[tuple[TopicPartition, int, CommitParts]]:
        for partition, spans in sorted(self._spans.items()):
            for start, parts in spans:
                yield partition, start, parts


def unpacked_ranges(packed: str) -> list[tuple[OffsetRange, int]]:
    """Return the ranges of `JoinedRanges.packed`, each with the number of ranges merged in it.

    The result is empty for a text that is damaged or too long.
    """
    found = []
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
        if not inflate.eof:  # the last line may be incomplete
            return []
        for line in plain.decode().splitlines():
            topic, partition, at, *steps = line.split()
            start = int(at)
            for step in steps:
                length, _, count = step.partition("*")
                until = start + int(length)
                found.append((OffsetRange(topic, int(partition), start, until), int(count or 1)))
                start = until
    except (ValueError, binascii.Error, zlib.error):  # changed by a person
        return []
    return found


def _steps(start: int, parts: CommitParts) -> Iterator[str]:
    for part in parts:
        yield _step(part.until - start, part.commits)
        start = part.until


def _step(length: int, count: int) -> str:
    return f"{length}*{count}" if count > 1 else f"{length}"


def _line(partition: TopicPartition, start: int, parts: CommitParts) -> str:
    """Return a line of Markdown. Only a single range has the form that is read as one."""
    until = parts.until
    if parts.commits == 1:
        return f"- `{OffsetRange(partition.topic, partition.partition, start, until)}`"
    return f"- `{partition}` [{start}, {until}) in {parts.commits:,} ranges"

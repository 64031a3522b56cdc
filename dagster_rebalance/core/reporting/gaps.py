"""Gaps in the recorded commits of a group: offsets that no commit covers, between others that do.

A gap means that the committed offset was moved forward, or that records were deleted before they
were processed. An offset moved with `dagster-rebalance reset` leaves a recorded skip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded commit, or several joined commits, with the run of the last commit."""

    range: OffsetRange
    run_id: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that no recorded commit covers, and the records on both sides."""

    range: OffsetRange
    before: Recorded
    after: Recorded

    def __str__(self) -> str:
        return (
            f"no commit covers {self.range}: run {self.before.run_id[:8]} ended before it, and run "
            f"{self.after.run_id[:8]} began after it"
        )


def gaps(records: Iterable[Recorded], skips: Collection[OffsetRange] = ()) -> tuple[Gap, ...]:
    """Return the gaps between recorded commits, by partition.

    Pass the records by time, oldest first. Their offsets may overlap and be out of order, because a
    commit may be recorded late, or twice. If a record is below all others, the offset was moved
    back or the topic was recreated, and the earlier records are ignored.
    """
    by_partition: dict[TopicPartition, list[Recorded]] = {}
    for record in records:
        earlier = by_partition.setdefault(record.range.topic_partition, [])
        if earlier and record.range.until < min(known.range.start for known in earlier):
            earlier.clear()
        earlier.append(record)
    found = (gap for partition in sorted(by_partition) for gap in _between(by_partition[partition]))
    skipped = _joined(skips)
    return tuple(gap for gap in found if not any(_covers(skip, gap.range) for skip in skipped))


def _joined(skips: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Join adjacent skips: an operator may skip in several steps."""
    joined: list[OffsetRange] = []
    for skip in sorted(skips):
        last = joined[-1] if joined else skip
        if last.topic_partition == skip.topic_partition and skip.start <= last.until:
            until = max(last.until, skip.until)
            joined[-1:] = [OffsetRange(skip.topic, skip.partition, last.start, until)]
        else:
            joined.append(skip)
    return joined


def _covers(skip: OffsetRange, missing: OffsetRange) -> bool:
    is_same = skip.topic_partition == missing.topic_partition
    return is_same and skip.start <= missing.start and missing.until <= skip.until


def _between(records: list[Recorded]) -> Iterable[Gap]:
    last, *others = sorted(records, key=lambda record: record.range)
    for record in others:
        range_ = record.range
        if range_.start > last.range.until:
            missing = OffsetRange(range_.topic, range_.partition, last.range.until, range_.start)
            yield Gap(missing, last, record)
        if range_.until >= last.range.until:
            last = record

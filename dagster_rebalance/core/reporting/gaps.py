"""Gaps in the recorded commits of a group: offsets that no commit covers, between others that do.

Commits of a partition follow each other, so a gap means that somebody has moved the committed
offset forward, or that records were deleted before they were processed. Where a person has moved it
with `dagster-rebalance reset`, the gap is on purpose.
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
    """A recorded commit, or several that were joined.

    Attributes:
        range: What was committed.
        run_id: The run of the last commit in it.
    """

    range: OffsetRange
    run_id: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that no recorded commit covers.

    Attributes:
        range: The offsets.
        before: What was recorded right before them.
        after: What was recorded right behind them.
    """

    range: OffsetRange
    before: Recorded
    after: Recorded

    def __str__(self) -> str:
        return (
            f"no commit covers {self.range}: run {self.before.run_id[:8]} ended before it, and run "
            f"{self.after.run_id[:8]} began behind it"
        )


def gaps(records: Iterable[Recorded], skips: Collection[OffsetRange] = ()) -> tuple[Gap, ...]:
    """The gaps between recorded commits, by partition.

    Records of one partition may overlap, and come in another order than their offsets: a commit is
    recorded late, or once more. One that lies below all others means that the offset was moved back
    or that the topic was made anew: what was recorded before it does not count any more.

    Args:
        records: What was recorded, oldest first.
        skips: What people have skipped, on record.
    """
    of: dict[TopicPartition, list[Recorded]] = {}
    for record in records:
        those = of.setdefault(record.range.topic_partition, [])
        if those and record.range.until < min(known.range.start for known in those):
            those.clear()
        those.append(record)
    found = (gap for partition in sorted(of) for gap in _between(of[partition]))
    skipped = _joined(skips)
    return tuple(gap for gap in found if not any(_covers(skip, gap.range) for skip in skipped))


def _joined(skips: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Skips that follow each other as one: a person may go on where the last one ended."""
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
    first, *others = sorted(records, key=lambda record: record.range)
    last = first
    for record in others:
        if record.range.start > last.range.until:
            missing = OffsetRange(
                record.range.topic,
                record.range.partition,
                last.range.until,
                record.range.start,
            )
            yield Gap(missing, last, record)
        if record.range.until >= last.range.until:
            last = record

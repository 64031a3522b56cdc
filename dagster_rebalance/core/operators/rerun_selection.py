"""Selection of the ranges of a rerun, which processes committed ranges again.

A rerun repeats whole recorded ranges with the same bounds, so output keyed by range is overwritten
and not duplicated. Ranges that the group has not committed are left to the group. If Kafka deleted
any of the records, the rerun is refused: it would leave a hole in the output.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import selector_of
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.runs.rerun_batch import rerun_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import Bounds, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch

_MAX_NAMED = 5
_SHOWN_RANGE = re.compile(
    r"`(?P<topic>[A-Za-z0-9._-]{1,249})-(?P<number>[0-9]{1,9}) "
    r"\[(?P<start>[0-9]{1,18}), (?P<until>[0-9]{1,18})\)`"
)


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets [start, until), or commits with times in [since, before), in seconds since 1970.

    If the end is None, the span has everything committed so far.

    Raises:
        ConfigurationError: The span has neither a first offset nor a first time, or both, or its
            end is before its begin.
    """

    start: int | None = None
    until: int | None = None
    since: float | None = None
    before: float | None = None

    def __post_init__(self) -> None:
        by_offset = self.start is not None or self.until is not None
        by_time = self.since is not None or self.before is not None
        if by_offset == by_time or (self.start is None and self.since is None):
            msg = (
                "name the part to process again, either by offsets (--from-offset, "
                "--until-offset) or "
                "by the time of the commits (--since, --until); the end is optional"
            )
            raise ConfigurationError(msg)
        pairs = ((self.start, self.until), (self.since, self.before))
        if any(first is not None and end is not None and first >= end for first, end in pairs):
            msg = "the end of the selected part must be after its beginning"
            raise ConfigurationError(msg)

    def takes(self, one: ProcessedRange) -> bool:
        """Whether any part of a range is in the span."""
        if self.since is not None:
            return self.since <= one.at and (self.before is None or one.at < self.before)
        return (self.start or 0) < one.range.until and (
            self.until is None or one.range.start < self.until
        )

    def cuts(self, range_: OffsetRange) -> bool:
        """Whether only a part of a range is in the span."""
        return self.since is None and (
            range_.start < (self.start or 0)
            or (self.until is not None and self.until < range_.until)
        )


@dataclass(frozen=True, slots=True)
class ProcessedRange:
    """A range whose commit is recorded.

    Attributes:
        at: When its last commit was made, in seconds since 1970.
        is_whole: Whether the commit is known to cover one range. A commit that the next owner
            recorded, and merged commits of one record, cover several ranges with unknown bounds.
    """

    range: OffsetRange
    at: float
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class PartitionHistory:
    """The recorded ranges of a partition, newest first, its committed offset and its log bounds."""

    processed: Sequence[ProcessedRange]
    committed: int | None
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Offsets of the span that are not processed again, and why."""

    range: OffsetRange
    why: str

    def __str__(self) -> str:
        return f"{self.range}: {self.why}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The ranges of a rerun.

    Attributes:
        widened: The ranges of which only a part is in the span.
        left_out: The offsets of the span that are not processed again.
    """

    ranges: tuple[OffsetRange, ...]
    widened: tuple[OffsetRange, ...]
    left_out: tuple[LeftOut, ...]


class DisjointRanges:
    """Ranges that do not overlap, sorted for fast searches in many thousands of ranges."""

    def __init__(self, ranges: Iterable[OffsetRange] = ()) -> None:
        self._of: dict[TopicPartition, list[OffsetRange]] = {}
        for range_ in ranges:
            self.add(range_)

    def add(self, range_: OffsetRange) -> None:
        """Add a range that overlaps no other."""
        insort(self._of.setdefault(range_.topic_partition, []), range_)

    def overlapping(self, other: OffsetRange) -> list[OffsetRange]:
        """Return the ranges that overlap another one, in order."""
        known = self._of.get(other.topic_partition, [])
        first = bisect_right(known, other.start, key=lambda one: one.start) - 1
        behind = bisect_left(known, other.until, key=lambda one: one.start)
        return [one for one in known[max(0, first) : behind] if one.overlaps(other)]


def shown_ranges(text: str) -> list[OffsetRange]:
    """Parse the ranges in the text that a run shows as metadata of its assets."""
    return [
        OffsetRange(found["topic"], int(found["number"]), int(found["start"]), int(found["until"]))
        for found in _SHOWN_RANGE.finditer(text)
        if int(found["start"]) < int(found["until"])
    ]


def joined_ranges(commit: OffsetRange, ranges: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
    """Return the ranges of a joined commit, from the ranges that its run has shown.

    The result is empty if the ranges do not add up to the commit.
    """
    parts = sorted(
        one
        for one in set(ranges)
        if one.topic_partition == commit.topic_partition
        and commit.start <= one.start
        and one.until <= commit.until
    )
    begins = [commit.start, *(part.until for part in parts)]
    ends = [*(part.start for part in parts), commit.until]
    return tuple(parts) if begins == ends else ()


def select(
    span: Span,
    history: Mapping[TopicPartition, PartitionHistory],
    runs: Iterable[RunSnapshot],
    planned: Iterable[RerunBatch],
) -> Selection:
    """Select the ranges of a rerun. `planned` are the unfinished batches of other reruns.

    Raises:
        ConfigurationError: Kafka has deleted some of the records, another rerun processes some of
            the ranges, or no range is left.
    """
    live = [run for run in runs if run.is_live]
    ranges: list[OffsetRange] = []
    left_out: list[LeftOut] = []
    for partition, past in sorted(history.items()):
        chosen, left = _chosen(partition, span, past, live)
        ranges += chosen
        left_out += left
    _refuse_planned(ranges, live, planned)
    _refuse_deleted(ranges, history)
    if not ranges:
        shown = "; ".join(map(str, left_out[:_MAX_NAMED])) or "no commit of that time is recorded"
        msg = f"there is nothing to process again: {shown}"
        raise ConfigurationError(msg)
    return Selection(tuple(ranges), tuple(filter(span.cuts, ranges)), tuple(left_out))


def _chosen(
    partition: TopicPartition, span: Span, past: PartitionHistory, live: Sequence[RunSnapshot]
) -> tuple[list[OffsetRange], list[LeftOut]]:
    newest, replaced = _newest(past.processed)
    of_group = [
        run
        for run in live
        if not rerun_of(run.batch_id) and any(r.topic_partition == partition for r in run.ranges)
    ]
    # A range may have been processed twice with the same bounds: each of its times counts.
    taken = {one.range for one in past.processed if span.takes(one)}
    wanted = sorted((one for one in newest if one.range in taken), key=lambda one: one.range)
    chosen, left = [], []
    for one in wanted:
        why = why_left_out(one, past.committed, of_group)
        if why:
            left.append(LeftOut(one.range, why))
        else:
            chosen.append(one.range)
    left += [_replaced(one.range, by) for one, by in replaced if span.takes(one)]
    known = [one.range for one in (*wanted, *(one for one, _ in replaced))]
    left += _unrecorded(partition, span, past.committed or 0, known)
    return chosen, sorted(left, key=lambda one: one.range)


def _newest(
    processed: Iterable[ProcessedRange],
) -> tuple[list[ProcessedRange], list[tuple[ProcessedRange, list[OffsetRange]]]]:
    """Return the last processed range of each offset, and replaced ranges with the newer ones."""
    newest: list[ProcessedRange] = []
    replaced: list[tuple[ProcessedRange, list[OffsetRange]]] = []
    known = DisjointRanges()
    for one in processed:
        newer = known.overlapping(one.range)
        if not newer:
            newest.append(one)
            known.add(one.range)
        elif newer != [one.range]:
            replaced.append((one, newer))
    return newest, replaced


def _replaced(range_: OffsetRange, newer: Sequence[OffsetRange]) -> LeftOut:
    named = ", ".join(map(str, newer[:_MAX_NAMED]))
    more = f" and {len(newer) - _MAX_NAMED} more" if len(newer) > _MAX_NAMED else ""
    return LeftOut(
        range_, f"some of its offsets were processed again later with other bounds: {named}{more}"
    )


def why_left_out(one: ProcessedRange, committed: int | None, live: Iterable[RunSnapshot]) -> str:
    """Return why a range cannot be processed again now, given the live runs of the group."""
    if committed is None:
        return "the group has no committed offset, so it will process these offsets itself"
    if one.range.until > committed:
        return f"the group is at offset {committed}, so it will process these offsets itself"
    if not one.is_whole:
        return (
            "it covers several ranges with unknown bounds: it was recorded by the next owner, or "
            "joins more commits than one record can list"
        )
    working = [run.run_id for run in live if any(one.range.overlaps(r) for r in run.ranges)]
    return f"{format_runs(working)} of the group may be working on it" if working else ""


def _unrecorded(
    partition: TopicPartition, span: Span, committed: int, known: Iterable[OffsetRange]
) -> Iterator[LeftOut]:
    """The offsets of the span that no recorded commit covers."""
    if span.start is None:
        return
    at, end = span.start, committed if span.until is None else span.until
    pieces = []
    for range_ in sorted(known):
        pieces.append((at, min(range_.start, end)))
        at = max(at, range_.until)
    pieces.append((at, end))
    not_yet = f"not committed yet: the group is at offset {committed}, and processes them itself"
    for start, until in pieces:
        for first, behind, why in (
            (start, min(until, committed), "no recorded commit covers these offsets"),
            (max(start, committed), until, not_yet),
        ):
            if first < behind:
                yield LeftOut(OffsetRange(partition.topic, partition.partition, first, behind), why)


def _refuse_planned(
    ranges: Iterable[OffsetRange], live: Iterable[RunSnapshot], planned: Iterable[RerunBatch]
) -> None:
    known = DisjointRanges(ranges)
    for batch in planned:
        rerun_id = batch.rerun.rerun_id
        how = f"cancel it with dagster-rebalance rerun --cancel {rerun_id}"
        _refuse_shared(known, batch.ranges, f"rerun {rerun_id}", how)
    for run in live:
        if rerun_of(run.batch_id):
            rival = f"{format_runs([run.run_id])} of rerun {rerun_of(run.batch_id)}"
            _refuse_shared(known, run.ranges, rival, "cancel that run")


def _refuse_shared(
    known: DisjointRanges, others: Iterable[OffsetRange], rival: str, how: str
) -> None:
    shared = next((one for other in others for one in known.overlapping(other)), None)
    if shared is not None:
        msg = f"{rival} already includes {shared}: wait for its end, or {how}"
        raise ConfigurationError(msg)


def _refuse_deleted(
    ranges: Sequence[OffsetRange], history: Mapping[TopicPartition, PartitionHistory]
) -> None:
    for range_ in ranges:
        bounds = history[range_.topic_partition].bounds
        if range_.until > bounds.until:
            msg = (
                f"Kafka does not have all records of {range_}: its log ends at {bounds.until}. It "
                "was truncated, or the topic was recreated. Nothing was started"
            )
            raise ConfigurationError(msg)
        if range_.start < bounds.start:
            present = [
                r.start
                for r in ranges
                if r.topic_partition == range_.topic_partition and r.start >= bounds.start
            ]
            first = (
                f"The first complete range begins at {present[0]}: rerun "
                f"{selector_of(range_.topic_partition)} --from-offset {present[0]}"
                if present
                else "Kafka has no complete range of the partition"
            )
            msg = (
                f"Kafka has deleted records of {range_}: its log begins at {bounds.start}. A rerun "
                f"would replace its output with fewer records, so nothing was started. {first}"
            )
            raise ConfigurationError(msg)

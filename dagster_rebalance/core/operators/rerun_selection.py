"""Reruns: past ranges are processed again on purpose, and nothing else of the group moves.

The recorded commits of a group say which ranges were processed. A rerun repeats whole recorded
ranges, with the same bounds: what is keyed by range is then replaced, and not doubled.

Owns which ranges may be repeated. Those that the group has not committed are its own work. Those
that Kafka has deleted would leave a hole in the output, so the whole rerun is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import selector_of
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.run import named_runs
from dagster_rebalance.core.runs.rerun_batch import rerun_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import Bounds, TopicPartition
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch

_SHOWN = 5
_SHOWN_RANGE = re.compile(
    r"`(?P<topic>[A-Za-z0-9._-]{1,249})-(?P<number>[0-9]{1,9}) "
    r"\[(?P<start>[0-9]{1,18}), (?P<until>[0-9]{1,18})\)`"
)


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of the past a person means: by offsets, or by the time of the commits.

    Attributes:
        start: The first offset.
        until: The offset behind the last one; None for all that is committed.
        since: The time of the first commit, in seconds since 1970.
        before: Commits from this time on are not meant; None for all until now.

    Raises:
        ConfigurationError: It has neither a first offset nor a first time, or both, or ends before
            it begins.
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
                "say what to process again, either by offsets (--from-offset, --until-offset) or "
                "by the time of the commits (--since, --until); the end may be left out"
            )
            raise ConfigurationError(msg)
        pairs = ((self.start, self.until), (self.since, self.before))
        if any(first is not None and end is not None and first >= end for first, end in pairs):
            msg = "the end of what is to be processed again must lie behind its beginning"
            raise ConfigurationError(msg)

    def takes(self, one: Processed) -> bool:
        """Whether a range is meant, at least a part of it."""
        if self.since is not None:
            return self.since <= one.at and (self.before is None or one.at < self.before)
        return (self.start or 0) < one.range.until and (
            self.until is None or one.range.start < self.until
        )

    def cuts(self, range_: OffsetRange) -> bool:
        """Whether only a part of a range is meant."""
        return self.since is None and (
            range_.start < (self.start or 0)
            or (self.until is not None and self.until < range_.until)
        )


@dataclass(frozen=True, slots=True)
class Processed:
    """A range that was committed, as it is recorded.

    Attributes:
        range: The range.
        at: When its commit was recorded, in seconds since 1970.
        is_whole: Whether it is known to be one range. A commit that was recorded by the next owner
            may stand for several whose bounds are not known any more.
    """

    range: OffsetRange
    at: float
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of the past of one partition.

    Attributes:
        processed: What was committed, newest first.
        committed: The committed offset; None when there is none.
        bounds: The offsets that Kafka has.
    """

    processed: Sequence[Processed]
    committed: int | None
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Offsets that a person has asked for, and that are not processed again."""

    range: OffsetRange
    why: str

    def __str__(self) -> str:
        return f"{self.range}: {self.why}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What a rerun repeats.

    Attributes:
        ranges: The ranges, in order.
        widened: Those of them of which only a part was asked for.
        left_out: What was asked for and is not repeated.
    """

    ranges: tuple[OffsetRange, ...]
    widened: tuple[OffsetRange, ...]
    left_out: tuple[LeftOut, ...]


class Apart:
    """Ranges that do not overlap, found by their offsets: there may be many thousands."""

    def __init__(self, ranges: Iterable[OffsetRange] = ()) -> None:
        self._of: dict[TopicPartition, list[OffsetRange]] = {}
        for range_ in ranges:
            self.add(range_)

    def add(self, range_: OffsetRange) -> None:
        """Add a range that overlaps none."""
        insort(self._of.setdefault(range_.topic_partition, []), range_)

    def shared(self, other: OffsetRange) -> OffsetRange | None:
        """The first range that has an offset in common with another one; None when none has."""
        return next(iter(self.all_shared(other)), None)

    def all_shared(self, other: OffsetRange) -> list[OffsetRange]:
        """The ranges that have an offset in common with another one, in order."""
        known = self._of.get(other.topic_partition, [])
        first = bisect_right(known, other.start, key=lambda one: one.start) - 1
        behind = bisect_left(known, other.until, key=lambda one: one.start)
        return [one for one in known[max(0, first) : behind] if one.overlaps(other)]


def parts_of(commit: OffsetRange, shown: Iterable[str]) -> tuple[OffsetRange, ...]:
    """The ranges that a commit stands for, where several were joined and nobody recorded how.

    Args:
        commit: What was committed.
        shown: Texts in which the run that has processed it names ranges.

    Returns:
        The ranges, in order; none when those that are named do not make up the commit.
    """
    named = {
        OffsetRange(found["topic"], int(found["number"]), int(found["start"]), int(found["until"]))
        for text in shown
        for found in _SHOWN_RANGE.finditer(text)
        if int(found["start"]) < int(found["until"])
    }
    parts = sorted(
        one
        for one in named
        if one.topic_partition == commit.topic_partition
        and commit.start <= one.start
        and one.until <= commit.until
    )
    begins = [commit.start, *(part.until for part in parts)]
    ends = [*(part.start for part in parts), commit.until]
    return tuple(parts) if begins == ends else ()


def select(
    span: Span,
    past: Mapping[TopicPartition, Past],
    runs: Iterable[RunSeen],
    planned: Iterable[RerunBatch],
) -> Selection:
    """What a rerun of a part of the past repeats.

    Args:
        span: Which part.
        past: What is known of the partitions.
        runs: The live runs of the group.
        planned: The batches of reruns that are not finished.

    Raises:
        ConfigurationError: Kafka has deleted some of the records, another rerun is to process some
            of the ranges, or nothing is left to repeat.
    """
    live = [run for run in runs if run.is_live]
    ranges: list[OffsetRange] = []
    left_out: list[LeftOut] = []
    for partition, one in sorted(past.items()):
        chosen, left = _chosen(partition, span, one, live)
        ranges += chosen
        left_out += left
    _refuse_company(ranges, live, planned)
    _refuse_holes(ranges, past)
    if not ranges:
        shown = "; ".join(map(str, left_out[:_SHOWN])) or "no commit of that time is recorded"
        msg = f"there is nothing to process again: {shown}"
        raise ConfigurationError(msg)
    return Selection(tuple(ranges), tuple(filter(span.cuts, ranges)), tuple(left_out))


def _chosen(
    partition: TopicPartition, span: Span, past: Past, live: Sequence[RunSeen]
) -> tuple[list[OffsetRange], list[LeftOut]]:
    newest, replaced = _newest(past.processed)
    at_work = [
        run
        for run in live
        if not rerun_of(run.batch_id) and any(r.topic_partition == partition for r in run.ranges)
    ]
    # A range may have been processed twice with the same bounds: each of its times counts.
    taken = {one.range for one in past.processed if span.takes(one)}
    meant = sorted((one for one in newest if one.range in taken), key=lambda one: one.range)
    chosen, left = [], []
    for one in meant:
        why = _why_left_out(one, past.committed, at_work)
        if why:
            left.append(LeftOut(one.range, why))
        else:
            chosen.append(one.range)
    left += [_replaced(one.range, by) for one, by in replaced if span.takes(one)]
    known = [one.range for one in (*meant, *(one for one, _ in replaced))]
    left += _unknown(partition, span, past.committed or 0, known)
    return chosen, sorted(left, key=lambda one: one.range)


def _newest(
    processed: Iterable[Processed],
) -> tuple[list[Processed], list[tuple[Processed, list[OffsetRange]]]]:
    """What was processed last at each offset; and what else was, each with its newer ranges."""
    newest: list[Processed] = []
    replaced: list[tuple[Processed, list[OffsetRange]]] = []
    known = Apart()
    for one in processed:
        newer = known.all_shared(one.range)
        if not newer:
            newest.append(one)
            known.add(one.range)
        elif newer != [one.range]:
            replaced.append((one, newer))
    return newest, replaced


def _replaced(range_: OffsetRange, newer: Sequence[OffsetRange]) -> LeftOut:
    named = ", ".join(map(str, newer[:_SHOWN]))
    more = f" and {len(newer) - _SHOWN} more" if len(newer) > _SHOWN else ""
    return LeftOut(
        range_, f"offsets of it were processed again later, with other bounds: {named}{more}"
    )


def _why_left_out(one: Processed, committed: int | None, live: Iterable[RunSeen]) -> str:
    if committed is None:
        return "the group has no committed offset, so it will process these offsets itself"
    if one.range.until > committed:
        return f"the group is at offset {committed}, so it will process these offsets itself"
    if not one.is_whole:
        return (
            "its commit was recorded late, when its member was gone, and may stand for several "
            "ranges whose bounds are not known"
        )
    at_work = [run.run_id for run in live if any(one.range.overlaps(r) for r in run.ranges)]
    return f"{named_runs(at_work)} of the group may be at work on it" if at_work else ""


def _unknown(
    partition: TopicPartition, span: Span, committed: int, known: Iterable[OffsetRange]
) -> Iterator[LeftOut]:
    """What was asked for by offsets, and is in no recorded commit."""
    if span.start is None:
        return
    at, end = span.start, committed if span.until is None else span.until
    pieces = []
    for range_ in sorted(known):
        pieces.append((at, min(range_.start, end)))
        at = max(at, range_.until)
    pieces.append((at, end))
    for start, until in pieces:
        for first, behind, why in (
            (start, min(until, committed), "no recorded commit covers these offsets"),
            (
                max(start, committed),
                until,
                f"not committed yet: the group is at offset {committed}, and processes them itself",
            ),
        ):
            if first < behind:
                yield LeftOut(OffsetRange(partition.topic, partition.partition, first, behind), why)


def _refuse_company(
    ranges: Iterable[OffsetRange], live: Iterable[RunSeen], planned: Iterable[RerunBatch]
) -> None:
    known = Apart(ranges)
    for batch in planned:
        _refuse_shared(
            known,
            batch.ranges,
            f"rerun {batch.rerun.rerun_id}",
            f"cancel it with dagster-rebalance rerun --cancel {batch.rerun.rerun_id}",
        )
    for run in live:
        if rerun_of(run.batch_id):
            whose = f"{named_runs([run.run_id])} of rerun {rerun_of(run.batch_id)}"
            _refuse_shared(known, run.ranges, whose, "cancel that run")


def _refuse_shared(known: Apart, theirs: Iterable[OffsetRange], whose: str, how: str) -> None:
    shared = next(filter(None, map(known.shared, theirs)), None)
    if shared is not None:
        msg = f"{whose} is to process {shared} already: wait for its end, or {how}"
        raise ConfigurationError(msg)


def _refuse_holes(ranges: Sequence[OffsetRange], past: Mapping[TopicPartition, Past]) -> None:
    for range_ in ranges:
        bounds = past[range_.topic_partition].bounds
        if range_.until > bounds.until:
            msg = (
                f"Kafka does not have all records of {range_}: its log ends at {bounds.until}. It "
                "was cut off, or the topic was made anew. Nothing was started"
            )
            raise ConfigurationError(msg)
        if range_.start < bounds.start:
            there = [
                r.start
                for r in ranges
                if r.topic_partition == range_.topic_partition and r.start >= bounds.start
            ]
            first = (
                f"The first whole range that is there begins at {there[0]}: rerun "
                f"{selector_of(range_.topic_partition)} --from-offset {there[0]}"
                if there
                else "None of its ranges is still there as a whole"
            )
            msg = (
                f"Kafka has deleted records of {range_}: its log begins at {bounds.start}. A rerun "
                f"would replace its output by less, so nothing was started. {first}"
            )
            raise ConfigurationError(msg)

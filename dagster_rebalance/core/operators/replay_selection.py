"""Selection of the ranges of a replay, which processes the records of dead letters again.

The range of a letter of a record is its offset. The group has committed it, as a part of a larger
range whose output lacks the record, so the replay adds an output with the key of the smaller range.
The range of a letter of a range has no output, or that of a failed attempt, which is replaced. If
a record of it was replayed before, that record has an output with the key of the smaller range, so
the range is left out.

A letter proves nothing, because other programs may write to its topic. A letter of a range is
replayed only if the group has recorded it. A letter of a record can cause that record to be
processed again, but no other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import selector_of
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.letters import LetterKind
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.operators.rerun_selection import (
    DisjointRanges,
    LeftOut,
    ProcessedRange,
    Selection,
    why_left_out,
)
from dagster_rebalance.core.runs.rerun_batch import rerun_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.letters import Letter, LetterEntry
    from dagster_rebalance.core.model.offsets import Bounds, OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch

_MOST_NAMED = 5


class GroupPositions(NamedTuple):
    """A group, as a replay sees it.

    Attributes:
        group_id: The group.
        committed: The committed offset of each partition of the group, None without one.
        bounds: The bounds of the logs of these partitions.
        recorded: The ranges that the group has recorded as dead letters.
        left_out: The ids of letters whose record `only` leaves out.
        replayed: The ranges of length 1 of the records whose letters were replayed.
    """

    group_id: str
    committed: Mapping[TopicPartition, int | None]
    bounds: Mapping[TopicPartition, Bounds]
    recorded: Collection[OffsetRange] = ()
    left_out: Collection[str] = ()
    replayed: Iterable[OffsetRange] = ()


def select_letters(
    letters: Iterable[Letter],
    group: GroupPositions,
    runs: Iterable[RunSnapshot],
    planned: Iterable[RerunBatch],
) -> Selection:
    """Select the ranges of letters. `planned` are the unfinished batches of all reruns.

    Raises:
        ConfigurationError: No letter can be replayed.
    """
    live = [run for run in runs if run.is_live]
    reruns = _Reruns(live, planned)
    of_group: dict[TopicPartition, list[RunSnapshot]] = {}
    for run in live:
        for partition in {r.topic_partition for r in run.ranges if not rerun_of(run.batch_id)}:
            of_group.setdefault(partition, []).append(run)
    chosen, replayed = DisjointRanges(), DisjointRanges(sorted(group.replayed))
    ranges, left_out = [], []
    # Ranges first: a record of a range that failed later may have a letter of its own.
    for letter in sorted(letters, key=lambda one: (one.kind is LetterKind.RECORD, one.range)):
        range_ = letter.range
        working = of_group.get(range_.topic_partition, ())
        why = _why_not(letter, group, working) or reruns.why_not(range_)
        if not why and (others := chosen.overlapping(range_)):
            why = f"the letter of {others[0]} includes it"
        if not why and letter.kind is LetterKind.RANGE:
            why = _why_doubled(range_, replayed)
        if why:
            left_out.append(LeftOut(range_, why))
        else:
            chosen.add(range_)
            ranges.append(range_)
    if not ranges:
        shown = "; ".join(map(str, left_out[:_MOST_NAMED]))
        msg = f"there is nothing to replay: {shown}"
        raise ConfigurationError(msg)
    return Selection(tuple(sorted(ranges)), (), tuple(left_out))


def letters_in(
    ranges: Iterable[OffsetRange], entries: Iterable[LetterEntry]
) -> Iterator[LetterEntry]:
    """Yield the open letters whose offsets are all in one of the ranges."""
    known = DisjointRanges(ranges)
    for entry in entries:
        if entry.letter is None or entry.change is not None:
            continue
        own = entry.letter.range
        if any(one.start <= own.start and own.until <= one.until for one in known.overlapping(own)):
            yield entry


class _Reruns:
    """The ranges of unfinished and of running reruns."""

    def __init__(self, live: Iterable[RunSnapshot], planned: Iterable[RerunBatch]) -> None:
        self._ranges = DisjointRanges()
        self._owners: dict[OffsetRange, str] = {}
        for batch in planned:
            self._add(batch.ranges, f"rerun {batch.rerun.rerun_id}")
        for run in live:
            if rerun_of(run.batch_id):
                self._add(run.ranges, format_runs([run.run_id]))

    def _add(self, ranges: Iterable[OffsetRange], owner: str) -> None:
        for range_ in ranges:
            if not self._ranges.overlapping(range_):
                self._ranges.add(range_)
                self._owners[range_] = owner

    def why_not(self, range_: OffsetRange) -> str:
        found = self._ranges.overlapping(range_)
        return f"{self._owners[found[0]]} already includes it" if found else ""


def _why_not(letter: Letter, group: GroupPositions, of_group: Sequence[RunSnapshot]) -> str:
    range_, partition = letter.range, letter.range.topic_partition
    if letter.group_id not in {group.group_id, ""}:
        return f"it is a letter of group {letter.group_id}"
    if partition not in group.committed:
        return f"group {group.group_id} does not read this partition"
    if letter.id in group.left_out:
        return "`only` of the group leaves out its record: change `only`, or discard it"
    return (
        _why_cut(letter, group.bounds[partition])
        or why_left_out(ProcessedRange(range_, 0.0), group.committed[partition], of_group)
        or (_why_no_range(range_, group) if letter.kind is LetterKind.RANGE else "")
    )


def _why_no_range(range_: OffsetRange, group: GroupPositions) -> str:
    log_start = group.bounds[range_.topic_partition].start
    if range_.start < log_start:
        return (
            f"Kafka has deleted its records (the log begins at {log_start}), and the letter of a "
            "range has no copy of them: discard it"
        )
    if range_ not in group.recorded:
        return (
            f"Dagster has no record of this dead letter of group {group.group_id}, so another "
            "program may have written it"
        )
    return ""


def _why_doubled(range_: OffsetRange, replayed: DisjointRanges) -> str:
    found = replayed.overlapping(range_)
    if not found:
        return ""
    return (
        f"the letter of {found[0]} was replayed alone, so its output would be doubled: delete that "
        f"output, and use dagster-rebalance rerun {selector_of(range_.topic_partition)} "
        f"--from-offset {range_.start} --until-offset {range_.until}"
    )


def _why_cut(letter: Letter, log: Bounds) -> str:
    """Other records will get the offsets, and their output would replace that of a replay."""
    if letter.range.until <= log.until:
        return ""
    copy = "produce the record of `letters show` again, and "
    return (
        f"Kafka's log ends at {log.until}: it was truncated, or the topic was recreated, so other "
        f"records will have its offsets: {copy if letter.kind is LetterKind.RECORD else ''}"
        "discard it"
    )

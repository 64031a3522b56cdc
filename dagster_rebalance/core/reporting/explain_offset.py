"""Explanation of one offset: which batch committed it, or why no batch has.

The facts come from Kafka (the committed offset with its claims and its note of the last commit) and
from the record in Dagster that `core.reporting.record_search` finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import LEFT_OUT, StoredPartition
from dagster_rebalance.core.partitions.recovery import read_stored
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dagster_rebalance.core.model.claims import LastCommit
    from dagster_rebalance.core.model.offsets import (
        Bounds,
        OffsetAndMetadata,
        OffsetRange,
        TopicPartition,
    )


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The recorded commit of an offset.

    Attributes:
        range: The range of its batch, or of all batches that its part of the record joins.
        run_id: The run of the batch; for a dead letter, the last run that failed.
        batch_id: The id of the batch; empty if the record has only its number.
        numbers: The numbers of the first and the last batch in a streaming run; (0, 0) if unknown.
        commits: The number of commits of the range; None if unknown.
        at: When the offset was committed, in seconds since 1970; None if unknown.
        recorded_at: When Dagster stored the record.
        is_run_known: Whether the run is that of the batch. The note of a killed member names the
            last run of several commits only.
    """

    range: OffsetRange
    run_id: str
    batch_id: str
    numbers: tuple[int, int]
    commits: int | None
    at: float | None
    recorded_at: float
    is_dead_letter: bool = False
    is_run_known: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """A materialization of an asset by the batch.

    Attributes:
        asset: The key of the asset.
        at: When the materialization was stored, in seconds since 1970.
        is_joined: Whether the materialization also covers other batches.
        number: The number of its batch in the streaming run; 0 for several batches, or if unknown.
            A failed attempt has another number than the batch that was committed.
    """

    asset: str
    at: float
    is_joined: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class MovedOffset:
    """A move of the committed offset by an operator."""

    before: int
    until: int
    at: float
    by: str


@dataclass(frozen=True, slots=True)
class OffsetFacts:
    """The known facts about an offset.

    Attributes:
        stored: The committed offset in Kafka.
        committed: The recorded commit.
        recorded: The end of the record before the offset, and the start of the record after it;
            each is None if there is no such record.
        has_run: Whether Dagster still has the run.
        outputs: The materializations of the batch.
        outputs_read: The number of materializations that were read, if more may show the offset.
        moves: The moves between the neighbouring records.
    """

    partition: TopicPartition
    offset: int
    stored: OffsetAndMetadata | None
    bounds: Bounds
    committed: CommittedOffset | None = None
    recorded: tuple[int | None, int | None] = (None, None)
    has_run: bool = True
    outputs: Sequence[Output] = ()
    outputs_read: int = 0
    moves: Sequence[MovedOffset] = ()


def explain_offset(facts: OffsetFacts) -> list[str]:
    """Return messages that explain an offset, the most important message first."""
    name = f"{facts.partition} offset {facts.offset}"
    read = None if facts.stored is None else read_stored(facts.stored)
    state = read if isinstance(read, StoredPartition) else None
    next_offset = None if facts.stored is None else facts.stored.offset
    if next_offset is None or facts.offset >= next_offset:
        sentences = [f"{name}: {_uncommitted(facts, state, next_offset)}"]
        if facts.committed is not None:
            sentences.append(
                "an operator has moved the committed offset back since an earlier commit: "
                f"{_commit(facts.committed)}"
            )
            sentences += _details(facts, facts.committed)
        return sentences
    if facts.committed is not None:
        return [f"{name}: {_commit(facts.committed)}", *_details(facts, facts.committed)]
    note = None if state is None else state.last_commit
    for part, until in () if note is None else note.ends(next_offset):
        if part.start <= facts.offset < until:
            return [f"{name}: {_note(part, until)}"]
    return [f"{name}: {_unrecorded(facts)}"]


def _uncommitted(facts: OffsetFacts, state: StoredPartition | None, next_offset: int | None) -> str:
    for range_, batch_id in () if state is None else state.ranges(facts.partition):
        if range_.start <= facts.offset < range_.until:
            return f"not committed. {_batch(batch_id)} has claimed its range {_span(range_)}"
    group = (
        "the group has no committed offset"
        if next_offset is None
        else f"the group is at offset {next_offset}"
    )
    if facts.bounds.is_known and facts.offset >= facts.bounds.until:
        return f"not produced yet: the log ends at {facts.bounds.until}, and {group}"
    return f"not committed, and no batch has claimed it: {group}"


def _commit(commit: CommittedOffset) -> str:
    first, last = commit.numbers
    if commit.run_id == LEFT_OUT:
        return (
            f"committed without a run{_when(commit)}: the filter `only` of the group leaves out "
            f"all records of {_span(commit.range)}"
        )
    if commit.is_dead_letter:
        return (
            f"in a dead letter. All attempts on {_span(commit.range)} failed, last run "
            f"{commit.run_id}{_when(commit)}"
        )
    if first and first != last:
        return (
            f"committed by one of the batches {first} to {last} of streaming run "
            f"{commit.run_id}{_when(commit)}. The record joins their {commit.commits} ranges to "
            f"{_span(commit.range)}"
        )
    what = f"batch {last} of streaming run {commit.run_id}" if last else _run(commit)
    one = "The range of the batch is" if commit.commits == 1 else "The range is one of those in"
    return f"committed by {what}{_when(commit)}. {one} {_span(commit.range)}"


def _run(commit: CommittedOffset) -> str:
    batch = f", batch {commit.batch_id}" if commit.batch_id else ""
    or_other = "" if commit.is_run_known else ", or by an earlier run"
    return f"run {commit.run_id}{batch}{or_other}"


def _when(commit: CommittedOffset) -> str:
    if commit.at is None:
        return f", recorded at {_utc(commit.recorded_at)}"
    return f" at {_utc(commit.at)}"


def _details(facts: OffsetFacts, commit: CommittedOffset) -> Iterator[str]:
    if commit.run_id == LEFT_OUT:
        return
    if commit.commits == 1 and not commit.is_dead_letter:
        range_ = commit.range
        yield (
            f"the key of its output is `{range_.key}`, and the Parquet file of "
            f"write_parquet_by_range `topic_partition={range_.topic}-p{range_.partition}/"
            f"{range_.start}-{range_.until}.parquet`"
        )
    for output in facts.outputs:
        number = output.number
        is_other = number and commit.numbers != (number, number)
        batch = f", by batch {number} of the run" if is_other else ""
        joined = ", with other batches" if output.is_joined else batch
        yield f"asset {output.asset} has a materialization of {_utc(output.at)}{joined}"
    if not facts.has_run:
        yield f"Dagster no longer has run {commit.run_id}: it was deleted or pruned"
    elif not facts.outputs and commit.is_run_known and not commit.is_dead_letter:
        among = f" among the {facts.outputs_read:,} that were read" if facts.outputs_read else ""
        yield f"no materialization of an asset shows its range{among}"
    if facts.bounds.is_known and facts.offset < facts.bounds.start:
        yield f"Kafka has deleted the record: the log begins at {facts.bounds.start}"


def _note(note: LastCommit, until: int) -> str:
    span = f"[{note.start}, {until})"
    if note.is_dead_letter:
        return f"in a dead letter of {span}. Dagster has no record of it yet"
    if note.is_left_out:
        return f"committed without a run: the filter `only` leaves out all records of {span}"
    return (
        f"committed. Dagster has no record yet of {span}: its last batch is "
        f"{_batch(note.batch_id)}, as Kafka's note of the commit says"
    )


def _unrecorded(facts: OffsetFacts) -> str:
    before, after = facts.recorded
    for move in facts.moves:
        if move.before <= facts.offset < move.until:
            by = f" by {move.by}" if move.by else ""
            return (
                f"skipped. The committed offset was moved from {move.before} to {move.until}"
                f"{by} at {_utc(move.at)}"
            )
    if before is None and after is None:
        return "before the committed offset, and Dagster has no record of a commit"
    if before is None:
        return (
            f"before the first record, which begins at {after}: the group started there, or "
            "earlier records were wiped in Dagster"
        )
    upto = "" if after is None else f", the next one begins at {after}"
    return (
        f"in no record, although the group has passed it: a record ends at {before}{upto}. The "
        "committed offset was moved externally, or the log has no records there"
    )


def _batch(batch_id: str) -> str:
    batch = StreamBatch.parse(batch_id)
    if batch is None:
        return f"batch {batch_id}"
    attempt = f", attempt {batch.attempt}" if batch.attempt > 1 else ""
    return f"batch {batch.number} of streaming run {batch.run_id}{attempt}"


def _span(range_: OffsetRange) -> str:
    return f"[{range_.start}, {range_.until})"


def _utc(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"

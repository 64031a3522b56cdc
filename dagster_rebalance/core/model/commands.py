"""Commands: the actions that the engine requests from its shell, and the receipts of holds.

The shell (the member loop) executes commands in order. It answers a command with the event that the
command's docstring names, or not at all; the engine then reissues the command. `doing` names a
command in notes, such as "writing offsets to Kafka took 9.9 s".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.commit_parts import NO_COMMITS
from dagster_rebalance.core.model.letters import LetterKind, letter_key
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import is_same_commit, names_of
from dagster_rebalance.core.model.run_snapshot import format_runs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.commit_parts import CommitParts
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition


class Cause(enum.Enum):
    """Why partitions are held."""

    REVOKE = "revoke"
    """Kafka requested the revoke."""
    LEAVE = "leave"
    """The member leaves the group: shutdown, a reload, or a sensor without ticks."""


class HoldOutcome(enum.Enum):
    """How a hold ended."""

    NOTHING_TO_DO = "nothing to do"
    """No run worked on the partitions."""
    DRAINED = "drained"
    """All live runs ended, and their successes are committed."""
    HANDED_OVER = "handed over"
    """The member left for its successor: finished work is committed, and the successor adopts live
    runs."""
    DEADLINE = "deadline"
    """The deadline passed, or the work was interrupted. The next owner takes over the claims."""
    SUPERSEDED = "superseded"
    """Another rebalance ended the hold without a callback."""
    LOST = "lost"
    """The member was fenced, or its session expired."""

    @property
    def is_drained(self) -> bool:
        """Whether no run worked on the partitions any more, or the successor adopted the runs."""
        return self not in {HoldOutcome.DEADLINE, HoldOutcome.SUPERSEDED, HoldOutcome.LOST}


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a hold ended.

    Attributes:
        seconds: Seconds from the request of the hold to its end.
        committed: The offsets committed during the hold.
        run_ids: The runs that the hold waited for, or left to the successor.
        handed_over: Partitions released with claims.
    """

    outcome: HoldOutcome
    cause: Cause
    partitions: tuple[TopicPartition, ...]
    seconds: float
    committed: dict[TopicPartition, int]
    run_ids: tuple[str, ...]
    cancelled: tuple[str, ...]
    handed_over: tuple[TopicPartition, ...]

    def __str__(self) -> str:
        text = self._sentence
        if self.run_ids:
            what = "still working" if self.outcome is HoldOutcome.HANDED_OVER else "waited for"
            text += f", {len(self.run_ids)} run{'s' * (len(self.run_ids) != 1)} {what}"
        if self.cancelled:
            text += f", {len(self.cancelled)} cancelled"
        if self.handed_over:
            is_one = len(self.handed_over) == 1
            claims = "unfinished claim on" if is_one else "unfinished claims on"
            goes = "goes" if is_one else "go"
            text += f"; {claims} {names_of(self.handed_over)} {goes} to the next owner"
        return text

    @property
    def _sentence(self) -> str:
        what, after = names_of(self.partitions), f"after {self.seconds:.1f} s"
        verb = "left" if self.cause is Cause.LEAVE else "released"
        return {
            HoldOutcome.NOTHING_TO_DO: f"{verb} {what} {'at once' if self.seconds < 1 else after}",
            HoldOutcome.DRAINED: f"drained and {verb} {what} {after}",
            HoldOutcome.HANDED_OVER: f"handed {what} over to the successor {after}",
            HoldOutcome.DEADLINE: f"gave {what} up {after}, before the work had ended",
            HoldOutcome.SUPERSEDED: f"lost {what} to another member {after}",
            HoldOutcome.LOST: f"lost {what} {after}",
        }[self.outcome]


@dataclass(frozen=True, slots=True)
class ReadStoredOffsets:
    """Read committed offsets with metadata, bounds and the last materialization of partitions.

    Answered by `StoredOffsetsRead`, with the same epochs.
    """

    doing: ClassVar[str] = "reading the positions of partitions"
    epochs: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ReadDirectives:
    """Read the directives of the group.

    Answered by `DirectivesRead`, with the same epoch.
    """

    doing: ClassVar[str] = "reading the directives of operators"
    epoch: int


Claimed: TypeAlias = "tuple[str, OffsetRange]"
"""A batch id and the range that it claims."""


@dataclass(frozen=True, slots=True)
class ReadRuns:
    """Read all runs of the batches, and all live runs of the group if `with_live`.

    Answered by `RunsRead`, with the same `sequence`.

    Attributes:
        sequence: Increases with each event that makes earlier reads stale.
        claims: The claims of the batches, to find runs that were deleted while they work.
        worker_batch_ids: Batches that the worker of a streaming run has claimed. The worker reports
            their state.
    """

    doing: ClassVar[str] = "reading the runs of batches"
    batch_ids: frozenset[str]
    with_live: bool = False
    sequence: int = 0
    claims: frozenset[Claimed] = frozenset()
    worker_batch_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """Read the first and end offsets of all partitions in one request.

    Answered by `BoundsRead`.
    """

    doing: ClassVar[str] = "reading the end offsets"
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ScanRanges:
    """Search ranges for a record that the filter of the group processes.

    Answered by `RangesScanned`, possibly in several parts. Reads no longer than
    `filter_scans.SCAN_PATIENCE_S`.

    Attributes:
        number: The number of the scan, for the answers.
    """

    doing: ClassVar[str] = "comparing records with the filter"
    number: int
    ranges: tuple[OffsetRange, ...]


@dataclass(frozen=True, slots=True)
class OffsetWrite:
    """New committed offset, or new claims at the same offset, of one partition.

    Attributes:
        epoch: The epoch in which the write is allowed.
        expected: What Kafka must store before the write.
        topic_id: The topic that the write is for; empty if unknown.
    """

    partition: TopicPartition
    epoch: int
    expected: OffsetAndMetadata | None
    new: OffsetAndMetadata
    topic_id: str = ""


class SortedWrites(NamedTuple):
    """Offset writes, compared with the stored offsets.

    Attributes:
        stored: Writes that Kafka already stores: the answer to the first attempt was lost.
        changed: Writes for which Kafka stores neither the expected nor the new value, and first
            writes for a topic that has been recreated.
    """

    stored: list[OffsetWrite]
    due: list[OffsetWrite]
    changed: list[OffsetWrite]


def topics_to_verify(writes: Iterable[OffsetWrite]) -> frozenset[str]:
    """Return the topics whose ids `sort_writes` compares.

    The stored offsets of a recreated topic are gone. A first write expects no stored offset, so
    only the topic id shows that its position belongs to the deleted topic.
    """
    return frozenset(w.partition.topic for w in writes if w.expected is None and w.topic_id)


def sort_writes(
    writes: Iterable[OffsetWrite],
    stored: Mapping[TopicPartition, OffsetAndMetadata | None],
    topic_ids: Mapping[str, str],
) -> SortedWrites:
    """Sort writes by the stored offset of their partition, and first writes by the topic id."""
    result = SortedWrites([], [], [])
    for write in writes:
        now = stored[write.partition]
        topic_id = topic_ids.get(write.partition.topic, write.topic_id)
        kind = (
            result.stored
            if is_same_commit(now, write.new)
            else result.due
            if is_same_commit(now, write.expected)
            and (write.expected is not None or topic_id == write.topic_id)
            else result.changed
        )
        kind.append(write)
    return result


@dataclass(frozen=True, slots=True)
class WriteOffsets:
    """Sort writes by stored offsets and topic ids (`sort_writes`), and commit the due ones at once.

    Answered by `OffsetsWritten`.
    """

    doing: ClassVar[str] = "writing offsets to Kafka"
    writes: tuple[OffsetWrite, ...]


@dataclass(frozen=True, slots=True)
class RecordCommit:
    """A record of one commit, or of consecutive commits: a materialization of the offsets asset.

    Attributes:
        batch_id: The batch of the last commit.
        run_id: The run that succeeded in the last commit; for a dead letter, the last run that
            failed.
        lag: Number of offsets from the end of the range to the last known end of the partition.
        claim_to_commit_s: Seconds from the claim to the commit; None if another member claimed.
        drain_s: Seconds from the revoke to the commit; None if the partition was not held.
        is_late: Whether an earlier owner committed, but did not record the commit.
        joined: The earlier commits in this record.
        committed_at: Time of the last commit, on the clock of the engine; None if unknown.
    """

    range: OffsetRange
    epoch: int
    batch_id: str
    run_id: str
    lag: int
    claim_to_commit_s: float | None
    drain_s: float | None
    is_late: bool = False
    is_dead_letter: bool = False
    joined: CommitParts = NO_COMMITS
    committed_at: float | None = None

    @property
    def left_out(self) -> int:
        """The number of offsets without a run: the filter leaves out all of their records."""
        starts = (self.range.start, *(part.until for part in self.joined))
        parts = zip(starts, self.ends, strict=True)
        return sum(until - start for start, (until, run_id) in parts if run_id == LEFT_OUT)

    @property
    def commits(self) -> int:
        """The number of commits."""
        return self.joined.commits + 1

    @property
    def ends(self) -> tuple[tuple[int, str], ...]:
        """End offset and run id of each commit, or of merged commits (see `CommitParts`)."""
        earlier = ((part.until, part.run_id) for part in self.joined)
        return (*earlier, (self.range.until, self.run_id))

    def without(self, recorded: Collection[tuple[int, int, str]]) -> RecordCommit | None:
        """Return the part after the recorded commits (see `recorded_commits`), or None.

        The answer to an earlier command may have been lost, or the next owner may have recorded
        the last commit.
        """
        start = self.range.start
        for until, run_id in reversed(self.ends):
            if (start, until, run_id) in recorded:
                if until == self.range.until:
                    return None
                rest = replace(self.range, start=until)
                return replace(self, range=rest, joined=self.joined.after(until))
        return self


def recorded_commits(start: int, ends: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, run id) for each commit of a record.

    The next owner may have read the offset after any of these commits from Kafka.
    """
    return ((start, until, run_id) for until, run_id in ends)


@dataclass(frozen=True, slots=True)
class RecordCommits:
    """Record commits of several partitions in Dagster.

    Answered by `CommitsRecorded`, possibly for a part of the commits.
    """

    doing: ClassVar[str] = "recording commits in Dagster"
    commits: tuple[RecordCommit, ...]


@dataclass(frozen=True, slots=True)
class StoreDeadLetter:
    """Store a range, or its only record, in the dead-letter topic.

    Answered, possibly much later, by `DeadLetterStored` or `DeadLetterFailed`. A repeated command
    has no effect while the first command is in progress.

    Attributes:
        run_ids: The runs that failed on the range, oldest first.
        is_record: Whether the letter has the record instead of the range.
        error: The error that a streaming run stored for its batch; empty if unknown.
    """

    doing: ClassVar[str] = "storing a dead letter"
    range: OffsetRange
    epoch: int
    batch_id: str
    run_ids: tuple[str, ...]
    is_record: bool = False
    error: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """The Kafka key of the letter."""
        kind = LetterKind.RECORD if self.is_record else LetterKind.RANGE
        return letter_key(kind, self.range)


@dataclass(frozen=True, slots=True)
class CancelRuns:
    """Cancel runs, and tag them so they do not count as failed attempts.

    Attributes:
        only_unstarted: Whether to skip runs that have started by now: the engine's state of a run
            is up to `poll_s` old.
        is_again: Whether all runs were cancelled before, and operators have been notified.
        is_for_directive: Whether a pause or stop directive covers a partition of the runs.
    """

    doing: ClassVar[str] = "cancelling runs"
    run_ids: tuple[str, ...]
    reason: str
    only_unstarted: bool = False
    is_again: bool = False
    is_for_directive: bool = False

    def __str__(self) -> str:
        return f"cancelling {len(self.run_ids)} run(s): {self.reason}"


@dataclass(frozen=True, slots=True)
class EndDeadRuns:
    """End the external work of dead runs, and mark the runs as over.

    Runs that Dagster shows as started are also marked as failed. Answered, possibly much later, by
    one `DeadRunEnded` for each dead run.

    Attributes:
        heartbeats: Last heartbeat of each run by run id. A run with a newer heartbeat is alive.
    """

    doing: ClassVar[str] = "ending dead runs"
    heartbeats: Mapping[str, str]

    def __str__(self) -> str:
        has = "has" if len(self.heartbeats) == 1 else "have"
        return f"makes sure that {format_runs(self.heartbeats)} {has} really ended"


@dataclass(frozen=True, slots=True)
class AbandonClaims:
    """Publish the outcomes of the worker's batches on partitions that it no longer owns.

    If a batch is still running, its outcome follows when the batch ends. Without the outcome, the
    next owner cannot tell whether the batch succeeded.
    """

    doing: ClassVar[str] = "leaving claims to the next owner"
    claims: frozenset[Claimed]


@dataclass(frozen=True, slots=True)
class ShowHold:
    """Show that partitions are held; `RecordReceipt` shows how the hold ended.

    Attributes:
        run_ids: The runs that the hold waits for, as far as known.
        limit_s: Maximum remaining duration.
    """

    doing: ClassVar[str] = "showing a hold"
    cause: Cause
    partitions: tuple[TopicPartition, ...]
    run_ids: tuple[str, ...]
    limit_s: float

    def __str__(self) -> str:
        count = len(self.run_ids)
        what = f"{count} run{'s' * (count > 1)}" if count else "the commit"
        return (
            f"{self.cause.value} of {names_of(self.partitions)}: waiting for {what}, at most "
            f"{self.limit_s:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class RecordReceipt:
    """Show how a hold ended."""

    doing: ClassVar[str] = "recording the receipt of a hold"
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class ShowStop:
    """Show why a partition is stopped.

    An empty reason means that the partition continues or was released (`is_released`).
    """

    doing: ClassVar[str] = "showing a stopped partition"
    partition: TopicPartition
    reason: str
    is_released: bool = False

    def __str__(self) -> str:
        if self.reason:
            return f"stopped: {self.reason}"
        if self.is_released:
            return f"{self.partition} was stopped when it was released"
        return f"{self.partition} continues"


@dataclass(frozen=True, slots=True)
class Note:
    """Log and show an event in one sentence.

    Attributes:
        kind: The name of the event in logs and metrics.
        fields: The fields that `EVENT_SPECS` lists for that name.
    """

    doing: ClassVar[str] = "noting an event"
    text: str
    kind: EventKind = EventKind.NOTED
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Close the member: all partitions are drained, or the deadline has passed."""

    doing: ClassVar[str] = "leaving the group"
    reason: str


Command = (
    ReadStoredOffsets
    | ReadDirectives
    | ReadRuns
    | ReadBounds
    | ScanRanges
    | WriteOffsets
    | RecordCommits
    | StoreDeadLetter
    | CancelRuns
    | EndDeadRuns
    | AbandonClaims
    | ShowHold
    | RecordReceipt
    | ShowStop
    | Note
    | LeaveGroup
)

"""What the engine wants done.

A shell carries commands out in order and answers with the event that each names, or not at all.

Commands are imperative and complete: a shell decides nothing. One that got no answer (a broker or a
database was away) is given again later. `doing` names a command in notes for people, such as
"writing offsets to Kafka took 9.9 s".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from dagster_rebalance.core.model.member_events import Occurred
from dagster_rebalance.core.model.offsets import is_same_commit, named
from dagster_rebalance.core.model.run import named_runs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
    from dagster_rebalance.core.model.receipt import Cause, Receipt


@dataclass(frozen=True, slots=True)
class ReadStoredOffsets:
    """Read committed offsets with metadata, bounds and the last materialisation.

    Answer: `StoredOffsetsRead`.

    Attributes:
        epochs: The partitions, each with the epoch that the answer has to name.
    """

    doing: ClassVar[str] = "reading the positions of partitions"
    epochs: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ReadDirectives:
    """Read what people have ordered for the group.

    Answer: `DirectivesRead`.

    Attributes:
        epoch: The newest epoch. The answer has to name it.
    """

    doing: ClassVar[str] = "reading the orders of operators"
    epoch: int


Claimed: TypeAlias = "tuple[str, OffsetRange]"
"""A range, and the id of the batch that has claimed it."""


@dataclass(frozen=True, slots=True)
class ReadRuns:
    """Read all runs of the batches, and all live runs of the group if `live_too`.

    Answer: `RunsRead`.

    Attributes:
        batch_ids: The batches.
        live_too: Whether all live runs are wanted as well.
        look: Grows when something has happened after which runs have to be read anew. The answer
            has to name it.
        claims: What is to be known of the batches: runs that were deleted while they work are found
            by it.
        own: The batches that the worker has claimed itself: it knows all about them.
    """

    doing: ClassVar[str] = "reading the runs of batches"
    batch_ids: frozenset[str]
    live_too: bool = False
    look: int = 0
    claims: frozenset[Claimed] = frozenset()
    own: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """Read the first and the end offsets, of all partitions in one request.

    Answer: `BoundsRead`.
    """

    doing: ClassVar[str] = "reading the end offsets"
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class OffsetWrite:
    """A new committed offset, or new claims behind the same offset, for one partition.

    Attributes:
        partition: The partition.
        epoch: The epoch in which the write is allowed.
        expected: What Kafka must store now for the write to be sent.
        new: What it shall store.
    """

    partition: TopicPartition
    epoch: int
    expected: OffsetAndMetadata | None
    new: OffsetAndMetadata


class Compared(NamedTuple):
    """Writes, after a look at what Kafka stores.

    Attributes:
        done: What is stored already: the first answer was lost.
        due: What may be sent.
        changed: What must not: something else is stored than was expected.
    """

    done: list[OffsetWrite]
    due: list[OffsetWrite]
    changed: list[OffsetWrite]


def compared(
    writes: Iterable[OffsetWrite], stored: Mapping[TopicPartition, OffsetAndMetadata | None]
) -> Compared:
    """Sort writes by what Kafka stores of their partitions."""
    found = Compared([], [], [])
    for write in writes:
        now = stored[write.partition]
        kind = (
            found.done
            if is_same_commit(now, write.new)
            else found.due
            if is_same_commit(now, write.expected)
            else found.changed
        )
        kind.append(write)
    return found


@dataclass(frozen=True, slots=True)
class WriteOffsets:
    """Read the stored offsets, sort the writes by them, and commit the due ones in one request.

    `compared` sorts the writes. Answer: `OffsetsWritten`.
    """

    doing: ClassVar[str] = "writing offsets to Kafka"
    writes: tuple[OffsetWrite, ...]


@dataclass(frozen=True, slots=True)
class RecordCommit:
    """Record a commit, or several that follow each other, as a materialisation of the offsets.

    Answer: `CommitRecorded`.

    Attributes:
        range: What is committed.
        epoch: The epoch of the partition.
        batch_id: The batch that processed it; of several commits, the last one.
        run_id: The run that succeeded; of several commits, the last one.
        lag: Offsets that were still to be read behind it, as far as known.
        claim_to_commit_s: From the claim to the commit; None when the claim was taken over.
        drain_s: From the request of the revoke to the commit; None when the partition was not held.
        is_late: Whether it was committed by an earlier owner that could not record it.
        is_dead_letter: Whether no run succeeded and the dead-letter topic has the range; `run_id`
            is the last run that failed.
        joined: Of several commits, where each but the last one ended, and its run.
    """

    doing: ClassVar[str] = "recording a commit in Dagster"
    range: OffsetRange
    epoch: int
    batch_id: str
    run_id: str
    lag: int
    claim_to_commit_s: float | None
    drain_s: float | None
    is_late: bool = False
    is_dead_letter: bool = False
    joined: tuple[tuple[int, str], ...] = ()

    @property
    def ends(self) -> tuple[tuple[int, str], ...]:
        """Where each of its commits ended, and the run of that commit."""
        return (*self.joined, (self.range.until, self.run_id))

    def without(self, recorded: Collection[tuple[int, int, str]]) -> RecordCommit | None:
        """What is left to record; None when nothing is.

        An answer may have been lost; and a next owner may have recorded what it found in Kafka
        while the last commit was under way.

        Args:
            recorded: What is recorded of the partition, as by `recorded_commits`.
        """
        start = self.range.start
        for index, (until, run_id) in reversed(list(enumerate(self.ends, 1))):
            if (start, until, run_id) in recorded:
                if index == len(self.ends):
                    return None
                rest = replace(self.range, start=until)
                return replace(self, range=rest, joined=self.joined[index:])
        return self


def recorded_commits(start: int, ends: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int, str]]:
    """What a record says: its start, with each end that commits had in it, and their run.

    A late owner may find one of these ends in Kafka that the record goes beyond.
    """
    return ((start, until, run_id) for until, run_id in ends)


@dataclass(frozen=True, slots=True)
class StoreDeadLetter:
    """Record a range in the dead-letter topic.

    Answer, perhaps much later: `DeadLetterStored` or `DeadLetterFailed`.

    It is given again after a while, and changes nothing as long as the first one is under way.

    Attributes:
        range: What could not be processed.
        epoch: The epoch of the partition.
        batch_id: Its batch.
        run_ids: The runs that failed on it, oldest first.
    """

    doing: ClassVar[str] = "storing a dead letter"
    range: OffsetRange
    epoch: int
    batch_id: str
    run_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelRuns:
    """Cancel runs, and mark them as taken back, so that they do not count as failed attempts.

    Attributes:
        only_unstarted: Whether a run that turns out to have started is left alone: what the engine
            knows is up to `poll_s` old.
        is_again: Whether all of this was asked for before, and people were told.
        is_ordered: Whether a person has paused or stopped a partition of theirs.
    """

    doing: ClassVar[str] = "cancelling runs"
    run_ids: tuple[str, ...]
    reason: str
    only_unstarted: bool = False
    is_again: bool = False
    is_ordered: bool = False

    def __str__(self) -> str:
        return f"cancelling {len(self.run_ids)} run(s): {self.reason}"


@dataclass(frozen=True, slots=True)
class EndDeadRuns:
    """Stop what runs whose process has gone have begun elsewhere, and mark these runs as over.

    A run that Dagster shows at work is marked as failed, too. Answer for each, perhaps much later:
    `DeadRunEnded`; none for a run that turns out to live.

    Attributes:
        signs: The last sign of life of each run, by its id. One that has given another sign since
            lives, and is not over.
    """

    doing: ClassVar[str] = "ending dead runs"
    signs: Mapping[str, str]

    def __str__(self) -> str:
        has = "has" if len(self.signs) == 1 else "have"
        return f"makes sure that {named_runs(self.signs)} {has} really ended"


@dataclass(frozen=True, slots=True)
class LeaveClaims:
    """Tell others what became of claims of the own worker that they may find.

    The partitions are not the member's any more. What is still at work on them is told when it has
    ended. Without this word the next owner does not know whether that work was successful.
    """

    doing: ClassVar[str] = "leaving claims to the next owner"
    claims: frozenset[Claimed]


@dataclass(frozen=True, slots=True)
class ShowHold:
    """Show that partitions are held; how the hold ends is told by its receipt.

    Attributes:
        cause: Why they are held.
        partitions: What is held.
        run_ids: The runs that it waits for, as far as they are known.
        limit_s: When it ends at the latest, from now on.
    """

    doing: ClassVar[str] = "showing a hold"
    cause: Cause
    partitions: tuple[TopicPartition, ...]
    run_ids: tuple[str, ...]
    limit_s: float

    def __str__(self) -> str:
        count = len(self.run_ids)
        what = f"{count} run{'s' * (count > 1)} at work" if count else "what is to be committed"
        return (
            f"{self.cause.value} of {named(self.partitions)}: held for {what}, for at most "
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

    Without a reason, the partition goes on, or the member gives it up, which mends nothing.
    """

    doing: ClassVar[str] = "showing a stopped partition"
    partition: TopicPartition
    reason: str
    is_released: bool = False

    def __str__(self) -> str:
        if self.reason:
            return f"stopped: {self.reason}"
        if self.is_released:
            return f"{self.partition} was stopped when it was given up"
        return f"{self.partition} goes on"


@dataclass(frozen=True, slots=True)
class Note:
    """Tell people what happened, in one sentence.

    Attributes:
        text: The sentence.
        what: Its name for logs and metrics.
        fields: What belongs to that name.
    """

    doing: ClassVar[str] = "noting an event"
    text: str
    what: Occurred = Occurred.NOTED
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Close the member: everything is drained, or time is up."""

    doing: ClassVar[str] = "leaving the group"
    reason: str


Command = (
    ReadStoredOffsets
    | ReadDirectives
    | ReadRuns
    | ReadBounds
    | WriteOffsets
    | RecordCommit
    | StoreDeadLetter
    | CancelRuns
    | EndDeadRuns
    | LeaveClaims
    | ShowHold
    | RecordReceipt
    | ShowStop
    | Note
    | LeaveGroup
)

"""What happened, as the engine is told: from Kafka, from Dagster, and from the clock.

Events are in the past tense and carry facts only. A shell produces them, in the order in which they
happened, and never leaves one out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.commands import OffsetWrite, RecordCommit, StoreDeadLetter
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.model.run import RunSeen


class LostReason(enum.Enum):
    """Why partitions were taken away."""

    SESSION = "session"
    """The client noticed it by itself: its session ended, or `poll` was not called for too long."""
    FENCED = "fenced"
    """The broker threw the member out. The client does not tell during a hold, and late otherwise;
    a probe or a commit found it."""
    SUPERSEDED = "superseded"
    """Another rebalance overtook a hold, without a callback: the held partitions were given to
    somebody else."""
    EXPIRED = "expired"
    """A hold was not released within `max.poll.interval.ms`, and the member ended its membership
    by itself."""


class WriteFailure(enum.Enum):
    """Why the offset of a partition was not written.

    That a member is fenced is told by the partitions lost, never by a failed write.
    """

    CHANGED = "changed"
    """What Kafka stores is not what this member last read or wrote: nothing was written."""
    RETRIABLE = "retriable"
    """The request failed for now, or its answer did not arrive: the same write may be tried
    again."""


@dataclass(frozen=True, slots=True)
class PartitionsAssigned:
    """Partitions were added to the assignment; possibly none."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """Kafka wants partitions back. They stay assigned while they are held."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PartitionsRevoked:
    """A revoke was completed: the partitions are not assigned any more."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PartitionsLost:
    """Partitions were taken away. Nothing may be committed for them any more."""

    partitions: tuple[TopicPartition, ...]
    reason: LostReason = LostReason.SESSION


AssignmentEvent: TypeAlias = (
    PartitionsAssigned | RevokeRequested | PartitionsRevoked | PartitionsLost
)


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The member shall give all its partitions up and leave the group.

    A later request can only make it faster.

    Attributes:
        reason: Why, as the end of a sentence.
        limit_s: How long it may take, at most the usual limit of a hold; None for that limit.
        has_successor: Whether a newer process has joined through the same Dagster instance, so that
            it can adopt live runs.
    """

    reason: str
    limit_s: float | None = None
    has_successor: bool = False


@dataclass(frozen=True, slots=True)
class TickArrived:
    """Dagster evaluated the sensor: it is there to start runs."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; time went on."""


class LastRecorded(NamedTuple):
    """The last commit of a partition that Dagster has recorded.

    Attributes:
        until: The offset behind it.
        run_id: Its run; empty where the record does not name one.
    """

    until: int
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What Kafka and Dagster say of a partition that is looked up.

    Attributes:
        stored: What the group has committed; None when it has nothing.
        bounds: The offsets that Kafka has; `ANY_BOUNDS` where their leader does not answer.
        recorded: The last commit that Dagster has recorded, if there is one.
        topic_id: The id of the topic; empty where it is not known.
        is_truncated: Whether the log lost records behind which the group has committed or claimed
            offsets, even if others have their offsets now: `restoring.position_to_verify`, asked of
            the leader.
        not_older: The first record that is not older than the time at which the group begins; None
            where there is none, and where nobody asked: the group has committed something, or does
            not begin at a time.
        refused: Why Kafka refuses to answer for the topic, and what to do; empty when it answers.
            Nothing else is known then.
    """

    stored: OffsetAndMetadata | None
    bounds: Bounds
    recorded: LastRecorded | None = None
    topic_id: str = ""
    is_truncated: bool = False
    not_older: int | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class StoredOffsetsRead:
    """The answer to `ReadStoredOffsets`.

    Attributes:
        epochs: The partitions, with the epochs of the command.
        found: What is known of each.
    """

    epochs: Mapping[TopicPartition, int]
    found: Mapping[TopicPartition, Found]


@dataclass(frozen=True, slots=True)
class DirectivesRead:
    """The answer to `ReadDirectives`.

    Attributes:
        orders: All orders that people have given for the group, oldest first.
        epoch: The epoch of the command: the partitions up to it were assigned before the orders
            were read.
    """

    orders: tuple[Directive, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class RunsRead:
    """The answer to `ReadRuns`.

    Attributes:
        batch_ids: The batches that were asked for.
        runs: All their runs, and all live runs of the group if `with_live`, oldest first.
        with_live: Whether all live runs of the group are among them.
        look: The look of the command, or None for runs that were read just now. An answer to an
            earlier look is ignored.
        is_own: Whether a worker tells of its own batches: that says nothing about other runs.
    """

    batch_ids: frozenset[str]
    runs: tuple[RunSeen, ...]
    with_live: bool = False
    look: int | None = None
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class DeadRunEnded:
    """The answer to `EndDeadRuns`, one for each run.

    Its Spark work has been stopped, and Dagster shows it as ended if it is still there.
    """

    run_id: str


@dataclass(frozen=True, slots=True)
class BoundsRead:
    """The answer to `ReadBounds`.

    Attributes:
        bounds: The offsets that Kafka has of partitions.
        refused: The partitions for which Kafka refuses to answer.
    """

    bounds: Mapping[TopicPartition, Bounds]
    refused: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class OffsetsWritten:
    """The answer to `WriteOffsets`: which writes were done, and why the others were not.

    Attributes:
        written: What Kafka stores by now.
        failed: What may be tried again, or is out of date.
        refused: What waiting does not mend, each with the reason and what to do.
    """

    written: tuple[OffsetWrite, ...]
    failed: tuple[tuple[OffsetWrite, WriteFailure], ...] = ()
    refused: tuple[tuple[OffsetWrite, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CommitRecorded:
    """The answer to `RecordCommit`."""

    record: RecordCommit


@dataclass(frozen=True, slots=True)
class DeadLetterStored:
    """The answer to `StoreDeadLetter`: all replicas that the topic asks for have the record."""

    letter: StoreDeadLetter


@dataclass(frozen=True, slots=True)
class DeadLetterFailed:
    """The other answer to `StoreDeadLetter`: the record may be there or not.

    `reason` says what to do.
    """

    letter: StoreDeadLetter
    reason: str


Event: TypeAlias = (
    AssignmentEvent
    | LeaveRequested
    | TickArrived
    | TimePassed
    | StoredOffsetsRead
    | DirectivesRead
    | RunsRead
    | DeadRunEnded
    | BoundsRead
    | OffsetsWritten
    | CommitRecorded
    | DeadLetterStored
    | DeadLetterFailed
)

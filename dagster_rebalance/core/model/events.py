"""Events: what happened in Kafka, in Dagster and over time, as input of the engine.

Events are named in the past tense and carry facts only. A shell delivers each event once, in the
order of occurrence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.commands import OffsetWrite, RecordCommit, StoreDeadLetter
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import (
        Bounds,
        OffsetAndMetadata,
        OffsetRange,
        TopicPartition,
    )
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot


class LostReason(enum.Enum):
    """Why partitions were lost."""

    SESSION = "session"
    """The client detected that its session expired, or that `poll` was not called in time."""
    FENCED = "fenced"
    """The broker fenced the member. The client reports this late, and not during a hold; a probe or
    a commit detected it."""
    SUPERSEDED = "superseded"
    """Another rebalance ended a hold without a callback, and assigned the held partitions to
    another member."""
    EXPIRED = "expired"
    """A hold was not released within `max.poll.interval.ms`, and the member ended its
    membership."""
    FAILED = "failed"
    """A step of the member failed unexpectedly, and the member ended its membership."""


class WriteFailure(enum.Enum):
    """Why an offset was not written. Fencing is reported as lost partitions instead."""

    CHANGED = "changed"
    """Kafka stores another offset than this member last read or wrote. Nothing was written."""
    RETRIABLE = "retriable"
    """The request failed temporarily, or its response did not arrive."""


@dataclass(frozen=True, slots=True)
class PartitionsAssigned:
    """Partitions, possibly none, were added to the assignment."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """Kafka requested a revoke. The partitions stay assigned while they are held."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PartitionsRevoked:
    """A revoke was completed. The partitions are no longer assigned."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PartitionsLost:
    """Partitions were lost. Nothing may be committed for them any more."""

    partitions: tuple[TopicPartition, ...]
    reason: LostReason = LostReason.SESSION


AssignmentEvent: TypeAlias = (
    PartitionsAssigned | RevokeRequested | PartitionsRevoked | PartitionsLost
)


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The member has to release all partitions and leave the group.

    A later request can only shorten the limit.

    Attributes:
        reason: The reason, as the end of a sentence.
        limit_s: Maximum duration; None for the limit of a hold.
        has_successor: Whether a newer process on the same Dagster instance has joined and can adopt
            live runs.
    """

    reason: str
    limit_s: float | None = None
    has_successor: bool = False


@dataclass(frozen=True, slots=True)
class TickArrived:
    """Dagster evaluated the sensor and can start runs."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed without another event."""


class LastRecorded(NamedTuple):
    """The last commit of a partition that Dagster has recorded.

    Attributes:
        until: The next offset of the commit.
        run_id: The run of the commit; empty if the record names none.
    """

    until: int
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class PartitionLookup:
    """State of a partition in Kafka and Dagster, read on assignment.

    Attributes:
        stored: The committed offset, or None.
        bounds: `ANY_BOUNDS` if the leader does not answer.
        topic_id: Empty if unknown.
        is_truncated: Whether the log lost records before a committed or claimed offset, even if
            newer records have these offsets now (`recovery.position_to_verify`, verified by the
            leader).
        offset_at_start_time: The first offset at or after the start time of the group. None if
            there is none, or if it is not needed.
        refused: Why Kafka refuses to answer for the topic, and what to do. The other fields are
            then unknown.
    """

    stored: OffsetAndMetadata | None
    bounds: Bounds
    recorded: LastRecorded | None = None
    topic_id: str = ""
    is_truncated: bool = False
    offset_at_start_time: int | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class StoredOffsetsRead:
    """Answer to `ReadStoredOffsets`."""

    epochs: Mapping[TopicPartition, int]
    lookups: Mapping[TopicPartition, PartitionLookup]


@dataclass(frozen=True, slots=True)
class DirectivesRead:
    """Answer to `ReadDirectives`.

    Attributes:
        directives: All directives of the group, oldest first.
        epoch: Partitions up to this epoch were assigned before the read.
    """

    directives: tuple[Directive, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class RunsRead:
    """Answer to `ReadRuns`.

    Attributes:
        runs: All runs of the batches, and all live runs of the group if `with_live`, oldest first.
        sequence: The sequence of the command; an answer to an earlier command is ignored. None for
            runs that were read without a command, which are never ignored.
        is_from_worker: Whether the worker of a streaming run reports its own batches only.
    """

    batch_ids: frozenset[str]
    runs: tuple[RunSnapshot, ...]
    with_live: bool = False
    sequence: int | None = None
    is_from_worker: bool = False


@dataclass(frozen=True, slots=True)
class DeadRunEnded:
    """Answer to `EndDeadRuns`, one for each run.

    The external work of the run is stopped. Dagster shows the run as ended, unless it was deleted.
    """

    run_id: str


@dataclass(frozen=True, slots=True)
class BoundsRead:
    """Answer to `ReadBounds`.

    Attributes:
        refused: The partitions for which Kafka refuses to answer.
    """

    bounds: Mapping[TopicPartition, Bounds]
    refused: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class RangesScanned:
    """Answer to `ScanRanges`, for some of its ranges.

    Attributes:
        number: The number of the scan.
        results: Each range, or its first part if time ran out, and whether it has a record that the
            filter processes. A range that could not be read counts as one that has.
    """

    number: int
    results: tuple[tuple[OffsetRange, bool], ...]


@dataclass(frozen=True, slots=True)
class OffsetsWritten:
    """Answer to `WriteOffsets`.

    Attributes:
        written: The writes that Kafka stores.
        refused: The writes that fail until an operator acts, with the reason and what to do.
    """

    written: tuple[OffsetWrite, ...]
    failed: tuple[tuple[OffsetWrite, WriteFailure], ...] = ()
    refused: tuple[tuple[OffsetWrite, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CommitsRecorded:
    """Answer to `RecordCommits`."""

    records: tuple[RecordCommit, ...]


@dataclass(frozen=True, slots=True)
class DeadLetterStored:
    """Answer to `StoreDeadLetter`: the record is acknowledged as the topic requires."""

    letter: StoreDeadLetter


@dataclass(frozen=True, slots=True)
class DeadLetterFailed:
    """Answer to `StoreDeadLetter`: the record may or may not be stored.

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
    | RangesScanned
    | OffsetsWritten
    | CommitsRecorded
    | DeadLetterStored
    | DeadLetterFailed
)

"""What a group member has to tell, in the order in which it happened.

Owns the words only. Revoked, lost and superseded are three things: a requested revoke is still ours to work on and to release, a lost
partition is not, and a superseded hold is one that the client gave away without a word.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.errors import BrokerError
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition


class LostReason(enum.Enum):
    """Why partitions were taken away."""

    SESSION = "session"
    """The client noticed it by itself: its session ended, or `poll` was not called for too long."""
    FENCED = "fenced"
    """The broker threw the member out. The client does not tell during a hold, and late otherwise; a probe or a commit found it."""
    SUPERSEDED = "superseded"
    """Another rebalance overtook a hold, without a callback: the held partitions were given to somebody else."""
    EXPIRED = "expired"
    """A hold was not released within `max.poll.interval.ms`, and the member gave up its membership by itself."""


@dataclass(frozen=True, slots=True)
class PartitionsAssigned:
    """Partitions were added to the assignment; possibly none."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """Partitions have to be given up. They stay assigned until `release`."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class HoldSuperseded:
    """A hold ended without a release. The `PartitionsLost` that follows names these partitions again, with the others of the member."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PartitionsLost:
    """Partitions were taken away: all that the member had, each once. Nothing may be committed for them any more."""

    partitions: tuple[TopicPartition, ...]
    reason: LostReason


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The client reported an error that a person or the caller must know. The membership goes on if it can."""

    error: BrokerError


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """A callback of the user's settings (`on_commit`, `stats_cb`, `error_cb`, `throttle_cb`) raised. Nothing was interrupted by it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of one commit request.

    Attributes:
        committed: The partitions whose offset and metadata are stored.
        failed: The others, each with its error.
    """

    committed: frozenset[TopicPartition]
    failed: Mapping[TopicPartition, BrokerError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommitAnswered:
    """What became of a commit that was not waited for; `ticket` is the number that `commit_async` gave."""

    ticket: int
    result: CommitResult


MemberEvent: TypeAlias = (
    "PartitionsAssigned | RevokeRequested | HoldSuperseded | PartitionsLost | RequestFailed | CallbackFailed | CommitAnswered"
)
Offsets: TypeAlias = "Mapping[TopicPartition, OffsetAndMetadata]"

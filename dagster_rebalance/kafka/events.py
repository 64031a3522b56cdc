"""These events report a member's news other than changes of its assignment.

The events of the assignment are those of `core.model.events`; `MemberEvent` has both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.events import PartitionsAssigned, PartitionsLost, RevokeRequested

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The client reported an error that a person or the caller must know.

    The membership goes on if it can.
    """

    error: BrokerError | ConfigurationError


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """A callback of the user's settings raised an exception, which interrupted nothing.

    These callbacks are `on_commit`, `stats_cb`, `error_cb` and `throttle_cb`.
    """

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
    """A commit made with `commit_async` has its result; `ticket` is the number it returned."""

    ticket: int
    result: CommitResult


MemberEvent: TypeAlias = (
    PartitionsAssigned
    | RevokeRequested
    | PartitionsLost
    | RequestFailed
    | CallbackFailed
    | CommitAnswered
)
Offsets: TypeAlias = "Mapping[TopicPartition, OffsetAndMetadata]"

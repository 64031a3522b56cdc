"""Events that a group member reports to the consumer.

`core.model.events` has the events of the assignment; `MemberEvent` is the union of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.errors import PartitionLostError, RebalanceInProgressError
from dagster_rebalance.core.model.events import PartitionsAssigned, PartitionsLost, RevokeRequested

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The client reported an error that the caller of `poll` must see.

    The membership continues if it can.
    """

    error: BrokerError | ConfigurationError


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """`on_commit`, `stats_cb`, `error_cb` or `throttle_cb` of the settings raised an exception.

    The exception interrupted nothing.
    """

    error: Exception


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Result of one commit request.

    Attributes:
        committed: The partitions whose offset and metadata are stored.
        failed: The other partitions, each with its error.
    """

    committed: frozenset[TopicPartition]
    failed: Mapping[TopicPartition, BrokerError] = field(default_factory=dict)

    def worst_error(self) -> BrokerError | None:
        """Return the most severe error, which names every failed partition; None without one."""
        if not self.failed:
            return None
        worst = min(self.failed.values(), key=_severity)
        worst.partitions = {
            tp: reason for error in self.failed.values() for tp, reason in error.partitions.items()
        }
        return worst


@dataclass(frozen=True, slots=True)
class CommitAnswered:
    """A commit made with `commit_async`, which returned `ticket`, has its result."""

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


def _severity(error: BrokerError) -> int:
    match error:
        case PartitionLostError():
            return 0
        case RebalanceInProgressError():
            return 2
        case _:
            return 1

"""What a group member has to tell beside the changes of its assignment, which are events of the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.errors import BrokerError
    from dagster_rebalance.core.events import PartitionsAssigned, PartitionsLost, RevokeRequested
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition


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


MemberEvent: TypeAlias = "PartitionsAssigned | RevokeRequested | PartitionsLost | RequestFailed | CallbackFailed | CommitAnswered"
Offsets: TypeAlias = "Mapping[TopicPartition, OffsetAndMetadata]"

"""Ports of the Kafka side: the group member with its events, and the queries to the cluster.

One test suite holds the real member, librdkafka's mock cluster and the fake group in `testing` to
this contract. Offsets are *next* offsets to be read. Queries raise `BrokerError` when the broker
does not answer in time, or refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dagster_rebalance.core.model.errors import PartitionLostError, RebalanceInProgressError
from dagster_rebalance.core.model.events import PartitionsAssigned, PartitionsLost, RevokeRequested

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
    from dagster_rebalance.core.model.offsets import LogPosition, OffsetAndMetadata, TopicPartition


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The client reported an error that the caller of `poll` must see.

    The membership continues if the client can continue.
    """

    error: BrokerError | ConfigurationError


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """`on_commit`, `stats_cb`, `error_cb` or `throttle_cb` of the settings raised an exception.

    The exception did not interrupt the client.
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
    """Result of a commit by `commit_async`, which returned `ticket`."""

    ticket: int
    result: CommitResult


GroupEvent: TypeAlias = (
    PartitionsAssigned
    | RevokeRequested
    | PartitionsLost
    | RequestFailed
    | CallbackFailed
    | CommitAnswered
)
"""An event of the member; `core.model.events` has those of the assignment."""
Offsets: TypeAlias = "Mapping[TopicPartition, OffsetAndMetadata]"
"""Next offsets by partition."""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """Leader and replicas of a partition, as broker ids."""

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffsetAndTimestamp:
    """Offset and timestamp of a record, in milliseconds."""

    offset: int
    timestamp: int


class GroupMember(Protocol):
    """One member of a consumer group, owned by one thread."""

    @property
    def member_id(self) -> str:
        """The id of this member in the group.

        Before the member joins, the id is empty in the classic protocol. In the consumer protocol,
        members choose their ids.
        """

    @property
    def held(self) -> frozenset[TopicPartition]:
        """The partitions of the requested revoke that is not released yet."""

    @property
    def has_news(self) -> bool:
        """Whether a poll would return events."""

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the owned partitions, including held ones."""

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Subscribe to topics; during a hold this takes effect after the release."""

    def unsubscribe(self, timeout_s: float) -> None:
        """Leave the group within `timeout_s` and give up held partitions."""

    def poll(self, timeout_s: float) -> list[GroupEvent]:
        """Take part in the group for at most `timeout_s`; return the events in their order.

        Return early on an event, and after `wake`.

        Raises:
            IllegalStateError: Called recursively.
        """

    def wake(self) -> None:
        """Let the poll that waits, or else the next one, return at once.

        Any thread and a signal handler may call it.
        """

    def release(self) -> None:
        """Complete the held revoke, for all of its partitions.

        Raises:
            IllegalStateError: No partition is held.
        """

    def commit(self, offsets: Offsets) -> CommitResult:
        """Store next offsets and metadata, in as few requests as the broker can store.

        Each partition has its own result. A partition that is not assigned fails without a request.
        """

    def commit_async(self, offsets: Offsets) -> int:
        """Store like `commit`, without waiting: `poll` returns a `CommitAnswered`.

        Commits reach the broker in the order of the calls. Commits made during a request are merged
        into the next request, with the last offset of each partition.
        `commit`, `release`, `unsubscribe` and `close` wait until no commit is in flight.

        Returns:
            The ticket of the `CommitAnswered`.
        """

    def settle(self, timeout_s: float) -> bool:
        """Wait until no commit is in flight; return False if the timeout expires first.

        The next `poll` returns the events that arrive during the wait.
        """

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offset of each partition, or None without one."""

    def metrics(self) -> dict[str, Any]:
        """Return the client's latest statistics; empty while they are off or without a client."""

    def group_metadata(self) -> object:
        """Return the opaque object with which a transactional producer commits offsets.

        Return None without a client.

        Raises:
            BrokerError: The client did not answer, or partitions were lost and no poll has reported
                the loss.
        """

    def close(self, timeout_s: float) -> None:
        """Leave the group within `timeout_s`; further calls have no effect."""


class ClusterView(Protocol):
    """Read-only queries to the cluster; each makes one request for all partitions."""

    def beginning_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the first offsets of the logs."""

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the offsets of the next records."""

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        """Return the end offsets with the leader epochs in the responses."""

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the offsets of the next records, including open transactions."""

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        """Return whether logs were truncated before positions that they had reached (KIP-320).

        The result omits partitions whose leaders do not answer in time.
        """

    def topic_ids(self, topics: Collection[str], timeout_s: float = 10.0) -> dict[str, str]:
        """Return the known ids of topics; a recreated topic has another id."""

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Request topic ids; the returned function returns them, or None before the response."""

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after each time in milliseconds, or None without one."""

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """Return all topics that the principal may see."""

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """Return the partitions of a topic."""

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        """Check the brokers, the credentials and the topics."""


def _severity(error: BrokerError) -> int:
    match error:
        case PartitionLostError():
            return 0
        case RebalanceInProgressError():
            return 2
        case _:
            return 1

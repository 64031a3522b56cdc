"""These ports say what a group member must do and what the cluster must answer.

The contract binds whoever plays them.

Owns the contract that the real member, librdkafka's mock cluster and the fake group in `testing`
share; one test suite checks all three. An offset is always the *next* offset to be read. Nothing
here may mention the Kafka client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.offsets import LogPosition, OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.events import CommitResult, MemberEvent


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """Where a partition lives: broker ids."""

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffsetAndTimestamp:
    """A record found by its time, in milliseconds."""

    offset: int
    timestamp: int


class GroupMember(Protocol):
    """One member of a consumer group, owned by one thread."""

    @property
    def member_id(self) -> str:
        """The id the group knows this member by.

        Before it joined it is empty in classic; in the consumer protocol members choose it.
        """

    @property
    def held(self) -> frozenset[TopicPartition]:
        """The partitions of the revoke that was requested and is not released yet."""

    def assignment(self) -> frozenset[TopicPartition]:
        """What this member owns, held partitions included."""

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part in the group for these topics.

        During a hold it takes effect after the release.
        """

    def unsubscribe(self, timeout_s: float) -> None:
        """Leave the group within `timeout_s`; what is still held goes with it."""

    def poll(self, timeout_s: float) -> list[MemberEvent]:
        """Take part in the group for at most `timeout_s`, and tell what happened, in its order.

        Returns early when something did, and after `wake`.

        Raises:
            IllegalStateError: Called from inside itself.
        """

    def wake(self) -> None:
        """Let the poll that waits, or else the next one, return at once.

        Any thread and a signal handler may call it.
        """

    def release(self) -> None:
        """Let the group complete the held revoke, for all of its partitions at once.

        Raises:
            IllegalStateError: Nothing is held.
        """

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store next offsets and metadata, in as few requests as the broker can store.

        Each partition has its own result. One that is not assigned fails without a request.
        """

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Store like `commit`, without waiting: `poll` tells the answer with a `CommitAnswered`.

        Commits reach the broker in the order of the calls. Commits that the caller makes while
        another is on its way go out with the next request; of several offsets for a partition, the
        broker stores the last one. `commit`, `release`, `unsubscribe` and `close` wait until
        nothing is on its way.

        Returns:
            The number of the `CommitAnswered`.
        """

    def settle(self, timeout_s: float) -> bool:
        """Wait until no commit is on its way. What happens meanwhile is told by the next `poll`.

        Returns:
            Whether that came about in time.
        """

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where it has nothing.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """

    def metrics(self) -> dict[str, Any]:
        """Return the client's latest statistics.

        There are none while they are off, and from members without a client.
        """

    def group_metadata(self) -> object:
        """Return the object with which a transactional producer commits this member's offsets.

        It is opaque, and None from members without a client.

        Raises:
            BrokerError: The client did not answer, or partitions were lost, which no poll has told
                yet.
        """

    def close(self, timeout_s: float) -> None:
        """Leave the group within `timeout_s`; may be called again."""


class ClusterView(Protocol):
    """Read-only questions to the cluster.

    Each raises `BrokerError` when it gets no answer in time, or is refused.
    """

    def beginning_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The first offset that exists, for all partitions in one request."""

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The offset that the next record will get, for all partitions in one request."""

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        """The end offsets, with the leader epochs in which the leaders told them."""

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The offset that the next record will get, also behind an open transaction."""

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        """Tell whether the log no longer reaches a position that it reached in its leader epoch.

        KIP-320 describes the question. The answer lacks partitions whose leaders do not answer in
        time.
        """

    def topic_ids(self, topics: Collection[str], timeout_s: float = 10.0) -> dict[str, str]:
        """Return the known ids of topics; a topic that is made again gets another one."""

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Ask for the ids of topics without waiting.

        The function that is returned has them, or None before the answer.
        """

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Find the first record at or after a time in milliseconds; None where there is none."""

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """All topics that the principal may see."""

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """The partitions of a topic."""

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        """Find out now what would go wrong later: brokers, credentials, topics."""

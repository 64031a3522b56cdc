"""What the consumer and the view in a rebalance callback offer alike: offsets, positions, questions to the cluster.

Owns what counts as assigned for the API. Must never take part in the group: that is poll's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dagster_rebalance.consumer.caller_commits import CallerCommits, worst_error
from dagster_rebalance.core.errors import BrokerError, IllegalStateError, UnsupportedOperationError
from dagster_rebalance.core.partition import OffsetAndMetadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.consumer.caller_commits import CommitCallback
    from dagster_rebalance.consumer.events import CommitResult
    from dagster_rebalance.consumer.fetcher import Fetcher
    from dagster_rebalance.consumer.port import ClusterView, GroupMember, OffsetAndTimestamp, PartitionInfo
    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.partition import TopicPartition
    from dagster_rebalance.core.pausing import PauseMarks

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ConsumerGroupMetadata:
    """Who a group knows a consumer as.

    Attributes:
        group_id: The consumer group.
        member_id: The id of the member.
        client: The client's own object, for `confluent_kafka.Producer.send_offsets_to_transaction`. The generation is in it, and is not
            revealed.
    """

    group_id: str
    member_id: str
    client: object


class ConsumerOperations:
    """The operations that are safe at any time, in a callback too.

    Args:
        member: The member of the group.
        cluster: Answers what is not about the group.
        fetcher: Reads records; None for a consumer that reads none.
        settings: Validated settings; the group and where reading starts are used.
        carried: The pause marks that commits carry to the next owner, if they do.
    """

    def __init__(
        self, member: GroupMember, cluster: ClusterView, fetcher: Fetcher | None, settings: Settings, carried: PauseMarks | None
    ) -> None:
        self._member = member
        self._cluster = cluster
        self._fetcher = fetcher
        self._group_id = settings.group_id
        self._offset_reset = settings.offset_reset
        self._assigned: set[TopicPartition] = set()
        self._commits = CallerCommits(member, self._assigned, carried)

    @property
    def member_id(self) -> str:
        """The id the group knows this member by; empty before it joined."""
        return self._member.member_id

    def assignment(self) -> frozenset[TopicPartition]:
        """What is assigned, partitions to be revoked included."""
        return frozenset(self._assigned)

    def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Commit next offsets and metadata in one request, and tell what became of each partition.

        What is not assigned is refused with `PartitionLostError`, and the broker is not asked. Returns when the outcome is known, which
        takes the client 46 s when the brokers are gone: a commit that nobody waits for any more could overwrite the next owner's.
        """
        return self._commits.commit(offsets)

    def commit_sync(self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None = None, timeout_s: float | None = None) -> None:
        """Commit next offsets and metadata in one request; without any, the current position of every partition that was read.

        Args:
            offsets: The next offset of each partition.
            timeout_s: How long to wait for the outcome; by default until the client gives up by itself (46 s without a broker). A commit
                that is not answered in time may yet be stored, before the partition is released.

        Raises:
            PartitionLostError: A partition is not ours any more. Commit nothing for it.
            RebalanceInProgressError: Still ours: poll, then commit again (KIP-429).
            BrokerError: The broker could not be reached, or refused. `partitions` names what failed; the others are committed.
        """
        wanted = self._positions() if offsets is None else offsets
        error = worst_error(self._commits.commit(wanted, timeout_s))
        if error is not None:
            raise error

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None = None, callback: CommitCallback | None = None
    ) -> None:
        """Send what `commit_sync` would commit, and go on. Commits are sent in the order of the calls.

        Args:
            offsets: The next offset of each partition; without any, the current position of every partition that was read.
            callback: Called in a later `poll`, `unsubscribe` or `close` with the offsets and the error that `commit_sync` would raise, or
                None. Without a callback, an error is logged. No partition is released before the commits for it are answered.
        """
        self._commits.commit_later(self._positions() if offsets is None else offsets, callback)

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed for any partitions; None where it has nothing."""
        return self._commits.committed(partitions, timeout_s)

    def position(self, partition: TopicPartition, timeout_s: float = _TIMEOUT_S) -> int:
        """The next offset that `poll` returns; without a fetcher, where reading would start.

        Raises:
            IllegalStateError: The partition is not assigned.
            BrokerError: There is no committed offset and `auto.offset.reset` forbids to choose one.
        """
        self._check_assigned("position", [partition])
        reached = self._fetcher.position(partition) if self._fetcher else None
        if reached is not None and reached.offset is not None:
            return reached.offset
        start = reached.start if reached is not None else "committed"
        stored = self._member.committed([partition], timeout_s)[partition] if start == "committed" else None
        if stored is not None:
            return stored.offset
        reset = self._offset_reset if start == "committed" else start
        if reset == "error":
            msg = f"{partition} has no committed offset and 'auto.offset.reset' forbids to choose one: seek, or commit an offset"
            raise BrokerError(msg)
        ask = self._cluster.beginning_offsets if reset == "earliest" else self._cluster.end_offsets
        return ask([partition], timeout_s)[partition]

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Read on from another offset.

        Raises:
            IllegalStateError: The partition is not assigned, or this consumer reads no records.
        """
        self._reading().seek(partition, offset.offset if isinstance(offset, OffsetAndMetadata) else offset)

    def seek_to_beginning(self, partitions: Collection[TopicPartition]) -> None:
        """Read on from the first offset that exists; of all that is assigned when none is given."""
        for tp in partitions or self.assignment():
            self._reading().seek(tp, "earliest")

    def seek_to_end(self, partitions: Collection[TopicPartition]) -> None:
        """Read on from the next record that is produced; of all that is assigned when none is given."""
        for tp in partitions or self.assignment():
            self._reading().seek(tp, "latest")

    def beginning_offsets(self, partitions: Collection[TopicPartition], timeout_s: float = _TIMEOUT_S) -> dict[TopicPartition, int]:
        """The first offsets that exist, of any partitions, in one request."""
        return self._cluster.beginning_offsets(partitions, timeout_s)

    def end_offsets(self, partitions: Collection[TopicPartition], timeout_s: float = _TIMEOUT_S) -> dict[TopicPartition, int]:
        """The offsets that the next records will get, of any partitions, in one request.

        With `isolation.level` `read_committed`, the default, it is the first offset of the oldest open transaction.
        """
        return self._cluster.end_offsets(partitions, timeout_s)

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first records at or after a time in milliseconds; None where there is none."""
        return self._cluster.offsets_for_times(timestamps, timeout_s)

    def partitions_for(self, topic: str, timeout_s: float = _TIMEOUT_S) -> list[PartitionInfo]:
        """The partitions of a topic.

        Raises:
            BrokerError: There is no such topic, or the principal may not see it.
        """
        return self._cluster.partitions_for(topic, timeout_s)

    def list_topics(self, timeout_s: float = _TIMEOUT_S) -> dict[str, list[PartitionInfo]]:
        """All topics that the principal may see."""
        return self._cluster.list_topics(timeout_s)

    def current_lag(self, partition: TopicPartition) -> int | None:
        """How many offsets are left to read, as far as the last fetch told; None while that is not known, and without a fetcher.

        It is counted to the high watermark: librdkafka does not tell the last stable offset, which Kafka's own consumer counts to when it
        reads committed records only.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        self._check_assigned("current_lag", [partition])
        return self._fetcher.lag(partition) if self._fetcher else None

    def metrics(self) -> dict[str, dict[str, Any]]:
        """The latest statistics of librdkafka: of the `member`, which takes part in the group, and of the `fetcher`, which reads.

        Each is empty before the first `statistics.interval.ms` is over, and while that setting is off: the default, but for a member in the
        classic protocol.
        """
        return {"member": self._member.metrics(), "fetcher": self._fetcher.metrics() if self._fetcher else {}}

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Who the group knows this consumer as, and what a producer needs to commit offsets in a transaction."""
        return ConsumerGroupMetadata(self._group_id, self._member.member_id, self._member.group_metadata())

    def client_instance_id(self, timeout_s: float = _TIMEOUT_S) -> NoReturn:  # noqa: ARG002 - the signature of Kafka's own consumer
        """The id that brokers know the client's telemetry by (KIP-714).

        Raises:
            UnsupportedOperationError: Always: librdkafka has such an id, and tells it to nobody.
        """
        msg = "client_instance_id: confluent-kafka does not reveal the id of a client's telemetry; use member_id, or set 'client.id'"
        raise UnsupportedOperationError(msg)

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        if self._fetcher is None:
            return {}
        reached = {tp: self._fetcher.position(tp).offset for tp in self._assigned}
        return {tp: OffsetAndMetadata(offset) for tp, offset in reached.items() if offset is not None}

    def _reading(self) -> Fetcher:
        if self._fetcher is None:
            msg = "seek on a consumer without a fetcher: it reads no records, so it has no position to move"
            raise IllegalStateError(msg)
        return self._fetcher

    def _check_assigned(self, call: str, partitions: Collection[TopicPartition]) -> None:
        strange = sorted(set(partitions) - self._assigned)
        if strange:
            msg = f"{call} of {strange[0]}: it is not assigned to this consumer"
            raise IllegalStateError(msg)

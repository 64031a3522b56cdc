"""What the consumer and the view in a rebalance callback offer alike: offsets, positions, pauses, questions to the cluster.

Owns the pause marks and what counts as assigned for the API. Must never take part in the group: that is poll's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.consumer.events import CommitResult
from dagster_rebalance.core.errors import BrokerError, IllegalStateError, PartitionLostError, RebalanceInProgressError
from dagster_rebalance.core.partition import OffsetAndMetadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.consumer.fetcher import Fetcher
    from dagster_rebalance.consumer.port import ClusterView, GroupMember, OffsetAndTimestamp, PartitionInfo
    from dagster_rebalance.core.partition import TopicPartition

_TIMEOUT_S = 10.0


class ConsumerOperations:
    """The operations that are safe at any time, in a callback too.

    Args:
        member: The member of the group.
        cluster: Answers what is not about the group.
        fetcher: Reads records; None for a consumer that reads none.
        offset_reset: `earliest`, `latest` or `error`.
    """

    def __init__(self, member: GroupMember, cluster: ClusterView, fetcher: Fetcher | None, offset_reset: str) -> None:
        self._member = member
        self._cluster = cluster
        self._fetcher = fetcher
        self._offset_reset = offset_reset
        self._assigned: set[TopicPartition] = set()
        self._giving_up: frozenset[TopicPartition] = frozenset()
        self._paused: set[TopicPartition] = set()

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
        kept = {tp: offset for tp, offset in offsets.items() if tp in self._assigned}
        result = self._member.commit(kept) if kept else CommitResult(frozenset())
        gone = {
            tp: PartitionLostError(
                f"commit for {tp} refused: it is not assigned any more; stop the work on it", partitions={tp: "not assigned"}
            )
            for tp in offsets
            if tp not in kept
        }
        return CommitResult(result.committed, {**result.failed, **gone})

    def commit_sync(self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None = None) -> None:
        """Commit next offsets and metadata in one request; without any, the current position of every partition that was read.

        Raises:
            PartitionLostError: A partition is not ours any more. Commit nothing for it.
            RebalanceInProgressError: Still ours: poll, then commit again.
            BrokerError: The broker could not be reached, or refused. `partitions` names what failed; the others are committed.
        """
        wanted = self._positions() if offsets is None else offsets
        failed = self.commit_offsets(wanted).failed if wanted else {}
        if failed:
            reasons = {tp: reason for error in failed.values() for tp, reason in error.partitions.items()}
            worst = min(failed.values(), key=_severity)
            worst.partitions = reasons
            raise worst

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed for any partitions; None where it has nothing."""
        return self._member.committed(partitions, timeout_s)

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

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Return no records of these partitions until `resume`, or until they are given up.

        Raises:
            IllegalStateError: One of them is not assigned.
        """
        self._check_assigned("pause", partitions)
        self._paused.update(partitions)
        if self._fetcher:
            self._fetcher.withhold(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Undo a pause. A partition that is to be revoked stays silent.

        Raises:
            IllegalStateError: One of them is not assigned.
        """
        self._check_assigned("resume", partitions)
        self._paused.difference_update(partitions)
        if self._fetcher:
            self._fetcher.resume(set(partitions) - self._giving_up)

    def paused(self) -> frozenset[TopicPartition]:
        """What was paused by `pause`."""
        return frozenset(self._paused)

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


def _severity(error: BrokerError) -> int:
    return 0 if isinstance(error, PartitionLostError) else 2 if isinstance(error, RebalanceInProgressError) else 1

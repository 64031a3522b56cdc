"""The operations that the consumer shares with the consumer of a rebalance callback.

They concern offsets, positions, pauses and queries to the cluster. A caller can pause by partition,
by topic, by pattern, and everything.

Owns what counts as assigned for the API, and which partitions the fetcher is silent about: paused
ones, ones to be revoked, and ones that may be paused without the consumer knowing it yet. None of
these three may undo another. Must never take part in the group: that is poll's.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from dagster_rebalance.core.model.errors import (
    ConfigurationError,
    IllegalStateError,
    UnsupportedOperationError,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.consumer.arguments import (
    given_callback,
    given_names,
    given_offsets,
    given_partition,
    given_partitions,
    given_pattern,
    given_seconds,
    given_target,
    given_times,
)
from dagster_rebalance.kafka.consumer.carried_pauses import CarriedPauses
from dagster_rebalance.kafka.consumer.commits import CallerCommits, worst_error
from dagster_rebalance.kafka.consumer.guard import CallGuard, in_turn
from dagster_rebalance.kafka.consumer.pauses import Pauses
from dagster_rebalance.kafka.reading.start_positions import StartPositions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets, AnyPartition, AnyTimestamps
    from dagster_rebalance.kafka.consumer.commits import CommitCallback
    from dagster_rebalance.kafka.events import CommitResult, MemberEvent
    from dagster_rebalance.kafka.ports import (
        ClusterView,
        GroupMember,
        OffsetAndTimestamp,
        PartitionInfo,
    )
    from dagster_rebalance.kafka.reading.fetcher import Fetcher

_TIMEOUT_S = 10.0
PauseMarksPolicy: TypeAlias = Literal["keep", "clear", "carry"]
"""What becomes of the pause mark of a partition that goes."""


@dataclass(frozen=True, slots=True)
class ConsumerGroupMetadata:
    """Who a group knows a consumer as.

    Attributes:
        group_id: The consumer group.
        member_id: The id of the member.
        client: The client's own object, for `confluent_kafka.Producer.send_offsets_to_transaction`.
            The generation is in it, and is not revealed.
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
        pause_marks: What becomes of the mark of a partition that goes.
        clock: A monotonic clock.

    Raises:
        ConfigurationError: There is no such policy.
    """

    def __init__(
        self,
        member: GroupMember,
        cluster: ClusterView,
        fetcher: Fetcher | None,
        settings: Settings,
        pause_marks: PauseMarksPolicy,
        *,
        clock: Callable[[], float],
    ) -> None:
        if pause_marks not in get_args(PauseMarksPolicy):
            msg = f"pause_marks must be 'keep', 'clear' or 'carry', not '{pause_marks}'"
            raise ConfigurationError(msg)
        self._member = member
        self._cluster = cluster
        self._fetcher = fetcher
        self._group_id = settings.group_id
        self._starts = StartPositions(member, cluster, settings.offset_reset)
        self._turn = CallGuard()
        self._assigned: set[TopicPartition] = set()
        self._told: deque[MemberEvent] = deque()
        self._clock = clock
        self._marks = Pauses()
        carries_marks = pause_marks == "carry"
        self._keeps_marks = pause_marks == "keep"
        self._commits = CallerCommits(
            member, self._assigned, self._told, self._marks if carries_marks else None
        )
        self._carried = (
            CarriedPauses(member, self._commits, self._marks, self.position, clock)
            if carries_marks
            else None
        )
        self._revokes_all = settings.is_eager
        self._leaving_marks: set[TopicPartition] = set()
        self._subscription: Collection[str] | re.Pattern[str] = ()
        self._revoking: frozenset[TopicPartition] = frozenset()

    @property
    def member_id(self) -> str:
        """The id the group knows this member by; empty before it joined."""
        return self._member.member_id

    @in_turn
    def assignment(self) -> frozenset[TopicPartition]:
        """What is assigned, partitions to be revoked included."""
        return frozenset(self._assigned)

    @in_turn
    def commit_offsets(self, offsets: AnyOffsets, timeout_s: float | None = None) -> CommitResult:
        """Commit next offsets and metadata in one request, and tell what became of each partition.

        What is not assigned is refused with `PartitionLostError`, and the broker is not asked.

        Args:
            offsets: The next offset of each partition.
            timeout_s: How long to wait for the outcome, as for `commit_sync`; what is not answered
                in time counts as failed.
        """
        return self._commits.commit(
            given_offsets("commit_offsets", offsets), _limit("commit_offsets", timeout_s)
        )

    @in_turn
    def commit_sync(
        self, offsets: AnyOffsets | None = None, timeout_s: float | None = None
    ) -> None:
        """Commit next offsets and metadata in one request.

        Without offsets, commit the current position of every partition that was read.

        Args:
            offsets: The next offset of each partition.
            timeout_s: How long to wait for the outcome; by default until the client fails it by
                itself: 46 s without a broker, and in the classic protocol as long as another member
                holds a revoke that this one waits for in a rebalance. A commit that is not answered
                in time may yet be stored, before the partition is released.

        Raises:
            PartitionLostError: A partition is not ours any more. Commit nothing for it.
            RebalanceInProgressError: Still ours: poll, then commit again (KIP-429).
            BrokerError: The broker could not be reached, or refused. `partitions` names what
                failed; the others are committed.
        """
        wanted = self._positions() if offsets is None else given_offsets("commit_sync", offsets)
        error = worst_error(self._commits.commit(wanted, _limit("commit_sync", timeout_s)))
        if error is not None:
            raise error

    @in_turn
    def commit_async(
        self, offsets: AnyOffsets | None = None, callback: CommitCallback | None = None
    ) -> None:
        """Send what `commit_sync` would commit, and go on.

        Commits are sent in the order of the calls.

        Args:
            offsets: The next offset of each partition; without any, the current position of every
                partition that was read.
            callback: Called in a later `poll`, `unsubscribe` or `close` with the offsets and the
                error that `commit_sync` would raise, or None. Without a callback, an error is
                logged. No partition is released before the commits for it are answered.
        """
        wanted = self._positions() if offsets is None else given_offsets("commit_async", offsets)
        self._commits.commit_later(wanted, given_callback("commit_async", callback))

    @in_turn
    def committed(
        self, partitions: Iterable[AnyPartition], timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed for any partitions; None where it has nothing."""
        return self._commits.committed(
            given_partitions("committed", partitions), given_seconds("committed", timeout_s)
        )

    @in_turn
    def position(self, partition: AnyPartition, timeout_s: float = _TIMEOUT_S) -> int:
        """The next offset that `poll` returns; without a fetcher, where reading would start.

        Raises:
            IllegalStateError: The partition is not assigned.
            BrokerError: There is no committed offset and `auto.offset.reset` forbids to choose one.
        """
        tp, limit_s = given_partition("position", partition), given_seconds("position", timeout_s)
        self._check_assigned("position", [tp])
        at = self._fetcher.position(tp) if self._fetcher else None
        if at is not None and at.offset is not None:
            return at.offset
        found, problem = self._starts.find({tp: at.start if at else "committed"}, limit_s)
        if problem is not None:
            raise problem
        if self._fetcher:
            self._fetcher.pin(tp, found[tp].offset)
        return found[tp].offset

    @in_turn
    def seek(self, partition: AnyPartition, offset: int | OffsetAndMetadata | None = None) -> None:
        """Read on from another offset; a partition of confluent-kafka's may bring it along.

        Raises:
            IllegalStateError: The partition is not assigned, Kafka has no such offset, or this
                consumer reads no records.
        """
        target = given_target("seek", partition, offset)
        self._reading().seek(given_partition("seek", partition), target)

    @in_turn
    def seek_to_beginning(self, partitions: Iterable[AnyPartition]) -> None:
        """Read on from the first offset that exists; of all that is assigned when none is given."""
        for tp in given_partitions("seek_to_beginning", partitions) or self.assignment():
            self._reading().seek(tp, "earliest")

    @in_turn
    def seek_to_end(self, partitions: Iterable[AnyPartition]) -> None:
        """Read on from the next record that is produced.

        Without partitions, the call covers all that is assigned.
        """
        for tp in given_partitions("seek_to_end", partitions) or self.assignment():
            self._reading().seek(tp, "latest")

    @in_turn
    def beginning_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """The first offsets that exist, of any partitions, in one request."""
        return self._cluster.beginning_offsets(
            given_partitions("beginning_offsets", partitions),
            given_seconds("beginning_offsets", timeout_s),
        )

    @in_turn
    def end_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """The offsets that the next records will get, of any partitions, in one request.

        With `isolation.level` `read_committed`, the default, it is the first offset of the oldest
        open transaction.
        """
        return self._cluster.end_offsets(
            given_partitions("end_offsets", partitions), given_seconds("end_offsets", timeout_s)
        )

    @in_turn
    def offsets_for_times(
        self, timestamps: AnyTimestamps, timeout_s: float = _TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first records at or after a time in milliseconds; None where there is none."""
        return self._cluster.offsets_for_times(
            given_times("offsets_for_times", timestamps),
            given_seconds("offsets_for_times", timeout_s),
        )

    @in_turn
    def partitions_for(self, topic: str, timeout_s: float = _TIMEOUT_S) -> list[PartitionInfo]:
        """The partitions of a topic.

        Raises:
            BrokerError: There is no such topic, or the principal may not see it.
        """
        return self._cluster.partitions_for(topic, given_seconds("partitions_for", timeout_s))

    @in_turn
    def list_topics(self, timeout_s: float = _TIMEOUT_S) -> dict[str, list[PartitionInfo]]:
        """All topics that the principal may see."""
        return self._cluster.list_topics(given_seconds("list_topics", timeout_s))

    @in_turn
    def current_lag(self, partition: AnyPartition) -> int | None:
        """Return the number of offsets left to read, as far as the last fetch told.

        Return None while the number is not known, and without a fetcher.

        The lag counts to the high watermark: librdkafka does not tell the last stable offset, which
        Kafka's own consumer counts to when it reads committed records only.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        tp = given_partition("current_lag", partition)
        self._check_assigned("current_lag", [tp])
        return self._fetcher.lag(tp) if self._fetcher else None

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return the latest statistics of librdkafka.

        The `member` takes part in the group, and the `fetcher` reads. The statistics of each are
        empty before the first `statistics.interval.ms` is over, and while that setting is off,
        which is the default.
        """
        return {
            "member": self._member.metrics(),
            "fetcher": self._fetcher.metrics() if self._fetcher else {},
        }

    @in_turn
    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return the identity with which a producer commits offsets in a transaction.

        The group knows this consumer by this identity.

        Ask for it before each `send_offsets_to_transaction`: after a loss the consumer is another
        member.

        Raises:
            BrokerError: The client did not answer, or partitions were lost, which no poll has told
                yet.
            IllegalStateError: The consumer carries pause marks, in commits that a transaction could
                not be told from.
        """
        if self._carried:
            msg = (
                "group_metadata with pause_marks='carry': a mark is stored by committing the last "
                "offset again, which would undo "
                "what a transaction has committed meanwhile; use pause_marks='keep' or 'clear'"
            )
            raise IllegalStateError(msg)
        return ConsumerGroupMetadata(
            self._group_id, self._member.member_id, self._member.group_metadata()
        )

    def client_instance_id(self, timeout_s: float = _TIMEOUT_S) -> NoReturn:  # noqa: ARG002 - the signature of Kafka's own consumer
        """The id that brokers know the client's telemetry by (KIP-714).

        Raises:
            UnsupportedOperationError: Always: librdkafka has such an id, and tells it to nobody.
        """
        msg = (
            "client_instance_id: confluent-kafka does not reveal the id of a client's telemetry; "
            "use member_id, or set 'client.id'"
        )
        raise UnsupportedOperationError(msg)

    @in_turn
    def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Return no records of these partitions until `resume`.

        The partitions may be assigned now or later, or not exist yet. The fetcher drops the records
        that it has read ahead, and reads them again after `resume`. `pauses` sets what a
        rebalance does to the marks.
        """
        self._marks.pause(given_partitions("pause", partitions))
        self._withhold()

    @in_turn
    def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Undo `pause`.

        A partition stays silent while its topic or everything is paused, and once it is to be
        revoked.
        """
        self._marks.resume(given_partitions("resume", partitions))
        self._withhold()

    @in_turn
    def paused(self) -> frozenset[TopicPartition]:
        """Return the partitions named in `pause`, and all assigned partitions that are paused.

        A pause of its topic, or of everything, pauses an assigned partition too.
        """
        return self._marks.partitions | self._marks.among(self._assigned)

    @in_turn
    def pause_topics(self, topics: Iterable[str]) -> None:
        """Return no records of these topics until `resume_topics`.

        The pause covers their future partitions too.

        Raises:
            IllegalStateError: A topic is not subscribed to.
        """
        named = given_names("pause_topics", topics)
        for topic in named:
            if not self._subscribes(topic):
                msg = (
                    f"pause_topics of '{topic}': this consumer does not subscribe to it; "
                    "use pause_pattern for topics that may come"
                )
                raise IllegalStateError(msg)
        self._marks.pause_topics(named)
        self._withhold()

    @in_turn
    def resume_topics(self, topics: Iterable[str]) -> None:
        """Undo `pause_topics`, or take topics out of a paused pattern.

        Partitions that are paused themselves stay so.
        """
        self._marks.resume_topics(given_names("resume_topics", topics))
        self._withhold()

    @in_turn
    def pause_pattern(self, pattern: re.Pattern[str]) -> None:
        """Return no records of topics whose whole name matches, until `resume_pattern`.

        The pause covers topics that are yet to come too.
        """
        self._marks.pause_topics([given_pattern("pause_pattern", pattern)])
        self._withhold()

    @in_turn
    def resume_pattern(self, pattern: re.Pattern[str]) -> None:
        """Undo the pauses of all topics whose whole name matches, by name or by pattern."""
        self._marks.resume_topics([given_pattern("resume_pattern", pattern)])
        self._withhold()

    @in_turn
    def pause_all(self) -> None:
        """Return no records at all until `resume_all`; `poll` keeps the consumer in its group."""
        self._marks.pause_all()
        self._withhold()

    @in_turn
    def resume_all(self) -> None:
        """Undo `pause_all`. Partitions and topics that are paused themselves stay so."""
        self._marks.resume_all()
        self._withhold()

    def _withhold(self) -> None:
        """Let the fetcher be silent about what it has to, and about nothing else."""
        if self._fetcher:
            unread = self._carried.unread if self._carried else frozenset()
            self._fetcher.withhold(self._marks.among(self._assigned) | self._revoking | unread)

    def _forget_marks(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions go.

        An eager rebalance revokes what it gives back at once: only with the new assignment it is
        known which of them have gone.
        """
        if not self._keeps_marks:
            self._leaving_marks.update(partitions)
            if not self._revokes_all:
                self._settle_marks(())
        if self._carried:
            self._carried.leave(partitions)

    def _settle_marks(self, assigned: Collection[TopicPartition]) -> None:
        """Partitions came: what did not come back after an eager revoke has gone."""
        self._marks.resume(self._leaving_marks.difference(assigned))
        self._leaving_marks.clear()

    def _subscribes(self, topic: str) -> bool:
        if isinstance(self._subscription, re.Pattern):
            return self._subscription.fullmatch(topic) is not None
        return topic in self._subscription

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        if self._fetcher is None:
            return {}
        reached = {tp: self._fetcher.position(tp) for tp in self._assigned}
        return {
            tp: OffsetAndMetadata(at.offset, leader_epoch=at.leader_epoch)
            for tp, at in reached.items()
            if at.offset is not None and at.is_read
        }

    def _reading(self) -> Fetcher:
        if self._fetcher is None:
            msg = (
                "seek on a consumer without a fetcher: it reads no records, "
                "so it has no position to move"
            )
            raise IllegalStateError(msg)
        return self._fetcher

    def _check_assigned(self, call: str, partitions: Collection[TopicPartition]) -> None:
        strange = sorted(set(partitions) - self._assigned)
        if strange:
            msg = f"{call} of {strange[0]}: it is not assigned to this consumer"
            raise IllegalStateError(msg)


def _limit(call: str, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else given_seconds(call, timeout_s)

"""The operations that a consumer shares with the consumer of a rebalance callback.

Each operation is defined here once; `kafka.aio.async_operations` derives its asyncio form. No
operation polls, leaves the group or changes the subscription.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from dagster_rebalance.core.model.errors import (
    BrokerError,
    IllegalStateError,
    UnsupportedOperationError,
)
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.kafka.consumer.arguments import (
    parse_callback,
    parse_offset,
    parse_offsets,
    parse_partition,
    parse_partitions,
    parse_seconds,
    parse_times,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets, AnyPartition, AnyTimestamps
    from dagster_rebalance.kafka.consumer.caller_commits import CommitCallback
    from dagster_rebalance.kafka.consumer.state import ConsumerState
    from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp, PartitionInfo
    from dagster_rebalance.kafka.reading.start_positions import Start

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="ConsumerOperations")


@dataclass(frozen=True, slots=True)
class ConsumerGroupMetadata:
    """Identity of a consumer in its group.

    Attributes:
        group_id: The consumer group.
        member_id: The id of the member.
        client: The client's object for `confluent_kafka.Producer.send_offsets_to_transaction`. It
            contains the generation and does not reveal it.
    """

    group_id: str
    member_id: str
    client: object


def guarded(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Refuse an operation while another thread uses the consumer, and after `close`."""
    call = method.__name__

    @functools.wraps(method)
    def guarded_call(self: C, *arguments: P.args, **named_arguments: P.kwargs) -> R:
        self._check_usable()
        with self._state.guard.reentrant(call):
            return method(self, *arguments, **named_arguments)

    return cast("Callable[Concatenate[C, P], R]", guarded_call)


class ConsumerOperations:
    """Operations that are safe at any time, also in a rebalance callback."""

    def __init__(self, state: ConsumerState) -> None:
        self._state = state

    def _check_usable(self) -> None:
        """Raise `IllegalStateError` if this object must no longer be used."""

    @guarded
    def assignment(self) -> frozenset[TopicPartition]:
        """Return the assignment, including partitions to be revoked, without lost partitions."""
        return frozenset(self._state.assigned)

    @guarded
    def commit_sync(
        self, offsets: AnyOffsets | None = None, timeout_s: float | None = None
    ) -> None:
        """Commit next offsets and metadata in one request.

        Args:
            offsets: The next offset of each partition; by default the current position of every
                partition that was read.
            timeout_s: Maximum wait for the result. By default the client gives up after 46 s
                without a broker. In the classic protocol, a rebalance in which another member holds
                a revoke extends the wait until the end of that hold. A commit without a result in
                time may still be stored, before the partition is released.

        Raises:
            PartitionLostError: A partition is no longer assigned. Commit nothing for it.
            RebalanceInProgressError: The partition is still assigned: poll, then commit again
                (KIP-429).
            BrokerError: The broker could not be reached, or refused. Its attribute `partitions`
                names the failed partitions; the others are committed.
        """
        parsed = self._parse_offsets("commit_sync", offsets)
        limit_s = parse_limit("commit_sync", timeout_s)
        error = self._state.commits.commit(parsed, limit_s).worst_error()
        if error is not None:
            try:
                raise error
            finally:
                del error  # see `without_frames`

    @guarded
    def commit_async(
        self, offsets: AnyOffsets | None = None, callback: CommitCallback | None = None
    ) -> None:
        """Send a commit without waiting for its result, in the order of the calls.

        Args:
            offsets: The next offset of each partition; by default the current position of every
                partition that was read.
            callback: Called in a later `poll`, `unsubscribe` or `close` with the offsets and the
                error that `commit_sync` would raise, or None. Without a callback, errors are
                logged. No partition is released before the results of its commits have arrived.
        """
        parsed = self._parse_offsets("commit_async", offsets)
        self._state.commits.commit_later(parsed, parse_callback("commit_async", callback))

    @guarded
    def committed(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offset of each partition, assigned or not, or None."""
        return self._state.commits.committed(
            parse_partitions("committed", partitions), parse_seconds("committed", timeout_s)
        )

    @guarded
    def position(self, partition: AnyPartition, timeout_s: float = 10.0) -> int:
        """Return the next offset that `poll` returns; with `fetch=False`, the start position.

        Raises:
            IllegalStateError: The partition is not assigned.
            BrokerError: There is no committed offset and `auto.offset.reset` forbids choosing one.
        """
        return self._state.position(
            parse_partition("position", partition), parse_seconds("position", timeout_s)
        )

    @guarded
    def seek(self, partition: AnyPartition, offset: int | OffsetAndMetadata | None = None) -> None:
        """Continue reading at another offset.

        A `confluent_kafka.TopicPartition` may contain the offset.

        Raises:
            IllegalStateError: The partition is not assigned, Kafka has no such offset, or this
                consumer reads no records.
        """
        start = parse_offset("seek", partition, offset)
        self._seek(parse_partition("seek", partition), start)

    @guarded
    def seek_to_beginning(self, partitions: Iterable[AnyPartition]) -> None:
        """Continue reading at the first offset of the log. Default: all assigned partitions."""
        for tp in parse_partitions("seek_to_beginning", partitions) or self._state.assigned.copy():
            self._seek(tp, "earliest")

    @guarded
    def seek_to_end(self, partitions: Iterable[AnyPartition]) -> None:
        """Continue reading at the next produced record. Default: all assigned partitions."""
        for tp in parse_partitions("seek_to_end", partitions) or self._state.assigned.copy():
            self._seek(tp, "latest")

    @guarded
    def beginning_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the first offsets of the logs of any partitions, in one request."""
        return self._state.cluster.beginning_offsets(
            parse_partitions("beginning_offsets", partitions),
            parse_seconds("beginning_offsets", timeout_s),
        )

    @guarded
    def end_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the offsets of the next records of any partitions, in one request.

        With `isolation.level` `read_committed`, the default, and an open transaction, this is the
        first offset of the oldest open transaction.
        """
        return self._state.cluster.end_offsets(
            parse_partitions("end_offsets", partitions), parse_seconds("end_offsets", timeout_s)
        )

    @guarded
    def offsets_for_times(
        self, timestamps: AnyTimestamps, timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after each time in milliseconds, or None without one."""
        return self._state.cluster.offsets_for_times(
            parse_times("offsets_for_times", timestamps),
            parse_seconds("offsets_for_times", timeout_s),
        )

    @guarded
    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """Return the partitions of a topic.

        Raises:
            BrokerError: There is no such topic, or the principal may not see it.
        """
        return self._state.cluster.partitions_for(topic, parse_seconds("partitions_for", timeout_s))

    @guarded
    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """Return all topics that the principal may see."""
        return self._state.cluster.list_topics(parse_seconds("list_topics", timeout_s))

    @guarded
    def current_lag(self, partition: AnyPartition) -> int | None:
        """Return the number of offsets left to read, as of the last fetch.

        Return None while the number is not known, and with `fetch=False`. The lag counts to the
        high watermark. With `read_committed`, Kafka's own consumer counts to the last stable
        offset, which librdkafka does not report.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        tp = parse_partition("current_lag", partition)
        self._state.check_assigned("current_lag", tp)
        return self._state.fetcher.lag(tp) if self._state.fetcher else None

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return the latest statistics of librdkafka.

        The client `member` takes part in the group, and the client `fetcher` reads. Both statistics
        are empty until the first `statistics.interval.ms` is over. By default this setting is off,
        and they stay empty.
        """
        self._check_usable()
        return {
            "member": self._state.member.metrics(),
            "fetcher": self._state.fetcher.metrics() if self._state.fetcher else {},
        }

    @guarded
    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return the identity with which a producer commits offsets in a transaction.

        Call this method before each `send_offsets_to_transaction`: when partitions are lost, the
        consumer becomes another member.

        Raises:
            BrokerError: The client did not answer, or partitions were lost and no poll has reported
                the loss.
            IllegalStateError: The consumer has `pause_marks="carry"`, whose commits are independent
                of the transaction.
        """
        state = self._state
        if state.carried_pauses:
            msg = (
                "group_metadata with pause_marks='carry': storing a mark commits the last offset "
                "again, which would undo the commit of a transaction; "
                "use pause_marks='keep' or 'clear'"
            )
            raise IllegalStateError(msg)
        metadata = ConsumerGroupMetadata(
            state.group_id, state.member.member_id, state.member.group_metadata()
        )
        lost = state.assigned & state.commits.lost
        # In a callback the listener has already received the losses that were handled before.
        if not (state.is_delivered or state.guard.in_callback):
            lost |= state.revokes.lost
        if lost:
            msg = (
                f"reading the metadata of group '{state.group_id}' failed: {names_of(lost)} "
                "lost, which no poll has reported yet: poll, then retry"
            )
            raise BrokerError(msg, retriable=True)
        return metadata

    def client_instance_id(self, timeout_s: float = 10.0) -> NoReturn:  # noqa: ARG002 - the signature of Kafka's own consumer
        """Raise `UnsupportedOperationError`: librdkafka does not reveal its telemetry id (KIP-714).

        Raises:
            UnsupportedOperationError: Always.
        """
        self._check_usable()
        msg = (
            "client_instance_id: confluent-kafka does not reveal the id of a client's telemetry; "
            "use member_id, or set 'client.id'"
        )
        raise UnsupportedOperationError(msg)

    @guarded
    def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Let `poll` return no records of these partitions until `resume`.

        The partitions need not be assigned or exist. The fetcher drops prefetched records, and
        reads them again after `resume`. For the effect of a rebalance see `pause_marks`.
        """
        self._state.pauses.partitions.update(parse_partitions("pause", partitions))
        self._state.withhold()

    @guarded
    def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Undo `pause`.

        `poll` still returns no records of a partition while its topic or the whole consumer is
        paused, or while it is to be revoked.
        """
        self._state.pauses.partitions.difference_update(parse_partitions("resume", partitions))
        self._state.withhold()

    @guarded
    def paused(self) -> frozenset[TopicPartition]:
        """Return the partitions named in `pause`, and all assigned partitions that are paused.

        An assigned partition is also paused by a pause of its topic or of the whole consumer.
        """
        pauses = self._state.pauses
        return pauses.among(self._state.assigned) | pauses.partitions

    def _parse_offsets(
        self, call: str, offsets: AnyOffsets | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return self._state.positions() if offsets is None else parse_offsets(call, offsets)

    def _seek(self, partition: TopicPartition, start: Start) -> None:
        if self._state.fetcher is None:
            msg = (
                "seek on a consumer without a fetcher: it reads no records, "
                "so it has no position to move"
            )
            raise IllegalStateError(msg)
        self._state.fetcher.seek(partition, start)


class RebalanceConsumer(ConsumerOperations):
    """Consumer that a rebalance callback receives (KAFKA-20385).

    It has the operations of `RebalanceAwareConsumer` that are safe during a rebalance. After the
    callback every method raises `IllegalStateError`, in any thread.
    """

    _live_state: ConsumerState | None = None

    @property
    def _state(self) -> ConsumerState:
        state = self._live_state
        if state is None:
            msg = (
                "the consumer of a rebalance callback ended with its callback: "
                "use the consumer itself, outside of callbacks"
            )
            raise IllegalStateError(msg)
        return state

    @_state.setter
    def _state(self, state: ConsumerState) -> None:
        self._live_state = state

    def _check_usable(self) -> None:
        _ = self._state

    def expire(self) -> None:
        """End the use of this object; the consumer calls this method after the callback.

        A listener may keep the object, which must not keep the clients of a dropped consumer open.
        """
        self._live_state = None


def parse_limit(call: str, timeout_s: float | None) -> float | None:
    """Return how long a commit waits for its result; None if only the client limits the wait."""
    return None if timeout_s is None else parse_seconds(call, timeout_s)

"""Read the records of exact ranges, as plain messages of confluent-kafka.

A read ends with the last offset of its ranges, or with an error; an error about deletion or
truncation names the missing offsets. No record outside the ranges is returned: records after them
are dropped, and the client returns none before the assigned offset. The clients never subscribe,
commit or reset an offset. They stay open between reads, because connecting takes longer than
reading a few records. Concurrent reads have one client each.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message

from dagster_rebalance.core.batches.range_progress import UnreadOffsets, read_rounds
from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError
from dagster_rebalance.core.model.offsets import (
    Bounds,
    OffsetRange,
    TopicPartition,
    next_offset,
)
from dagster_rebalance.kafka.client.confluent import (
    create_client,
    from_confluent,
    partition_of,
    to_confluent,
)
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    END_OF_PARTITION,
    OFFSET_RESET_FORBIDDEN,
    UNKNOWN_TOPIC,
    Operation,
    broker_error,
    first_few,
    is_transient,
    is_unreadable,
    kafka_error,
    unparsable_error,
    unreadable_error,
)
from dagster_rebalance.kafka.client.reported_errors import NO_REASON, ConnectionErrors
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.cluster.truncation import is_truncation
from dagster_rebalance.kafka.reading.messages import (
    consume_available,
    last_of_partitions,
    repair_headers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.batches.range_progress import Span
    from dagster_rebalance.kafka.client.settings import Settings

DEFAULT_TIMEOUT_S = 60.0
"""Longer than a broker takes to restart."""

_MOST_AT_ONCE = 500
"""CPython collects garbage after 700 new objects (2,000 from 3.13 on). A call that returns more
records starts a collection, which took longer than the call."""
_WAIT_S = 0.1
_CHECK_AFTER_S = 2.0
"""Without progress for this long, the bounds of the logs are queried, repeatedly."""
_CHECK_TIMEOUT_S = 2.0
_QUERY_TIMEOUT_S = 10.0
_WAY_OUT = (
    "Nothing was committed. Restore the log, or set the group's committed offset past the batch "
    "to continue without its records (dagster-rebalance reset)"
)


class RangeReader:
    """Reads ranges. Thread-safe, but an iterator of a read is for one thread at a time.

    Args:
        settings: Validated settings. The user's fetch settings override the defaults.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._cluster = Cluster(settings)
        self._idle: list[_Client] = []
        self._is_closed = False
        self._pid = os.getpid()
        self._of_parent: tuple[object, ...] = ()

    def read(
        self, ranges: Iterable[OffsetRange], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Iterator[Message]:
        """Yield the records of the ranges, in the order of the offsets within a partition.

        Args:
            ranges: Ranges of any topics and partitions, without overlaps.
            timeout_s: Maximum time without a response of Kafka, and without progress.

        Raises:
            BrokerError: On iteration: Kafka no longer has all of the offsets, does not answer, or
                refuses.
            IllegalStateError: There are no ranges, or they overlap. On iteration: the reader is
                closed.
        """
        return chain.from_iterable(self.read_lists(ranges, timeout_s))

    def read_lists(
        self, ranges: Iterable[OffsetRange], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Iterator[list[Message]]:
        """Yield the records of `read` in the lists that the client returns."""
        return self._read(read_rounds(ranges), timeout_s)

    def topic_log(self, topic: str) -> tuple[str, dict[TopicPartition, Bounds]]:
        """Return the id of a topic, empty before Kafka 2.8, and the bounds of its partitions.

        Raises:
            BrokerError: The topic does not exist, or Kafka did not answer.
        """
        found = self._cluster.partitions_for(topic)
        partitions = [TopicPartition(topic, one.partition) for one in found]
        ends = self._cluster.end_offsets(partitions)
        starts = self._cluster.beginning_offsets(partitions)
        bounds = {tp: Bounds(starts[tp], ends[tp]) for tp in partitions}
        return self._cluster.topic_ids([topic]).get(topic, ""), bounds

    def read_topic(
        self,
        topic: str,
        *,
        since_ms: int | None = None,
        positions: Mapping[TopicPartition, int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Iterator[list[Message]]:
        """Yield the records that a topic has now, in lists of one client call.

        Args:
            topic: The topic.
            since_ms: Leave out the records before the first one with this timestamp or a later one.
            positions: Leave out the records before these offsets.
            timeout_s: See `read`. The queries for the topic wait for at most 10 s each.

        Raises:
            BrokerError: The topic does not exist, or the principal may not read it. On iteration:
                see `read`.
        """
        limit_s = min(timeout_s, _QUERY_TIMEOUT_S)
        found = self._cluster.partitions_for(topic, limit_s)
        partitions = [TopicPartition(topic, one.partition) for one in found]
        ends = self._cluster.end_offsets(partitions, limit_s)
        starts = self._cluster.beginning_offsets(partitions, limit_s)
        if since_ms is not None:
            at_time = self._cluster.offsets_for_times(dict.fromkeys(partitions, since_ms), limit_s)
            starts |= {tp: at.offset if at else ends[tp] for tp, at in at_time.items()}
        for tp, position in (positions or {}).items():
            starts[tp] = max(starts[tp], position)
        ranges = [
            OffsetRange(*tp, starts[tp], ends[tp]) for tp in partitions if starts[tp] < ends[tp]
        ]
        return self.read_lists(ranges, timeout_s) if ranges else iter(())

    def close(self) -> None:
        """Close all idle clients. A read in progress closes its client when it ends."""
        self._is_closed = True
        while (client := self._take_idle()) is not None:
            client.consumer.close()

    def _read(self, rounds: Sequence[Sequence[Span]], timeout_s: float) -> Iterator[list[Message]]:
        client = self._client()
        login = Login(self._settings.credentials, client.consumer)
        login.renew()
        operation = Operation("reading records", self._settings.brokers)
        is_sound = False
        try:
            for spans in rounds:
                query = partial(self._query_logs, login)
                yield from _Read(client, spans, operation, query, self._clock).lists(timeout_s)
            is_sound = True
        except GeneratorExit:  # the caller stopped early
            is_sound = True
            raise
        finally:
            if is_sound and not self._is_closed:
                if left := client.consumer.assignment():
                    client.consumer.incremental_unassign(left)
                self._idle.append(client)
                if self._is_closed:  # while this read gave its client back
                    self.close()
            else:
                client.consumer.close()

    def _client(self) -> _Client:
        if self._is_closed:
            msg = "the reader is closed: read the batch while its run works on it"
            raise IllegalStateError(msg)
        if os.getpid() != self._pid:
            # A forked child has the clients of its parent without their threads: no call of such a
            # client returns. They are kept alive, because destroying them would hang as well.
            self._of_parent = (*self._of_parent, self._idle, self._cluster)
            self._pid, self._idle, self._cluster = os.getpid(), [], Cluster(self._settings)
        idle = self._take_idle()
        if idle is not None:
            return idle
        errors = ConnectionErrors(self._clock)
        config = errors.with_callbacks(self._settings.range_reader())
        return _Client(create_client(confluent_kafka.Consumer, config), errors)

    def _take_idle(self) -> _Client | None:
        with suppress(IndexError):  # another read may take the last one at the same time
            return self._idle.pop()
        return None

    def _query_logs(
        self, login: Login, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, _Log]:
        """Query the bounds of logs.

        A leader answers only once its high watermark has caught up (KIP-207). An offset at or above
        it does not exist, and will not appear by waiting.
        """
        login.renew()  # without progress, the client may have to log in again
        wanted = list(partitions)
        ends = self._cluster.high_watermarks(wanted, _CHECK_TIMEOUT_S)
        starts = self._cluster.beginning_offsets(wanted, _CHECK_TIMEOUT_S)
        readable = self._cluster.end_offsets(wanted, _CHECK_TIMEOUT_S)
        return {tp: _Log(Bounds(starts[tp], ends[tp]), readable[tp]) for tp in wanted}


class _Client(NamedTuple):
    consumer: confluent_kafka.Consumer
    errors: ConnectionErrors


class _Log(NamedTuple):
    """The bounds of a log, and the offset up to which it can be read."""

    bounds: Bounds
    readable: int


class _Read:
    """Reads one contiguous span of each partition, which is one round of a read."""

    def __init__(
        self,
        client: _Client,
        spans: Iterable[Span],
        operation: Operation,
        query_logs: Callable[[Iterable[TopicPartition]], dict[TopicPartition, _Log]],
        clock: Callable[[], float],
    ) -> None:
        self._consumer, self._errors = client
        self._unread = UnreadOffsets(spans)
        self._operation = operation
        self._query_logs = query_logs
        self._clock = clock
        self._note_progress()

    def lists(self, timeout_s: float) -> Iterator[list[Message]]:
        try:
            self._consumer.incremental_assign(
                [to_confluent(tp, offset) for tp, offset in sorted(self._unread.positions.items())]
            )
            self._errors.clear()
            self._note_progress()
            while self._unread.positions:
                before = len(self._unread.positions)
                batch = consume_available(self._consumer, _MOST_AT_ONCE, _WAIT_S)
                records = self._wanted(batch)
                if len(self._unread.positions) < before:
                    self._unassign_finished()
                if records:
                    repair_headers(records)
                    yield records
                    self._note_progress()  # the caller may have paused between two records
                else:
                    self._check_progress(timeout_s)
        except KafkaException as problem:
            raise broker_error(
                kafka_error(problem), self._operation, self._unread.positions
            ) from problem

    def _wanted(self, batch: list[Message]) -> list[Message]:
        """Return the records in the spans, of the messages in `batch`, and handle the errors."""
        ends = dict(self._unread.ends)
        if any(map(Message.error, batch)):
            errors = [message for message in batch if message.error() is not None]
            batch = [message for message in batch if message.error() is None]
        else:
            errors = []
        is_each_wanted = True
        for message in last_of_partitions(batch):
            tp, offset = partition_of(message), message.offset() or 0
            is_each_wanted &= offset < ends.get(tp, 0)
            self._advance(tp, next_offset(offset))
        for message in errors:
            self._handle_error(message)
        if is_each_wanted:
            return batch
        return [
            message
            for message in batch
            if (message.offset() or 0) < ends.get(partition_of(message), 0)
        ]

    def _advance(self, partition: TopicPartition, offset: int) -> None:
        if self._unread.advance(partition, offset):
            self._errors.clear()
            self._note_progress()

    def _note_progress(self) -> None:
        self._progress_at = self._clock()
        self._check_at = self._progress_at + _CHECK_AFTER_S
        # A later timeout has other reasons.
        self._reported: BrokerError | None = None
        self._unanswered: BrokerError | None = None
        self._open_until: dict[TopicPartition, int] = {}

    def _unassign_finished(self) -> None:
        self._consumer.incremental_unassign(
            [
                tp
                for tp in self._consumer.assignment()
                if from_confluent(tp) not in self._unread.positions
            ]
        )

    def _handle_error(self, message: Message) -> None:
        error, partition = message.error(), partition_of(message)
        if error is None:
            return
        if error.code() == END_OF_PARTITION:
            self._advance(partition, message.offset() or 0)
            if partition in self._unread.positions:  # the range ends after the readable end
                self._check_at = self._clock()
        elif is_unreadable(message, error):
            # Errors after the range do not matter. An error without a partition belongs to a
            # request that was in flight when the client dropped a response; the client reports the
            # cause in a callback.
            positions = self._unread.positions
            if partition in positions:
                raise unreadable_error({partition: error}, positions, self._operation, _WAY_OUT)
        elif is_transient(error) or error.code() in UNKNOWN_TOPIC:
            self._reported = self._error(error, message)
        elif error.code() == OFFSET_RESET_FORBIDDEN:
            self._handle_out_of_range(error, message)
        else:
            raise self._error(error, message)

    def _handle_out_of_range(self, error: KafkaError, message: Message) -> None:
        partition = partition_of(message)
        if self._is_of_earlier_read(message):
            self._reassign(partition)
            return
        # If the leaders answer, the check raises an error that names the offsets that are gone.
        # Otherwise it is repeated later.
        if is_truncation(error) or self._check_logs():
            raise self._truncated(error, partition)

    def _is_of_earlier_read(self, message: Message) -> bool:
        """Return whether the error belongs to an earlier read of this client.

        An unassign discards fetched records, but not this error.
        """
        position = self._unread.positions.get(partition_of(message))
        return position is None or message.offset() not in {position, None}

    def _reassign(self, partition: TopicPartition) -> None:
        """Request the position again. An error of this read recurs.

        The offset in the error may lie behind the position, e.g. after transaction markers.
        """
        position = self._unread.positions.get(partition)
        if position is not None:
            again = [to_confluent(partition, position)]
            self._consumer.incremental_unassign(again)
            self._consumer.incremental_assign(again)

    def _error(self, error: KafkaError, message: Message) -> BrokerError:
        partitions = [partition_of(message)] if message.topic() else ()
        return broker_error(error, self._operation, partitions)

    def _truncated(self, error: KafkaError, partition: TopicPartition) -> BrokerError:
        # The advice of a consumer does not apply: this reader cannot seek or reset.
        msg = (
            f"{self._operation.name} failed for {partition}: {error.str()}; the log was truncated "
            "(unclean leader election), or the topic was created again. Nothing was committed. To "
            "continue, set the group's committed offset of this partition to one that the log "
            "still has (dagster-rebalance reset)"
        )
        return BrokerError(msg, partitions={partition: error.str()})

    def _check_progress(self, timeout_s: float) -> None:
        unparsable = self._errors.take_unparsable()
        if unparsable is not None:
            raise unparsable_error(unparsable, self._unread.positions, self._operation)
        now = self._clock()
        if now - self._progress_at >= timeout_s:
            raise self._timed_out(timeout_s)
        if now >= self._check_at:
            self._check_logs()

    def _timed_out(self, timeout_s: float) -> BrokerError:
        why = self._why_silent()
        positions = sorted(self._unread.positions.items())
        msg = (
            f"nothing of {first_few(f'{tp} at offset {offset}' for tp, offset in positions)} could "
            f"be read for {timeout_s:g} s, and nothing was committed: {why}"
        )
        return BrokerError(
            msg, retriable=True, partitions=dict.fromkeys(self._unread.positions, why)
        )

    def _why_silent(self) -> str:
        if self._open_until:
            return "a transaction is open: " + first_few(
                f"{tp} can be read up to offset {offset}"
                for tp, offset in sorted(self._open_until.items())
            )
        problem = self._unanswered or self._reported
        return str(problem) if problem else self._errors.reason or NO_REASON

    def _check_logs(self) -> bool:
        """Find offsets that no longer exist, and return whether the leaders have answered."""
        try:
            logs = self._query_logs(self._unread.positions)
            gone = self._unread.why_gone({tp: log.bounds for tp, log in logs.items()})
        except BrokerError as problem:
            if not problem.retriable:
                raise
            self._unanswered, self._open_until = problem, {}
            return False
        finally:
            self._check_at = self._clock() + _CHECK_AFTER_S
        if gone:
            raise BrokerError("; ".join(gone.values()), partitions=gone)
        self._unanswered = None
        self._open_until = {
            tp: log.readable
            for tp, log in logs.items()
            if log.readable < min(log.bounds.until, self._unread.ends[tp])
        }
        return True

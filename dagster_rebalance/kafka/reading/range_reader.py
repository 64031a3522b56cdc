"""Reads the records of exact ranges, as plain messages of confluent-kafka.

Owns that a read ends: with its last offset, whatever stands there, or with an error that says what
is missing. Its clients are assigned and never subscribe, never commit, and are chosen no offset by
Kafka. They stay open between reads, with nothing assigned, because to connect takes longer than to
read a few records. Several reads at the same time have a client each.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message

from dagster_rebalance.core.batches.range_progress import Unread, read_rounds
from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError
from dagster_rebalance.core.model.offsets import Bounds, TopicPartition, next_offset
from dagster_rebalance.kafka.client.connection_errors import NO_REASON, ConnectionErrors
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    END_OF_PARTITION,
    OFFSET_RESET_FORBIDDEN,
    UNKNOWN_TOPIC,
    Attempt,
    broker_error,
    is_passing,
    is_unreadable,
    kafka_error,
    listed,
    unparsable_error,
    unreadable_error,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.types import ours, theirs
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.cluster.truncation import is_truncation
from dagster_rebalance.kafka.reading.headers import repair_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dagster_rebalance.core.batches.range_progress import Span
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.kafka.client.settings import Settings

DEFAULT_TIMEOUT_S = 60.0
"""Longer than a broker takes to restart."""

_MOST_AT_ONCE = 1000
_WAIT_S = 0.1
_LOOK_AFTER_S = 2.0
"""Without progress for this long, the bounds of the logs are looked up, again and again."""
_LOOK_LIMIT_S = 2.0
_PAST_DAMAGE = (
    "Nothing was committed. Restore the log, or set the group's committed offset behind the batch "
    "to go on without its records (dagster-rebalance reset)"
)


class RangeReader:
    """Reads ranges, one read after the other or several at the same time.

    Args:
        settings: Validated settings. Those of fetching win over those of this class.
        clock: A monotonic clock.
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
        """The records of the ranges.

        Those of a partition come in the order of their offsets. Partitions are read side by side.

        Args:
            ranges: Of any topics and partitions, without overlaps.
            timeout_s: How long Kafka may stay without an answer, and reading without progress.

        Raises:
            BrokerError: Kafka no longer has all of the offsets, does not answer, or refuses.
            IllegalStateError: There are no ranges, they overlap, or the reader is closed.
        """
        return self._read(read_rounds(ranges), timeout_s)

    def close(self) -> None:
        """Close all clients. A read that is under way closes its own when it ends."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().consumer.close()

    def _read(self, rounds: Sequence[Sequence[Span]], timeout_s: float) -> Iterator[Message]:
        client = self._client()
        login = Login(self._settings.credentials, client.consumer)
        login.renew()
        is_sound = False
        try:
            for spans in rounds:
                yield from _Read(
                    client, spans, self._attempt, partial(self._look, login), self._clock
                ).records(timeout_s)
            is_sound = True
        except GeneratorExit:  # the caller wants no more
            is_sound = True
            raise
        finally:
            if is_sound and not self._is_closed:
                if left := client.consumer.assignment():
                    client.consumer.incremental_unassign(left)
                self._idle.append(client)
            else:
                client.consumer.close()

    def _client(self) -> _Client:
        if self._is_closed:
            msg = "the reader is closed: read the batch while its run works on it"
            raise IllegalStateError(msg)
        if os.getpid() != self._pid:
            # A forked child has the clients of its parent without their threads: no call of theirs
            # ever returns, to close them included.
            self._of_parent = (*self._of_parent, self._idle, self._cluster)
            self._pid, self._idle, self._cluster = os.getpid(), [], Cluster(self._settings)
        if self._idle:
            return self._idle.pop()
        troubles = ConnectionErrors(self._clock)
        config = troubles.noting(self._settings.range_reader())
        return _Client(made(confluent_kafka.Consumer, config), troubles)

    @property
    def _attempt(self) -> Attempt:
        return Attempt("reading records", self._settings.brokers)

    def _look(
        self, login: Login, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, _Log]:
        """Ask for the bounds of logs.

        A new leader tells no high watermark below the one that an earlier leader has told: what
        lies behind it is not only late.
        """
        login.renew()  # nothing comes: perhaps the client has to log in again
        asked = list(partitions)
        ends = self._cluster.high_watermarks(asked, _LOOK_LIMIT_S)
        starts = self._cluster.beginning_offsets(asked, _LOOK_LIMIT_S)
        readable = self._cluster.end_offsets(asked, _LOOK_LIMIT_S)
        return {tp: _Log(Bounds(starts[tp], ends[tp]), readable[tp]) for tp in asked}


class _Client(NamedTuple):
    """A client, and what it has reported."""

    consumer: confluent_kafka.Consumer
    troubles: ConnectionErrors


class _Log(NamedTuple):
    """What the leader says of a log: its bounds, and the offset up to which it can be read."""

    bounds: Bounds
    readable: int


class _Read:
    """One read of one gapless span for each of some partitions."""

    def __init__(
        self,
        client: _Client,
        spans: Iterable[Span],
        attempt: Attempt,
        ask: Callable[[Iterable[TopicPartition]], dict[TopicPartition, _Log]],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._troubles = client
        self._unread = Unread(spans)
        self._attempt = attempt
        self._ask = ask
        self._clock = clock
        self._held_back: dict[TopicPartition, int] = {}
        self._moved_at = self._look_at = clock()
        self._problem: BrokerError | None = None
        self._unanswered: BrokerError | None = None

    def records(self, timeout_s: float) -> Iterator[Message]:
        """All records, as they come."""
        try:
            self._client.incremental_assign(
                [theirs(tp, offset) for tp, offset in sorted(self._unread.positions.items())]
            )
            self._troubles.forget()
            self._has_moved()
            while self._unread.positions:
                before = len(self._unread.positions)
                batch = self._whatever_is_there()
                records = self._wanted(batch)
                if len(self._unread.positions) < before:
                    self._give_up_what_is_done()
                if records:
                    repair_headers(records)
                    yield from records
                    self._has_moved()  # the caller may have taken its time
                else:
                    self._look_around(timeout_s)
        except KafkaException as problem:
            raise broker_error(
                kafka_error(problem), self._attempt, self._unread.positions
            ) from problem

    def _whatever_is_there(self) -> list[Message]:
        """Wait for the first message only, and take the others that are there.

        The client would wait until it has all messages that the call wants.
        """
        batch = self._client.consume(_MOST_AT_ONCE, 0.0)
        if not batch:
            batch = self._client.consume(1, _WAIT_S)
            if batch:
                batch += self._client.consume(_MOST_AT_ONCE - 1, 0.0)
        return batch

    def _wanted(self, batch: list[Message]) -> list[Message]:
        """The records of a batch that lie in the spans."""
        ends = dict(self._unread.ends)
        if any(map(Message.error, batch)):
            troubles = [message for message in batch if message.error() is not None]
            batch = [message for message in batch if message.error() is None]
        else:
            troubles = []
        last = {(message.topic(), message.partition()): message.offset() for message in batch}
        is_each_wanted = True
        for (topic, partition), offset in last.items():
            tp = TopicPartition(topic or "", partition or 0)
            is_each_wanted &= (offset or 0) < ends.get(tp, 0)
            self._read_to(tp, next_offset(offset or 0))
        for message in troubles:
            self._take_in(message)
        if is_each_wanted:
            return batch
        return [message for message in batch if (message.offset() or 0) < ends.get(_of(message), 0)]

    def _read_to(self, partition: TopicPartition, offset: int) -> None:
        if self._unread.read_to(partition, offset):
            self._troubles.forget()
            self._has_moved()

    def _has_moved(self) -> None:
        self._moved_at = self._clock()
        self._look_at = self._moved_at + _LOOK_AFTER_S

    def _give_up_what_is_done(self) -> None:
        """Fetch no more of it."""
        self._client.incremental_unassign(
            [tp for tp in self._client.assignment() if ours(tp) not in self._unread.positions]
        )

    def _take_in(self, trouble: Message) -> None:
        error = trouble.error()
        if error is None:
            return
        if error.code() == END_OF_PARTITION:
            self._read_to(_of(trouble), trouble.offset() or 0)
            if _of(trouble) in self._unread.positions:  # the log was longer when it was planned
                self._look_at = self._clock()
        elif is_unreadable(trouble, error):
            self._refuse_unreadable(error, _of(trouble))
        elif is_passing(error) or error.code() in UNKNOWN_TOPIC:
            self._problem = self._error(error, trouble)
        elif error.code() != OFFSET_RESET_FORBIDDEN:
            raise self._error(error, trouble)
        elif self._is_of_earlier_read(trouble):
            self._begin_again(_of(trouble))
        # A look says what is gone. While its leader does not answer, it is asked again.
        elif is_truncation(error) or self._look():
            raise self._cut_off(error, _of(trouble))

    def _refuse_unreadable(self, error: KafkaError, partition: TopicPartition) -> None:
        """Refuse a batch that cannot be read, unless it lies behind the range.

        That of no partition is a request that was under way when the client dropped a response,
        which it reports in its callback.
        """
        positions = self._unread.positions
        if partition in positions:
            raise unreadable_error({partition: error}, positions, self._attempt, _PAST_DAMAGE)

    def _is_of_earlier_read(self, trouble: Message) -> bool:
        """Whether an offset is out of range that this read does not ask for.

        The client keeps the error over an unassign, unlike records.
        """
        position = self._unread.positions.get(_of(trouble))
        return position is None or trouble.offset() not in {position, None}

    def _begin_again(self, partition: TopicPartition) -> None:
        """Ask for the next offset once more: an error that is of this read after all comes again.

        Marks of transactions, say, lie between the last record and the offset that it names.
        """
        position = self._unread.positions.get(partition)
        if position is not None:
            again = [theirs(partition, position)]
            self._client.incremental_unassign(again)
            self._client.incremental_assign(again)

    def _error(self, error: KafkaError, message: Message) -> BrokerError:
        return broker_error(error, self._attempt, [_of(message)] if message.topic() else ())

    def _cut_off(self, error: KafkaError, partition: TopicPartition) -> BrokerError:
        """What to do is not what a consumer is told, which could seek, or choose an offset."""
        msg = (
            f"{self._attempt.doing} failed for {partition}: {error.str()}; the log was cut off "
            "(unclean leader election), or the topic was made anew. Nothing was committed. To go "
            "on, set the group's committed offset of this partition to one that the log still has "
            "(dagster-rebalance reset)"
        )
        return BrokerError(msg, partitions={partition: error.str()})

    def _look_around(self, timeout_s: float) -> None:
        unparsable = self._troubles.take_unparsable()
        if unparsable is not None:
            raise unparsable_error(unparsable, self._unread.positions, self._attempt)
        now = self._clock()
        if now - self._moved_at >= timeout_s:
            raise self._timed_out(timeout_s)
        if now >= self._look_at:
            self._look()

    def _timed_out(self, timeout_s: float) -> BrokerError:
        why = self._why_silent()
        positions = sorted(self._unread.positions.items())
        msg = (
            f"nothing of {listed(f'{tp} at offset {offset}' for tp, offset in positions)} could be "
            f"read for {timeout_s:g} s, and nothing was committed: {why}"
        )
        return BrokerError(
            msg, retriable=True, partitions=dict.fromkeys(self._unread.positions, why)
        )

    def _why_silent(self) -> str:
        """What the brokers or the client have said; a transaction where the leader has one."""
        if self._held_back:
            return "a transaction is open: " + listed(
                f"{tp} can be read up to offset {offset}"
                for tp, offset in sorted(self._held_back.items())
            )
        problem = self._unanswered or self._problem
        return str(problem) if problem else self._troubles.reason or NO_REASON

    def _look(self) -> bool:
        """Find what can never come.

        Returns:
            Whether the leaders have answered.

        Raises:
            BrokerError: Some offsets are gone, or Kafka refuses.
        """
        try:
            logs = self._ask(self._unread.positions)
            gone = self._unread.why_gone({tp: log.bounds for tp, log in logs.items()})
        except BrokerError as problem:
            if not problem.retriable:
                raise
            self._unanswered, self._held_back = problem, {}
            return False
        finally:
            self._look_at = self._clock() + _LOOK_AFTER_S
        if gone:
            raise BrokerError("; ".join(gone.values()), partitions=gone)
        self._unanswered = None
        self._held_back = {
            tp: log.readable
            for tp, log in logs.items()
            if log.readable < min(log.bounds.until, self._unread.ends[tp])
        }
        return True


def _of(message: Message) -> TopicPartition:
    return TopicPartition(message.topic() or "", message.partition() or 0)

"""The data plane: a second consumer, outside the group, that reads the partitions which the member owns.

During a hold librdkafka pauses every partition of the member's client, so records come from a client of their own: retained partitions
were measured at 100 % of their steady rate through a whole hold. It is assigned and never subscribes, never commits, and never decides
what to read: it follows.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_STORED, KafkaException, Message

from dagster_rebalance.consumer.kafka_errors import END_OF_PARTITION, PASSING, Attempt, broker_error, configuration_error, kafka_error
from dagster_rebalance.consumer.missing_topics import MissingTopics
from dagster_rebalance.consumer.translation import as_committed, theirs
from dagster_rebalance.core.errors import IllegalStateError
from dagster_rebalance.core.partition import MAX_OFFSET, TopicPartition, next_offset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.partition import OffsetAndMetadata

logger = logging.getLogger(__name__)

Start: TypeAlias = Literal["committed", "earliest", "latest"] | int
"""Where reading begins. `committed` falls back on `auto.offset.reset`."""

_MOST_RECORDS = 1_000_000
"""The client returns no more at a time."""
_USERS_CALLBACKS = frozenset({"error_cb", "throttle_cb"})
_SPECIAL = {"committed": OFFSET_STORED, "earliest": OFFSET_BEGINNING, "latest": OFFSET_END}


@dataclass(frozen=True, slots=True)
class Position:
    """How far a partition was read.

    Attributes:
        offset: The next offset to be returned; None while that depends on what Kafka answers.
        start: Where reading began.
        leader_epoch: The leader epoch of the last record that was returned, where it is known.
    """

    offset: int | None
    start: Start
    leader_epoch: int | None = None


class Fetcher:
    """Reads records of assigned partitions.

    Raises:
        ConfigurationError: The client refuses a setting; the message names it.
    """

    def __init__(self, settings: Settings) -> None:
        self._attempt = Attempt("reading records", settings.brokers)
        self._staged: dict[TopicPartition, Start] = {}
        self._started: dict[TopicPartition, Start] = {}
        self._withheld: set[TopicPartition] = set()
        self._problem: Exception | None = None
        self._unseen: list[Message] = []
        self._statistics = "{}"
        self._missing = MissingTopics()
        config = {**settings.fetcher(), "stats_cb": self._keep_statistics}
        config.update({name: partial(self._call_user, config[name]) for name in _USERS_CALLBACKS & config.keys()})
        try:
            self._consumer = confluent_kafka.Consumer(config)
        except (KafkaException, ValueError, TypeError) as problem:
            raise configuration_error(problem) from problem

    def stage(self, partitions: Iterable[TopicPartition]) -> None:
        """Prepare partitions to be read from their committed offset on; a `seek` before `start_staged` holds before their first record."""
        staged: dict[TopicPartition, Start] = dict.fromkeys(partitions, "committed")
        self._missing.found(staged)
        self._staged.update(staged)

    def start_staged(self) -> None:
        """Begin to read what is staged.

        Raises:
            BrokerError: The client refused; it is tried again with the next read.
        """
        starts = dict(self._staged)
        if not starts:
            return
        try:
            self._consumer.incremental_assign([theirs(tp, _offset(start)) for tp, start in starts.items()])
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), self._attempt, starts) from problem
        self._staged.clear()
        self._started.update(starts)
        self._consumer.pause([theirs(tp) for tp in self._withheld.intersection(starts)])

    def pin(self, partition: TopicPartition, offset: int) -> None:
        """Begin at the offset that was told to be the position, where reading has not begun: the log may grow until then."""
        if partition in self._staged:
            self._staged[partition] = offset

    def withhold(self, partitions: frozenset[TopicPartition]) -> None:
        """Return no records of these partitions, and of no others.

        What is buffered of them is dropped, and read again once they are not withheld any more, from the last record that was returned on.
        """
        silenced, freed = partitions - self._withheld, self._withheld - partitions
        self._withheld = set(partitions)
        self._consumer.pause([theirs(tp) for tp in silenced.intersection(self._started)])
        self._consumer.resume([theirs(tp) for tp in freed.intersection(self._started)])

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions and all that is buffered of them."""
        gone = set(partitions)
        for tp in gone:
            self._staged.pop(tp, None)
        running = [theirs(tp) for tp in gone if self._started.pop(tp, None) is not None]
        if not running:
            # Every poll comes by here, and to be asked for nothing at all takes the client 0.1 ms.
            return
        # The client remembers a pause over an unassign, and would be silent about a partition that comes back.
        self._consumer.resume(running)
        try:
            self._consumer.incremental_unassign(running)
        except KafkaException as problem:
            # Told by the next read: whoever gives partitions up owes that to the group, and must not be kept from it.
            self._problem = broker_error(kafka_error(problem), self._attempt, gone)

    def seek(self, partition: TopicPartition, start: Start) -> None:
        """Read on from somewhere else. What is buffered of the partition is dropped.

        Raises:
            IllegalStateError: The partition is not assigned, or Kafka has no such offset.
        """
        if isinstance(start, int) and not 0 <= start <= MAX_OFFSET:
            msg = (
                f"seek of {partition} to {start}: an offset is a number from 0 to {MAX_OFFSET}; "
                "use seek_to_beginning or seek_to_end for the ends of the log"
            )
            raise IllegalStateError(msg)
        self.position(partition)
        # A seek of the client's is refused while the partition's fetching is only starting; a new assignment is not.
        if self._started.pop(partition, None) is not None:
            self._consumer.incremental_unassign([theirs(partition)])
            self._staged[partition] = start
            self.start_staged()
        else:
            self._staged[partition] = start

    def position(self, partition: TopicPartition) -> Position:
        """How far a partition was read.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        start = self._staged.get(partition, self._started.get(partition))
        if start is None:
            msg = f"the position of {partition} is not known: it is not assigned to this consumer"
            raise IllegalStateError(msg)
        reached = None if partition in self._staged else self._reached(partition)
        if reached is not None:
            return Position(reached.offset, start, reached.leader_epoch)
        return Position(start if isinstance(start, int) else None, start)

    def read(self, max_records: int, timeout_s: float) -> list[Message]:
        """At most `max_records` records; returns as soon as there is one, or the time is over.

        Raises:
            BrokerError: An earlier read met an error that does not mend itself.
        """
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        self.start_staged()
        try:
            batch = self._whatever_is_there(min(max_records, _MOST_RECORDS), timeout_s)
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), self._attempt) from problem
        if any(map(Message.error, batch)):
            batch = [message for message in batch if self._is_record(message)]
        return self._without_withheld(batch) if self._withheld else batch

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def begin(self) -> None:
        """A poll begins: what was read before has reached the user."""
        self._unseen = []

    def put_back_unseen(self) -> None:
        """Read again what was read since `begin`, because it never reached the user.

        A partition that was given up, or sought elsewhere, since these records were returned is left
        where it is.
        """
        records, self._unseen = self._unseen, []
        self._put_back(records)

    def _put_back(self, records: Iterable[Message]) -> None:
        spans: dict[TopicPartition, tuple[int, int]] = {}
        for record in records:
            tp, offset = _partition(record), record.offset() or 0
            first, _ = spans.get(tp, (offset, offset))
            spans[tp] = (first, offset)
        for tp, (first, last) in spans.items():
            reached = self._reached(tp) if tp in self._started else None
            if reached is not None and first <= reached.offset <= next_offset(last):
                self.seek(tp, first)

    def lag(self, partition: TopicPartition) -> int | None:
        """How many offsets are between the position and the end that the last fetch told; None while one of them is not known."""
        reached = self.position(partition).offset
        if reached is None or partition not in self._started:
            return None
        _, end = self._consumer.get_watermark_offsets(theirs(partition), cached=True)
        return max(end - reached, 0) if end >= 0 else None

    def metrics(self) -> dict[str, Any]:
        """The client's latest statistics; empty before the first."""
        found: dict[str, Any] = json.loads(self._statistics)
        return found

    def _whatever_is_there(self, count: int, timeout_s: float) -> list[Message]:
        """The client waits for as many records as it is asked for: so only the first one is waited for."""
        before = len(self._unseen)
        self._consume(count, 0.0)
        if timeout_s and len(self._unseen) == before:
            self._consume(1, timeout_s)
            if count > 1 and len(self._unseen) > before:
                self._consume(count - 1, 0.0)
        return self._unseen[before:]

    def _consume(self, count: int, timeout_s: float) -> None:
        # In one step of Python's: a signal handler that raises would else take away what the client has just returned.
        self._unseen.extend(chain.from_iterable(map(self._consumer.consume, (count,), (timeout_s,))))

    def _reached(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """Behind the last record that was returned; None before the first one, and after a seek."""
        return as_committed(self._consumer.position([theirs(partition)])[0])

    def _call_user(self, callback: Callable[..., None], *arguments: object) -> None:
        """An exception that left a callback would take the records with it that the client was about to return."""
        try:
            callback(*arguments)
        except Exception as problem:  # noqa: BLE001 - it is the user's code, and reaches the user with the next read
            self._problem = problem

    def _keep_statistics(self, raw: str) -> None:
        self._statistics = raw

    def _without_withheld(self, batch: list[Message]) -> list[Message]:
        """A pause drops what librdkafka has buffered; should a record slip through all the same, it is read again after the resume."""
        slipped = [message for message in batch if _partition(message) in self._withheld]
        if not slipped:
            return batch
        self._put_back(slipped)
        return [message for message in batch if _partition(message) not in self._withheld]

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        if error is None or error.code() == END_OF_PARTITION:
            return True
        if self._missing.is_known(message, error):
            return False
        if error.code() in PASSING:
            logger.info("reading records: %s", error.str())
        else:
            self._problem = broker_error(error, self._attempt, [_partition(message)] if message.topic() else ())
        return False


def _offset(start: Start) -> int:
    return start if isinstance(start, int) else _SPECIAL[start]


def _partition(message: Message) -> TopicPartition:
    return TopicPartition(message.topic() or "", message.partition() or 0)

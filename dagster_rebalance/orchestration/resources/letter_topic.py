"""The dead-letter topic of a group: reads its letters, and changes their state.

Each call reads the topic up to its current end. Other programs may write to it, so a record that is
no letter is counted, and never an error.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.letters import Letter, LetterFold, LetterKind, Place, parse_record
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition, next_offset
from dagster_rebalance.core.reporting.open_letters import OpenLetterFold
from dagster_rebalance.kafka.client.defaults import DELIVERY_LIMIT_S
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer, Delivery
from dagster_rebalance.kafka.reading.range_reader import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Self

    from dagster_rebalance.core.batches.record_filter import RecordPredicate
    from dagster_rebalance.core.model.letters import LetterEntry, Malformed, StateChange
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.reporting.open_letters import OpenLetters
    from dagster_rebalance.kafka.reading.range_reader import RangeReader
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_DELIVERY_SLICE_S = 0.1
_MOST_IN_FLIGHT = 10_000


class LetterTail:
    """Reads a dead-letter topic incrementally. Not thread-safe.

    Args:
        reader: Reads the topic.
        topic: The topic.
        on_restart: Is called before the topic is read from the start, because records that were
            read are gone: retention has deleted them, or the topic was recreated or truncated.
    """

    def __init__(self, reader: RangeReader, topic: str, on_restart: Callable[[], None]) -> None:
        self._reader = reader
        self._topic = topic
        self._on_restart = on_restart
        self._topic_id = ""
        self._starts: dict[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int] = {}

    def read(
        self, *, since_ms: int | None = None
    ) -> Iterator[tuple[Place, Letter | StateChange | Malformed]]:
        """Yield the parsed records since the last read, or all of them since a time.

        Raises:
            BrokerError: Kafka did not answer, or there is no such topic.
        """
        topic_id, log = self._reader.topic_log(self._topic)
        if topic_id != self._topic_id or self._has_lost_records(log):
            self._topic_id = topic_id
            self._positions = {}
            self._starts = {partition: bounds.start for partition, bounds in log.items()}
            self._on_restart()
        for place, found in parsed_records(
            self._reader.read_topic(
                self._topic,
                since_ms=None if self._positions else since_ms,
                positions=dict(self._positions),
            )
        ):
            partition = TopicPartition(self._topic, place.partition)
            self._positions[partition] = next_offset(place.offset)
            yield place, found
        for partition, bounds in log.items():  # the last offsets may hold no records
            self._positions[partition] = max(self._positions.get(partition, 0), bounds.until)

    def _has_lost_records(self, log: Mapping[TopicPartition, Bounds]) -> bool:
        return any(
            partition not in log
            or log[partition].until < self._positions.get(partition, 0)
            or log[partition].start > start
            for partition, start in self._starts.items()
        )


class NewLetters:
    """The open letters of the dead-letter topic of a group, read incrementally. A context manager.

    Not thread-safe.

    Args:
        kafka: The connection to Kafka, and the group.

    Raises:
        ConfigurationError: The group has no dead-letter topic.
    """

    def __init__(self, kafka: KafkaConsumerResource) -> None:
        self._topic = DeadLetterTopic(kafka).name
        self._group_id = kafka.group_id
        self._reader = kafka.letter_reader()
        self._tail = LetterTail(self._reader, self._topic, self._begin)
        self._begin()

    def _begin(self) -> None:
        self._fold = OpenLetterFold(self._topic, self._group_id)

    def read(self) -> OpenLetters:
        """Read the records since the last call, and return the open letters.

        Raises:
            BrokerError: Kafka did not answer, or there is no such topic.
        """
        for place, found in self._tail.read():
            self._fold.add(place, found)
        return self._fold.open_letters()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()


class DeadLetterTopic:
    """The dead letters of a group.

    Args:
        kafka: The connection to Kafka, and the group.
        topic: The topic; empty for the `dead_letter_topic` of the group.

    Raises:
        ConfigurationError: The group has no dead-letter topic.
    """

    def __init__(self, kafka: KafkaConsumerResource, topic: str = "") -> None:
        self.name = topic or kafka.dead_letter_topic or ""
        if not self.name:
            msg = (
                f"group {kafka.group_id} has no dead_letter_topic: pass --topic with the topic of "
                "its letters"
            )
            raise ConfigurationError(msg)
        self.group_id = kafka.group_id
        self._kafka = kafka

    def read(
        self, *, since_ms: int | None = None, limit_s: float = DEFAULT_TIMEOUT_S
    ) -> LetterFold:
        """Return the letters without their records, from a time on.

        Args:
            since_ms: The time at which the oldest letters were stored.
            limit_s: The longest wait for a response.

        Raises:
            BrokerError: Kafka did not answer, or there is no such topic.
        """
        fold, only = LetterFold(self._kafka.group_id, keeps_values=False), self._kafka.predicate()
        with closing(self._kafka.letter_reader()) as reader:
            records = reader.read_topic(self.name, since_ms=since_ms, timeout_s=limit_s)
            for place, found in parsed_records(records):
                fold.add(place, found)
                if only is not None and isinstance(found, Letter) and not _passes(found, only):
                    fold.left_out.add(place)
        return fold

    def with_records(self, entries: Iterable[LetterEntry]) -> Iterator[Letter]:
        """Yield letters with the values, keys and headers of their records.

        Raises:
            BrokerError: Kafka did not answer, or has deleted a letter.
        """
        ranges = [
            OffsetRange(self.name, *entry.place, next_offset(entry.place.offset))
            for entry in entries
        ]
        with closing(self._kafka.letter_reader()) as reader:
            for _, found in parsed_records(reader.read_lists(ranges)) if ranges else ():
                if isinstance(found, Letter):
                    yield found

    def change(self, changes: Iterable[StateChange], *, limit_s: float = DELIVERY_LIMIT_S) -> None:
        """Store changes of the states of letters of the group, and wait until Kafka has them.

        Args:
            changes: The changes, at most one per letter.
            limit_s: The longest wait for a confirmation.

        Raises:
            BrokerError: A change could not be stored; earlier ones may be. Repeat the call.
        """
        given = [replace(change, group_id=self._kafka.group_id) for change in changes]
        kinds = [[one for one in given if one.kind is kind] for kind in LetterKind]
        with closing(DeadLetterProducer(self._kafka.consumer_config(), self.name)) as producer:
            for left in map(iter, kinds):  # letters of different kinds may have the same key
                while part := list(islice(left, _MOST_IN_FLIGHT)):
                    for change in part:
                        producer.send(*change.record)
                    self._wait(producer, {change.key for change in part}, limit_s)

    def _wait(self, producer: DeadLetterProducer, keys: set[str], limit_s: float) -> None:
        until, is_late = time.monotonic() + limit_s, False
        while keys:
            ended = producer.deliveries(_DELIVERY_SLICE_S)
            if ended:
                until = time.monotonic() + limit_s
            elif time.monotonic() > until:
                is_late = True
                ended = (Delivery(min(keys), f"Kafka has not confirmed it in {limit_s:g} s"),)
            for delivery in ended:
                keys.discard(delivery.key)
                if delivery.problem:
                    msg = (
                        f"the state of letter {delivery.key} could not be stored in topic "
                        f"{self.name}: {delivery.problem}"
                    )
                    raise BrokerError(msg, retriable=is_late)


class _Copy:
    """The copy of a record in its letter."""

    def __init__(self, letter: Letter) -> None:
        self._letter = letter

    def key(self) -> bytes | None:
        return self._letter.record_key

    def value(self) -> bytes | None:
        return self._letter.value

    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        return self._letter.headers


def _passes(letter: Letter, only: RecordPredicate) -> bool:
    return letter.kind is LetterKind.RANGE or only.passes(_Copy(letter))


def parsed_records(
    read: Iterable[list[Any]], wanted: Callable[[bytes], bool] | None = None
) -> Iterator[tuple[Place, Letter | StateChange | Malformed]]:
    """Yield the parsed records of a dead-letter topic, or only those whose keys are wanted."""
    for message in chain.from_iterable(read):
        key = message.key()
        if wanted is None or wanted(key.encode() if isinstance(key, str) else key or b""):
            place = Place(message.partition() or 0, message.offset() or 0)
            headers: Any = message.headers()
            yield place, parse_record(key, message.value(), headers)

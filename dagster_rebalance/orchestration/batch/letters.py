"""The letters of the records that a batch sets aside.

A letter counts as stored when all in-sync replicas of the dead-letter topic have it. A batch may
process a range that an earlier attempt has processed. It then reads the letters of its partitions
from the topic first, and stores no second letter for a record. If it has processed a record that
an earlier attempt set aside, it marks the letter as replayed, so that no replay doubles the record.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dagster_rebalance.core.model.errors import (
    BrokerError,
    IllegalStateError,
    TooManyLettersError,
)
from dagster_rebalance.core.model.letters import (
    LIMIT_WINDOW_MS,
    Letter,
    LetterFold,
    LetterKind,
    LetterState,
    StateChange,
)
from dagster_rebalance.core.model.offsets import OffsetRange, next_offset
from dagster_rebalance.core.runs.rerun_batch import rerun_of
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.kafka.reading.range_reader import DEFAULT_TIMEOUT_S
from dagster_rebalance.orchestration.resources.letter_topic import LetterTail, parsed_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from confluent_kafka import Message

    from dagster_rebalance.core.model.letters import (
        LetterLimit,
        LetterStamp,
    )
    from dagster_rebalance.core.model.offsets import Bounds, TopicPartition
    from dagster_rebalance.kafka.reading.range_reader import RangeReader
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

Position = tuple[str, int, int, str]
"""Topic, partition and offset of a record, and the reason why it is set aside."""

POSITION_COLUMNS = ("topic", "partition", "offset")
_CHUNK = 500
"""Letters that are stored together."""
_CHUNK_BYTES = 32 * 1024 * 1024
"""The producer's queue has 1 GiB."""
_CLOCK_MARGIN_MS = 2 * 3600 * 1000
"""A letter is stored after its record. By default, Kafka accepts timestamps of producers up to one
hour ahead of the broker's clock."""
_MAX_GAP = 1_000
"""Offsets between two set-aside records up to which one read is cheaper than two."""


class LetterProducers:
    """The producers of one run, one per dead-letter topic, created for the first letter.

    Attributes:
        recent: The letters of the last hour by topic, if their number is limited.
        searched: The open letters of the bisected ranges of the run, by topic and source partition.
    """

    def __init__(self, kafka: KafkaConsumerResource) -> None:
        self._kafka = kafka
        self._pid = os.getpid()
        self.recent: dict[str, RecentLetters] = {}
        self.searched: dict[tuple[str, TopicPartition], SearchedLetters] = {}
        self._producers: dict[tuple[int, str], DeadLetterProducer] = {}

    @cached_property
    def reader(self) -> RangeReader:
        """The reader of the dead-letter topics."""
        return self._kafka.letter_reader()

    def of(self, topic: str) -> DeadLetterProducer:
        """Return the producer of a topic."""
        key = (os.getpid(), topic)  # a forked child has the client of its parent without threads
        if key not in self._producers:
            self._producers[key] = DeadLetterProducer(self._kafka.consumer_config(), topic)
        return self._producers[key]

    def close(self) -> None:
        """Close all producers of this process."""
        for pid, topic in list(self._producers):
            if pid == os.getpid():
                self._producers.pop((pid, topic)).close()
        if "reader" in vars(self) and os.getpid() == self._pid:
            self.reader.close()


class RecentLetters:
    """The open letters of a group in one topic within the last hour, read incrementally."""

    def __init__(self, reader: RangeReader, topic: str, group_id: str) -> None:
        self._group_id = group_id
        self._offsets: dict[TopicPartition, dict[int, tuple[int, bool]]] = {}
        self._tail = LetterTail(reader, topic, self._begin)
        self._begin()

    def _begin(self) -> None:
        self._fold = LetterFold(self._group_id, keeps_values=False)

    def read(self, now_ms: int) -> None:
        """Read the new records of the topic."""
        since_ms = max(0, now_ms - LIMIT_WINDOW_MS)
        for place, found in self._tail.read(since_ms=since_ms):
            self._fold.add(place, found)
        for letter_id, entry in list(self._fold.entries.items()):
            if entry.time_ms < since_ms:
                del self._fold.entries[letter_id]
        self._offsets = {}
        self.add(
            entry.letter
            for entry in self._fold.in_state(LetterState.OPEN)
            if entry.letter is not None
        )

    def add(self, letters: Iterable[Letter]) -> None:
        """Add letters that were stored."""
        for letter in letters:
            of_partition = self._offsets.setdefault(letter.range.topic_partition, {})
            is_of_rerun = rerun_of(letter.batch_id) != ""
            of_partition[letter.range.start] = letter.time_ms or 0, is_of_rerun

    def offsets(self, partition: TopicPartition, now_ms: int) -> dict[int, bool]:
        """Return the offsets of a partition with letters within the last hour.

        The value is whether a rerun has stored the letter.
        """
        kept = {
            offset: (at, is_of_rerun)
            for offset, (at, is_of_rerun) in self._offsets.get(partition, {}).items()
            if at > now_ms - LIMIT_WINDOW_MS
        }
        self._offsets[partition] = kept
        return {offset: is_of_rerun for offset, (_, is_of_rerun) in kept.items()}


class SearchedLetters(NamedTuple):
    """The open letters of records in a bisected range, which one read finds for all of its parts.

    Attributes:
        range: The bisected range.
        log: The id and the bounds of the dead-letter topic before the read.
        letters: The letters by key.
    """

    range: OffsetRange
    log: tuple[str, Mapping[TopicPartition, Bounds]]
    letters: Mapping[str, Letter]


class BatchLetters:
    """Stores the letters of one batch. Thread-safe.

    Args:
        producers: The producers of the run.
        reader: Reads the dead-letter topic.
        ranges: The ranges of the batch.
        stamp: Returns the origin of letters that are stored now.
        is_repeat: Whether an earlier attempt may have stored letters of the batch.
        limit: The limit of letters per partition.
        bisected: The bisected range if the batch is a part of one.
        on_first: Is called before the first letter is stored.
    """

    def __init__(
        self,
        producers: LetterProducers,
        reader: RangeReader,
        ranges: Iterable[OffsetRange],
        stamp: Callable[[int], LetterStamp],
        *,
        is_repeat: bool,
        bisected: OffsetRange | None = None,
        limit: LetterLimit | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._producers = producers
        self._reader = reader
        self._ranges: dict[TopicPartition, list[OffsetRange]] = {}
        for range_ in ranges:
            self._ranges.setdefault(range_.topic_partition, []).append(range_)
        self._limit = limit
        self._stamp = stamp
        self._is_repeat = is_repeat
        self._bisected = bisected
        self._on_first = on_first
        self._stored: dict[str, set[str]] = {}
        self._known: dict[str, _KnownLetters] = {}
        self._counted: set[str] = set()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._shared = mmap.mmap(-1, 1)  # with processes that this one forks

    @property
    def count(self) -> int:
        """The number of set-aside records."""
        return sum(map(len, self._stored.values()))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the letters."""
        return tuple(key for keys in self._stored.values() for key in sorted(keys))

    @property
    def has_letters_of_children(self) -> bool:
        """Whether processes that this one has forked have set records aside."""
        return bool(self._shared[0])

    def store(self, letters: Iterable[Letter], topic: str) -> int:
        """Store letters, and return their number after all of them are stored."""
        number = 0
        for chunk in _chunks(letters):
            number += len(chunk)
            with self._lock:
                self._store(chunk, topic)
        return number

    def close_processed(self, topic: str) -> None:
        """Mark the letters of earlier attempts on records that this one has processed.

        Call this method after the success of a batch that an earlier attempt may have processed.

        Raises:
            BrokerError: Kafka did not answer, or refused.
            IllegalStateError: Processes that this one has forked have set records aside.
        """
        if self.has_letters_of_children:
            msg = "a worker process has set records aside, and only that process knows which"
            raise IllegalStateError(msg)
        stamp = self._stamp(int(time.time() * 1000))
        kept = self._stored.get(topic, set())
        found = [
            letter
            for key, letter in self._open_letters(topic, stamp.group_id).items()
            if key not in kept and self._has(letter.range)
        ]
        changes = [
            StateChange(
                letter.key,
                LetterState.REPLAYED,
                "dagster_rebalance",
                f"attempt {stamp.attempt} on its range has processed the record",
                stamp.time_ms,
                stamp.run_id,
                group_id=stamp.group_id,
            )
            for letter in with_their_records(found, self._reader)
        ]
        if changes:
            self._producers.of(topic).store(change.record for change in changes)

    def _open_letters(self, topic: str, group_id: str) -> Mapping[str, Letter]:
        if self._bisected is None:
            return self._read(topic, self._first_ms(), group_id, LetterState.OPEN)
        log = self._reader.topic_log(topic)
        known = self._producers.searched.get((topic, self._bisected.topic_partition))
        if known is None or (known.range, known.log) != (self._bisected, log):
            found = self._read(topic, self._first_ms(), group_id, LetterState.OPEN)
            known = SearchedLetters(self._bisected, log, found)
            self._producers.searched[topic, self._bisected.topic_partition] = known
        return known.letters

    def _first_ms(self) -> int | None:
        """Return a time before that of all letters of the ranges; None if it is unknown."""
        own = [range_ for ranges in self._ranges.values() for range_ in ranges]
        firsts = [replace(range_, until=next_offset(range_.start)) for range_ in own]
        try:
            times = [message.timestamp() for message in self._reader.read(firsts)]
        except BrokerError:  # retention has deleted one of them
            return None
        if len(times) < len(own) or not all(kind for kind, _ in times):
            return None
        return min(int(time.time() * 1000), *(at for _, at in times)) - _CLOCK_MARGIN_MS

    def _has(self, range_: OffsetRange) -> bool:
        own = self._ranges.get(range_.topic_partition, ())
        return any(one.start <= range_.start < one.until for one in own)

    def _store(self, chunk: Sequence[Letter], topic: str) -> None:
        if not self._stored:
            self._on_first()
        if os.getpid() != self._pid:
            self._shared[0] = 1
        stored = self._stored.setdefault(topic, set())
        new = {letter.key: letter for letter in chunk if letter.key not in stored}
        stamp = self._stamp(int(time.time() * 1000))
        known: Mapping[str, Letter] = {}
        if self._is_repeat and new:
            known = self._known_letters(new.values(), topic, stamp)
        stamped = [
            letter.stamped(stamp)
            for key, letter in new.items()
            if key not in known or not letter.is_of_same_record(known[key])
        ]
        recent = self._checked(stamped, topic, stamp)
        self._producers.of(topic).store(letter.record for letter in stamped)
        if recent is not None:
            recent.add(stamped)
        stored.update(new)

    def _checked(
        self, letters: Sequence[Letter], topic: str, stamp: LetterStamp
    ) -> RecentLetters | None:
        """Check the limit, and return the recent letters if there is one."""
        if self._limit is None or not letters:
            return None
        recent = self._producers.recent.get(topic)
        if recent is None:
            recent = RecentLetters(self._reader, topic, stamp.group_id)
            self._producers.recent[topic] = recent
        is_first = topic not in self._counted
        if is_first:  # other runs, and the member, store letters of these partitions, too
            recent.read(stamp.time_ms)
            self._counted.add(topic)
        problem = self._why_too_many(letters, recent, self._limit, stamp)
        if problem and not is_first:  # an operator may have closed letters
            recent.read(stamp.time_ms)
            problem = self._why_too_many(letters, recent, self._limit, stamp)
        if problem:
            raise TooManyLettersError(problem)
        return recent

    def _why_too_many(
        self,
        letters: Iterable[Letter],
        recent: RecentLetters,
        limit: LetterLimit,
        stamp: LetterStamp,
    ) -> str | None:
        is_rerun = rerun_of(stamp.batch_id) != ""
        new: dict[TopicPartition, set[int]] = {}
        for letter in letters:
            new.setdefault(letter.range.topic_partition, set()).add(letter.range.start)
        for partition, offsets in new.items():
            ranges = self._ranges[partition]
            start = min(range_.start for range_ in ranges)
            until = max(range_.until for range_ in ranges)
            # A share is one of the offsets that the group has processed within the hour. A rerun
            # of older offsets does not extend them, and has its own.
            found = {
                offset
                for offset, is_of_rerun in recent.offsets(partition, stamp.time_ms).items()
                if limit.number is not None
                or start <= offset < until
                or (offset < start and is_of_rerun is is_rerun)
            } | offsets
            allowed = limit.allowed(until - min(start, *found))
            if len(found) > allowed:
                return (
                    f"{partition} would have {len(found)} dead letters within an hour, and "
                    f"max_dead_letters allows {allowed}: its producers or the code may have "
                    "changed. Mend them, close letters (dagster-rebalance letters discard or "
                    "replay), or raise max_dead_letters. Then use dagster-rebalance retry, or "
                    "wait for the next attempt"
                )
        return None

    def _known_letters(
        self, new: Iterable[Letter], topic: str, stamp: LetterStamp
    ) -> Mapping[str, Letter]:
        times = [letter.timestamp_ms for letter in new]
        known_times = [
            at for at in times if at is not None and at <= stamp.time_ms + _CLOCK_MARGIN_MS
        ]  # the letter of a record from the future may be older than the record
        since_ms = min(known_times) - _CLOCK_MARGIN_MS if len(known_times) == len(times) else None
        known = self._known.get(topic)
        if known is None or not known.covers(since_ms):
            # Records of very different age: the second read is of the whole topic.
            bound = None if known else since_ms
            states = (LetterState.OPEN, LetterState.DISCARDED)
            found = self._read(topic, bound, stamp.group_id, *states)
            known = self._known[topic] = _KnownLetters(bound, found)
        return known.letters

    def _read(
        self, topic: str, since_ms: int | None, group_id: str, *states: LetterState
    ) -> Mapping[str, Letter]:
        """Return the letters of records of the batch's partitions in some states, by key."""
        origins = {f"{partition}".encode() for partition in self._ranges}
        fold = LetterFold(group_id, keeps_values=False)
        bound = None if since_ms is None or since_ms < 0 else since_ms
        for place, found in parsed_records(
            self._reader.read_topic(topic, since_ms=bound),
            lambda key: key.rpartition(b"-")[0] in origins,
        ):
            fold.add(place, found)
        return {
            entry.letter.key: entry.letter
            for entry in fold.in_state(*states)
            if entry.letter is not None and entry.letter.kind is LetterKind.RECORD
        }


def with_their_records(
    letters: Iterable[Letter], reader: RangeReader, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[Letter]:
    """Yield the letters whose record is still at its offset, as far as timestamps tell.

    If a log was recreated, the letters from before that have other records. So of each partition,
    the records of the oldest letters are read until one is that of its letter, or cannot be read.
    """

    def is_of_other(letter: Letter) -> bool:
        try:
            found = list(reader.read([letter.range], timeout_s))
        except BrokerError:  # retention has deleted it since
            return False
        return not all(letter_of(message, "").is_of_same_record(letter) for message in found)

    of_partition: dict[TopicPartition, list[Letter]] = {}
    for letter in letters:
        of_partition.setdefault(letter.range.topic_partition, []).append(letter)
    for own in of_partition.values():
        yield from dropwhile(is_of_other, sorted(own, key=lambda letter: letter.time_ms or 0))


def _chunks(letters: Iterable[Letter]) -> Iterator[list[Letter]]:
    chunk: list[Letter] = []
    size = 0
    for letter in letters:
        chunk.append(letter)
        size += _bytes_of(letter)
        if len(chunk) >= _CHUNK or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _bytes_of(letter: Letter) -> int:
    texts = (letter.value, letter.record_key, *(value for _, value in letter.headers))
    return sum(len(text) for text in texts if text is not None)


class _KnownLetters:
    def __init__(self, since_ms: int | None, letters: Mapping[str, Letter]) -> None:
        self._since_ms = since_ms
        self.letters = letters

    def covers(self, since_ms: int | None) -> bool:
        """Whether all letters since a time were read."""
        return self._since_ms is None or (since_ms is not None and since_ms >= self._since_ms)


def as_bytes(value: str | bytes | None) -> bytes | None:
    """Return a key, value or header as bytes; the client's types also allow text."""
    return value.encode() if isinstance(value, str) else value


def letter_of(message: Message, reason: str) -> Letter:
    """Return the letter of a message."""
    kind, at_ms = message.timestamp()
    headers: Any = message.headers() or ()
    offset = message.offset() or 0
    return Letter(
        OffsetRange(message.topic() or "", message.partition() or 0, offset, next_offset(offset)),
        reason,
        as_bytes(message.value()),
        record_key=as_bytes(message.key()),
        headers=tuple((name, as_bytes(value)) for name, value in headers),
        timestamp_ms=at_ms if kind else None,
    )


def letters_at(
    positions: Iterable[Position], read: Callable[[Sequence[OffsetRange]], Iterable[Message]]
) -> Iterator[Letter]:
    """Read records again, and yield their letters: columns may have other values than the record.

    Raises:
        BrokerError: Kafka no longer has one of the records.
    """
    reasons = {(topic, number, offset): reason for topic, number, offset, reason in positions}
    ranges = list(_spans(sorted(reasons)))
    for message in read(ranges) if ranges else ():
        position = (message.topic() or "", message.partition() or 0, message.offset() or 0)
        reason = reasons.pop(position, None)
        if reason is not None:
            yield letter_of(message, reason)
    if reasons:
        topic, number, offset = next(iter(reasons))
        msg = (
            f"the record at {topic}-{number} offset {offset} was to be set aside, and Kafka does "
            "not have it: compaction has deleted it, or there never was one. Nothing was committed"
        )
        raise BrokerError(msg)


def _spans(positions: Iterable[tuple[str, int, int]]) -> Iterator[OffsetRange]:
    """Yield ranges that contain all positions, which are in order."""
    span: OffsetRange | None = None
    for topic, number, offset in positions:
        following = OffsetRange(topic, number, offset, next_offset(offset))
        if (
            span is not None
            and span.topic_partition == following.topic_partition
            and offset - span.until <= _MAX_GAP
        ):
            span = OffsetRange(topic, number, span.start, following.until)
            continue
        if span is not None:
            yield span
        span = following
    if span is not None:
        yield span


def letters_to_set_aside(records: object, reason: str) -> Iterator[Letter]:
    """Yield the letters of messages, of decoded messages, or of an iterable of either."""
    message = getattr(records, "message", records)
    if callable(getattr(message, "offset", None)):
        yield letter_of(cast("Message", message), reason)
    elif isinstance(records, Iterable) and not isinstance(records, str | bytes | Mapping):
        for record in records:
            yield from letters_to_set_aside(record, reason)
    else:
        msg = (
            f"a {type(records).__name__} cannot be set aside: pass messages of "
            "kafka_batch.messages() or decoded_messages(), rows of kafka_batch.arrow(), or a "
            "DataFrame of kafka_batch.dataframe() or decoded()"
        )
        raise IllegalStateError(msg)


def check_columns(names: Iterable[str], error: str | None) -> None:
    """Check that rows have the columns of a position, and the column of the reasons.

    Raises:
        IllegalStateError: A column is missing.
    """
    wanted = [*POSITION_COLUMNS, *([] if error is None else [error])]
    missing = [name for name in wanted if name not in set(names)]
    if missing:
        msg = (
            f"rows cannot be set aside without the column {missing[0]!r}: keep the columns "
            f"{', '.join(POSITION_COLUMNS)} of the batch, and pass the name of the column with the "
            "reasons as error=, or an exception as the reason of all rows"
        )
        raise IllegalStateError(msg)


def with_reasons(
    positions: Iterable[tuple[str, int, int, str | None]], default: str | None
) -> Iterator[Position]:
    """Yield positions, each with its reason, or with the one for all rows.

    Raises:
        IllegalStateError: A row has no reason.
    """
    for topic, number, offset, given in positions:
        reason = given if default is None else default
        if reason is None:
            msg = (
                f"the row at {topic}-{number} offset {offset} has no reason: set aside only rows "
                "with a reason, or use kafka_batch.good_rows"
            )
            raise IllegalStateError(msg)
        yield topic, number, offset, reason


def positions_in(rows: Any, error: str | None) -> list[tuple[str, int, int, str | None]]:  # noqa: ANN401 - pyarrow has no types
    """Return the topic, partition, offset and reason of all rows of an Arrow table."""
    columns = [rows.column(name).to_pylist() for name in POSITION_COLUMNS]
    given = [None] * rows.num_rows if error is None else rows.column(error).to_pylist()
    reasons = (None if one is None else str(one) for one in given)
    return list(zip(*columns, reasons, strict=True))


def without(rows: Any, others: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the rows of an Arrow table that have the position of no row of another one."""
    from pyarrow import compute  # noqa: PLC0415 - an extra

    same_offset = compute.indices_nonzero(
        compute.is_in(rows.column("offset"), others.column("offset"))
    )  # also in other partitions, so few rows are compared in Python
    found = {position[:3] for position in positions_in(others, None)}
    places = positions_in(rows.take(same_offset), None)
    left_out = {
        index
        for index, place in zip(same_offset.to_pylist(), places, strict=True)
        if place[:3] in found
    }
    if not left_out:
        return rows
    return rows.filter([index not in left_out for index in range(rows.num_rows)])


def checked(
    letters: Iterable[Letter], check: Callable[[str | None, int | None, int | None], None]
) -> Iterator[Letter]:
    """Yield letters, each after a check that the batch has its offset."""
    for letter in letters:
        check(letter.range.topic, letter.range.partition, letter.range.start)
        yield letter


def offset_check(
    ranges: Sequence[OffsetRange], batch_id: str
) -> Callable[[str | None, int | None, int | None], None]:
    """Return a function that raises if the batch does not have an offset."""
    of_partition: dict[tuple[str | None, int | None], list[OffsetRange]] = {}
    for range_ in ranges:
        of_partition.setdefault(range_.topic_partition, []).append(range_)

    def check(topic: str | None, number: int | None, offset: int | None) -> None:
        own = of_partition.get((topic, number), ())
        is_own = isinstance(offset, int) and any(one.start <= offset < one.until for one in own)
        if not is_own:
            msg = (
                f"the record at {topic}-{number} offset {offset} is not in batch {batch_id}: set "
                "aside only records that the batch has returned"
            )
            raise IllegalStateError(msg)

    return check

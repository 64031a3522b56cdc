"""The records of a replay whose ranges are single offsets: from Kafka, or else from their letters.

Retention or compaction may have deleted the record of a letter. A range of one offset has at most
one record, so all of them are read before the assets work. Larger ranges are read as in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Message

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.letters import (
    LetterKind,
    LetterState,
    letter_id,
    letter_key,
)
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.batch.letters import letter_of
from dagster_rebalance.orchestration.batch.records import GivenMessages
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.letters import Letter, LetterEntry
    from dagster_rebalance.kafka.reading.range_reader import RangeReader
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_MOST_GAP = 1_000
"""Offsets between two records up to which one read is cheaper than two."""
_CREATE_TIME = 1
_NO_TIME = 0


def single_records(
    kafka: KafkaConsumerResource, topic: str, ranges: Iterable[OffsetRange], reader: RangeReader
) -> GivenMessages:
    """Read the records of the ranges that are single offsets.

    If the log was recreated, another record has the offset, which its timestamp shows. The record
    of the letter is then processed. That of a letter that an operator has discarded since is not.

    Args:
        kafka: The group.
        topic: The dead-letter topic.
        ranges: The ranges of the replay.
        reader: Reads the records from Kafka.

    Raises:
        BrokerError: Kafka did not answer, or a record is neither in Kafka nor in its letter.
    """
    singles = sorted(range_ for range_ in ranges if len(range_) == 1)
    if not singles:
        return GivenMessages((), ())
    letter_topic = DeadLetterTopic(kafka, topic)
    known = letter_topic.read().entries
    entries = {one: known.get(letter_id(LetterKind.RECORD, _key(one))) for one in singles}
    wanted = [one for one in singles if not _is_discarded(entries[one])]
    with kafka.connect() as consumer:
        starts = consumer.beginning_offsets({range_.topic_partition for range_ in wanted})
    present = [one for one in wanted if one.start >= starts[one.topic_partition]]
    of_position = {(one.topic, one.partition, one.start): one for one in present}
    found: dict[OffsetRange, Message] = {}
    for message in reader.read(_spans(present)) if present else ():
        position = (message.topic() or "", message.partition() or 0, message.offset() or 0)
        range_ = of_position.get(position)
        if range_ is not None and _is_of(entries[range_], message):
            found[range_] = message
    missing = {_key(one): one for one in wanted if one not in found}
    stored = [entry for one in missing.values() if (entry := entries[one]) and entry.letter]
    for letter in letter_topic.with_records(stored):
        if letter.kind is LetterKind.RECORD:
            found[missing[letter.key]] = _message(letter)
    lost = next((one for one in wanted if one not in found and one not in present), None)
    if lost is not None:
        msg = (
            f"the record of {lost} is neither in Kafka nor in a letter of topic {topic}: discard "
            "its letter"
        )
        raise BrokerError(msg)
    return GivenMessages(singles, [found[one] for one in wanted if one in found])


def _is_discarded(entry: LetterEntry | None) -> bool:
    return entry is not None and entry.state is LetterState.DISCARDED


def _is_of(entry: LetterEntry | None, message: Message) -> bool:
    """Whether a record is that of a letter, if there is one."""
    letter = None if entry is None else entry.letter
    return letter is None or letter_of(message, "").is_of_same_record(letter)


def _key(range_: OffsetRange) -> str:
    return letter_key(LetterKind.RECORD, range_)


def _spans(ranges: Sequence[OffsetRange]) -> Iterator[OffsetRange]:
    """Yield ranges that contain all of the ranges, which are in order."""
    span = ranges[0]
    for following in ranges[1:]:
        is_near = following.topic_partition == span.topic_partition and (
            following.start - span.until <= _MOST_GAP
        )
        if is_near:
            span = OffsetRange(span.topic, span.partition, span.start, following.until)
        else:
            yield span
            span = following
    yield span


def _message(letter: Letter) -> Message:
    has_time = letter.timestamp_ms is not None
    return Message(
        topic=letter.range.topic,
        partition=letter.range.partition,
        offset=letter.range.start,
        key=letter.record_key,
        value=letter.value,
        headers=list(letter.headers) or None,
        timestamp=(_CREATE_TIME if has_time else _NO_TIME, letter.timestamp_ms or 0),
    )

"""The records of a replay whose ranges are single offsets: from Kafka, or else from their letters.

Retention or compaction may have deleted the record of a letter. A range of one offset has at most
one record, so all of them are read before the assets work. Larger ranges are read as in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Message

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.letters import LetterKind, letter_id, record_letter_key
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.batch.records import GivenMessages
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.letters import Letter
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
    with kafka.connect() as consumer:
        starts = consumer.beginning_offsets({range_.topic_partition for range_ in singles})
    present = [one for one in singles if one.start >= starts[one.topic_partition]]
    wanted = {(one.topic, one.partition, one.start): one for one in present}
    found: dict[OffsetRange, Message] = {}
    for message in reader.read(_spans(present)) if present else ():
        position = (message.topic() or "", message.partition() or 0, message.offset() or 0)
        if position in wanted:
            found[wanted[position]] = message
    missing = {_key(one): one for one in singles if one not in found}
    if missing:
        letter_topic = DeadLetterTopic(kafka, topic)
        entries = letter_topic.read().entries
        ids = [letter_id(LetterKind.RECORD, key) for key in missing]
        stored = [entries[one] for one in ids if one in entries and entries[one].letter]
        for letter in letter_topic.with_records(stored):
            if letter.kind is LetterKind.RECORD:
                found[missing[letter.key]] = _message(letter)
    lost = next((one for one in singles if one not in found and one not in present), None)
    if lost is not None:
        msg = (
            f"the record of {lost} is neither in Kafka nor in a letter of topic {topic}: discard "
            "its letter"
        )
        raise BrokerError(msg)
    return GivenMessages(singles, [found[one] for one in singles if one in found])


def _key(range_: OffsetRange) -> str:
    return record_letter_key(range_.topic, range_.partition, range_.start)


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

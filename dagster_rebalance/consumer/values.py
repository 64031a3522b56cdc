"""Values that users bring: partitions and offsets of this package's own types, or of confluent-kafka's.

Owns what is taken and what is refused, with a message that says what is expected. Must never look at
what is assigned: that is the operation's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import confluent_kafka

from dagster_rebalance.consumer.translation import as_committed, ours
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition, is_topic_name

if TYPE_CHECKING:
    import re
    from typing import Any

T = TypeVar("T")

AnyPartition: TypeAlias = TopicPartition | confluent_kafka.TopicPartition
"""A partition; offsets and metadata of confluent-kafka's type are not looked at."""
AnyOffsets: TypeAlias = (
    Mapping[TopicPartition, OffsetAndMetadata]
    | Mapping[confluent_kafka.TopicPartition, OffsetAndMetadata]
    | Collection[confluent_kafka.TopicPartition]
)
"""The next offset of each partition, in a mapping or in confluent-kafka's type itself."""
AnyTimestamps: TypeAlias = (
    Mapping[TopicPartition, int] | Mapping[confluent_kafka.TopicPartition, int] | Collection[confluent_kafka.TopicPartition]
)
"""A time in milliseconds for each partition, in a mapping or in the place of an offset."""

_A_PARTITION = "a TopicPartition, of dagster_rebalance or of confluent_kafka"


def given_partition(call: str, value: object) -> TopicPartition:
    """The partition that a caller names.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, TopicPartition):
        return value
    if isinstance(value, confluent_kafka.TopicPartition):
        return ours(value)
    raise _unexpected(call, _A_PARTITION, value)


def given_partitions(call: str, values: object) -> frozenset[TopicPartition]:
    """The partitions that a caller names.

    Raises:
        TypeError: It is no collection, or something in it is no partition.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise _unexpected(call, f"a collection of partitions, each {_A_PARTITION}", values)
    return frozenset(given_partition(call, value) for value in values)


def given_offsets(call: str, values: object) -> dict[TopicPartition, OffsetAndMetadata]:
    """The next offsets that a caller wants committed.

    Raises:
        TypeError: It is neither a mapping to `OffsetAndMetadata` nor a collection of confluent-kafka's partitions.
        ValueError: A partition of confluent-kafka's has no offset that could be committed.
    """
    pairs = _pairs(call, values, "OffsetAndMetadata")
    found = {tp: _committable(call, value) if isinstance(value, confluent_kafka.TopicPartition) else value for tp, value in pairs.items()}
    for offset in found.values():
        if not isinstance(offset, OffsetAndMetadata):
            raise _unexpected(call, "OffsetAndMetadata(next_offset) for each partition", offset)
        _check_offset(call, offset.offset)
    return found


def given_times(call: str, values: object) -> dict[TopicPartition, int]:
    """The times that a caller asks for; in confluent-kafka's partitions they stand in the place of the offset.

    Raises:
        TypeError: It is neither a mapping to milliseconds nor a collection of confluent-kafka's partitions.
    """
    pairs = _pairs(call, values, "milliseconds")
    found = {tp: value.offset if isinstance(value, confluent_kafka.TopicPartition) else value for tp, value in pairs.items()}
    for at in found.values():
        if not _is_whole(at):
            raise _unexpected(call, "a time in whole milliseconds for each partition", at)
    return found


def given_target(call: str, partition: object, offset: object) -> int:
    """The offset that a caller wants to read on from; whether Kafka has it is asked where it is used.

    Raises:
        TypeError: It is neither a number nor an `OffsetAndMetadata`, and the partition brings none either.
    """
    if offset is None and isinstance(partition, confluent_kafka.TopicPartition):
        offset = partition.offset
    target = offset.offset if isinstance(offset, OffsetAndMetadata) else offset
    if not isinstance(target, int) or isinstance(target, bool):
        raise _unexpected(call, "an offset, or OffsetAndMetadata", target)
    return target


def given_topics(call: str, topics: Collection[str] | re.Pattern[str]) -> None:
    """Refuse what cannot be the names of topics.

    Raises:
        TypeError: It is neither a collection of names nor a compiled pattern.
        ValueError: Kafka has no topic of such a name; librdkafka would take `^...` for a pattern of its own kind.
    """
    for topic in topics if isinstance(topics, Collection) else ():
        if not isinstance(topic, str):
            raise _unexpected(call, "names of topics, or one compiled pattern", topic)
        if not is_topic_name(topic):
            hint = f"; give a pattern compiled: re.compile({topic[1:]!r})" if topic.startswith("^") else ""
            msg = f"{call} to {topic!r}: Kafka has no topic of such a name{hint}"
            raise ValueError(msg)


def _pairs(call: str, values: object, meaning: str) -> dict[TopicPartition, Any]:
    if isinstance(values, Mapping):
        return {given_partition(call, key): value for key, value in values.items()}
    if isinstance(values, Collection) and all(isinstance(value, confluent_kafka.TopicPartition) for value in values):
        return {ours(value): value for value in values}
    raise _unexpected(call, f"a mapping of partitions to {meaning}, or a list of confluent_kafka.TopicPartition", values)


def _committable(call: str, value: confluent_kafka.TopicPartition) -> OffsetAndMetadata:
    found = as_committed(value)
    if found is None:
        msg = f"{call} of {ours(value)}: offset {value.offset} of confluent_kafka cannot be committed; give the next offset to be read"
        raise ValueError(msg)
    return found


def _check_offset(call: str, offset: Any) -> None:  # noqa: ANN401 - it comes from outside
    if not _is_whole(offset):
        raise _unexpected(call, "a whole number as offset", offset)
    if offset < 0:
        msg = f"{call}: {offset} is no offset; commit the next one to be read"
        raise ValueError(msg)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unexpected(call: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{call} expects {expected}, not {value!r}")

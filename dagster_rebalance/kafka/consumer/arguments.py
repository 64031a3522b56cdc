"""Users bring partitions and offsets in this package's own types, or in confluent-kafka's.

Owns what is taken and what is refused, with a message that says what is expected. Must never look
at what is assigned: that is the operation's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import confluent_kafka

from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    OffsetAndMetadata,
    TopicPartition,
    is_topic_name,
)
from dagster_rebalance.kafka.client.types import as_committed, ours

if TYPE_CHECKING:
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
    Mapping[TopicPartition, int]
    | Mapping[confluent_kafka.TopicPartition, int]
    | Collection[confluent_kafka.TopicPartition]
)
"""A time in milliseconds for each partition, in a mapping or in the place of an offset."""

_ENDLESS_S = 1e12
_NO_EPOCH, _LAST_EPOCH = -1, 2**31 - 1
"""As the client has them."""
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
        TypeError: It is neither a mapping to `OffsetAndMetadata` nor a collection of
            confluent-kafka's partitions.
        ValueError: A partition of confluent-kafka's has no offset that could be committed, or Kafka
            cannot store a number.
    """
    pairs = _pairs(call, values, "OffsetAndMetadata")
    found = {
        tp: _committable(call, value)
        if isinstance(value, confluent_kafka.TopicPartition)
        else value
        for tp, value in pairs.items()
    }
    for offset in found.values():
        if not isinstance(offset, OffsetAndMetadata):
            raise _unexpected(call, "OffsetAndMetadata(next_offset) for each partition", offset)
        _check_commit(call, offset)
    return found


def given_times(call: str, values: object) -> dict[TopicPartition, int]:
    """Return the times that a caller asks for.

    confluent-kafka's partitions carry the time in the place of the offset.

    Raises:
        TypeError: It is neither a mapping to milliseconds nor a collection of confluent-kafka's
            partitions.
        ValueError: A time is negative. Kafka would take some for the ends of the log.
    """
    pairs = _pairs(call, values, "milliseconds")
    found = {
        tp: value.offset if isinstance(value, confluent_kafka.TopicPartition) else value
        for tp, value in pairs.items()
    }
    for tp, at in found.items():
        if not _is_whole(at):
            raise _unexpected(call, "a time in whole milliseconds for each partition", at)
        if at < 0:
            msg = f"{call} of {tp}: {at} is no time; give milliseconds since 1970, at least 0"
            raise ValueError(msg)
    return found


def given_target(call: str, partition: object, offset: object) -> int:
    """Return the offset from which a caller wants to read on.

    The operation that uses the offset asks whether Kafka has it.

    Raises:
        TypeError: It is neither a number nor an `OffsetAndMetadata`, and the partition brings none
            either.
    """
    if offset is None and isinstance(partition, confluent_kafka.TopicPartition):
        offset = partition.offset
    target = offset.offset if isinstance(offset, OffsetAndMetadata) else offset
    if not isinstance(target, int) or isinstance(target, bool):
        raise _unexpected(call, "an offset, or OffsetAndMetadata", target)
    return target


def given_topics(call: str, topics: object) -> tuple[str, ...] | re.Pattern[str]:
    """The topics that a caller names; what can be gone through only once is, here.

    Raises:
        TypeError: It is neither a collection of names nor a compiled pattern.
        ValueError: Kafka has no topic of such a name; librdkafka would take `^...` for a pattern of
            its own kind.
    """
    if isinstance(topics, re.Pattern):
        return given_pattern(call, topics)
    return given_names(call, topics, "names of topics, or one compiled pattern")


def given_names(
    call: str, topics: object, expected: str = "a collection of names of topics"
) -> tuple[str, ...]:
    """The topics that a caller names one by one.

    Raises:
        TypeError: It is no collection of names.
        ValueError: Kafka has no topic of such a name.
    """
    if isinstance(topics, str | bytes) or not isinstance(topics, Iterable):
        raise _unexpected(call, expected, topics)
    named = tuple(topics)
    for topic in named:
        if not isinstance(topic, str):
            raise _unexpected(call, expected, topic)
        if not is_topic_name(topic):
            hint = (
                f"; give a pattern compiled: re.compile({topic[1:]!r})"
                if topic.startswith("^")
                else ""
            )
            msg = f"{call} to {topic!r}: Kafka has no topic of such a name{hint}"
            raise ValueError(msg)
    return named


def given_pattern(call: str, pattern: object) -> re.Pattern[str]:
    """The pattern that a caller names topics by.

    Raises:
        TypeError: It is not compiled, or one of bytes.
    """
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    raise _unexpected(call, "a compiled pattern of text: re.compile('...')", pattern)


def given_seconds(call: str, value: object) -> float:
    """How long a caller wants to wait; below 0 is without end, as in confluent-kafka.

    Raises:
        TypeError: It is no number.
    """
    # A comparison, because math.isnan fails for large whole numbers.
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:  # noqa: PLR0124
        return value if 0 <= value < _ENDLESS_S else math.inf
    raise _unexpected(call, "a number of seconds as time-out", value)


def given_count(call: str, value: object) -> int:
    """How many records a caller takes at most.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is none at all.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unexpected(call, "a whole number as max_records", value)
    if value < 1:
        msg = (
            f"max_records must be at least 1, not {value}; "
            "pause_all() keeps the consumer in its group and reads nothing"
        )
        raise ValueError(msg)
    return value


def given_callback(call: str, callback: T) -> T:
    """What a caller wants to have called, or None.

    Raises:
        TypeError: It cannot be called.
    """
    if callback is None or callable(callback):
        return callback
    raise _unexpected(call, "a function as callback", callback)


def _pairs(call: str, values: object, meaning: str) -> dict[TopicPartition, Any]:
    if isinstance(values, Mapping):
        return {given_partition(call, key): value for key, value in values.items()}
    if isinstance(values, Collection) and all(
        isinstance(value, confluent_kafka.TopicPartition) for value in values
    ):
        return {ours(value): value for value in values}
    raise _unexpected(
        call,
        f"a mapping of partitions to {meaning}, or a list of confluent_kafka.TopicPartition",
        values,
    )


def _committable(call: str, value: confluent_kafka.TopicPartition) -> OffsetAndMetadata:
    found = as_committed(value)
    if found is None:
        msg = (
            f"{call} of {ours(value)}: offset {value.offset} "
            "of confluent_kafka cannot be committed; give the next offset to be read"
        )
        raise ValueError(msg)
    return found


def _check_commit(call: str, wanted: OffsetAndMetadata) -> None:
    offset, metadata, epoch = wanted.offset, wanted.metadata, wanted.leader_epoch
    if not _is_whole(offset):
        raise _unexpected(call, "a whole number as offset", offset)
    if not 0 <= offset <= MAX_OFFSET:
        msg = f"{call}: {offset} is no offset; commit the next one to be read"
        raise ValueError(msg)
    if not isinstance(metadata, str):
        raise _unexpected(call, "a text as metadata", metadata)
    if epoch is None:
        return
    if not _is_whole(epoch):
        raise _unexpected(call, "a whole number as leader_epoch, or None", epoch)
    if not _NO_EPOCH <= epoch <= _LAST_EPOCH:
        msg = f"{call}: {epoch} is no leader epoch; give that of the last record, or None"
        raise ValueError(msg)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unexpected(call: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{call} expects {expected}, not {value!r}")

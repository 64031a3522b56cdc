"""Check and convert arguments of the consumer's operations.

Partitions and offsets may be of this package's types or of confluent-kafka's. Errors (`TypeError`
or `ValueError`) name the operation (`call`) and the expected value.
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
from dagster_rebalance.kafka.client.confluent import from_committed, from_confluent

if TYPE_CHECKING:
    from typing import Any

T = TypeVar("T")

AnyPartition: TypeAlias = TopicPartition | confluent_kafka.TopicPartition
"""A partition; offset and metadata of confluent-kafka's type are ignored."""
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
"""A time in milliseconds for each partition, in a mapping or in place of the offset."""

_ENDLESS_S = 1e12
_NO_EPOCH, _LAST_EPOCH = -1, 2**31 - 1
_A_PARTITION = "a TopicPartition, of dagster_rebalance or of confluent_kafka"


def parse_partition(call: str, value: object) -> TopicPartition:
    """Return a partition in this package's type."""
    if isinstance(value, TopicPartition):
        return value
    if isinstance(value, confluent_kafka.TopicPartition):
        return from_confluent(value)
    raise _unexpected(call, _A_PARTITION, value)


def parse_partitions(call: str, values: object) -> frozenset[TopicPartition]:
    """Return partitions in this package's type."""
    if isinstance(values, (str, TopicPartition)) or not isinstance(values, Iterable):
        raise _unexpected(call, f"a collection of partitions, each {_A_PARTITION}", values)
    return frozenset(parse_partition(call, value) for value in values)


def parse_offsets(call: str, values: object) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets to commit; refuse offsets that Kafka cannot store."""
    offsets = {
        tp: _to_offset(call, value) if isinstance(value, confluent_kafka.TopicPartition) else value
        for tp, value in _pairs(call, values, "OffsetAndMetadata").items()
    }
    for offset in offsets.values():
        if not isinstance(offset, OffsetAndMetadata):
            raise _unexpected(call, "OffsetAndMetadata(next_offset) for each partition", offset)
        _check_commit(call, offset)
    return offsets


def parse_times(call: str, values: object) -> dict[TopicPartition, int]:
    """Return times in milliseconds. In a confluent-kafka partition, the offset is the time.

    Kafka interprets some negative times as the ends of the log, so they are refused.
    """
    times = {
        tp: value.offset if isinstance(value, confluent_kafka.TopicPartition) else value
        for tp, value in _pairs(call, values, "milliseconds").items()
    }
    for tp, time_ms in times.items():
        if not _is_whole(time_ms):
            raise _unexpected(call, "a time in whole milliseconds for each partition", time_ms)
        if time_ms < 0:
            msg = (
                f"{call} of {tp}: {time_ms} is not a time; pass milliseconds since 1970, at least 0"
            )
            raise ValueError(msg)
    return times


def parse_offset(call: str, partition: object, offset: object) -> int:
    """Return the offset to seek to, by default that of a confluent-kafka `partition`."""
    if offset is None and isinstance(partition, confluent_kafka.TopicPartition):
        offset = partition.offset
    target = offset.offset if isinstance(offset, OffsetAndMetadata) else offset
    if not isinstance(target, int) or isinstance(target, bool):
        raise _unexpected(call, "an offset, or OffsetAndMetadata", target)
    return target


def parse_subscription(call: str, topics: object) -> tuple[str, ...] | re.Pattern[str]:
    """Return the names or the compiled pattern of a subscription."""
    if isinstance(topics, re.Pattern):
        return parse_pattern(call, topics)
    return parse_names(call, topics, "names of topics, or one compiled pattern")


def parse_names(
    call: str, topics: object, expected: str = "a collection of names of topics"
) -> tuple[str, ...]:
    """Return names of topics; `topics` may be an iterator.

    librdkafka would treat `^...` as a pattern in its own syntax, so it is refused.
    """
    if isinstance(topics, str | bytes) or not isinstance(topics, Iterable):
        raise _unexpected(call, expected, topics)
    names = tuple(topics)
    for name in names:
        if not isinstance(name, str):
            raise _unexpected(call, expected, name)
        if not is_topic_name(name):
            hint = (
                f"; pass a compiled pattern: re.compile({name[1:]!r})"
                if name.startswith("^")
                else ""
            )
            msg = f"{call} to {name!r}: not a valid topic name{hint}"
            raise ValueError(msg)
    return names


def parse_pattern(call: str, pattern: object) -> re.Pattern[str]:
    """Return a compiled pattern of text."""
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    raise _unexpected(call, "a compiled pattern of text: re.compile('...')", pattern)


def parse_seconds(call: str, value: object) -> float:
    """Return a timeout; values below 0 are infinite, as in confluent-kafka."""
    # A comparison, because math.isnan fails for large whole numbers.
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:  # noqa: PLR0124
        return value if 0 <= value < _ENDLESS_S else math.inf
    raise _unexpected(call, "a number of seconds as timeout", value)


def parse_max_records(call: str, value: object) -> int:
    """Return the maximum number of records of a poll."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unexpected(call, "a whole number as max_records", value)
    if value < 1:
        msg = (
            f"max_records must be at least 1, not {value}; "
            "pause_all() keeps the consumer in its group without reading"
        )
        raise ValueError(msg)
    return value


def parse_callback(call: str, callback: T) -> T:
    """Return a function or None."""
    if callback is None or callable(callback):
        return callback
    raise _unexpected(call, "a function as callback", callback)


def _pairs(call: str, values: object, meaning: str) -> dict[TopicPartition, Any]:
    if isinstance(values, Mapping):
        return {parse_partition(call, key): value for key, value in values.items()}
    if isinstance(values, Collection) and all(
        isinstance(value, confluent_kafka.TopicPartition) for value in values
    ):
        return {from_confluent(value): value for value in values}
    raise _unexpected(
        call,
        f"a mapping of partitions to {meaning}, or a list of confluent_kafka.TopicPartition",
        values,
    )


def _to_offset(call: str, value: confluent_kafka.TopicPartition) -> OffsetAndMetadata:
    offset = from_committed(value)
    if offset is None:
        msg = (
            f"{call} of {from_confluent(value)}: offset {value.offset} "
            "of confluent_kafka cannot be committed; pass the next offset to read"
        )
        raise ValueError(msg)
    return offset


def _check_commit(call: str, commit: OffsetAndMetadata) -> None:
    offset, metadata, epoch = commit.offset, commit.metadata, commit.leader_epoch
    if not _is_whole(offset):
        raise _unexpected(call, "a whole number as offset", offset)
    if not 0 <= offset <= MAX_OFFSET:
        msg = f"{call}: {offset} is not an offset; commit the next offset to read"
        raise ValueError(msg)
    if not isinstance(metadata, str):
        raise _unexpected(call, "a text as metadata", metadata)
    if epoch is None:
        return
    if not _is_whole(epoch):
        raise _unexpected(call, "a whole number as leader_epoch, or None", epoch)
    if not _NO_EPOCH <= epoch <= _LAST_EPOCH:
        msg = f"{call}: {epoch} is not a leader epoch; pass the last record's epoch, or None"
        raise ValueError(msg)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unexpected(call: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{call} expects {expected}, not {value!r}")

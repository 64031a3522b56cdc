"""Read the committed offsets of a group while transactions with offsets of the group are open.

The broker answers UNSTABLE_OFFSET_COMMIT for the partitions of an open transaction. librdkafka then
repeats the whole request until its timeout, and omits the results of the other partitions. Must
never ignore the transaction: its offsets may replace the stored offsets.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.kafka.client.errors import NOT_ANSWERED, kafka_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PART_TIMEOUT_S = 0.5
_SHORTEST_S = 0.01
_MOST_AT_ONCE = 500
_NO_SUCH_PARTITION = 2**31 - 1

OPEN_TRANSACTION = KafkaError(
    KafkaError.UNSTABLE_OFFSET_COMMIT, "an open transaction has an offset of it"
)


def longest(timeout_s: float) -> float:
    """Return the longest duration of a read: the whole request, then one request for each part."""
    return 2 * (timeout_s + _PART_TIMEOUT_S)


def read(
    client: confluent_kafka.Consumer,
    partitions: Sequence[confluent_kafka.TopicPartition],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[confluent_kafka.TopicPartition], list[confluent_kafka.TopicPartition]]:
    """Return the committed offsets, and the partitions that wait for the end of a transaction."""
    try:
        return _read_all(client, partitions, timeout_s, clock), []
    except KafkaException as problem:
        # No transaction has an offset of a partition that does not exist.
        other = [confluent_kafka.TopicPartition(partitions[0].topic, _NO_SUCH_PARTITION)]
        if not _is_timeout(problem) or _read_part(client, other) is None:
            raise
    deadline = clock() + timeout_s
    found: list[confluent_kafka.TopicPartition] = []
    parts = deque(_halves(partitions) or [partitions])
    repeated: set[confluent_kafka.TopicPartition] = set()
    waiting: list[confluent_kafka.TopicPartition] = []
    while parts and clock() < deadline:
        part = parts.popleft()
        answers = _read_part(client, part)
        if answers is not None:
            found += answers
        elif len(part) > 1:
            parts.extend(_halves(part))
        elif part[0] in repeated:
            waiting += part
        else:  # the coordinator may have been slow once
            repeated.add(part[0])
            parts.append(part)
    return found, waiting + [partition for part in parts for partition in part]


def _read_all(
    client: confluent_kafka.Consumer,
    partitions: Sequence[confluent_kafka.TopicPartition],
    timeout_s: float,
    clock: Callable[[], float],
) -> list[confluent_kafka.TopicPartition]:
    """Read in parts: the client searches a request for each of its answers."""
    found: list[confluent_kafka.TopicPartition] = []
    deadline = clock() + timeout_s
    for first in range(0, len(partitions), _MOST_AT_ONCE):
        part = list(partitions[first : first + _MOST_AT_ONCE])
        left_s = timeout_s if first == 0 else max(deadline - clock(), _SHORTEST_S)
        found += client.committed(part, timeout=left_s)
    return found


def _halves(
    partitions: Sequence[confluent_kafka.TopicPartition],
) -> list[Sequence[confluent_kafka.TopicPartition]]:
    middle = len(partitions) // 2
    return [partitions[:middle], partitions[middle:]] if middle else []


def _read_part(
    client: confluent_kafka.Consumer, partitions: Sequence[confluent_kafka.TopicPartition]
) -> list[confluent_kafka.TopicPartition] | None:
    try:
        return client.committed(list(partitions), timeout=_PART_TIMEOUT_S)
    except KafkaException as problem:
        if not _is_timeout(problem):
            raise
        return None


def _is_timeout(problem: KafkaException) -> bool:
    return kafka_error(problem).code() == NOT_ANSWERED

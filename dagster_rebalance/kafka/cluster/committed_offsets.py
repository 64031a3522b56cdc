"""Reads the committed offsets of a group, beside transactions that are open.

Owns which partitions wait. While a transaction that has offsets of the group is open, the broker
answers UNSTABLE_OFFSET_COMMIT for their partitions. librdkafka then repeats the whole request until
its time-out, and reports nothing of the other partitions. Must never read past the transaction: its
offsets may yet replace what is stored.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.kafka.client.errors import NOT_ANSWERED, kafka_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ANSWER_S = 0.5
_NO_SUCH_PARTITION = 2**31 - 1

OPEN_TRANSACTION = KafkaError(
    KafkaError.UNSTABLE_OFFSET_COMMIT, "an open transaction has an offset of it"
)


def longest(timeout_s: float) -> float:
    """How long a read takes at most: the whole, and then its parts."""
    return 2 * (timeout_s + _ANSWER_S)


def read(
    client: confluent_kafka.Consumer,
    partitions: Sequence[confluent_kafka.TopicPartition],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[confluent_kafka.TopicPartition], list[confluent_kafka.TopicPartition]]:
    """Return the answers, and the partitions that wait for the end of a transaction.

    Raises:
        KafkaException: No answer, or a refusal of the whole request.
    """
    try:
        return client.committed(list(partitions), timeout=timeout_s), []
    except KafkaException as problem:
        # No transaction has an offset of a partition that does not exist.
        other = [confluent_kafka.TopicPartition(partitions[0].topic, _NO_SUCH_PARTITION)]
        if not _is_time_out(problem) or _asked(client, other) is None:
            raise
    return _told_apart(client, partitions, clock() + timeout_s, clock)


def _told_apart(
    client: confluent_kafka.Consumer,
    partitions: Sequence[confluent_kafka.TopicPartition],
    until: float,
    clock: Callable[[], float],
) -> tuple[list[confluent_kafka.TopicPartition], list[confluent_kafka.TopicPartition]]:
    found: list[confluent_kafka.TopicPartition] = []
    parts = deque(_halves(partitions))
    waiting: list[confluent_kafka.TopicPartition] = [] if parts else list(partitions)
    while parts and clock() < until:
        part = parts.popleft()
        answers = _asked(client, part)
        if answers is not None:
            found += answers
        elif len(part) > 1:
            parts.extend(_halves(part))
        else:
            waiting += part
    return found, waiting + [partition for part in parts for partition in part]


def _halves(
    partitions: Sequence[confluent_kafka.TopicPartition],
) -> Iterator[Sequence[confluent_kafka.TopicPartition]]:
    middle = len(partitions) // 2
    if middle:
        yield partitions[:middle]
        yield partitions[middle:]


def _asked(
    client: confluent_kafka.Consumer, partitions: Sequence[confluent_kafka.TopicPartition]
) -> list[confluent_kafka.TopicPartition] | None:
    try:
        return client.committed(list(partitions), timeout=_ANSWER_S)
    except KafkaException as problem:
        if not _is_time_out(problem):
            raise
        return None


def _is_time_out(problem: KafkaException) -> bool:
    return kafka_error(problem).code() == NOT_ANSWERED

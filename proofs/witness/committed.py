"""Committed offsets and ends of partitions, read by a client that is no member.

It uses a consumer: an AdminClient crashes with a segmentation fault when the coordinator has just
moved (librdkafka issue 5315).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import OffsetSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka.admin import AdminClient


def committed_offsets(
    client_config: Mapping[str, str],
    group: str,
    topic: str,
    numbers: Iterable[int],
    *,
    limit_s: float,
) -> dict[int, int]:
    """Return the committed offset of each partition of a topic that has one.

    Raises:
        KafkaException: Kafka did not answer within `limit_s`, or refused.
    """
    consumer = Consumer({**client_config, "group.id": group, "enable.auto.commit": False})
    try:
        found = consumer.committed([TopicPartition(topic, number) for number in numbers], limit_s)
        return {one.partition: one.offset for one in found if one.offset >= 0}
    finally:
        consumer.close()


def end_offsets(
    admin: AdminClient, topic: str, numbers: Iterable[int], *, limit_s: float
) -> dict[int, int]:
    """Return the end of each partition of a topic.

    Raises:
        KafkaException: Kafka did not answer within `limit_s`, or refused.
    """
    asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in numbers}
    answers = admin.list_offsets(asked, request_timeout=limit_s)
    return {
        partition.partition: int(answer.result(limit_s).offset)
        for partition, answer in answers.items()
    }


def longest_gap(
    commits: Iterable[tuple[int, float]], since: float, until: float
) -> tuple[float, int]:
    """Return the longest time between two commits of a partition in seconds, and the partition.

    Gaps that overlap [`since`, `until`] count in full. `commits` are sorted by time. If a partition
    has no earlier or later commit, the bound is used instead.
    """
    times: defaultdict[int, list[float]] = defaultdict(list)
    for partition, at in commits:
        times[partition].append(at)
    gaps = [
        (after - before, partition)
        for partition, ats in times.items()
        for before, after in pairwise([min(since, ats[0]), *ats, max(until, ats[-1])])
        if before < until and after > since
    ]
    return max(gaps, default=(0.0, 0))

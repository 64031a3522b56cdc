"""What a group has committed, as Kafka says it to somebody who is no member, and when.

Asked through a consumer and not through an AdminClient: that one ends the whole process by a
segmentation fault when the coordinator has just moved (librdkafka issue 5315).
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
    """The committed offset of each partition of a topic that has one.

    Raises:
        KafkaException: Kafka does not answer within `limit_s`, or refuses.
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
    """Where each partition of a topic ends.

    Raises:
        KafkaException: Kafka does not answer within `limit_s`, or refuses.
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
    """The longest time between two commits of a partition, in seconds, and which partition.

    A gap counts whole when it touches the time that is asked for, since it is what a reader of the
    output sees. To a partition without a commit before or behind it, that time itself is the bound.

    Args:
        commits: The partition and the time of each, in the order of the times.
        since: The time that is asked for begins here,
        until: and ends here.
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

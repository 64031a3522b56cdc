"""What a group has committed, as Kafka says it to somebody who is no member.

Asked through a consumer and not through an AdminClient: that one ends the whole process by a
segmentation fault when the coordinator has just moved (librdkafka issue 5315).
"""

from __future__ import annotations

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

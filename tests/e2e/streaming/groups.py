"""What Kafka stores for a group: its committed offsets and its letters."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition

from dagster_rebalance.core.model.letters import Letter, Malformed, parse_record

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster


def committed(kafka: KafkaCluster, group: str, topic: str, partitions: int = 1) -> int:
    """Return the number of committed offsets; 0 until the coordinator of a new group is found."""
    wanted = [TopicPartition(topic, number) for number in range(partitions)]
    with closing(Consumer({**kafka.client_config(), "group.id": group})) as consumer:
        try:
            found = consumer.committed(wanted, timeout=120)
        except KafkaException:
            return 0
    return sum(max(0, one.offset) for one in found)


def letters_of(kafka: KafkaCluster, group: str) -> list[Letter]:
    """Return the letters of the topic `<group>-dead`, which may also have changes of states."""
    topic = f"{group}-dead"
    with closing(Consumer({**kafka.client_config(), "group.id": "letters"})) as consumer:
        _, until = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=120)
        consumer.assign([TopicPartition(topic, 0, 0)])
        records = consumer.consume(until, timeout=60.0)
    found = [parse_record(one.key(), one.value(), one.headers()) for one in records]  # type: ignore[arg-type]
    assert len(found) == until
    assert not any(isinstance(one, Malformed) for one in found)
    return [one for one in found if isinstance(one, Letter)]

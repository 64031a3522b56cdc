from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition

from dagster_rebalance.core.model.errors import BrokerError
from proofs.witness.offsets_topic import OFFSETS_TOPIC, parse

if TYPE_CHECKING:
    from typing_extensions import Self

    from proofs.witness.offsets_topic import GroupRecord

_LIMIT_S = 30.0
_AT_MOST = 10_000


class GroupLog:
    """Follows the records of one group in `__consumer_offsets` while they are stored."""

    def __init__(self, bootstrap_servers: str, group: str) -> None:
        self._group = group
        self._is_assigned = False
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": f"reader-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def new(self) -> list[GroupRecord]:
        """Return the records since the last call, oldest first.

        Raises:
            BrokerError: The topic cannot be read.
        """
        try:
            if not self._is_assigned and not self._assign():
                return []
            messages = self._consumer.consume(_AT_MOST, 0.0)
        except KafkaException as error:
            raise _unreadable(error.args[0].str()) from error
        found = []
        for message in messages:
            if (problem := message.error()) is not None:
                raise _unreadable(problem.str())
            if key := message.key():
                record = parse(key, message.value(), message.timestamp()[1] / 1000)
                if record is not None and record.group == self._group:
                    found.append(record)
        return found

    def _assign(self) -> bool:
        """Assign the group's partition; Kafka creates the topic when the first group joins."""
        topic = self._consumer.list_topics(OFFSETS_TOPIC, _LIMIT_S).topics[OFFSETS_TOPIC]
        numbers = [number for number, one in topic.partitions.items() if one.leader >= 0]
        if numbers and len(numbers) == len(topic.partitions):
            self._consumer.assign([TopicPartition(OFFSETS_TOPIC, number, 0) for number in numbers])
            self._is_assigned = True
        return self._is_assigned


def _unreadable(why: str) -> BrokerError:
    return BrokerError(f"{OFFSETS_TOPIC} could not be read: {why}")

"""Records for the tests with a real Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def produce(
    config: Mapping[str, Any], topic: str, values: Iterable[bytes | str], *, partition: int = -1
) -> None:
    """Produce a record per value, and wait until all are stored."""
    producer = Producer(dict(config))
    for value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(120) == 0

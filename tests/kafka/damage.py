"""Damage in the log of a broker, as by a bad disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Producer

from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
EACH = 20
"""How many records a batch has."""

_LENGTH_AT, _MAGIC_AT, _HEADER = 8, 16, 12


def produce_batches(kafka: KafkaCluster, topic: str, partition: int, codec: str = "none") -> None:
    """Produce three batches of `EACH` records.

    A flush would send a part of a batch if the partition becomes known while records are added.
    """
    producer = Producer(
        {
            **kafka.client_config(),
            "compression.type": codec,
            "batch.num.messages": EACH,
            "linger.ms": 60_000,
            "log_level": 0,
        }
    )
    for batch in range(3):
        for number in range(EACH):
            producer.produce(topic, f"{batch}-{number} {'abc' * 30}", partition=partition)
        wait_until(
            lambda: producer.poll(0.1) >= 0 and not len(producer), timeout_s=120, what="acks"
        )


def break_byte(kafka: KafkaCluster, topic: str, partition: int) -> None:
    log, start, length = _second_batch(kafka, topic, partition)
    at = start + length - 10
    _write(log, at, bytes([log.read_bytes()[at] ^ 0xFF]))


def break_length(kafka: KafkaCluster, topic: str, partition: int) -> None:
    log, start, length = _second_batch(kafka, topic, partition)
    _write(log, start + _LENGTH_AT, (length + 5_000_000).to_bytes(4, "big"))


def break_format(kafka: KafkaCluster, topic: str, partition: int) -> None:
    log, start, _ = _second_batch(kafka, topic, partition)
    _write(log, start + _MAGIC_AT, b"\x07")


def _second_batch(kafka: KafkaCluster, topic: str, partition: int) -> tuple[Path, int, int]:
    [log] = kafka.logs[0].parent.rglob(f"{topic}-{partition}/*.log")
    data = log.read_bytes()
    first = _HEADER + _number(data, _LENGTH_AT)
    return log, first, _HEADER + _number(data, first + _LENGTH_AT)


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _write(log: Path, at: int, data: bytes) -> None:
    with log.open("r+b") as file:
        file.seek(at)
        file.write(data)

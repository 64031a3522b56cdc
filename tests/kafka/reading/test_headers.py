"""Headers whose names are no UTF-8: clients of other languages write bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.testing.deadline import wait_until
from tests.kafka.contract.stages import MockCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message

WRITER = r"""
import asyncio, sys
from aiokafka import AIOKafkaProducer

class Name(str):
    def encode(self, *_):
        return b"na\xff" + bytes(map(ord, self))

async def write(brokers, topic):
    async with AIOKafkaProducer(bootstrap_servers=brokers) as producer:
        named = [("ok", b"1"), (Name("x"), b"2"), ("null", None), (Name("y"), None)]
        for headers in ([("before", b"1")], named, [], [(Name("z"), b"")]):
            await producer.send_and_wait(topic, b"v", partition=0, headers=headers)

asyncio.run(write(*sys.argv[1:]))
"""
"""confluent-kafka cannot write such names, and aiokafka can without its C extension."""
HEADERS = [
    [("before", b"1")],
    [("ok", b"1"), ("na\ufffdx", b"2"), ("null", None), ("\ufffd", None)],
    None,
    [("na\ufffdz", b"")],
]
"""The client tells the bytes of the first of several broken names only."""


@pytest.fixture(scope="module")
def mock_cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def topic(mock_cluster: MockCluster) -> str:
    name = mock_cluster.topic()
    subprocess.run(
        [sys.executable, "-c", WRITER, mock_cluster.bootstrap_servers, name],
        env={**os.environ, "AIOKAFKA_NO_EXTENSIONS": "1"}, check=True,
    )  # fmt: skip
    return name


def test_range_reader_repairs_headers(mock_cluster: MockCluster, topic: str) -> None:
    """A second access to such a name ends the process."""
    config = {"bootstrap.servers": mock_cluster.bootstrap_servers, "group.id": "etl"}
    reader = RangeReader(validated(config, hold_limit_s=10))
    found = list(reader.read([OffsetRange(topic, 0, 0, 4)]))
    reader.close()
    for _ in range(2):
        assert [message.headers() for message in found] == HEADERS


def test_poll_repairs_headers(mock_cluster: MockCluster, topic: str) -> None:
    found: list[Message] = []
    config = {
        "bootstrap.servers": mock_cluster.bootstrap_servers,
        "group.id": "poll",
        "group.protocol": "classic",
        "auto.offset.reset": "earliest",
    }
    with RebalanceAwareConsumer(config) as consumer:
        consumer.subscribe([topic])

        def has_all() -> bool:
            found.extend(consumer.poll(0.1))
            return len(found) == len(HEADERS)

        wait_until(has_all, timeout_s=120, what="all records")
    assert [message.headers() for message in found] == HEADERS

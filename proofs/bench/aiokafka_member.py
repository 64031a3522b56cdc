"""The contender aiokafka, which is no dependency: import this module only where it is installed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

from proofs.bench.members import BATCH, HEARTBEAT_INTERVAL_MS, SESSION_TIMEOUT_MS, SLICE_S, Hold

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiokafka import TopicPartition

# It warns at each heartbeat of a rebalance, and rebalances are measured.
logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class AioKafka(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    """A member with aiokafka: its callback waits for work without blocking the event loop.

    All partitions are revoked (eager); those that are assigned again count as retained.
    """

    def __init__(self, servers: str, group: str, topic: str, hold_s: float) -> None:
        self._hold_s = hold_s
        self._is_leaving = False
        self._before: frozenset[int] = frozenset()
        self.hold = Hold()
        self._loop = asyncio.new_event_loop()
        self._consumer = self._loop.run_until_complete(self._started(servers, group, topic))

    async def _started(self, servers: str, group: str, topic: str) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=servers,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
        )
        consumer.subscribe([topic], listener=self)
        await consumer.start()
        return consumer

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Finish the work of the hold, once."""
        if not revoked or self._is_leaving or self.hold.began_at:
            return
        self._before = frozenset(tp.partition for tp in revoked)
        self.hold.began_at = time.monotonic()
        await asyncio.sleep(self._hold_s)
        self.hold.ended_at = time.monotonic()

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        if self.hold.ended_at and not self.hold.retained:
            self.hold.retained = self._before.intersection(tp.partition for tp in assigned)

    def poll(self) -> list[int]:
        found = self._loop.run_until_complete(
            self._consumer.getmany(timeout_ms=round(SLICE_S * 1000), max_records=BATCH)
        )
        return [tp.partition for tp, records in found.items() for _ in records]

    def owned(self) -> frozenset[int]:
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def close(self) -> None:
        self._is_leaving = True
        self._loop.run_until_complete(self._consumer.stop())
        self._loop.close()

"""The benchmark's consumers: ours, and confluent-kafka with a blocking callback.

Each holds revoked partitions for a while and notes the time. One thread uses each consumer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import Consumer

from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition

SLICE_S = 0.02
"""Timeout of a poll, which limits the precision of rates."""
BATCH = 500
SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS = 6000, 500


@dataclass
class Hold:
    """The time of a hold, and the retained partitions."""

    began_at: float = 0.0
    ended_at: float = 0.0
    retained: frozenset[int] = frozenset()

    @property
    def is_over(self) -> bool:
        return bool(self.ended_at and self.retained)


class Contender(Protocol):
    """A member of a group."""

    hold: Hold

    def poll(self) -> list[int]:
        """Poll, and return the partition of each record."""

    def owned(self) -> frozenset[int]:
        """The partitions that are assigned."""

    def close(self) -> None:
        """Leave."""


def client_config(servers: str, group: str, protocol: str) -> dict[str, Any]:
    """Return the common settings of ours and the bare client."""
    config = {
        "bootstrap.servers": servers,
        "group.id": group,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "log_level": 0,
    }
    if protocol == "classic":
        config |= {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
        }
    return config


class Ours:
    """A member that delays the revoke and continues to poll."""

    def __init__(self, config: dict[str, Any], topic: str, hold_s: float) -> None:
        self._hold_s = hold_s
        self.hold = Hold()
        self._consumer = RebalanceAwareConsumer(config)
        self._consumer.subscribe([topic])

    def poll(self) -> list[int]:
        records = self._consumer.poll(SLICE_S, max_records=BATCH)
        asked, now = self._consumer.get_to_be_revoked_partitions(), time.monotonic()
        if asked and not self.hold.began_at:
            self.hold.began_at = now
            self.hold.retained = frozenset(
                tp.partition for tp in self._consumer.assignment() - asked
            )
        if asked and now < self.hold.began_at + self._hold_s:
            self._consumer.delay_revoke(asked)
        elif asked:
            self.hold.ended_at = now
        return [record.partition() or 0 for record in records]

    def owned(self) -> frozenset[int]:
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def close(self) -> None:
        self._consumer.close()


class Bare:
    """A member that finishes its work inside the revoke callback."""

    def __init__(self, config: dict[str, Any], topic: str, hold_s: float) -> None:
        self._hold_s = hold_s
        self._is_leaving = False
        self.hold = Hold()
        self._consumer = Consumer(config)
        self._consumer.subscribe([topic], on_revoke=self._on_revoke)

    def _on_revoke(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._is_leaving or self.hold.began_at:
            return
        self.hold.retained = self.owned() - {tp.partition for tp in partitions}
        self.hold.began_at = time.monotonic()
        time.sleep(self._hold_s)
        self.hold.ended_at = time.monotonic()

    def poll(self) -> list[int]:
        """Poll; a revoke blocks the call."""
        records = self._consumer.consume(BATCH, SLICE_S)
        return [record.partition() or 0 for record in records if record.error() is None]

    def owned(self) -> frozenset[int]:
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def close(self) -> None:
        self._is_leaving = True
        self._consumer.close()

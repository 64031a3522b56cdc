"""The benchmark's consumers hold on for a while to partitions that they are asked for.

They are ours, and confluent-kafka as it is. Owns what each consumer must do to finish its work
before it gives partitions up, and the note of when it did. One thread uses each consumer.
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
"""How long a poll waits: what a rate over some seconds cannot be more exact than."""
BATCH = 500
SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS = 6000, 500


@dataclass
class Hold:
    """When partitions were held, and which ones nobody asked for."""

    began_at: float = 0.0
    ended_at: float = 0.0
    retained: frozenset[int] = frozenset()

    @property
    def is_over(self) -> bool:
        """Whether all of it is known."""
        return bool(self.ended_at and self.retained)


class Contender(Protocol):
    """A member of a group."""

    hold: Hold

    def poll(self) -> list[int]:
        """Take part, and return the partition of each record that came."""

    def owned(self) -> frozenset[int]:
        """The partitions that are assigned."""

    def close(self) -> None:
        """Leave."""


def client_config(servers: str, group: str, protocol: str) -> dict[str, Any]:
    """What ours and the bare client are given alike."""
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
    """`RebalanceAwareConsumer`: it delays the revoke, and polls on."""

    def __init__(self, config: dict[str, Any], topic: str, hold_s: float) -> None:
        self._hold_s = hold_s
        self.hold = Hold()
        self._consumer = RebalanceAwareConsumer(config)
        self._consumer.subscribe([topic])

    def poll(self) -> list[int]:
        """Take part, and delay the revoke until the time is over."""
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
        """The partitions that are assigned."""
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def close(self) -> None:
        """Leave."""
        self._consumer.close()


class Bare:
    """A confluent-kafka member can finish work before a revoke only in the callback."""

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
        """Take part; a revoke blocks it."""
        records = self._consumer.consume(BATCH, SLICE_S)
        return [record.partition() or 0 for record in records if record.error() is None]

    def owned(self) -> frozenset[int]:
        """The partitions that are assigned."""
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def close(self) -> None:
        """Leave."""
        self._is_leaving = True
        self._consumer.close()

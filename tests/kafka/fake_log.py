"""The client of a fetcher that reads the records of a `FakeGroup`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, Message, TopicPartition

from dagster_rebalance.core.model import offsets
from dagster_rebalance.kafka.client.confluent import from_confluent

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from dagster_rebalance.testing.fake_group import FakeGroup


class FakeLog:
    """A client that takes the place of a fetcher's `confluent_kafka.Consumer`.

    Args:
        group: The group with the records; its clock moves while nothing is there to be read.
    """

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self._next: dict[TopicPartition, int] = {}
        self._returned: set[TopicPartition] = set()
        self._paused: set[TopicPartition] = set()
        self.waits: list[tuple[int, float]] = []
        """The arguments of each `consume`."""
        self.is_waiting = threading.Event()
        """Set while records are waited for."""
        self._coming: list[offsets.TopicPartition] = []
        self.interleaves = False
        """Whether records of all partitions are returned in turns, and not by partition."""
        self.is_throttled = False
        """Whether the broker answers each fetch with nothing, and not with the end either."""

    def produce_while_waiting(self, partition: offsets.TopicPartition) -> None:
        """Produce a record in the next `consume` that waits."""
        self._coming.append(partition)

    def assignment(self) -> list[TopicPartition]:
        return list(self._next)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        if any(tp in self._next or tp.offset < 0 for tp in partitions):
            raise KafkaException(KafkaError(KafkaError._CONFLICT, f"{partitions}"))
        self._next.update({tp: tp.offset for tp in partitions})

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        if any(tp not in self._next for tp in partitions):
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, f"{partitions}"))
        for tp in partitions:
            del self._next[tp]
            self._returned.discard(tp)

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._paused.difference_update(partitions)

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        found = {
            tp: self._next[tp] if tp in self._returned else OFFSET_INVALID for tp in partitions
        }
        return [
            TopicPartition(tp.topic, tp.partition, offset, leader_epoch=3)
            for tp, offset in found.items()
        ]

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached, "the member asks the cluster"
        return (OFFSET_INVALID,) * 2 if self.is_throttled else (0, self._end(partition))

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        self.waits.append((num_messages, timeout))
        if timeout:
            self.is_waiting.set()
            while self._coming:
                self._group.produce(self._coming.pop())
        batch: list[Message] = []
        readable = [tp for tp in self._next if tp not in self._paused and not self.is_throttled]
        most = 1 if self.interleaves else num_messages
        while readable := [tp for tp in readable if self._next[tp] < self._end(tp)]:
            for tp in readable:
                for _ in range(
                    min(most, num_messages - len(batch), self._end(tp) - self._next[tp])
                ):
                    batch.append(
                        Message(
                            topic=tp.topic,
                            partition=tp.partition,
                            offset=self._next[tp],
                            leader_epoch=3,
                        )
                    )
                    self._next[tp] += 1
                    self._returned.add(tp)
            if len(batch) == num_messages:
                break
        if len(batch) < num_messages:
            self._group.clock.advance(timeout)
        return batch

    def close(self) -> None:
        """Nothing is open."""

    def _end(self, partition: TopicPartition) -> int:
        return len(self._group._produced.get(from_confluent(partition), ()))


def fake_log(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, records: Mapping[int, int]
) -> FakeLog:
    log = FakeLog(group)
    for partition, count in records.items():
        group.produce(offsets.TopicPartition("orders", partition), count)
    monkeypatch.setattr(
        "dagster_rebalance.kafka.reading.fetcher.confluent_kafka.Consumer", lambda _settings: log
    )
    return log

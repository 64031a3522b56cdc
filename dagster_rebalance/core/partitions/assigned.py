"""Partitions of a member, with an index of the busy ones.

A member may own thousands of partitions and checks the busy ones ten times a second.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.partitions.owned import OwnedPartition


class AssignedPartitions(MutableMapping[TopicPartition, "OwnedPartition"]):
    """Mapping of assigned partitions, in the order of assignment, that tracks which are idle.

    Attributes:
        version: Increases with each change of a partition.
    """

    def __init__(self) -> None:
        self.version = 0
        self._all: dict[TopicPartition, OwnedPartition] = {}
        self._busy: dict[TopicPartition, OwnedPartition] = {}
        self._dropped_records: list[RecordCommit] = []
        self._rota: list[TopicPartition] = []
        self._sorted: tuple[OwnedPartition, ...] | None = None

    @property
    def busy(self) -> tuple[OwnedPartition, ...]:
        """Partitions with work to do now or later; the same tuple until one of them changes."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self._busy.values(), key=lambda owned: owned.epoch))
        return self._sorted

    def known(self, partitions: Iterable[TopicPartition]) -> list[OwnedPartition]:
        """Return the given partitions that are assigned."""
        return [self._all[partition] for partition in partitions if partition in self._all]

    def next_idle(self, most: int) -> list[TopicPartition]:
        """Return up to `most` idle partitions, in rotation."""
        if len(self._all) - len(self._busy) <= most:
            return [partition for partition in self._all if partition not in self._busy]
        idle: dict[TopicPartition, None] = {}
        while len(idle) < most:
            self._rota = self._rota or list(reversed(self._all))
            partition = self._rota.pop()
            if partition in self._all and partition not in self._busy:
                idle[partition] = None
        return list(idle)

    def __getitem__(self, partition: TopicPartition) -> OwnedPartition:
        return self._all[partition]

    def __setitem__(self, partition: TopicPartition, owned: OwnedPartition) -> None:
        self._drop_record(partition, owned)
        self.version += 1
        self._all[partition] = owned
        if owned.is_idle:
            self._forget(partition)
        else:
            self._busy[partition] = owned
            self._sorted = None

    def __delitem__(self, partition: TopicPartition) -> None:
        self._drop_record(partition, None)
        self.version += 1
        del self._all[partition]
        self._forget(partition)

    def _drop_record(self, partition: TopicPartition, after: OwnedPartition | None) -> None:
        before = self._all.get(partition)
        record = None if before is None else before.unrecorded
        if record is not None and (after is None or after.unrecorded != record):
            self._dropped_records.append(record)

    def take_dropped_records(self) -> list[RecordCommit]:
        """Take the commits that were recorded, or that are left to the next owner to record."""
        dropped, self._dropped_records = self._dropped_records, []
        return dropped

    def _forget(self, partition: TopicPartition) -> None:
        if self._busy.pop(partition, None) is not None:
            self._sorted = None

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, partition: object) -> bool:
        return partition in self._all

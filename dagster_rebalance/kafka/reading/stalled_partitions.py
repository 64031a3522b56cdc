"""A partition stands still when nothing of it is read for a time although its log goes on.

A Kafka client may drop a response that it cannot parse, and report nothing. Owns how long that may
last before the partition is reported, and how often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition

STANDSTILL_S = 30.0
"""A partition without progress for this long is reported, and again after the same time."""
LOOK_EVERY_S = 5.0
"""The interval between two looks at the positions."""


class StalledPartitions:
    """Finds the partitions that stand still.

    Args:
        now: The time.
    """

    def __init__(self, now: float) -> None:
        self._waited: dict[TopicPartition, tuple[int, float]] = {}
        self._looked_at = now

    def is_due(self, now: float) -> bool:
        """Whether to look at the positions again."""
        return now - self._looked_at >= LOOK_EVERY_S

    def look(self, behind: Mapping[TopicPartition, int], now: float) -> frozenset[TopicPartition]:
        """Return the partitions that were behind the end of the log at one offset for too long.

        Between two looks, at most `LOOK_EVERY_S` counts: a caller that polls seldom reads little,
        and no partition stands still because of that.

        Args:
            behind: The next offset of each partition whose log has more.
            now: The time.
        """
        passed = min(now - self._looked_at, LOOK_EVERY_S)
        self._looked_at = now
        before = self._waited
        self._waited = {
            partition: (offset, before[partition][1] + passed)
            if partition in before and before[partition][0] == offset
            else (offset, 0.0)
            for partition, offset in behind.items()
        }
        return frozenset({tp for tp, (_, waited) in self._waited.items() if waited >= STANDSTILL_S})

    def reported(self, partitions: Collection[TopicPartition]) -> None:
        """Count the time of partitions from the next look on."""
        for partition in partitions:
            self._waited.pop(partition, None)

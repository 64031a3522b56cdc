"""Whether what a client has fetched of some logs before can still be used.

A client that is kept between two reads has fetched records ahead. They are still those of the log
unless it was cut off and written anew meanwhile (an unclean election of a leader), or is another
one (a topic that was made anew). Owns how that is known: by the topic's id and the leader epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.offsets import Log, TopicPartition


class ClientReuse:
    """The logs that one reader has read. Not safe for several threads."""

    def __init__(self) -> None:
        self._logs: dict[TopicPartition, Log] = {}
        self._generation = 0

    def generation(self, logs: Mapping[TopicPartition, Log]) -> int | None:
        """Which of the reader's clients may read these logs: those with the same number.

        Args:
            logs: The log of each partition that is to be read.

        Returns:
            A number that grows as soon as one of the logs may be another one than before. None
            where Kafka does not say what it takes to know that: nothing may be used again.
        """
        if any(not log.topic_id or log.leader_epoch is None for log in logs.values()):
            return None
        if any(self._logs.get(partition, log) != log for partition, log in logs.items()):
            self._generation += 1
        self._logs.update(logs)
        return self._generation

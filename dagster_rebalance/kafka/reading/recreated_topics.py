"""Topics that are deleted and made again while they are read, found by their ids.

A Kafka client reads the new log on at the position in the old one. Owns when the ids are asked for.
Must never wait for the answer: it is asked for in one poll and taken in a later one.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition

    Answer = Callable[[], Mapping[str, str] | None]

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 5.0


class RecreatedTopics:
    """Compares the ids of the topics that are read.

    Args:
        ask: Asks for the ids of topics. The function that it returns has the answer, or None.
        clock: A monotonic clock.
    """

    def __init__(
        self, ask: Callable[[Collection[str]], Answer], clock: Callable[[], float]
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._ids: dict[str, str] = {}
        self._answer: Answer | None = None
        self._found: Mapping[str, str] = {}
        self._ask_at = -math.inf
        self._begun: set[TopicPartition] = set()
        self._begun_before: set[TopicPartition] = set()

    def begun(self, partitions: Iterable[TopicPartition]) -> None:
        """Partitions were looked up, and begin: not at a position in an older log."""
        self._begun.update(partitions)
        # No generator: an exception of a signal handler inside of one is lost.
        if {tp.topic for tp in self._begun} - self._ids.keys():
            self._ask_at = -math.inf

    def look(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, bool]:
        """The partitions of topics that were made again, and whether each is at an old position.

        Args:
            partitions: Those that are read.
        """
        if self._answer is None:
            if self._clock() >= self._ask_at:
                self._begin({tp.topic for tp in partitions})
            return {}
        found = self._answer()
        if found is None:
            return {}
        remade = {topic for topic, an_id in found.items() if self._ids.get(topic, an_id) != an_id}
        self._found = found
        fresh = self._begun | self._begun_before
        at_old = {tp: tp not in fresh for tp in partitions if tp.topic in remade} if remade else {}
        if not at_old:
            self.told()
        return at_old

    def told(self) -> None:
        """The last look is carried out. One that is interrupted before finds the same again."""
        self._ids.update(self._found)
        self._answer = None

    def _begin(self, topics: Collection[str]) -> None:
        self._ask_at = self._clock() + _ASK_EVERY_S
        if not topics:
            return
        try:
            self._answer = self._ask(topics)
        except BrokerError as problem:
            logger.info("the ids of topics are not known: %s", problem)
            return
        self._begun_before, self._begun = self._begun, set()
        # The partitions of a topic that is read no more begin again, if they come back.
        self._ids = {topic: an_id for topic, an_id in self._ids.items() if topic in topics}

"""Pause marks say what a user does not want to read.

They stay outside of the assignment, where no rebalance can change them.

Owns which partitions the marks cover, and the text by which a partition's mark travels in the
metadata of its committed offset, in front of whatever else is stored there (claims, the user's own
text). A mark may name a partition, a topic or a pattern that is not assigned, or does not exist
yet. Marks must never know what is assigned, held or buffered: who reads asks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition

_CARRIED = "dr-paused "


class Pauses:
    """Keeps marks by partition, by topic and for everything.

    A partition is silent while any of the three covers it.

    Among the marks by topic, the last call that names a topic decides, whether it named it itself
    or by a pattern: a topic can be resumed out of a paused pattern, and a pattern resumes topics
    that were paused by name.

    Example:
        ```python
        marks = PauseMarks()
        marks.pause_topics([re.compile("orders-.*")])
        marks.resume_topics(["orders-eu"])
        marks.covers(TopicPartition("orders-us", 0))  # True
        marks.covers(TopicPartition("orders-eu", 0))  # False
        ```
    """

    def __init__(self) -> None:
        self._partitions: set[TopicPartition] = set()
        self._topics: dict[str | re.Pattern[str], bool] = {}
        self._everything = False

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions that are marked themselves."""
        return frozenset(self._partitions)

    def covers(self, partition: TopicPartition) -> bool:
        """Whether a mark says that nothing is to be read of a partition."""
        return (
            self._everything or partition in self._partitions or self._covers_topic(partition.topic)
        )

    def among(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """Those of the partitions that a mark covers."""
        return frozenset(filter(self.covers, partitions))

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Mark partitions."""
        self._partitions.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Take the marks of partitions away; marks of their topics stay."""
        self._partitions.difference_update(partitions)

    def pause_topics(self, topics: Iterable[str | re.Pattern[str]]) -> None:
        """Mark topics, by their names or by patterns that match their whole names.

        The marks cover topics that are yet to come too.
        """
        for topic in topics:
            self._decide(topic, paused=True)

    def resume_topics(self, topics: Iterable[str | re.Pattern[str]]) -> None:
        """Take the marks of topics away; marks of their partitions stay."""
        for topic in topics:
            self._decide(topic, paused=False)

    def pause_all(self) -> None:
        """Mark everything, with one mark of its own."""
        self._everything = True

    def resume_all(self) -> None:
        """Take the mark for everything away; marks of topics and partitions stay."""
        self._everything = False

    def _covers_topic(self, topic: str) -> bool:
        # The latest decision that names the topic.
        for named, paused in reversed(self._topics.items()):
            if named == topic if isinstance(named, str) else named.fullmatch(topic):
                return paused
        return False

    def _decide(self, topic: str | re.Pattern[str], *, paused: bool) -> None:
        self._topics.pop(topic, None)
        if paused or any(self._topics.values()):
            self._topics[topic] = paused
        else:
            self._topics.clear()


def with_mark(metadata: str) -> str:
    """Add a mark to the metadata of a committed offset.

    The mark tells the next owner of the partition not to read it.
    """
    return _CARRIED + metadata


def without_mark(metadata: str) -> tuple[str, bool]:
    """The metadata without a mark, and whether there was one."""
    return metadata.removeprefix(_CARRIED), metadata.startswith(_CARRIED)

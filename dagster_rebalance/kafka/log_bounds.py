"""Read what Kafka knows of partitions, and whether it fits what is stored.

Kafka knows the first offset that exists, the next one, what the group has committed, and whether
that fits the log. This module owns that a leader which is away keeps only its own partitions
waiting: it answers for the others, and asks that leader again a little later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import Found
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, Bounds, named
from dagster_rebalance.core.model.start_position import StartFrom, StartTime
from dagster_rebalance.core.partitions.recovery import position_to_verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.events import LastRecorded
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.model.start_position import Start
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

_Answer = TypeVar("_Answer")
READ_LIMIT_S = 10.0
PATIENCE_S = 1.5
"""How long a member waits at most for an answer that only some of its partitions need."""
_LONGEST_PATIENCE_S = 6.0
"""To verify an offset takes about seven round trips, because each look begins with a new
connection."""
_AGAIN_S = 1.5
_PATIENCE_AGAIN_S = 0.5
"""How often a leader that did not answer is asked again, and how long for. Short, so that the other
partitions do not feel it."""
_SELDOM_S = 30.0
"""How often to ask for what moves slowly: the first offset, and what lies behind an open
transaction."""


def read_bounds(
    consumer: RebalanceAwareConsumer,
    partitions: Collection[TopicPartition],
    timeout_s: float = READ_LIMIT_S,
    known_starts: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, Bounds]:
    """The bounds of all partitions.

    Args:
        consumer: Asks Kafka.
        partitions: Of which partitions.
        timeout_s: How long the leaders may take together.
        known_starts: First offsets that are not asked for.

    Raises:
        BrokerError: Some of them have no answer.
    """
    known = known_starts or {}
    unknown = [partition for partition in partitions if partition not in known]
    starts = {**known, **(consumer.beginning_offsets(unknown, timeout_s) if unknown else {})}
    ends = consumer.cluster.log_ends(partitions, timeout_s)
    return {
        partition: Bounds(starts[partition], ends[partition].offset, ends[partition].leader_epoch)
        for partition in partitions
    }


def find(
    consumer: RebalanceAwareConsumer,
    bounds: Mapping[TopicPartition, Bounds],
    recorded: Mapping[TopicPartition, LastRecorded],
    *,
    timeout_s: float = READ_LIMIT_S,
    patience_s: float = READ_LIMIT_S,
    start: Start = StartFrom.EARLIEST,
) -> dict[TopicPartition, Found]:
    """Return what the core judges of partitions whose bounds are known.

    The result leaves out partitions whose leaders do not verify in time.

    Args:
        consumer: Asks Kafka.
        bounds: The partitions.
        recorded: The last recorded commits, as far as they are known.
        timeout_s: How long the coordinator, or any broker, may take.
        patience_s: How long the leaders may take together.
        start: Where the group begins with what it has committed nothing for.

    Raises:
        BrokerError: Kafka refuses, or its coordinator does not answer.
    """
    stored, refused = committed(consumer, bounds, timeout_s)
    bounds = {partition: found for partition, found in bounds.items() if partition in stored}
    doubts = {
        partition: position_to_verify(stored[partition], found)
        for partition, found in bounds.items()
    }
    asked = {partition: position for partition, position in doubts.items() if position is not None}
    is_truncated, unread = allowed(
        lambda those: (
            consumer.cluster.truncated({p: asked[p] for p in those}, patience_s) if those else {}
        ),
        asked,
    )
    refused |= unread
    ids = (
        consumer.cluster.topic_ids({partition.topic for partition in bounds}, timeout_s)
        if bounds
        else {}
    )
    timed = {p for p in bounds if stored[p] is None} if isinstance(start, StartTime) else set()
    not_older = _not_older(consumer, timed, start, patience_s)
    return refusals(refused) | {
        partition: Found(
            stored[partition],
            found,
            recorded.get(partition),
            ids.get(partition.topic, ""),
            is_truncated.get(partition, False),
            not_older.get(partition),
        )
        for partition, found in bounds.items()
        if (partition not in asked or partition in is_truncated)
        and (partition not in timed or partition in not_older)
    }


def allowed(
    ask: Callable[[list[TopicPartition]], dict[TopicPartition, _Answer]],
    partitions: Iterable[TopicPartition],
) -> tuple[dict[TopicPartition, _Answer], dict[TopicPartition, str]]:
    """Ask Kafka about partitions; those of topics that it refuses have a reason in place of one.

    Args:
        ask: Asks about some of them.
        partitions: The partitions.

    Raises:
        BrokerError: Kafka refuses everything, or does not answer.
    """
    wanted = list(partitions)
    try:
        return ask(wanted), {}
    except BrokerError as error:
        refused = [p for p in wanted if p.topic in error.topics]
        if error.retriable or not refused:
            raise
        found, more = allowed(ask, [p for p in wanted if p.topic not in error.topics])
        return found, {**dict.fromkeys(refused, str(error)), **more}


def committed(
    consumer: RebalanceAwareConsumer, partitions: Iterable[TopicPartition], timeout_s: float
) -> tuple[dict[TopicPartition, OffsetAndMetadata | None], dict[TopicPartition, str]]:
    """Read what the group has committed; a partition that Kafka does not tell it of has a reason.

    Kafka does not tell it of topics that it refuses, and of partitions with an offset in an open
    transaction.

    Raises:
        BrokerError: Kafka refuses everything, or does not answer.
    """
    wanted = list(partitions)
    try:
        return allowed(lambda those: consumer.committed(those, timeout_s), wanted)
    except BrokerError as error:
        kept = error.partitions
        if not kept or not error.retriable:
            raise
        found, more = committed(consumer, [p for p in wanted if p not in kept], timeout_s)
        return found, {**dict.fromkeys(kept, str(error)), **more}


def refusals(refused: Mapping[TopicPartition, str]) -> dict[TopicPartition, Found]:
    """What is to be judged of partitions for which Kafka refuses to answer."""
    return {p: Found(None, ANY_BOUNDS, refused=reason) for p, reason in refused.items()}


def _not_older(
    consumer: RebalanceAwareConsumer,
    partitions: Collection[TopicPartition],
    start: Start,
    patience_s: float,
) -> dict[TopicPartition, int | None]:
    """The first records that are not older than a time, as far as leaders answer."""
    if not partitions or not isinstance(start, StartTime):
        return {}
    try:
        found = consumer.offsets_for_times(dict.fromkeys(partitions, start.at_ms), patience_s)
    except BrokerError as error:
        others = [p for p in partitions if p not in error.partitions]
        if not (error.retriable or error.topics) or len(others) == len(partitions):
            raise
        return _not_older(consumer, others, start, patience_s)
    return {p: None if record is None else record.offset for p, record in found.items()}


class BoundsReader:
    """Reads bounds for somebody who cannot wait for every leader.

    Args:
        consumer: Asks Kafka.
        clock: A monotonic clock.
        note: Gets a sentence when a leader does not answer.
        start: Where the group begins with what it has committed nothing for.
        bounds_patience_s: How long leaders may take to say where their partitions begin and end.

    Attributes:
        refused: The partitions for which Kafka refused to answer the last time, each with the
            reason.
    """

    def __init__(
        self,
        consumer: RebalanceAwareConsumer,
        clock: Callable[[], float],
        note: Callable[[str], None],
        start: Start = StartFrom.EARLIEST,
        bounds_patience_s: float = PATIENCE_S,
    ) -> None:
        self._bounds_patience_s = bounds_patience_s
        self._start = start
        self._consumer = consumer
        self._clock = clock
        self._note = note
        self._ask_again_at: dict[TopicPartition, float] = {}
        self.refused: dict[TopicPartition, str] = {}
        self._seldom_at: dict[TopicPartition, float] = {}
        self._starts: dict[TopicPartition, int] = {}
        self._patience_s = PATIENCE_S

    def find(
        self,
        partitions: Collection[TopicPartition],
        recorded: Mapping[TopicPartition, LastRecorded],
    ) -> dict[TopicPartition, Found]:
        """What is to be judged of the partitions whose leaders answer.

        Leaders that do not verify a committed offset in time are waited for longer the next time.

        Args:
            partitions: Of which partitions.
            recorded: The last recorded commits, as far as they are known.

        Raises:
            BrokerError: Kafka refuses, or its coordinator does not answer.
        """
        bounds = self.read(partitions)
        refused = {p: why for p, why in self.refused.items() if p in partitions}
        found = refusals(refused) | find(
            self._consumer, bounds, recorded, patience_s=self._patience_s, start=self._start
        )
        unverified = bounds.keys() - found.keys()
        if not unverified:
            self._patience_s = PATIENCE_S
        elif self._patience_s < _LONGEST_PATIENCE_S:
            self._note(
                f"the leaders of {named(unverified)} did not verify the committed offset, or say "
                f"where to begin, within {self._patience_s:g} s"
            )
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
        return found

    def read(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return the bounds of the partitions whose leaders answer.

        A later call asks for the others again.

        Raises:
            BrokerError: Kafka refuses, and waiting would not help, or nothing of it answers.
        """
        return self._read_all(partitions, {})

    def read_beyond(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return the same with the first offsets of a little while ago.

        Now and then the call reads the high watermarks, too. Only a high watermark shows what lies
        behind an open transaction.

        Raises:
            BrokerError: Kafka refuses, and waiting would not help, or nothing of it answers.
        """
        now = self._clock()
        due = [
            p
            for p in partitions
            if now >= self._seldom_at.get(p, now) and p not in self._ask_again_at
        ]
        # First, so that a record that is produced in between does not look like one of an open
        # transaction.
        marks = self._high_watermarks(due)
        self._seldom_at |= dict.fromkeys(due, now + _SELDOM_S)
        for partition in due:
            self._starts.pop(partition, None)
        found = self._read_all(partitions, self._starts)
        marked = {
            p: replace(found[p], high_watermark=mark) for p, mark in marks.items() if p in found
        }
        return found | marked

    def _high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        try:
            return (
                self._consumer.cluster.high_watermarks(partitions, self._bounds_patience_s)
                if partitions
                else {}
            )
        except BrokerError as error:
            if not (error.retriable or error.topics):
                raise
            return {}

    def _read_all(
        self, partitions: Collection[TopicPartition], starts: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, Bounds]:
        now = self._clock()
        doubtful = [p for p in partitions if p in self._ask_again_at]
        due = [p for p in doubtful if self._ask_again_at[p] <= now]
        found = self._read(
            [p for p in partitions if p not in self._ask_again_at], self._bounds_patience_s, starts
        )
        return found | self._read(due, _PATIENCE_AGAIN_S, starts)

    def _read(
        self,
        partitions: Collection[TopicPartition],
        patience_s: float,
        starts: Mapping[TopicPartition, int],
    ) -> dict[TopicPartition, Bounds]:
        if not partitions:
            return {}
        try:
            found = read_bounds(self._consumer, partitions, patience_s, starts)
        except BrokerError as error:
            silent = error.partitions.keys() & set(partitions)
            if not (error.retriable or error.topics) or not silent:
                raise
            if not error.retriable:
                self.refused |= dict.fromkeys(silent, str(error))
            if silent - self._ask_again_at.keys():
                self._note(str(error))
            self._ask_again_at |= dict.fromkeys(silent, self._clock() + _AGAIN_S)
            return self._read(
                [partition for partition in partitions if partition not in silent],
                patience_s,
                starts,
            )
        for partition, bounds in found.items():
            self._ask_again_at.pop(partition, None)
            self.refused.pop(partition, None)
            self._starts[partition] = bounds.start
        return found

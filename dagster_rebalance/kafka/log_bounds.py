"""Read the bounds and committed offsets of partitions, and verify that they are consistent.

If a leader is unavailable, only its own partitions wait: the others have an answer at once, and
that leader is retried a little later. `BrokerError` is raised if Kafka refuses, and waiting would
not help, or if it does not answer at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import PartitionLookup
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, Bounds, names_of
from dagster_rebalance.core.model.topics import StartFrom, StartTime
from dagster_rebalance.core.partitions.recovery import position_to_verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.events import LastRecorded
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.model.topics import Start
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

_Answer = TypeVar("_Answer")
READ_LIMIT_S = 10.0
PATIENCE_S = 1.5
"""The longest wait of a member for an answer that only some of its partitions need."""
_LONGEST_PATIENCE_S = 6.0
"""Verifying an offset takes about seven round trips, because it begins with a new connection."""
_RETRY_AFTER_S = 1.5
_RETRY_PATIENCE_S = 0.5
"""The interval and the limit of retries of a silent leader. Short, because the other partitions
wait for it."""
_SELDOM_S = 30.0
"""How often to query values that change slowly: the first offset, and the high watermark, which
matters while a transaction is open."""


def read_bounds(
    consumer: RebalanceAwareConsumer,
    partitions: Collection[TopicPartition],
    timeout_s: float = READ_LIMIT_S,
    known_starts: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, Bounds]:
    """Return the bounds of all partitions, within `timeout_s`.

    First offsets in `known_starts` are not queried.
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
) -> dict[TopicPartition, PartitionLookup]:
    """Return the facts from which the core judges partitions, without those that wait for a leader.

    `timeout_s` limits the coordinator, and `patience_s` all leaders together. The group starts at
    `start` in a partition without a committed offset.
    """
    stored, refused = committed(consumer, bounds, timeout_s)
    bounds = {partition: found for partition, found in bounds.items() if partition in stored}
    positions = {
        partition: position
        for partition, found in bounds.items()
        if (position := position_to_verify(stored[partition], found)) is not None
    }
    is_truncated, unread = allowed(
        lambda those: (
            consumer.cluster.truncated({p: positions[p] for p in those}, patience_s)
            if those
            else {}
        ),
        positions,
    )
    refused |= unread
    topics = {partition.topic for partition in bounds}
    ids = consumer.cluster.topic_ids(topics, timeout_s) if bounds else {}
    timed = {p for p in bounds if stored[p] is None} if isinstance(start, StartTime) else set()
    offset_at_start_time = _not_older(consumer, timed, start, patience_s)
    return refusals(refused) | {
        partition: PartitionLookup(
            stored[partition],
            found,
            recorded.get(partition),
            ids.get(partition.topic, ""),
            is_truncated.get(partition, False),
            offset_at_start_time.get(partition),
        )
        for partition, found in bounds.items()
        if (partition not in positions or partition in is_truncated)
        and (partition not in timed or partition in offset_at_start_time)
    }


def allowed(
    query: Callable[[list[TopicPartition]], dict[TopicPartition, _Answer]],
    partitions: Iterable[TopicPartition],
) -> tuple[dict[TopicPartition, _Answer], dict[TopicPartition, str]]:
    """Query partitions, and return the answers and the reasons of refused topics' partitions."""
    wanted = list(partitions)
    try:
        return query(wanted), {}
    except BrokerError as error:
        refused = [p for p in wanted if p.topic in error.topics]
        if error.retriable or not refused:
            raise
        found, more = allowed(query, [p for p in wanted if p.topic not in error.topics])
        return found, {**dict.fromkeys(refused, str(error)), **more}


def committed(
    consumer: RebalanceAwareConsumer, partitions: Iterable[TopicPartition], timeout_s: float
) -> tuple[dict[TopicPartition, OffsetAndMetadata | None], dict[TopicPartition, str]]:
    """Return the group's committed offsets, and the reasons of the partitions without an answer.

    These are partitions of refused topics, or with an offset in an open transaction.
    """
    wanted = list(partitions)
    try:
        return allowed(lambda those: consumer.committed(those, timeout_s), wanted)
    except BrokerError as error:
        waiting = error.partitions
        if not waiting or not error.retriable:
            raise
        found, more = committed(consumer, [p for p in wanted if p not in waiting], timeout_s)
        return found, {**dict.fromkeys(waiting, str(error)), **more}


def refusals(refused: Mapping[TopicPartition, str]) -> dict[TopicPartition, PartitionLookup]:
    """Return the facts of partitions for which Kafka refuses to answer."""
    return {p: PartitionLookup(None, ANY_BOUNDS, refused=reason) for p, reason in refused.items()}


def _not_older(
    consumer: RebalanceAwareConsumer,
    partitions: Collection[TopicPartition],
    start: Start,
    patience_s: float,
) -> dict[TopicPartition, int | None]:
    """Return the first offsets that are not older than a time, from the leaders that answer."""
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
    """Reads bounds for a caller that cannot wait for every leader.

    `note` receives a sentence if a leader does not answer within `bounds_patience_s`. `refused` has
    the partitions that Kafka refused in the last query, each with the reason.
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
        self._retry_at: dict[TopicPartition, float] = {}
        self.refused: dict[TopicPartition, str] = {}
        self._seldom_at: dict[TopicPartition, float] = {}
        self._starts: dict[TopicPartition, int] = {}
        self._patience_s = PATIENCE_S

    def find(
        self,
        partitions: Collection[TopicPartition],
        recorded: Mapping[TopicPartition, LastRecorded],
    ) -> dict[TopicPartition, PartitionLookup]:
        """Return the facts of the partitions whose leaders answer, as the function `find`.

        Leaders that do not verify a committed offset in time have more time in the next call.
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
                f"the leaders of {names_of(unverified)} did not verify the committed offset, or "
                f"report the start position, within {self._patience_s:g} s"
            )
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
        return found

    def read(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return the bounds of the partitions whose leaders answer; a later call retries others."""
        return self._read_all(partitions, {})

    def read_beyond(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return the same with cached first offsets and, every 30 s, with the high watermarks.

        Only a high watermark shows the records after the start of an open transaction.
        """
        now = self._clock()
        due = [
            p for p in partitions if now >= self._seldom_at.get(p, now) and p not in self._retry_at
        ]
        # First: a record that is produced in between must not count as one of an open transaction.
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
        if not partitions:
            return {}
        try:
            return self._consumer.cluster.high_watermarks(partitions, self._bounds_patience_s)
        except BrokerError as error:
            if not (error.retriable or error.topics):
                raise
            return {}

    def _read_all(
        self, partitions: Collection[TopicPartition], starts: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, Bounds]:
        now = self._clock()
        regular = [p for p in partitions if p not in self._retry_at]
        due = [p for p in partitions if p in self._retry_at and self._retry_at[p] <= now]
        return self._read(regular, self._bounds_patience_s, starts) | self._read(
            due, _RETRY_PATIENCE_S, starts
        )

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
            if silent - self._retry_at.keys():
                self._note(str(error))
            self._retry_at |= dict.fromkeys(silent, self._clock() + _RETRY_AFTER_S)
            answering = [partition for partition in partitions if partition not in silent]
            return self._read(answering, patience_s, starts)
        for partition, bounds in found.items():
            self._retry_at.pop(partition, None)
            self.refused.pop(partition, None)
            self._starts[partition] = bounds.start
        return found

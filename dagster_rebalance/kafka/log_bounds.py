"""Read the bounds and committed offsets of partitions, and verify that they are consistent.

If a leader is unavailable, only its own partitions wait: the other partitions have a result at
once, and the unavailable leader is retried a little later. `BrokerError` is raised if Kafka refuses
and a retry would not help, or if Kafka does not answer at all.
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
"""The longest wait of a member for a response that only some of its partitions need, for each 2,500
partitions: brokers answer about thousands of partitions in several responses."""
_PER_PATIENCE = 2_500
_LONGEST_PATIENCE_S = 6.0
"""Verifying an offset takes about seven round trips, because it begins with a new connection."""
_RETRY_AFTER_S = 1.5
_RETRY_PATIENCE_S = 0.5
"""The interval and the limit of retries of a silent leader. Short, because the other partitions
wait for it."""
_SELDOM_S = 30.0
"""How often to query values that change slowly: the first offset, and the high watermark, which
matters while a transaction is open."""


def longest_wait_s(partitions: Collection[object], one_s: float = PATIENCE_S) -> float:
    """Return the longest wait for responses about partitions."""
    return one_s * (1 + len(partitions) // _PER_PATIENCE)


def read_bounds(
    consumer: RebalanceAwareConsumer,
    partitions: Collection[TopicPartition],
    timeout_s: float = READ_LIMIT_S,
    known: Mapping[TopicPartition, Bounds] | None = None,
) -> dict[TopicPartition, Bounds]:
    """Return the bounds of all partitions, within `timeout_s`.

    The first offsets of partitions with `known` bounds are not queried. Bounds that have not
    changed are the same object.
    """
    known = known or {}
    unknown = [partition for partition in partitions if partition not in known]
    starts = consumer.beginning_offsets(unknown, timeout_s) if unknown else {}
    ends = consumer.cluster.log_ends(partitions, timeout_s)
    found: dict[TopicPartition, Bounds] = {}
    for partition, end in ends.items():
        before = known.get(partition)
        if before is None:
            found[partition] = Bounds(starts[partition], end.offset, end.leader_epoch)
        elif before.until == end.offset and before.leader_epoch == end.leader_epoch:
            found[partition] = before
        else:
            found[partition] = Bounds(before.start, end.offset, end.leader_epoch)
    return found


def find(
    consumer: RebalanceAwareConsumer,
    bounds: Mapping[TopicPartition, Bounds],
    recorded: Mapping[TopicPartition, LastRecorded],
    *,
    timeout_s: float = READ_LIMIT_S,
    patience_s: float = READ_LIMIT_S,
    start: Start = StartFrom.EARLIEST,
) -> dict[TopicPartition, PartitionLookup]:
    """Return the lookups of partitions for the core, except partitions that wait for a leader.

    `timeout_s` limits the request to the coordinator, and `patience_s` the requests to all leaders.
    The group starts at `start` in a partition without a committed offset.
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
    """Query partitions; return the results, and the reason for each partition of refused topics."""
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
    """Return the group's committed offsets, and the reason for each partition without a result.

    Without a result are partitions of refused topics, or with an offset in an open transaction.
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
    """Return the lookups of partitions for which Kafka refuses to answer."""
    return {p: PartitionLookup(None, ANY_BOUNDS, refused=reason) for p, reason in refused.items()}


def _not_older(
    consumer: RebalanceAwareConsumer,
    partitions: Collection[TopicPartition],
    start: Start,
    patience_s: float,
) -> dict[TopicPartition, int | None]:
    """Return the first offsets at or after the start time, from the leaders that answer."""
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

    `note` receives a message if a leader does not answer within `bounds_patience_s`. `refused` has
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
        self._known: dict[TopicPartition, Bounds] = {}
        self._blocked: set[TopicPartition] = set()
        self._patience_s = PATIENCE_S

    def find(
        self,
        partitions: Collection[TopicPartition],
        recorded: Mapping[TopicPartition, LastRecorded],
    ) -> dict[TopicPartition, PartitionLookup]:
        """Return the lookups of the partitions whose leaders answer, as the function `find`.

        If a leader does not verify a committed offset in time, it has more time in the next call.
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
        """Return the bounds of the partitions whose leaders answer; later calls retry the rest."""
        return self._read_all(partitions, {})

    def read_beyond(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return bounds as `read`, with cached first offsets.

        Every 30 s, they have high watermarks where a transaction is open, or where one has ended.
        """
        now = self._clock()
        due = [
            p for p in partitions if now >= self._seldom_at.get(p, now) and p not in self._retry_at
        ]
        # First: a record that is produced in between must not count as one of an open transaction.
        marks = self._high_watermarks(due)
        known = self._known
        outdated = self._seldom_at.keys() & due  # the others were read right before, if ever
        if outdated:
            known = {p: bounds for p, bounds in known.items() if p not in outdated}
        self._seldom_at |= dict.fromkeys(due, now + _SELDOM_S)
        found = self._read_all(partitions, known)
        answered = marks.keys() & found.keys()
        blocked = {p for p in answered if marks[p] > found[p].until}
        news = blocked | (self._blocked & answered)
        self._blocked = (self._blocked - answered) | blocked
        return found | {p: replace(found[p], high_watermark=marks[p]) for p in news}

    def _high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        if not partitions:
            return {}
        try:
            limit_s = longest_wait_s(partitions, self._bounds_patience_s)
            return self._consumer.cluster.high_watermarks(partitions, limit_s)
        except BrokerError as error:
            if not (error.retriable or error.topics):
                raise
            return {}

    def _read_all(
        self, partitions: Collection[TopicPartition], known: Mapping[TopicPartition, Bounds]
    ) -> dict[TopicPartition, Bounds]:
        if not self._retry_at:
            return self._read(partitions, self._bounds_patience_s, known)
        now = self._clock()
        regular = [p for p in partitions if p not in self._retry_at]
        due = [p for p in partitions if p in self._retry_at and self._retry_at[p] <= now]
        return self._read(regular, self._bounds_patience_s, known) | self._read(
            due, _RETRY_PATIENCE_S, known
        )

    def _read(
        self,
        partitions: Collection[TopicPartition],
        one_s: float,
        known: Mapping[TopicPartition, Bounds],
    ) -> dict[TopicPartition, Bounds]:
        if not partitions:
            return {}
        try:
            limit_s = longest_wait_s(partitions, one_s)
            found = read_bounds(self._consumer, partitions, limit_s, known)
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
            return self._read(answering, one_s, known)
        for partition in found if self._retry_at or self.refused else ():
            self._retry_at.pop(partition, None)
            self.refused.pop(partition, None)
        if known is not self._known:  # unchanged bounds stay the same object
            same = self._known
            found = {p: same[p] if same.get(p) == bounds else bounds for p, bounds in found.items()}
        self._known |= found
        return found

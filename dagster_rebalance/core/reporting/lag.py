"""Lag of a whole group: how many records wait, in which partitions, and why.

Lag is the end of the log minus the committed offset, also for partitions without an owner. A
partition whose leader did not answer has unknown lag, not 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import MAX_OFFSET, TopicPartition, names_of
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.model.topics import first_offset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dagster_rebalance.core.model.events import PartitionLookup
    from dagster_rebalance.core.model.topics import Start

_SHOWN_INTERVALS = 5
"""Lag that needs no attention is observed only every fifth interval."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of one partition. `committed`, `end` and `lag` are None if unknown.

    Attributes:
        end: The end of the log, or the first open transaction.
        is_late: Whether a record has waited longer than the limit in seconds.
        is_undated: Whether `is_late` is unknown, because a timestamp lies in the future.
        state: Why the partition makes no progress, or that its leader did not answer.
        run_id: A run that works on the partition.
        failed_run: The last failed run, if it stopped the partition.
    """

    partition: TopicPartition
    committed: int | None
    end: int | None
    lag: int | None
    is_late: bool = False
    is_undated: bool = False
    state: str = ""
    run_id: str = ""
    failed_run: str = ""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of all partitions of a group at one time.

    Attributes:
        partitions: The partitions with unknown lag, then the others by lag, largest first.
        stopped: The number of stopped partitions.
        paused: The number of partitions that operators have paused or stopped.
        missing: The topics that do not exist.
    """

    partitions: tuple[PartitionLag, ...]
    stopped: int = 0
    paused: int = 0
    missing: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all known lags."""
        return sum(row.lag or 0 for row in self.partitions)

    @property
    def most(self) -> int:
        """The largest lag of a partition."""
        return max((row.lag or 0 for row in self.partitions), default=0)

    @property
    def unknown(self) -> tuple[TopicPartition, ...]:
        """The partitions with unknown lag."""
        return tuple(row.partition for row in self.partitions if row.lag is None)

    def __str__(self) -> str:
        count = len(self.partitions)
        known = count - len(self.unknown)
        of = f"{known:,} of " if self.unknown else ""
        text = f"lag {self.total:,} in {of}{count:,} partition{_s(count)}"
        if self.unknown and not known:
            text = "lag not known"
        worst = next((row for row in self.partitions if row.lag), None)
        if worst is not None and count > 1:
            text += f", largest {worst.partition} ({worst.lag:,})"
        working = [row.run_id for row in self.partitions if row.run_id]
        if working:
            runs = len(set(working))
            text += f"; {runs} run{_s(runs)} working on {len(working)} of them"
        for number, what in ((self.stopped, "stopped"), (self.paused, "paused by an operator")):
            text += f"; {number:,} {what}" if number else ""
        if self.unknown:
            text += (
                f"; the lag of {names_of(self.unknown)} is not known: no leader answered in time"
            )
        return "; ".join((text, *map(why_missing, self.missing)))


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of the partitions of a group, besides their offsets.

    Attributes:
        stopped: The stopped partitions, with the reasons.
        paused: The partitions that operators have paused or stopped, with the directives.
        working: A run that works on each partition.
        failed: For stopped partitions, the last failed run, its batch, and its error (empty if
            unknown).
        missing: The topics of the group that do not exist.
        reported: The stopped partitions whose owners have reported the stop.
    """

    stopped: Mapping[TopicPartition, str] = field(default_factory=dict)
    paused: Mapping[TopicPartition, str] = field(default_factory=dict)
    working: Mapping[TopicPartition, str] = field(default_factory=dict)
    failed: Mapping[TopicPartition, tuple[str, str, str]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    reported: frozenset[TopicPartition] = frozenset()


def why_missing(topic: str) -> Reason:
    """Return why no record of a topic is read, and what to do."""
    return Reason(
        f"topic {topic} does not exist, or the principal may not see it, so it is not read; other "
        "topics continue",
        "Create it, grant the ACL READ on it, or remove it from `topics`",
    )


def group_lag(
    partitions: Iterable[TopicPartition],
    found: Mapping[TopicPartition, PartitionLookup],
    state: GroupState,
    *,
    start_from: Start,
    late: Late | None = None,
) -> GroupLag:
    """Return the lag of a group from the offsets of the partitions whose leaders answered."""
    late = late or Late()
    rows = [
        replace(
            _row(partition, found.get(partition), state, start_from),
            is_late=partition in late.partitions,
            is_undated=partition in late.undated,
        )
        for partition in partitions
    ]
    rows.sort(key=lambda row: (-MAX_OFFSET if row.lag is None else -row.lag, row.partition))
    paused = len(state.paused.keys() - state.stopped.keys())
    return GroupLag(tuple(rows), len(state.stopped), paused, state.missing)


def _row(
    partition: TopicPartition, found: PartitionLookup | None, state: GroupState, start_from: Start
) -> PartitionLag:
    why = state.stopped.get(partition) or state.paused.get(partition, "")
    why = why.removeprefix(f"{partition}: ")
    committed = end = lag = None
    if found is not None and found.stored is not None:
        committed = found.stored.offset
    if found is None or not found.bounds.is_known:
        why = why or "its leader did not answer in time"
    else:
        end = found.bounds.until
        first = first_offset(start_from, found.bounds, found.offset_at_start_time)
        lag = max(0, end - (first if committed is None else committed))
    run_id = state.working.get(partition, "")
    failed_run, *_ = state.failed.get(partition, ("",))
    return PartitionLag(
        partition, committed, end, lag, state=why, run_id=run_id, failed_run=failed_run
    )


@dataclass(frozen=True, slots=True)
class Late:
    """The partitions with a record that has waited too long, or for which this is unknown."""

    partitions: frozenset[TopicPartition] = frozenset()
    undated: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class FirstSince:
    """The first record at or after a time, with its timestamp in seconds since 1970."""

    offset: int
    at_s: float


@dataclass(frozen=True, slots=True)
class _Backlog:
    """A past state: at `since_s`, the log ended at `end` and the group was at `committed`."""

    end: int
    since_s: float
    committed: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long records wait according to earlier scans, independent of their timestamps.

    Producers choose timestamps, which may lie in the future or be out of order. An offset that an
    earlier scan found in the log has waited at least since that scan.

    Attributes:
        backlogs: For each partition with lag, a log end of an earlier scan that the group has not
            reached yet.
    """

    backlogs: Mapping[TopicPartition, _Backlog] = field(default_factory=dict)

    def observe(self, rows: Iterable[PartitionLag], now_s: float) -> Waiting:
        """Return the state after another scan. A partition with unknown lag keeps its backlog."""
        backlogs = {}
        for row in rows:
            backlog = self.backlogs.get(row.partition) if row.lag is None else self._current(row)
            if backlog is None and row.lag and row.end is not None:
                backlog = _Backlog(row.end, now_s, row.end - row.lag)
            if backlog is not None:
                backlogs[row.partition] = backlog
        return Waiting(backlogs)

    def for_longer_than(self, limit_s: float, row: PartitionLag, now_s: float) -> bool:
        """Whether a record waits for longer than a limit."""
        backlog = self._current(row)
        return backlog is not None and now_s - backlog.since_s > limit_s

    def _current(self, row: PartitionLag) -> _Backlog | None:
        backlog = self.backlogs.get(row.partition)
        if backlog is None or not row.lag or row.end is None:
            return None
        # Below the earlier offset, an operator has moved it, or the topic was recreated.
        is_current = backlog.committed <= row.end - row.lag < backlog.end <= row.end
        return backlog if is_current else None


def find_late(
    rows: Iterable[PartitionLag],
    first_since: Mapping[TopicPartition, FirstSince | None],
    limit_s: float,
    now_s: float,
    waiting: Waiting | None = None,
) -> Late:
    """Return the partitions in which a record waits for longer than a limit.

    `first_since` has the first record of each partition that is younger than the limit, if any.
    """
    late, undated = set(), set()
    for row in rows:
        first = first_since[row.partition]
        if _is_late(row, first) or (waiting and waiting.for_longer_than(limit_s, row, now_s)):
            late.add(row.partition)
        elif waiting is None and first is not None and first.at_s > now_s:
            undated.add(row.partition)
    return Late(frozenset(late), frozenset(undated))


def _is_late(row: PartitionLag, first: FirstSince | None) -> bool:
    if not row.lag or row.end is None:
        return False
    return row.end - row.lag < (row.end if first is None else first.offset)


@dataclass(frozen=True, slots=True)
class LagLimit:
    """The maximum lag: offsets of all partitions together, and seconds that a record waits.

    None means no limit.

    Raises:
        ConfigurationError: A limit is negative, or the seconds are 0 or infinite.
    """

    records: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.records is not None and self.records < 0:
            msg = f"lag_within_records={self.records} must be at least 0"
            raise ConfigurationError(msg)
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            msg = f"lag_within_s={self.seconds:g} must be a number above 0"
            raise ConfigurationError(msg)

    def __bool__(self) -> bool:
        return self.records is not None or self.seconds is not None

    def exceeded(self, lag: GroupLag) -> tuple[str, ...]:
        """Return why the lag exceeds the limit, or nothing. Unknown lag exceeds the limit."""
        texts = []
        if self.records is not None and lag.total > self.records:
            texts.append(f"{lag.total:,} offsets wait, more than {self.records:,}")
        late = [row.partition for row in lag.partitions if row.is_late]
        if self.seconds is not None and late:
            texts.append(f"records of {names_of(late)} wait for more than {self.seconds:g} s")
        undated = [row.partition for row in lag.partitions if row.is_undated]
        if self.seconds is not None and undated:
            texts.append(
                f"the waiting time of records of {names_of(undated)} is not known: a timestamp in "
                "the log lies in the future"
            )
        if self and lag.unknown:
            texts.append(f"the lag of {names_of(lag.unknown)} is not known: no leader answered")
        if self and lag.missing:
            texts.append(f"the lag of {', '.join(lag.missing)} is not known")
        return tuple(texts)


NO_LIMIT = LagLimit()


def is_lag_observer(owned: Collection[TopicPartition], topics: Sequence[str]) -> bool:
    """Whether the owner of these partitions observes the lag of the group.

    Kafka assigns the first partition of the group to one member at a time, so the owner of that
    partition is the observer.
    """
    return bool(topics) and TopicPartition(min(topics), 0) in owned


def watches_topics(owned: Collection[TopicPartition], topics: Iterable[str]) -> bool:
    """Whether the owner of these partitions periodically lists the existing topics.

    Members that may become the lag observer do so, and members without partitions, because all
    topics may have been deleted.
    """
    return not owned or any(TopicPartition(topic, 0) in owned for topic in topics)


@dataclass(frozen=True, slots=True)
class LagPace:
    """When the lag is read and shown. `every_s` is 0 for never."""

    every_s: float
    looked_at: float = float("-inf")
    shown: GroupLag | None = None
    shown_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether to read the lag again."""
        return self.every_s > 0 and now - self.looked_at >= self.every_s

    def is_news(self, lag: GroupLag, now: float, limit: LagLimit = NO_LIMIT) -> bool:
        """Whether to show the lag: it needs attention, or was not shown for five intervals.

        Dagster keeps each observation, so growing and falling lag is no news.
        """
        if self.shown is None or now - self.shown_at >= _SHOWN_INTERVALS * self.every_s:
            return True
        return _attention(lag, limit) != _attention(self.shown, limit)


def _attention(lag: GroupLag, limit: LagLimit) -> tuple[object, ...]:
    """Return what an operator must know at once."""
    return lag.stopped, lag.paused, lag.missing, bool(limit.exceeded(lag))


def _s(count: int) -> str:
    return "" if count == 1 else "s"

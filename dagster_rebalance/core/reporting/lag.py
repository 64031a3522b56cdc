"""The lag of a whole group: how many offsets wait, in which partitions, and why.

Owns what counts as lag (the end of the log without the committed offset, whoever owns the
partition), which member observes it, and how often. It also owns when lag is too large. A partition
whose leader did not answer has no lag here, and is counted as unknown instead of as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import MAX_OFFSET, TopicPartition, named
from dagster_rebalance.core.model.start_position import first_offset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dagster_rebalance.core.model.events import Found
    from dagster_rebalance.core.model.start_position import Start

_QUIET = 5
"""While nothing changes, the lag is observed only every fifth time."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of one partition.

    Attributes:
        partition: The partition.
        committed: The next offset to be read; None when the group has no committed offset.
        end: The end of the log, or the first open transaction; None when it is not known.
        lag: Offsets that wait; None when it is not known.
        is_late: Whether a record waits for longer than the limit in seconds.
        is_undated: Whether that is not known, because a timestamp of the log lies in the future.
        state: Why the partition stands still, or that its leader did not answer; empty when it goes
            on.
        run_id: The run that works on it; empty when none is known.
        failed_run: The last run that failed on it, if that is why it is stopped.
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
        partitions: All of them: those whose lag is not known, then the largest lag first.
        stopped: How many cannot go on.
        paused: How many people have paused or stopped.
        missing: The topics that Kafka does not have.
    """

    partitions: tuple[PartitionLag, ...]
    stopped: int = 0
    paused: int = 0
    missing: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The offsets that wait in all partitions whose lag is known."""
        return sum(row.lag or 0 for row in self.partitions)

    @property
    def most(self) -> int:
        """The largest lag of any one partition."""
        return max((row.lag or 0 for row in self.partitions), default=0)

    @property
    def unknown(self) -> tuple[TopicPartition, ...]:
        """The partitions whose lag is not known."""
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
        at_work = [row.run_id for row in self.partitions if row.run_id]
        if at_work:
            runs = len(set(at_work))
            text += f"; {runs} run{_s(runs)} working on {len(at_work)} of them"
        for number, what in ((self.stopped, "stopped"), (self.paused, "paused by people")):
            text += f"; {number:,} {what}" if number else ""
        if self.unknown:
            text += f"; the lag of {named(self.unknown)} is not known: no leader answered in time"
        return "; ".join((text, *map(why_missing, self.missing)))


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of the partitions of a group besides their offsets.

    Attributes:
        stopped: Those that cannot go on, with the reasons.
        ordered: Those that people have paused or stopped, with the orders.
        working: The runs that work on partitions, by partition.
        failed: Of stopped partitions, the last run that failed, its batch, and its error, which is
            empty where it is not known.
        missing: The topics of the group that Kafka does not have.
        told: Those of the stopped partitions whose owners have said so.
    """

    stopped: Mapping[TopicPartition, str] = field(default_factory=dict)
    ordered: Mapping[TopicPartition, str] = field(default_factory=dict)
    working: Mapping[TopicPartition, str] = field(default_factory=dict)
    failed: Mapping[TopicPartition, tuple[str, str, str]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    told: frozenset[TopicPartition] = frozenset()


def why_missing(topic: str) -> str:
    """Why nothing of a topic is read, and what to do."""
    return (
        f"topic {topic} does not exist, or the principal may not see it, so nothing of it is read; "
        "other topics go on. Create it, grant the ACL READ on it, or take it out of `topics`"
    )


def group_lag(
    partitions: Iterable[TopicPartition],
    found: Mapping[TopicPartition, Found],
    standing: Standing,
    *,
    start_from: Start,
    late: Late | None = None,
) -> GroupLag:
    """The lag of a group.

    Args:
        partitions: All partitions of its topics.
        found: What Kafka said of them; nothing of those whose leaders did not answer.
        standing: What else is known.
        start_from: Where a partition without a committed offset begins.
        late: Those in which a record waits for longer than the limit.
    """
    late = late or Late()
    rows = [
        replace(
            _row(partition, found.get(partition), standing, start_from),
            is_late=partition in late.partitions,
            is_undated=partition in late.undated,
        )
        for partition in partitions
    ]
    rows.sort(key=lambda row: (-MAX_OFFSET if row.lag is None else -row.lag, row.partition))
    stopped = standing.stopped.keys()
    paused = len(standing.ordered.keys() - stopped)
    return GroupLag(tuple(rows), len(stopped), paused, standing.missing)


def _row(
    partition: TopicPartition,
    found: Found | None,
    standing: Standing,
    start_from: Start,
) -> PartitionLag:
    state = standing.stopped.get(partition) or standing.ordered.get(partition, "")
    state = state.removeprefix(f"{partition}: ")
    committed = end = lag = None
    if found is not None and found.stored is not None:
        committed = found.stored.offset
    if found is None or not found.bounds.is_known:
        state = state or "its leader did not answer in time"
    else:
        end = found.bounds.until
        first = first_offset(start_from, found.bounds, found.not_older)
        lag = max(0, end - (first if committed is None else committed))
    run_id = standing.working.get(partition, "")
    failed_run, *_ = standing.failed.get(partition, ("",))
    return PartitionLag(
        partition, committed, end, lag, state=state, run_id=run_id, failed_run=failed_run
    )


@dataclass(frozen=True, slots=True)
class Late:
    """The partitions in which a record waits for longer than a limit.

    Attributes:
        partitions: These partitions.
        undated: The partitions of which that is not known.
    """

    partitions: frozenset[TopicPartition] = frozenset()
    undated: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class FirstSince:
    """The first record of a log whose timestamp is not before a time.

    Attributes:
        offset: Its offset.
        at_s: Its timestamp, in seconds since 1970.
    """

    offset: int
    at_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """A log reached `end` at `since_s`, when the group had come to `begun`."""

    end: int
    since_s: float
    begun: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long records wait by what earlier looks have seen, whatever their timestamps say.

    Producers choose timestamps: the first record since a time may lie in the future, and before
    older ones. An offset that was in the log at an earlier look has waited since then at least.

    Attributes:
        marks: For each partition with lag, an end of its log at an earlier look that the group has
            not reached yet.
    """

    marks: Mapping[TopicPartition, _Mark] = field(default_factory=dict)

    def looked(self, rows: Iterable[PartitionLag], now_s: float) -> Waiting:
        """Take in a look. A partition of which nothing is known keeps its mark."""
        marks = {}
        for row in rows:
            mark = self.marks.get(row.partition) if row.lag is None else self._kept(row)
            if mark is None and row.lag and row.end is not None:
                mark = _Mark(row.end, now_s, row.end - row.lag)
            if mark is not None:
                marks[row.partition] = mark
        return Waiting(marks)

    def for_longer_than(self, limit_s: float, row: PartitionLag, now_s: float) -> bool:
        """Whether a record waits for longer than a limit."""
        mark = self._kept(row)
        return mark is not None and now_s - mark.since_s > limit_s

    def _kept(self, row: PartitionLag) -> _Mark | None:
        mark = self.marks.get(row.partition)
        if mark is None or not row.lag or row.end is None:
            return None
        # Below the earlier offset, a person has moved it, or the topic was made again.
        return mark if mark.begun <= row.end - row.lag < mark.end <= row.end else None


def late_among(
    rows: Iterable[PartitionLag],
    first_since: Mapping[TopicPartition, FirstSince | None],
    limit_s: float,
    now_s: float,
    waiting: Waiting | None = None,
) -> Late:
    """The partitions in which a record waits for longer than a limit.

    Args:
        rows: The partitions with lag.
        first_since: The first record of each that is younger than the limit; None where there is
            none.
        limit_s: The limit.
        now_s: The time, in seconds since 1970.
        waiting: What earlier looks have seen; None where there were none.
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
    """How much lag is too much.

    Attributes:
        records: Offsets of all partitions together; None for any number.
        seconds: How long a record may wait, by its timestamp; None for any time.

    Raises:
        ConfigurationError: A limit is negative, or 0 seconds, or for ever.
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
        """Why the lag is too large, in sentences; empty when it is not.

        Unknown lag is no small lag.
        """
        texts = []
        if self.records is not None and lag.total > self.records:
            texts.append(f"{lag.total:,} offsets wait, more than {self.records:,}")
        late = [row.partition for row in lag.partitions if row.is_late]
        if self.seconds is not None and late:
            texts.append(f"records of {named(late)} wait for more than {self.seconds:g} s")
        undated = [row.partition for row in lag.partitions if row.is_undated]
        if self.seconds is not None and undated:
            texts.append(
                f"how long records of {named(undated)} wait is not known: a timestamp in the log "
                "lies in the future"
            )
        if self and lag.unknown:
            texts.append(f"the lag of {named(lag.unknown)} is not known: no leader answered")
        if self and lag.missing:
            texts.append(f"the lag of {', '.join(lag.missing)} is not known")
        return tuple(texts)


NO_LIMIT = LagLimit()
"""Any lag will do."""


def observes(owned: Collection[TopicPartition], topics: Sequence[str]) -> bool:
    """Whether the member that owns these partitions observes the lag of the whole group.

    Kafka gives the first partition of the group to one member at a time, whatever form it has, and
    to another one when that member is gone.

    Args:
        owned: The partitions of the member.
        topics: The topics of the group that Kafka has.
    """
    return bool(topics) and TopicPartition(min(topics), 0) in owned


def looks_for_topics(owned: Collection[TopicPartition], topics: Iterable[str]) -> bool:
    """Whether the member that owns these partitions looks from time to time what topics there are.

    Those that may come to observe the lag do, and those that have nothing: all topics may be gone.
    """
    return not owned or any(TopicPartition(topic, 0) in owned for topic in topics)


@dataclass(frozen=True, slots=True)
class LagPace:
    """The lag pace says when the lag is looked up, and when it is shown.

    Attributes:
        every_s: How often it is looked up; 0 for never.
        looked_at: When that was, the last time.
        shown: What was shown last; None when that is not known.
        shown_at: When that was.
    """

    every_s: float
    looked_at: float = float("-inf")
    shown: GroupLag | None = None
    shown_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether to look again."""
        return self.every_s > 0 and now - self.looked_at >= self.every_s

    def is_news(self, lag: GroupLag, now: float) -> bool:
        """Whether to show what was found: it has changed, or was not shown for a while."""
        return lag != self.shown or now - self.shown_at >= _QUIET * self.every_s


def _s(count: int) -> str:
    return "" if count == 1 else "s"

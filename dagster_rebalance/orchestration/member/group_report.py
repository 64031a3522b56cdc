"""The group report: the stopped partitions and the lag of the whole group, from one member.

A member reports the stopped partitions if one of its partitions stops or resumes. It then observes
the lag, too; otherwise one member does (`core.reporting.lag` decides which). One scan of Kafka
serves both reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.core.partitions.assigned import Role
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.lag import (
    GroupLag,
    GroupState,
    LagPace,
    PartitionLag,
    Waiting,
    is_lag_observer,
    watches_topics,
    why_missing,
)
from dagster_rebalance.kafka.log_bounds import PATIENCE_S
from dagster_rebalance.orchestration.reporting.group_snapshot import (
    GroupScan,
    errors_of,
    lag_of,
    late_partitions,
    scan_parts,
    stops_of,
    stops_with_reported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.core.model.events import Event
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.log_bounds import BoundsReader
    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
    from dagster_rebalance.orchestration.ports import ShownStops

_SCAN_STOPS_S = 10.0
"""Minimum interval between reports of stops: each reads all partitions of the group."""
_CONFIRM_STOPS_S = 30.0
"""When a report is confirmed: another member may have reported newer stops before it. While own
partitions are stopped, the member confirms repeatedly, because the check executed by hand does not
know all reasons."""
_STANDSTILL_S = 10.0
_SILENCE_S = 10.0
"""After a standstill, a member may have lost its partitions to an owner that has reported them.
The client detects the loss within this time."""
_RESTORING_LIMIT_S = 5.0
"""How long partitions that are being restored defer a scan. It queries several brokers in the same
thread."""
_UNKNOWN_S = 60.0
"""When the lag is reported as unknown: a broker that restarts answers before that."""
_LOOK_FOR_TOPICS_S = 30.0
_MOST_AT_ONCE = 2_000
"""How many partitions a step scans. A scan of 10,000 would block the member for seconds."""
_ENDED = object()

_Shown: TypeAlias = "tuple[frozenset[TopicPartition], frozenset[Any], tuple[str, ...]]"
"""The stopped partitions, the paused partitions with reasons, and the missing topics."""


@dataclass(frozen=True)
class _Due:
    """The purpose of a scan.

    Attributes:
        at: The time of the scan.
        stops: Whether to report the stopped partitions.
        lag: Whether to report the lag.
        news: The number of changes that the report covers.
        stop_news: The number of changes of stops that the report covers.
        shown: The last report if nothing has changed since; this scan can confirm the report.
    """

    at: float
    stops: bool
    lag: bool
    news: int
    stop_news: int
    shown: _Shown | None


@dataclass(frozen=True)
class _Done:
    """The result of a scan; None for the parts that were not reported.

    Attributes:
        due: The purpose of the scan.
        stops: The reported stops.
        kept: The partitions that were reported as stopped only because their owners had done so.
        lag: The reported lag.
    """

    due: _Due
    stops: _Shown | None = None
    kept: frozenset[TopicPartition] = frozenset()
    lag: GroupLag | None = None


class GroupReport:
    """The group report of one member.

    Args:
        dependencies: The dependencies of the member loop.
        bounds: Reads the bounds of partitions.
        show: Runs its first argument in the storage thread, and then its second argument with the
            result in the thread of the member loop.
        note: Receives a message when the lag cannot be read.

    Attributes:
        sentences: The missing topics, for the ticks.
    """

    def __init__(
        self,
        dependencies: MemberDependencies,
        bounds: BoundsReader,
        show: Callable[[Callable[[], Any], Callable[[Any], Event | None]], None],
        note: Callable[[str], None],
    ) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._clock = dependencies.clock
        self._note = note
        self._bounds = bounds
        self._show = show
        self._waiting = Waiting()
        self._stops_scanned_at = float("-inf")
        self._news = self._news_shown = 0
        self._stop_news = self._stop_news_shown = 0
        self._last_shown: _Shown | None = None
        self._asked: _Due | None = None
        self._asked_stops: frozenset[TopicPartition] = frozenset()
        self._showing: _Due | None = None
        self._scanning: Iterator[None] | None = None
        self._looked_before = float("-inf"), float("-inf")
        self._is_confirmed = True
        self._kept: frozenset[TopicPartition] = frozenset()
        self._stepped_at, self._silent_until = float("inf"), float("-inf")
        self._restored_at = self._clock()
        self._seen: tuple[int, tuple[str, ...], frozenset[TopicPartition]] | None = None
        self._is_observer = self._has_stops = self._has_restoring = self._is_doubted = False
        self._watches_topics = False
        self._topics_read_at = float("-inf")
        self._topics = Topics.of(dependencies.topics)
        self._existing: tuple[str, ...] = ()
        self._missing: tuple[str, ...] = ()
        self.sentences: tuple[str, ...] = ()
        self._pace = LagPace(self._engine.settings.lag_every_s)
        self._partitions: tuple[TopicPartition, ...] = ()
        self._observed_at = float("-inf")
        self._unknown_since: float | None = None

    def add_news(self, *, is_stop: bool = False) -> None:
        """Request a new report; `is_stop` if a partition has stopped or resumed."""
        self._news += 1
        self._stop_news += is_stop

    def add_directives(self) -> None:
        """Request a report after a change of directives; the observer also reads the lag now."""
        self.add_news()
        self._pace = replace(self._pace, looked_at=float("-inf"))

    def topics(self, timeout_s: float = PATIENCE_S) -> tuple[str, ...]:
        """Return the topics of the group that exist.

        Raises:
            BrokerError: Kafka did not answer.
        """
        self._topics_read_at = self._clock()
        existing = self._dependencies.consumer.list_topics(timeout_s)
        self._set_topics(self._topics.among(existing), self._topics.missing(existing))
        self._engine.count_group(sum(len(existing[topic]) for topic in self._existing))
        return self._existing

    def _set_topics(self, existing: tuple[str, ...], missing: tuple[str, ...]) -> None:
        self._existing = existing
        if missing != self._missing:
            self._missing = missing
            self.sentences = tuple(f"stopped: {why_missing(topic)}" for topic in missing)
            for sentence in self.sentences:
                self._note(sentence)
            self.add_news(is_stop=True)

    @property
    def is_current(self) -> bool:
        """Whether all changes were reported."""
        return self._news == self._news_shown

    def _look_at_partitions(self) -> None:
        """Read the state of the partitions if it has changed. A member may own thousands."""
        owned = self._engine.partitions
        seen = (owned.version, self._existing, self._kept)
        if seen == self._seen:
            return
        self._seen = seen
        if not all(partition in owned for partition in self._asked_stops):
            self._withdraw()
        self._is_observer = is_lag_observer(owned, self._existing)
        self._watches_topics = watches_topics(owned, {*self._topics.names, *self._existing})
        self._has_stops = any(one.stop_reason for one in owned.of(Role.TROUBLED, Role.RESTORING))
        self._has_restoring = any(not one.blocked_by for one in owned.of(Role.RESTORING))
        # The member knows the partitions that it has restored better than their last owner.
        self._is_doubted = any(
            partition in owned and owned[partition].phase is not Phase.RESTORING
            for partition in self._kept
        )

    def _withdraw(self) -> None:
        """Let a report that was not shown yet be repeated: other members may know better."""
        self._asked = self._showing = None
        self._asked_stops = frozenset()

    def _wanted(self, now: float) -> tuple[bool, bool]:
        """Whether to report the stops, and the lag."""
        is_new = self._news != self._news_shown or self._is_doubted
        wait_s = _SCAN_STOPS_S if is_new else _CONFIRM_STOPS_S
        has_news = is_new or self._has_stops or not self._is_confirmed
        stops = has_news and now - self._stops_scanned_at >= wait_s
        has_stop_news = self._stop_news > self._stop_news_shown
        lag = (self._pace.is_due(now) and self._observes) or (stops and has_stop_news)
        return stops, lag and self._pace.every_s > 0

    @property
    def is_observer(self) -> bool:
        """Whether this member owns the partition whose owner reports for the group."""
        self._look_at_partitions()
        return self._is_observer

    @property
    def _observes(self) -> bool:
        """Whether this member observes the lag.

        While Kafka is unavailable, the observer loses its partitions, and no other member gets
        them. So an observer without partitions stays the observer for one more scan, and until
        Kafka answers.
        """
        self._look_at_partitions()
        has_just_lost = (
            not self._engine.partitions
            and self._stepped_at - self._observed_at <= self._pace.every_s
        )
        stays = has_just_lost or self._unknown_since is not None
        return self._is_observer or (bool(self._dependencies.lag_limit) and stays)

    def is_due(self, now: float) -> bool:
        """Whether to call `step`. Call this in each turn of the member loop.

        The report is deferred after a standstill, and while partitions are being restored.
        """
        if now - self._stepped_at > _STANDSTILL_S:
            self._silent_until = now + _SILENCE_S
            self._withdraw()
        self._stepped_at = now
        self._look_at_partitions()
        if self._is_observer:
            self._observed_at = now
        if now < self._silent_until:
            self._drop_scan()
            return False
        if not self._has_restoring:
            self._restored_at = now
        elif now - self._restored_at < _RESTORING_LIMIT_S:
            self._drop_scan()
            return False
        return self._scanning is not None or self._must_read_topics(now) or any(self._wanted(now))

    def step(self) -> None:
        """Read the topics, and scan the next partitions, if that is due.

        The report follows in the step that scans the last partitions.
        """
        if self._scanning is None:
            self._read_topics()
            self._look_at_partitions()
            self._scanning = self._begin()
        scanning, self._scanning = self._scanning, None  # after an error, a new scan begins
        if next(scanning, _ENDED) is not _ENDED:
            self._scanning = scanning

    def _drop_scan(self) -> None:
        """Drop an incomplete scan: its first partitions may have changed; a new scan follows."""
        if self._scanning is not None:
            self._scanning = None
            looked_at, self._stops_scanned_at = self._looked_before
            self._pace = replace(self._pace, looked_at=looked_at)

    def _begin(self) -> Iterator[None]:
        now = self._clock()
        self._looked_before = self._pace.looked_at, self._stops_scanned_at
        due = _Due(
            now,
            *self._wanted(now),
            self._news,
            self._stop_news,
            self._last_shown if self.is_current else None,
        )
        if due.lag:
            self._pace = replace(self._pace, looked_at=due.at)
        if due.stops:
            self._stops_scanned_at = due.at
        if due.stops or due.lag:
            try:
                yield from self._scan(due)
            except BrokerError as error:
                self._note(
                    f"the lag of the group and its stopped partitions are not known: {error}"
                )
                unknown = self._unknown_lag(due, error)
                if unknown is not None:
                    pace = self._pace
                    done = replace(due, stops=False, lag=False)  # other news waits for an answer
                    self._show(
                        lambda: _Done(done, lag=self._show_lag(unknown, due, pace)), self._shown
                    )

    def _read_topics(self) -> None:
        if self._must_read_topics(self._clock()):
            try:
                self.topics()
            except BrokerError as error:
                self._note(f"the topics of the group could not be listed: {error}")

    def _must_read_topics(self, now: float) -> bool:
        return self._watches_topics and now - self._topics_read_at >= _LOOK_FOR_TOPICS_S

    def _scan(self, due: _Due) -> Iterator[None]:
        """Scan the group, and report it in the storage thread.

        The member's own partitions are reported as the engine sees them, once restored.
        """
        dependencies, settings = self._dependencies, self._engine.settings
        for scan in scan_parts(
            dependencies.consumer,
            dependencies.topics,
            self._bounds.read,
            settings.start_from,
            most=_MOST_AT_ONCE,
            timeout_s=PATIENCE_S,
        ):
            if not scan.is_complete:
                yield
        own = self._own_standing()
        known = own.stopped.keys() | {
            partition
            for partition, owned in self._engine.partitions.items()
            if owned.phase is not Phase.RESTORING
        }
        self._set_topics(scan.topics, scan.missing)
        self._partitions = scan.partitions
        self._engine.count_group(len(scan.partitions))
        lag, pace = self._lag(scan, due), self._pace

        def show() -> _Done:
            if self._asked is not due:  # withdrawn, or a newer report follows
                return _Done(replace(due, stops=False, lag=False))
            self._showing = due
            before = dependencies.catalogue.shown_stops()
            others = stops_of(scan, dependencies.runs, dependencies.catalogue, settings, known)
            # Some reasons are known to the owner alone, which reports when the partition resumes.
            kept = {
                partition: reason
                for partition, reason in before.by_owners.items()
                if partition in scan.found and partition not in known
            }
            standing = GroupState(
                {**stops_with_reported(others.stopped, kept, settings), **own.stopped},
                others.paused,
                {**others.working, **own.working},
                {**others.failed, **own.failed},
                others.missing,
                reported=frozenset({*kept, *own.stopped}),
            )
            # Withdrawn, or it hung and a newer report has begun, or the process stood still.
            if self._showing is not due or self._clock() - self._stepped_at > _STANDSTILL_S:
                return _Done(replace(due, stops=False, lag=False))
            stops = self._show_stops(standing, before, due)
            shown = self._show_lag(lag(standing), due, pace)
            return _Done(due, stops, frozenset(kept) - others.stopped.keys(), shown)

        self._asked, self._asked_stops = due, frozenset(own.stopped)
        self._show(show, self._shown)

    def _own_standing(self) -> GroupState:
        stopped, working, failed = {}, {}, {}
        for partition, owned in self._engine.partitions.items():
            if owned.live_runs:
                working[partition] = min(owned.live_runs)
            if owned.stop_reason:
                stopped[partition] = owned.stop_reason
                if owned.last_failure:
                    failed[partition] = owned.last_failure
        return GroupState(stopped, working=working, failed=failed)

    def _lag(self, scan: GroupScan, due: _Due) -> Callable[[GroupState], GroupLag | None]:
        """Return a function that returns the lag for the state of the group, or None."""
        dependencies, settings = self._dependencies, self._engine.settings
        if not due.lag:
            return lambda _: None
        rows, now_s = lag_of(scan, GroupState(), settings).partitions, dependencies.wall_clock()
        self._waiting = self._waiting.observe(rows, now_s)
        try:
            late = late_partitions(
                dependencies.consumer,
                rows,
                dependencies.lag_limit,
                now_s=now_s,
                waiting=self._waiting,
                timeout_s=PATIENCE_S,
            )
        except BrokerError as error:
            self._note(f"the lag of the group is not known: {error}")
            unknown = self._unknown_lag(due, error)
            return lambda _: unknown
        self._unknown_since = None
        return lambda standing: lag_of(scan, standing, settings, late)

    def _unknown_lag(self, due: _Due, error: BrokerError) -> GroupLag | None:
        """Return an unknown lag, which fails the check, after Kafka has long been silent."""
        if not (due.lag and self._observes and self._dependencies.lag_limit):
            return None
        if self._unknown_since is None:
            self._unknown_since = due.at
            self._partitions = self._partitions or tuple(sorted(self._engine.partitions))
        if due.at - self._unknown_since < _UNKNOWN_S:
            return None
        rows = (PartitionLag(p, None, None, None, state=str(error)) for p in self._partitions)
        return GroupLag(tuple(rows), missing=self._missing)

    # Storage thread

    def _show_stops(self, standing: GroupState, before: ShownStops, due: _Due) -> _Shown | None:
        paused = frozenset(standing.paused.items())
        shown = (frozenset(standing.stopped), paused, standing.missing)
        is_shown = shown == due.shown and before.are(standing.stopped)
        if not due.stops or is_shown:
            return None
        errors = errors_of(standing, self._dependencies.runs)
        self._dependencies.catalogue.show_stopped(standing, errors)
        return shown

    def _show_lag(self, lag: GroupLag | None, due: _Due, pace: LagPace) -> GroupLag | None:
        limit = self._dependencies.lag_limit
        if lag is None or not pace.is_news(lag, due.at, limit):
            return None
        self._dependencies.catalogue.show_lag(lag, limit)
        return lag

    # Member thread

    def _shown(self, done: _Done) -> None:
        """Apply a report after it was stored. A failed report is repeated."""
        due = done.due
        self._engine.owe_records(2 - (done.stops, done.lag).count(None), self._clock())
        if due.stops:
            self._news_shown, self._kept = due.news, done.kept
            self._is_confirmed = done.stops is None
            self._last_shown = done.stops or self._last_shown
        if due.lag:
            self._stop_news_shown = due.stop_news
        if done.lag is not None:
            self._pace = replace(self._pace, shown=done.lag, shown_at=due.at)

"""The group report: what a member shows in Dagster of its whole group.

These are the partitions that cannot go on, and the lag. Every member that has news of a stop shows
what is stopped. The lag is observed from one place (`core.reporting.lag` says which), and by the
member whose partition stops or goes on. One look at Kafka serves both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.topics import Topics
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
from dagster_rebalance.orchestration.reporting.group_scan import (
    GroupScan,
    errors_of,
    lag_of,
    late_partitions,
    look_at_group,
    standstills,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.events import Event
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.log_bounds import BoundsReader
    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
    from dagster_rebalance.orchestration.ports import ShownStops

_SHOW_STOPPED_S = 10.0
"""How often stopped partitions are looked up and shown at most: each time asks for all partitions
of the group, however many of them have news."""
_SHOWN_IS_PROVEN_S = 30.0
"""When a member looks once more at what it has shown as stopped: another one may have shown newer
things before it, and has no more news. While partitions of its own are stopped it looks again and
again: a person may have executed the check by hand, which does not know all reasons."""
_STANDSTILL_S = 10.0
_KNOWN_AGAIN_S = 10.0
"""A member that stood still (a frozen process) may have lost its partitions, which the new owner
has shown by then. Within this time its client learns of it."""
_TAKES_IN_S = 5.0
"""For so long at most what is shown waits while the member takes partitions in: a look asks Kafka
half a dozen questions, each of which may wait for a broker, in the thread that takes them in."""
_UNKNOWN_S = 60.0
"""When the lag is shown as not known: a broker that restarts, or a coordinator that moves, answers
again before this time is over."""
_LOOK_FOR_TOPICS_S = 30.0
"""How often the topics of the group are looked for: one may be deleted, or made again."""

_Shown: TypeAlias = "tuple[frozenset[TopicPartition], frozenset[Any], tuple[str, ...]]"
"""What the check has shown: the stopped partitions, the paused ones with why, and the missing
topics."""


@dataclass(frozen=True)
class _Wanted:
    """What one look is for.

    Attributes:
        at: The time.
        stops: Whether to show what is stopped.
        lag: Whether to show the lag.
        news: How much news there was by then.
        stop_news: How much of it was of stops.
        shown: What was shown last, if nothing has happened since, so that this look may prove it.
    """

    at: float
    stops: bool
    lag: bool
    news: int
    stop_news: int
    shown: _Shown | None


@dataclass(frozen=True)
class _Done:
    """What came of it; None for what was not shown.

    Attributes:
        wanted: What the look was for.
        stops: What was shown as stopped, paused and missing.
        kept: The partitions that were shown as stopped only because they were before.
        lag: The lag that was shown.
    """

    wanted: _Wanted
    stops: _Shown | None = None
    kept: frozenset[TopicPartition] = frozenset()
    lag: GroupLag | None = None


class GroupReport:
    """Shows the state of the group for one member.

    Args:
        parts: What the member loop works with.
        bounds: Reads the bounds of partitions.
        show: Has the catalogue do something in the thread of the storage, and calls its second
            argument with what came of it, in that of the member loop.
        note: Gets a sentence when the lag cannot be looked up.
    """

    def __init__(
        self,
        parts: MemberDependencies,
        bounds: BoundsReader,
        show: Callable[[Callable[[], Any], Callable[[Any], Event | None]], None],
        note: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._note = note
        self._bounds = bounds
        self._show = show
        self._waiting = Waiting()
        self._stops_looked_at = float("-inf")
        self._news = self._news_told = 0
        self._stop_news = self._stop_news_told = 0
        self._last_shown: _Shown | None = None
        self._is_proven = True
        self._kept: frozenset[TopicPartition] = frozenset()
        self._stepped_at, self._silent_until = float("inf"), float("-inf")
        self._taken_in_at = parts.clock()
        self._topics_looked_at = float("-inf")
        self._topics = Topics.of(parts.topics)
        self._there: tuple[str, ...] = ()
        self._missing: tuple[str, ...] = ()
        self._pace = LagPace(parts.engine.settings.lag_every_s)
        self._partitions: tuple[TopicPartition, ...] = ()
        self._observed_at = float("-inf")
        self._unknown_since: float | None = None

    def add_news(self, *, is_stop: bool = False) -> None:
        """What is shown as stopped may not be true any more.

        Args:
            is_stop: Whether a partition has stopped or goes on.
        """
        self._news += 1
        self._stop_news += is_stop

    @property
    def sentences(self) -> tuple[str, ...]:
        """What a tick says of the topics that Kafka does not have."""
        return tuple(f"stopped: {why_missing(topic)}" for topic in self._missing)

    def topics(self, timeout_s: float = PATIENCE_S) -> tuple[str, ...]:
        """Look which topics of the group Kafka has.

        Raises:
            BrokerError: Kafka did not answer.
        """
        self._topics_looked_at = self._parts.clock()
        there = self._parts.consumer.list_topics(timeout_s)
        self._know(self._topics.among(there), self._topics.missing(there))
        return self._there

    def _know(self, there: tuple[str, ...], missing: tuple[str, ...]) -> None:
        self._there = there
        if missing != self._missing:
            for topic in missing:
                self._note(f"stopped: {why_missing(topic)}")
            self._missing = missing
            self.add_news(is_stop=True)

    @property
    def is_told(self) -> bool:
        """Whether all news was shown."""
        return self._news == self._news_told

    @property
    def _wanted(self) -> _Wanted:
        """What is due now."""
        now = self._parts.clock()
        mine = self._parts.engine.partitions
        # They were shown so before they were its own, and the member knows better by now.
        is_doubted = any(
            partition in mine and mine[partition].phase is not Phase.RESTORING
            for partition in self._kept
        )
        has_stops = any(owned.stop_reason for owned in mine.busy)
        wait_s = _SHOWN_IS_PROVEN_S if self.is_told and not is_doubted else _SHOW_STOPPED_S
        has_news = not self.is_told or not self._is_proven or is_doubted or has_stops
        stops = has_news and now - self._stops_looked_at >= wait_s
        has_stop_news = self._stop_news > self._stop_news_told
        lag = (self._observes and self._pace.is_due(now)) or (stops and has_stop_news)
        return _Wanted(
            now,
            stops,
            lag and self._pace.every_s > 0,
            self._news,
            self._stop_news,
            self._last_shown if self.is_told else None,
        )

    @property
    def _observes(self) -> bool:
        """Whether this member observes the lag.

        While Kafka does not answer, the observer loses its partitions, and nobody else gets them.
        So a member that has lost all goes on as the observer for one more look, and until it has an
        answer.
        """
        mine = self._parts.engine.partitions
        has_just_lost = not mine and self._stepped_at - self._observed_at <= self._pace.every_s
        goes_on = has_just_lost or self._unknown_since is not None
        return is_lag_observer(mine, self._there) or (bool(self._parts.lag_limit) and goes_on)

    def step(self) -> None:
        """Look at the group if it is time, and have shown what was found.

        For a while after a standstill, and while it takes partitions in, the member shows nothing.
        """
        now = self._parts.clock()
        if now - self._stepped_at > _STANDSTILL_S:
            self._silent_until = now + _KNOWN_AGAIN_S
        self._stepped_at = now
        if is_lag_observer(self._parts.engine.partitions, self._there):
            self._observed_at = now
        if now < self._silent_until or self._takes_in(now):
            return
        self._look_for_topics()
        wanted = self._wanted
        if wanted.lag:
            self._pace = replace(self._pace, looked_at=wanted.at)
        if wanted.stops:
            self._stops_looked_at = wanted.at
        if wanted.stops or wanted.lag:
            try:
                self._look(wanted)
            except BrokerError as error:  # it is for people, and asked again: the member goes on
                self._note(f"the lag of the group, and what is stopped, is not known: {error}")
                unknown = self._unknown(wanted, error)
                if unknown is not None:
                    done = replace(wanted, stops=False, lag=False)  # other news waits for an answer
                    self._show(
                        lambda: _Done(done, lag=self._show_lag(unknown, wanted)), self._shown
                    )

    def _takes_in(self, now: float) -> bool:
        """Whether the member takes partitions in, and has not done so for long."""
        busy = self._parts.engine.partitions.busy
        takes_in = any(o.phase is Phase.RESTORING and not o.blocked_by for o in busy)
        if not takes_in:
            self._taken_in_at = now
        return takes_in and now - self._taken_in_at < _TAKES_IN_S

    def _look_for_topics(self) -> None:
        parts = self._parts
        is_due = parts.clock() - self._topics_looked_at >= _LOOK_FOR_TOPICS_S
        known = {*self._topics.names, *self._there}
        if is_due and watches_topics(parts.engine.partitions, known):
            try:
                self.topics()
            except BrokerError as error:
                self._note(f"which topics there are is not known: {error}")

    def _look(self, wanted: _Wanted) -> None:
        """Look at the whole group. The member knows its own partitions best, once it has them."""
        parts = self._parts
        mine, settings = parts.engine.partitions, parts.engine.settings
        own = {
            partition: owned.stop_reason for partition, owned in mine.items() if owned.stop_reason
        }
        working = {
            partition: min(owned.live_runs) for partition, owned in mine.items() if owned.live_runs
        }
        known = {
            partition for partition, owned in mine.items() if owned.phase is not Phase.RESTORING
        } | own.keys()
        failed = {partition: last for partition in own if (last := mine[partition].last_failure)}
        whole = look_at_group(
            parts.consumer,
            parts.topics,
            self._bounds.read,
            settings.start_from,
            timeout_s=PATIENCE_S,
        )
        self._know(whole.topics, whole.missing)
        self._partitions = whole.partitions
        lag = self._lag(whole, wanted)

        def show() -> _Done:
            before = parts.catalogue.shown_stops()
            found = standstills(whole, parts.runs, parts.catalogue, settings, known)
            # Why a partition of another member is stopped cannot always be seen from here. That
            # member says when it goes on.
            kept = {
                partition: before.reasons[partition]
                for partition in before.told - known
                if partition in whole.found
            }
            standing = GroupState(
                {**kept, **found.stopped, **own},
                found.ordered,
                {**found.working, **working},
                {**found.failed, **failed},
                found.missing,
                reported=frozenset({*kept, *own}),
            )
            stops = self._show_stops(standing, before, wanted)
            shown = self._show_lag(lag(standing), wanted)
            return _Done(wanted, stops, frozenset(kept) - found.stopped.keys(), shown)

        self._show(show, self._shown)

    def _lag(self, whole: GroupScan, wanted: _Wanted) -> Callable[[GroupState], GroupLag | None]:
        """How the lag follows from what stands still; None when there is none to show."""
        parts = self._parts
        settings = parts.engine.settings
        if not wanted.lag:
            return lambda _: None
        rows, now_s = lag_of(whole, GroupState(), settings).partitions, parts.wall_clock()
        self._waiting = self._waiting.observe(rows, now_s)
        try:
            late = late_partitions(
                parts.consumer,
                rows,
                parts.lag_limit,
                now_s=now_s,
                waiting=self._waiting,
                timeout_s=PATIENCE_S,
            )
        except BrokerError as error:
            self._note(f"the lag of the group is not known: {error}")
            unknown = self._unknown(wanted, error)
            return lambda _: unknown
        self._unknown_since = None
        return lambda standing: lag_of(whole, standing, settings, late)

    def _unknown(self, wanted: _Wanted, error: BrokerError) -> GroupLag | None:
        """The lag that the check fails with when the observer has had no answer for long."""
        if not (wanted.lag and self._observes and self._parts.lag_limit):
            return None
        if self._unknown_since is None:
            self._unknown_since = wanted.at
            self._partitions = self._partitions or tuple(sorted(self._parts.engine.partitions))
        if wanted.at - self._unknown_since < _UNKNOWN_S:
            return None
        rows = (PartitionLag(p, None, None, None, state=str(error)) for p in self._partitions)
        return GroupLag(tuple(rows), missing=self._missing)

    def _show_stops(
        self, standing: GroupState, before: ShownStops, wanted: _Wanted
    ) -> _Shown | None:
        ordered = frozenset(standing.ordered.items())
        shown = (frozenset(standing.stopped), ordered, standing.missing)
        is_shown = shown == wanted.shown and before.are(standing.stopped)
        if not wanted.stops or is_shown:
            return None
        errors = errors_of(standing, self._parts.runs)
        self._parts.catalogue.show_stopped(standing, errors)
        return shown

    def _show_lag(self, lag: GroupLag | None, wanted: _Wanted) -> GroupLag | None:
        if lag is None or not self._pace.is_news(lag, wanted.at):
            return None
        self._parts.catalogue.show_lag(lag, self._parts.lag_limit)
        return lag

    def _shown(self, done: _Done) -> None:
        """Only now: the check must not stay as it was because the storage failed once."""
        wanted = done.wanted
        if wanted.stops:
            self._news_told, self._kept = wanted.news, done.kept
            self._is_proven = done.stops is None
            self._last_shown = done.stops or self._last_shown
        if wanted.lag:
            self._stop_news_told = wanted.stop_news
        if done.lag is not None:
            self._pace = replace(self._pace, shown=done.lag, shown_at=wanted.at)

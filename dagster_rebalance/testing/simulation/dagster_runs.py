"""Dagster, as far as the member sees it: runs that queue, start, check, work, end, die or hang; retries and duplicates; what was recorded.

Owns the life of each run and the output. The processes of the runs are real enough to be asked what matters: is it working now,
and on what. It raises a `Violation` as soon as two runs work on, or have succeeded with, the same offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_rebalance.core.runs import LIVE, NOT_BEGUN, WORKING, RunSeen, RunState
from dagster_rebalance.core.start_check import refusal
from dagster_rebalance.testing.simulation.clockwork import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.commands import RecordCommit, StoreDeadLetter
    from dagster_rebalance.core.offers import Offer
    from dagster_rebalance.core.partition import OffsetRange, TopicPartition
    from dagster_rebalance.testing.simulation.clockwork import Clockwork
    from dagster_rebalance.testing.simulation.coordinator import Coordinator
    from dagster_rebalance.testing.simulation.weather import Weather

_BEAT_S = 2.0


@dataclass(slots=True)
class RunProcess:
    """The process of a run, which Dagster knows only from what it reports."""

    is_working: bool = False
    is_gone: bool = False
    silent_since: float | None = None


class SimulatedDagster:
    """One Dagster instance."""

    def __init__(self, clockwork: Clockwork, group: Coordinator, weather: Weather) -> None:
        self.runs: dict[str, RunSeen] = {}
        self.processes: dict[str, RunProcess] = {}
        self.done: dict[TopicPartition, list[tuple[int, int, str]]] = {}
        self.recorded: dict[TopicPartition, list[RecordCommit]] = {}
        self.letters: dict[OffsetRange, StoreDeadLetter] = {}
        self.stopped: dict[TopicPartition, str] = {}
        self.joined: list[str] = []
        self._clockwork = clockwork
        self._group = group
        self._weather = weather
        self._keys: dict[str, str] = {}
        self._by_batch: dict[str, list[str]] = {}

    def request(self, offer: Offer) -> None:
        """A run request of a tick; a key that was seen starts nothing."""
        if offer.run_key not in self._keys:
            self._keys[offer.run_key] = self.create(offer.batch_id, offer.ranges, attempt=offer.attempt)
        if self.runs[self._keys[offer.run_key]].state is RunState.CREATED and not self._clockwork.happens(self._weather.requests_break):
            self._submit(self._keys[offer.run_key])

    def start(self, batch_id: str, ranges: tuple[OffsetRange, ...], *, parent_id: str = "") -> None:
        """A run is created and submitted."""
        self._submit(self.create(batch_id, ranges, parent_id=parent_id))

    def _submit(self, run_id: str) -> None:
        self._move(run_id, RunState.WAITING)
        self._later(self._weather.queueing(), run_id, RunState.STARTING)

    def create(self, batch_id: str, ranges: tuple[OffsetRange, ...], *, attempt: int = 0, parent_id: str = "") -> str:
        """A run is created, and not submitted yet. Returns its id."""
        run_id = f"r{len(self.runs) + 1}"
        self.runs[run_id] = RunSeen(run_id, batch_id, ranges, RunState.CREATED, attempt=attempt, parent_id=parent_id, has_started=False)
        self.processes[run_id] = RunProcess()
        self._by_batch.setdefault(batch_id, []).append(run_id)
        self._clockwork.tell(run_id, f"is created for {batch_id}: {', '.join(map(str, ranges))}{' (a retry)' if parent_id else ''}")
        return run_id

    def seen(self, batch_ids: Iterable[str], *, live_too: bool) -> tuple[RunSeen, ...]:
        """What a look-up finds."""
        found = {run_id for batch_id in batch_ids for run_id in self._by_batch.get(batch_id, ())}
        if live_too:
            found |= {run.run_id for run in self.runs.values() if run.state in LIVE}
        return tuple(self._beating(run_id) for run_id in sorted(found, key=lambda run_id: int(run_id[1:])))

    def cancel(self, run_id: str, *, by_member: bool = True) -> None:
        """Cancel a run: one that waits is over at once, one that works is asked to stop, one that is being launched cannot be."""
        run = self.runs[run_id]
        if run.state not in {*NOT_BEGUN, RunState.STARTED}:
            return
        waits = run.state in NOT_BEGUN
        self._move(run_id, RunState.CANCELED if waits else RunState.CANCELING, is_taken_back=run.is_taken_back or by_member)
        if not waits:
            self._clockwork.after(self._weather.stopping(), run_id, partial(self._stop, run_id))

    def end_dead(self, run_id: str) -> None:
        """End a run without a sign of life. Its Spark work is stopped first, so nothing of it goes on."""
        if self.runs[run_id].state in LIVE:
            if self.processes[run_id].is_working and self.processes[run_id].silent_since is None:
                msg = f"{run_id} was ended as dead although it works and gives signs of life"
                raise Violation(msg)
            self._gone(run_id)
            self._move(run_id, RunState.FAILED)

    def die(self, run_id: str) -> None:
        """The process of a run is killed; Dagster hears nothing."""
        if not self.processes[run_id].is_gone:
            self._clockwork.tell(run_id, "its process is killed")
            self._silence(run_id)
            self._gone(run_id)

    def record(self, commit: RecordCommit) -> None:
        """Record a commit once."""
        known = self.recorded.setdefault(commit.range.topic_partition, [])
        rest = commit.without({(other.range.start, other.range.until, other.run_id) for other in known})
        if rest is not None:
            known.append(rest)

    def working(self) -> list[RunSeen]:
        """The runs at work."""
        return [self.runs[run_id] for run_id, process in self.processes.items() if process.is_working]

    def is_busy(self, partition: TopicPartition) -> bool:
        """Whether any run may still work on a partition."""
        return any(
            run.is_live and not self.processes[run.run_id].is_gone and any(r.topic_partition == partition for r in run.ranges)
            for run in self.runs.values()
        )

    def gives_signs(self, run_id: str) -> bool:
        """Whether a run has a process that lives and shows it, or is about to get one: from the queue, or as a retry."""
        process, run = self.processes[run_id], self.runs[run_id]
        return run.awaits_retry or (process.silent_since is None and not process.is_gone)

    # The life of a run

    def _later(self, seconds: float, run_id: str, state: RunState) -> None:
        self._clockwork.after(seconds, run_id, lambda: self._proceed(run_id, state))

    def _proceed(self, run_id: str, state: RunState) -> None:
        process, run = self.processes[run_id], self.runs[run_id]
        if process.is_gone or run.state not in LIVE:
            return
        if state is RunState.STARTING:
            self._move(run_id, RunState.STARTING)
            if self._clockwork.happens(self._weather.runs_die / 2):
                self.die(run_id)
            if self._clockwork.happens(self._weather.launches_fail):
                self._gone(run_id)
                self._move(run_id, RunState.FAILED)
                return
            self._later(self._weather.launching(), run_id, RunState.STARTED)
        elif run.state is RunState.STARTING:
            self._move(run_id, RunState.STARTED, has_started=True)
            self._clockwork.after(self._weather.reaching_its_check(), run_id, lambda: self._make_check(run_id))

    def _make_check(self, run_id: str) -> None:
        process = self.processes[run_id]
        if process.is_gone:
            return
        me = self.runs[run_id]
        others = self.seen([me.batch_id], live_too=False)
        self._clockwork.let_others(run_id, self._weather.latency())
        why_not = refusal(me, others, self._group.stored)
        if self.processes[run_id].is_gone or self.runs[run_id].state not in LIVE:
            return
        if why_not is not None:
            self._gone(run_id)
            self._move(run_id, RunState.FAILED, is_refused=True, why=why_not)
            return
        self._must_be_alone(me)
        process.is_working = True
        self._clockwork.tell(run_id, "works")
        self._clockwork.after(self._weather.working(), run_id, lambda: self._end(run_id))

    def _must_be_alone(self, me: RunSeen) -> None:
        for other in self.working():
            if any(mine.overlaps(theirs) for mine in me.ranges for theirs in other.ranges):
                msg = f"{me.run_id} works on what {other.run_id} works on: two live runs of {me.batch_id} and {other.batch_id}"
                raise Violation(msg)

    def _end(self, run_id: str) -> None:
        process = self.processes[run_id]
        if process.is_gone:
            return
        if self._clockwork.happens(self._weather.runs_die):
            self.die(run_id)
        elif process.silent_since is None and self._clockwork.happens(self._weather.runs_hang):
            self._clockwork.tell(run_id, "hangs")
            self._silence(run_id)
            self._clockwork.after(self._clockwork.within(1, 60), run_id, lambda: self._end(run_id))
        elif self._clockwork.happens(self._weather.runs_fail):
            self._gone(run_id)
            self._fail(run_id)
        else:
            self._succeed(run_id)

    def _succeed(self, run_id: str) -> None:
        """The output is there; Dagster may hear of it later."""
        self._gone(run_id)
        for range_ in self.runs[run_id].ranges:
            done = self.done.setdefault(range_.topic_partition, [])
            for start, until, other in done:
                if start < range_.until and range_.start < until:
                    msg = f"{range_} was materialised by {other} and by {run_id}"
                    raise Violation(msg)
            done.append((range_.start, range_.until, run_id))
        self._clockwork.after(self._weather.reporting(), None, lambda: self._move(run_id, RunState.SUCCEEDED))

    def _fail(self, run_id: str) -> None:
        run = self.runs[run_id]
        retries = run.state is RunState.STARTED and self._clockwork.happens(self._weather.runs_retry)
        self._move(run_id, RunState.FAILED if run.state is RunState.STARTED else RunState.CANCELED, awaits_retry=retries)
        if retries:
            self._clockwork.after(self._clockwork.within(0.1, 15), None, lambda: self._retry(run_id))

    def _retry(self, run_id: str) -> None:
        run = self.runs[run_id]
        if not self._clockwork.happens(self._weather.retries_lost):
            self.start(run.batch_id, run.ranges, parent_id=run_id)
        self.runs[run_id] = replace(run, awaits_retry=False)

    def _stop(self, run_id: str) -> None:
        if not self.processes[run_id].is_gone and self.runs[run_id].state is RunState.CANCELING:
            self._gone(run_id)
            self._move(run_id, RunState.CANCELED)

    def _gone(self, run_id: str) -> None:
        self.processes[run_id].is_gone = True
        self.processes[run_id].is_working = False

    def _silence(self, run_id: str) -> None:
        if self.processes[run_id].silent_since is None:
            self.processes[run_id].silent_since = self._clockwork.now

    def _beating(self, run_id: str) -> RunSeen:
        run = self.runs[run_id]
        if run.state not in WORKING:
            return run
        silent_since = self.processes[run_id].silent_since
        beat = int((self._clockwork.now if silent_since is None else silent_since) / _BEAT_S)
        return replace(run, heartbeat=str(beat))

    def _move(self, run_id: str, state: RunState, *, why: str = "", **marks: bool) -> None:
        self.runs[run_id] = replace(self.runs[run_id], state=state, **marks)  # type: ignore[arg-type]  # flags of a run, by name
        refused = f" (refused itself: {why})" if why else ""
        self._clockwork.tell(run_id, f"{state.value}{refused}")

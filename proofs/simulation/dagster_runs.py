"""Dagster's view of the runs, and its records; users and Dagster itself change runs.

Its view may be wrong: a run shown as ended may still work, and one shown as working may be dead.
`run_life` has the processes and their output. A second success on an offset is a `Violation`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.commands import recorded_commits
from dagster_rebalance.core.model.run_snapshot import (
    LIVE,
    NOT_BEGUN,
    WORKING,
    RunSnapshot,
    RunState,
)
from dagster_rebalance.orchestration.ports import ShownStops
from proofs.simulation.run_life import RunLife
from proofs.simulation.run_process import RunProcess
from proofs.simulation.seats import Seats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dagster_rebalance.core.model.commands import Claimed, RecordCommit, StoreDeadLetter
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from proofs.simulation.clockwork import Clockwork
    from proofs.simulation.coordinator import Coordinator
    from proofs.simulation.weather import Weather

_ENDED_IN_DOUBT = frozenset({RunState.FAILED, RunState.CANCELED})
_CLOCKS_APART = 1_000
"""Range of the clock offsets between processes, longer than a schedule."""


class SimulatedDagster(RunLife):
    """One Dagster instance."""

    def __init__(self, clockwork: Clockwork, group: Coordinator, weather: Weather) -> None:
        super().__init__(clockwork, group, weather)
        self.recorded: dict[TopicPartition, list[RecordCommit]] = {}
        self.letters: dict[OffsetRange, StoreDeadLetter] = {}
        self.stopped: dict[TopicPartition, str] = {}
        self.shown_stops = ShownStops({}, 0, frozenset())
        self.stopped_said_by = ""
        self.joined: list[str] = []
        self.seats = Seats()
        self._ordered_at: dict[Directive, float] = {}
        self._keys: dict[str, str] = {}
        self._by_batch: dict[str, list[str]] = {}

    # What sensors do

    def request(self, batch_request: BatchRequest) -> None:
        """Handle a run request of a tick; a known run key starts no run."""
        keyed = (
            run_id
            for run_id in self._by_batch.get(batch_request.batch_id, ())
            if self._keys.get(run_id) == batch_request.run_key and run_id not in self.deleted
        )
        run_id = next(keyed, "")
        if not run_id:
            run_id = self.create(
                batch_request.batch_id, batch_request.ranges, attempt=batch_request.attempt
            )
            self._keys[run_id] = batch_request.run_key
        if self.runs[run_id].state is RunState.CREATED and not self._clockwork.happens(
            self._weather.requests_break
        ):
            self._submit(run_id)

    def start(
        self,
        batch_id: str,
        ranges: tuple[OffsetRange, ...],
        *,
        parent_id: str = "",
        assets: tuple[str, ...] = (),
    ) -> None:
        """Create and submit a run, for all assets of the job unless some are named."""
        self._submit(self.create(batch_id, ranges, parent_id=parent_id, assets=assets))

    def retry(self, run: RunSnapshot, assets: tuple[str, ...]) -> None:
        """Re-execute a run as Dagster's own retries do."""
        self._submit(
            self.create(
                run.batch_id, run.ranges, parent_id=run.run_id, is_automatic=True, assets=assets
            )
        )

    def create(
        self,
        batch_id: str,
        ranges: tuple[OffsetRange, ...],
        *,
        attempt: int = 0,
        parent_id: str = "",
        is_automatic: bool = False,
        assets: tuple[str, ...] = (),
    ) -> str:
        """Create a run without submitting it, and return its id.

        A re-executed run has the tags of the first one: its attempt and its key.
        """
        run_id = f"r{len(self.runs) + 1}"
        if parent_id in self.runs:
            attempt = self.runs[parent_id].attempt
            self._keys[run_id] = self._keys.get(parent_id, "")
        left_out = tuple(asset for asset in self._weather.assets if assets and asset not in assets)
        self.runs[run_id] = RunSnapshot(
            run_id,
            batch_id,
            ranges,
            RunState.CREATED,
            attempt=attempt,
            parent_id=parent_id,
            is_automatic=is_automatic,
            has_started=False,
            left_out=left_out,
        )
        self.processes[run_id] = RunProcess(signs_from=_CLOCKS_APART * len(self.runs))
        self._by_batch.setdefault(batch_id, []).append(run_id)
        kind = (
            f" (executes {parent_id} again{', without ' + ', '.join(left_out) if left_out else ''})"
            if parent_id
            else ""
        )
        self._clockwork.tell(
            run_id, f"is created for {batch_id}: {', '.join(map(str, ranges))}{kind}"
        )
        return run_id

    # What members do

    def seen(
        self, batch_ids: Iterable[str], *, with_live: bool, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSnapshot, ...]:
        """Return the runs of a query; a deleted run is known by the note of its work on a claim."""
        found = {run_id for batch_id in batch_ids for run_id in self._by_batch.get(batch_id, ())}
        if with_live:
            found |= {run.run_id for run in self.runs.values() if run.state in LIVE}
        there = tuple(
            self._shown(run_id)
            for run_id in sorted(found - self.deleted, key=lambda run_id: int(run_id[1:]))
        )
        noted = {
            claim: self.notes[claim] for claim in claims if self.notes.get(claim) in self.deleted
        }
        return (
            *there,
            *(self._shown_deleted(run_id, noted) for run_id in dict.fromkeys(noted.values())),
        )

    def cancel(self, run_id: str, *, by_member: bool = True, only_unstarted: bool = False) -> None:
        """Cancel a run.

        A waiting run ends at once, a working run is asked to stop, and a launching run cannot be
        cancelled.
        """
        run = self.runs[run_id]
        if run_id in self.deleted or run.state not in {*NOT_BEGUN, RunState.STARTED}:
            return
        if run.state is RunState.STARTED and only_unstarted:
            return
        waits = run.state in NOT_BEGUN
        if run_id in self.on_cancel:
            self._move(run_id, RunState.CANCELING)
            self.on_cancel[run_id]()
            return
        self._move(
            run_id,
            RunState.CANCELED if waits else RunState.CANCELING,
            is_cancelled_by_member=run.is_cancelled_by_member or by_member,
        )
        if not waits:
            self._clockwork.after(self._weather.stopping(), run_id, partial(self._stop, run_id))

    def take_back(self, run_id: str, *, only_unstarted: bool) -> None:
        """Mark a run before its cancellation, which may never happen."""
        run = self.runs[run_id]
        may_cancel = {*NOT_BEGUN} if only_unstarted else {*NOT_BEGUN, RunState.STARTED}
        if run_id not in self.deleted and run.state in may_cancel:
            self.runs[run_id] = replace(run, is_cancelled_by_member=True)

    def end_dead(self, run_id: str, sign: str) -> bool:
        """Make sure that nothing of a run works: stop its Spark work and kill its process."""
        process, run = self.processes[run_id], self.runs[run_id]
        if self._has_given_another(run_id, sign):
            return False
        self._must_be_dead(run_id)
        process.is_working = False
        if run_id not in self.deleted and run.state in LIVE:
            # A process that is still starting cannot always be killed: its start check detects the
            # cancellation.
            process.is_gone = (
                process.is_gone
                or process.is_frozen
                or process.has_begun
                or self._clockwork.happens(0.5)
            )
            self._move(run_id, RunState.FAILED)
            if process.is_gone:
                self._end_member(run_id)
        return True

    def call_over(self, run_id: str, sign: str) -> bool:
        """Mark a run as over after it was ended."""
        if self._has_given_another(run_id, sign):
            return False
        self._must_be_dead(run_id)
        if run_id in self.deleted:
            self.notes = {claim: noted for claim, noted in self.notes.items() if noted != run_id}
        self.processes[run_id].is_over |= (
            run_id not in self.deleted and self.runs[run_id].state is not RunState.SUCCEEDED
        )
        return True

    def _has_given_another(self, run_id: str, sign: str) -> bool:
        process = self.processes[run_id]
        if run_id in self.deleted:
            # It was there at the last look: its note tells the next one whether it had begun.
            return not sign
        return process.is_seen and process.sign(self._clockwork.now) != sign

    def record(self, commit: RecordCommit) -> None:
        """Record a commit once."""
        known = self.recorded.setdefault(commit.range.topic_partition, [])
        rest = commit.without(
            {said for other in known for said in recorded_commits(other.range.start, other.ends)}
        )
        if rest is not None:
            known.append(rest)

    def forget(self, partition: TopicPartition, at: int) -> None:
        """Forget work and dead letters of the records from an offset on."""
        super().forget(partition, at)
        mine = {range_ for range_ in self.letters if range_.topic_partition == partition}
        self.letters = {
            (replace(range_, until=min(range_.until, at)) if range_ in mine else range_): letter
            for range_, letter in self.letters.items()
            if range_ not in mine or range_.start < at
        }

    # Actions of operators and of Dagster

    def give(self, order: Directive) -> None:
        """Store a directive with the time of the operator's clock."""
        self.orders += (order,)
        self._ordered_at[order] = self._clockwork.now

    def ordered_at(self, order: Directive) -> float:
        return self._ordered_at[order]

    def mark_ended(self, run_id: str, state: RunState) -> None:
        """Show a run as ended, whatever its process does.

        A user force-terminates it, or run monitoring or the code server marks it as failed.
        """
        run = self.runs[run_id]
        if run.state in LIVE and run_id not in self.deleted:
            self._clockwork.tell("dagster", f"takes {run_id} for {state.value}")
            retries = state is RunState.FAILED and bool(run.ranges) and self._will_retry(run_id)
            self._move(run_id, state, awaits_retry=retries)
            self._notice(run_id)

    def delete(self, run_id: str) -> None:
        self._clockwork.tell("a person", f"deletes {run_id}")
        self.deleted.add(run_id)
        self._notice(run_id)

    def _submit(self, run_id: str) -> None:
        self._move(run_id, RunState.WAITING)
        self._clockwork.after(self._weather.queueing(), run_id, partial(self._launch, run_id))

    def _shown_deleted(self, run_id: str, noted: Mapping[Claimed, str]) -> RunSnapshot:
        process, ranges = (
            self.processes[run_id],
            [range_ for (_, range_), other in noted.items() if other == run_id],
        )
        return RunSnapshot(
            run_id,
            self.runs[run_id].batch_id,
            tuple(sorted(ranges)),
            RunState.DELETED,
            heartbeat=process.sign(self._clockwork.now),
            is_gone=process.has_finished or (process.is_gone and self._weather.same_machine),
            is_over=False,
        )

    def _shown(self, run_id: str) -> RunSnapshot:
        """Return a run with the events and heartbeats of its process."""
        run, process = self.runs[run_id], self.processes[run_id]
        is_over = run.state not in _ENDED_IN_DOUBT or not process.has_begun or process.is_over
        is_known_gone = process.is_seen and process.is_gone and self._weather.same_machine
        # The marks of a run are read once it has ended.
        has_ended = run.state not in LIVE
        return replace(
            run,
            active_partitions=self.said.get(run_id),
            heartbeat=process.sign(self._clockwork.now)
            if process.is_seen and (run.state in WORKING or not is_over)
            else "",
            is_refused=run.is_refused or (has_ended and process.has_refused),
            is_gone=(has_ended and process.has_finished) or is_known_gone,
            is_over=is_over,
        )

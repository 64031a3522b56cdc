"""The wait of an owned partition with lag: its explanation, compared with the facts.

If a run works, an operator must act, or there is no free run, the member may wait, and must name
the reason. In any other state it must act itself, within a deadline. The facts come from the
simulated Dagster and Kafka.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.engine.run_requests import runs_in_flight
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.run_snapshot import RunSnapshot
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    FailureStreak,
    InFlight,
    Succeeded,
    ToRequest,
    blocking,
    progress_of,
)
from dagster_rebalance.core.runs.run_index import RunIndex
from proofs.simulation.weather import STUCK_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.partitions.ledger import LedgerEntry
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from proofs.simulation.coordinator import Coordinator
    from proofs.simulation.dagster_runs import SimulatedDagster
    from proofs.simulation.weather import Weather

FOR_OTHERS = float("inf")
_TRIES = 15
"""How often the requests of a duty may be lost and repeated after `retry_s`."""
_SLOW_REQUESTS, _STUCK_REQUESTS = 25, 4
"""How many requests to a slow storage a duty may wait for."""
_LATE_REQUESTS_S = 40.0
"""Maximum delay of a run request after its tick; several ticks in a row may be late."""
_BROKEN_REQUESTS_S = 30.0
"""Time in which several ticks in a row may be lost, or fail between creation and submission of a
run."""

ORDERS_KNOWN_WITHIN_S = 60.0
"""Time until every member has read a directive; each read may fail."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a partition waits for.

    Attributes:
        said: Required words of the member's explanation.
        limit_s: Its deadline; infinite where others have to act.
        is_half_done: Tells apart two successive waits that look the same to the member.
    """

    said: str
    limit_s: float
    is_half_done: bool = False


class Progress:
    """The facts for all members of one world."""

    def __init__(self, group: Coordinator, dagster: SimulatedDagster, weather: Weather) -> None:
        self._group = group
        self._dagster = dagster
        self._weather = weather
        self.commit_slack_s = _TRIES * weather.settings.retry_s
        self._slack_s = self.commit_slack_s
        if weather.has_slow_storage:
            self._slack_s += _SLOW_REQUESTS * weather.slow_storage_s + _STUCK_REQUESTS * STUCK_S

    def waits_of(self, engine: Engine, owned: OwnedPartition, now: float) -> tuple[Wait, ...]:
        """Return the reason of a partition's wait, at a time of its member's clock."""
        if self._group.ends[owned.partition] <= (owned.ledger.next_offset if owned.ledger else 0):
            return ()
        match owned.phase:
            case Phase.RESTORING:
                return (self._of_restoring(owned),)
            case Phase.OWNED | Phase.STOPPED if owned.directive is not None:
                return tuple(self._of_paused(owned, owned.directive))
            case Phase.STOPPED:
                return (
                    Wait(
                        "stopped: ",
                        FOR_OTHERS
                        if self._is_stopped_rightly(owned)
                        else engine.settings.recheck_s + self._slack_s,
                    ),
                )
            case Phase.OWNED:
                return tuple(self._of_work(engine, owned, now)) or (
                    self._of_backlog(engine, owned, now),
                )
            case _:
                is_held = engine.leaving is not None or any(
                    owned.partition in hold.epochs for hold in engine.holds
                )
                return (Wait("waits for ", FOR_OTHERS if is_held else 0.0),)

    def _of_restoring(self, owned: OwnedPartition) -> Wait:
        if owned.ledger is None:
            return Wait("reads its committed offset", self._slack_s)
        if owned.blocked_by:
            return Wait("working on it without a claim", self._limit_of_runs(owned.blocked_by))
        return Wait("reads the runs of its claims", self._slack_s)

    def _of_paused(self, owned: OwnedPartition, order: Directive) -> Iterable[Wait]:
        """A paused partition may wait without a deadline; completed work is committed."""
        is_right = in_force(self._dagster.orders, owned.partition) == order
        yield Wait("; resume with `", FOR_OTHERS if is_right else ORDERS_KNOWN_WITHIN_S)
        if owned.ledger is not None and owned.ledger.committable is not None:
            is_refused = owned.partition in self._group.forbidden
            yield Wait("", FOR_OTHERS if is_refused else self._slack_s)

    def _of_work(self, engine: Engine, owned: OwnedPartition, now: float) -> Iterable[Wait]:
        for entry in owned.entries:
            if not entry.is_waiting:
                yield from self._of_entry(engine, owned, entry, now)
        if owned.pending is not None:
            yield Wait("for Kafka's confirmation", self._slack_s + self._group.refuses_for_s)
        if owned.lacks_record(now):
            # The records of all partitions may wait for the budget, and a slow storage stores one
            # after the other.
            each_s = 60 / engine.settings.records_per_minute + 2 * self._weather.slow_storage_s
            records_s = len(engine.partitions) * each_s
            yield Wait("is not recorded by Dagster", self._slack_s + records_s)

    def _of_entry(
        self, engine: Engine, owned: OwnedPartition, entry: LedgerEntry, now: float
    ) -> Iterable[Wait]:
        span = f"[{entry.range.start}, {entry.range.until})"
        is_first = entry == owned.entries[0]
        match entry.progress:
            case ToRequest(streak=FailureStreak()) if entry.due_at > now:
                following = "; next try (" if engine.settings.worker else "; next run ("
                yield Wait(following, self._weather.settings.backoff.limit_s + self._slack_s)
            case ToRequest() if engine.settings.worker and _follows(owned, entry):
                yield Wait(f"{span}: waits for", FOR_OTHERS)
            case ToRequest(failures=failures) if (failures or entry.is_part) and not _is_offered(
                engine, entry
            ):
                own = "next, after the current batch"
                yield Wait(own if engine.settings.worker else "waits for a free run", FOR_OTHERS)
            case ToRequest() if engine.settings.worker:
                is_busy = any(
                    engine.settings.worker in o.live_runs for o in engine.partitions.values()
                )
                yield Wait(f"{span}: next, after", FOR_OTHERS if is_busy else self._slack_s)
            case ToRequest():
                late_s = _LATE_REQUESTS_S if self._weather.late_requests else 0.0
                is_there = any(
                    run.is_live and entry.range in run.ranges
                    for run in self._dagster.seen([entry.batch_id], with_live=False)
                )
                yield Wait(f"{span}: waits for", self._slack_s + late_s, is_half_done=is_there)
            case InFlight(unsubmitted=RunSnapshot()):
                late_s = _LATE_REQUESTS_S if self._weather.late_requests else 0.0
                late_s += _BROKEN_REQUESTS_S if self._weather.requests_break else 0.0
                yield Wait(f"for {span} is created but not submitted", self._slack_s + late_s)
            case InFlight():
                yield Wait(
                    _said_of(entry.progress, span), self._limit_of_runs(entry.progress.run_ids)
                )
            case Exhausted():
                is_tried_again = owned.dead_letter is not None and bool(owned.dead_letter.problem)
                yield Wait(
                    f"failed on {span}",
                    FOR_OTHERS if is_tried_again or not is_first else self._slack_s,
                )
            case Succeeded() | DeadLettered():
                limit_s = self._slack_s + self._group.refuses_for_s
                yield Wait(span, limit_s if is_first else FOR_OTHERS)

    def _of_backlog(self, engine: Engine, owned: OwnedPartition, now: float) -> Wait:
        if owned.bounds is None or owned.bounds.until < self._group.ends[owned.partition]:
            # Until the member has read the new end offset, it may count as idle.
            return Wait("", self._slack_s)
        has_room = (
            len(
                runs_in_flight(
                    engine.partitions.values(),
                    now,
                    worker=engine.settings.worker,
                )
            )
            < engine.settings.limits.max_runs_in_flight
        )
        what = "for the end of the current batch" if engine.settings.worker else "for a free run"
        return Wait(what, self._slack_s if has_room else FOR_OTHERS)

    def _limit_of_runs(self, run_ids: Iterable[str]) -> float:
        """Return the deadline while one of the runs lives.

        The member must end a run without heartbeats.
        """
        if any(self._dagster.gives_signs(run_id) for run_id in run_ids):
            return FOR_OTHERS
        liveness = self._weather.settings.liveness
        in_doubt = any(self._dagster.is_in_doubt(run_id) for run_id in run_ids)
        silent_s = max(liveness.heartbeat_timeout_s, liveness.start_timeout_s) if in_doubt else 0.0
        return self._slack_s + silent_s + self._weather.launchers_last_s

    def _is_stopped_rightly(self, owned: OwnedPartition) -> bool:
        if owned.partition in self._group.forbidden:
            return True
        if owned.ledger is None:
            stored = self._group.stored.get(owned.partition)
            return (
                stored is None
                or is_foreign(stored)
                or self._is_out_of_range(owned.partition)
                or self._group.is_lost(owned.partition)
            )
        most = self._weather.settings.max_attempts
        for entry in owned.entries:
            claim = (entry.batch_id, entry.range)
            seen = self._dagster.seen([entry.batch_id], with_live=False, claims=[claim])
            runs = RunIndex(seen)
            if (
                blocking(
                    progress_of(
                        entry.range,
                        entry.batch_id,
                        runs,
                        max_attempts=most,
                        is_early=entry.is_early and not entry.previous_batch_id,
                        is_part=entry.is_part,
                    )
                )
                is not None
            ):
                return True
        return False

    def _is_out_of_range(self, partition: TopicPartition) -> bool:
        stored = self._group.stored.get(partition)
        return (
            stored is not None
            and not self._group.starts[partition] <= stored.offset <= self._group.ends[partition]
        )


def _said_of(progress: InFlight, span: str) -> str:
    """Return the required words about the runs of one range."""
    run_ids, waiting = set(progress.run_ids), set(progress.waiting)
    if run_ids <= waiting:
        return f"for {span} waits in Dagster's queue"
    if run_ids <= {*waiting, *progress.launching}:
        return f"for {span}: being launched"
    if run_ids <= set(progress.deleted):
        return f"for {span} was deleted from Dagster"
    return (
        f"for {span} has ended in Dagster"
        if run_ids <= set(progress.unconfirmed)
        else f"works on {span}"
    )


def _follows(owned: OwnedPartition, entry: LedgerEntry) -> bool:
    """Return whether a range before this one is not done."""
    before = owned.entries[: owned.entries.index(entry)]
    return any(one.completed_by is None for one in before)


def _is_offered(engine: Engine, entry: LedgerEntry) -> bool:
    return any(
        batch_request.batch_id == entry.batch_id and entry.range in batch_request.ranges
        for batch_request in engine.batch_requests
    )


def is_foreign(stored: OffsetAndMetadata | None) -> bool:
    """Return whether another application has committed an offset."""
    if stored is None:
        return False
    try:
        decode(stored)
    except ClaimError:
        return True
    return False

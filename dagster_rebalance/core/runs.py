"""What the runs of a batch mean for one of its ranges: work is going on, succeeded, has to be asked for again, or failed too often.

Owns the rules for reading Dagster's runs. A run counts for a range when it carries the batch id and lists exactly that range: bounds never
change once they are claimed. A run that refused itself, or that a member took back before it worked, says nothing about the batch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.partition import OffsetRange


class RunState(enum.Enum):
    """Where a run is in its life, in the words that matter here."""

    WAITING = "waiting"
    """Created, perhaps queued: it has not started and can be cancelled at no cost."""
    STARTING = "starting"
    """Being launched. It cannot be cancelled yet, and has not looked at its claim."""
    STARTED = "started"
    """Works, or is about to look at its claim."""
    CANCELING = "canceling"
    """Asked to stop, may still work."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"


LIVE = frozenset({RunState.WAITING, RunState.STARTING, RunState.STARTED, RunState.CANCELING})
WORKING = frozenset({RunState.STARTED, RunState.CANCELING})


@dataclass(frozen=True, slots=True)
class RunSeen:
    """One run as Dagster shows it.

    Attributes:
        run_id: Dagster's id of the run.
        batch_id: The batch that it was requested for.
        ranges: The ranges that it was given.
        state: Where it is in its life.
        attempt: Which attempt it was requested as; 0 where Dagster does not say.
        parent_id: The run that Dagster or a person executed again with it; empty for a first run. Only first runs count as attempts.
        has_started: Whether it ever reached its process. One that did not has touched nothing.
        awaits_retry: It failed, and Dagster is about to start it again.
        is_refused: It refused itself, so it does not work although it may not have ended yet; not an attempt.
        is_taken_back: A member cancelled it, for a hold or a loss; not an attempt, but it may still work until it ended.
        heartbeat: The last sign of life of its process; changes while it lives. Empty before the process has begun its work.
        is_gone: Its process has said that it is finished, or is known not to exist any more; its Spark work may go on.
        is_over: Whether nothing of it works any more, once it has ended in Dagster's eyes. Dagster's word alone does not show it.
    """

    run_id: str
    batch_id: str
    ranges: tuple[OffsetRange, ...]
    state: RunState
    attempt: int = 0
    parent_id: str = ""
    has_started: bool = True
    awaits_retry: bool = False
    is_refused: bool = False
    is_taken_back: bool = False
    heartbeat: str = ""
    is_gone: bool = False
    is_over: bool = True

    @property
    def is_retry(self) -> bool:
        """Whether it executes another run again."""
        return bool(self.parent_id)

    @property
    def is_live(self) -> bool:
        """Whether it may still produce output, itself or through its retry."""
        return self.state in LIVE or self.awaits_retry or not self.is_over

    @property
    def has_begun(self) -> bool:
        """Whether its process has given a sign of life, which it does before it looks whether it may work."""
        return self.heartbeat != ""

    @property
    def may_work(self) -> bool:
        """Whether its process may be at work now."""
        return not self.is_refused and (self.state in WORKING or not self.is_over)


@dataclass(frozen=True, slots=True)
class ToRequest:
    """No run works on the range: ask for one."""

    attempt: int = 1


@dataclass(frozen=True, slots=True)
class InFlight:
    """Runs that may still work on the range.

    Attributes:
        run_ids: All of them.
        waiting: Those that have not started.
        unconfirmed: Those that ended in Dagster's eyes, and of which nobody has said that they are over.
    """

    run_ids: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A run succeeded on the range."""

    run_id: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """As many runs as the limit allows have failed on the range.

    Attributes:
        run_ids: The runs that count as attempts, oldest first.
        is_cancelled: Whether one of them was cancelled by a person, which says nothing about the records.
    """

    run_ids: tuple[str, ...]
    is_cancelled: bool = False

    @property
    def attempts(self) -> int:
        """How many runs failed."""
        return len(self.run_ids)

    @property
    def run_id(self) -> str:
        """The last of them."""
        return self.run_ids[-1]


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The dead-letter topic has the range, and no run works on it: it counts as done. `run_id` is the last run that failed."""

    run_id: str


Progress = ToRequest | InFlight | Succeeded | GaveUp | DeadLettered


def progress_of(range_: OffsetRange, batch_id: str, runs: Iterable[RunSeen], *, max_attempts: int) -> Progress:
    """Say how far the work on a claimed range is, from all runs of its batch.

    Dagster executes a run again with all of its ranges. If one of them is gone meanwhile, that run has to refuse itself, but somebody wants
    the others to be tried again: so they are requested, once for each such run.
    """
    mine = [run for run in runs if run.batch_id == batch_id and range_ in run.ranges]
    succeeded = [run for run in mine if run.state is RunState.SUCCEEDED]
    if succeeded:
        return Succeeded(succeeded[0].run_id)
    live = [run for run in mine if run.is_live]
    if live:
        return InFlight(
            tuple(run.run_id for run in live),
            waiting=tuple(run.run_id for run in live if run.state is RunState.WAITING),
            unconfirmed=tuple(run.run_id for run in live if not run.is_over),
        )
    first_runs = [run for run in mine if not run.is_retry]
    failed = [run for run in first_runs if not run.is_refused and not run.is_taken_back]
    if len(failed) >= max_attempts and not (mine[-1].is_retry and mine[-1].is_refused):
        return GaveUp(tuple(run.run_id for run in failed), any(run.state is RunState.CANCELED for run in failed))
    return ToRequest(attempt=len(first_runs) + 1)


def refused_last(range_: OffsetRange, batch_id: str, runs: Iterable[RunSeen]) -> str:
    """The newest run on a claimed range if it refused itself, which may mean that the claim is gone; empty otherwise."""
    mine = [run for run in runs if run.batch_id == batch_id and range_ in run.ranges]
    return mine[-1].run_id if mine and mine[-1].is_refused else ""


def unclaimed_workers(
    ranges: Iterable[OffsetRange], claimed: Iterable[tuple[OffsetRange, str]], runs: Iterable[RunSeen]
) -> tuple[str, ...]:
    """The runs that work on any of `ranges` without being the work of a claim: nothing may start there until they ended.

    Happens when an operator moved the committed offset, which erases the claims, while runs were working. Runs that have not started do not
    count: they refuse themselves when they find no claim.
    """
    known = set(claimed)
    wanted = tuple(ranges)
    return tuple(
        run.run_id
        for run in runs
        if run.may_work and any(mine.overlaps(other) and (mine, run.batch_id) not in known for mine in run.ranges for other in wanted)
    )

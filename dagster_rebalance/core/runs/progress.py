"""Progress of a claimed range, derived from the runs of its batch.

A run counts for a range if it has the batch id and lists exactly that range: the bounds of a claim
never change. Runs that their start check refused, that a member cancelled, or that were interrupted
are not attempts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run_snapshot import (
    NOT_BEGUN,
    WORKING,
    FailureCause,
    RunSnapshot,
    RunState,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.runs.run_index import RunIndex


MOST_IN_A_ROW = 5
"""The partition is stopped after this many consecutive runs that did not start, that the start
check refused, or that were interrupted."""


class FailureKind(enum.Enum):
    """How an unsuccessful run ended."""

    FAILED = "failed"
    """The run failed or was cancelled by a user: an attempt."""
    NOT_STARTED = "did not start"
    """The run never reached its process: not an attempt."""
    REFUSED = "was refused by its start check"
    """The start check refused the run or failed: not an attempt."""
    INTERRUPTED = "was interrupted by a signal"
    """A signal ended the run, as on a drained node: not an attempt."""


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """The latest unsuccessful runs on a range.

    Attributes:
        kind: How the newest run ended.
        count: Number of failed attempts, or of consecutive runs that were not attempts.
        run_id: The newest run.
        reason: Why the start check refused the newest run, or its error.
    """

    kind: FailureKind
    count: int
    run_id: str
    reason: str = ""

    @property
    def is_stop(self) -> bool:
        """Whether too many consecutive runs were not attempts."""
        return self.kind is not FailureKind.FAILED and self.count >= MOST_IN_A_ROW


@dataclass(frozen=True, slots=True)
class ToRequest:
    """No run works on the range, so a run must be requested.

    Attributes:
        attempt: Number of the next run, above the numbers of all earlier runs.
        failures: Number of failed attempts.
        streak: The latest unsuccessful runs, if any.
        left_out: Assets that an otherwise successful run left out.
    """

    attempt: int = 1
    failures: int = 0
    streak: FailureStreak | None = None
    left_out: tuple[str, ...] = ()

    @property
    def interruptions(self) -> int:
        """Number of consecutive interrupted runs, including the newest."""
        streak = self.streak
        return streak.count if streak and streak.kind is FailureKind.INTERRUPTED else 0

    @property
    def is_retry(self) -> bool:
        """Whether a run on the range failed or was interrupted."""
        return self.failures + self.interruptions > 0

    @property
    def next_attempt(self) -> ToRequest:
        """This progress with the attempt number derived from failed attempts only."""
        return replace(self, attempt=self.failures + 1)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Runs that may still work on the range.

    Attributes:
        run_ids: All of the runs, oldest first.
        waiting: Runs that are created or queued.
        launching: Runs that are launched, but have not started.
        started: Runs that have started and are not being cancelled.
        unconfirmed: Runs that ended in Dagster, but are not known to be over.
        deleted: Runs that were deleted from Dagster.
        unsubmitted: The run to request again, if Dagster has created the runs but submitted none.
        is_retry: Whether an earlier run on the range failed or was interrupted.
        stop_cause: Why the range is stopped while it is retried.
        working_s: Working time of the longest running run; None if unknown.
    """

    run_ids: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    launching: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    unsubmitted: RunSnapshot | None = None
    is_retry: bool = False
    stop_cause: Exhausted | FailureStreak | None = None
    working_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A run succeeded on the range."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The maximum number of runs failed on the range.

    Attributes:
        run_ids: The runs that count as attempts, oldest first.
        is_cancelled: Whether a user cancelled one of these runs.
        attempt: Number of the next run, if one is requested.
        left_out: Assets that an otherwise successful run left out.
        re_executed: Later failed re-executions, oldest first.
        reason: The error of the last run; empty if unknown.
        cause: The cause of the failure of the last run.
    """

    run_ids: tuple[str, ...]
    is_cancelled: bool = False
    attempt: int = 0
    left_out: tuple[str, ...] = ()
    re_executed: tuple[str, ...] = ()
    reason: str = field(default="", compare=False)
    cause: FailureCause = FailureCause.UNKNOWN

    @property
    def attempts(self) -> int:
        """Number of attempts."""
        return len(self.run_ids)

    @property
    def next_attempt(self) -> Exhausted:
        """This progress with the attempt number derived from failed attempts only."""
        return replace(self, attempt=self.attempts + 1)

    @property
    def failed_runs(self) -> int:
        """Number of failed runs, including re-executions."""
        return len(self.run_ids) + len(self.re_executed)

    @property
    def run_id(self) -> str:
        """The last failed run."""
        return (*self.run_ids, *self.re_executed)[-1]


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The range is in the dead-letter topic, and counts as done.

    `run_id` is the last run that failed.
    """

    run_id: str


Progress = ToRequest | InFlight | Succeeded | Exhausted | DeadLettered


def progress_of(
    range_: OffsetRange,
    batch_id: str,
    runs: RunIndex,
    *,
    max_attempts: int,
    is_early: bool = False,
    is_part: bool = False,
) -> Progress:
    """Derive the progress of a claimed range from all runs of its batch.

    A part of a bisected range has one attempt that fails because of its records.

    A streaming run that died is no attempt on an early claim, because it may not have begun.
    A re-execution has all ranges of its run. If some of them are no longer claimed, its start check
    refuses it. The other ranges are then requested once for each such re-execution.
    """
    batch_runs = runs.of(batch_id, range_)
    if is_early:
        batch_runs = tuple(run for run in batch_runs if not run.has_died)
    left_out: tuple[str, ...] = ()
    for run in reversed(batch_runs):
        if run.has_succeeded:
            missing = missing_assets(run, batch_runs)
            if not missing:
                return Succeeded(run.run_id)
            left_out = left_out or missing
    otherwise = _without_live(
        [run for run in batch_runs if not run.is_live],
        left_out,
        max_attempts,
        is_part=is_part,
    )
    live = [run for run in batch_runs if run.is_live and not _is_left_behind(run, batch_runs)]
    return _in_flight(live, otherwise) if live else otherwise


def _is_left_behind(run: RunSnapshot, runs: Iterable[RunSnapshot]) -> bool:
    """Whether another sensor created the run without submitting it, and Dagster will not start it.

    This sensor's run with the same key has ended. Dagster tracks run keys for each sensor and
    starts nothing for a key that a sensor has used. If the run does start, its start check refuses.
    """
    return (
        run.state is RunState.CREATED
        and run.is_requested
        and any(
            other.attempt == run.attempt and not other.is_retry and not other.is_live
            for other in runs
        )
    )


def _without_live(
    ended: list[RunSnapshot], left_out: tuple[str, ...], max_attempts: int, *, is_part: bool
) -> ToRequest | Exhausted:
    """Progress from runs that have ended.

    Runs may be deleted, so the number of the next run is not their count. A re-execution has the
    number and run key of its first run. While either exists, Dagster starts no run for that key.
    """
    first_runs = [run for run in ended if not run.is_retry]
    attempt = max([len(first_runs), *(run.attempt for run in ended)]) + 1
    failed = [run for run in first_runs if failure_kind(run) is FailureKind.FAILED]
    if ended and ended[-1].is_retry and ended[-1].is_refused and not ended[-1].is_automatic:
        return ToRequest(attempt, len(failed), left_out=left_out)
    is_settled = is_part and bool(failed) and failed[-1].cause is FailureCause.RECORDS
    if len(failed) >= max_attempts or is_settled:
        cancelled = any(run.state is RunState.CANCELED for run in failed)
        run_ids = tuple(run.run_id for run in failed)
        again = [
            run
            for run in ended[ended.index(failed[-1]) :]
            if run.is_retry and failure_kind(run) is FailureKind.FAILED
        ]
        last = (*failed, *again)[-1]
        re_executed = tuple(run.run_id for run in again)
        return Exhausted(run_ids, cancelled, attempt, left_out, re_executed, last.error, last.cause)
    return ToRequest(attempt, len(failed), _streak(first_runs, len(failed)), left_out)


def failure_kind(run: RunSnapshot) -> FailureKind | None:
    """Return how an unsuccessful run ended, or None if the run does not count for its range."""
    if run.is_cancelled_by_member or run.has_succeeded:
        return None
    if run.is_refused:
        return FailureKind.REFUSED
    if run.is_interrupted:
        return FailureKind.INTERRUPTED
    # A cancelled run in the queue is not a failure of the launcher.
    return (
        FailureKind.FAILED
        if run.has_started or run.state is RunState.CANCELED
        else FailureKind.NOT_STARTED
    )


def _streak(first_runs: list[RunSnapshot], failures: int) -> FailureStreak | None:
    unsuccessful = [
        (kind, run) for run in reversed(first_runs) if (kind := failure_kind(run)) is not None
    ]
    if not unsuccessful:
        return None
    kind, newest = unsuccessful[0]
    in_a_row = next(
        (number for number, (other, _) in enumerate(unsuccessful) if other is FailureKind.FAILED),
        len(unsuccessful),
    )
    return FailureStreak(
        kind,
        failures if kind is FailureKind.FAILED else in_a_row,
        newest.run_id,
        newest.refusal or newest.error,
    )


def blocking(progress: Progress) -> Exhausted | FailureStreak | None:
    """Return the failures that stop the partition of a range, or None."""
    match progress:
        case Exhausted():
            return progress
        case ToRequest(streak=FailureStreak(is_stop=True) as streak):
            return streak
        case InFlight():
            return progress.stop_cause
        case _:
            return None


def _in_flight(live: list[RunSnapshot], otherwise: ToRequest | Exhausted) -> InFlight:
    unsubmitted = all(run.state is RunState.CREATED and run.is_requested for run in live)
    stop_cause = blocking(otherwise)
    if (
        isinstance(stop_cause, FailureStreak)
        and stop_cause.kind is FailureKind.NOT_STARTED
        and any(run.state in WORKING for run in live)
    ):
        stop_cause = None
    return InFlight(
        tuple(run.run_id for run in live),
        waiting=tuple(run.run_id for run in live if run.state in NOT_BEGUN),
        launching=tuple(run.run_id for run in live if run.state is RunState.STARTING),
        started=tuple(run.run_id for run in live if run.state is RunState.STARTED),
        unconfirmed=tuple(run.run_id for run in live if not run.is_over),
        deleted=tuple(run.run_id for run in live if run.state is RunState.DELETED),
        unsubmitted=live[-1] if unsubmitted else None,
        is_retry=isinstance(otherwise, Exhausted) or otherwise.is_retry,
        stop_cause=stop_cause,
        working_s=max((run.working_s for run in live if run.working_s), default=None),
    )


def missing_assets(succeeded: RunSnapshot, runs: Sequence[RunSnapshot]) -> tuple[str, ...]:
    """Return the assets that a range still lacks after a run on it succeeded.

    The newest run of an asset decides. A success of the whole job is final, because the start check
    refuses any later run.
    """
    if not succeeded.left_out:
        return ()
    missing = []
    for asset in (*succeeded.left_out, *sorted(succeeded.done)):
        tried = next(
            (run for run in reversed(runs) if asset in run.done or asset in run.undone), None
        )
        if tried is None or asset not in tried.done:
            missing.append(asset)
    return tuple(missing)


def newest_refusal(runs: Sequence[RunSnapshot]) -> frozenset[str]:
    """Return the newest run on a claimed range if its start check refused it, or nothing."""
    return frozenset({runs[-1].run_id} if runs and runs[-1].is_refused else ())

"""Read from the runs of a batch how far each of its ranges is.

Work on a range is going on, has succeeded, has to be requested again, or has failed too often. This
module owns the rules for reading Dagster's runs. A run counts for a range when it carries the batch
id and lists exactly that range: bounds never change once they are claimed. A run that refused
itself, that a member took back, or whose process was told to end says nothing about the batch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run import NOT_BEGUN, WORKING, RunSeen, RunState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition


MOST_IN_A_ROW = 5
"""People are told after this many runs in a row that did not start, refused themselves, or were
told to end: each may be an accident, and so many are none."""


def others_on(
    partition: TopicPartition, known: Collection[str], runs: Iterable[RunSeen]
) -> tuple[str, ...]:
    """Return the streaming runs that may work on a partition, by their own word.

    Those in `known` are left out: the claims of the partition name them, or it is the own one.
    """
    return tuple(
        run.run_id
        for run in runs
        if run.may_work
        and run.may_work_on is not None
        and partition in run.may_work_on
        and run.run_id not in known
    )


class Setback(enum.Enum):
    """How a run ended that did not succeed."""

    FAILED = "failed"
    """It worked, and failed or was cancelled by a person: an attempt."""
    NOT_STARTED = "did not start"
    """It never reached its process, so it says nothing about the records: no attempt."""
    REFUSED = "refused itself"
    """It looked at its claim, or could not, and did not work: no attempt."""
    INTERRUPTED = "was told to end by a signal"
    """A drained node or a restarted machine says nothing about the records: no attempt."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the newest runs on a range ended with.

    Attributes:
        kind: How the newest of them ended.
        count: The attempts that failed, or the runs in a row that did not start, refused
            themselves, or were told to end, each for itself or by turns.
        run_id: The newest of them.
        why: Why it refused itself, or what it failed with.
    """

    kind: Setback
    count: int
    run_id: str
    why: str = ""

    @property
    def is_stop(self) -> bool:
        """Whether too many runs in a row did not come to work, or to an end of their own."""
        return self.kind is not Setback.FAILED and self.count >= MOST_IN_A_ROW


@dataclass(frozen=True, slots=True)
class ToRequest:
    """No run works on the range: ask for one.

    Attributes:
        attempt: The number of the run that is to be asked for, above that of each run before it.
        failures: The attempts that failed.
        trouble: What the newest runs ended with, if they said anything.
        left_out: The assets that a run has left out which succeeded otherwise.
    """

    attempt: int = 1
    failures: int = 0
    trouble: Trouble | None = None
    left_out: tuple[str, ...] = ()

    @property
    def interruptions(self) -> int:
        """The runs in a row that were interrupted, the newest included."""
        trouble = self.trouble
        return trouble.count if trouble and trouble.kind is Setback.INTERRUPTED else 0

    @property
    def next_attempt(self) -> ToRequest:
        """The same for a batch that only counts attempts, and no other runs."""
        return replace(self, attempt=self.failures + 1)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Runs that may still work on the range.

    Attributes:
        run_ids: Their ids, oldest first.
        waiting: Those in no process and at no launcher yet.
        launching: Those that are being launched, and have not started.
        started: Those that have started, and that nobody has asked to end.
        unconfirmed: Those that ended in Dagster's eyes, and of which nobody has said that they are
            over.
        deleted: Those of them that are not in Dagster any more.
        unsubmitted: The run to be requested again, because Dagster has created all of them and
            submitted none.
        despite: What the range is stopped for, while a person or the next attempt tries it again.
        works_for_s: For how long the run that has worked longest has worked; None where that is not
            known.
    """

    run_ids: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    launching: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    unsubmitted: RunSeen | None = None
    despite: Exhausted | Trouble | None = None
    works_for_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A run succeeded on the range."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Exhausted:
    """As many runs as the limit allows have failed on the range.

    Attributes:
        run_ids: The runs that count as attempts, oldest first.
        is_cancelled: Whether one of them was cancelled by a person, which says nothing about the
            records.
        attempt: The number of the next run, should one be asked for all the same.
        left_out: The assets that a run has left out which succeeded otherwise.
        re_executed: What was executed again since, and failed as well, oldest first.
        why: What the last of them failed with; empty where that is not known.
    """

    run_ids: tuple[str, ...]
    is_cancelled: bool = False
    attempt: int = 0
    left_out: tuple[str, ...] = ()
    re_executed: tuple[str, ...] = ()
    why: str = field(default="", compare=False)

    @property
    def attempts(self) -> int:
        """How many runs count as attempts."""
        return len(self.run_ids)

    @property
    def next_attempt(self) -> Exhausted:
        """The same for a batch that only counts attempts, and no other runs."""
        return replace(self, attempt=self.attempts + 1)

    @property
    def failed_runs(self) -> int:
        """How many runs failed, executed again or not."""
        return len(self.run_ids) + len(self.re_executed)

    @property
    def run_id(self) -> str:
        """The last of them."""
        return (*self.run_ids, *self.re_executed)[-1]


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The dead-letter topic has the range, and no run works on it: it counts as done.

    `run_id` is the last run that failed.
    """

    run_id: str


Progress = ToRequest | InFlight | Succeeded | Exhausted | DeadLettered


def progress_of(
    range_: OffsetRange, batch_id: str, runs: Iterable[RunSeen], *, max_attempts: int
) -> Progress:
    """Say how far the work on a claimed range is, from all runs of its batch.

    A run is executed again with all of its ranges. If one of them is gone meanwhile, that run has
    to refuse itself, but a person wants the others to be tried again: so they are requested, once
    for each such run.
    """
    mine = [run for run in runs if run.batch_id == batch_id and range_ in run.ranges]
    left_out: tuple[str, ...] = ()
    for run in reversed(mine):
        if run.has_succeeded:
            missing = lacking(run, mine)
            if not missing:
                return Succeeded(run.run_id)
            left_out = left_out or missing
    otherwise = _without_live([run for run in mine if not run.is_live], left_out, max_attempts)
    live = [run for run in mine if run.is_live and not _is_left_behind(run, mine)]
    return _in_flight(live, otherwise) if live else otherwise


def _is_left_behind(run: RunSeen, runs: Iterable[RunSeen]) -> bool:
    """Tell whether another sensor created the run and did not submit it.

    This sensor's run with the same key has ended since. Dagster keeps the keys of each sensor
    apart, and starts nothing for a key that a sensor has used. If the run comes to its process all
    the same, it looks whether it may work.
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
    ended: list[RunSeen], left_out: tuple[str, ...], max_attempts: int
) -> ToRequest | Exhausted:
    """What the runs that have ended say.

    People delete runs, so the next number is not the count of those that are left. A run that is
    executed again has the number of the first one, and its key: Dagster starts nothing for that
    key as long as either is there.
    """
    first_runs = [run for run in ended if not run.is_retry]
    attempt = max([len(first_runs), *(run.attempt for run in ended)]) + 1
    failed = [run for run in first_runs if setback_of(run) is Setback.FAILED]
    if ended and ended[-1].is_retry and ended[-1].is_refused and not ended[-1].is_automatic:
        return ToRequest(attempt, len(failed), left_out=left_out)
    if len(failed) >= max_attempts:
        cancelled = any(run.state is RunState.CANCELED for run in failed)
        run_ids = tuple(run.run_id for run in failed)
        again = [
            run
            for run in ended[ended.index(failed[-1]) :]
            if run.is_retry and setback_of(run) is Setback.FAILED
        ]
        why = (*failed, *again)[-1].error
        re_executed = tuple(run.run_id for run in again)
        return Exhausted(run_ids, cancelled, attempt, left_out, re_executed, why)
    return ToRequest(attempt, len(failed), _trouble(first_runs, len(failed)), left_out)


def setback_of(run: RunSeen) -> Setback | None:
    """How a run set its range back; None when it says nothing about it."""
    if run.is_taken_back or run.has_succeeded:
        return None
    if run.is_refused:
        return Setback.REFUSED
    if run.is_interrupted:
        return Setback.INTERRUPTED
    # A person who cancels a run in the queue does not want it: that is no trouble of the launcher.
    return (
        Setback.FAILED if run.has_started or run.state is RunState.CANCELED else Setback.NOT_STARTED
    )


def _trouble(first_runs: list[RunSeen], failures: int) -> Trouble | None:
    told = [(kind, run) for run in reversed(first_runs) if (kind := setback_of(run)) is not None]
    if not told:
        return None
    kind, newest = told[0]
    in_a_row = next(
        (number for number, (other, _) in enumerate(told) if other is Setback.FAILED), len(told)
    )
    return Trouble(
        kind,
        failures if kind is Setback.FAILED else in_a_row,
        newest.run_id,
        newest.refusal or newest.error,
    )


def blocking(progress: Progress) -> Exhausted | Trouble | None:
    """What a person has to know of a range; None when it gets on by itself."""
    match progress:
        case Exhausted():
            return progress
        case ToRequest(trouble=Trouble(is_stop=True) as trouble):
            return trouble
        case InFlight():
            return progress.despite
        case _:
            return None


def _in_flight(live: list[RunSeen], otherwise: ToRequest | Exhausted) -> InFlight:
    unsubmitted = all(run.state is RunState.CREATED and run.is_requested for run in live)
    despite = blocking(otherwise)
    if (
        isinstance(despite, Trouble)
        and despite.kind is Setback.NOT_STARTED
        and any(run.state in WORKING for run in live)
    ):
        despite = None
    return InFlight(
        tuple(run.run_id for run in live),
        waiting=tuple(run.run_id for run in live if run.state in NOT_BEGUN),
        launching=tuple(run.run_id for run in live if run.state is RunState.STARTING),
        started=tuple(run.run_id for run in live if run.state is RunState.STARTED),
        unconfirmed=tuple(run.run_id for run in live if not run.is_over),
        deleted=tuple(run.run_id for run in live if run.state is RunState.DELETED),
        unsubmitted=live[-1] if unsubmitted else None,
        despite=despite,
        works_for_s=max((run.works_for_s for run in live if run.works_for_s), default=None),
    )


def lacking(succeeded: RunSeen, runs: Sequence[RunSeen]) -> tuple[str, ...]:
    """Return the assets that a range still lacks although a run on it has succeeded.

    The newest run that tried an asset decides. Only a success of the whole job stands whatever
    comes after it: any later run refuses itself.
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


def refused_last(range_: OffsetRange, batch_id: str, runs: Iterable[RunSeen]) -> frozenset[str]:
    """Return the newest run on a claimed range if that run refused itself; nothing otherwise.

    The refusal may mean that the claim is gone.
    """
    mine = [run for run in runs if run.batch_id == batch_id and range_ in run.ranges]
    return frozenset({mine[-1].run_id} if mine and mine[-1].is_refused else ())


def unclaimed_workers(
    ranges: Iterable[OffsetRange],
    claimed: Iterable[tuple[OffsetRange, str]],
    runs: Iterable[RunSeen],
) -> tuple[str, ...]:
    """Return the runs that work on any of `ranges` without being the work of a claim.

    Nothing may start there until they have ended. This happens when an operator moves the committed
    offset, which erases the claims, while runs are working. Runs that have not started do not
    count: they refuse themselves when they find no claim.
    """
    known = set(claimed)
    wanted = tuple(ranges)
    return tuple(
        run.run_id
        for run in runs
        if run.may_work
        and any(
            mine.overlaps(other) and (mine, run.batch_id) not in known
            for mine in run.ranges
            for other in wanted
        )
    )

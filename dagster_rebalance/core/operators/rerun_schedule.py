"""The next steps of reruns: runs to start, finished batches, and runs to cancel.

The steps follow from the unfinished batches, the runs that Dagster shows, and the directives of
operators. A failed run halts its rerun, because the next batch would most likely fail as well. The
rerun continues once a re-execution of that run succeeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import Action, Directive, in_force, resume_command
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot, format_runs
from dagster_rebalance.core.runs.progress import (
    InFlight,
    Progress,
    Succeeded,
    ToRequest,
    blocking,
    progress_of,
)
from dagster_rebalance.core.runs.run_index import RunIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.runs.rerun_batch import RerunBatch


class Cancel(NamedTuple):
    """A run to cancel. With `only_unstarted`, a started run is left running."""

    run_id: str
    only_unstarted: bool


class RerunSteps(NamedTuple):
    """The next steps of all reruns of a group.

    Attributes:
        batch_requests: The runs to start.
        done: The finished batches, each with its run.
        cancels: The runs to cancel, because of a directive.
        notes: A message about each rerun.
    """

    batch_requests: tuple[BatchRequest, ...]
    done: tuple[tuple[RerunBatch, str], ...]
    cancels: tuple[Cancel, ...]
    notes: tuple[str, ...]


class _BatchState(NamedTuple):
    """A batch, its progress, and the directive that blocks it."""

    batch: RerunBatch
    progress: Progress
    directive: Directive | None


def steps(
    batches: Sequence[RerunBatch], runs: Iterable[RunSnapshot], directives: Sequence[Directive]
) -> RerunSteps:
    """Return the next steps for unfinished batches, given all their runs and all directives."""
    runs_by_batch: dict[str, list[RunSnapshot]] = {}
    for run in runs:
        runs_by_batch.setdefault(run.batch_id, []).append(run)
    by_rerun: dict[str, list[_BatchState]] = {}
    for batch in batches:
        progress = _progress(batch, runs_by_batch.get(batch.batch_id, ()))
        state = _BatchState(batch, progress, _directive_on(batch, directives))
        by_rerun.setdefault(batch.rerun.rerun_id, []).append(state)
    found = [_steps_of(states) for states in by_rerun.values()]
    return RerunSteps(
        batch_requests=tuple(
            batch_request for one in found for batch_request in one.batch_requests
        ),
        done=tuple(done for one in found for done in one.done),
        cancels=tuple(cancel for one in found for cancel in one.cancels),
        notes=tuple(note for one in found for note in one.notes),
    )


def _steps_of(states: Sequence[_BatchState]) -> RerunSteps:
    working = sum(isinstance(state.progress, InFlight) for state in states)
    is_halted = any(blocking(state.progress) for state in states)
    waiting = [
        BatchRequest(state.batch.batch_id, state.progress.attempt, state.batch.ranges)
        for state in states
        if state.directive is None and isinstance(state.progress, ToRequest)
    ]
    room = 0 if is_halted else max(0, states[0].batch.rerun.runs_at_once - working)
    return RerunSteps(
        batch_requests=(*_unsubmitted(states), *waiting[:room]),
        done=tuple(
            (state.batch, state.progress.run_id)
            for state in states
            if isinstance(state.progress, Succeeded)
        ),
        cancels=tuple(
            cancel
            for state in states
            if state.directive is not None and isinstance(state.progress, InFlight)
            for cancel in _unwanted(state.progress, state.directive)
        ),
        notes=(_note(states, working),),
    )


def _unsubmitted(states: Iterable[_BatchState]) -> Iterator[BatchRequest]:
    """The runs that Dagster created but did not submit: it submits them if requested again."""
    for state in states:
        match state:
            case _BatchState(batch, InFlight(unsubmitted=RunSnapshot() as run), None):
                yield BatchRequest(batch.batch_id, run.attempt, run.ranges)
            case _:
                pass


def _note(states: Sequence[_BatchState], working: int) -> str:
    rerun = states[0].batch.rerun
    left = sum(not isinstance(state.progress, Succeeded) for state in states)
    texts = [f"{rerun}: {rerun.batches - left} of {rerun.batches} runs done, {working} live"]
    halted = [found.run_id for state in states if (found := blocking(state.progress)) is not None]
    if halted:
        texts.append(
            f"halted, because {format_runs(halted)} did not succeed: re-execute failed runs, or "
            f"cancel the rest with dagster-rebalance rerun --cancel {rerun.rerun_id}"
        )
    texts += dict.fromkeys(
        f"{directive.partitions} is {directive}: {resume_command(directive.partitions)}"
        for state in states
        if (directive := state.directive) is not None
    )
    return "; ".join(texts)


def _progress(batch: RerunBatch, runs: Sequence[RunSnapshot]) -> Progress:
    """The progress of a batch. Its ranges differ only if an operator has edited a run's config."""
    if not runs:
        return ToRequest()
    known = RunIndex(runs)
    found = [progress_of(range_, batch.batch_id, known, max_attempts=1) for range_ in batch.ranges]
    return next(
        (one for one in found if isinstance(one, InFlight)),
        next((one for one in found if not isinstance(one, Succeeded)), found[0]),
    )


def _directive_on(batch: RerunBatch, directives: Sequence[Directive]) -> Directive | None:
    partitions = dict.fromkeys(range_.topic_partition for range_ in batch.ranges)
    found = [
        directive for one in partitions if (directive := in_force(directives, one)) is not None
    ]
    stops = [directive for directive in found if directive.action is Action.STOP]
    return next(iter(stops or found), None)


def _unwanted(progress: InFlight, directive: Directive) -> list[Cancel]:
    is_stop = directive.action is Action.STOP
    run_ids = progress.run_ids if is_stop else (*progress.waiting, *progress.launching)
    return [Cancel(run_id, only_unstarted=not is_stop) for run_id in run_ids]

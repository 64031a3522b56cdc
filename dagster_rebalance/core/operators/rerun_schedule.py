"""The next steps of reruns: which runs are started, which batches are done, and what is halted.

Everything follows from the batches that are not finished, from the runs that Dagster shows, and
from the orders of people. A run that fails halts its rerun: the same code would most likely fail on
the next batch, too. It goes on when that run was executed again with success.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import Action, Directive, how_to_resume, in_force
from dagster_rebalance.core.model.run import RunSeen, named_runs
from dagster_rebalance.core.runs.offer import Offer
from dagster_rebalance.core.runs.progress import (
    InFlight,
    Progress,
    Succeeded,
    ToRequest,
    blocking,
    progress_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.runs.rerun_batch import RerunBatch


class Cancel(NamedTuple):
    """A run that people do not want to work now.

    Attributes:
        run_id: The run.
        only_unstarted: Whether it is left alone once it has started.
    """

    run_id: str
    only_unstarted: bool


class RerunSteps(NamedTuple):
    """What is to be done for all reruns of a group.

    Attributes:
        offers: The runs to be started.
        done: The batches that are done, each with its run.
        cancels: The runs to be cancelled, because people have paused or stopped a partition.
        notes: How each rerun stands, as a sentence.
    """

    offers: tuple[Offer, ...]
    done: tuple[tuple[RerunBatch, str], ...]
    cancels: tuple[Cancel, ...]
    notes: tuple[str, ...]


def steps(
    batches: Sequence[RerunBatch], runs: Iterable[RunSeen], orders: Sequence[Directive]
) -> RerunSteps:
    """The next steps.

    Args:
        batches: The batches that are not finished, in the order in which they were asked for.
        runs: All runs of these batches.
        orders: What people have ordered, oldest first.
    """
    runs_of: dict[str, list[RunSeen]] = {}
    for run in runs:
        runs_of.setdefault(run.batch_id, []).append(run)
    looks_of: dict[str, list[_Look]] = {}
    for batch in batches:
        progress = _progress(batch, runs_of.get(batch.batch_id, ()))
        look = _Look(batch, progress, _order_on(batch, orders))
        looks_of.setdefault(batch.rerun.rerun_id, []).append(look)
    found = [_steps_of(looks) for looks in looks_of.values()]
    return RerunSteps(
        offers=tuple(offer for one in found for offer in one.offers),
        done=tuple(done for one in found for done in one.done),
        cancels=tuple(cancel for one in found for cancel in one.cancels),
        notes=tuple(note for one in found for note in one.notes),
    )


class _Look(NamedTuple):
    """A batch, how far it is, and the order of a person that keeps it from being processed."""

    batch: RerunBatch
    progress: Progress
    order: Directive | None


def _steps_of(looks: Sequence[_Look]) -> RerunSteps:
    """The steps of one rerun."""
    rerun = looks[0].batch.rerun
    at_work = sum(isinstance(look.progress, InFlight) for look in looks)
    is_halted = any(blocking(look.progress) for look in looks)
    waiting = [
        Offer(look.batch.batch_id, look.progress.attempt, look.batch.ranges)
        for look in looks
        if look.order is None and isinstance(look.progress, ToRequest)
    ]
    room = 0 if is_halted else max(0, rerun.runs_at_once - at_work)
    return RerunSteps(
        offers=(*_created(looks), *waiting[:room]),
        done=tuple(
            (look.batch, look.progress.run_id)
            for look in looks
            if isinstance(look.progress, Succeeded)
        ),
        cancels=tuple(
            cancel
            for look in looks
            if look.order is not None and isinstance(look.progress, InFlight)
            for cancel in _unwanted(look.progress, look.order)
        ),
        notes=(_note(looks, at_work),),
    )


def _created(looks: Iterable[_Look]) -> Iterator[Offer]:
    """The runs that Dagster has created and not submitted: it does when they are requested."""
    for look in looks:
        match look:
            case _Look(batch, InFlight(unsubmitted=RunSeen() as run), None):
                yield Offer(batch.batch_id, run.attempt, run.ranges)
            case _:
                pass


def _note(looks: Sequence[_Look], at_work: int) -> str:
    rerun = looks[0].batch.rerun
    left = sum(not isinstance(look.progress, Succeeded) for look in looks)
    said = [f"{rerun}: {rerun.batches - left} of {rerun.batches} runs done, {at_work} at work"]
    halted = [found.run_id for look in looks if (found := blocking(look.progress)) is not None]
    if halted:
        said.append(
            f"halted, because {named_runs(halted)} did not succeed: re-execute what has failed, or "
            f"cancel the rest with dagster-rebalance rerun --cancel {rerun.rerun_id}"
        )
    said += dict.fromkeys(
        f"{look.order.partitions} is {look.order}: {how_to_resume(look.order.partitions)}"
        for look in looks
        if look.order is not None
    )
    return "; ".join(said)


def _progress(batch: RerunBatch, runs: Sequence[RunSeen]) -> Progress:
    """How far a batch is: all of its ranges have the same runs, unless a person has edited one."""
    if not runs:
        return ToRequest()
    found = [progress_of(range_, batch.batch_id, runs, max_attempts=1) for range_ in batch.ranges]
    return next(
        (one for one in found if isinstance(one, InFlight)),
        next((one for one in found if not isinstance(one, Succeeded)), found[0]),
    )


def _order_on(batch: RerunBatch, orders: Sequence[Directive]) -> Directive | None:
    partitions = dict.fromkeys(range_.topic_partition for range_ in batch.ranges)
    found = [order for one in partitions if (order := in_force(orders, one)) is not None]
    stops = [order for order in found if order.action is Action.STOP]
    return next(iter(stops or found), None)


def _unwanted(progress: InFlight, order: Directive) -> list[Cancel]:
    is_stop = order.action is Action.STOP
    run_ids = progress.run_ids if is_stop else (*progress.waiting, *progress.launching)
    return [Cancel(run_id, only_unstarted=not is_stop) for run_id in run_ids]

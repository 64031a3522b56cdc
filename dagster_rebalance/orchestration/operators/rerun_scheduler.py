"""What a sensor of a group does for its reruns in a tick: it starts runs, and shows what is done.

It follows from the book of reruns and from the runs that Dagster shows
(`core.operators.rerun_schedule`), so that neither a command nor a job has to wait for a rerun.

Every code location of a group has a sensor. One of them looks after the reruns, as long as it says
so: two would start each run twice, and these would refuse each other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from dagster_rebalance.core.operators.rerun_schedule import steps
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER, MemberLease
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import rerun_tags, run_config, run_tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.operators.rerun_schedule import Cancel
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch
    from dagster_rebalance.orchestration.runs.queries import RunLedger

_SEAT = "reruns"
_SEAT_LIMIT_S = 60.0
"""Another sensor takes over that long after the last tick of the one that looked after them."""


class RerunTick(NamedTuple):
    """What a tick comes to.

    Attributes:
        requests: The runs to be started.
        notes: How each rerun stands, as a sentence.
        runs: The runs of the reruns.
    """

    requests: tuple[dg.RunRequest, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[RunSeen, ...] = ()


def look_after_reruns(
    context: dg.SensorEvaluationContext,
    location: str,
    group_id: str,
    ledger: RunLedger,
    batch_key: str,
) -> RerunTick:
    """Look after the reruns of a group. Not for previews.

    What goes wrong with them is told, and keeps the group from nothing.

    Args:
        context: The tick.
        location: The code location of the sensor.
        group_id: The group.
        ledger: Its runs.
        batch_key: The resource key of the batch in the job of the sensor.
    """
    try:
        return _tick(context, location, group_id, ledger, batch_key)
    except Exception as error:
        context.log.exception("the reruns of group %s could not be looked after", group_id)
        return RerunTick(notes=(f"reruns could not be looked after: {error}",))


def _tick(
    context: dg.SensorEvaluationContext,
    location: str,
    group_id: str,
    ledger: RunLedger,
    batch_key: str,
) -> RerunTick:
    group = GroupAssets.of(group_id)
    book = RerunStore(context.instance, group.reruns_name)
    batches = book.read()
    if not batches:
        return RerunTick()
    other = _other(context, group, f"{location}:{context.sensor_name}")
    if other:
        return RerunTick(notes=(f"sensor {other} looks after the reruns of the group",))
    catalogue = Catalogue(context.instance, group, NO_MEMBER)
    runs = ledger.read(
        {batch.batch_id for batch in batches},
        claims=[(batch.batch_id, range_) for batch in batches for range_ in batch.ranges],
    )
    found = steps(batches, runs, catalogue.orders())
    for cancel in found.cancels:
        _cancel(context, ledger, cancel)
    _finish(book, catalogue, batches, found.done)
    of = {batch.batch_id: batch.rerun for batch in batches}
    requests = tuple(
        dg.RunRequest(
            run_key=batch_request.run_key,
            tags={**run_tags(batch_request, group_id), **rerun_tags(of[batch_request.batch_id])},
            run_config=run_config(batch_request, batch_key),
        )
        for batch_request in found.batch_requests
    )
    return RerunTick(requests, found.notes, runs)


def _other(context: dg.SensorEvaluationContext, group: GroupAssets, mine: str) -> str:
    """Keep the seat of whoever looks after the reruns, unless another sensor has it.

    Returns:
        The other sensor; empty when this one has the seat.
    """
    seat = MemberLease(context.instance, group, "", _SEAT)
    holder, _, at = seat.read().rpartition(" ")
    if holder not in {"", mine} and at.isdecimal() and time.time() - int(at) < _SEAT_LIMIT_S:
        return holder
    seat.renew(mine)
    return ""


def _cancel(context: dg.SensorEvaluationContext, ledger: RunLedger, cancel: Cancel) -> None:
    try:
        ledger.cancel(cancel.run_id, only_unstarted=cancel.only_unstarted)
    except Exception:  # of any launcher; the next tick tries it again
        context.log.exception("run %s could not be cancelled", cancel.run_id)


def _finish(
    book: RerunStore,
    catalogue: Catalogue,
    known: Sequence[RerunBatch],
    done: Sequence[tuple[RerunBatch, str]],
) -> None:
    """Show what is done, and take it out of the book: in this order, so that it is shown.

    Args:
        book: The book.
        catalogue: Where it is shown.
        known: What the tick has found in the book. A rerun that lacks some of them by now may have
            been cancelled, and is not done for that.
        done: Those that are done, each with its run.
    """
    for batch, run_id in done:
        catalogue.record_reprocessed(batch, run_id)
        book.remove([batch])
    finished = {batch for batch, _ in done}
    left = {batch.rerun for batch in known if batch not in finished}
    for rerun in dict.fromkeys(batch.rerun for batch in finished):
        if rerun not in left:
            catalogue.record_rerun("rerun_done", rerun, "all runs are done")

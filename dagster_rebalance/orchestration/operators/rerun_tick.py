"""The reruns of a group in the ticks of its sensors: starts their runs, and shows their progress.

Each step follows from the stored batches and the runs in Dagster (`core.operators.rerun_schedule`),
so no command or job waits for a rerun. One sensor of a group holds a lease on the reruns: two
sensors would start each run twice, and the start checks of both runs would refuse them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.operators.rerun_schedule import steps
from dagster_rebalance.orchestration.operators.replayed_letters import (
    TopicReads,
    is_transient,
    mark_replayed,
)
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.runs.ticks import open_instance
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER, MemberLease
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import rerun_tags, run_config, run_tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.operators.rerun_schedule import Cancel
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
    from dagster_rebalance.orchestration.runs.run_ledger import RunLedger

_LEASE_NAME = "reruns"
_LEASE_S = 60.0
"""Another sensor takes over this long after the last tick of the holder."""


class RerunTick(NamedTuple):
    """The outcome of a tick.

    Attributes:
        requests: The runs to start.
        notes: The progress of each rerun.
        runs: The runs of the reruns, and live runs of cancelled reruns.
    """

    requests: tuple[dg.RunRequest, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[RunSnapshot, ...] = ()


def schedule_reruns(
    context: dg.SensorEvaluationContext,
    location: str,
    kafka: KafkaConsumerResource,
    ledger: RunLedger,
    batch_key: str,
) -> RerunTick:
    """Schedule the reruns of a group. Not for previews.

    Errors are only noted: they do not affect the group.

    Args:
        context: The context of the tick.
        location: The code location of the sensor.
        kafka: The resource of the consumer group.
        ledger: The runs of the group.
        batch_key: The resource key of the batch in the job of the sensor.
    """
    try:
        return _tick(context, location, kafka, ledger, batch_key)
    except Exception as error:
        context.log.exception("the reruns of group %s could not be scheduled", kafka.group_id)
        return RerunTick(notes=(f"reruns could not be scheduled: {error}",))


def _tick(
    context: dg.SensorEvaluationContext,
    location: str,
    kafka: KafkaConsumerResource,
    ledger: RunLedger,
    batch_key: str,
) -> RerunTick:
    group_id = kafka.group_id
    group = GroupAssets.of(group_id)
    store = RerunStore(open_instance(context.instance), group.reruns_name)
    batches, live = store.read(), ledger.live_reruns()
    if not batches and not live:
        return RerunTick()
    other = _other(context, group, f"{location}:{context.sensor_name}")
    if other:
        return RerunTick(notes=(f"sensor {other} schedules the reruns of the group",))
    catalogue = Catalogue(context.instance, group, NO_MEMBER)
    runs = ledger.read(
        {batch.batch_id for batch in batches},
        claims=[(batch.batch_id, range_) for batch in batches for range_ in batch.ranges],
    )
    found = steps(batches, runs, catalogue.directives())
    for cancel in found.cancels:
        _cancel(context, ledger, cancel)
    done, notes = _marked(context, kafka, found.done)
    _finish(store, catalogue, batches, done)
    of = {batch.batch_id: batch.rerun for batch in batches}
    requests = tuple(
        dg.RunRequest(
            run_key=batch_request.run_key,
            tags={**run_tags(batch_request, group_id), **rerun_tags(of[batch_request.batch_id])},
            run_config=run_config(batch_request, batch_key),
        )
        for batch_request in found.batch_requests
    )
    known = {run.run_id for run in runs}
    left = (run for run in live if run.run_id not in known)
    return RerunTick(requests, (*found.notes, *notes), (*runs, *left))


def _other(context: dg.SensorEvaluationContext, group: GroupAssets, own: str) -> str:
    """Renew the lease on the reruns, or return the other sensor that holds it."""
    lease = MemberLease(context.instance, group, "", _LEASE_NAME)
    holder, _, at = lease.read().rpartition(" ")
    if holder not in {"", own} and at.isdecimal() and time.time() - int(at) < _LEASE_S:
        return holder
    lease.renew(own)
    return ""


def _cancel(context: dg.SensorEvaluationContext, ledger: RunLedger, cancel: Cancel) -> None:
    try:
        ledger.cancel(cancel.run_id, only_unstarted=cancel.only_unstarted)
    except Exception:  # of any launcher; the next tick tries it again
        context.log.exception("run %s could not be cancelled", cancel.run_id)


def _marked(
    context: dg.SensorEvaluationContext,
    kafka: KafkaConsumerResource,
    done: Sequence[tuple[RerunBatch, str]],
) -> tuple[list[tuple[RerunBatch, str]], list[str]]:
    """Mark the letters of finished replays; return the batches to finish, and messages.

    The next tick repeats a batch whose letters Kafka did not take.
    """
    finished, notes = [], []
    known: TopicReads = {}
    for batch, run_id in done:
        rerun = batch.rerun
        try:
            notes.append(mark_replayed(context.instance, kafka, batch, run_id, known))
        except BrokerError as error:
            way_out = f"; to end it, use dagster-rebalance rerun --cancel {rerun.rerun_id}"
            notes.append(f"{rerun}: {error}{'' if is_transient(error) else way_out}")
        else:
            finished.append((batch, run_id))
    return finished, list(filter(None, dict.fromkeys(notes)))


def _finish(
    store: RerunStore,
    catalogue: Catalogue,
    known: Sequence[RerunBatch],
    done: Sequence[tuple[RerunBatch, str]],
) -> None:
    """Show finished batches, and then remove them.

    A rerun is done only if its last batch finishes in this tick. If its batches vanished before, it
    may have been cancelled.
    """
    for batch, run_id in done:
        catalogue.record_reprocessed(batch, run_id)
        store.remove([batch])
    finished = {batch for batch, _ in done}
    left = {batch.rerun for batch in known if batch not in finished}
    for rerun in dict.fromkeys(batch.rerun for batch in finished):
        if rerun not in left:
            catalogue.record_rerun("rerun_done", rerun, "all runs are done")

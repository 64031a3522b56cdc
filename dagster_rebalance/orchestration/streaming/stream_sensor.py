"""The sensor that keeps streaming runs alive. It has no member.

Each tick derives its actions from the runs in Dagster (`core.streaming.replicas`), so an outage of
ticks, daemon or code server delays no batch. Dagster and its launchers may not notice that the
process of a run is gone, so the sensor tracks heartbeats as members do (`core.runs.liveness`), and
ends dead runs. Key-values store when each heartbeat last changed (`runs.ticks`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.streaming.replicas import (
    Reconciliation,
    Replicas,
    StreamingRun,
    reconcile,
)
from dagster_rebalance.orchestration.batch.validation import check_merged_resources
from dagster_rebalance.orchestration.builders import SensorTick, build_sensor
from dagster_rebalance.orchestration.operators.rerun_tick import RerunTick
from dagster_rebalance.orchestration.reporting.checks import stop_notes
from dagster_rebalance.orchestration.reporting.member_tables import last_report
from dagster_rebalance.orchestration.runs.run_ledger import LIVE_STATUSES
from dagster_rebalance.orchestration.runs.ticks import (
    MOST_REQUESTS_PER_TICK,
    DeadRuns,
    end_dead_runs,
    is_real_tick,
    open_instance,
)
from dagster_rebalance.orchestration.storage.member_lease import notes_on_home
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import (
    SLOT_TAG,
    STREAM_TAG,
    VERSION_TAG,
    RunEvent,
    record_run_event,
    run_event_times,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.orchestration.builders import StreamDefsSettings
    from dagster_rebalance.orchestration.runs.external_jobs import WorkStopper

_NEWEST = 100
"""The number of newest runs that a tick reads, in addition to all live runs."""
_QUEUED = {
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.QUEUED,
}


def build_kafka_stream_sensor(
    settings: StreamDefsSettings,
    job: dg.UnresolvedAssetJobDefinition,
    replicas: Replicas,
    rerun_key: str,
    stopper: WorkStopper | None,
) -> dg.SensorDefinition:
    """Build the sensor that keeps the streaming runs of a job alive."""
    name = f"{settings.name}_sensor"

    def kafka_streams(tick: SensorTick) -> dg.SensorResult | dg.SkipReason:
        context, kafka = tick.context, tick.kafka
        stream = f"{tick.location}:{name}"
        is_real, reruns, dead = is_real_tick(context), RerunTick(), DeadRuns()
        live = _live(context.instance, stream)
        if is_real:
            ledger = tick.ledger()
            reruns = tick.schedule_reruns(ledger, rerun_key)
            runs = (*ledger.streams(live), *reruns.runs)
            dead = end_dead_runs(context, ledger, runs, kafka.engine_settings().liveness)
            live = [record for record in live if record.dagster_run.run_id not in dead.ended]
        # A run that cannot be ended frees its slot: its successor waits for it on its partitions.
        streams = [
            run for run in streams_of(context.instance, stream, live) if run.run_id not in dead.left
        ]
        limit_s = kafka.hold_limit_s + kafka.heartbeat_timeout_s
        due = reconcile(replace(replicas, leave_limit_s=limit_s), streams, time.time())
        group, instance = GroupAssets.of(kafka.group_id), open_instance(context.instance)
        headline = _headline(streams, replicas)
        summary = "; ".join(
            [
                headline,
                *due.notes,
                *dead.notes,
                *last_report(instance, group.group, group.lag, time.time()),
                *stop_notes(instance, group.offsets),
                *reruns.notes,
                *notes_on_home(context.instance),
            ]
        )
        if not is_real:
            return dg.SkipReason(f"preview, nothing is done: {_preview(due)}; {summary}")
        not_ended = f"{len(dead.left)} dead runs not ended, " if dead.left else ""
        context.update_cursor(dead.cursor(f"{not_ended}{headline}"))
        _ask_to_leave(context, due)
        if due.starts:
            check_merged_resources(context, job.name)
        requests = [
            dg.RunRequest(
                run_key=start.key,
                tags={
                    STREAM_TAG: stream,
                    SLOT_TAG: str(start.slot),
                    VERSION_TAG: replicas.version,
                },
            )
            for start in due.starts
        ]
        requests += reruns.requests[:MOST_REQUESTS_PER_TICK]
        return dg.SensorResult(run_requests=requests) if requests else dg.SkipReason(summary)

    return build_sensor(
        settings,
        kafka_streams,
        name=name,
        job=job,
        spark_key=settings.own_spark_key,
        stopper=stopper,
        description=(
            "Keeps the streaming runs of a Kafka consumer group alive, and replaces them one by "
            "one when their code has changed."
        ),
    )


def _ask_to_leave(context: dg.SensorEvaluationContext, due: Reconciliation) -> None:
    for leave in due.leaves:
        run = context.instance.get_run_by_id(leave.run_id)
        if run is not None and not run.is_finished:
            record_run_event(context.instance, run, RunEvent.LEAVE, leave.reason)
            context.log.info("%s is asked to leave: %s", format_runs([leave.run_id]), leave.reason)


def _live(instance: dg.DagsterInstance, stream: str) -> Sequence[dg.RunRecord]:
    wanted = dg.RunsFilter(tags={STREAM_TAG: stream}, statuses=LIVE_STATUSES)
    return instance.get_run_records(wanted)


def streams_of(
    instance: dg.DagsterInstance, stream: str, live: Iterable[dg.RunRecord]
) -> tuple[StreamingRun, ...]:
    """Return the runs in `live`, and the newest runs of the sensor `stream` (`location:name`)."""
    newest = instance.get_run_records(dg.RunsFilter(tags={STREAM_TAG: stream}), limit=_NEWEST)
    records = {record.dagster_run.run_id: record for record in (*live, *newest)}
    return tuple(_streaming_run(instance, record) for record in records.values())


def _streaming_run(instance: dg.DagsterInstance, record: dg.RunRecord) -> StreamingRun:
    run = record.dagster_run
    slot = run.tags.get(SLOT_TAG, "")
    event_times = {} if run.is_finished else run_event_times(instance, run.run_id)
    return StreamingRun(
        run_id=run.run_id,
        slot=int(slot) if slot.isdecimal() else None,
        version=run.tags.get(VERSION_TAG, ""),
        created_at=record.create_timestamp.timestamp(),
        started_at=record.start_time,
        ended_at=(record.end_time or time.time()) if run.is_finished else None,
        has_failed=run.status is dg.DagsterRunStatus.FAILURE,
        has_joined=RunEvent.JOINED in event_times,
        ready_since=event_times.get(RunEvent.READY),
        queued_at=_queued_at(instance, record) if run.status in _QUEUED else None,
        leaving_since=event_times.get(RunEvent.LEAVE, _cancelled_at(instance, run)),
    )


def _cancelled_at(instance: dg.DagsterInstance, run: dg.DagsterRun) -> float | None:
    """Return when termination of a CANCELING run was requested; None in any other status."""
    if run.status is not dg.DagsterRunStatus.CANCELING:
        return None
    events = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_CANCELING)
    return events[-1].timestamp if events else time.time()


def _queued_at(instance: dg.DagsterInstance, record: dg.RunRecord) -> float:
    """Return when a run was queued.

    A run that was created and not submitted has no event: its creation time is returned.
    """
    events = instance.all_logs(record.dagster_run.run_id, of_type=dg.DagsterEventType.RUN_ENQUEUED)
    # Not its creation: Postgres stores that in the unknown time zone of the connection.
    return events[-1].timestamp if events else record.create_timestamp.timestamp()


def _headline(streams: Sequence[StreamingRun], replicas: Replicas) -> str:
    """Return a message about the live runs, grouped by their next step."""
    live = [run for run in streams if run.is_live]
    if not live:
        return "no streaming run is live"
    old = [run for run in live if run.version != replicas.version]
    stay = [run for run in live if not run.is_leaving and run not in old]
    joined = [run for run in stay if run.has_joined]
    text = f"{len(joined)} of {replicas.runs} streaming run{'s' * (replicas.runs != 1)} live"
    text += " with the new code" * bool(old)
    text += f": {_named(joined)}" * bool(joined)
    others = {
        "starting": [run for run in stay if not run.has_joined],
        "working until replaced": [run for run in old if not run.is_leaving],
    }
    return "; ".join((text, *(f"{what}: {_named(runs)}" for what, runs in others.items() if runs)))


def _named(runs: Iterable[StreamingRun]) -> str:
    return format_runs(sorted(run.run_id for run in runs))


def _preview(due: Reconciliation) -> str:
    wanted = [f"a run for slot {start.slot} would be started" for start in due.starts]
    wanted += [f"{format_runs([leave.run_id])} would be asked to leave" for leave in due.leaves]
    return ", ".join(wanted) or "all wanted runs are live"

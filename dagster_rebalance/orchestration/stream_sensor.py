"""The sensor that keeps streaming runs alive. It holds no member and keeps nothing.

What it does in a tick follows from the runs that Dagster shows (`core.fleet`): so ticks, the daemon
and the code server may be away without a batch being late.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.fleet import Fleet, Moves, StreamSeen, moves
from dagster_rebalance.core.runs import named_runs
from dagster_rebalance.orchestration.marks import Mark, marks_of, set_mark
from dagster_rebalance.orchestration.runs import LIVE_STATUSES
from dagster_rebalance.orchestration.sensor import is_real_tick, location_of
from dagster_rebalance.orchestration.tags import SLOT_TAG, STREAM_TAG, VERSION_TAG

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEWEST = 100
"""A tick looks at this many of the newest runs, beside all that are live."""
_QUEUED = {
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.QUEUED,
}


def build_kafka_stream_sensor(
    *,
    name: str,
    job: dg.UnresolvedAssetJobDefinition,
    fleet: Fleet,
    minimum_interval_seconds: int = 5,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Build the sensor that keeps the streaming runs of a job alive.

    Args:
        name: The name of the sensor.
        job: The job of the streaming runs.
        fleet: How many, and of which version.
        minimum_interval_seconds: Seconds between ticks.
        default_status: Whether the sensor runs without being turned on.
    """

    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=(
            "Keeps streaming runs alive, which are members of a Kafka consumer group, and replaces "
            "them one by one when their code is new."
        ),
    )
    def kafka_streams(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        stream = f"{location_of(context)}:{name}"
        seen = streams_of(context.instance, stream)
        found = moves(fleet, seen, time.time())
        said = "; ".join([_shown(seen), *found.notes])
        if not is_real_tick(context):
            return dg.SkipReason(f"preview, nothing is done: {_wanted(found)}; {said}")
        for leave in found.leaves:
            run = context.instance.get_run_by_id(leave.run_id)
            if run is not None and not run.is_finished:
                set_mark(context.instance, run, Mark.LEAVE, leave.reason)
                context.log.info(
                    "%s is asked to leave: %s", named_runs([leave.run_id]), leave.reason
                )
        if not found.starts:
            return dg.SkipReason(said)
        return dg.SensorResult(
            run_requests=[
                dg.RunRequest(
                    run_key=start.key,
                    tags={
                        STREAM_TAG: stream,
                        SLOT_TAG: str(start.slot),
                        VERSION_TAG: fleet.version,
                    },
                )
                for start in found.starts
            ]
        )

    return kafka_streams


def streams_of(instance: dg.DagsterInstance, stream: str) -> tuple[StreamSeen, ...]:
    """The newest streaming runs of a sensor of a code location."""
    newest = instance.get_run_records(dg.RunsFilter(tags={STREAM_TAG: stream}), limit=_NEWEST)
    live = instance.get_run_records(
        dg.RunsFilter(tags={STREAM_TAG: stream}, statuses=LIVE_STATUSES)
    )
    records = {record.dagster_run.run_id: record for record in (*newest, *live)}
    return tuple(_seen(instance, record) for record in records.values())


def _seen(instance: dg.DagsterInstance, record: dg.RunRecord) -> StreamSeen:
    run = record.dagster_run
    slot = run.tags.get(SLOT_TAG, "")
    is_started = record.start_time is not None
    marks = marks_of(instance, run.run_id) if is_started and not run.is_finished else frozenset()
    return StreamSeen(
        run_id=run.run_id,
        slot=int(slot) if slot.isdecimal() else None,
        version=run.tags.get(VERSION_TAG, ""),
        created_at=record.create_timestamp.timestamp(),
        started_at=record.start_time,
        ended_at=(record.end_time or time.time()) if run.is_finished else None,
        has_failed=run.status is dg.DagsterRunStatus.FAILURE,
        has_joined=Mark.JOINED in marks,
        is_queued=run.status in _QUEUED,
        is_leaving=Mark.LEAVE in marks or run.status is dg.DagsterRunStatus.CANCELING,
    )


def _shown(seen: Sequence[StreamSeen]) -> str:
    live = [run for run in seen if run.is_live]
    if not live:
        return "no streaming run is live"
    working = sum(run.has_joined for run in live)
    return f"{named_runs(sorted(run.run_id for run in live))}: {working} of {len(live)} at work"


def _wanted(found: Moves) -> str:
    wanted = [f"a run for slot {start.slot} would be started" for start in found.starts]
    wanted += [f"{named_runs([leave.run_id])} would be asked to leave" for leave in found.leaves]
    return ", ".join(wanted) or "all runs that are wanted are there"

"""The sensor of per-batch runs: Dagster's daemon evaluates it, and its member decides.

A tick makes no network call to Kafka: it reads a mailbox, and requests the runs that the member
wants. A tick may time out, be a preview, or resume a day later. So the sensor requests a run until
the run exists, a preview changes nothing, and each run checks whether it may process its batch.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import in_short
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.orchestration.batch.batch_values import check_values
from dagster_rebalance.orchestration.batch.validation import (
    check_executor,
    check_resources,
    check_retries,
    check_steps,
)
from dagster_rebalance.orchestration.builders import (
    BatchSensorSettings,
    SensorTick,
    build_sensor,
    takes,
)
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies, MemberLog
from dagster_rebalance.orchestration.member.filter_scanner import FilterScanner
from dagster_rebalance.orchestration.member.opentelemetry import meter_of
from dagster_rebalance.orchestration.per_batch.hosted_members import MEMBERS, HostedMember
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.reporting.record_letters import RecordLetters
from dagster_rebalance.orchestration.resources.letter_topic import NewLetters
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.runs.external_jobs import stopper_of
from dagster_rebalance.orchestration.runs.run_ledger import LIVE_STATUSES, RunLedger
from dagster_rebalance.orchestration.runs.ticks import (
    MOST_REQUESTS_PER_TICK,
    DeadRuns,
    end_dead_runs,
    is_real_tick,
)
from dagster_rebalance.orchestration.storage.dynamic_partitions import JobName
from dagster_rebalance.orchestration.storage.member_lease import (
    MemberIdentity,
    MemberLease,
    notes_on_home,
)
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import (
    GROUP_TAG,
    STREAM_TAG,
    RunEvent,
    record_run_event,
    run_config,
    run_events_of,
    run_tags,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.reporting.lag import LagLimit
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_LEASE_TICKS = 4


@takes(BatchSensorSettings)
def build_kafka_batch_sensor(settings: BatchSensorSettings) -> dg.SensorDefinition:
    """Build the sensor that makes its code location a member of a consumer group.

    The sensor requests one run per batch.

    Raises:
        ConfigurationError: The steps of the job run in separate processes, a step does not take the
            batch or has a retry policy, a resource is configured at launch, or a batch would load
            the values of another batch.
    """
    name, job, batch_key = settings.name, settings.job, settings.batch_key
    lag_limit = settings.lag_limit
    check_executor(name, job)
    check_retries(job.name, [], job.op_retry_policy)
    if isinstance(job, dg.JobDefinition):
        _check_job(job, batch_key)

    def kafka_batches(tick: SensorTick) -> dg.SensorResult | dg.SkipReason:
        context, kafka = tick.context, tick.kafka
        key = (kafka.group_id, context.sensor_name, kafka.bootstrap_servers)
        if not is_real_tick(context):
            return _preview(key)
        check_lease(name, kafka, settings.minimum_interval_seconds)
        lease = MemberLease(
            context.instance, GroupAssets.of(kafka.group_id), tick.location, context.sensor_name
        )
        mail, notes = MEMBERS.tick(
            key,
            lambda: _host(tick, _checked_job(context, job.name, batch_key), lag_limit),
            lease.read,
        )
        for note in notes:
            context.log.info(note)
        ledger = tick.ledger()
        reruns = tick.schedule_reruns(ledger, batch_key)
        dead = DeadRuns()
        if reruns.runs:
            dead = end_dead_runs(context, ledger, reruns.runs, kafka.engine_settings().liveness)
        # Dagster shows the cursor in the list of ticks, unlike a reason.
        context.update_cursor(dead.cursor(mail.headline))
        streams = _streams_leaving(tick)
        skip = "; ".join((*mail.summary, *streams, *reruns.notes, *notes_on_home(context.instance)))
        requests = [
            dg.RunRequest(
                run_key=batch_request.run_key,
                tags=run_tags(batch_request, kafka.group_id),
                run_config=run_config(batch_request, batch_key),
            )
            for batch_request in mail.batch_requests
        ]
        requests += reruns.requests
        if not requests:
            return dg.SkipReason(skip)
        context.log.info(skip)
        return dg.SensorResult(run_requests=requests[:MOST_REQUESTS_PER_TICK])

    return build_sensor(
        settings,
        kafka_batches,
        name=name,
        job=job,
        spark_key=settings.spark_key,
        stopper=stopper_of(name, settings.external_work),
        description=(
            "Joins a Kafka consumer group. Requests one run per batch of offsets, and drains the "
            "runs of a partition before releasing it."
        ),
    )


def _check_job(job: dg.JobDefinition, batch_key: str) -> None:
    nodes = [job.graph]
    check_steps(job.name, nodes, batch_key)
    check_retries(job.name, nodes, job.op_retry_policy)
    check_values(job)
    check_resources(job.name, job.required_resource_keys, job.resource_defs)


def _checked_job(context: dg.SensorEvaluationContext, name: str, batch_key: str) -> str:
    """Check the job with the resources of the merged Definitions, and return its name."""
    if context.repository_def is not None:
        _check_job(context.repository_def.get_job(name), batch_key)
    return name


def check_lease(name: str, kafka: KafkaConsumerResource, minimum_interval_seconds: int) -> None:
    """Check that the lease of a member is at least 4 intervals of its sensor."""
    lease_s = _LEASE_TICKS * minimum_interval_seconds
    if kafka.lease_s < lease_s:
        msg = (
            f"lease_s={kafka.lease_s:g} of group {kafka.group_id} must be at least {lease_s} "
            f"(4 intervals of sensor {name}): "
            "the member would leave between two ticks"
        )
        raise ConfigurationError(msg)


def _preview(key: tuple[str, str, str]) -> dg.SkipReason:
    member = MEMBERS.get(key)
    if member is None:
        return dg.SkipReason("preview: nothing is started. Turn the sensor on to join the group")
    mail = member.mail
    wanted = "; ".join(
        f"would request {batch_request.run_key} for {in_short(batch_request.ranges)}"
        for batch_request in mail.batch_requests
    )
    return dg.SkipReason(
        f"preview, nothing is requested: {wanted or 'no run is needed'}; {'; '.join(mail.summary)}"
    )


def _host(tick: SensorTick, job: str, lag_limit: LagLimit) -> HostedMember:
    """Start the member of the sensor, after the checks that need no broker."""
    context, kafka, spark = tick.context, tick.kafka, tick.spark
    stop_work = tick.stop_work  # the member outlives the tick and its context
    settings = kafka.engine_settings(has_local_spark=spark is not None and spark.is_local)
    kafka.consumer_config()
    instance_ref = context.instance.get_ref()
    origin = context.code_location_origin
    own_job = JobName((context.repository_name or "") if origin else "", job)
    host = MemberIdentity(
        location=tick.location, sensor=context.sensor_name, incarnation=uuid.uuid4().hex[:12]
    )

    name = f"{host.location}:{host.sensor}"

    @contextmanager
    def dependencies() -> Iterator[MemberDependencies]:
        with ExitStack() as stack:
            instance = stack.enter_context(dg.DagsterInstance.from_ref(instance_ref))
            consumer = stack.enter_context(kafka.connect())
            ledger = RunLedger(
                instance,
                kafka.group_id,
                own_job=own_job,
                stop_work=stop_work,
            )
            producer, only = kafka.dead_letters(), kafka.predicate()
            record_letters = (
                stack.enter_context(RecordLetters(kafka)) if kafka.on_failure == "bisect" else None
            )
            yield MemberDependencies(
                consumer=consumer,
                engine=Engine(settings, new_batch_id=_new_batch_id, now=time.monotonic()),
                runs=ledger,
                dead_letters=DeadLetters(
                    stack.enter_context(closing(producer)), kafka.group_id, record_letters
                )
                if producer
                else None,
                catalogue=Catalogue(
                    instance, GroupAssets.of(kafka.group_id), host, public_settings(kafka)
                ),
                dead_letter_topic=kafka.dead_letter_topic,
                scanner=None
                if only is None
                else stack.enter_context(closing(FilterScanner(only, kafka.reader()))),
                new_letters=stack.enter_context(NewLetters(kafka))
                if kafka.dead_letter_topic
                else None,
                topics=kafka.topics,
                clock_with_suspension=process.boot_time_s,
                lag_limit=lag_limit,
                log=MemberLog({"group_id": kafka.group_id, "member": name}),
                meter=meter_of(kafka.group_id, name, most_partitions=kafka.metrics_partitions),
            )

    return HostedMember(
        f"{host.location}/{host.sensor}", dependencies, shutdown_timeout_s=kafka.shutdown_timeout_s
    )


def _streams_leaving(tick: SensorTick) -> list[str]:
    """Ask the former streaming runs of this code location to leave, and return a note.

    Their sensor was removed with its code, so nothing else would end them.
    """
    context, group_id = tick.context, tick.kafka.group_id
    # Not by tag: that query reads all runs that the group ever had.
    live = context.instance.get_runs(dg.RunsFilter(statuses=LIVE_STATUSES))
    mine = f"{tick.location}:"
    streams = [
        run
        for run in live
        if run.tags.get(GROUP_TAG) == group_id and run.tags.get(STREAM_TAG, "").startswith(mine)
    ]
    for run in streams:
        if RunEvent.LEAVE not in run_events_of(context.instance, run.run_id):
            why = f"sensor {context.sensor_name} uses per-batch runs"
            record_run_event(context.instance, run, RunEvent.LEAVE, why)
    said = format_runs(sorted(run.run_id for run in streams))
    return [f"{said} of the earlier streaming form asked to leave"] if streams else []


def _new_batch_id(_attempt: int) -> str:
    return f"b-{uuid.uuid4().hex[:16]}"

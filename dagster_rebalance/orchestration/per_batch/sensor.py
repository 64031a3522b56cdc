"""The sensor of per-batch runs, through which Dagster's daemon exchanges ticks with the member.

A tick makes no network call to Kafka: it reads a mailbox, and requests the runs that the member
wants. A tick may time out, be a preview, or resume a day later. So the sensor requests a run until
it exists, a preview changes nothing, and a run checks itself whether it may work.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.reporting.lag import LagLimit
from dagster_rebalance.orchestration.batch.batch_values import check_values
from dagster_rebalance.orchestration.batch.validation import (
    check_executor,
    check_resources,
    check_retries,
    check_steps,
)
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies, MemberLog
from dagster_rebalance.orchestration.member.opentelemetry import meter_of
from dagster_rebalance.orchestration.operators.rerun_scheduler import schedule_reruns
from dagster_rebalance.orchestration.per_batch.members import MEMBERS, HostedMember
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.runs.external_jobs import stopper_of, stopping
from dagster_rebalance.orchestration.runs.run_ledger import LIVE_STATUSES, RunLedger
from dagster_rebalance.orchestration.runs.ticks import (
    MOST_REQUESTS_PER_TICK,
    DeadRuns,
    end_dead_runs,
    is_real_tick,
    location_of,
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
    from collections.abc import Callable, Iterator, Sequence

    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
    from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
    from dagster_rebalance.orchestration.runs.external_jobs import ExternalWork

_LEASE_TICKS = 4


def build_kafka_batch_sensor(
    *,
    name: str,
    job: dg.JobDefinition | dg.UnresolvedAssetJobDefinition,
    kafka_key: str = "kafka",
    batch_key: str = "kafka_batch",
    spark_key: str | None = None,
    external_work: Sequence[ExternalWork] = (),
    lag_within_records: int | None = None,
    lag_within_s: float | None = None,
    minimum_interval_seconds: int = 5,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Build the sensor that makes its code location a member of a consumer group.

    The sensor requests one run per batch.

    Args:
        name: The name of the sensor.
        job: The job that processes a batch. Each of its steps needs a `KafkaBatch` under
            `batch_key`, and the job `dg.in_process_executor`. If one of its assets takes the value
            of another, their IO manager must be `values_by_batch`.
        kafka_key: The resource key of the `KafkaConsumerResource`.
        batch_key: The resource key of the `KafkaBatch`.
        spark_key: The resource key of the `KafkaSparkResource`, to stop Spark jobs of dead runs.
        external_work: Stops the external work of runs, as for `build_kafka_batch_defs`.
        lag_within_records: The limit of the check `lag_within`, as for `build_kafka_batch_defs`.
        lag_within_s: The limit of the check `lag_within` in seconds.
        minimum_interval_seconds: Seconds between ticks. Dagster's minimum is 5.
        default_status: Whether the sensor is on from the start.

    Raises:
        ConfigurationError: The steps of the job run in separate processes, a step does not take its
            batch or has a retry policy, a resource is configured at launch, or batches would take
            the values of each other.
    """
    lag_limit = LagLimit(lag_within_records, lag_within_s)
    check_executor(name, job)
    check_retries(job.name, [], job.op_retry_policy)
    if isinstance(job, dg.JobDefinition):
        _check_job(job, batch_key)
    stopper = stopper_of(name, external_work)

    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        required_resource_keys={kafka_key} | ({spark_key} if spark_key else set()),
        description=(
            "Member of a Kafka consumer group. Requests a run per batch of offsets, and drains "
            "the runs of a partition before releasing it."
        ),
    )
    def kafka_batches(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        if kafka.why_not_to_join:
            return dg.SkipReason(kafka.why_not_to_join)
        spark: KafkaSparkResource | None = (
            getattr(context.resources, spark_key) if spark_key else None
        )
        stop_work = stopping(spark, stopper)
        key = (kafka.group_id, context.sensor_name, kafka.bootstrap_servers)
        if not is_real_tick(context):
            return _preview(key)
        check_lease(name, kafka, minimum_interval_seconds)
        lease = MemberLease(
            context.instance,
            GroupAssets.of(kafka.group_id),
            location_of(context),
            context.sensor_name,
        )
        mail, notes = MEMBERS.tick(
            key,
            lambda: _host(
                context,
                _checked_job(context, job.name, batch_key),
                kafka,
                spark,
                stop_work,
                lag_limit=lag_limit,
            ),
            lease.read,
        )
        for note in notes:
            context.log.info(note)
        ledger = RunLedger(
            context.instance,
            kafka.group_id,
            stop_work=stop_work,
        )
        location = location_of(context)
        reruns = schedule_reruns(context, location, kafka.group_id, ledger, batch_key)
        dead = DeadRuns()
        if reruns.runs:
            dead = end_dead_runs(context, ledger, reruns.runs, kafka.engine_settings().liveness)
        # Dagster shows the cursor in the list of ticks, unlike a reason.
        context.update_cursor(dead.cursor(mail.headline))
        streams = _streams_leaving(context, kafka.group_id)
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

    return kafka_batches


def _check_job(job: dg.JobDefinition, batch_key: str) -> None:
    nodes = [job.graph]
    check_steps(job.name, nodes, batch_key)
    check_retries(job.name, nodes, job.op_retry_policy)
    check_values(job)
    check_resources(job.name, job.required_resource_keys, job.resource_defs)


def _checked_job(context: dg.SensorEvaluationContext, name: str, batch_key: str) -> str:
    """Check the job with all resources of merged definitions, and return its name."""
    if context.repository_def is not None:
        _check_job(context.repository_def.get_job(name), batch_key)
    return name


def check_lease(name: str, kafka: KafkaConsumerResource, minimum_interval_seconds: int) -> None:
    """Check that the lease of a member is longer than some intervals of its sensor.

    Raises:
        ConfigurationError: The lease is too short.
    """
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
        f"would request {batch_request.run_key} for {', '.join(map(str, batch_request.ranges))}"
        for batch_request in mail.batch_requests
    )
    return dg.SkipReason(
        f"preview, nothing is requested: {wanted or 'no run is needed'}; {'; '.join(mail.summary)}"
    )


def _host(
    context: dg.SensorEvaluationContext,
    job: str,
    kafka: KafkaConsumerResource,
    spark: KafkaSparkResource | None,
    stop_work: Callable[[str], None] | None,
    *,
    lag_limit: LagLimit,
) -> HostedMember:
    """Start the member of the sensor, after the checks that need no broker."""
    settings = kafka.engine_settings(has_local_spark=spark is not None and spark.is_local)
    kafka.consumer_config()
    instance_ref = context.instance.get_ref()
    origin = context.code_location_origin
    own_job = JobName((context.repository_name or "") if origin else "", job)
    host = MemberIdentity(
        location=location_of(context), sensor=context.sensor_name, incarnation=uuid.uuid4().hex[:12]
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
            producer = kafka.dead_letters()
            yield MemberDependencies(
                consumer=consumer,
                engine=Engine(settings, new_batch_id=_new_batch_id, now=time.monotonic()),
                runs=ledger,
                dead_letters=DeadLetters(stack.enter_context(closing(producer)), kafka.group_id)
                if producer
                else None,
                catalogue=Catalogue(
                    instance, GroupAssets.of(kafka.group_id), host, public_settings(kafka)
                ),
                topics=kafka.topics,
                clock_with_suspension=process.boot_time_s,
                lag_limit=lag_limit,
                log=MemberLog({"group_id": kafka.group_id, "member": name}),
                meter=meter_of(kafka.group_id, name, most_partitions=kafka.metrics_partitions),
            )

    return HostedMember(
        f"{host.location}/{host.sensor}", dependencies, shutdown_timeout_s=kafka.shutdown_timeout_s
    )


def _streams_leaving(context: dg.SensorEvaluationContext, group_id: str) -> list[str]:
    """Ask the former streaming runs of this code location to leave, and return a note.

    Their sensor went with its code, and nothing else would end them.
    """
    # Not by tag: that query reads all runs that the group ever had.
    live = context.instance.get_runs(dg.RunsFilter(statuses=LIVE_STATUSES))
    mine = f"{location_of(context)}:"
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

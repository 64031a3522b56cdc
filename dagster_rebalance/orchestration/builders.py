"""The settings of the builders, each declared once, and the shared code of both sensors.

A builder takes the fields of its settings class as keyword arguments (`takes`). The documentation
and the YAML component read the types, defaults and descriptions of the fields.
"""

# No `from __future__ import annotations` here: the annotations are read at run time.
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

import dagster as dg

from dagster_rebalance.core.reporting.lag import LagLimit
from dagster_rebalance.orchestration.operators.rerun_tick import RerunTick, schedule_reruns
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.runs.external_jobs import ExternalWork, WorkStopper, stopping
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.runs.ticks import location_of

if TYPE_CHECKING:
    Job: TypeAlias = dg.JobDefinition | dg.UnresolvedAssetJobDefinition
else:
    Job = Any  # dagster has no name for an asset job at run time
P = ParamSpec("P")
R = TypeVar("R")
SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, kw_only=True)
class SensorSettings:
    """Settings of the sensor in either form of run."""

    kafka_key: Annotated[str, "The resource key of the `KafkaConsumerResource`."] = "kafka"
    batch_key: Annotated[str, "The resource key of the `KafkaBatch`, as the assets use it."] = (
        "kafka_batch"
    )
    external_work: Annotated[
        Sequence[ExternalWork],
        "Stops the external work of a run or batch that did not succeed, such as jobs of a Pipes "
        "client, before its batch is retried.",
    ] = ()
    lag_within_records: Annotated[
        int | None,
        "The check `lag_within` fails while more than this many offsets wait in all partitions. "
        "Without this and `lag_within_s`, there is no such check.",
    ] = None
    lag_within_s: Annotated[
        float | None,
        "The check `lag_within` fails while a record has waited longer than this many seconds, by "
        "its timestamp.",
    ] = None
    minimum_interval_seconds: Annotated[
        int, "Seconds between ticks of the sensor. Values below 5 have no effect."
    ] = 5
    default_status: Annotated[
        dg.DefaultSensorStatus, "Whether the sensor is on from the start."
    ] = dg.DefaultSensorStatus.STOPPED

    @property
    def lag_limit(self) -> LagLimit:
        """The limit of the check `lag_within`."""
        return LagLimit(self.lag_within_records, self.lag_within_s)


@dataclass(frozen=True, kw_only=True)
class BatchSensorSettings(SensorSettings):
    """Arguments of `build_kafka_batch_sensor`."""

    name: Annotated[str, "The name of the sensor."]
    job: Annotated[
        Job,
        "The job that processes a batch. Each step needs a `KafkaBatch` under `batch_key`, and the "
        "job needs `dg.in_process_executor`. If an asset loads the value of another asset, their "
        "IO manager must be `values_by_batch`.",
    ]
    spark_key: Annotated[
        str | None,
        "The resource key of the `KafkaSparkResource`, to stop Spark jobs of dead runs.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class DefsSettings(SensorSettings):
    """Arguments of the builders of definitions."""

    kafka: Annotated[KafkaConsumerResource, "The group to join."]
    assets: Annotated[
        Sequence[dg.AssetsDefinition],
        "The assets that process a batch. In streaming runs, each is one decorated function that "
        "returns nothing or `dg.MaterializeResult`.",
    ]
    spark: Annotated[
        KafkaSparkResource | None, "The Spark session of a run, shared by its batches."
    ] = None
    name: Annotated[
        str, "The name of the job, which no asset may have. The sensor is named `<name>_sensor`."
    ]
    spark_key: Annotated[str, "The resource key of `spark`."] = "spark"
    resources: Annotated[
        Mapping[str, Any] | None,
        "Further resources of the assets, which live as long as the run. Run config cannot change "
        "a `SchemaRegistryResource`. In per-batch runs, include the IO manager through which an "
        "asset loads the value of another asset, unless it is Dagster's default: values are stored "
        "per batch (`values_by_batch`).",
    ] = None
    job_tags: Annotated[
        Mapping[str, Any] | None,
        "Tags of each run. Dagster stores values that are not strings as JSON.",
    ] = None
    commit_within_s: Annotated[
        float | None,
        "Dagster's freshness policy shows the committed offsets as stale if no commit was recorded "
        "for this many seconds. At least 60, and above `record_every_s`. Use it for topics that "
        "always receive records.",
    ] = None
    show_topics: Annotated[
        bool,
        "Whether the topics are upstream of the assets in the lineage, except for assets that load "
        "the value of another asset. Dagster changes the deps of an asset only once: set this to "
        "False if something else changes the deps.",
    ] = True

    @property
    def own_spark_key(self) -> str | None:
        """The resource key of the Spark session; None without one."""
        return None if self.spark is None else self.spark_key


@dataclass(frozen=True, kw_only=True)
class BatchDefsSettings(DefsSettings):
    """Arguments of `build_kafka_batch_defs`."""

    name: Annotated[
        str, "The name of the job, which no asset may have. The sensor is named `<name>_sensor`."
    ] = "kafka_batches"


@dataclass(frozen=True, kw_only=True)
class StreamDefsSettings(DefsSettings):
    """Arguments of `build_kafka_stream_defs`."""

    name: Annotated[
        str, "The name of the job, which no asset may have. The sensor is named `<name>_sensor`."
    ] = "kafka_stream"
    runs: Annotated[int, "The number of streaming runs, which share the partitions."] = 1
    version: Annotated[
        str | None,
        "The version of the code. Runs of another version are replaced one after the other. By "
        "default a digest of the settings and of the source files of the assets.",
    ] = None
    max_run_s: Annotated[float, "Runs older than this many seconds are also replaced."] = 3600.0


def takes(
    settings: Callable[P, SettingsT],
) -> Callable[[Callable[[SettingsT], R]], Callable[P, R]]:
    """Let a builder take the fields of a settings class as keyword arguments.

    `help()`, `inspect.signature` and `typing.get_type_hints` show these arguments.
    """

    def decorate(build: Callable[[SettingsT], R]) -> Callable[P, R]:
        @functools.wraps(build)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return build(settings(*args, **kwargs))

        arguments = inspect.signature(settings).parameters.values()
        types, result = get_type_hints(settings), get_type_hints(build)["return"]
        vars(call)["__signature__"] = inspect.Signature(
            [one.replace(annotation=types[one.name]) for one in arguments],
            return_annotation=result,
        )
        call.__annotations__ = {one.name: types[one.name] for one in arguments} | {"return": result}
        text = inspect.cleandoc(build.__doc__ or "")
        end = min(at for at in (text.find("\n\nReturns:"), text.find("\n\nRaises:")) if at >= 0)
        descriptions = described(cast("type[SensorSettings]", settings)).items()
        lines = [f"    {name}: {description}" for name, (_, description) in descriptions]
        call.__doc__ = "\n".join([text[:end], "", "Args:", *lines]) + text[end:]
        vars(settings)["__init__"].__qualname__ = build.__qualname__  # the name in a TypeError
        return call

    return decorate


def described(settings: type[SensorSettings]) -> dict[str, tuple[Any, str]]:
    """Return the type and the description of each setting."""
    hints = get_type_hints(settings, include_extras=True)
    return {field.name: get_args(hints[field.name])[:2] for field in fields(settings)}


def sensor_arguments(settings: SensorSettings) -> dict[str, Any]:
    """Return the arguments for the sensor from the settings of a builder."""
    return {field.name: getattr(settings, field.name) for field in fields(SensorSettings)}


@dataclass(frozen=True)
class SensorTick:
    """A tick of a sensor of either form, with the resources of its group."""

    context: dg.SensorEvaluationContext
    kafka: KafkaConsumerResource
    spark: KafkaSparkResource | None
    stop_work: Callable[[str], None] | None

    @property
    def location(self) -> str:
        """The code location of the sensor."""
        return location_of(self.context)

    def ledger(self) -> RunLedger:
        """Return the runs of the group."""
        return RunLedger(self.context.instance, self.kafka.group_id, stop_work=self.stop_work)

    def schedule_reruns(self, ledger: RunLedger, batch_key: str) -> RerunTick:
        """Schedule the reruns of the group. Not for previews."""
        return schedule_reruns(self.context, self.location, self.kafka, ledger, batch_key)


def build_sensor(
    settings: SensorSettings,
    evaluate: Callable[[SensorTick], dg.SensorResult | dg.SkipReason],
    *,
    name: str,
    job: Job,
    spark_key: str | None,
    stopper: WorkStopper | None,
    description: str,
) -> dg.SensorDefinition:
    """Return a sensor that joins no group in a branch deployment without its own group."""

    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=settings.minimum_interval_seconds,
        default_status=settings.default_status,
        required_resource_keys={settings.kafka_key} | ({spark_key} if spark_key else set()),
        description=description,
    )
    def kafka_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        kafka: KafkaConsumerResource = getattr(context.resources, settings.kafka_key)
        if kafka.why_not_to_join:
            return dg.SkipReason(kafka.why_not_to_join)
        spark = getattr(context.resources, spark_key) if spark_key else None
        return evaluate(SensorTick(context, kafka, spark, stopping(spark, stopper)))

    return kafka_sensor

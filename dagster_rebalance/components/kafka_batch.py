"""`KafkaBatchComponent`: the definitions of a consumer group, from YAML or from Python.

Its attributes are the arguments of `build_kafka_batch_defs` and `build_kafka_stream_defs`, which
check them.
"""

# No `from __future__ import annotations`: pydantic and Dagster read them when a class is created.
from collections.abc import Sequence
from typing import Annotated, Any

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field

from dagster_rebalance.components.batch_asset import ResolvedBatchAsset, import_object
from dagster_rebalance.components.scaffolder import KafkaBatchScaffolder
from dagster_rebalance.components.yaml_settings import (
    setting,
    settings_of,
    with_precise_schema,
)
from dagster_rebalance.orchestration.definitions import (
    SHORTEST_FRESHNESS_S,
    SHORTEST_RUN_S,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource

KafkaSettings = settings_of(
    KafkaConsumerResource, known_at_load=frozenset({"group_id", "start_from"})
)
SparkSettings = settings_of(KafkaSparkResource)
RegistrySettings = settings_of(SchemaRegistryResource)


def _kafka(context: dg.ResolutionContext, model: Any) -> KafkaConsumerResource:
    kafka = KafkaConsumerResource(**KafkaSettings.resolve_from_model(context, model).given())
    kafka.engine_settings()
    kafka.check_client()
    return kafka


def _spark(context: dg.ResolutionContext, model: Any) -> KafkaSparkResource:
    return KafkaSparkResource(**SparkSettings.resolve_from_model(context, model).given())


def _external_work(context: dg.ResolutionContext, path: str) -> Any:
    value = import_object(context, path)
    return value() if isinstance(value, type) else value


def _registry(context: dg.ResolutionContext, model: Any) -> SchemaRegistryResource:
    return SchemaRegistryResource(**RegistrySettings.resolve_from_model(context, model).given())


class Streaming(dg.Resolvable, dg.Model):
    """Settings of streaming runs: each is a member of the group and processes batch after batch."""

    runs: Annotated[
        int,
        setting(Annotated[int, Field(ge=0)], "Number of streaming runs that share the partitions."),
    ] = 1
    version: Annotated[
        str | None,
        setting(str | None, "Version of the code: runs of another version are replaced."),
    ] = None
    max_run_s: Annotated[
        float,
        setting(
            Annotated[float, Field(ge=SHORTEST_RUN_S)],
            "Maximum age of a run in seconds, before it is replaced.",
        ),
    ] = 3600.0


@dg.scaffold_with(KafkaBatchScaffolder)
class KafkaBatchComponent(dg.Component, dg.Resolvable, dg.Model):
    """Processes Kafka topics with your assets, as a member of a consumer group.

    Each batch of offsets is one Dagster run; with `streaming`, a run processes many batches.
    Offsets are committed when their batch has succeeded. Partitions are drained before they move.

    Example:
        ```python
        @dg.component_instance
        def load(context: dg.ComponentLoadContext) -> KafkaBatchComponent:
            return KafkaBatchComponent(kafka=kafka, assets=[orders])
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)

    kafka: Annotated[
        KafkaConsumerResource,
        dg.Resolver(
            _kafka,
            model_field_type=KafkaSettings.model(),
            description="The group to join: the settings of KafkaConsumerResource.",
        ),
    ]
    assets: Annotated[
        Sequence[ResolvedBatchAsset],
        dg.Resolver.default(
            description="The assets that process a batch: Python paths, alone or with attributes."
        ),
    ] = ()
    spark: Annotated[
        KafkaSparkResource | None,
        dg.Resolver(
            _spark,
            model_field_type=SparkSettings.model(),
            description="The Spark session of a run: the settings of KafkaSparkResource.",
        ),
    ] = None
    registry: Annotated[
        SchemaRegistryResource | None,
        dg.Resolver(
            _registry,
            model_field_type=RegistrySettings.model(),
            description=(
                "The schema registry, a resource of the assets: the settings of "
                "SchemaRegistryResource."
            ),
        ),
    ] = None
    streaming: Annotated[
        Streaming | None,
        dg.Resolver(
            Streaming.resolve_from_model,
            model_field_type=Streaming.model(),
            description="Use streaming runs. Without it, there is one run per batch.",
        ),
    ] = None
    external_work: Annotated[
        Sequence[Annotated[Any, dg.Resolver(_external_work, model_field_type=str)]],
        dg.Resolver.default(
            description=(
                "Stops the external work of runs: Python paths of objects with a method "
                "`stop(run_id)`, or of their classes, which are instantiated without arguments."
            )
        ),
    ] = ()
    name: Annotated[
        str | None,
        setting(
            str | None,
            "The name of the job; the sensor's name is the same with the suffix `_sensor`. By "
            "default kafka_batches, or kafka_stream.",
        ),
    ] = None
    kafka_key: Annotated[str, setting(str, "The resource key of `kafka`.")] = "kafka"
    batch_key: Annotated[str, setting(str, "The resource key of the batch in the assets.")] = (
        "kafka_batch"
    )
    spark_key: Annotated[str, setting(str, "The resource key of `spark`.")] = "spark"
    registry_key: Annotated[str, setting(str, "The resource key of `registry`.")] = "registry"
    job_tags: Annotated[
        dict[str, Any],
        setting(
            dict[str, str | dict[str, Any]],
            "Tags of each run: texts, or blocks, which Dagster stores as JSON.",
        ),
    ] = Field(default_factory=dict)
    lag_within_records: Annotated[
        int | None,
        setting(
            Annotated[int, Field(ge=0)] | None,
            "The check `lag_within` fails while the total lag of all partitions is above this "
            "number of offsets. Without this and `lag_within_s` there is no such check.",
        ),
    ] = None
    lag_within_s: Annotated[
        float | None,
        setting(
            Annotated[float, Field(gt=0)] | None,
            "The check fails while a record has been waiting for longer than this, by its "
            "timestamp.",
        ),
    ] = None
    commit_within_s: Annotated[
        float | None,
        setting(
            Annotated[float, Field(ge=SHORTEST_FRESHNESS_S)] | None,
            "Dagster shows the committed offsets as stale if no commit was recorded for this long. "
            "Use it for topics that always have new records.",
        ),
    ] = None
    show_topics: Annotated[
        bool,
        setting(
            bool,
            "Whether the lineage shows the topics upstream of the assets. An asset with its own "
            "`deps` here has only those.",
        ),
    ] = True
    minimum_interval_seconds: Annotated[
        int, setting(Annotated[int, Field(ge=1)], "Seconds between ticks of the sensor.")
    ] = 5
    default_status: Annotated[
        dg.DefaultSensorStatus,
        setting(dg.DefaultSensorStatus, "RUNNING starts the sensor automatically; or STOPPED."),
    ] = dg.DefaultSensorStatus.STOPPED

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """Return the model by which `dg` checks YAML."""
        return with_precise_schema(cls.model())

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return the description of the component for `dg`."""
        spec: dict[str, Any] = {"tags": ["kafka", "spark", "streaming"]}
        if hasattr(dg.ComponentTypeSpec, "produces"):  # missing in the first releases of 1.13
            spec["produces"] = ["asset", "asset_check", "job", "resource", "sensor"]
        return dg.ComponentTypeSpec(**spec)

    def batch_assets(self, context: dg.ComponentLoadContext) -> Sequence[dg.AssetsDefinition]:  # noqa: ARG002 - for subclasses
        """Return the assets that process a batch. Override to build them from own attributes."""
        return self.assets

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the group.

        Raises:
            ConfigurationError: As in `build_kafka_batch_defs` and `build_kafka_stream_defs`.
        """
        arguments: dict[str, Any] = {
            "kafka": self.kafka,
            "assets": self.batch_assets(context),
            "spark": self.spark,
            "resources": {} if self.registry is None else {self.registry_key: self.registry},
            "kafka_key": self.kafka_key,
            "batch_key": self.batch_key,
            "spark_key": self.spark_key,
            "external_work": self.external_work,
            "job_tags": self.job_tags,
            "lag_within_records": self.lag_within_records,
            "lag_within_s": self.lag_within_s,
            "commit_within_s": self.commit_within_s,
            "show_topics": self.show_topics,
            "minimum_interval_seconds": self.minimum_interval_seconds,
            "default_status": self.default_status,
        }
        if self.name is not None:
            arguments["name"] = self.name
        if self.streaming is None:
            return build_kafka_batch_defs(**arguments)
        return build_kafka_stream_defs(
            **arguments,
            runs=self.streaming.runs,
            version=self.streaming.version,
            max_run_s=self.streaming.max_run_s,
        )

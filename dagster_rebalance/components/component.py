"""`KafkaBatchComponent`: the definitions of a consumer group, from YAML or from Python.

Its attributes are the arguments of `build_kafka_batch_defs` and `build_kafka_stream_defs`, which
check them.
"""

# No `from __future__ import annotations`: pydantic and Dagster read them when a class is created.
from collections.abc import Sequence
from importlib import import_module
from types import FunctionType
from typing import Annotated, Any, Optional, TypeAlias

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field

from dagster_rebalance.components.scaffolder import KafkaBatchScaffolder
from dagster_rebalance.components.yaml_settings import (
    setting,
    settings_of,
    with_precise_schema,
)
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.builders import StreamDefsSettings, described
from dagster_rebalance.orchestration.definitions import (
    SHORTEST_FRESHNESS_S,
    SHORTEST_RUN_S,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource

_MERGED = frozenset({"deps", "metadata", "owners", "tags", "kinds"})
"""Attributes whose values are added to the values in the code; other attributes replace them."""
_ADDED = "As in dg.AssetSpec; added to the values in the code."
_REPLACED = "As in dg.AssetSpec; replaces the value in the code."


def import_object(context: dg.ResolutionContext, path: str) -> object:
    """Import package.module.name, or .module.name relative to the folder of the file."""
    module, _, name = path.rpartition(".")
    if not module.strip(".") or not name.isidentifier():
        msg = (
            f"{path!r} is not the path of a function: write package.module.function, or "
            ".module.function for a module in the folder of this file"
        )
        raise ConfigurationError(msg)
    if module.startswith("."):
        load = dg.ComponentLoadContext.from_resolution_context(context)
        module = load.defs_relative_module_name(load.path) + module
    value = getattr(import_module(module), name, None)
    if value is None:
        msg = f"the module {module} has no {name!r}"
        raise ConfigurationError(msg)
    return value


def _import_asset(context: dg.ResolutionContext, path: str) -> object:
    value = import_object(context, path)
    if not isinstance(value, dg.AssetsDefinition | FunctionType):
        msg = f"{path} is a {type(value).__name__}: give a function or an @dg.asset"
        raise ConfigurationError(msg)
    return value


class BatchAsset(dg.Resolvable, dg.Model):
    """An asset of the component: its code and its attributes."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    function: Annotated[
        Any,
        dg.Resolver(
            _import_asset,
            model_field_type=str,
            description=(
                "The Python path of an @dg.asset, or of a function to make one of. A leading dot "
                "makes it relative to the folder of this file: .module.function"
            ),
        ),
    ]
    key: Annotated[
        dg.ResolvedAssetKey | None,
        dg.Resolver.default(
            description="For a plain function only. By default the function's name."
        ),
    ] = None
    description: Annotated[str | None, setting(str | None, _REPLACED)] = None
    group_name: Annotated[str | None, setting(str | None, _REPLACED)] = None
    code_version: Annotated[str | None, setting(str | None, _REPLACED)] = None
    freshness_policy: Annotated[
        dg.FreshnessPolicy | None,
        dg.Resolver.default(
            model_field_type=Optional[str],  # noqa: UP045 - Dagster adds `| str`
            description="A template: {{ dg.FreshnessPolicy.cron(...) }}, for example.",
        ),
    ] = None
    deps: Annotated[list[dg.ResolvedAssetKey] | None, dg.Resolver.default(description=_ADDED)] = (
        None
    )
    metadata: Annotated[dict[str, Any] | None, dg.Resolver.default(description=_ADDED)] = None
    owners: Annotated[list[str] | None, setting(list[str] | None, _ADDED)] = None
    tags: Annotated[dict[str, str] | None, setting(dict[str, str] | None, _ADDED)] = None
    kinds: Annotated[list[str] | None, setting(list[str] | None, _ADDED)] = None

    def definition(self) -> dg.AssetsDefinition:
        """Return the asset."""
        attributes = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in {"function", "key"} and getattr(self, name) is not None
        }
        if isinstance(self.function, dg.AssetsDefinition):
            if self.key is not None:
                msg = (
                    f"the key {self.key.to_user_string()} is given for an @dg.asset: set the key "
                    "in the code"
                )
                raise ConfigurationError(msg)
            return _with(self.function, attributes)
        return _with(dg.asset(key=self.key)(self.function), attributes)


def _with(asset: dg.AssetsDefinition, attributes: dict[str, Any]) -> dg.AssetsDefinition:
    if not attributes:
        return asset
    merged = {name: value for name, value in attributes.items() if name in _MERGED}
    replaced = {name: value for name, value in attributes.items() if name not in _MERGED}
    return asset.map_asset_specs(
        lambda spec: spec.merge_attributes(**merged).replace_attributes(**replaced)
    )


def _batch_asset(context: dg.ResolutionContext, model: Any) -> dg.AssetsDefinition:
    if isinstance(model, str):
        model = BatchAsset.model()(function=model)
    asset: BatchAsset = BatchAsset.resolve_from_model(context, model)
    return asset.definition()


ResolvedBatchAsset: TypeAlias = Annotated[
    dg.AssetsDefinition,
    dg.Resolver(_batch_asset, model_field_type=str | BatchAsset.model()),
]
"""In YAML, a path or a block with attributes."""

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


_DECLARED = described(StreamDefsSettings)


def _argument(name: str, annotation: Any, more: str = "") -> dg.Resolver:
    """Return the resolver of an argument of the builders, with the builders' description."""
    return setting(annotation, f"{_DECLARED[name][1]} {more}".strip())


class Streaming(dg.Resolvable, dg.Model):
    """Settings of streaming runs: each is a member of the group and processes batch after batch."""

    runs: Annotated[int, _argument("runs", Annotated[int, Field(ge=0)])] = 1
    version: Annotated[str | None, _argument("version", str | None)] = None
    max_run_s: Annotated[
        float, _argument("max_run_s", Annotated[float, Field(ge=SHORTEST_RUN_S)])
    ] = 3600.0


@dg.scaffold_with(KafkaBatchScaffolder)
class KafkaBatchComponent(dg.Component, dg.Resolvable, dg.Model):
    """Processes Kafka topics with your assets, as a member of a consumer group.

    Each batch of offsets is one Dagster run; with `streaming`, a run processes many batches.
    Offsets are committed when their batch has succeeded. Revoked partitions are drained before
    their release.

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
        str | None, _argument("name", str | None, "By default kafka_batches, or kafka_stream.")
    ] = None
    kafka_key: Annotated[str, _argument("kafka_key", str)] = "kafka"
    batch_key: Annotated[str, _argument("batch_key", str)] = "kafka_batch"
    spark_key: Annotated[str, _argument("spark_key", str)] = "spark"
    registry_key: Annotated[str, setting(str, "The resource key of `registry`.")] = "registry"
    job_tags: Annotated[
        dict[str, Any],
        _argument("job_tags", dict[str, str | dict[str, Any]], "In YAML, texts or blocks."),
    ] = Field(default_factory=dict)
    lag_within_records: Annotated[
        int | None, _argument("lag_within_records", Annotated[int, Field(ge=0)] | None)
    ] = None
    lag_within_s: Annotated[
        float | None, _argument("lag_within_s", Annotated[float, Field(gt=0)] | None)
    ] = None
    commit_within_s: Annotated[
        float | None,
        _argument("commit_within_s", Annotated[float, Field(ge=SHORTEST_FRESHNESS_S)] | None),
    ] = None
    show_topics: Annotated[
        bool,
        _argument("show_topics", bool, "An asset with its own `deps` here has only those."),
    ] = True
    minimum_interval_seconds: Annotated[
        int, _argument("minimum_interval_seconds", Annotated[int, Field(ge=1)])
    ] = 5
    default_status: Annotated[
        dg.DefaultSensorStatus,
        _argument("default_status", dg.DefaultSensorStatus, "RUNNING or STOPPED."),
    ] = dg.DefaultSensorStatus.STOPPED

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """Return the model with which `dg` validates YAML."""
        return with_precise_schema(cls.model())

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return the description of the component for `dg`."""
        spec: dict[str, Any] = {"tags": ["kafka", "spark", "streaming"]}
        if hasattr(dg.ComponentTypeSpec, "produces"):  # missing in the first releases of 1.13
            spec["produces"] = ["asset", "asset_check", "job", "resource", "sensor"]
        return dg.ComponentTypeSpec(**spec)

    def batch_assets(self, context: dg.ComponentLoadContext) -> Sequence[dg.AssetsDefinition]:  # noqa: ARG002 - for subclasses
        """Return the assets that process a batch. Override to build them from other attributes."""
        return self.assets

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the group.

        Raises:
            ConfigurationError: As in `build_kafka_batch_defs` and `build_kafka_stream_defs`.
        """
        shared = _DECLARED.keys() & KafkaBatchComponent.model_fields.keys()
        arguments: dict[str, Any] = {name: getattr(self, name) for name in sorted(shared)}
        arguments["assets"] = self.batch_assets(context)
        arguments["resources"] = {} if self.registry is None else {self.registry_key: self.registry}
        if self.name is None:
            del arguments["name"]
        if self.streaming is None:
            return build_kafka_batch_defs(**arguments)
        return build_kafka_stream_defs(
            **arguments,
            runs=self.streaming.runs,
            version=self.streaming.version,
            max_run_s=self.streaming.max_run_s,
        )

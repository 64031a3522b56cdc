"""Build the `Definitions` of a consumer group: job, sensor, assets, checks and resources."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.core.streaming.replicas import Replicas
from dagster_rebalance.orchestration.batch.batch_values import with_values_by_batch
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.batch.validation import (
    check_assets,
    check_config,
    check_makes_assets,
    check_one_op,
    check_resources,
    check_retries,
    check_steps,
)
from dagster_rebalance.orchestration.builders import (
    BatchDefsSettings,
    DefsSettings,
    StreamDefsSettings,
    described,
    sensor_arguments,
    takes,
)
from dagster_rebalance.orchestration.operators.launchpad import (
    build_kafka_control_job,
    build_kafka_letters_job,
    build_kafka_rerun_job,
)
from dagster_rebalance.orchestration.per_batch.batch_sensor import (
    build_kafka_batch_sensor,
    check_lease,
)
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    build_history_checks,
    build_lag_check,
    build_stopped_check,
)
from dagster_rebalance.orchestration.reporting.letter_checks import build_letters_check
from dagster_rebalance.orchestration.resources.client_settings import pinned
from dagster_rebalance.orchestration.resources.hardcoded_secrets import (
    hardcoded_registry_secrets,
    hardcoded_secrets,
    hidden_settings,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.runs.external_jobs import stopper_of
from dagster_rebalance.orchestration.storage.failure_notes import record_cause
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import GROUP_TAG
from dagster_rebalance.orchestration.streaming.asset_calls import AssetCall, sorted_calls
from dagster_rebalance.orchestration.streaming.step import (
    RerunKafkaBatch,
    stream_asset,
    with_topics,
)
from dagster_rebalance.orchestration.streaming.stream_sensor import build_kafka_stream_sensor
from dagster_rebalance.orchestration.streaming.versions import code_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


SHORTEST_RUN_S = 60.0
"""A run that is replaced earlier would hardly have joined the group."""
SHORTEST_FRESHNESS_S = 60.0


@takes(BatchDefsSettings)
def build_kafka_batch_defs(settings: BatchDefsSettings) -> dg.Definitions:
    """Process the topics of a consumer group with assets, one run per batch of offsets.

    The assets get their offsets from the resource `kafka_batch` (a `KafkaBatch`) and, with
    `spark`, their session from the resource `spark`. All assets of a batch run in one process. If a
    code location has several groups, give each group its own name and resource keys, and merge
    their definitions with `dg.Definitions.merge`.

    Returns:
        The assets, the job, the sensor, the operator jobs (`<name>_control` pauses partitions,
        `<name>_rerun` processes past ranges again, `<name>_letters` works with dead letters), the
        assets of the group (committed offsets, members and holds, lag) with checks, and the
        resources.

    Raises:
        ConfigurationError: There is no asset; an asset does not take a batch, needs run config, or
            has partitions, an automation condition or a retry policy; a resource is configured at
            launch; the IO manager for a value between assets is missing; a name or a resource key
            is taken; a secret is hardcoded; or settings are invalid. Values of environment
            variables are checked in the first tick.
    """
    name, kafka, batch_key = settings.name, settings.kafka, settings.batch_key
    _check(settings, streams=False)
    check_lease(f"{name}_sensor", _with_known_group(kafka), settings.minimum_interval_seconds)
    _ = settings.lag_limit  # refuses an invalid one
    nodes = [asset.node_def for asset in settings.assets if asset.is_executable]
    check_steps(name, nodes, batch_key)
    check_config(name, nodes)
    check_retries(name, nodes)
    _check_keys(name, settings.kafka_key, settings.spark_key, batch_key)
    provided = _resources(settings, {batch_key: KafkaBatch(kafka=kafka)})
    provided = with_values_by_batch(name, settings.assets, provided)
    _check_resources(name, settings.assets, provided)
    topics = _topic_assets(settings)
    assets = [_downstream(asset, topics) for asset in settings.assets]
    job = dg.define_asset_job(
        name,
        selection=_without_checks_of_others(assets),
        executor_def=dg.in_process_executor,
        hooks={record_cause} if kafka.on_failure == "bisect" else None,
        tags=dict(settings.job_tags or {}),
        description=_job_description(name),
    )
    sensor = build_kafka_batch_sensor(
        name=f"{name}_sensor",
        job=job,
        spark_key=settings.own_spark_key,
        **sensor_arguments(settings),
    )
    return _definitions(settings, topics, assets, job=job, sensor=sensor, resources=provided)


@takes(StreamDefsSettings)
def build_kafka_stream_defs(settings: StreamDefsSettings) -> dg.Definitions:
    """Process the topics of a consumer group with assets in streaming runs: one run, many batches.

    A streaming run is a member of the group. It calls the asset functions for one batch after the
    other, so the overhead of a batch is hundredths of a second instead of a run launch. Several
    runs share the partitions. Nearly all assets also work with `build_kafka_batch_defs`: they get
    their offsets from the parameter `kafka_batch` (a `KafkaBatch`).

    Returns:
        The assets, the job, the sensor, the operator jobs (`<name>_control` pauses partitions,
        `<name>_rerun` processes past ranges again, `<name>_letters` works with dead letters), the
        assets of the group with checks, and the resources.

    Raises:
        ConfigurationError: There is no asset; an asset cannot be called for each batch, or has
            partitions, an automation condition, a pool or a retry policy; a resource is configured
            at launch; a name or a resource key is taken; a secret is hardcoded; or settings are
            invalid. Values of environment variables are checked in the first tick.
    """
    name, kafka, spark = settings.name, settings.kafka, settings.spark
    _check(settings, streams=True)
    limit, rerun_key = settings.lag_limit, f"{name}_rerun_batch"
    for setting, least in (("runs", 0), ("max_run_s", SHORTEST_RUN_S)):
        if (value := getattr(settings, setting)) < least:
            msg = f"{setting}={value:g} of {name} must be at least {least:g}"
            raise ConfigurationError(msg)
    _check_keys(name, settings.kafka_key, settings.spark_key, settings.batch_key, rerun_key)
    provided = _resources(settings, {rerun_key: RerunKafkaBatch(kafka=kafka)})
    stopper = stopper_of(name, settings.external_work)
    _check_resources(name, settings.assets, provided)
    calls = sorted_calls([AssetCall.of(asset, settings.batch_key) for asset in settings.assets])
    topics = _topic_assets(settings)
    streamed = stream_asset(
        name,
        calls,
        [topic.key for topic in topics],
        kafka_key=settings.kafka_key,
        rerun_key=rerun_key,
        spark_key=settings.own_spark_key,
        stopper=stopper,
        lag_limit=limit,
    )
    job_tags = settings.job_tags or {}
    job = dg.define_asset_job(
        name,
        selection=_without_checks_of_others([streamed]),
        executor_def=dg.in_process_executor,
        tags={**job_tags, GROUP_TAG: _value_of(kafka.group_id)},
        description=_job_description(name),
    )
    # Dagster has refused values that are not JSON.
    tags = json.dumps(dict(job_tags), sort_keys=True)
    registries = _registries(settings.resources)
    unshown = [
        [*hidden_settings(resource)]
        for resource in (kafka, spark, *registries.values())
        if resource is not None
    ]
    version = settings.version or code_version(
        [call.function for call in calls], f"{kafka!r} {spark!r} {registries!r} {unshown} {tags}"
    )
    replicas = Replicas(runs=settings.runs, version=version, max_run_s=settings.max_run_s)
    sensor = build_kafka_stream_sensor(settings, job, replicas, rerun_key, stopper)
    return _definitions(settings, topics, [streamed], job=job, sensor=sensor, resources=provided)


def _check_numbers(settings: DefsSettings) -> None:
    for setting, (kind, _) in described(type(settings)).items():
        value = getattr(settings, setting)
        is_whole = kind in {int, int | None}
        if value is None or not (is_whole or kind in {float, float | None}):
            continue
        is_number = isinstance(value, Integral if is_whole else Real)
        is_nan = isinstance(value, float) and math.isnan(value)
        if isinstance(value, bool) or not is_number or is_nan:
            wanted = "a whole number" if is_whole else "a number of seconds"
            msg = f"{setting}={value!r} of {settings.name} must be {wanted}"
            raise ConfigurationError(msg)


def _check(settings: DefsSettings, *, streams: bool) -> None:
    name, assets, kafka, spark = settings.name, settings.assets, settings.kafka, settings.spark
    _check_numbers(settings)
    if not assets:
        msg = f"{name} has no assets: give at least one that takes a KafkaBatch"
        raise ConfigurationError(msg)
    if isinstance(assets, dg.Definitions) or not isinstance(assets, Iterable):
        msg = f"assets of {name} is not a list: give assets=[...], also for one asset"
        raise ConfigurationError(msg)
    if not isinstance(kafka, KafkaConsumerResource):
        msg = f"kafka of {name} is a {type(kafka).__name__}: give a KafkaConsumerResource"
        raise ConfigurationError(msg)
    if spark is not None and not isinstance(spark, KafkaSparkResource):
        msg = (
            f"spark of {name} is a {type(spark).__name__}: give a KafkaSparkResource. Another "
            "resource, such as one of dagster-pyspark, belongs into `resources`"
        )
        raise ConfigurationError(msg)
    check_makes_assets(name, assets)
    if any(key.path[-1] == name for asset in assets for key in asset.keys):
        msg = f"{name} is the name of an asset and of the job: give the definitions another name"
        raise ConfigurationError(msg)
    check_assets(name, assets)
    executable = [asset.node_def for asset in assets if asset.is_executable]
    check_one_op(name, executable, kafka.on_failure)
    kafka.check_functions()
    if kafka.has_literal_engine_settings:
        engine = _with_known_group(kafka).engine_settings(streams=streams)
        _check_freshness(settings.commit_within_s, engine.record_every_s)
    _check_secrets(name, hardcoded_secrets(kafka, spark))
    _with_known_group(kafka).check_client()


def _check_freshness(commit_within_s: float | None, record_every_s: float) -> None:
    _freshness(commit_within_s)
    if commit_within_s is not None and commit_within_s <= record_every_s:
        msg = (
            f"commit_within_s={commit_within_s:g} must be above record_every_s={record_every_s:g}, "
            "in which the commits of a partition share one record: raise it, or lower "
            "record_every_s"
        )
        raise ConfigurationError(msg)


def _check_secrets(name: str, written: Iterable[str]) -> None:
    for setting in written:
        msg = (
            f"{setting} of {name} is plain text in the code. "
            "Put the secret into an environment variable, and give it as dg.EnvVar with the "
            "variable's name (in YAML: only '{{ env.NAME }}')"
        )
        raise ConfigurationError(msg)


def _check_keys(name: str, *keys: str) -> None:
    for key, times in Counter(keys).items():
        if times > 1:
            msg = f"the resource key {key!r} of {name} is used twice: choose another one"
            raise ConfigurationError(msg)


def _resources(settings: DefsSettings, batch: Mapping[str, KafkaBatch]) -> dict[str, Any]:
    """Return all resources. Run config cannot change the resources of this package."""
    name, others = settings.name, settings.resources or {}
    given = {settings.kafka_key: settings.kafka, settings.spark_key: settings.spark}
    own: dict[str, Any] = {key: pinned(one) for key, one in given.items() if one is not None}
    own |= batch
    taken = sorted((own.keys() | {settings.batch_key}) & others.keys())
    if taken:
        msg = f"the resource key {taken[0]!r} is used by {name} itself: choose another one"
        raise ConfigurationError(msg)
    registries = _registries(others)
    for key, registry in registries.items():
        _check_secrets(name, hardcoded_registry_secrets(key, registry))
    return {**own, **others, **{key: pinned(one) for key, one in registries.items()}}


def _check_resources(
    name: str, assets: Iterable[dg.AssetsDefinition], provided: Mapping[str, Any]
) -> None:
    for asset in assets:
        check_resources(name, asset.required_resource_keys, {**provided, **asset.resource_defs})


def _registries(others: Mapping[str, Any] | None) -> dict[str, SchemaRegistryResource]:
    return {
        key: resource
        for key, resource in (others or {}).items()
        if isinstance(resource, SchemaRegistryResource)
    }


def _job_description(name: str) -> str:
    return (
        f"Processes batches of Kafka records. The sensor {name}_sensor starts its runs: turn the "
        f"sensor on, and do not launch this job. The job {name}_rerun processes past ranges again."
    )


def _without_checks_of_others(assets: Sequence[dg.AssetsDefinition]) -> dg.AssetSelection:
    """Select the assets and the checks in their check_specs.

    An asset check that is defined separately takes no batch. A streaming run would wait for it.
    """
    own = [spec.key for asset in assets for spec in asset.check_specs]
    return dg.AssetSelection.assets(*assets).without_checks() | dg.AssetSelection.checks(*own)


def _topic_assets(settings: DefsSettings) -> list[dg.AssetSpec]:
    """Return the topics as external assets, except for patterns and unset variables.

    Groups that read the same topic declare equal assets, which Dagster treats as one.
    """
    topics = settings.kafka.topics if settings.show_topics else []
    given = (topic.get_value() if isinstance(topic, dg.EnvVar) else topic for topic in topics)
    known = [topic for topic in given if topic]
    names = Topics.of(known).names if known else ()
    return [
        dg.AssetSpec(
            dg.AssetKey(["kafka_topics", topic]),
            description=f"The Kafka topic {topic}.",
            group_name="streaming",
            kinds={"kafka"},
        )
        for topic in names
    ]


def _downstream(asset: dg.AssetsDefinition, topics: Sequence[dg.AssetSpec]) -> dg.AssetsDefinition:
    """Return the asset with the topics as upstream deps, if Dagster can add them.

    An asset with an input that loads another asset is unchanged: a new dep would replace the input.
    """
    if (
        not asset.is_executable
        or not isinstance(asset.node_def, dg.OpDefinition)
        or any(not taken.dagster_type.is_nothing for taken in asset.node_def.input_defs)
    ):
        return asset
    keys = [topic.key for topic in topics]
    try:
        return asset.map_asset_specs(lambda spec: with_topics(spec, keys))
    except KeyError:  # its deps were changed after its definition, which Dagster does only once
        return asset


def _definitions(
    settings: DefsSettings,
    topics: Sequence[dg.AssetSpec],
    assets: Sequence[dg.AssetsDefinition],
    *,
    job: dg.UnresolvedAssetJobDefinition,
    sensor: dg.SensorDefinition,
    resources: Mapping[str, Any],
) -> dg.Definitions:
    name, kafka_key, lag_limit = settings.name, settings.kafka_key, settings.lag_limit
    group_id = _value_of(settings.kafka.group_id)
    group = GroupAssets.of(group_id)
    offsets = dg.AssetSpec(
        group.offsets,
        deps=[key for asset in assets for key in asset.keys],
        partitions_def=dg.DynamicPartitionsDefinition(name=group.partitions_name),
        description=(
            f"The committed offsets of consumer group {group_id}. A materialization shows a commit "
            "of one partition, or all its commits within record_every_s (600 s in streaming "
            "runs). The check no_partition_stopped shows why partitions are stopped and what to "
            f"do. The asset {group.lag.to_user_string()} shows the lag of the group, and "
            f"{group.group.to_user_string()} its members."
        ),
        group_name="streaming",
        kinds={"kafka"},
        freshness_policy=_freshness(settings.commit_within_s),
    )
    members = dg.AssetSpec(
        group.group,
        description=(
            f"The members of consumer group {group_id}. The newest observation has three tables: "
            "members (the partitions of each member), open_holds (partitions that Kafka wants to "
            "move, and the runs that their owner waits for), and receipts (how the last holds "
            "ended)."
        ),
        group_name="streaming",
        kinds={"kafka"},
    )
    lag = dg.AssetSpec(
        group.lag,
        description=(
            f"The lag of consumer group {group_id}: offsets in Kafka that are not committed. Plots "
            "shows it over time. In an observation, the table largest shows the partitions with "
            "the largest lag, the runs on them, and why they are stopped or paused."
        ),
        group_name="streaming",
        kinds={"kafka"},
    )

    def catalogue_of(instance: dg.DagsterInstance) -> Catalogue:
        return Catalogue(instance, group, NO_MEMBER)

    checks = [
        build_stopped_check(group.offsets, kafka_key, catalogue_of),
        *build_history_checks(group.offsets, group.group, kafka_key),
    ]
    if lag_limit:
        checks.append(build_lag_check(group.lag, kafka_key, lag_limit, catalogue_of))
    letters = [_letters_asset(group, group_id)] if settings.kafka.dead_letter_topic else []
    checks += [build_letters_check(one.key, kafka_key) for one in letters]
    return dg.Definitions(
        assets=[*assets, *topics, offsets, members, lag, *letters],
        asset_checks=checks,
        jobs=[
            job,
            build_kafka_control_job(name=f"{name}_control", kafka_key=kafka_key),
            build_kafka_rerun_job(name=f"{name}_rerun", kafka_key=kafka_key),
            build_kafka_letters_job(name=f"{name}_letters", kafka_key=kafka_key),
        ],
        sensors=[sensor],
        resources=dict(resources),
    )


def _letters_asset(group: GroupAssets, group_id: str) -> dg.AssetSpec:
    return dg.AssetSpec(
        group.letters,
        description=(
            f"The open dead letters of consumer group {group_id}: records and ranges that were set "
            "aside and are neither replayed nor discarded. Plots shows their number over time. In "
            "an observation, the table largest shows their partitions and reasons."
        ),
        group_name="streaming",
        kinds={"kafka"},
    )


def _freshness(commit_within_s: float | None) -> dg.FreshnessPolicy | None:
    if commit_within_s is None:
        return None
    if commit_within_s < SHORTEST_FRESHNESS_S:
        msg = (
            f"commit_within_s={commit_within_s:g} must be at least {SHORTEST_FRESHNESS_S:g}, the "
            "shortest time that Dagster supports"
        )
        raise ConfigurationError(msg)
    return dg.FreshnessPolicy.time_window(fail_window=timedelta(seconds=commit_within_s))


def _with_known_group(kafka: KafkaConsumerResource) -> KafkaConsumerResource:
    """Return the resource with its group id resolved, as messages show it."""
    return kafka.model_copy(update={"group_id": _value_of(kafka.group_id)})


def _value_of(setting: str) -> str:
    """Return the value of a setting that names assets, so it is needed at load time."""
    if not isinstance(setting, dg.EnvVar):
        return setting
    value = setting.get_value()
    if not value:
        msg = (
            f"group_id is taken from the environment variable {setting.env_var_name}, which is not "
            "set"
        )
        raise ConfigurationError(msg)
    return value

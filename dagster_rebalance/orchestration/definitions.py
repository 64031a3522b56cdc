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
from dagster_rebalance.core.reporting.lag import LagLimit
from dagster_rebalance.core.streaming.replicas import Replicas
from dagster_rebalance.orchestration.batch.batch_values import with_values_by_batch
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.batch.validation import (
    check_assets,
    check_config,
    check_resources,
    check_retries,
    check_steps,
)
from dagster_rebalance.orchestration.operators.launchpad import (
    build_kafka_control_job,
    build_kafka_rerun_job,
)
from dagster_rebalance.orchestration.per_batch.sensor import build_kafka_batch_sensor, check_lease
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    build_history_checks,
    build_lag_check,
    build_stopped_check,
)
from dagster_rebalance.orchestration.resources.hardcoded_secrets import (
    hardcoded_registry_secrets,
    hardcoded_secrets,
    hidden_settings,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.pinned_resource import pinned
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.runs.external_jobs import stopper_of
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import GROUP_TAG
from dagster_rebalance.orchestration.streaming.asset_calls import AssetCall, sorted_calls
from dagster_rebalance.orchestration.streaming.asset_forms import check_makes_assets
from dagster_rebalance.orchestration.streaming.code_version import code_version
from dagster_rebalance.orchestration.streaming.sensor import build_kafka_stream_sensor
from dagster_rebalance.orchestration.streaming.step import (
    RerunKafkaBatch,
    stream_asset,
    with_topics,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster_rebalance.orchestration.runs.external_jobs import ExternalWork

SHORTEST_RUN_S = 60.0
"""A run that is replaced earlier would hardly have joined the group."""
SHORTEST_FRESHNESS_S = 60.0


def build_kafka_batch_defs(
    *,
    kafka: KafkaConsumerResource,
    assets: Sequence[dg.AssetsDefinition],
    spark: KafkaSparkResource | None = None,
    name: str = "kafka_batches",
    kafka_key: str = "kafka",
    batch_key: str = "kafka_batch",
    spark_key: str = "spark",
    resources: Mapping[str, Any] | None = None,
    external_work: Sequence[ExternalWork] = (),
    job_tags: Mapping[str, Any] | None = None,
    lag_within_records: int | None = None,
    lag_within_s: float | None = None,
    commit_within_s: float | None = None,
    show_topics: bool = True,
    minimum_interval_seconds: int = 5,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.Definitions:
    """Process the topics of a consumer group with assets, one run per batch of offsets.

    The assets take their offsets from the resource `kafka_batch` (a `KafkaBatch`) and, with
    `spark`, their session from the resource `spark`. All assets of a batch run in one process. For
    several groups in one code location, give each its own name and resource keys, and join them
    with `dg.Definitions.merge`.

    Args:
        kafka: The group to join.
        assets: The assets that process a batch.
        spark: The Spark session of a run.
        name: The name of the job, which no asset may have. The sensor is named `<name>_sensor`.
        kafka_key: The resource key of `kafka`.
        batch_key: The resource key of the `KafkaBatch`, as the assets use it.
        spark_key: The resource key of `spark`.
        resources: Further resources of the assets. The config of a run cannot change a
            `SchemaRegistryResource`. An IO manager through which an asset takes the value of
            another must be among them, except Dagster's default: values are stored per batch
            (`values_by_batch`).
        external_work: Stops the external work of a run that did not succeed, such as jobs of a
            Pipes client, before its batch is requested again.
        job_tags: Tags of each run. Dagster stores other values than strings as JSON.
        lag_within_records: The check `lag_within` fails while more offsets wait in all partitions
            together. Without this and `lag_within_s` there is no such check.
        lag_within_s: The check `lag_within` fails while a record waits for longer, by its
            timestamp.
        commit_within_s: Dagster's freshness policy shows the committed offsets as stale when no
            commit was recorded for longer. At least 60; for topics that always receive records.
        show_topics: Whether the topics are upstream of the assets in the lineage. An asset that
            takes the value of another cannot get them. Dagster changes the deps of an asset only
            once: turn it off if something else changes them.
        minimum_interval_seconds: Seconds between ticks of the sensor; below 5 has no effect.
        default_status: Whether the sensor is on from the start.

    Returns:
        The assets, the job, the sensor, the jobs of operators (`<name>_control` pauses partitions,
        `<name>_rerun` processes past ranges again), the assets of the group (committed offsets,
        members and holds, lag) with checks, and the resources.

    Raises:
        ConfigurationError: There is no asset; an asset does not take a batch, needs run config, or
            has partitions, an automation condition or a retry policy; a resource is configured at
            launch; the IO manager of a value between assets is missing; a name or a resource key is
            taken; a secret is written in the code; or settings are invalid. Values of environment
            variables are checked in the first tick.
    """
    _check_numbers(
        name,
        whole={
            "lag_within_records": lag_within_records,
            "minimum_interval_seconds": minimum_interval_seconds,
        },
        seconds={"lag_within_s": lag_within_s, "commit_within_s": commit_within_s},
    )
    _check(name, assets, kafka, spark, streams=False)
    check_lease(f"{name}_sensor", _with_known_group(kafka), minimum_interval_seconds)
    limit = LagLimit(lag_within_records, lag_within_s)
    topics = _topic_assets(kafka) if show_topics else []
    nodes = [asset.node_def for asset in assets if asset.is_executable]
    check_steps(name, nodes, batch_key)
    check_config(name, nodes)
    check_retries(name, nodes)
    _check_keys(name, kafka_key, spark_key, batch_key)
    provided = _resources(
        name,
        {kafka_key: kafka, spark_key: spark},
        resources,
        batch_key,
        **{batch_key: KafkaBatch(kafka=kafka)},
    )
    provided = with_values_by_batch(name, assets, provided)
    _check_resources(name, assets, provided)
    assets = [_downstream(asset, topics) for asset in assets]
    job = dg.define_asset_job(
        name,
        selection=_without_checks_of_others(assets),
        executor_def=dg.in_process_executor,
        tags=dict(job_tags or {}),
    )
    sensor = build_kafka_batch_sensor(
        name=f"{name}_sensor",
        job=job,
        kafka_key=kafka_key,
        batch_key=batch_key,
        spark_key=None if spark is None else spark_key,
        external_work=external_work,
        lag_within_records=lag_within_records,
        lag_within_s=lag_within_s,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
    )
    return _definitions(
        name,
        kafka,
        kafka_key,
        limit,
        commit_within_s,
        topics=topics,
        assets=assets,
        job=job,
        sensor=sensor,
        resources=provided,
    )


def build_kafka_stream_defs(
    *,
    kafka: KafkaConsumerResource,
    assets: Sequence[dg.AssetsDefinition],
    spark: KafkaSparkResource | None = None,
    runs: int = 1,
    name: str = "kafka_stream",
    version: str | None = None,
    max_run_s: float = 3600.0,
    kafka_key: str = "kafka",
    batch_key: str = "kafka_batch",
    spark_key: str = "spark",
    resources: Mapping[str, Any] | None = None,
    external_work: Sequence[ExternalWork] = (),
    job_tags: Mapping[str, Any] | None = None,
    lag_within_records: int | None = None,
    lag_within_s: float | None = None,
    commit_within_s: float | None = None,
    show_topics: bool = True,
    minimum_interval_seconds: int = 5,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.Definitions:
    """Process the topics of a consumer group with assets in streaming runs: one run, many batches.

    A streaming run is a member of the group. It calls the function of each asset for one batch
    after the other, so a batch costs hundredths of a second instead of the start of a run. Several
    runs share the partitions. The assets are the same as for `build_kafka_batch_defs`: they take
    their offsets from the parameter `kafka_batch` (a `KafkaBatch`).

    Args:
        kafka: The group to join.
        assets: The assets that process a batch. Each is made by one decorated function that returns
            nothing or `dg.MaterializeResult`.
        spark: The Spark session of a run, shared by its batches.
        runs: The number of streaming runs.
        name: The name of the job, which no asset may have. The sensor is named `<name>_sensor`.
        version: The version of the code. Runs of another version are replaced one after the other.
            By default a digest of the settings and of the source files of the assets.
        max_run_s: Runs that are older are replaced in the same way.
        kafka_key: The resource key of `kafka`.
        batch_key: The name of the batch in the assets.
        spark_key: The resource key of `spark`.
        resources: Further resources of the assets, which live as long as the run. The config of a
            run cannot change a `SchemaRegistryResource`.
        external_work: Stops the external work of a batch that did not succeed, such as jobs of a
            Pipes client, before the batch is retried.
        job_tags: Tags of each run. Dagster stores other values than strings as JSON.
        lag_within_records: The check `lag_within` fails while more offsets wait in all partitions
            together. Without this and `lag_within_s` there is no such check.
        lag_within_s: The check `lag_within` fails while a record waits for longer, by its
            timestamp.
        commit_within_s: Dagster's freshness policy shows the committed offsets as stale when no
            commit was recorded for longer. At least 60; for topics that always receive records.
        show_topics: Whether the topics are upstream of the assets in the lineage. Dagster changes
            the deps of an asset only once: turn it off if something else changes them.
        minimum_interval_seconds: Seconds between ticks of the sensor, which starts the runs.
        default_status: Whether the sensor is on from the start.

    Returns:
        The assets, the job, the sensor, the jobs of operators (`<name>_control` pauses partitions,
        `<name>_rerun` processes past ranges again), the assets of the group with checks, and the
        resources.

    Raises:
        ConfigurationError: There is no asset; an asset cannot be called for each batch, or has
            partitions, an automation condition, a pool or a retry policy; a resource is configured
            at launch; a name or a resource key is taken; a secret is written in the code; or
            settings are invalid. Values of environment variables are checked in the first tick.
    """
    _check_numbers(
        name,
        whole={
            "runs": runs,
            "lag_within_records": lag_within_records,
            "minimum_interval_seconds": minimum_interval_seconds,
        },
        seconds={
            "max_run_s": max_run_s,
            "lag_within_s": lag_within_s,
            "commit_within_s": commit_within_s,
        },
    )
    _check(name, assets, kafka, spark, streams=True)
    limit = LagLimit(lag_within_records, lag_within_s)
    for setting, value, least in (("runs", runs, 0), ("max_run_s", max_run_s, SHORTEST_RUN_S)):
        if value < least:
            msg = f"{setting}={value:g} of {name} must be at least {least:g}"
            raise ConfigurationError(msg)
    rerun_key = f"{name}_rerun_batch"
    _check_keys(name, kafka_key, spark_key, batch_key, rerun_key)
    provided = _resources(
        name,
        {kafka_key: kafka, spark_key: spark},
        resources,
        batch_key,
        **{rerun_key: RerunKafkaBatch(kafka=kafka)},
    )
    stopper = stopper_of(name, external_work)
    _check_resources(name, assets, provided)
    calls = sorted_calls([AssetCall.of(asset, batch_key) for asset in assets])
    topics = _topic_assets(kafka) if show_topics else []
    registries = _registries(resources)
    unshown = [
        [*hidden_settings(resource)]
        for resource in (kafka, spark, *registries.values())
        if resource is not None
    ]
    streamed = stream_asset(
        name,
        calls,
        [topic.key for topic in topics],
        kafka_key=kafka_key,
        rerun_key=rerun_key,
        spark_key=None if spark is None else spark_key,
        stopper=stopper,
        lag_limit=limit,
    )
    job = dg.define_asset_job(
        name,
        selection=_without_checks_of_others([streamed]),
        executor_def=dg.in_process_executor,
        tags={**(job_tags or {}), GROUP_TAG: _value_of(kafka.group_id)},
    )
    # What is no JSON was refused by Dagster.
    tags = json.dumps(dict(job_tags or {}), sort_keys=True)
    settings = f"{kafka!r} {spark!r} {registries!r} {unshown} {tags}"
    sensor = build_kafka_stream_sensor(
        name=f"{name}_sensor",
        job=job,
        replicas=Replicas(
            runs=runs,
            version=version or code_version([call.function for call in calls], settings),
            max_run_s=max_run_s,
        ),
        rerun_key=rerun_key,
        kafka_key=kafka_key,
        spark_key=None if spark is None else spark_key,
        stopper=stopper,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
    )
    return _definitions(
        name,
        kafka,
        kafka_key,
        limit,
        commit_within_s,
        topics=topics,
        assets=[streamed],
        job=job,
        sensor=sensor,
        resources=provided,
    )


def _check_numbers(
    name: str, *, whole: Mapping[str, object], seconds: Mapping[str, object]
) -> None:
    wholes, reals = (whole, Integral, "a whole number"), (seconds, Real, "a number of seconds")
    for given, kind, wanted in (wholes, reals):
        for setting, value in given.items():
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            is_nan = isinstance(value, float) and math.isnan(value)
            if value is not None and (not is_number or is_nan):
                msg = f"{setting}={value!r} of {name} must be {wanted}"
                raise ConfigurationError(msg)


def _check(
    name: str,
    assets: Sequence[dg.AssetsDefinition],
    kafka: KafkaConsumerResource,
    spark: KafkaSparkResource | None,
    *,
    streams: bool,
) -> None:
    if not assets:
        msg = f"{name} has no assets: give at least one that takes a KafkaBatch"
        raise ConfigurationError(msg)
    if isinstance(assets, dg.Definitions) or not isinstance(assets, Iterable):
        msg = f"assets of {name} is no list: give assets=[...], also for one asset"
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
    kafka.check_functions()
    if kafka.has_literal_engine_settings:
        _with_known_group(kafka).engine_settings(streams=streams)
    _check_secrets(name, hardcoded_secrets(kafka, spark))
    _with_known_group(kafka).check_client()


def _check_secrets(name: str, written: Iterable[str]) -> None:
    for setting in written:
        msg = (
            f"{setting} of {name} is given as a plain text in the code. "
            "Put the secret into an environment variable, and give it as dg.EnvVar with the "
            "variable's name (in YAML: '{{ env.NAME }}', and nothing else in the text)"
        )
        raise ConfigurationError(msg)


def _check_keys(name: str, *keys: str) -> None:
    for key, times in Counter(keys).items():
        if times > 1:
            msg = f"the resource key {key!r} of {name} stands for two things: choose another one"
            raise ConfigurationError(msg)


def _resources(
    name: str,
    given: Mapping[str, Any],
    others: Mapping[str, Any] | None,
    batch_key: str,
    **more: Any,  # noqa: ANN401 - resources have no common type
) -> dict[str, Any]:
    """Return all resources. The config of a run cannot change those of this package."""
    own = {key: pinned(resource) for key, resource in given.items() if resource is not None} | more
    taken = sorted((own.keys() | {batch_key}) & (others or {}).keys())
    if taken:
        msg = f"the resource key {taken[0]!r} is used by {name} itself: choose another one"
        raise ConfigurationError(msg)
    registries = _registries(others)
    for key, registry in registries.items():
        _check_secrets(name, hardcoded_registry_secrets(key, registry))
    return {**own, **(others or {}), **{key: pinned(one) for key, one in registries.items()}}


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


def _without_checks_of_others(assets: Sequence[dg.AssetsDefinition]) -> dg.AssetSelection:
    """Select the assets and the checks in their check_specs.

    A check that is defined apart takes no batch, and a streaming run would wait for its output.
    """
    own = [spec.key for asset in assets for spec in asset.check_specs]
    return dg.AssetSelection.assets(*assets).without_checks() | dg.AssetSelection.checks(*own)


def _topic_assets(kafka: KafkaConsumerResource) -> list[dg.AssetSpec]:
    """Return the topics as external assets, without patterns and unset environment variables.

    The assets of groups that read the same topic are equal, so Dagster takes them for one.
    """
    given = (topic.get_value() if isinstance(topic, dg.EnvVar) else topic for topic in kafka.topics)
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
    """Return the asset with the topics upstream, where Dagster can add them.

    A new dep would replace an input that takes the value of another asset.
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
    name: str,
    kafka: KafkaConsumerResource,
    kafka_key: str,
    lag_limit: LagLimit,
    commit_within_s: float | None,
    *,
    topics: Sequence[dg.AssetSpec],
    assets: Sequence[dg.AssetsDefinition],
    job: Any,  # noqa: ANN401 - dagster exports no name for an asset job
    sensor: dg.SensorDefinition,
    resources: Mapping[str, Any],
) -> dg.Definitions:
    group_id = _value_of(kafka.group_id)
    group = GroupAssets.of(group_id)
    offsets = dg.AssetSpec(
        group.offsets,
        deps=[key for asset in assets for key in asset.keys],
        partitions_def=dg.DynamicPartitionsDefinition(name=group.partitions_name),
        description=(
            f"The committed offsets of consumer group {group_id}. Each materialisation is a commit "
            "of one partition, or all its commits within record_every_s, which is 10 s in "
            "streaming runs. It has the lag of the partition. If a partition is stopped, the "
            "check no_partition_stopped has the reason and the remedy. The asset "
            f"{group.lag.to_user_string()} shows the lag of the whole group, and "
            f"{group.group.to_user_string()} the members and their partitions."
        ),
        group_name="streaming",
        kinds={"kafka"},
        freshness_policy=_freshness(commit_within_s),
    )
    members = dg.AssetSpec(
        group.group,
        description=(
            f"The members of consumer group {group_id}, as observations. The newest one has three "
            "tables: members (the partitions of each member), open_holds (partitions that are "
            "being revoked, and the runs that the holds wait for), and receipts (the outcomes of "
            "the last holds)."
        ),
        group_name="streaming",
        kinds={"kafka"},
    )
    lag = dg.AssetSpec(
        group.lag,
        description=(
            f"The lag of consumer group {group_id}, as observations. Plots shows it over time. The "
            "table largest shows the partitions with the largest lag, the runs on them, and why "
            "they are stopped."
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
    return dg.Definitions(
        assets=[*assets, *topics, offsets, members, lag],
        asset_checks=checks,
        jobs=[
            job,
            build_kafka_control_job(name=f"{name}_control", kafka_key=kafka_key),
            build_kafka_rerun_job(name=f"{name}_rerun", kafka_key=kafka_key),
        ],
        sensors=[sensor],
        resources=dict(resources),
    )


def _freshness(commit_within_s: float | None) -> dg.FreshnessPolicy | None:
    if commit_within_s is None:
        return None
    if commit_within_s < SHORTEST_FRESHNESS_S:
        msg = (
            f"commit_within_s={commit_within_s:g} must be at least {SHORTEST_FRESHNESS_S:g}, the "
            "shortest time that Dagster takes"
        )
        raise ConfigurationError(msg)
    return dg.FreshnessPolicy.time_window(fail_window=timedelta(seconds=commit_within_s))


def _with_known_group(kafka: KafkaConsumerResource) -> KafkaConsumerResource:
    """Return the resource with the value of its group id, which messages show."""
    return kafka.model_copy(update={"group_id": _value_of(kafka.group_id)})


def _value_of(setting: str) -> str:
    """Return the value of a setting that names assets, so it is needed at load time.

    Raises:
        ConfigurationError: Its environment variable is not set.
    """
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

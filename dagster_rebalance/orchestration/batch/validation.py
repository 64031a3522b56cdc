"""Checks of assets and of their job, in both forms of run.

Only the sensor requests runs with a batch, so nothing else may materialize the assets. A
`KafkaBatch` performs the start check, sends heartbeats and records the end of the run, in one
process, for the steps that require it. A run of other steps only, as by "re-execute from failure",
has no `KafkaBatch`. A streaming run calls the asset functions, so it refuses more kinds of assets.

Each refusal names the asset and an alternative. `test_asset_table.py` covers every form that
Dagster documents, and generates the table in docs/assets.md.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_CONCURRENCY_TAG = "dagster/concurrency_key"
"""The op tag by which Dagster assigned pools before it had the argument `pool`."""
_IO_MANAGER_KEY = dg.Out().io_manager_key
_CONTAINERS = (list, tuple, Union)


def check_assets(name: str, assets: Iterable[dg.AssetsDefinition]) -> None:
    """Check that only the sensor requests runs of the assets, and decides their input."""
    for asset in (asset for asset in assets if asset.is_executable):
        for spec in asset.specs:
            if spec.partitions_def is not None:
                msg = (
                    f"asset {spec.key.to_user_string()} of {name} has a partitions_def, but its "
                    "runs have no partition: the batch defines the input. Remove it, and key the "
                    "output by the ranges of the batch. For an output by day, define the "
                    "partitions on an asset downstream of this one"
                )
                raise ConfigurationError(msg)
        conditions = {
            f"asset {spec.key.to_user_string()}": spec.automation_condition for spec in asset.specs
        }
        for check in asset.check_specs:
            what = f"check {check.name} of asset {check.asset_key.to_user_string()}"
            conditions[what] = check.automation_condition
        for what, condition in conditions.items():
            if condition is not None:
                msg = (
                    f"{what} of {name} has an automation_condition, which would start runs without "
                    f"a batch: remove it. The sensor {name}_sensor requests a run when there are "
                    "records; downstream assets may have a condition, such as "
                    "dg.AutomationCondition.eager().without("
                    "~dg.AutomationCondition.any_deps_in_progress()), since this asset is nearly "
                    "always in progress"
                )
                raise ConfigurationError(msg)


def check_executor(name: str, job: dg.JobDefinition | dg.UnresolvedAssetJobDefinition) -> None:
    """Check that one process executes all steps of a run."""
    executor = job.executor_def
    if executor is None or executor.name != dg.in_process_executor.name:
        msg = (
            f"the job {job.name} of sensor {name} runs its steps in separate processes, and no "
            "process would send heartbeats between two steps: give the job "
            "executor_def=dg.in_process_executor. Spark provides the parallelism"
        )
        raise ConfigurationError(msg)


def check_steps(job: str, nodes: Iterable[object], batch_key: str) -> None:
    """Check that each step requires the batch, the resource `batch_key`."""
    for op in ops_of(nodes):
        if batch_key not in op.required_resource_keys:
            msg = (
                f"{op.name} of job {job} does not take the resource {batch_key!r}. Dagster can "
                "re-execute it alone, and that run would have no start check and send no "
                f"heartbeats: give it a parameter `{batch_key}: KafkaBatch`, or materialize it in "
                "another job that runs after this one"
            )
            raise ConfigurationError(msg)


def check_one_op(job: str, nodes: Iterable[object], on_failure: str) -> None:
    """Check that a bisected batch is processed by one op only.

    If a later op raises, an earlier one may have published a range of which the halves follow.
    """
    names = [op.name for op in ops_of(nodes)]
    if on_failure == "bisect" and len(names) > 1:
        msg = (
            f"job {job} has the ops {', '.join(names)}, and on_failure='bisect' allows one: if a "
            "later one raises, the parts of a range would be added to the output that an earlier "
            "one has written for the whole range. Process the batch in one function (@dg.asset, "
            "@dg.multi_asset), or set on_failure to 'pause' or 'dead_letter'"
        )
        raise ConfigurationError(msg)


def check_config(job: str, nodes: Iterable[object]) -> None:
    """Check that no step requires run config: the sensor only sets the batch."""
    for node in nodes:
        if not isinstance(node, dg.OpDefinition):
            continue  # a graph may give config to its own ops
        if node.config_field is not None and node.config_field.is_required:
            msg = (
                f"{node.name} of job {job} needs run config, but the sensor only sets the batch, "
                "so no run would start: give each value a default, or give the asset a resource "
                "with these values"
            )
            raise ConfigurationError(msg)


def check_resources(job: str, keys: Iterable[str], resources: Mapping[str, object]) -> None:
    """Check that no resource requires run config: the sensor only sets the batch."""
    left, seen = list(keys), set[str]()
    while left:
        key = left.pop()
        definition = definition_of(resources.get(key))
        if key in seen or definition is None:
            continue
        seen.add(key)
        left += definition.required_resource_keys
        inside = getattr(definition, "nested_partial_resources", {})
        for one in (definition, *map(definition_of, inside.values())):
            if one is not None and one.config_field is not None and one.config_field.is_required:
                msg = (
                    f"the resource {key!r} of job {job} is configured at launch, but the sensor "
                    "only sets the batch, so no run would start: give its values in its "
                    "definition, such as dg.EnvVar for an environment variable"
                )
                raise ConfigurationError(msg)


def check_merged_resources(context: dg.SensorEvaluationContext, name: str) -> None:
    """Check the resources of a job, including those of merged definitions."""
    if context.repository_def is not None:
        job = context.repository_def.get_job(name)
        check_resources(job.name, job.required_resource_keys, job.resource_defs)


def definition_of(resource: object) -> dg.ResourceDefinition | None:
    """Return the definition of a resource of any kind; None for a plain object."""
    if isinstance(resource, dg.ResourceDefinition):
        return resource
    make = getattr(resource, "get_resource_definition", None)
    definition: dg.ResourceDefinition | None = make() if callable(make) else None
    return definition


def check_retries(
    job: str, nodes: Iterable[object], job_policy: dg.RetryPolicy | None = None
) -> None:
    """Check that Dagster never retries a step in the same run.

    A retry policy also applies to interrupts: a run that is cancelled for a hold, or whose lease
    has expired, would repeat its work and succeed.
    """
    owners = [f"{step} of job {job}" for step in _with_policy(nodes)]
    if job_policy is not None:
        owners.append(f"job {job}")
    if owners:
        msg = (
            f"{owners[0]} has a retry_policy: Dagster would retry the step in the same run, even "
            "after an interrupt for a rebalance. Remove the policy: a failed batch is retried in "
            "another run (max_attempts and retry_delay_s of the KafkaConsumerResource)"
        )
        raise ConfigurationError(msg)


def _with_policy(nodes: Iterable[object]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, dg.GraphDefinition):
            yield from (inner.name for inner in node.nodes if inner.retry_policy is not None)
            yield from _with_policy(node.node_defs)
        elif isinstance(node, dg.OpDefinition) and node.retry_policy is not None:
            yield node.name


def ops_of(nodes: Iterable[object]) -> Iterator[dg.OpDefinition]:
    """Yield all ops of some nodes, including those in graphs."""
    for node in nodes:
        if isinstance(node, dg.GraphDefinition):
            yield from ops_of(node.node_defs)
        elif isinstance(node, dg.OpDefinition):
            yield node


def check_makes_assets(name: str, assets: Iterable[object]) -> None:
    """Check that a run can materialize each definition, and that no key is defined twice."""
    made: dict[str, dg.AssetKey] = {}
    for asset in assets:
        if isinstance(asset, dg.AssetChecksDefinition):
            checks = ", ".join(sorted(spec.name for spec in asset.check_specs))
            msg = (
                f"assets of {name} has the asset check {checks}, which takes no batch: declare it "
                "in check_specs of its asset, or give it to dg.Definitions(asset_checks=[...]) "
                "with a job for dg.AssetSelection.checks(...)"
            )
            raise ConfigurationError(msg)
        if isinstance(asset, dg.AssetSpec | dg.SourceAsset):
            raise _not_materialized(name, asset.key.to_user_string())
        if not isinstance(asset, dg.AssetsDefinition):
            msg = (
                f"assets of {name} has {asset!r}, which cannot process a batch: give functions "
                "with @dg.asset or another asset decorator"
            )
            raise ConfigurationError(msg)
        if not asset.is_materializable:
            raise _not_materialized(name, name_of(asset))
        for key in asset.keys:
            _check_is_new(name, key, made)


def _check_is_new(name: str, key: dg.AssetKey, made: dict[str, dg.AssetKey]) -> None:
    """Check that no earlier definition has this key, or a key with the same op name."""
    identifier = key.to_python_identifier()
    other = made.get(identifier)
    made[identifier] = key
    if other is not None:
        shown = " and ".join(dict.fromkeys(one.to_user_string() for one in (other, key)))
        msg = (
            f"assets of {name} has two definitions of {shown}: Dagster needs one definition per "
            "asset, and treats / and __ in keys as the same. Remove one, or give it another key"
        )
        raise ConfigurationError(msg)


def _not_materialized(name: str, shown: str) -> ConfigurationError:
    return ConfigurationError(
        f"assets of {name} has the external asset {shown}, which no batch materializes: give it to "
        "dg.Definitions(assets=[...]) beside these definitions, and name it in the deps of the "
        "asset that reads it"
    )


def name_of(asset: dg.AssetsDefinition) -> str:
    """Return the keys of an asset as a text."""
    return ", ".join(sorted(key.to_user_string() for key in asset.keys))


def check_streamed(asset: dg.AssetsDefinition, batch_key: str) -> Callable[..., Any]:
    """Return the function of an asset if it can be called for each batch of a run."""
    function = _function_of(asset)
    if function is None:
        raise refused(
            asset,
            "is not a single function (@dg.asset, @dg.multi_asset): call the functions of its ops "
            "in one asset, or use build_kafka_batch_defs",
        )
    for why in _whys(asset):
        raise refused(asset, why)
    if batch_key not in {*parameters_of(asset), *asset.op.required_resource_keys}:
        raise refused(
            asset, f"does not take the batch: give it a parameter `{batch_key}: KafkaBatch`"
        )
    for parameter in parameters_of(asset):
        if parameter != batch_key and parameter not in resource_parameters(asset):
            raise refused(
                asset,
                f"has the parameter {parameter!r}, which is neither a resource nor the batch: read "
                "the output of another asset from its storage, and name that asset in deps",
            )
    return function


def has_context(asset: dg.AssetsDefinition) -> bool:
    """Whether the function takes the context as its first argument."""
    return bool(_compute(asset).has_context_arg())


def takes_op_context(asset: dg.AssetsDefinition) -> bool:
    """Whether the function takes an `OpExecutionContext`."""
    return has_context(asset) and _compute(asset).get_context_arg().annotation in {
        dg.OpExecutionContext,
        dg.OpExecutionContext.__name__,
        f"dg.{dg.OpExecutionContext.__name__}",
    }


def parameters_of(asset: dg.AssetsDefinition) -> list[str]:
    """Return the parameters of the function, without the context."""
    named = list(inspect.signature(_compute(asset).decorated_fn).parameters)
    return named[int(has_context(asset)) :]


def resource_parameters(asset: dg.AssetsDefinition) -> frozenset[str]:
    """Return the parameters that are resources."""
    return frozenset(parameter.name for parameter in _compute(asset).get_resource_args())


def refused(asset: dg.AssetsDefinition, why: str) -> ConfigurationError:
    """Return the error for an asset that streaming runs refuse."""
    return ConfigurationError(
        f"asset {name_of(asset)} {why}. A streaming run calls the function of each asset once per "
        "batch"
    )


def _function_of(asset: dg.AssetsDefinition) -> Callable[..., Any] | None:
    op = asset.node_def
    compute = _compute(asset) if isinstance(op, dg.OpDefinition) else None
    return getattr(compute, "decorated_fn", None)


def _compute(asset: dg.AssetsDefinition) -> Any:  # noqa: ANN401 - dagster exports no name for it
    return asset.op.compute_fn


def _whys(asset: dg.AssetsDefinition) -> Iterator[str]:
    if asset.op.pool or _CONCURRENCY_TAG in asset.op.tags:
        yield (
            "has a pool, which does not apply to batches: remove it, and limit the concurrency "
            "with the argument `runs`, such as runs=1"
        )
    if asset.op.retry_policy is not None:
        yield (
            "has a retry_policy, which does not apply to batches: remove it, and set "
            "`max_attempts` and `retry_delay_s` of the group"
        )
    if asset.hook_defs:
        yield (
            "has hooks, which no batch calls: remove them, and report failures in the function, or "
            "with an alert on the check `no_partition_stopped`"
        )
    if _takes_config(asset):
        yield (
            "takes run config, which no batch has: remove it, and give the asset a resource with "
            "these values"
        )
    yield from _stored_values(asset)


def _takes_config(asset: dg.AssetsDefinition) -> bool:
    field = asset.op.config_field
    if field is None:
        return False
    has_fields = bool(getattr(field.config_type, "fields", None))
    return field.is_required or has_fields or bool(_compute(asset).has_config_arg())


def _stored_values(asset: dg.AssetsDefinition) -> Iterator[str]:
    for output in asset.op.output_defs:
        kind = output.dagster_type
        if output.io_manager_key != _IO_MANAGER_KEY:
            yield (
                f"has the IO manager {output.io_manager_key!r}, which would get no value: write "
                "the output in the function and return dg.MaterializeResult, or use "
                "build_kafka_batch_defs"
            )
        if not kind.is_nothing and kind is not dg.Any and _holds_value(kind.typing_type):
            yield (
                f"returns a value ({kind.display_name}) for an IO manager, which would store one "
                "value for all batches of the run: write the output in the function and return "
                "dg.MaterializeResult, or use build_kafka_batch_defs"
            )


def _holds_value(annotation: object) -> bool:
    """Whether an annotation includes anything besides results, which Dagster shows as Any."""
    if annotation in {Any, object, type(None)}:
        return False
    origin = get_origin(annotation)
    return origin not in _CONTAINERS or any(map(_holds_value, get_args(annotation)))

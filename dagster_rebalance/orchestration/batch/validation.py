"""Checks of a job and its assets: each run needs a batch, and heartbeats from its process.

Only the sensor requests runs with a batch, so nothing else may materialise the assets. For the
steps that require it, a `KafkaBatch` performs the start check, sends heartbeats and records the end
of the run, in one process. A run of other steps, as by "re-execute from failure", has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def check_assets(name: str, assets: Iterable[dg.AssetsDefinition]) -> None:
    """Check that only the sensor requests runs of the assets, and decides their input."""
    for asset in (asset for asset in assets if asset.is_executable):
        for spec in asset.specs:
            if spec.partitions_def is not None:
                msg = (
                    f"asset {spec.key.to_user_string()} of {name} has a partitions_def, and no run "
                    "of it would have a partition: the batch defines the input. Remove it, and key "
                    "the output by the ranges of the batch. For an output by day, give the "
                    "partitions to an asset downstream of this one"
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
                    f"{what} of {name} has an automation_condition, and the runs that it starts "
                    f"would have no batch: remove it. The sensor {name}_sensor requests a run when "
                    "there are records; downstream assets may have a condition, such as "
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
            f"the job {job.name} of sensor {name} runs its steps in separate processes, and "
            "between two of them no process would send heartbeats: give the job "
            "executor_def=dg.in_process_executor. Spark provides the parallelism"
        )
        raise ConfigurationError(msg)


def check_steps(job: str, nodes: Iterable[object], batch_key: str) -> None:
    """Check that each step requires its batch, the resource `batch_key`."""
    for op in ops_of(nodes):
        if batch_key not in op.required_resource_keys:
            msg = (
                f"{op.name} of job {job} does not take the resource {batch_key!r}. Dagster can "
                "re-execute it alone, and that run would have no start check and send no "
                f"heartbeats: give it a parameter `{batch_key}: KafkaBatch`, or materialise it in "
                "another job downstream of this one"
            )
            raise ConfigurationError(msg)


def check_config(job: str, nodes: Iterable[object]) -> None:
    """Check that no step requires run config: the sensor only gives a run its batch."""
    for node in nodes:
        if not isinstance(node, dg.OpDefinition):
            continue  # a graph may give config to its own ops
        if node.config_field is not None and node.config_field.is_required:
            msg = (
                f"{node.name} of job {job} needs run config, and the sensor only gives a run its "
                "batch, so no run would start: give each value a default, or give the asset a "
                "resource with these values"
            )
            raise ConfigurationError(msg)


def check_resources(job: str, keys: Iterable[str], resources: Mapping[str, object]) -> None:
    """Check that no resource requires run config: the sensor only gives a run its batch."""
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
                    f"the resource {key!r} of job {job} is configured at launch, and the sensor "
                    "only gives a run its batch, so no run would start: give its values in its "
                    "definition, such as dg.EnvVar for an environment variable"
                )
                raise ConfigurationError(msg)


def check_merged_resources(context: dg.SensorEvaluationContext, name: str) -> None:
    """Check the resources of a job, including those of merged definitions."""
    if context.repository_def is not None:
        job = context.repository_def.get_job(name)
        check_resources(job.name, job.required_resource_keys, job.resource_defs)


def definition_of(resource: object) -> dg.ResourceDefinition | None:
    """Return the definition of a resource in any form; None for a plain object."""
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
            f"{owners[0]} has a retry_policy, by which Dagster retries a step in the same run, "
            "even if it was interrupted because its partitions move. Remove the policy: a failed "
            "batch is retried in another run (max_attempts and retry_delay_s of the "
            "KafkaConsumerResource)"
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

"""What a job and its assets must be like for each run to have a batch, and to be known.

Only the sensor starts runs with a batch, so nothing else may be asked of Dagster for the assets.
A `KafkaBatch` looks whether its run may work, gives the signs of life and says that the run is
finished. It does so for the steps that take it, in the one process that it is in. A run of other
steps alone, such as Dagster's "re-execute from failure" makes, would do none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def check_assets(name: str, assets: Iterable[dg.AssetsDefinition]) -> None:
    """Check that nothing but the sensor decides what the assets process, and when.

    Args:
        name: The name of the definitions.
        assets: What processes a batch.

    Raises:
        ConfigurationError: One has partitions, or an automation condition, or a check of it has.
    """
    for asset in (asset for asset in assets if asset.is_executable):
        for spec in asset.specs:
            if spec.partitions_def is not None:
                msg = (
                    f"asset {spec.key.to_user_string()} of {name} has a partitions_def, and no run "
                    "of it would have a partition: the batch says what is to be processed. Remove "
                    "it, and key the output by the ranges of the batch. For an output by day, let "
                    "another asset behind this one have the partitions"
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
                    f"would have no batch: remove it. The sensor {name}_sensor starts a run when "
                    "there are records; assets behind this one may have a condition, such as "
                    "dg.AutomationCondition.eager().without("
                    "~dg.AutomationCondition.any_deps_in_progress()), since this one nearly always "
                    "is in progress"
                )
                raise ConfigurationError(msg)


def check_executor(name: str, job: dg.JobDefinition | dg.UnresolvedAssetJobDefinition) -> None:
    """Check that one process does all the work of a run.

    Raises:
        ConfigurationError: The steps of the job run in processes of their own.
    """
    executor = job.executor_def
    if executor is None or executor.name != dg.in_process_executor.name:
        msg = (
            f"the job {job.name} of sensor {name} runs its steps in processes of their own, and "
            "between two of them nobody would show "
            "that its run lives: give the job executor_def=dg.in_process_executor. Spark is the "
            "parallelism"
        )
        raise ConfigurationError(msg)


def check_steps(job: str, nodes: Iterable[object], batch_key: str) -> None:
    """Check that each step takes its batch.

    Args:
        job: The name of the job.
        nodes: The definitions of its ops and graphs.
        batch_key: The resource key of the batch.

    Raises:
        ConfigurationError: One does not.
    """
    for op in ops_of(nodes):
        if batch_key not in op.required_resource_keys:
            msg = (
                f"{op.name} of job {job} does not take the resource {batch_key!r}. Dagster can "
                "execute it again alone, and nobody would "
                "look whether that run may work, or show that it lives: give it a parameter "
                f"`{batch_key}: KafkaBatch`, or materialise it "
                "in another job behind this one"
            )
            raise ConfigurationError(msg)


def check_config(job: str, nodes: Iterable[object]) -> None:
    """Check that no step waits for run config, since the sensor gives a run its batch alone.

    Args:
        job: The name of the job.
        nodes: The definitions of its ops and graphs.

    Raises:
        ConfigurationError: One needs some.
    """
    for node in nodes:
        if not isinstance(node, dg.OpDefinition):
            continue  # a graph may give config to its own ops
        if node.config_field is not None and node.config_field.is_required:
            msg = (
                f"{node.name} of job {job} needs run config, and the sensor gives a run its batch "
                "alone, so that no run would begin: give each value a default, or give the asset "
                "a resource with these values"
            )
            raise ConfigurationError(msg)


def check_resources(job: str, keys: Iterable[str], resources: Mapping[str, object]) -> None:
    """Check that no resource waits for run config, since the sensor gives a run its batch alone.

    Args:
        job: The name of the job.
        keys: The resource keys that its steps need.
        resources: The resources that are known; others may be given where definitions are merged.

    Raises:
        ConfigurationError: One waits.
    """
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
                    "gives a run its batch alone, so that no run would begin: give its values "
                    "where it is defined, such as dg.EnvVar for a value of the environment"
                )
                raise ConfigurationError(msg)


def check_merged_resources(context: dg.SensorEvaluationContext, name: str) -> None:
    """Check the resources of a job with those that merged definitions bring.

    Raises:
        ConfigurationError: One waits for run config.
    """
    if context.repository_def is not None:
        job = context.repository_def.get_job(name)
        check_resources(job.name, job.required_resource_keys, job.resource_defs)


def definition_of(resource: object) -> dg.ResourceDefinition | None:
    """The definition of a resource in any form that Dagster takes; None for a plain object."""
    if isinstance(resource, dg.ResourceDefinition):
        return resource
    make = getattr(resource, "get_resource_definition", None)
    definition: dg.ResourceDefinition | None = make() if callable(make) else None
    return definition


def check_retries(
    job: str, nodes: Iterable[object], job_policy: dg.RetryPolicy | None = None
) -> None:
    """Check that Dagster begins no step again in the same run after it was interrupted.

    Dagster's retry policy covers interrupts, too: a run that is cancelled for a hold, or because
    its lease is over, would begin its work again and succeed.

    Args:
        job: The name of the job.
        nodes: The definitions of its ops and graphs.
        job_policy: The policy of the job for all of its steps.

    Raises:
        ConfigurationError: One has a retry policy.
    """
    found = [*(f"{step} of job {job}" for step in _with_policy(nodes))]
    if job_policy is not None:
        found.append(f"job {job}")
    if found:
        msg = (
            f"{found[0]} has a retry_policy, by which Dagster begins a step again in the "
            "same run, also one that was interrupted because its partitions move. Remove the "
            "policy: a batch that failed is tried again in another run (max_attempts and "
            "retry_delay_s of the KafkaConsumerResource)"
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
    """All ops of some nodes, those inside of graphs included."""
    for node in nodes:
        if isinstance(node, dg.GraphDefinition):
            yield from ops_of(node.node_defs)
        elif isinstance(node, dg.OpDefinition):
            yield node

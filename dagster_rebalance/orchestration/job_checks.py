"""What a job and its assets must be like for each run to have a batch, and to be known.

Only the sensor starts runs with a batch, so nothing else may be asked of Dagster for the assets.
A `KafkaBatch` looks whether its run may work, gives the signs of life and says that the run is
finished. It does so for the steps that take it, in the one process that it is in. A run of other
steps alone, such as Dagster's "re-execute from failure" makes, would do none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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


def check_retries(job: str, nodes: Iterable[object]) -> None:
    """Check that no step is begun again in the same run, beside what it has begun elsewhere.

    Args:
        job: The name of the job.
        nodes: The definitions of its ops and graphs.

    Raises:
        ConfigurationError: One has a retry policy.
    """
    for op in ops_of(nodes):
        if op.retry_policy is not None:
            msg = (
                f"{op.name} of job {job} has a retry_policy: Dagster would begin it again in the "
                "same run while its external work may go on. Remove the policy: the batch is "
                "tried again in another run, after that work was stopped (max_attempts of the "
                "KafkaConsumerResource)"
            )
            raise ConfigurationError(msg)


def ops_of(nodes: Iterable[object]) -> Iterator[dg.OpDefinition]:
    """All ops of some nodes, those inside of graphs included."""
    for node in nodes:
        if isinstance(node, dg.GraphDefinition):
            yield from ops_of(node.node_defs)
        elif isinstance(node, dg.OpDefinition):
            yield node

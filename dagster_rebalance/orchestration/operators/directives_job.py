"""The job by which people pause, stop, resume and retry partitions from Dagster's pages."""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of an op.

from typing import TYPE_CHECKING, Literal

import dagster as dg
from pydantic import Field

from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.operators.directives import Wanted, give
from dagster_rebalance.orchestration.operators.literal_config import plain_schema
from dagster_rebalance.orchestration.storage.run_tags import USER_TAG

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource


class ControlConfig(dg.Config):
    """What a person fills in in the launchpad."""

    action: Literal["pause", "stop", "resume", "retry"] = Field(
        description=(
            "pause: nothing new is begun, and what is at work ends. stop: what is at work is "
            "cancelled, too. resume: go on. retry: try now what failed or is stopped."
        )
    )
    partitions: list[str] = Field(
        description="orders:3 for a partition, orders for a topic, ord* for a pattern, * for all."
    )
    reason: str = Field(default="", description="Why. A resume and a retry may go without one.")
    by: str = Field(default="", description="Who you are. Dagster+ knows it without.")


def build_kafka_control_job(*, name: str, kafka_key: str = "kafka") -> dg.JobDefinition:
    """Build the job that pauses, stops, resumes and retries partitions of a group.

    Args:
        name: The name of the job.
        kafka_key: The resource key of the `KafkaConsumerResource` of the group.
    """

    @dg.op(
        name=f"{name}_order",
        required_resource_keys={kafka_key},
        config_schema=plain_schema(ControlConfig),
        description="Tells all members of the group, and those that join later.",
    )
    def order(context: dg.OpExecutionContext) -> None:
        config = ControlConfig(**context.op_config)
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        wanted = Wanted(
            Action(config.action),
            config.partitions,
            config.by or context.run.tags.get(USER_TAG, ""),
            config.reason,
        )
        try:
            context.log.info(give(context.instance, kafka.group_id, wanted))
        except ConfigurationError as error:
            raise dg.Failure(str(error), allow_retries=False) from None

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        tags={"dagster/max_retries": "0"},  # a retry would give an old order after newer ones
        description=(
            "Pauses, stops, resumes or retries partitions of a consumer group. Fill in the "
            "launchpad; the orders are shown on the asset of the group."
        ),
    )
    def control() -> None:
        order()

    return control

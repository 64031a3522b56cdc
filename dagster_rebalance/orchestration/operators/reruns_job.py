"""The job by which people have past ranges processed again from Dagster's pages."""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of an op.

from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.operators.literal_config import plain_schema
from dagster_rebalance.orchestration.operators.reruns import (
    RECORDS_PER_RUN,
    RUNS_AT_ONCE,
    Planned,
    Reruns,
    Wanted,
    span_of,
)
from dagster_rebalance.orchestration.storage.run_tags import USER_TAG

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_ROWS_SHOWN = 100


class RerunConfig(dg.Config):
    """What a person fills in in the launchpad."""

    partitions: list[str] = Field(
        default=[],
        description="orders:3 for a partition, orders for a topic, ord* for a pattern, * for all.",
    )
    from_offset: int | None = Field(
        default=None,
        description=(
            "The first offset, of one partition. A range that this cuts is processed as a whole."
        ),
    )
    until_offset: int | None = Field(
        default=None,
        description="The offset behind the last one; without it, all that is committed.",
    )
    since: str = Field(
        default="",
        description=(
            "In place of offsets: what was committed from this time on, such as 2026-11-23T14:00 "
            "(UTC) or 2026-11-23T14:00+01:00."
        ),
    )
    until: str = Field(
        default="", description="Until this time, as `since`; without it, until now."
    )
    reason: str = Field(default="", description="Why, for those who find the runs.")
    by: str = Field(default="", description="Who you are. Dagster+ knows it without.")
    dry_run: bool = Field(
        default=True,
        description=(
            "Only show what would be done, in the log of this run. Set it to false to start the "
            "runs."
        ),
    )
    runs_at_once: int = Field(
        default=RUNS_AT_ONCE, description="How many runs may be at work at the same time."
    )
    records_per_run: int = Field(
        default=RECORDS_PER_RUN, description="How many offsets one run processes."
    )
    cancel: str = Field(
        default="",
        description="The id of a rerun that is to end; then nothing else is to be filled in.",
    )


def build_kafka_rerun_job(*, name: str, kafka_key: str = "kafka") -> dg.JobDefinition:
    """Build the job that has past ranges of a group processed again.

    It starts no run itself: the sensor of the group does.

    Args:
        name: The name of the job.
        kafka_key: The resource key of the `KafkaConsumerResource` of the group.
    """

    @dg.op(
        name=f"{name}_order",
        required_resource_keys={kafka_key},
        config_schema=plain_schema(RerunConfig),
        description="Says which past ranges are to be processed again.",
    )
    def order(context: dg.OpExecutionContext) -> None:
        config = RerunConfig(**context.op_config)
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        reruns = Reruns(context.instance, kafka)
        try:
            if config.cancel:
                context.log.info(reruns.cancel(config.cancel))
                return
            planned = reruns.plan(_wanted(config, context.run.tags.get(USER_TAG, "")))
            for text in _shown(planned):
                context.log.info(text)
            context.log.info(
                "Nothing was started: this is a dry run."
                if config.dry_run
                else reruns.begin(planned)
            )
        except DagsterRebalanceError as error:
            raise dg.Failure(str(error), allow_retries=False) from None

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        tags={"dagster/max_retries": "0"},  # a retry would ask for the same once more
        description=(
            "Processes past ranges of a consumer group again, with the code of today. What is "
            "written by range is replaced. Committed offsets stay as they are, and the group goes "
            "on meanwhile. Fill in the launchpad; the sensor of the group starts the runs."
        ),
    )
    def rerun() -> None:
        order()

    return rerun


def _wanted(config: RerunConfig, user: str) -> Wanted:
    return Wanted(
        config.partitions,
        span_of(config.from_offset, config.until_offset, config.since, config.until),
        config.by or user,
        config.reason,
        config.records_per_run,
        config.runs_at_once,
    )


def _shown(planned: Planned) -> list[str]:
    """What is repeated and what is left out, one range a line."""
    selection = planned.selection
    widened = set(selection.widened)
    texts = [
        f"run {batch.number}: {range_}"
        + (" (as a whole, although only a part was asked for)" if range_ in widened else "")
        for batch in planned.batches
        for range_ in batch.ranges
    ]
    if len(texts) > _ROWS_SHOWN:
        texts = [*texts[:_ROWS_SHOWN], f"and {len(texts) - _ROWS_SHOWN} more ranges"]
    return [
        "\n".join(texts),
        *(f"left out: {one}" for one in selection.left_out[:_ROWS_SHOWN]),
    ]

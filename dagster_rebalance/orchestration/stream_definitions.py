"""`build_kafka_stream_defs` gives a team streaming runs: one run, many batches."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of `context`.
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from dagster_rebalance.orchestration.stream_body import Body, in_order
from dagster_rebalance.orchestration.stream_run import StreamRun
from dagster_rebalance.orchestration.tags import GROUP_TAG


def stream_asset(
    name: str,
    assets: Sequence[dg.AssetsDefinition],
    *,
    kafka_key: str,
    batch_key: str,
    spark_key: str | None,
) -> dg.AssetsDefinition:
    """The assets as one step that calls their functions for each batch, until its run has to end.

    Raises:
        ConfigurationError: One cannot be called for each batch.
    """
    bodies = in_order([Body.of(asset, batch_key) for asset in assets])
    needed = {key for body in bodies for key in body.resource_keys} | {kafka_key}

    @dg.multi_asset(
        name=f"{name}_batches",
        specs=[
            spec.replace_attributes(skippable=True) for body in bodies for spec in body.asset.specs
        ],
        check_specs=[spec for body in bodies for spec in body.asset.check_specs],
        required_resource_keys=needed | ({spark_key} if spark_key else set()),
    )
    def batches(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        kafka = getattr(context.resources, kafka_key)
        spark = getattr(context.resources, spark_key) if spark_key else None
        StreamRun(context, kafka, spark, bodies).work()
        yield from ()

    return batches


def stream_job(
    name: str, assets: dg.AssetsDefinition, group_id: str, tags: dict[str, str]
) -> "dg.UnresolvedAssetJobDefinition":
    """The job of streaming runs."""
    return dg.define_asset_job(
        name,
        selection=[assets],
        executor_def=dg.in_process_executor,
        tags={**tags, GROUP_TAG: group_id},
    )

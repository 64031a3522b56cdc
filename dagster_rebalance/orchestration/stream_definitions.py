"""The step of a streaming run: all assets of its batches together."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of `context`.
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from dagster_rebalance.core.lag import LagLimit
from dagster_rebalance.orchestration.stream_body import Body
from dagster_rebalance.orchestration.stream_run import StreamRun


def stream_asset(
    name: str,
    bodies: Sequence[Body],
    *,
    kafka_key: str,
    spark_key: str | None,
    lag_limit: LagLimit,
) -> dg.AssetsDefinition:
    """The assets as one step, which calls their functions for each batch until its run ends."""
    needed = frozenset({kafka_key}).union(*(body.required_keys for body in bodies))
    # Nothing is an output of the step: each batch logs its own materialisations.
    specs = [
        spec.replace_attributes(skippable=True) for body in bodies for spec in body.asset.specs
    ]

    @dg.multi_asset(
        name=f"{name}_batches",
        specs=specs,
        check_specs=[spec for body in bodies for spec in body.asset.check_specs],
        required_resource_keys=needed | ({spark_key} if spark_key else set()),
    )
    def batches(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        kafka = getattr(context.resources, kafka_key)
        spark = getattr(context.resources, spark_key) if spark_key else None
        StreamRun(context, kafka, spark, bodies, lag_limit).work()
        yield from ()

    return batches

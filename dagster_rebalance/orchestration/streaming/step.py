"""The step of a streaming run: all assets of its batches together.

A rerun uses the same job, so it materializes the same assets. Its run is no member of the group:
the config contains the batch, as in a per-batch run.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of `context`.
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import dagster as dg

from dagster_rebalance.core.reporting.lag import LagLimit
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.batch.validation import refused
from dagster_rebalance.orchestration.runs.external_jobs import WorkStopper
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.orchestration.streaming.asset_calls import AssetCall, Made
from dagster_rebalance.orchestration.streaming.stream_run import StreamRun


class RerunKafkaBatch(KafkaBatch):
    """The batch of a rerun; empty in a streaming run, which takes its batches as a member."""

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["KafkaBatch"]:
        """Check that the run may process its batch, if it has one."""
        if self.batch_id:
            with super().yield_for_execution(context) as batch:
                yield batch
        else:
            yield self


def stream_asset(
    name: str,
    calls: Sequence[AssetCall],
    topics: Sequence[dg.AssetKey],
    *,
    kafka_key: str,
    rerun_key: str,
    spark_key: str | None,
    stopper: WorkStopper | None,
    lag_limit: LagLimit,
) -> dg.AssetsDefinition:
    """Return the assets as one step, which calls the asset functions for each batch."""
    needed = frozenset({kafka_key, rerun_key}).union(*(call.required_keys for call in calls))
    # No asset is an output of the step: each batch logs its own materializations.
    specs = [
        with_topics(spec, topics).replace_attributes(skippable=True)
        for call in calls
        for spec in call.specs
    ]
    check_specs = [spec for call in calls for spec in call.asset.check_specs]

    @dg.multi_asset(
        name=f"process_{name}",
        specs=specs,
        check_specs=check_specs,
        resource_defs=_own_resources(calls) or None,  # Dagster warns of the argument: it is beta
        required_resource_keys=needed | ({spark_key} if spark_key else set()),
    )
    def batches(
        context: dg.AssetExecutionContext,
    ) -> Iterator[Made | dg.Output[None]]:
        kafka = getattr(context.resources, kafka_key)
        spark = getattr(context.resources, spark_key) if spark_key else None
        rerun: KafkaBatch = getattr(context.resources, rerun_key)
        if not rerun.batch_id:
            if STREAM_TAG not in context.run.tags:
                msg = (
                    "This run was not started by its sensor, so nothing would monitor it. "
                    "Streaming runs of this job are started by its sensor, which also replaces "
                    "and ends them: turn it on. To process past ranges again, use "
                    "dagster-rebalance rerun or the rerun job of the group."
                )
                raise dg.Failure(msg, allow_retries=False)
            StreamRun(context, kafka, spark, calls, lag_limit, stopper=stopper).work()
            # Dagster requires these outputs. The checks were reported with each batch.
            for spec in check_specs:
                yield dg.Output(None, output_name=spec.get_python_identifier())
            return
        shown = rerun.metadata()
        for call in calls:
            for made in call(context, rerun):
                if isinstance(made, dg.MaterializeResult):
                    yield made._replace(metadata={**shown, **(made.metadata or {})})
                else:
                    yield made

    return batches


def _own_resources(calls: Sequence[AssetCall]) -> dict[str, dg.ResourceDefinition]:
    found: dict[str, dg.ResourceDefinition] = {}
    for call in calls:
        for key, resource in call.asset.resource_defs.items():
            if found.setdefault(key, resource) is not resource:
                raise refused(
                    call.asset,
                    f"defines another resource {key!r} in resource_defs than an earlier asset, but "
                    "a run has one resource per key: give each resource its own key",
                )
    return found


def with_topics(spec: dg.AssetSpec, topics: Iterable[dg.AssetKey]) -> dg.AssetSpec:
    """Return an asset spec with the topics as upstream deps."""
    known = {dep.asset_key for dep in spec.deps}
    return spec.replace_attributes(deps=[*spec.deps, *(key for key in topics if key not in known)])

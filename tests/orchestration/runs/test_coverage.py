"""A batch succeeds when its runs together cover every asset of the job."""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of an asset.

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.runs.progress import Succeeded, ToRequest, progress_of
from dagster_rebalance.core.runs.run_index import RunIndex
from dagster_rebalance.orchestration.runs.coverage import UNKNOWN, Coverage
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.run_tags import run_config, run_tags
from tests.orchestration.parts import batch_request, span

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.core.runs.progress import Progress


@dg.asset(required_resource_keys={"kafka_batch"})
def orders() -> None:
    """Always succeeds."""


@dg.asset(
    deps=[orders],
    required_resource_keys={"kafka_batch"},
    config_schema={"broken": dg.Field(str, default_value="")},
)
def totals(context: dg.AssetExecutionContext) -> None:
    from pathlib import Path  # noqa: PLC0415 - the module of a run process

    if context.op_config["broken"] and Path(context.op_config["broken"]).exists():
        raise ValueError


@dg.multi_asset(
    specs=[dg.AssetSpec("left", skippable=True), dg.AssetSpec("right", skippable=True)],
    can_subset=True,
)
def halves(context: dg.AssetExecutionContext) -> Any:  # noqa: ANN401 - Dagster looks at this annotation
    for key in context.selected_asset_keys:
        yield dg.MaterializeResult(asset_key=key)


@dg.asset_check(asset=orders)
def is_fine() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


def _any_batch(_context: dg.InitResourceContext) -> None:
    """A resource with the config of a `KafkaBatch`, without its check."""


def whole_job() -> dg.JobDefinition:
    return dg.Definitions(
        assets=[orders, totals, halves],
        asset_checks=[is_fine],
        jobs=[dg.define_asset_job("whole", selection="*", executor_def=dg.in_process_executor)],
        resources={"kafka_batch": dg.ResourceDefinition(_any_batch, config_schema=dict)},
    ).resolve_job_def("whole")


class Desk:
    def __init__(self, instance: dg.DagsterInstance, batch_id: str, broken: "Path") -> None:
        self._instance = instance
        self._offer = batch_request(batch_id)
        self._broken = broken
        self._config = {
            **run_config(self._offer, "kafka_batch"),
            "ops": {"totals": {"config": {"broken": str(broken)}}},
        }

    def run(self) -> str:
        self._broken.touch()
        with dg.execute_job(
            dg.reconstructable(whole_job),
            self._instance,
            run_config=self._config,
            tags=run_tags(self._offer, "etl"),
        ) as first:
            self._broken.unlink()
            return first.run_id

    def again(self, run_id: str, *steps: str) -> str:
        """Execute some steps of a run again, or all from the failure on.

        Dagster copies config and tags.
        """
        options = (
            dg.ReexecutionOptions(run_id, step_selection=list(steps))
            if steps
            else dg.ReexecutionOptions.from_failure(run_id, self._instance)
        )
        job = dg.reconstructable(whole_job)
        with dg.execute_job(
            job,
            self._instance,
            run_config=self._config,
            reexecution_options=options,
            tags=run_tags(self._offer, "etl"),
        ) as result:
            assert result.success
            return result.run_id

    def selected(self, *assets: str) -> None:
        """Materialize some assets manually, with the tags and the config of the batch."""
        keys = [dg.AssetKey(asset) for asset in assets]
        config = run_config(self._offer, "kafka_batch")
        whole_job().execute_in_process(
            config,
            instance=self._instance,
            asset_selection=keys,
            tags={**run_tags(self._offer, "etl"), "by": "hand"},
        )

    def progress(self) -> "Progress":
        return progress_of(
            span(0),
            self._offer.batch_id,
            RunIndex(RunLedger(self._instance, "etl").read([self._offer.batch_id])),
            max_attempts=3,
        )


@pytest.fixture
def desk(instance: dg.DagsterInstance, batch_id: str, tmp_path: "Path") -> Desk:
    return Desk(instance, batch_id, tmp_path / "broken")


def lacks(progress: "Progress") -> tuple[str, ...]:
    assert isinstance(progress, ToRequest)
    return progress.left_out


def test_re_execution_of_some_steps_covers_only_these(desk: Desk) -> None:
    first = desk.run()
    desk.again(first, "orders")
    assert lacks(desk.progress()) == ("totals",)


def test_re_execution_from_failure_covers_the_job(desk: Desk) -> None:
    done = desk.again(desk.run())
    assert desk.progress() == Succeeded(done)


def test_partial_runs_together_cover_the_job(desk: Desk) -> None:
    first = desk.run()
    desk.again(first, "halves")
    done = desk.again(first, "totals")
    assert desk.progress() == Succeeded(done)


def test_coverage_of_deleted_run_is_lost(desk: Desk, instance: dg.DagsterInstance) -> None:
    first = desk.run()
    desk.again(first)
    instance.delete_run(first)
    assert lacks(desk.progress()) == ("left", "orders", "right")


def test_asset_selection_covers_a_part(desk: Desk) -> None:
    desk.run()
    desk.selected("orders", "left")
    assert lacks(desk.progress()) == ("totals",)
    desk.selected("totals", "orders", "left")
    assert isinstance(desk.progress(), Succeeded), "the first run has done the right half"


def test_asset_selection_without_a_whole_run_is_no_success(desk: Desk) -> None:
    desk.selected("orders", "totals", "left")
    assert lacks(desk.progress()) == (UNKNOWN,)


def test_partial_run_without_plan_is_no_success(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = desk.run()
    desk.again(first)
    monkeypatch.setattr(Coverage, "_read_plan", lambda *_: None)
    assert lacks(desk.progress()) == (UNKNOWN,)

"""Assets of streaming runs over several batches: retained state, and the events of each."""

# ruff: noqa: ARG001 - an asset must take its batch
# No `from __future__ import annotations` here: Dagster evaluates the annotations of assets.

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dagster as dg
import pytest
from pydantic import PrivateAttr

from dagster_rebalance import KafkaBatch, build_kafka_stream_defs
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.streaming.asset_calls import Results
from tests.orchestration.parts import GROUPS, KafkaInMemory, kafka_in_memory, tp
from tests.orchestration.streaming.stage import BY_THE_SENSOR, QUICK, leave


def run(
    instance: dg.DagsterInstance,
    kafka: KafkaInMemory,
    *assets: dg.AssetsDefinition,
    **settings: Any,  # noqa: ANN401 - of all kinds
) -> str:
    """Run the assets until the process is asked to end; returns the id of the run."""
    defs = build_kafka_stream_defs(kafka=kafka, assets=assets, name="stream", **settings)
    GROUPS[kafka.group_id].produce(tp(0), 3)
    job = defs.resolve_job_def("stream")
    return job.execute_in_process(instance=instance, tags=BY_THE_SENSOR).run_id


def committed(kafka: KafkaInMemory) -> int:
    return GROUPS[kafka.group_id].committed[tp(0)].offset


def materializations(instance: dg.DagsterInstance, key: str) -> list[dg.AssetMaterialization]:
    found = instance.fetch_materializations(dg.AssetKey(key), limit=100, ascending=True).records
    return [one.asset_materialization for one in found if one.asset_materialization is not None]


class Queued(dg.ConfigurableResource[Any]):
    _asked: Any = PrivateAttr(default=None)

    @asynccontextmanager
    async def yield_for_execution(  # type: ignore[override] # Dagster takes both, and types one
        self, context: dg.InitResourceContext
    ) -> AsyncIterator["Queued"]:
        self._asked = asyncio.Queue()
        answering = asyncio.create_task(self._answer())
        yield self
        answering.cancel()

    async def _answer(self) -> None:
        while True:
            (await self._asked.get()).set_result("answer")

    async def ask(self) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._asked.put(answer)
        return await asyncio.wait_for(answer, 120)


def test_client_of_an_async_resource_serves_all_batches(instance: dg.DagsterInstance) -> None:
    """Clients belong to the event loop in which they were opened."""
    kafka, answers = kafka_in_memory(retry_delay_s=0.01), []

    @dg.asset
    async def asks(kafka_batch: KafkaBatch, queued: Queued) -> None:
        answers.append(await queued.ask())
        if len(answers) == 3:
            leave()
        else:
            GROUPS[kafka.group_id].produce(tp(0), 1)

    run(instance, kafka, asks, resources={"queued": Queued()})
    assert answers == ["answer"] * 3
    assert committed(kafka) == 5


@pytest.mark.parametrize("is_generator", [False, True], ids=["function", "generator"])
def test_interrupted_async_function_ends_before_the_next_batch(
    instance: dg.DagsterInstance, *, is_generator: bool
) -> None:
    """Its event loop serves the next batch."""
    kafka = kafka_in_memory()
    told: list[str] = []

    async def work() -> None:
        told.append("begun")
        if told.count("begun") > 1:
            leave()
            return
        (member,) = GROUPS[kafka.group_id].members
        GROUPS[kafka.group_id].fence(member)
        try:
            await asyncio.sleep(60)
            told.append("went on")
        finally:
            told.append("ended")

    async def function(kafka_batch: KafkaBatch) -> None:
        await work()

    async def generator(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN202 - Dagster takes no annotation of a generator
        await work()
        yield dg.MaterializeResult()

    works = dg.asset(name="works")(generator if is_generator else function)
    run(instance, kafka, works)
    assert told == ["begun", "ended", "begun"]
    assert committed(kafka) == 3


def test_materialization_has_data_versions_of_itself_and_its_inputs(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.versions._LOOK_S", 0.0)
    kafka, batches = kafka_in_memory(), []

    @dg.asset(code_version="7", deps=["rates"])
    def priced(kafka_batch: KafkaBatch) -> None:
        batches.append(kafka_batch.batch_id)
        if len(batches) == 2:
            leave()
            return
        rates = dg.AssetMaterialization("rates", tags={"dagster/data_version": "monday"})
        instance.report_runless_asset_event(rates)
        GROUPS[kafka.group_id].produce(tp(0), 1)

    @dg.asset(deps=[priced])
    def summed(kafka_batch: KafkaBatch) -> dg.MaterializeResult[Any]:
        return dg.MaterializeResult(data_version=dg.DataVersion("mine"))

    run_id = run(instance, kafka, priced, summed)
    first, second = (made.tags or {} for made in materializations(instance, "priced"))
    assert first["dagster/code_version"] == second["dagster/code_version"] == "7"
    assert first["dagster/data_version"] != second["dagster/data_version"]
    assert first["dagster/input_data_version/rates"] == "INITIAL"
    assert second["dagster/input_data_version/rates"] == "monday"
    assert first["dagster/input_event_pointer/rates"] == "NULL"
    assert int(second["dagster/input_event_pointer/rates"]) > 0
    of_sum = materializations(instance, "summed")[0].tags or {}
    assert of_sum["dagster/code_version"] == run_id
    assert of_sum["dagster/data_version"] == "mine"
    assert of_sum["dagster/data_version_is_user_provided"] == "true"
    assert of_sum["dagster/input_data_version/priced"] == first["dagster/data_version"]


def test_condition_on_data_versions_fires_after_each_batch(
    instance: dg.DagsterInstance,
) -> None:
    kafka = kafka_in_memory()

    @dg.asset(code_version="1")
    def streamed(kafka_batch: KafkaBatch) -> None:
        leave()

    changed = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed())

    @dg.asset(deps=[streamed], automation_condition=changed)
    def behind() -> None:
        """Is requested."""

    defs = dg.Definitions(assets=[streamed, behind], resources={"kafka_batch": None})
    seen = dg.evaluate_automation_conditions(defs=defs, instance=instance)
    requested = []
    for _ in range(2):
        GROUPS[kafka.group_id].produce(tp(0), 1)
        run(instance, kafka, streamed)
        seen = dg.evaluate_automation_conditions(defs=defs, instance=instance, cursor=seen.cursor)
        requested.append(seen.total_requested)
    assert requested == [1, 1]


def test_batch_without_an_annotation_is_no_upstream_asset() -> None:
    """Dagster takes such a parameter for the value of an asset."""

    @dg.asset(deps=["rates"])
    def priced(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - the tested form
        """Never called."""

    defs = build_kafka_stream_defs(kafka=kafka_in_memory(), assets=[priced], name="stream")
    graph = defs.resolve_asset_graph()
    upstream = {key.to_user_string() for key in graph.get(dg.AssetKey("priced")).parent_keys}
    assert upstream == {"rates", "kafka_topics/orders"}


@dg.multi_asset(specs=[dg.AssetSpec("a"), dg.AssetSpec("b")])
def two_assets(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN201 - several outputs
    """Never called."""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([dg.MaterializeResult(asset_key="a")] * 2, "a second result for a"),
        ([dg.MaterializeResult()], "a result without asset_key, although it makes several assets"),
        ([dg.MaterializeResult(asset_key="c")], "a result for c, which it does not make"),
        ([None] * 3, "more results than it has assets"),
        ([{"rows": 5}], "a dict: an asset of a streaming run writes its output itself"),
        ([dg.Output(None, output_name="c")], "the output c, which it does not have"),
        ([dg.Output(5, output_name="a")], "a dg.Output with a value"),
        ([dg.MaterializeResult(asset_key="a", value=5)], "a dg.MaterializeResult with a value"),
    ],
)
def test_invalid_result_is_refused(said: list[object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^a, b returned {why}"):
        [*Results(two_assets, None).take(said)]  # type: ignore[arg-type] # refused before


@dg.asset(
    name="d",
    check_specs=[dg.AssetCheckSpec("full", asset="d"), dg.AssetCheckSpec("new", asset="d")],
)
def two_checks(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN201 - as above
    """Never called."""


FULL, NEW = (dg.AssetCheckResult(check_name=name, passed=True) for name in ("full", "new"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "no results of the check full"),
        ([dg.MaterializeResult(check_results=[FULL])], "no results of the check new"),
        ([NEW, FULL, FULL], "2 results of the check full"),
        ([NEW, dg.MaterializeResult(check_results=[NEW, FULL])], "2 results of the check new"),
    ],
)
def test_check_without_exactly_one_result_is_refused(said: list[object], why: str) -> None:
    """A check without a result would keep its last one on show."""
    with pytest.raises(ConfigurationError, match=f"^d returned {why} of d: return one"):
        [*Results(two_checks, None).take(said)]  # type: ignore[arg-type] # refused before


def test_pipes_session_without_its_results_fails_the_batch(instance: dg.DagsterInstance) -> None:
    kafka = kafka_in_memory(**QUICK)
    calls: list[str] = []

    @dg.asset
    def forgets(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
        calls.append(kafka_batch.batch_id)
        if len(calls) > 1:
            leave()
        with dg.open_pipes_session(
            context=context,
            context_injector=dg.PipesTempFileContextInjector(),
            message_reader=dg.PipesTempFileMessageReader(),
        ):
            pass

    run(instance, kafka, forgets)
    assert len(calls) == 2
    assert committed(kafka) == 0

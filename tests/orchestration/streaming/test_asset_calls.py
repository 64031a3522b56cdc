"""Assets of streaming runs over several batches: what they keep, and what is noted of each."""

# ruff: noqa: ARG001 - an asset must take its batch
# No `from __future__ import annotations` here: Dagster evaluates the annotations of assets.

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dagster as dg
import pytest
from pydantic import PrivateAttr

from dagster_rebalance import KafkaBatch, build_kafka_stream_defs
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.kafka.group_ports import GroupEvent
from dagster_rebalance.orchestration.streaming.asset_results import Results
from dagster_rebalance.testing.fake_group import FakeMember
from tests.orchestration.parts import GROUPS, KafkaInMemory, kafka_in_memory, tp
from tests.orchestration.streaming.test_run import BY_THE_SENSOR


@pytest.fixture(autouse=True)
def _polls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of the group in memory returns at once: its thread would leave the others no time."""
    real = FakeMember.poll

    def poll(member: FakeMember, timeout_s: float) -> list[GroupEvent]:
        threading.Event().wait(0.005)
        return real(member, timeout_s)

    monkeypatch.setattr(FakeMember, "poll", poll)


def leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


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
        return await asyncio.wait_for(answer, 10)


def test_a_client_of_an_async_resource_serves_all_batches(instance: dg.DagsterInstance) -> None:
    """Clients belong to the event loop that they were opened in."""
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
def test_an_async_function_that_is_interrupted_does_not_go_on_beside_the_next_batch(
    instance: dg.DagsterInstance, *, is_generator: bool
) -> None:
    """Its event loop goes on for the next batch."""
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


def test_each_batch_has_a_data_version_and_names_the_versions_that_it_read(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By them Dagster shows what is unsynced, and conditions fire."""
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.provenance._LOOK_S", 0.0)
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


def test_a_condition_on_data_versions_fires_behind_a_streaming_run(
    instance: dg.DagsterInstance,
) -> None:
    """Behind each batch, also while the code stays."""
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


def test_a_batch_without_an_annotation_is_no_asset_upstream() -> None:
    """Dagster takes such a parameter for the value of an asset."""

    @dg.asset(deps=["rates"])
    def priced(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - this is what is tested
        """Never called."""

    defs = build_kafka_stream_defs(kafka=kafka_in_memory(), assets=[priced], name="stream")
    graph = defs.resolve_asset_graph()
    upstream = {key.to_user_string() for key in graph.get(dg.AssetKey("priced")).parent_keys}
    assert upstream == {"rates", "kafka_topics/orders"}


def test_assets_that_depend_on_each_other_are_refused() -> None:
    """Dagster splits such a multi-asset into two steps; a batch calls its function once."""

    @dg.multi_asset(
        specs=[
            dg.AssetSpec("first", skippable=True),
            dg.AssetSpec("third", deps=["second"], skippable=True),
        ],
        can_subset=True,
    )
    def around(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN202 - several outputs
        """Never called."""

    @dg.asset(deps=["first"])
    def second(kafka_batch: KafkaBatch) -> None:
        """Never called."""

    why = "assets first, third and second depend on each other, .*: make them one dg.multi_asset"
    with pytest.raises(ConfigurationError, match=why):
        build_kafka_stream_defs(kafka=kafka_in_memory(), assets=[second, around])


class Rate(dg.ConfigurableResource[Any]):
    rate: int


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
def test_two_resources_of_assets_under_one_key_are_refused() -> None:
    """The run has one of them, and the other asset would get it."""

    @dg.asset(resource_defs={"rate": Rate(rate=1)})
    def one(kafka_batch: KafkaBatch, rate: Rate) -> None:
        """Never called."""

    @dg.asset(resource_defs={"rate": Rate(rate=2)})
    def two(kafka_batch: KafkaBatch, rate: Rate) -> None:
        """Never called."""

    with pytest.raises(ConfigurationError, match="asset two has another resource 'rate' in"):
        build_kafka_stream_defs(kafka=kafka_in_memory(), assets=[one, two])


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
def test_a_result_that_cannot_be_kept_is_refused_by_the_name_of_the_asset(
    said: list[object], why: str
) -> None:
    """The batch fails with it: what is dropped would be committed."""
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
def test_a_check_without_exactly_one_result_fails_the_batch(said: list[object], why: str) -> None:
    """As in a run for each batch. A check that is left out would keep its last result on show."""
    with pytest.raises(ConfigurationError, match=f"^d returned {why} of d: return one"):
        [*Results(two_checks, None).take(said)]  # type: ignore[arg-type] # refused before


def test_a_pipes_session_without_its_results_is_refused(instance: dg.DagsterInstance) -> None:
    """As in a run for each batch: the function has forgotten `get_results()`."""
    kafka = kafka_in_memory(retry_delay_s=0.01, retry_delay_limit_s=0.05)
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

"""Values between the assets of one batch, in real runs with a group in memory."""

from __future__ import annotations

import os
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.batch.batch_values import values_by_batch
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import build_kafka_batch_defs
from dagster_rebalance.orchestration.per_batch import batch_sensor as sensor_module
from dagster_rebalance.orchestration.per_batch.batch_sensor import build_kafka_batch_sensor
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import (
    RunEvent,
    record_run_event,
    run_config,
    run_tags,
)
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.nested_resources import Nested, Where
from tests.orchestration.parts import GROUPS, batch_request, claimed, kafka_in_memory, span, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dagster_rebalance.core.model.run_snapshot import BatchRequest

Seen = list[tuple[str, list[str]]]
"""The batch of a run, and the value that its asset got."""


JOBS: list[dg.JobDefinition] = []


def the_job(number: int) -> dg.JobDefinition:
    return JOBS[number]


class Folder(dg.ConfigurableIOManager):
    path: str

    def _file(self, key: dg.AssetKey) -> Path:
        return Path(self.path, key.path[-1])

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        file = self._file(context.asset_key)
        file.write_bytes(pickle.dumps(obj))
        context.add_output_metadata({"file": str(file)})
        context.log.info("stored %s", file)

    def load_input(self, context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        return pickle.loads(self._file(context.asset_key).read_bytes())  # noqa: S301 - of this test


class Factory(dg.ConfigurableIOManagerFactory[dg.IOManager]):
    """A resource that makes the IO manager, which reads its config for each value."""

    path: str

    def create_io_manager(self, _context: dg.InitResourceContext) -> dg.IOManager:
        return ByConfig()


class ByConfig(dg.IOManager):
    """Reads its folder from the config of its resource, as the DuckDB IO manager does."""

    def _file(self, config: Any, name: Sequence[str]) -> Path:  # noqa: ANN401 - Dagster's type
        return Path(config["path"], "-".join(name))

    def handle_output(self, context: dg.OutputContext, obj: object) -> Iterator[Any]:  # type: ignore[override]
        self._file(context.resource_config, context.get_asset_identifier()).write_bytes(
            pickle.dumps(obj)
        )
        yield from ()

    def load_input(self, context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        file = self._file(context.resource_config, context.get_asset_identifier())
        return pickle.loads(file.read_bytes())  # noqa: S301 - of this test


@dg.io_manager(config_schema={"path": str})
def made_by_function(_context: dg.InitResourceContext) -> dg.IOManager:
    """An IO manager made by a generator function."""
    return ByConfig()


@dg.io_manager(required_resource_keys={"folder"})
def with_another_resource(context: dg.InitResourceContext) -> dg.IOManager:
    return Folder(path=context.resources.folder)


@dg.io_manager(config_schema={"path": str})  # type: ignore[arg-type]
def closed_behind(context: dg.InitResourceContext) -> Iterator[dg.IOManager]:
    """An IO manager that is closed at the end of its run."""
    path = context.resource_config["path"]
    yield Folder(path=path)
    Path(path, "closed").touch()


MANAGERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "Dagster's own by default": lambda _path: {},
    "files": lambda path: {"io_manager": dg.FilesystemIOManager(base_dir=str(path))},
    "in memory": lambda _path: {"io_manager": dg.mem_io_manager},
    "by a class": lambda path: {"io_manager": Folder(path=str(path))},
    "an object": lambda path: {"io_manager": _AsObject(path)},
    "a factory": lambda path: {"io_manager": Factory(path=str(path))},
    "a function": lambda path: {"io_manager": made_by_function.configured({"path": str(path)})},
    "a generator": lambda path: {"io_manager": closed_behind.configured({"path": str(path)})},
    "with a resource": lambda path: {"io_manager": with_another_resource, "folder": str(path)},
}


class _AsObject(dg.IOManager):
    def __init__(self, path: Path) -> None:
        self._folder = Folder(path=str(path))

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        self._folder.handle_output(context, obj)

    def load_input(self, context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        return self._folder.load_input(context)


def kafka(group_id: str = "etl") -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers="kafka:9092", group_id=group_id, topics=["orders"]
    )


class Stage:
    """A job in which one asset loads the value of another, and two batches for it."""

    def __init__(self, instance: dg.DagsterInstance, resources: dict[str, Any]) -> None:
        self.instance = instance
        self.kafka = kafka_in_memory()
        self.seen: Seen = []
        self.on_between: Callable[[], object] = str
        self.on_cleaned: Callable[[], object] = str
        self.resources = resources
        self.offers = [self._offer(0), self._offer(1)]
        self.names = {
            name: unique_name(name).replace("-", "_") for name in ("raw", "between", "cleaned")
        }
        self.job = build_kafka_batch_defs(
            kafka=self.kafka, assets=self.assets(), resources=resources
        ).resolve_job_def("kafka_batches")

    def _offer(self, number: int) -> BatchRequest:
        batch_id = unique_name("b")
        GROUPS[self.kafka.group_id].committed[tp(number)] = claimed(0, 10, batch_id)
        return batch_request(batch_id, span(number))

    def assets(self) -> list[dg.AssetsDefinition]:
        @dg.asset(name=self.names["raw"], required_resource_keys={"kafka_batch"})
        def raw(context) -> list[str]:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
            return [str(range_) for range_ in context.resources.kafka_batch.offset_ranges]

        @dg.asset(name=self.names["between"], deps=[raw], required_resource_keys={"kafka_batch"})
        def between() -> None:
            self.on_between()

        @dg.asset(
            name=self.names["cleaned"],
            ins={"raw": dg.AssetIn(raw.key)},
            deps=[between],
            required_resource_keys={"kafka_batch"},
        )
        def cleaned(context, raw: list[str]) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
            self.seen.append((context.resources.kafka_batch.batch_id, raw))
            self.on_cleaned()

        return [raw, between, cleaned]

    def run(
        self, wanted: BatchRequest, again: dg.JobExecutionResult | None = None
    ) -> dg.JobExecutionResult:
        options = dg.ReexecutionOptions.from_failure(again.run_id, self.instance) if again else None
        JOBS.append(self.job)
        return dg.execute_job(
            dg.build_reconstructable_job(__name__, the_job.__name__, (len(JOBS) - 1,)),
            instance=self.instance,
            tags=run_tags(wanted, self.kafka.group_id),
            run_config=run_config(wanted, "kafka_batch"),
            reexecution_options=options,
        )

    def in_company(self) -> None:
        """Run the other batch to its end, while the first run is between its assets."""
        self.on_between = str
        other = threading.Thread(target=partial(self.run, self.offers[1]))
        other.start()
        other.join()

    def own(self, *numbers: int) -> Seen:
        return [(self.offers[number].batch_id, [str(span(number))]) for number in numbers]


@pytest.mark.parametrize("manager", MANAGERS)
def test_concurrent_runs_load_values_of_their_own_batch(
    instance: dg.DagsterInstance, tmp_path: Path, manager: str
) -> None:
    stage = Stage(instance, MANAGERS[manager](tmp_path))
    stage.on_between = stage.in_company
    assert stage.run(stage.offers[0]).success
    assert stage.seen == stage.own(1, 0)


def test_retried_step_loads_value_of_its_batch(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    stage = Stage(instance, {"io_manager": Folder(path=str(tmp_path))})

    def once_more() -> None:
        stage.on_cleaned = str
        stage.in_company()
        raise dg.RetryRequested(max_retries=1)

    stage.on_cleaned = once_more
    assert stage.run(stage.offers[0]).success
    assert stage.seen == stage.own(0, 1, 0)


def test_re_execution_from_failure_loads_value_of_its_batch(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    stage = Stage(instance, {"io_manager": Folder(path=str(tmp_path))})

    def fail() -> None:
        stage.on_cleaned = str
        raise RuntimeError

    stage.on_cleaned = fail
    failed = stage.run(stage.offers[0])
    assert not failed.success
    record_run_event(
        instance, failed.dagster_run, RunEvent.OVER
    )  # its owner does, once its process is done
    stage.in_company()
    again = stage.run(stage.offers[0], again=failed)
    assert again.success
    assert stage.seen == stage.own(0, 1, 0)
    made = {event.step_key for event in again.all_events if event.is_step_success}
    assert made == {stage.names["cleaned"]}, "the value is that of the first run"


def run(
    instance: dg.DagsterInstance,
    assets: list[dg.AssetsDefinition],
    resources: dict[str, Any],
    others: Sequence[dg.AssetsDefinition] = (),
) -> dg.ExecuteInProcessResult:
    kafka, wanted = kafka_in_memory(), batch_request(unique_name("b"))
    GROUPS[kafka.group_id].committed[tp(0)] = claimed(0, 10, wanted.batch_id)
    made = build_kafka_batch_defs(kafka=kafka, assets=assets, resources=resources)
    defs = dg.Definitions.merge(made, dg.Definitions(assets=others))
    return defs.resolve_job_def("kafka_batches").execute_in_process(
        instance=instance,
        tags=run_tags(wanted, kafka.group_id),
        run_config=run_config(wanted, "kafka_batch"),
    )


@dg.asset
def reference() -> str:
    return "of another asset"


@dg.asset
def raw(kafka_batch: KafkaBatch) -> int:
    return kafka_batch.records


@dg.asset(deps=["elsewhere"])
def doubled(kafka_batch: KafkaBatch, raw: int, reference: str) -> str:
    return f"{kafka_batch.records + raw} {reference}"


@dg.multi_asset(
    outs={"low": dg.AssetOut(key=["two", "low"]), "high": dg.AssetOut(key=["two", "high"])},
    ins={"taken": dg.AssetIn("raw")},
)
def two(kafka_batch: KafkaBatch, taken: int) -> tuple[int, int]:
    return taken - kafka_batch.records, taken + kafka_batch.records


@dg.op
def halved(kafka_batch: KafkaBatch, value: int) -> int:
    return value // 2 + 0 * kafka_batch.records


@dg.op
def as_text(kafka_batch: KafkaBatch, value: int) -> str:
    return f"{value + 0 * kafka_batch.records} of a graph"


@dg.graph_asset(ins={"high": dg.AssetIn(["two", "high"])})
def graph(high: int) -> str:
    text: str = as_text(halved(high))
    return text


def test_values_are_stored_by_batch_with_defaults(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    Path(tmp_path, "reference").write_bytes(pickle.dumps("of another asset"))
    result = run(
        instance,
        [raw, doubled, two, graph],
        {"io_manager": dg.FilesystemIOManager(base_dir=str(tmp_path))},
        [reference],
    )
    assert result.output_for_node("doubled") == "20 of another asset"
    assert result.output_for_node("two", "low") == 0
    assert result.output_for_node("graph") == "10 of a graph"
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/*__batch_*")}
    assert {name.partition("__batch_")[0] for name in kept if "/" not in name} == {"raw"}
    assert Path(tmp_path, "doubled").exists(), "of an asset that no other takes it is the last one"


def test_default_io_manager_is_that_of_dagster(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables may name another one, as in Dagster+ Serverless."""
    monkeypatch.setenv("DAGSTER_DEFAULT_IO_MANAGER_MODULE", __name__)
    monkeypatch.setenv("DAGSTER_DEFAULT_IO_MANAGER_ATTRIBUTE", "of_the_deployment")
    monkeypatch.setenv("OF_THE_DEPLOYMENT", str(tmp_path))
    assert run(instance, [raw, doubled_alone], {}).success
    assert {path.name.partition("__batch_")[0] for path in tmp_path.iterdir()} == {
        "raw",
        "doubled_alone",
    }


@dg.io_manager
def of_the_deployment(_context: dg.InitResourceContext) -> dg.IOManager:
    return Folder(path=os.environ["OF_THE_DEPLOYMENT"])


class ByName(dg.ConfigurableIOManager):
    """Stores by the name of the output, as databases do between the ops of one asset."""

    path: str

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        Path(self.path, context.name).write_bytes(pickle.dumps(obj))

    def load_input(self, context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        assert context.upstream_output is not None
        file = Path(self.path, context.upstream_output.name)
        return pickle.loads(file.read_bytes())  # noqa: S301 - of this test


@dg.op
def seven(kafka_batch: KafkaBatch) -> int:
    return 7 + 0 * kafka_batch.records


@dg.op
def all_records(kafka_batch: KafkaBatch) -> int:
    return kafka_batch.records


@dg.op
def both_values(kafka_batch: KafkaBatch, left: int, right: int) -> str:
    return f"{left} {right} {kafka_batch.records}"


@dg.graph_asset
def inside() -> str:
    text: str = both_values(all_records(), seven())
    return text


def test_values_between_ops_of_one_asset_are_stored_by_batch_and_step(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    for _ in range(2):
        result = run(instance, [inside], {"io_manager": ByName(path=str(tmp_path))})
        assert result.output_for_node("inside") == "10 7 10"
    kept = [path.name for path in tmp_path.iterdir()]
    assert len([name for name in kept if name.startswith("result__batch_")]) == 4


class Bytes(dg.InputManager):
    def __init__(self, path: Path) -> None:
        self._path = path

    def load_input(self, context: dg.InputContext) -> int:
        assert context.upstream_output is not None
        return len(Path(self._path, context.upstream_output.asset_key.path[-1]).read_bytes())


def test_input_manager_loads_value_of_the_batch(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    @dg.asset(ins={"raw": dg.AssetIn(input_manager_key="size")})
    def sized(kafka_batch: KafkaBatch, raw: int) -> int:
        return raw + 0 * kafka_batch.records

    resources = {"io_manager": Folder(path=str(tmp_path)), "size": Bytes(tmp_path)}
    result = run(instance, [raw, sized], resources)
    assert result.output_for_node("sized") == len(pickle.dumps(10))


def test_input_manager_of_another_input_is_not_wrapped() -> None:
    @dg.asset(ins={"reference": dg.AssetIn(input_manager_key="size")})
    def looked_up(kafka_batch: KafkaBatch, raw: int, reference: int) -> int:
        return raw + reference + kafka_batch.records

    size = Bytes(Path("/data"))
    made = build_kafka_batch_defs(kafka=kafka(), assets=[raw, looked_up], resources={"size": size})
    assert made.resources is not None
    assert made.resources["size"] is size


def test_metadata_and_logs_of_io_manager_are_kept(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    result = run(instance, [raw, doubled_alone], {"io_manager": Folder(path=str(tmp_path))})
    (made,) = result.asset_materializations_for_node("raw")
    file = str(made.metadata["file"].value)
    assert Path(file).name.startswith("raw__batch_")
    assert made.asset_key == raw.key
    assert any(f"stored {file}" in entry.user_message for entry in instance.all_logs(result.run_id))


@dg.asset
def doubled_alone(kafka_batch: KafkaBatch, raw: int) -> int:
    return kafka_batch.records + raw


def test_parts_of_a_batch_have_separate_values(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """After a rebalance, two members may each have a part."""
    stage = Stage(instance, {"io_manager": Folder(path=str(tmp_path))})
    one, other = stage.offers
    GROUPS[stage.kafka.group_id].committed[tp(1)] = claimed(0, 10, one.batch_id)
    stage.offers[1] = batch_request(one.batch_id, *other.ranges)
    stage.on_between = stage.in_company
    assert stage.run(one).success
    assert stage.seen == stage.own(1, 0)


def test_asset_of_another_job_loads_value_of_last_batch(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    stage = Stage(instance, {"io_manager": Folder(path=str(tmp_path))})
    raw = stage.assets()[0]
    got: list[list[str]] = []

    @dg.asset(ins={"raw": dg.AssetIn(raw.key)}, name=unique_name("report").replace("-", "_"))
    def report(raw: list[str]) -> None:
        got.append(raw)

    made = build_kafka_batch_defs(
        kafka=stage.kafka, assets=stage.assets(), resources=stage.resources
    )
    job = dg.define_asset_job("reports", selection=[report])
    defs = dg.Definitions.merge(made, dg.Definitions(assets=[report], jobs=[job]))
    for number in (1, 0):
        assert stage.run(stage.offers[number]).success
        assert defs.resolve_job_def("reports").execute_in_process(instance=instance).success
    assert got == [[str(span(1))], [str(span(0))]]
    last = instance.get_latest_materialization_event(raw.key)
    assert last is not None
    instance.delete_run(last.run_id)
    said = defs.resolve_job_def("reports").execute_in_process(
        instance=instance, raise_on_error=False
    )
    assert not said.success


def test_asset_re_executed_alone_loads_value_of_its_batch(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    stage = Stage(instance, {"io_manager": Folder(path=str(tmp_path))})

    def fail() -> None:
        raise RuntimeError

    stage.on_cleaned = fail
    failed = stage.run(stage.offers[0])
    record_run_event(instance, failed.dagster_run, RunEvent.OVER)
    stage.on_cleaned = str
    stage.in_company()
    again = stage.job.execute_in_process(
        instance=instance,
        asset_selection=[dg.AssetKey(stage.names["cleaned"])],
        tags=run_tags(stage.offers[0], stage.kafka.group_id),
        run_config=run_config(stage.offers[0], "kafka_batch"),
    )
    assert again.success
    assert stage.seen == stage.own(0, 1, 0)


def pair(name: str, batch_key: str = "kafka_batch", **settings: Any) -> list[dg.AssetsDefinition]:  # noqa: ANN401 - settings of all kinds
    @dg.asset(name=f"{name}_made", required_resource_keys={batch_key}, **settings)  # type: ignore[untyped-decorator]
    def made() -> int:
        return 1

    @dg.asset(
        name=f"{name}_taker",
        ins={"value": dg.AssetIn(made.key)},
        required_resource_keys={batch_key},
    )
    def taker(value: int) -> int:
        return value

    return [made, taker]


@pytest.mark.parametrize("resources", [{}, {"io_manager": dg.mem_io_manager}])
def test_two_groups_can_share_an_io_manager(resources: dict[str, Any]) -> None:
    both = [
        build_kafka_batch_defs(
            kafka=kafka(name),
            name=name,
            assets=pair(name, f"{name}_batch"),
            resources=resources,
            kafka_key=f"{name}_kafka",
            batch_key=f"{name}_batch",
        )
        for name in ("one", "other")
    ]
    dg.Definitions.validate_loadable(dg.Definitions.merge(*both))


def test_merged_definitions_share_the_wrapper() -> None:
    made, taker = pair("own")
    shared = values_by_batch(dg.mem_io_manager, job="own", assets=[made.key])
    defs = build_kafka_batch_defs(
        kafka=kafka(), name="own", assets=[made, taker], resources={"io_manager": shared}
    )
    others = dg.Definitions(assets=[reference], resources={"io_manager": shared})
    dg.Definitions.validate_loadable(dg.Definitions.merge(defs, others))


def test_io_manager_of_asset_definition_is_refused() -> None:
    bound = {"kafka_batch": KafkaBatch(kafka=kafka()), "io_manager": dg.FilesystemIOManager()}
    assets = dg.with_resources(pair("bound"), bound)
    with pytest.raises(
        ConfigurationError,
        match=r"asset bound_taker takes the value of asset bound_made .* 'io_manager' is part of",
    ):
        build_kafka_batch_defs(kafka=kafka(), assets=assets)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_io_manager_of_merged_definitions_is_checked_in_first_tick(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, *, is_wrapped: bool
) -> None:
    monkeypatch.setattr(sensor_module, "is_real_tick", lambda _context: True)
    monkeypatch.setattr(sensor_module, "HostedMember", stop_here)
    assets, manager = pair("lake", io_manager_key="lake"), dg.FilesystemIOManager()
    lake = values_by_batch(manager, job="kafka_batches", assets=[assets[0].key])
    group = kafka_in_memory()
    defs = dg.Definitions.merge(
        build_kafka_batch_defs(kafka=group, assets=assets),
        dg.Definitions(
            assets=pair("of_another_job", io_manager_key="plain"),
            resources={"lake": lake if is_wrapped else manager, "plain": manager},
        ),
    )
    says = "here" if is_wrapped else "asset lake_taker takes .* resource 'lake' as values_by_batch"
    with (
        dg.build_sensor_context(
            instance=instance,
            definitions=defs,
            resources={"kafka": group},
            sensor_name="kafka_batches_sensor",
        ) as context,
        pytest.raises(ConfigurationError, match=says),
    ):
        defs.resolve_sensor_def("kafka_batches_sensor").evaluate_tick(context)


def stop_here(*_: object, **__: object) -> NoReturn:
    msg = "here"
    raise ConfigurationError(msg)


def test_io_manager_can_have_a_nested_resource(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    @dg.asset
    def text(kafka_batch: KafkaBatch, raw: str) -> str:
        return f"{raw} for {kafka_batch.records}"

    nested = Nested(where=Where(path=str(tmp_path)))
    result = run(instance, [raw, text], {"io_manager": nested})
    assert result.output_for_node("text") == "10 for 10"


def test_io_manager_with_resource_configured_at_launch_is_refused() -> None:
    where = Where.configure_at_launch()
    with pytest.raises(ConfigurationError, match="has a resource that is configured at launch"):
        build_kafka_batch_defs(
            kafka=kafka(),
            assets=pair("nested"),
            resources={"where": where, "io_manager": Nested(where=where)},
        )


class OnePlace(dg.ConfigurableIOManager):
    path: str

    def handle_output(self, _context: dg.OutputContext, obj: object) -> None:
        Path(self.path, "value").write_bytes(pickle.dumps(obj))

    def load_input(self, _context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        return pickle.loads(Path(self.path, "value").read_bytes())  # noqa: S301 - of this test


def test_io_manager_that_ignores_the_key_fails_the_run(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="OnePlace stored a value between assets"):
        run(instance, [raw, doubled_alone], {"io_manager": OnePlace(path=str(tmp_path))})


def job_of(pair_of: list[dg.AssetsDefinition], manager: object) -> dg.JobDefinition:
    return dg.Definitions(
        assets=pair_of,
        jobs=[dg.define_asset_job("own", selection=pair_of, executor_def=dg.in_process_executor)],
        resources={"io_manager": manager, "kafka_batch": KafkaBatch(kafka=kafka())},
    ).resolve_job_def("own")


def test_own_job_without_values_by_batch_is_refused() -> None:
    assets = pair("own")
    with pytest.raises(ConfigurationError, match=r"values_by_batch\(\.\.\., job='own'"):
        build_kafka_batch_sensor(name="own_sensor", job=job_of(assets, dg.mem_io_manager))
    other = values_by_batch(dg.FilesystemIOManager(), job="other", assets=[assets[0].key])
    with pytest.raises(ConfigurationError, match=r"values_by_batch\(\.\.\., job='own'"):
        build_kafka_batch_sensor(name="own_sensor", job=job_of(assets, other))
    kept = values_by_batch(dg.FilesystemIOManager(), job="own", assets=[assets[0].key])
    build_kafka_batch_sensor(name="own_sensor", job=job_of(assets, kept))

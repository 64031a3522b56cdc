"""Every form of asset, check, result, option and resource that Dagster 1.13 documents.

Each row is played in both forms of run by `test_asset_table.py`. `python -m
tests.orchestration.asset_table` writes the table of docs/assets.md from it.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of assets.
# ruff: noqa: ANN001, ANN201, ANN401, ARG001, FBT003 - rows of a table
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import PrivateAttr

from dagster_rebalance import KafkaBatch

PAGE = Path(__file__).parents[2] / "docs" / "assets.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
os.environ["RATE_OF_TABLE"] = "9"
SEEN: dict[str, list[Any]] = {}
"""Values recorded by the functions, by function name."""


def note(name: str, what: object) -> None:
    SEEN.setdefault(name, []).append(what)


@dataclass
class Outcome:
    """Events of a run in Dagster, and the values that its assets recorded."""

    made: dict[str, list[dg.AssetMaterialization]] = field(default_factory=dict)
    observed: dict[str, list[dg.AssetObservation]] = field(default_factory=dict)
    checked: dict[str, bool] = field(default_factory=dict)
    seen: dict[str, list[Any]] = field(default_factory=dict)

    def has_made(self, *keys: str) -> None:
        for key in keys:
            assert len(self.made.get(key, [])) == 1, f"{key} was not materialized once"

    def metadata(self, key: str, name: str) -> object:
        (made,) = self.made[key]
        return made.metadata[name].value

    def tag(self, key: str, name: str) -> str | None:
        (made,) = self.made[key]
        return (made.tags or {}).get(name)


@dataclass(frozen=True)
class Form:
    """A row.

    Attributes:
        area: The heading.
        name: The form, as Dagster names it.
        given: The value of `assets=`.
        resources: Resources of the assets.
        batch: Part of the message with which per-batch runs refuse the form.
        stream: Part of the message with which streaming runs refuse it.
        named: Text that both messages must contain; by default the key of the asset.
        makes: The assets that a run materializes once; by default all that are given.
        absent: An asset that it does not materialize.
        key: The asset that has the metadata and tags; by default the first that is made.
        metadata: Metadata of its materialization.
        tags: Tags of its materialization.
        checked: Checks and whether they passed.
        noted: What its functions have noted.
        works: What else must be true behind a run.
    """

    area: str
    name: str
    given: tuple[Any, ...]
    resources: dict[str, Any] = field(default_factory=dict)
    batch: str = ""
    stream: str = ""
    named: str = ""
    makes: tuple[str, ...] | None = None
    absent: str = ""
    key: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    checked: dict[str, bool] = field(default_factory=dict)
    noted: dict[str, list[Any]] = field(default_factory=dict)
    works: Callable[[Outcome], None] = lambda _outcome: None

    def __str__(self) -> str:
        return f"{self.area}: {self.name}"

    @property
    def keys(self) -> list[str]:
        """The keys of the assets."""
        given = [one for one in self.given if isinstance(one, dg.AssetsDefinition)]
        return sorted(key.to_user_string() for one in given for key in one.keys)

    def check(self, outcome: Outcome) -> None:
        """Check the outcome of a run."""
        made = self.keys if self.makes is None else self.makes
        outcome.has_made(*made)
        assert self.absent not in outcome.made
        for name, value in self.metadata.items():
            assert outcome.metadata(self.key or made[0], name) == value
        for name, value in self.tags.items():
            assert outcome.tag(self.key or made[0], name) == value
        assert outcome.checked.items() >= self.checked.items()
        assert [outcome.seen.get(name) for name in self.noted] == [*self.noted.values()]
        self.works(outcome)

    def shown(self) -> str:
        """Return the text that a refusal must contain."""
        return self.named or ", ".join(self.keys)


ROWS: list[Form] = []
T = TypeVar("T")


def row(area: str, name: str, **settings: Any) -> Callable[[T], T]:
    """Add a row for the definition that is given, or decorated."""

    def add(given: T) -> T:
        ROWS.append(Form(area, name, (given,), **settings))
        return given

    return add


OF_OPS = "call the functions of its ops in one asset, or use build_kafka_batch_defs"
BESIDE = "give it to dg.Definitions(assets=[...]) beside these definitions"
WITH_BATCH = "give it a parameter `kafka_batch: KafkaBatch`"
FOR_IO_MANAGER = (
    "write the output in the function and return dg.MaterializeResult, or use "
    "build_kafka_batch_defs"
)
APART = "give it to dg.Definitions(asset_checks=[...])"
NO_CONFIG = "give the asset a resource with these values"
BY_RANGE = "key the output by the ranges of the batch"
BY_SENSOR = "remove it"
BY_RUNS = "limit the concurrency with the argument `runs`"
AT_LAUNCH = "give its values in its definition, such as dg.EnvVar"


# Definitions

DEFINITIONS = "Definitions"


@row(DEFINITIONS, "`@dg.asset`")
@dg.asset
def plain(kafka_batch: KafkaBatch) -> None:
    note("plain", kafka_batch.offset_ranges)


@row(DEFINITIONS, "`@dg.multi_asset(specs=...)`")
@dg.multi_asset(specs=[dg.AssetSpec("left"), dg.AssetSpec("right", deps=["left"])])
def left_and_right(kafka_batch: KafkaBatch):
    pass


@row(DEFINITIONS, "`@dg.multi_asset`, a result for each asset", key="down", metadata={"n": 2})
@dg.multi_asset(specs=[dg.AssetSpec("up"), dg.AssetSpec("down")])
def up_and_down(kafka_batch: KafkaBatch):
    yield dg.MaterializeResult(asset_key="up", metadata={"n": 1})
    yield dg.MaterializeResult(asset_key="down", metadata={"n": 2})


@row(DEFINITIONS, "`@dg.multi_asset(outs=...)` without values")
@dg.multi_asset(outs={"out_a": dg.AssetOut(), "out_b": dg.AssetOut(key=["deep", "out_b"])})
def outs(kafka_batch: KafkaBatch):
    return None, None


@row(DEFINITIONS, "`@dg.multi_asset(can_subset=True)`")
@dg.multi_asset(
    specs=[dg.AssetSpec("part_a", skippable=True), dg.AssetSpec("part_b", skippable=True)],
    can_subset=True,
)
def parts(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch):
    for key in sorted(context.selected_asset_keys):
        yield dg.MaterializeResult(asset_key=key)


@row(
    DEFINITIONS,
    "`dg.AssetSpec(skippable=True)` that is left out",
    makes=("there",),
    absent="absent",
)
@dg.multi_asset(specs=[dg.AssetSpec("there"), dg.AssetSpec("absent", skippable=True)])
def some(kafka_batch: KafkaBatch):
    yield dg.MaterializeResult(asset_key="there")


@dg.op
def op_of_asset(kafka_batch: KafkaBatch) -> None:
    pass


row(DEFINITIONS, "`dg.AssetsDefinition.from_op`")(dg.AssetsDefinition.from_op(op_of_asset))


@dg.op
def op_of_graph(kafka_batch: KafkaBatch):
    return 1


@row(DEFINITIONS, "`@dg.graph_asset`, each op of which takes the batch", stream=OF_OPS)
@dg.graph_asset
def graph_backed():
    return op_of_graph()


@row(DEFINITIONS, "`@dg.graph_multi_asset`", stream=OF_OPS)
@dg.graph_multi_asset(outs={"graph_a": dg.AssetOut(), "graph_b": dg.AssetOut()})
def graph_of_two():
    return {"graph_a": op_of_graph(), "graph_b": op_of_graph()}


@dg.graph
def graph_itself():
    return op_of_graph()


row(DEFINITIONS, "`dg.AssetsDefinition.from_graph`", stream=OF_OPS)(
    dg.AssetsDefinition.from_graph(graph_itself)
)
row(
    DEFINITIONS, "`dg.AssetSpec`, an external asset", batch=BESIDE, stream=BESIDE, named="elsewhere"
)(dg.AssetSpec("elsewhere"))
row(DEFINITIONS, "`dg.AssetsDefinition(specs=...)`, external assets", batch=BESIDE, stream=BESIDE)(
    dg.AssetsDefinition(specs=[dg.AssetSpec("outside")])
)


@row(DEFINITIONS, "`@dg.observable_source_asset`", batch=BESIDE, stream=BESIDE, named="source")
@dg.observable_source_asset
def source() -> dg.DataVersion:
    return dg.DataVersion("1")


@row(DEFINITIONS, "`@dg.multi_observable_source_asset`", batch=BESIDE, stream=BESIDE)
@dg.multi_observable_source_asset(specs=[dg.AssetSpec("sources")])
def sources() -> None:
    pass


# Functions

FUNCTIONS = "Functions"


@row(FUNCTIONS, "`async def`", metadata={"n": 1})
@dg.asset
async def coroutine(kafka_batch: KafkaBatch):
    note("coroutine", True)
    return dg.MaterializeResult(metadata={"n": 1})


@row(FUNCTIONS, "a generator", metadata={"n": 1})
@dg.asset
def generator(kafka_batch: KafkaBatch):
    yield dg.MaterializeResult(metadata={"n": 1})


@row(FUNCTIONS, "an async generator", metadata={"n": 1})
@dg.asset
async def async_generator(kafka_batch: KafkaBatch):
    yield dg.MaterializeResult(metadata={"n": 1})


def _scaled(kafka_batch: KafkaBatch) -> None:
    pass


row(FUNCTIONS, "`functools.partial`")(dg.asset(name="of_partial")(partial(_scaled)))


class Worker:
    def __call__(self, kafka_batch: KafkaBatch) -> None:
        pass


row(FUNCTIONS, "a callable object")(dg.asset(name="of_object")(Worker()))


@row(FUNCTIONS, "`context: dg.AssetExecutionContext` (`log`, `run`, `instance`, `asset_key`, ...)")
@dg.asset
def of_context(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    context.log.info("a line")
    assert (context.asset_key, bool(context.job_name)) == (dg.AssetKey("of_context"), True)
    assert context.selected_asset_keys == {dg.AssetKey("of_context")}
    assert context.asset_key_for_output() == dg.AssetKey("of_context")
    assert context.output_for_asset_key(context.asset_key) == "result"
    assert context.instance.get_run_by_id(context.run.run_id) is not None


@row(FUNCTIONS, "`context: dg.OpExecutionContext`")
@dg.asset
def of_op_context(context: dg.OpExecutionContext, kafka_batch: KafkaBatch) -> None:
    assert isinstance(context, dg.OpExecutionContext)
    note("of_op_context", context.run_id)


@row(
    FUNCTIONS,
    "`kafka_batch` without an annotation",
    batch="give it a parameter `kafka_batch: KafkaBatch`",
)
@dg.asset
def unannotated(kafka_batch) -> None:
    note("unannotated", kafka_batch.batch_id)


@row(FUNCTIONS, '`required_resource_keys={"kafka_batch"}`, no parameter')
@dg.asset(required_resource_keys={"kafka_batch"})
def batch_of_context(context: dg.AssetExecutionContext) -> None:
    note("batch_of_context", context.resources.kafka_batch.batch_id)


@row(FUNCTIONS, "without the batch", batch=WITH_BATCH, stream=WITH_BATCH)
@dg.asset
def without_batch() -> None:
    pass


@row(
    FUNCTIONS,
    "the value of another asset as a parameter, `dg.AssetIn`",
    stream="read the output of another asset from its storage",
)
@dg.asset
def takes_value(kafka_batch: KafkaBatch, returns_value: int) -> None:
    pass


# Results

RESULTS = "Results"


@row(RESULTS, "a value, with an annotation (`-> int`)", stream=FOR_IO_MANAGER)
@dg.asset
def returns_value(kafka_batch: KafkaBatch) -> int:
    return 5


@row(RESULTS, "`dg.MaterializeResult[int]` with a value", stream=FOR_IO_MANAGER)
@dg.asset
def result_with_value(kafka_batch: KafkaBatch) -> dg.MaterializeResult[int]:
    return dg.MaterializeResult(value=5)


@row(RESULTS, "`dg.Output[int]` with a value", stream=FOR_IO_MANAGER)
@dg.asset
def output_with_value(kafka_batch: KafkaBatch) -> dg.Output[int]:
    return dg.Output(5)


@row(
    RESULTS,
    "`dg.Output(None, metadata=, data_version=, tags=)`",
    metadata={"n": 1},
    tags={"dagster/data_version": "v", "team": "t"},
)
@dg.asset
def output_of_nothing(kafka_batch: KafkaBatch) -> dg.Output[None]:
    return dg.Output(None, metadata={"n": 1}, data_version=dg.DataVersion("v"), tags={"team": "t"})


@row(
    RESULTS,
    "`dg.MaterializeResult(metadata=, data_version=, tags=, check_results=)`",
    metadata={"n": 1, "url": "https://example.org"},
    tags={
        "dagster/data_version": "v",
        "dagster/data_version_is_user_provided": "true",
        "team": "t",
    },
    checked={"full_result:inside": True},
)
@dg.asset(check_specs=[dg.AssetCheckSpec("inside", asset="full_result")])
def full_result(kafka_batch: KafkaBatch):
    return dg.MaterializeResult(
        metadata={"n": 1, "url": dg.MetadataValue.url("https://example.org")},
        data_version=dg.DataVersion("v"),
        tags={"team": "t"},
        check_results=[dg.AssetCheckResult(passed=True)],
    )


@row(RESULTS, "`-> dg.MaterializeResult | None`")
@dg.asset
def result_or_none(kafka_batch: KafkaBatch) -> dg.MaterializeResult[Any] | None:
    return None


@row(
    RESULTS,
    "`yield dg.AssetMaterialization(...)` of another asset",
    makes=(
        "yields_event",
        "logged_a",
    ),
)
@dg.asset
def yields_event(kafka_batch: KafkaBatch):
    yield dg.AssetMaterialization("logged_a", metadata={"n": 1})
    yield dg.Output(None)


@row(
    RESULTS,
    "`context.log_event(dg.AssetMaterialization(...))`",
    makes=(
        "logs_event",
        "logged_b",
    ),
)
@dg.asset
def logs_event(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    context.log_event(dg.AssetMaterialization("logged_b", metadata={"n": 1}))


def _observed(outcome: Outcome) -> None:
    outcome.has_made("observes")
    assert len(outcome.observed["seen_elsewhere"]) == 1


@row(RESULTS, "`yield dg.AssetObservation(...)`", works=_observed)
@dg.asset
def observes(kafka_batch: KafkaBatch):
    yield dg.AssetObservation("seen_elsewhere", metadata={"n": 1})
    yield dg.Output(None)


@row(RESULTS, "`yield dg.ExpectationResult(...)`")
@dg.asset
def expects(kafka_batch: KafkaBatch):
    yield dg.ExpectationResult(success=True, label="fits")
    yield dg.Output(None)


@row(RESULTS, "`dg.ObserveResult` (Dagster takes it for a materialization)", metadata={"n": 1})
@dg.asset
def observe_result(kafka_batch: KafkaBatch):
    return dg.ObserveResult(metadata={"n": 1})


@row(RESULTS, "`context.add_output_metadata`", metadata={"n": 1})
@dg.asset
def adds_output_metadata(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    context.add_output_metadata({"n": 1})


@row(RESULTS, "`context.add_asset_metadata`", metadata={"n": 1})
@dg.asset
def adds_asset_metadata(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    context.add_asset_metadata({"n": 1})


def _added_to_one(outcome: Outcome) -> None:
    assert outcome.metadata("meta_b", "n") == 1
    assert outcome.metadata("meta_a", "m") == 2
    assert "n" not in outcome.made["meta_a"][0].metadata


@row(RESULTS, "metadata for one of several assets", works=_added_to_one)
@dg.multi_asset(specs=[dg.AssetSpec("meta_a"), dg.AssetSpec("meta_b")])
def adds_to_one(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch):
    context.add_asset_metadata({"n": 1}, asset_key="meta_b")
    context.add_output_metadata({"m": 2}, output_name="meta_a")


# Checks

CHECKS = "Checks"


@row(
    CHECKS,
    "`check_specs`, `dg.AssetCheckResult` yielded beside the result",
    checked={"yields_check:red": False},
)
@dg.asset(check_specs=[dg.AssetCheckSpec("red", asset="yields_check")])
def yields_check(kafka_batch: KafkaBatch):
    yield dg.MaterializeResult(metadata={"n": 1})
    yield dg.AssetCheckResult(passed=False)


@row(
    CHECKS,
    "`check_specs`, `dg.AssetCheckResult` beside `dg.Output`",
    checked={"returns_check:only": True},
)
@dg.asset(check_specs=[dg.AssetCheckSpec("only", asset="returns_check")])
def returns_check(kafka_batch: KafkaBatch):
    yield dg.Output(None)
    yield dg.AssetCheckResult(passed=True, check_name="only", metadata={"n": 1})


@row(CHECKS, "`dg.AssetCheckSpec(blocking=True)`", checked={"blocking:stops": True})
@dg.asset(check_specs=[dg.AssetCheckSpec("stops", asset="blocking", blocking=True)])
def blocking(kafka_batch: KafkaBatch):
    return dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=True)])


@row(CHECKS, "`@dg.multi_asset(check_specs=...)`", checked={"of_a:c": True, "of_b:c": False})
@dg.multi_asset(
    specs=[dg.AssetSpec("of_a"), dg.AssetSpec("of_b")],
    check_specs=[dg.AssetCheckSpec("c", asset="of_a"), dg.AssetCheckSpec("c", asset="of_b")],
)
def checks_of_two(kafka_batch: KafkaBatch):
    for key, passed in (("of_a", True), ("of_b", False)):
        yield dg.MaterializeResult(asset_key=key)
        yield dg.AssetCheckResult(passed=passed, check_name="c", asset_key=dg.AssetKey(key))


@row(CHECKS, "`@dg.asset_check`", batch=APART, stream=APART, named="apart")
@dg.asset_check(asset="plain")
def apart():
    return dg.AssetCheckResult(passed=True)


@row(CHECKS, "`@dg.multi_asset_check`", batch=APART, stream=APART, named="apart_a")
@dg.multi_asset_check(specs=[dg.AssetCheckSpec("apart_a", asset="plain")])
def several_apart():
    yield dg.AssetCheckResult(passed=True)


# Options

OPTIONS = "Options"


@row(
    OPTIONS,
    "`key_prefix`, `group_name`, `tags`, `owners`, `kinds`, `metadata`, `description`, "
    "`freshness_policy`",
)
@dg.asset(
    key_prefix="shop",
    group_name="orders",
    tags={"domain": "shop"},
    owners=["team:shop"],
    kinds={"parquet"},
    metadata={"dagster/uri": "s3://shop"},
    description="Orders.",
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(days=1)),
)
def described(kafka_batch: KafkaBatch) -> None:
    pass


def _versions(outcome: Outcome) -> None:
    assert outcome.tag("versioned", "dagster/code_version") == "7"
    assert outcome.tag("versioned", "dagster/data_version")
    assert outcome.tag("versioned", "dagster/input_data_version/outside_a") == "INITIAL"
    plain_version = outcome.tag("plain", "dagster/data_version")
    assert outcome.tag("versioned", "dagster/input_data_version/plain") == plain_version


@row(OPTIONS, "`code_version`, and `deps` with their data versions", works=_versions)
@dg.asset(code_version="7", deps=["outside_a", "plain"])
def versioned(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, "`ins` of type `dg.Nothing`")
@dg.asset(ins={"behind": dg.AssetIn(key="plain", dagster_type=dg.Nothing)})
def nothing_in(kafka_batch: KafkaBatch) -> None:
    pass


class Day(dg.Config):
    day: str


class DayWithDefault(dg.Config):
    day: str = ""


@row(
    OPTIONS,
    "`config: dg.Config` with a required value",
    batch="a resource with these values",
    stream=NO_CONFIG,
)
@dg.asset
def needs_config(kafka_batch: KafkaBatch, config: Day) -> None:
    pass


@row(OPTIONS, "`config: dg.Config`, each value with a default", stream=NO_CONFIG)
@dg.asset
def has_config(kafka_batch: KafkaBatch, config: DayWithDefault) -> None:
    note("has_config", config.day)


@row(OPTIONS, "`config_schema`, each value with a default", stream=NO_CONFIG)
@dg.asset(config_schema={"day": dg.Field(str, default_value="")})
def has_schema(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    note("has_schema", context.op_execution_context.op_config)


@row(OPTIONS, "`partitions_def`", batch=BY_RANGE, stream=BY_RANGE)
@dg.asset(partitions_def=dg.DailyPartitionsDefinition("2026-01-01"))
def by_day(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, "`backfill_policy`, which has no effect without partitions")
@dg.asset(backfill_policy=dg.BackfillPolicy.single_run())
def with_backfill(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, "`automation_condition`", batch=BY_SENSOR, stream=BY_SENSOR)
@dg.asset(automation_condition=dg.AutomationCondition.eager())
def automated(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, "`pool`", stream=BY_RUNS)
@dg.asset(pool="database")
def pooled(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, '`op_tags={"dagster/concurrency_key": ...}`', stream=BY_RUNS)
@dg.asset(op_tags={"dagster/concurrency_key": "database"})
def pooled_by_tag(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, "other `op_tags`")
@dg.asset(op_tags={"team": "shop"})
def tagged_op(kafka_batch: KafkaBatch) -> None:
    pass


@row(
    OPTIONS,
    "`retry_policy`",
    batch="a failed batch is retried in another run",
    stream="set `max_attempts` and `retry_delay_s` of the group",
)
@dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
def retried(kafka_batch: KafkaBatch) -> None:
    pass


@dg.success_hook
def hook(_context: dg.HookContext) -> None:
    note("hook", True)


@row(
    OPTIONS,
    "`hooks`",
    stream="report failures in the function, or with an alert on the check `no_partition_stopped`",
)
@dg.asset(hooks={hook})
def hooked(kafka_batch: KafkaBatch) -> None:
    pass


@row(OPTIONS, "`output_required=False`, and nothing yielded", makes=(), absent="optional")
@dg.asset(output_required=False)
def optional(kafka_batch: KafkaBatch):
    if not kafka_batch.records:
        yield dg.Output(None)


@row(OPTIONS, "`dagster_type`", stream=FOR_IO_MANAGER)
@dg.asset(dagster_type=dg.Int)  # type: ignore[call-overload] # mypy takes the type for int
def typed(kafka_batch: KafkaBatch):
    return 5


class Store(dg.ConfigurableIOManager):
    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        note("Store", obj)

    def load_input(self, context: dg.InputContext) -> object:
        return 5


@row(OPTIONS, "`io_manager_def`", stream=FOR_IO_MANAGER)
@dg.asset(io_manager_def=Store())
def with_manager(kafka_batch: KafkaBatch) -> int:
    return 5


@row(OPTIONS, "`io_manager_key`", stream=FOR_IO_MANAGER, resources={"store": Store()})
@dg.asset(io_manager_key="store")
def with_manager_key(kafka_batch: KafkaBatch) -> int:
    return 6


class Rate(dg.ConfigurableResource[Any]):
    rate: int


@row(OPTIONS, "`resource_defs`")
@dg.asset(resource_defs={"own_rate": Rate(rate=3)})
def with_own_resource(kafka_batch: KafkaBatch, own_rate: Rate) -> None:
    assert own_rate.rate == 3


# Resources

RESOURCES = "Resources"


@row(RESOURCES, "`dg.ConfigurableResource`", resources={"rate": Rate(rate=2)})
@dg.asset
def takes_resource(kafka_batch: KafkaBatch, rate: Rate) -> None:
    assert rate.rate == 2


class Outer(dg.ConfigurableResource[Any]):
    inner: Rate


@row(RESOURCES, "a resource with a nested one", resources={"outer": Outer(inner=Rate(rate=4))})
@dg.asset
def takes_nested(kafka_batch: KafkaBatch, outer: Outer) -> None:
    assert outer.inner.rate == 4


class Plain:
    """A class of a user, no resource of Dagster."""


@dg.resource
def legacy(_context: dg.InitResourceContext) -> Plain:
    return Plain()


class Depends(dg.ConfigurableResource[Any]):
    other: dg.ResourceDependency[Plain]


@row(RESOURCES, "`dg.ResourceDependency`", resources={"depends": Depends(other=legacy)})
@dg.asset
def takes_dependent(kafka_batch: KafkaBatch, depends: Depends) -> None:
    assert isinstance(depends.other, Plain)


@row(RESOURCES, "`@dg.resource`, and `dg.ResourceParam`", resources={"of_function": legacy})
@dg.asset
def takes_legacy(kafka_batch: KafkaBatch, of_function: dg.ResourceParam[Plain]) -> None:
    assert isinstance(of_function, Plain)


@dg.resource
def opened(_context: dg.InitResourceContext) -> Iterator[list[str]]:
    state = ["open"]
    yield state
    note("opened", state.pop())


@row(
    RESOURCES,
    "`required_resource_keys` and `context.resources`, a generator as the resource",
    resources={"opened": opened},
    noted={"opened": ["open"]},
)
@dg.asset(required_resource_keys={"opened", "kafka_batch"})
def takes_from_context(context: dg.AssetExecutionContext) -> None:
    assert context.resources.opened == ["open"]


class Session(dg.ConfigurableResource[Any]):
    _is_open: bool = PrivateAttr(default=False)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["Session"]:
        self._is_open = True
        yield self
        note("Session", "closed")

    def check(self) -> None:
        assert self._is_open


@row(
    RESOURCES,
    "`yield_for_execution`, `setup_for_execution`",
    resources={"session": Session()},
    noted={"Session": ["closed"]},
)
@dg.asset
def takes_session(kafka_batch: KafkaBatch, session: Session) -> None:
    session.check()


class Client(dg.ConfigurableResource[Any], dg.IAttachDifferentObjectToOpContext):
    bucket: str

    def get_client(self) -> Plain:
        return Plain()

    def get_object_to_set_on_execution_context(self) -> Plain:
        return self.get_client()


@row(
    RESOURCES,
    "a resource that is another object in `context.resources`, as `S3Resource` is",
    resources={"client": Client(bucket="b")},
)
@dg.asset
def takes_client(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, client: Client
) -> None:
    assert client.bucket == "b"
    assert isinstance(client.get_client(), Plain)
    assert isinstance(context.resources.client, Plain)


class AsyncSession(dg.ConfigurableResource[Any]):
    _loop: object = PrivateAttr(default=None)

    @asynccontextmanager
    async def yield_for_execution(  # type: ignore[override] # Dagster takes both, and types one
        self, context: dg.InitResourceContext
    ) -> AsyncIterator["AsyncSession"]:
        self._loop = asyncio.get_running_loop()
        yield self
        note("AsyncSession", asyncio.get_running_loop() is self._loop)

    def check(self) -> None:
        assert asyncio.get_running_loop() is self._loop


@row(
    RESOURCES,
    "an async `yield_for_execution`, in the event loop of an `async def`",
    resources={"async_session": AsyncSession()},
    noted={"AsyncSession": [True]},
)
@dg.asset
async def takes_async(kafka_batch: KafkaBatch, async_session: AsyncSession) -> None:
    async_session.check()


@row(
    RESOURCES,
    "`dg.EnvVar` as a value of a resource",
    resources={"of_variable": Rate(rate=dg.EnvVar.int("RATE_OF_TABLE"))},
)
@dg.asset
def takes_variable(kafka_batch: KafkaBatch, of_variable: Rate) -> None:
    assert of_variable.rate == 9


@row(
    RESOURCES,
    "a resource of another library (`dagster_pyspark.LazyPySparkResource`)",
    resources={"pyspark": LazyPySparkResource(spark_config={"spark.app.name": "table"})},
)
@dg.asset
def takes_pyspark(kafka_batch: KafkaBatch, pyspark: LazyPySparkResource) -> None:
    assert pyspark.spark_config == {"spark.app.name": "table"}


@row(RESOURCES, "`dg.ConfigurableIOManager` as a resource", resources={"manager": Store()})
@dg.asset
def takes_manager(kafka_batch: KafkaBatch, manager: dg.ResourceParam[Store]) -> None:
    assert manager.load_input(None) == 5  # type: ignore[arg-type] # needs none


@row(
    RESOURCES,
    "`configure_at_launch()`, and a required `config_schema`",
    resources={"at_launch": Rate.configure_at_launch()},
    batch=AT_LAUNCH,
    stream=AT_LAUNCH,
    named="at_launch",
)
@dg.asset
def waits(kafka_batch: KafkaBatch, at_launch: dg.ResourceParam[Rate]) -> None:
    pass


# Pipes

PIPES = "Dagster Pipes"
SCRIPT = """
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    for key in pipes.asset_keys:
        pipes.report_asset_materialization({"n": 1}, data_version="v", asset_key=key)
        if key == "pipes_results":
            pipes.report_asset_check(asset_key=key, check_name="p", passed=True)
"""
COMMAND = [sys.executable, "-c", SCRIPT]


@row(
    PIPES,
    "`client.run(...).get_results()`",
    metadata={"n": 1},
    checked={"pipes_results:p": True},
    resources={"pipes": dg.PipesSubprocessClient()},
)
@dg.asset(check_specs=[dg.AssetCheckSpec("p", asset="pipes_results")])
def pipes_results(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: dg.PipesSubprocessClient
):
    return pipes.run(
        command=COMMAND, context=context, extras=kafka_batch.pipes_extras()
    ).get_results()


@row(
    PIPES,
    "`client.run(...).get_materialize_result()`",
    tags={"dagster/data_version": "v"},
    resources={"pipes": dg.PipesSubprocessClient()},
)
@dg.asset
def pipes_result(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: dg.PipesSubprocessClient
):
    return pipes.run(context=context, command=COMMAND).get_materialize_result()


@row(
    PIPES,
    "`dg.open_pipes_session`, `yield from session.get_results()`",
    key="pipes_b",
    metadata={"n": 1},
)
@dg.multi_asset(specs=[dg.AssetSpec("pipes_a"), dg.AssetSpec("pipes_b")])
def pipes_session(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch):
    with dg.open_pipes_session(
        context=context,
        context_injector=dg.PipesTempFileContextInjector(),
        message_reader=dg.PipesTempFileMessageReader(),
    ) as session:
        subprocess.run(COMMAND, env={**os.environ, **session.get_bootstrap_env_vars()}, check=True)
    yield from session.get_results()


# The page


def table() -> str:
    """The forms that one of the two kinds of run refuses."""
    lines = ["| form | per-batch run | streaming run |", "|---|---|---|"]
    refused: dict[tuple[str, str], list[str]] = {}
    for form in ROWS:
        if form.batch or form.stream:
            refused.setdefault((form.batch, form.stream), []).append(form.name)
    lines += [
        f"| {'; '.join(names)} | {batch or 'works'} "
        f"| {'the same' if stream == batch else stream or 'works'} |"
        for (batch, stream), names in refused.items()
    ]
    return "\n".join([*lines, ""])


def page(text: str) -> str:
    """The page with the table of now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

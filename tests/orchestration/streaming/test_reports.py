"""Reports of what the assets of a streaming run return: joined results and checks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import Message

from dagster_rebalance import KafkaBatch
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from dagster_rebalance.orchestration.streaming.asset_calls import AssetCall
from dagster_rebalance.orchestration.streaming.joined_results import SUMS_KEY
from dagster_rebalance.orchestration.streaming.reports import BatchReports
from tests.orchestration.parts import span, tp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

EVERY_S = 600.0
ORDERS, TOTALS = dg.AssetKey("orders"), dg.AssetKey("totals")
GOOD = dg.AssetCheckSpec("good", asset=ORDERS)
STRICT = dg.AssetCheckSpec("strict", asset=ORDERS, blocking=True)
SPECS = [
    dg.AssetSpec(ORDERS, metadata={SUMS_KEY: ["rows", "seconds"]}),
    dg.AssetSpec(TOTALS, deps=[ORDERS]),
]


class Heartbeat:
    def beat(self, _: object) -> None:
        """Is accepted."""

    def reporting(self) -> AbstractContextManager[None]:
        return nullcontext()


class Ground:
    """Reports with a clock of the test, and what Dagster has received."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.now = 0.0
        self.told: list[Any] = []
        self.logged: list[str] = []
        self.errors: list[Exception] = []
        self.number = self.offset = 0
        instance = SimpleNamespace(
            report_runless_asset_event=self.tell,
            get_latest_data_version_record=lambda _: None,
        )
        context: Any = SimpleNamespace(
            assets_def=SimpleNamespace(specs=SPECS, check_specs=[GOOD, STRICT]),
            instance=instance,
            run=SimpleNamespace(run_id="run-1"),
            log_event=self.tell,
            op_execution_context=SimpleNamespace(consume_events=lambda: ()),
        )
        self.context = context
        heartbeat: Any = Heartbeat()
        self.reports = BatchReports(
            context,
            heartbeat,
            lambda text, *given: self.logged.append(text % given),
            every_s,
            lambda: self.now,
        )

    def tell(self, event: object) -> None:
        if self.errors:
            raise self.errors.pop()
        self.told.append(event)

    def batch(
        self,
        *made: Any,  # noqa: ANN401 - of all kinds
        held: tuple[int, ...] = (),
        fails: bool = False,
        set_aside: int = 0,
    ) -> None:
        """Process the next ten offsets of a partition."""
        self.number += 1
        batch = KafkaBatch.for_testing(
            [span(0, self.offset, self.offset + 10)],
            batch_id=str(StreamBatch("run-1", self.number)),
        )
        bad = range(self.offset, self.offset + set_aside)
        batch.set_aside((Message(topic="orders", partition=0, offset=at) for at in bad), "late")
        self.reports.begin()
        for one in made:
            self.reports.failed_of(self.reports.add(one, batch))
        if fails:
            self.reports.fail()
            return
        self.reports.show_first()
        self.offset += 10
        self.reports.succeed({tp(number) for number in held})
        self.reports.write_due(())

    def shown(self, key: dg.AssetKey = ORDERS) -> list[dict[str, Any]]:
        return [
            {name: value.value for name, value in event.metadata.items()}
            for event in self.told
            if isinstance(event, dg.AssetMaterialization) and event.asset_key == key
        ]

    @property
    def checks(self) -> list[bool]:
        return [one.passed for one in self.told if isinstance(one, dg.AssetCheckEvaluation)]


def rows(number: float, key: dg.AssetKey = ORDERS, **more: Any) -> dg.MaterializeResult[Any]:  # noqa: ANN401 - metadata
    return dg.MaterializeResult(asset_key=key, metadata={"rows": number, **more})


def check(name: str = "good", *, passed: bool, **more: Any) -> dg.AssetCheckResult:  # noqa: ANN401 - fields
    return dg.AssetCheckResult(passed=passed, asset_key=ORDERS, check_name=name, **more)


def test_first_result_shows_at_once_and_later_ones_are_joined_until_due() -> None:
    ground = Ground()
    ground.batch(rows(3, path="a", seconds=0.5))
    assert [(said["rows"], said["offsets"]) for said in ground.shown()] == [(3, 10)]
    ground.batch(rows(4, path="b", seconds=0.25))
    ground.now = EVERY_S - 1
    ground.batch(rows(5, path="c", seconds=0.5))
    assert len(ground.shown()) == 1
    ground.now = EVERY_S
    ground.reports.write_due(())
    joined = ground.shown()[1]
    assert joined.pop("joined").keys() == {"ranges"}
    assert joined == {
        "batch": "s.run-1.3.1",
        "batches": 2,
        "ranges": "- `orders-0` [10, 30) in 2 ranges",
        "offsets": 20,
        "rows": 9,
        "path": "c",
        "seconds": 0.75,
    }
    ground.now = 3 * EVERY_S
    ground.reports.write_due(())
    assert len(ground.shown()) == 2, "nothing waits"
    ground.batch(rows(1))
    assert ground.shown()[2]["rows"] == 1, "due, since nothing was shown for long"


def test_data_version_and_tags_are_those_of_the_newest_batch() -> None:
    ground = Ground()
    for team in ("a", "b", "c"):
        ground.batch(
            rows(1)._replace(data_version=dg.DataVersion(team), tags={"team": team}),
            rows(1, TOTALS),
        )
    ground.reports.write()
    events = [one for one in ground.told if isinstance(one, dg.AssetMaterialization)]
    assert [event.asset_key for event in events] == [ORDERS, TOTALS] * 2
    orders, totals = events[2].tags or {}, events[3].tags or {}
    assert (orders["team"], orders["dagster/data_version"]) == ("c", "c")
    assert totals["dagster/input_data_version/orders"] == "c", "joined over the same batches"


def test_results_are_not_joined_with_record_every_s_of_zero() -> None:
    ground = Ground(every_s=0.0)
    for number in range(3):
        ground.batch(rows(number), check(passed=True))
    assert [said["rows"] for said in ground.shown()] == [0, 1, 2]
    assert ground.checks == [True] * 3


def test_result_that_repeats_the_metadata_of_its_batch_is_joined_as_any_other() -> None:
    """`KafkaBatch.metadata` is made for the results of per-batch runs, and Pipes reports it."""
    ground = Ground()
    for start in (0, 10, 20):
        batch = KafkaBatch.for_testing(
            [span(0, start, start + 10)], batch_id=str(StreamBatch("run-1", 1 + start // 10))
        )
        ground.batch(dg.MaterializeResult(asset_key=ORDERS, metadata=batch.metadata(row_count=7)))
    ground.reports.write()
    joined = ground.shown()[1]
    assert (joined["offsets"], joined["batches"], joined["dagster/row_count"]) == (20, 2, 7)


def test_results_of_a_failed_batch_show_alone_and_in_order() -> None:
    ground = Ground()
    for number in (1, 2, 3):
        ground.batch(rows(number))
    ground.batch(rows(8), rows(9, TOTALS), fails=True)
    assert [said["rows"] for said in ground.shown()] == [1, 5, 8]
    ground.batch(rows(4))
    ground.reports.write()
    assert [said["rows"] for said in ground.shown()] == [1, 5, 8, 4]


def test_results_of_partitions_to_be_released_are_reported_before() -> None:
    ground = Ground()
    ground.batch(rows(1))
    ground.batch(rows(2))
    ground.reports.write_due({tp(1)})
    assert len(ground.shown()) == 1
    ground.reports.write_due({tp(0)})
    assert len(ground.shown()) == 2
    ground.batch(rows(3), held=(0,))
    assert len(ground.shown()) == 3, "before the commit of its batch"


def test_asset_that_is_made_for_the_first_time_later_shows_at_once() -> None:
    ground = Ground()
    ground.batch(rows(1))
    ground.batch(rows(2))
    ground.batch(rows(3), rows(4, TOTALS))
    assert [said["rows"] for said in ground.shown()] == [1, 2, 3]
    assert [said["rows"] for said in ground.shown(TOTALS)] == [4]


def test_batch_that_fails_with_the_first_result_of_an_asset_is_not_joined() -> None:
    """Its next attempt would be added to it."""
    ground = Ground()
    ground.batch(rows(1))
    ground.errors = [RuntimeError("too large")] * 5
    with pytest.raises(RuntimeError, match="too large"):
        ground.batch(rows(10), rows(5, TOTALS))
    ground.reports.fail()
    ground.batch(rows(10), rows(5, TOTALS))
    ground.reports.write()
    shown = [(said["rows"], said["offsets"]) for said in ground.shown()]
    assert shown == [(1, 10), (10, 10), (10, 10)], "one for each attempt"


def test_joined_result_whose_report_is_broken_off_is_not_reported_twice() -> None:
    """The storage may have stored it. At the end of a run, another thread reports what waits."""
    ground = Ground()
    for number in (1, 2):
        ground.batch(rows(number))
    assert not ground.reports.is_storing_joined
    stored: list[bool] = []

    def tell(_: object) -> None:
        stored.append(ground.reports.is_storing_joined)
        raise KeyboardInterrupt

    ground.context.log_event = tell
    with pytest.raises(KeyboardInterrupt):
        ground.reports.write()
    ground.reports.write()
    assert stored == [True]
    assert not ground.reports.is_storing_joined


def test_row_count_of_an_asset_that_declares_no_sums_is_added_up() -> None:
    ground = Ground()
    for count in (3, 4, 5):
        ground.batch(rows(count, TOTALS, **{"dagster/row_count": count}))
    ground.reports.write()
    newest = ground.shown(TOTALS)[-1]
    assert (newest["dagster/row_count"], newest["rows"]) == (9, 5)


def test_set_aside_records_are_added_up() -> None:
    ground = Ground()
    for number in (0, 2, 0, 3, 0):
        ground.batch(rows(1), set_aside=number)
    ground.reports.write()
    assert [said.get("set_aside") for said in ground.shown()] == [None, 5]


@pytest.mark.parametrize("sizes", [(10, 10, 7), (7, 10, 10), (10, 7, 10)])
def test_sum_with_the_name_of_metadata_of_the_batch_is_that_of_the_asset(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]
) -> None:
    """A batch has ten offsets, and the asset counts its own."""
    specs = [dg.AssetSpec(ORDERS, metadata={SUMS_KEY: ["offsets"]})]
    monkeypatch.setattr("tests.orchestration.streaming.test_reports.SPECS", specs)
    ground = Ground()
    for size in (1, *sizes):
        ground.batch(dg.MaterializeResult(asset_key=ORDERS, metadata={"offsets": size}))
    ground.reports.write()
    assert [said["offsets"] for said in ground.shown()] == [1, 27]


def test_sum_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="asset orders: its metadata 'rows' is declared"):
        Ground().batch(dg.MaterializeResult(asset_key=ORDERS, metadata={"rows": "many"}))


@pytest.mark.parametrize(
    ("sums", "problem"),
    [
        ("rows", "asset orders has dagster_rebalance/sums = 'rows'"),
        (["rows", "ranges"], "asset orders declares the sum 'ranges', which is the name of"),
        (["dagster_rebalance/rows"], "declares the sum 'dagster_rebalance/rows', which is the"),
    ],
)
def test_declaration_of_unusable_sums_is_refused_at_load_time(sums: object, problem: str) -> None:
    @dg.asset(metadata={SUMS_KEY: sums})
    def orders(kafka_batch: KafkaBatch) -> None: ...

    with pytest.raises(ConfigurationError, match=problem):
        AssetCall.of(orders, "kafka_batch")


def test_event_of_the_body_is_never_joined() -> None:
    ground = Ground()
    for _ in range(3):
        ground.batch(dg.AssetObservation("orders"), rows(1))
    assert sum(isinstance(one, dg.AssetObservation) for one in ground.told) == 3


# Storage


def test_joined_result_that_the_storage_does_not_take_is_reported_later() -> None:
    ground = Ground()
    for number in (1, 2, 3):
        ground.batch(rows(number))
    ground.errors = [OSError("database is locked")]
    ground.now = EVERY_S
    ground.reports.write_due(())
    ground.batch(rows(4))
    assert [said["rows"] for said in ground.shown()] == [1, 9]


def test_joined_result_that_the_storage_refuses_is_dropped_and_logged() -> None:
    """Its offsets are committed, so no attempt can fail for it."""
    ground = Ground()
    for number in (1, 2, 3):
        ground.batch(rows(number))
    ground.errors = [ValueError("NUL characters")] * 5
    for _ in range(6):
        ground.reports.write()
    assert [said["rows"] for said in ground.shown()] == [1]
    (text,) = ground.logged
    assert text.startswith(
        "Dagster's storage refuses a materialization of orders, for - `orders-0`"
    )
    assert text.endswith("[10, 30) in 2 ranges: NUL characters")


# Checks


def test_passed_check_shows_when_it_changes_and_with_the_next_materialization() -> None:
    ground = Ground()
    for passed in (True, True, True, False, True, True):
        ground.batch(rows(1), check(passed=passed))
    assert ground.checks == [True, False, True]
    ground.reports.write()
    assert ground.checks == [True, False, True, True]


def test_failed_check_shows_behind_the_result_that_it_is_about() -> None:
    ground = Ground()
    for passed in (True, True, False):
        ground.batch(rows(1), check(passed=passed))
    assert [type(one).__name__ for one in ground.told[2:]] == [
        "AssetMaterialization",
        "AssetMaterialization",
        "AssetCheckEvaluation",
    ]
    assert ground.shown()[2]["offsets"] == 10


def test_each_failure_of_a_blocking_check_shows_at_once() -> None:
    ground = Ground()
    for _ in range(20):
        ground.batch(rows(1), check("strict", passed=False), fails=True)
    assert ground.checks == [False] * 20


def test_check_that_changes_with_each_batch_shows_once_a_minute_in_the_end() -> None:
    """Dagster keeps each evaluation, and may alert for it."""
    ground = Ground()
    for number in range(600):  # ten minutes
        ground.now = float(number)
        ground.batch(rows(1), check(passed=number % 2 == 0))
    assert 10 <= len(ground.checks) <= 30
    ground.now = 660.0
    ground.reports.write_due(())
    assert ground.checks[-2:] == [False, True] or ground.checks[-1] is False


def test_failure_that_waits_is_not_replaced_by_a_less_severe_one() -> None:
    ground = Ground()
    for number in range(6):  # uses up the allowance
        ground.batch(rows(1), check(passed=number % 2 == 0))
    ground.told.clear()
    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    for severity in (error, error, warning, warning):
        ground.batch(rows(1), check(passed=False, severity=severity))
    for _ in range(2):
        ground.batch(rows(1), check(passed=True))
    ground.reports.write()
    found = [one for one in ground.told if isinstance(one, dg.AssetCheckEvaluation)]
    shown = [(one.passed, one.severity) for one in found]
    assert shown == [(False, error), (False, warning), (True, error)]

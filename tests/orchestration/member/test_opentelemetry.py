"""The meter hands on what members do, and no meter or exporter can harm a member."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dagster_rebalance.core.model.member_events import EventKind, MemberEvent
from dagster_rebalance.core.reporting.metrics import (
    GROUP,
    MEMBER,
    SYSTEM,
    TOPIC,
    MemberState,
    Metric,
)
from dagster_rebalance.orchestration.member import opentelemetry as meter_module
from dagster_rebalance.orchestration.member.opentelemetry import Meters, is_installed, meter_of
from tests.orchestration.bench import Bench, Status
from tests.orchestration.scrape import settle

if TYPE_CHECKING:
    from collections.abc import Iterator

CLAIMED = MemberEvent(EventKind.BATCH_CLAIMED, "")
OF_EACH = {SYSTEM: "kafka", GROUP: "etl", MEMBER: "blue:sensor"}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def reader() -> Iterator[InMemoryMetricReader]:
    made = InMemoryMetricReader()
    yield made
    made.shutdown()


def metered(provider: Any) -> tuple[Meters, meter_module.MemberMeter]:  # noqa: ANN401 - also broken ones
    meters = Meters(provider)
    return meters, meters.of("etl", "blue:sensor", most_partitions=10)


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_commits_and_gauges_of_a_member_are_exported(
    instance: dg.DagsterInstance, reader: InMemoryMetricReader
) -> None:
    meters, meter = metered(MeterProvider([reader]))
    bench = Bench(instance)
    bench.member_loop.dependencies = replace(bench.member_loop.dependencies, meter=meter)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.turn()
    bench.succeed(run)
    bench.until(bench.materialised)
    bench.member_loop._show_gauges()
    bench.member_loop._emit(CLAIMED)
    settle(meters)
    found = points(reader)
    (offsets,) = found[Metric.OFFSETS_COMMITTED.value.name]
    assert (offsets.value, dict(offsets.attributes)) == (10, {**OF_EACH, TOPIC: "orders"})
    (seconds,) = found[Metric.CLAIM_TO_COMMIT.value.name]
    assert (seconds.count, seconds.explicit_bounds) == (1, Metric.CLAIM_TO_COMMIT.value.buckets)
    (lag,) = found[Metric.LAG.value.name]
    assert lag.value == 0
    (members,) = found[Metric.MEMBERS.value.name]
    assert (members.value, dict(members.attributes)) == (1, OF_EACH)
    meter.leave()
    assert Metric.MEMBERS.value.name not in points(reader)


def test_members_of_one_name_share_a_series(reader: InMemoryMetricReader) -> None:
    """A hanging member is abandoned, and another one has its name."""
    meters, hung = metered(MeterProvider([reader]))
    other = meters.of("etl", "blue:sensor", most_partitions=10)
    hung.show(MemberState(at=0.0), lambda: 500.0)
    other.show(MemberState(at=499.0), lambda: 500.0)
    other.add([CLAIMED])
    other.leave()
    other.show(MemberState(at=499.0), lambda: 500.0)
    (silence,) = points(reader)[Metric.SILENCE.value.name]
    assert silence.value == 1.0


class Broken:
    """A provider, a meter and instruments that raise wherever the test wants."""

    def __init__(self, at: str) -> None:
        self.at = at

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - it plays everything
        def call(*_args: object, **_kwargs: object) -> Broken:
            if name.startswith(self.at):
                message = f"{name} is broken"
                raise RuntimeError(message)
            return self

        return call


@pytest.mark.parametrize("at", ["get_meter", "create_counter", "create_obs", "add", "record"])
def test_meter_that_raises_is_logged_once(at: str, caplog: pytest.LogCaptureFixture) -> None:
    meters, meter = metered(Broken(at))
    held = {"cause": "revoke", "outcome": "drained", "seconds": 1.0}
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            meter.add([CLAIMED, MemberEvent(EventKind.HOLD_ENDED, "", held)])
            meter.show(MemberState(), time.monotonic)
        meter.leave()
    assert meters._thread is not None
    assert meters._thread.is_alive()
    (told,) = [record for record in caplog.records if "metrics" in record.getMessage()]
    assert "is broken" in caplog.text
    assert told.levelno == logging.WARNING


class Hanging(NoOpMeterProvider):
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()

    def get_meter(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the API has it
        self.entered.set()
        self.gate.wait()
        return super().get_meter(*args, **kwargs)


def test_queue_of_a_hanging_meter_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meter_module, "_MOST_WAITING", 50)
    monkeypatch.setattr(meter_module, "_FAREWELL_S", 0.01)
    provider = Hanging()
    meters, meter = metered(provider)
    for _ in range(500):
        meter.add([CLAIMED])
        meter.show(MemberState(), time.monotonic)
        assert provider.entered.wait(120), "it has taken the first item"
    assert meters._queue.qsize() == 50
    meter.leave()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics were dropped (1 so far): the exporter does not accept them"
    ]
    assert meters._lost == 451
    provider.gate.set()


def test_member_commits_while_its_meter_hangs(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "_FAREWELL_S", 0.01)
    provider = Hanging()
    _, meter = metered(provider)
    bench = Bench(instance)
    bench.member_loop.dependencies = replace(bench.member_loop.dependencies, meter=meter)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.turn()
    bench.succeed(run)
    bench.until(bench.materialised)
    assert bench.offset() == 10
    provider.gate.set()


def test_process_that_can_start_no_thread_has_no_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    _, meter = metered(NoOpMeterProvider())
    with monkeypatch.context() as patched:
        patched.setattr(meter_module, "_FAREWELL_S", 0.01)
        patched.setattr(threading.Thread, "start", start)
        meter.add([CLAIMED])
        meter.show(MemberState(), time.monotonic)
        meter.leave()
    assert "can't start new thread" in caplog.text


def test_thread_starts_with_the_first_measurement() -> None:
    meters, _ = metered(NoOpMeterProvider())
    assert meters._thread is None


def test_meter_is_none_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.metrics")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert not is_installed()
    assert meter_of("etl", "blue:sensor", most_partitions=10) is None


def test_package_imports_no_opentelemetry() -> None:
    code = (
        "import sys, dagster_rebalance.orchestration.definitions, dagster_rebalance.components\n"
        "from dagster_rebalance.orchestration.member.opentelemetry import meter_of\n"
        "assert meter_of('g', 'm', most_partitions=1) is not None\n"
        "ours = [n for n in sys.modules if n.startswith('opentelemetry.')]\n"
        "assert not ours, ours"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)

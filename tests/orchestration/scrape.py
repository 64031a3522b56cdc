"""Metrics as Prometheus sees them: through the real exporter of OpenTelemetry."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.commands import Cause, HoldOutcome
from dagster_rebalance.core.model.events import RevokeRequested
from dagster_rebalance.core.model.member_events import EventKind, MemberEvent
from dagster_rebalance.core.reporting.metrics import MemberState
from dagster_rebalance.orchestration.member.opentelemetry import MemberMeter, Meters
from tests.core.reporting.test_event_recorder import at_work
from tests.core.world import World, tp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.samples import Sample


@dataclass
class Scrape:
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.provider = MeterProvider([PrometheusMetricReader(registry=self.registry)])
        self.meters = Meters(self.provider)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def samples(text: str) -> list[Sample]:
    return [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("dagster_rebalance_")
    ]


def value(text: str, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def series(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in samples(text):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def settle(meters: Meters) -> None:
    done = threading.Event()
    assert meters._put(done)
    assert done.wait(120)


def everything() -> str:
    scrape = Scrape()
    meter = scrape.meters.of("etl", "blue:sensor", most_partitions=10)
    _measure_all(meter)
    settle(scrape.meters)
    return scrape.text()


def _measure_all(meter: MemberMeter) -> None:
    world = World(records=100)
    member, run_id = at_work(world)
    at: Mapping[str, object] = {"topic": "orders", "partition": 0, "start": 0, "until": 1}
    letter = {**at, "batch_id": "b", "attempt_run_id": run_id}
    held = {"cause": Cause.REVOKE, "outcome": HoldOutcome.DRAINED, "seconds": 1.0}
    reason = {"partitions": (tp(0),), "reason": "fenced"}
    committed = {**letter, "offsets": 1, "claim_to_commit_s": 0.2}
    meter.add(
        [
            *member.member_events,
            MemberEvent(EventKind.ATTEMPT_ENDED, "", {"outcome": "failed"}),
            MemberEvent(EventKind.REVOKE_REQUESTED, "", {"partitions": (tp(0),)}),
            MemberEvent(EventKind.PARTITIONS_LOST, "", reason),
            MemberEvent(EventKind.HOLD_ENDED, "", held),
            MemberEvent(EventKind.OFFSETS_COMMITTED, "", committed),
            MemberEvent(EventKind.OFFSETS_COMMITTED, "", {**committed, "attempt_run_id": LEFT_OUT}),
            MemberEvent(EventKind.WRITE_FAILED, "", {**at, "failure": "changed"}),
            MemberEvent(EventKind.PARTITION_STOPPED, "", {**at, "reason": "it failed"}),
            MemberEvent(EventKind.DEAD_LETTER_STORED, "", letter),
            MemberEvent(EventKind.RUNS_CANCELLED, "", {"run_ids": ("r",)}),
            MemberEvent(EventKind.RUNS_DEAD, "", {"run_ids": ("r",)}),
        ]
    )
    member.feed(RevokeRequested((tp(0),)))
    state = MemberState(tuple(member.engine.partitions.values()), member.engine.holds, world.now)
    meter.show(state, lambda: world.now)

"""docs/operating.md and docs/consumer.md: examples that have no page of tests."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import dagster as dg
import yaml

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    RebalanceAwareConsumer,
    build_kafka_batch_defs,
)
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.docs.blocks import block_with, run_block

if TYPE_CHECKING:
    import pytest


def shop() -> dg.Definitions:
    """The definitions of a group `shop`, under the names that they have by default."""

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        """Never run."""

    kafka = KafkaConsumerResource(
        bootstrap_servers="kafka:9092", group_id="shop", topics=["orders"]
    )
    return build_kafka_batch_defs(kafka=kafka, assets=[orders])


def test_example_schedule_executes_the_checks_of_a_group() -> None:
    names: dict[str, Any] = {}
    page = "docs/operating.md"
    run_block(page, block_with(page, "python", "ScheduleDefinition"), names)
    scheduled = dg.Definitions(jobs=[names["checks"]], schedules=[names["every_ten_minutes"]])
    both = dg.Definitions.merge(shop(), scheduled)
    dg.Definitions.validate_loadable(both)
    checked = both.resolve_job_def("shop_checks").asset_layer.asset_graph.asset_check_keys
    assets = GroupAssets.of("shop")
    assert dg.AssetCheckKey(assets.offsets, "no_partition_stopped") in checked
    assert {key.asset_key for key in checked} <= {assets.offsets, assets.lag, assets.group}


def test_example_directive_is_accepted_by_the_launchpad() -> None:
    job = shop().resolve_job_def("kafka_batches_control")
    config = yaml.safe_load(block_with("docs/operating.md", "yaml", "action: pause"))
    assert dg.validate_run_config(job, config)


def test_example_loop_ends_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        {"bootstrap.servers": "in memory", "group.id": "etl"},
        fetch=False,
        member=group.member(),
        cluster=group,
        clock=group.clock,
    )
    consumer.subscribe(["orders"])

    class Work:
        """Gets the signal with its first records."""

        def start(self, _records: object) -> None:
            """Be at work."""
            handlers[signal.SIGTERM](signal.SIGTERM, None)

    page = "docs/consumer.md"
    names = {
        "signal": signal,
        "stopping": threading.Event(),
        "consumer": consumer,
        "work": Work(),
    }
    run_block(page, block_with(page, "python", "consumer.wakeup()"), names)
    assert not group.members

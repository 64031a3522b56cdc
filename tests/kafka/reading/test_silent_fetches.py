"""A stalled fetcher reports the reason, on a log in memory."""

from __future__ import annotations

from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, ThrottleEvent

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading.partition_watch import STALLED_AFTER_S
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.fake_log import FakeLog

CONFIG = {"bootstrap.servers": "broker:9092", "group.id": "etl", "auto.offset.reset": "earliest"}
P0 = TopicPartition("orders", 0)


class Throttled:
    """A consumer whose broker answers each fetch with nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = FakeGroup({"orders": 1})
        self.log = FakeLog(self.group)
        self.log.is_throttled = True
        self.settings: dict[str, Any] = {}
        monkeypatch.setattr(confluent_kafka, "Consumer", self._make)
        self.consumer = RebalanceAwareConsumer(
            CONFIG, member=self.group.member(), cluster=self.group, clock=self.group.clock
        )
        self.consumer.subscribe(["orders"])
        self.consumer.poll(0)
        self.consumer.poll(0.1)

    def _make(self, settings: dict[str, Any]) -> FakeLog:
        self.settings = settings
        return self.log

    def poll_for(self, limit_s: float) -> list[str]:
        until, errors = self.group.clock() + limit_s, []
        while self.group.clock() < until:
            errors += self._poll()
        return errors

    def _poll(self) -> list[str]:
        try:
            assert self.consumer.poll(1.0) == []
        except BrokerError as error:
            return [str(error)]
        return []


@pytest.fixture
def throttled(monkeypatch: pytest.MonkeyPatch) -> Throttled:
    return Throttled(monkeypatch)


def test_stall_under_a_quota_names_the_quota_and_repeats(throttled: Throttled) -> None:
    throttled.group.produce(P0, 5)
    throttled.settings["throttle_cb"](ThrottleEvent("broker", 1, 600.0))
    errors = throttled.poll_for(2.5 * STALLED_AFTER_S)
    assert len(errors) == 2
    for error in errors:
        assert "orders-0 at offset 0: nothing was read for 30 s" in error
        assert "throttles this client for 600 s" in error


def test_old_report_of_the_client_is_no_reason(throttled: Throttled) -> None:
    throttled.group.produce(P0, 5)
    throttled.settings["error_cb"](KafkaError(KafkaError._TRANSPORT, "connection refused"))
    first, *_, last = throttled.poll_for(4.5 * STALLED_AFTER_S)
    assert "connection refused (_TRANSPORT)" in first
    assert "the client reports no reason" in last


def test_partition_without_records_is_not_stalled(throttled: Throttled) -> None:
    assert throttled.poll_for(2.5 * STALLED_AFTER_S) == []


def test_paused_partition_is_not_stalled(throttled: Throttled) -> None:
    throttled.group.produce(P0, 5)
    throttled.consumer.pause([P0])
    assert throttled.poll_for(2.5 * STALLED_AFTER_S) == []


def test_partition_is_not_stalled_after_its_first_record(throttled: Throttled) -> None:
    throttled.group.produce(P0, 5)
    assert len(throttled.poll_for(1.5 * STALLED_AFTER_S)) == 1
    throttled.log.is_throttled = False
    assert len(throttled.consumer.poll(1.0)) == 5
    assert throttled.poll_for(2.5 * STALLED_AFTER_S) == []

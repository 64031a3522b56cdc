"""The fixtures of the kit take a Kafka that was there before the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.testing.existing_kafka import BROKERS_VARIABLE, ExistingKafka
from dagster_rebalance.testing.local.host import free_port
from tests.docs.blocks import block_with

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster

PAGE = "docs/testing.md"


@pytest.mark.broker
def test_project_runs_its_tests_on_an_existing_kafka(
    kafka_broker: KafkaCluster, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(block_with(PAGE, "python", "pytest_plugins"))
    (tmp_path / "test_orders.py").write_text(block_with(PAGE, "python", "kafka_topic(partitions"))
    before = _topics(kafka_broker)
    without_java = {name: os.environ[name] for name in os.environ.keys() - {"JAVA_HOME"}}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**without_java, BROKERS_VARIABLE: kafka_broker.bootstrap_servers, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert _topics(kafka_broker) <= before | {"__consumer_offsets"}


def test_unreachable_existing_kafka_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dagster_rebalance.testing.existing_kafka.REQUEST_LIMIT_S", 0.2)
    kafka = ExistingKafka(brokers=f"127.0.0.1:{free_port()}")
    with pytest.raises(BrokerError, match="unset KAFKA_BROKERS"):
        kafka.start()


def _topics(kafka: KafkaCluster) -> set[str]:
    with ExistingKafka(brokers=kafka.bootstrap_servers) as existing:
        return existing.topics()

"""One deployment for all scenarios that leave the code servers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deployment import DagsterDeployment
from tests.e2e.stage import SETTINGS, Stage, locations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster

SHARED = (
    *(
        "handover",
        "queued",
        "idle",
        "deadline",
        "fenced",
        "grown",
        "failing",
        "hopeless",
        "poisoned",
        "ordered",
        "previewed",
    ),
    *("paired", "ended", "handled"),
)


@pytest.fixture(autouse=True)
def _curtain(stage: Stage) -> Iterator[None]:
    """After each test its members leave."""
    yield
    stage.turn_off()


@pytest.fixture(scope="package")  # what idles beside all other tests makes them slower
def stage(kafka_broker: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Kafka and Dagster with `blue` and `green`, which serve every scenario of `SHARED`."""
    root = tmp_path_factory.mktemp("e2e")
    served = locations(SHARED, root, kafka_broker.bootstrap_servers, "blue", "green")
    with (
        DagsterDeployment(root / "home", served, settings=SETTINGS) as dagster,
        dagster.instance() as instance,
    ):
        yield Stage(kafka_broker, dagster, root, instance)

"""One deployment for all scenarios that leave the code servers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deployment import DagsterDeployment
from tests.e2e.stage import SETTINGS, Stage, in_both_protocols, locations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster

SHARED = (
    *in_both_protocols("handover", "queued", "idle", "deadline", "fenced", "grown", "ended"),
    *("failing_consumer", "hopeless_classic", "poisoned_consumer", "ordered_consumer"),
    *("previewed_classic", "paired_classic", "handled_classic", "valued_consumer"),
)


@pytest.fixture(scope="package")  # what idles beside all other tests makes them slower
def shared_stage(
    kafka_broker: KafkaCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """Kafka and Dagster with `blue` and `green`, which serve every group of `SHARED`."""
    root = tmp_path_factory.mktemp("e2e")
    served = locations(SHARED, root, kafka_broker.bootstrap_servers, "blue", "green")
    with (
        DagsterDeployment(root / "home", served, settings=SETTINGS) as dagster,
        dagster.instance() as instance,
    ):
        yield Stage(kafka_broker, dagster, root, instance)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The stage that a module shares; after each test its members leave."""
    yield shared_stage
    shared_stage.turn_off()

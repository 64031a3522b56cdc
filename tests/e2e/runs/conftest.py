"""The deployment of the tests of the runs of one code location."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from tests.e2e.stage import PROJECT, SETTINGS, Stage, in_both_protocols, locations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster

GROUPS = (
    *in_both_protocols("ended"),
    *("failing_consumer", "hopeless_classic", "poisoned_consumer", "ordered_consumer"),
    *("previewed_classic", "paired_classic", "handled_classic", "valued_consumer"),
)


@pytest.fixture(scope="package")
def shared_stage(
    kafka_broker: KafkaCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """`blue` with the groups, and `shop`, which does not use Kafka."""
    root = tmp_path_factory.mktemp("runs")
    served = locations(GROUPS, root, kafka_broker.bootstrap_servers, "blue")
    served.append(CodeLocation("shop", "without_kafka_project", PROJECT))
    with (
        DagsterDeployment(root / "home", served, settings=SETTINGS) as dagster,
        dagster.instance() as instance,
    ):
        yield Stage(kafka_broker, dagster, root, instance)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The shared stage; after each test its members leave."""
    yield shared_stage
    shared_stage.turn_off()

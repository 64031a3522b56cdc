"""The deployment of the tests of members in several code locations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deployment import DagsterDeployment
from tests.e2e.stage import SETTINGS, Stage, in_both_protocols, locations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster

GROUPS = (
    *in_both_protocols("handover", "queued", "idle", "deadline", "fenced", "grown"),
    *in_both_protocols("killed", "dying", "interrupted", "late", "reloaded"),
)
TICK_LIMIT_S = 10


@pytest.fixture(scope="package")
def shared_stage(
    kafka_broker: KafkaCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """`blue` and `green`, whose servers the tests end, and `purple`, which can be reloaded."""
    root = tmp_path_factory.mktemp("members")
    served = locations(GROUPS, root, kafka_broker.bootstrap_servers, "blue", "green")
    reloaded = in_both_protocols("reloaded")
    served += locations(reloaded, root, kafka_broker.bootstrap_servers, "purple", reloads=True)
    env = {"DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS": str(TICK_LIMIT_S)}
    with (
        DagsterDeployment(root / "home", served, settings=SETTINGS, env=env) as dagster,
        dagster.instance() as instance,
    ):
        yield Stage(kafka_broker, dagster, root, instance)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The shared stage; after each test its members leave."""
    yield shared_stage
    shared_stage.turn_off()

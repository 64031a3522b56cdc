"""What a command sees of the sensors of a group that has no member."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.reporting.member_tables import sensors_of
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.reporting.group_status import SensorState

pytestmark = pytest.mark.e2e
GROUP = GroupAssets.of("etl").group
_LIMIT_S = 90.0


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterDeployment]:
    """A code location with two sensors."""
    folder = Path(__file__).parent / "project"
    home = tmp_path_factory.mktemp("sensors") / "home"
    with DagsterDeployment(home, [CodeLocation("shop", "ticking_project", folder)]) as deployment:
        yield deployment


def say_joined(instance: dg.DagsterInstance, location: str, sensor: str, run_id: str = "") -> None:
    """Show a member of the group, as it does itself."""
    said = {"event": "joined", **MemberIdentity(location, sensor, "1", run_id).names}
    instance.report_runless_asset_event(dg.AssetObservation(GROUP, metadata=said))


def test_the_sensors_of_a_group_are_seen_with_their_last_tick(dagster: DagsterDeployment) -> None:
    with dagster.instance() as instance:
        say_joined(instance, "shop", "failing_sensor")
        assert not sensors_of(instance, GROUP), "it was never turned on here"
        for name in ("failing_sensor", "skipping_sensor"):
            dagster.ui.start_sensor("shop", name)

        def failing() -> SensorState | None:
            (seen,) = sensors_of(instance, GROUP)
            return seen if seen.error else None

        seen = wait_until(failing, timeout_s=_LIMIT_S, what="a tick to fail")
        assert (seen.name, seen.is_on) == ("failing_sensor", True)
        assert seen.error.startswith("KeyError: 'KAFKA_BROKERS is not set' (ticking_project.py:")
        say_joined(instance, "another location", "skipping_sensor")
        say_joined(instance, "shop/1a2b3c4d", "skipping_sensor", run_id="1a2b3c4d")
        dagster.ui.stop_sensor("shop", "skipping_sensor")
        first, second = sensors_of(instance, GROUP)
        assert (first.name, second.name, second.is_on) == (
            *("failing_sensor", "skipping_sensor"),
            False,
        )
        assert second.error == ""

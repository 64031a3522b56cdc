"""The sensors of a group, as Dagster's storage shows them.

They keep members there. A command asks for them where a group has no member. A code location that
does not load is no part of the storage: its sensors have no ticks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.reporting.group_status import SensorState
from dagster_rebalance.orchestration.storage.failure_notes import text_of_info

if TYPE_CHECKING:
    import dagster as dg

_EVENTS_READ = 200
_TICKS_READ = 5
_UNDER_WAY = "STARTED"


def sensors_of(instance: dg.DagsterInstance, group: dg.AssetKey) -> tuple[SensorState, ...]:
    """The sensors that have kept members of a group, by name.

    Args:
        instance: Where their ticks are.
        group: The group asset, which names them.
    """
    known = _named(instance, group)
    seen = {}
    for state in instance.all_instigator_state():
        repository = state.origin.repository_origin
        location = repository.code_location_origin.location_name
        if (location, state.instigator_name) not in known:
            continue
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=_TICKS_READ)
        ended = next((tick for tick in ticks if tick.status.value != _UNDER_WAY), None)
        seen[state.instigator_name] = SensorState(
            name=state.instigator_name,
            is_on=state.is_running,
            silent_for_s=time.time() - ticks[0].timestamp if ticks else None,
            error=text_of_info(ended.error) if ended and ended.error else "",
        )
    return tuple(seen[name] for name in sorted(seen))


def _named(instance: dg.DagsterInstance, group: dg.AssetKey) -> set[tuple[str, str]]:
    """The code locations and sensors that members have named.

    In events of earlier versions, a streaming run names its job.
    """
    found = set()
    for record in instance.fetch_observations(group, limit=_EVENTS_READ).records:
        said = record.asset_observation.metadata if record.asset_observation else {}
        sensor = said.get("sensor") or said.get("started_by")
        if sensor is not None and "code_location" in said:
            location = str(said["code_location"].value).partition("/")[0]
            name = str(sensor.value)
            found |= {(location, name), (location, f"{name}_sensor")}
    return found

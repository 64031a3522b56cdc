"""Faults of the members' code servers, and of Dagster's daemon."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.chaos.exchange import SESSION_TIMEOUT_S
from proofs.chaos.faults import Fault, Ground, Kind, UnderWay
from proofs.chaos.parts import MEMBERS, RELOADED

if TYPE_CHECKING:
    from proofs.chaos.parts import Parts

_DEPARTURE_LIMIT_S = 180.0
_STARTS = 4
_WITH_ONE_PROCESS = tuple(member for member in MEMBERS if member != RELOADED)
"""Locations whose member runs in the server's process; in a reloadable one it is a child."""


def kill(ground: Ground) -> UnderWay | None:
    """Kill the process of a member; its runs live on."""
    name = ground.member(*_WITH_ONE_PROCESS)
    if name is None:
        return None
    fault = _of_member(ground, Kind.MEMBER_KILLED, name)
    ground.parts.dagster.locations[name].server.kill()
    return UnderWay(fault, ground.after(0, 8), lambda: bring_back(ground.parts, name))


def terminate(ground: Ground) -> UnderWay | None:
    """Terminate a code server, as in a deploy."""
    name = ground.member(*MEMBERS)
    if name is None:
        return None
    fault = _of_member(ground, Kind.MEMBER_TERMINATED, name)
    server = ground.parts.dagster.locations[name].server
    server.send(signal.SIGTERM)
    late_at = time.monotonic() + _DEPARTURE_LIMIT_S

    def has_left() -> bool:
        if server.is_running and time.monotonic() > late_at:
            msg = (
                f"{server.name} has not ended {_DEPARTURE_LIMIT_S:g} s after SIGTERM; "
                f"{server.log} ends with:\n{server.tail()}"
            )
            raise DagsterRebalanceError(msg)
        return not server.is_running

    return UnderWay(fault, has_left, lambda: bring_back(ground.parts, name))


def freeze(ground: Ground) -> UnderWay | None:
    """Suspend a member beyond its session timeout."""
    name = ground.member(*_WITH_ONE_PROCESS)
    if name is None:
        return None
    fault = _of_member(ground, Kind.MEMBER_FROZEN, name)
    server = ground.parts.dagster.locations[name].server
    server.suspend()
    return UnderWay(
        fault, ground.after(SESSION_TIMEOUT_S + 1, SESSION_TIMEOUT_S + 6), server.resume
    )


def kill_with_runs(ground: Ground) -> UnderWay | None:
    """Kill a code server and all of its runs, as in the loss of a machine."""
    name = ground.member(*MEMBERS)
    if name is None:
        return None
    fault = _of_member(ground, Kind.CODE_SERVER_KILLED, name)
    ground.parts.dagster.locations[name].server.stop_at_once()
    return UnderWay(fault, ground.after(0, 8), lambda: bring_back(ground.parts, name))


def reload(ground: Ground) -> UnderWay | None:
    """Reload a location's code."""
    name = ground.member(RELOADED)
    if name is None:
        return None
    fault = _of_member(ground, Kind.CODE_SERVER_RELOADED, name)
    ground.parts.dagster.ui.reload(name)
    return UnderWay(fault)


def kill_daemon(ground: Ground) -> UnderWay | None:
    """Kill Dagster's daemon."""
    if ground.suffers(Kind.DAEMON_KILLED):
        return None
    fault = Fault(Kind.DAEMON_KILLED, "the daemon")
    ground.parts.dagster.daemon.stop_at_once()
    return UnderWay(fault, ground.after(0, 10), ground.parts.dagster.start_daemon)


def _of_member(ground: Ground, kind: Kind, name: str) -> Fault:
    return Fault(kind, name, partitions=ground.owned(name))


def bring_back(parts: Parts, name: str) -> None:
    """Restart the code server of a location, as a supervisor does.

    It ends at its start if a frozen process has locked the SQLite files of Dagster.
    """
    location = parts.dagster.locations[name]
    for starts_left in reversed(range(_STARTS)):
        location.start(parts.dagster.home)
        try:
            location.wait_until_ready()
        except DagsterRebalanceError:
            if not starts_left or location.server.is_running:
                raise
        else:
            return

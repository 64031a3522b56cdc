"""The identity of a member's process, and the lease that decides between two replicas.

Two replicas of a code server serve the same sensor. Without the lease, they would replace each
other's member forever.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.orchestration.storage.key_values import KeyValues

if TYPE_CHECKING:
    import dagster as dg

    from dagster_rebalance.orchestration.storage.names import GroupAssets

_TEMPORARY_HOME = ".tmp_dagster_home_"
"""The prefix of the folder that `dagster dev` and `dg dev` create without a `DAGSTER_HOME`."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """The process of a member.

    Attributes:
        location: The code location; for a streaming run, with a part of the run id appended.
        sensor: The sensor that requests the member, or that started the streaming run.
        incarnation: A unique name of this process.
        run_id: The streaming run that the process executes; empty for a code server.
    """

    location: str
    sensor: str
    incarnation: str
    run_id: str = ""

    @property
    def names(self) -> dict[str, str]:
        """The metadata that names the process in an event of the group."""
        if not self.run_id:
            return {"code_location": self.location, "sensor": self.sensor}
        location, _, _ = self.location.rpartition("/")
        # Not as `sensor`: the member of a code server would treat it as an event of its successor.
        return {"member": self.location, "code_location": location, "started_by": self.sensor}


_UNKNOWN_HOLDER = "unknown"
NO_MEMBER = MemberIdentity(location="", sensor="", incarnation="")
"""The identity of a process without a member, such as a command."""


def notes_on_home(instance: dg.DagsterInstance) -> tuple[str, ...]:
    """Return a note for ticks if Dagster deletes the storage of the instance when it ends."""
    home = Path(instance.root_directory)
    if not home.name.startswith(_TEMPORARY_HOME):
        return ()
    return (
        f"DAGSTER_HOME is not set, so Dagster deletes {home.name} with all history when it ends",
    )


class MemberLease:
    """The lease of a sensor: the process that runs its member, as one key-value.

    The member renews the lease repeatedly, so a replica that left detects whether it is alive.
    """

    def __init__(
        self, instance: dg.DagsterInstance, assets: GroupAssets, location: str, sensor: str
    ) -> None:
        self._values = KeyValues(instance)
        name = json.dumps([assets.group.path, location, sensor])
        self._key = f"dagster_rebalance/seat/{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def renew(self, incarnation: str) -> None:
        """Take or renew the lease for a process."""
        self._values.set(self._key, f"{incarnation} {time.time():.0f}")

    def release(self, incarnation: str) -> None:
        """Free the lease, unless another process has taken it."""
        if self.read().startswith(f"{incarnation} "):
            self._values.set(self._key, "")

    def read(self) -> str:
        """Return the holder and the time of its last renewal; empty if the lease is free.

        If Dagster has no key-values, the lease counts as held: two replicas that both read it as
        free would hand the partitions to each other forever.
        """
        stored = self._values.fetch([self._key])
        return _UNKNOWN_HOLDER if stored is None else stored.get(self._key, "")

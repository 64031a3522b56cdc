"""The process that a member lives in, the seat that it keeps, and how long its instance lasts.

Two replicas of one code server serve the same sensor. They settle by the seat, so that they do not
take the member from each other for ever.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dagster as dg

    from dagster_rebalance.orchestration.storage.names import GroupAssets


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """The process that a member lives in.

    Attributes:
        location: The code location; of a streaming run, with a part of its id behind it.
        sensor: The sensor that asks for the member, or that started the streaming run.
        incarnation: A name for this process that is never used again.
        run_id: The streaming run that the process executes; empty for a code server.
    """

    location: str
    sensor: str
    incarnation: str
    run_id: str = ""

    @property
    def names(self) -> dict[str, str]:
        """How an event of the group names the process."""
        if not self.run_id:
            return {"code_location": self.location, "sensor": self.sensor}
        location, _, _ = self.location.rpartition("/")
        # Not as `sensor`: a member of a code server takes such an event for its successor.
        return {"member": self.location, "code_location": location, "started_by": self.sensor}


NOBODY = MemberIdentity(location="", sensor="", incarnation="")
"""Who reads what was reported, and is no member."""


_TEMPORARY_HOME = ".tmp_dagster_home_"
"""How the name of a folder begins that `dagster dev` and `dg dev` make where they have no other."""


def notes_on_home(instance: dg.DagsterInstance) -> tuple[str, ...]:
    """What a tick says where Dagster deletes its storage when it ends, below a member that drains.

    Args:
        instance: Where the member records its commits.
    """
    home = Path(instance.root_directory)
    if not home.name.startswith(_TEMPORARY_HOME):
        return ()
    return (f"DAGSTER_HOME is not set, so Dagster deletes {home.name} with all history at its end",)


class MemberLease:
    """A seat says which process of a code location is the member for a sensor.

    It is one value in Dagster's storage, which the member writes over and over. With it two
    replicas of one code server settle: the one that made way can see whether the other still lives.

    Args:
        instance: Where the value is stored.
        assets: The assets of the group.
        location: The code location.
        sensor: The sensor.
    """

    def __init__(
        self, instance: dg.DagsterInstance, assets: GroupAssets, location: str, sensor: str
    ) -> None:
        self._storage = instance.run_storage
        name = json.dumps([assets.group.path, location, sensor])
        self._key = f"dagster_rebalance/seat/{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def keep(self, incarnation: str) -> None:
        """Give a sign of life of the member that lives in a process."""
        self._storage.set_cursor_values({self._key: f"{incarnation} {time.time():.0f}"})

    def release(self, incarnation: str) -> None:
        """Free the seat, unless another process has it by now."""
        if self.sign().startswith(f"{incarnation} "):
            self._storage.set_cursor_values({self._key: ""})

    def sign(self) -> str:
        """The last sign of whoever has the seat; empty when it is free."""
        return self._storage.get_cursor_values({self._key}).get(self._key, "")

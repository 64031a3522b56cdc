"""Work notes: which run works on which range, where nobody who deletes runs takes it away.

People delete runs, and Dagster forgets all of them with that: tags, marks, and where their signs of
life are. The process may work on. So a run notes its ranges before it works, and an owner looks
whether a claimed range has the note of a run that is not in Dagster any more. Only one run at a
time works on a range. One that was taken for dead and wakes up finds the note of its successor,
and leaves it.

Notes are kept where the signs of life are, and share a fixed number of places like these. Dagster+
has no such place for user code.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.orchestration.storage.run_tags import spelled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import dagster as dg

    from dagster_rebalance.core.model.commands import Claimed

PLACES = 100_000
_AT_WORK, _FINISHED = "at_work", "finished"


@dataclass(frozen=True, slots=True)
class RangeOwner:
    """The note of one run.

    Attributes:
        run_id: The run.
        number: The one that Dagster's storage had given it: its signs of life are found by it.
        is_finished: Whether its process has said that it is finished.
    """

    run_id: str
    number: int
    is_finished: bool


class Places:
    """A fixed number of values in Dagster's storage that people do not see."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._storage = instance.run_storage

    def get(self, places: Iterable[str]) -> Mapping[str, str]:
        """The values of the places that have one."""
        wanted = set(places)
        stored: object = self._storage.get_cursor_values(wanted) if wanted else {}
        return stored if isinstance(stored, dict) else {}

    def put(self, texts: Mapping[str, str]) -> None:
        """Write all texts, at best in two steps.

        On SQLite, Dagster drops new places from a write that also has known ones.
        """
        known = self.get(texts).keys()
        for part in (
            {p: text for p, text in texts.items() if (p in known) is is_known}
            for is_known in (True, False)
        ):
            if part:
                self._storage.set_cursor_values(part)
        stored = self.get(texts)
        for place, text in texts.items():
            if stored.get(place) != text:
                self._storage.set_cursor_values({place: text})


class RangeOwners:
    """The notes of all runs of an instance."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._places = Places(instance)

    def write(self, note: RangeOwner, claims: Collection[Claimed]) -> None:
        """Note that a run is about to work on all that it was given, or is finished with it."""
        end = _FINISHED if note.is_finished else _AT_WORK
        text = " ".join([note.run_id, str(note.number), end, *map(name_of, claims)])
        self._places.put({_place(claim): text for claim in claims})

    def finish(self, run_id: str, number: int, claims: Collection[Claimed]) -> None:
        """Note that a run is finished with all that it was given, unless another one has it now."""
        mine = [claim for claim, note in self.read(claims).items() if note.run_id == run_id]
        if len(mine) == len(claims):
            self.write(RangeOwner(run_id, number, is_finished=True), claims)

    def erase(self, run_id: str, claims: Iterable[Claimed]) -> None:
        """Forget a run of which nothing works any more."""
        self._places.put(
            {
                _place(claim): ""
                for claim, note in self.read(claims).items()
                if note.run_id == run_id
            }
        )

    def read(self, claims: Iterable[Claimed]) -> dict[Claimed, RangeOwner]:
        """The notes on claimed ranges, of those that have one."""
        places = {claim: _place(claim) for claim in claims}
        stored = self._places.get(places.values())
        found = {}
        for claim, place in places.items():
            run_id, number, end, *names = (stored.get(place) or "- 0 -").split(" ")
            if name_of(claim) in names:
                found[claim] = RangeOwner(run_id, int(number), end == _FINISHED)
        return found


def name_of(claim: Claimed) -> str:
    """How a claim is named in a note."""
    batch_id, range_ = claim
    return f"{batch_id}:{spelled(range_)}"


def place(kind: str, name: str) -> str:
    """The place of the note of this kind on something with this name."""
    return f"dagster_rebalance/{kind}/{zlib.crc32(name.encode()) % PLACES}"


def _place(claim: Claimed) -> str:
    return place("work", name_of(claim))

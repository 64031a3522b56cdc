"""Read a group's members and recorded commits from Dagster's catalogue, as a user would."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.offsets import OffsetRange, parse_listed
from dagster_rebalance.orchestration.storage.commit_history import parts_in
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PAGE = 200


@dataclass(frozen=True, slots=True)
class Recorded:
    """A commit in Dagster.

    Attributes:
        member: Code location of the member that recorded it.
        range: The committed range.
        is_late: Whether it was committed by an earlier owner that could not record it.
        at: In seconds since 1970.
        inner: If several commits are joined, the ends of all but the last one.
    """

    member: str
    range: OffsetRange
    is_late: bool = False
    at: float = 0.0
    inner: tuple[int, ...] = ()

    @property
    def commits(self) -> list[OffsetRange]:
        ends = [self.range.start, *self.inner, self.range.until]
        return [replace(self.range, start=one, until=end) for one, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Event:
    """An observation of the group asset: joined, assigned, hold or left.

    Attributes:
        kind: The event.
        member: The code location.
        text: Its description.
        partitions: Its partitions.
        metadata: All of its metadata.
        at: In seconds since 1970.
    """

    kind: str
    member: str
    text: str
    partitions: tuple[str, ...]
    metadata: Mapping[str, object]
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class HoldSeen:
    """A receipt, with the commits of other partitions during the hold.

    Attributes:
        member: The code location.
        outcome: How it ended.
        cause: Why it began.
        partitions: The held partitions.
        seconds: Its duration.
        ended_at: In seconds since 1970.
        runs: Number of runs that it waited for.
        retained_records: Committed records of other partitions during the hold.
    """

    member: str
    outcome: str
    cause: str
    partitions: tuple[str, ...]
    seconds: float
    ended_at: float
    runs: int
    retained_records: int = 0


class CatalogueReader:
    """Follows one group.

    Attributes:
        events: All events, oldest first.
        recorded: All recorded commits, oldest first.
    """

    def __init__(self, instance: dg.DagsterInstance, group: str) -> None:
        self.events: list[Event] = []
        self.recorded: list[Recorded] = []
        self._instance = instance
        self._assets = GroupAssets.of(group)
        self._newest_observation: int | None = None
        self._newest_materialisation: int | None = None
        self._returned = 0

    @property
    def holds(self) -> list[HoldSeen]:
        """Return the receipts, oldest first."""
        return [_hold(event) for event in self.events if event.kind == "hold"]

    def read(self) -> list[Event]:
        """Read and return the new events.

        If Dagster's storage fails, the next call continues from there.
        """
        for observation, at in self._observations():
            self.events.append(_event(observation, at))
        for materialisation, at in self._materialisations():
            self.recorded.append(_recorded(materialisation, at))
        new, self._returned = self.events[self._returned :], len(self.events)
        return new

    def _observations(self) -> Iterator[tuple[dg.AssetObservation, float]]:
        while True:
            wanted = dg.AssetRecordsFilter(
                self._assets.group, after_storage_id=self._newest_observation
            )
            found = self._instance.fetch_observations(wanted, limit=_PAGE, ascending=True).records
            for record in found:
                self._newest_observation = record.storage_id
                if record.asset_observation is not None:
                    yield record.asset_observation, record.timestamp
            if len(found) < _PAGE:
                return

    def _materialisations(self) -> Iterator[tuple[dg.AssetMaterialization, float]]:
        while True:
            wanted = dg.AssetRecordsFilter(
                self._assets.offsets, after_storage_id=self._newest_materialisation
            )
            found = self._instance.fetch_materializations(
                wanted, limit=_PAGE, ascending=True
            ).records
            for record in found:
                self._newest_materialisation = record.storage_id
                if record.asset_materialization is not None:
                    yield record.asset_materialization, record.timestamp
            if len(found) < _PAGE:
                return


def _event(observation: dg.AssetObservation, at: float) -> Event:
    said = {name: value.value for name, value in observation.metadata.items()}
    return Event(
        kind=str(said["event"]),
        member=str(said.get("member") or said["code_location"]),
        text=observation.description or "",
        partitions=tuple(map(str, parse_listed(_list(said.get("partitions"))))),
        metadata=said,
        at=at,
    )


def _hold(event: Event) -> HoldSeen:
    said = event.metadata
    return HoldSeen(
        member=event.member,
        outcome=str(said["outcome"]),
        cause=str(said["cause"]),
        partitions=event.partitions,
        seconds=float(str(said["seconds"])),
        ended_at=float(str(said["ended_at"])),
        runs=len(_list(said.get("runs"))),
    )


def _recorded(materialisation: dg.AssetMaterialization, at: float) -> Recorded:
    said = {name: value.value for name, value in materialisation.metadata.items()}
    topic, _, partition = (materialisation.partition or "").rpartition("-")
    range_ = OffsetRange(topic, int(partition), int(str(said["start"])), int(str(said["until"])))
    inner = tuple(part.until for part in parts_in(said)[:-1])
    is_late = bool(said.get("recorded_late"))
    return Recorded(str(said.get("member")), range_, is_late=is_late, at=at, inner=inner)


def _list(value: object) -> list[str]:
    items = json.loads(value) if isinstance(value, str) else value
    return [str(item) for item in items] if isinstance(items, list) else []

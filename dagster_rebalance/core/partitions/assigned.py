"""Partitions of a member, with an index for each group of partitions that a decision needs.

A member may own thousands of partitions, and decides ten times a second. A decision must not read
all of them: it reads the partitions in its index (`Role`) and the partitions that have changed.
"""

from __future__ import annotations

import enum
from collections.abc import MutableMapping
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.offsets import TopicPartition, names_of
from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.partitions.owned import OwnedPartition

    _Assigned: TypeAlias = "tuple[frozenset[TopicPartition], str, tuple[TopicPartition, ...]]"
    """All partitions: as a set, for messages, and ordered."""

_BY_EPOCH = attrgetter("epoch")


class Role(enum.IntEnum):
    """A group of partitions with an index; the values are bits. Idle partitions have no role."""

    BUSY = 1
    """The partition has work to do now or later."""
    RESTORING = 2
    CLAIMED = 4
    """The partition has claimed ranges, or a claim is being written."""
    MORE = 8
    """The partition has offsets that may be planned."""
    ACTIVE = 16
    """The partition has offsets to claim, or a run that may end."""
    UNSETTLED = 32
    """The partition is restoring, or a write is neither confirmed nor refused."""
    DIRECTED = 64
    """A directive pauses or stops the partition."""
    TROUBLED = 128
    """The partition is stopped, or has a problem that may stop it."""
    UNREAD = 256
    """The partition drains, and its runs were not read since its release was requested."""
    UNKNOWN = 512
    """The committed offset of the partition is unknown."""
    DRAINING = 1024
    """The partition drains."""


class AssignedPartitions(MutableMapping[TopicPartition, "OwnedPartition"]):
    """Mapping of assigned partitions, in the order of assignment, with its indices.

    Attributes:
        version: Increases with each change of a partition.
        claims_version: Increases with each change of claimed ranges, their progress, or what their
            partition may do with them.
    """

    def __init__(self) -> None:
        self.version = 0
        self.claims_version = 0
        self._all: dict[TopicPartition, OwnedPartition] = {}
        self._roles: dict[TopicPartition, int] = {}
        self._indices: dict[int, set[TopicPartition]] = {int(role): set() for role in Role}
        self._done_with: dict[TopicPartition, Bounds | None] = {}
        self._changed: set[TopicPartition] = set()
        self._dropped_records: list[RecordCommit] = []
        self._rota: list[TopicPartition] = []
        self._busy: tuple[int, tuple[OwnedPartition, ...]] = (0, ())
        self._assigned: _Assigned | None = None
        self._batches: tuple[int, dict[str, list[TopicPartition]]] = (0, {})

    @property
    def busy(self) -> tuple[OwnedPartition, ...]:
        """Partitions with work to do now or later; the same tuple until a partition changes."""
        if self._busy[0] != self.version:
            self._busy = (self.version, tuple(self.of(Role.BUSY)))
        return self._busy[1]

    @property
    def assigned(self) -> frozenset[TopicPartition]:
        """All partitions; the same set until a partition is added or removed."""
        return self._described()[0]

    @property
    def names(self) -> str:
        """All partitions, for messages."""
        return self._described()[1]

    def _described(self) -> _Assigned:
        if self._assigned is None:
            self._assigned = frozenset(self._all), names_of(self._all), tuple(sorted(self._all))
        return self._assigned

    def has(self, role: Role) -> bool:
        """Whether any partition has a role."""
        return bool(self._indices[role])

    def of(self, *roles: Role) -> list[OwnedPartition]:
        """Return the partitions with any of the roles, in the order of their epochs."""
        first, *others = (self._indices[role] for role in roles)
        return self.by_epoch(first.union(*others) if others else first)

    def restoring(self, *, is_read: bool) -> list[OwnedPartition]:
        """Return the restoring partitions whose committed offset is known, or the others."""
        restoring, unknown = self._indices[Role.RESTORING], self._indices[Role.UNKNOWN]
        return self.by_epoch(restoring - unknown if is_read else restoring & unknown)

    def by_epoch(self, partitions: Iterable[TopicPartition]) -> list[OwnedPartition]:
        """Return the given partitions that are assigned, in the order of their epochs."""
        return sorted(self.known(partitions), key=_BY_EPOCH)

    def known(self, partitions: Iterable[TopicPartition]) -> list[OwnedPartition]:
        """Return the given partitions that are assigned."""
        return [self._all[partition] for partition in partitions if partition in self._all]

    def claimed_by(self, batch_ids: Iterable[str]) -> set[TopicPartition]:
        """Return the partitions on which runs of any of the batches may work."""
        if self._batches[0] != self.claims_version:
            batches: dict[str, list[TopicPartition]] = {}
            for partition in self._indices[Role.CLAIMED]:
                for entry in self._all[partition].entries:
                    for batch_id in entry.batch_ids:
                        batches.setdefault(batch_id, []).append(partition)
            self._batches = (self.claims_version, batches)
        known = self._batches[1]
        return {partition for batch_id in batch_ids for partition in known.get(batch_id, ())}

    def news_in(
        self, bounds: Mapping[TopicPartition, Bounds]
    ) -> list[tuple[TopicPartition, Bounds]]:
        """Return the bounds without those that their partition had when they were last read."""
        done_with = self._done_with.get
        return [one for one in bounds.items() if done_with(one[0]) is not one[1]]

    def readable(self, most: int) -> tuple[TopicPartition, ...]:
        """Return, ordered, the busy partitions with a ledger and up to `most` idle ones."""
        busy = self._indices[Role.BUSY]
        if len(self._all) - len(busy) <= most and not self._indices[Role.UNKNOWN]:
            return self._described()[2]
        known = busy - self._indices[Role.UNKNOWN]
        return tuple(sorted([*known, *self.next_idle(most)]))

    def next_idle(self, most: int) -> list[TopicPartition]:
        """Return up to `most` idle partitions, in rotation."""
        busy = self._indices[Role.BUSY]
        if len(self._all) - len(busy) <= most:
            return [partition for partition in self._all if partition not in busy]
        idle: dict[TopicPartition, None] = {}
        while len(idle) < most:
            self._rota = self._rota or list(reversed(self._all))
            partition = self._rota.pop()
            if partition in self._all and partition not in busy:
                idle[partition] = None
        return list(idle)

    @property
    def has_changed(self) -> bool:
        """Whether a partition has changed since the last call of `take_changed`."""
        return bool(self._changed)

    def take_changed(self) -> set[TopicPartition]:
        """Return, and clear, the partitions that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def take_dropped_records(self) -> list[RecordCommit]:
        """Return, and clear, the commits that were recorded or that the next owner must record."""
        dropped, self._dropped_records = self._dropped_records, []
        return dropped

    def __getitem__(self, partition: TopicPartition) -> OwnedPartition:
        return self._all[partition]

    def __setitem__(self, partition: TopicPartition, owned: OwnedPartition) -> None:
        before = self._all.get(partition)
        if before is not owned:
            self._note_change(partition, before, owned)
            self._all[partition] = owned

    def __delitem__(self, partition: TopicPartition) -> None:
        self._note_change(partition, self._all[partition], None)
        del self._all[partition]

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, partition: object) -> bool:
        return partition in self._all

    def _note_change(
        self,
        partition: TopicPartition,
        before: OwnedPartition | None,
        after: OwnedPartition | None,
    ) -> None:
        self.version += 1
        self._changed.add(partition)
        if before is None or after is None:
            self._assigned = None
        if before is not None and (issued := before.unrecorded.issued):
            kept = () if after is None else after.unrecorded.parts
            dropped = (one for one in before.unrecorded.parts[:issued] if one not in kept)
            self._dropped_records.extend(dropped)
        had, has = self._roles.pop(partition, 0), 0
        self._done_with.pop(partition, None)
        if after is not None:
            self._roles[partition] = has = _roles_of(after)
            if after.is_done_with_bounds:
                self._done_with[partition] = after.bounds
        if had != has:
            changed = had ^ has
            for role, index in self._indices.items():
                if changed & role:
                    (index.add if has & role else index.discard)(partition)
        if (had | has) & _CLAIMED and not _has_same_claims(before, after):
            self.claims_version += 1


def _has_same_claims(before: OwnedPartition | None, after: OwnedPartition | None) -> bool:
    return (
        before is not None
        and after is not None
        and before.ledger is after.ledger
        and before.pending is after.pending
        and before.phase is after.phase
        and before.directive is after.directive
        and before.previous is after.previous
        and before.epoch == after.epoch
    )


def _roles_of(owned: OwnedPartition) -> int:
    if owned.is_idle:
        return 0
    phase, pending, is_free = owned.phase, owned.pending, owned.directive is None
    roles = _BUSY if is_free else _BUSY | Role.DIRECTED
    if phase is Phase.RESTORING:
        roles |= Role.RESTORING | Role.UNSETTLED
    elif phase is Phase.DRAINING:
        roles |= Role.DRAINING if owned.runs_are_known else Role.DRAINING | Role.UNREAD
    if owned.ledger is None:
        roles |= Role.UNKNOWN
    is_claimed = bool(owned.entries or owned.previous_entries)
    if is_claimed or (pending is not None and pending.claimed_batch):
        roles |= _CLAIMED
    if pending is not None and not pending.refused:
        roles |= _UNSETTLED
    if owned.has_backlog:
        roles |= _MORE if phase.may_plan else _ACTIVE
    if (is_free and owned.entries) or (is_claimed and owned.live_runs):
        roles |= _ACTIVE
    if owned.is_troubled:
        roles |= Role.TROUBLED
    return roles


# Plain numbers are several times faster than members of an enumeration.
_BUSY, _CLAIMED, _UNSETTLED = int(Role.BUSY), int(Role.CLAIMED), int(Role.UNSETTLED)
_ACTIVE, _MORE = int(Role.ACTIVE), int(Role.MORE | Role.ACTIVE)

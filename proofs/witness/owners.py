"""Owners of partitions by the coordinator's records, to detect commits by other members.

Kafka does not record the committer of an offset; Dagster's record of the commit does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import OffsetRange
from proofs.witness.offsets_topic import GenerationAssigned, MemberAssigned, StoredOffset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from proofs.witness.offsets_topic import GroupRecord


class Owners:
    """Follows a group's records, oldest first."""

    def __init__(self) -> None:
        self._members: dict[str, MemberAssigned] = {}
        self._taken_unasked: dict[int, str] = {}
        self._generation: dict[int, str] = {}
        self._asked_back: frozenset[int] = frozenset()

    def take(self, record: GroupRecord) -> None:
        """Apply the next record."""
        if isinstance(record, MemberAssigned):
            self._take_member(record)
        elif isinstance(record, GenerationAssigned):
            # Between the two rebalances of a cooperative hand-over the partition is in no
            # assignment: the old owner still has it.
            kept = {
                number: member
                for number, member in self._generation.items()
                if member in record.members
            }
            assigned = {
                number: member for member, numbers in record.members.items() for number in numbers
            }
            self._generation = kept | assigned
            self._asked_back = frozenset(kept.keys() - assigned.keys())

    def _take_member(self, record: MemberAssigned) -> None:
        before = self._members.pop(record.member_id, None)
        has = record.partitions or frozenset[int]()
        self._taken_unasked = {
            number: member
            for number, member in self._taken_unasked.items()
            if member != record.member_id and number not in has
        }
        if record.partitions is None:
            return
        self._members[record.member_id] = record
        if before is not None and before.partitions is not None:
            taken = before.partitions - before.asked_back - record.partitions
            self._taken_unasked.update(dict.fromkeys(taken, record.member_id))

    @property
    def partitions(self) -> set[int]:
        """The owned partitions."""
        return set(self._generation).union(
            *(member.partitions or () for member in self._members.values())
        )

    def of(self, partition: int) -> str | None:
        """Return the member id of the owner of a partition."""
        for member, record in self._members.items():
            if partition in (record.partitions or ()):
                return member
        return self._generation.get(partition)

    def is_asked_back(self, partition: int) -> bool:
        """Return whether the owner of a partition still has to revoke it."""
        return partition in self._asked_back or any(
            partition in record.asked_back for record in self._members.values()
        )

    def is_taken_unasked(self, partition: int) -> bool:
        """Return whether the coordinator took a partition away before its member could detect it.

        While librdkafka resolves the topic names of its first assignment, its heartbeats report no
        partitions. If the coordinator already has a new assignment, it assigns those partitions
        to others at once. The member still starts with the first assignment, and is asked to revoke
        a moment later. The claims tell the writes of both apart.
        """
        return partition in self._taken_unasked


def changes_of_owner(log: Iterable[GroupRecord]) -> dict[int, list[tuple[float, str | None]]]:
    """Return the owners of each partition over time, oldest first; None without an owner."""
    owners = Owners()
    changes: dict[int, list[tuple[float, str | None]]] = {}
    for record in log:
        if isinstance(record, StoredOffset):
            continue
        owners.take(record)
        for partition in owners.partitions | changes.keys():
            owner, known = owners.of(partition), changes.setdefault(partition, [])
            if owner != (known[-1][1] if known else None):
                known.append((record.at, owner))
    return changes


def stored_without_owning(
    log: Iterable[GroupRecord],
    recorded_by: Mapping[OffsetRange, Collection[str]],
    names: Mapping[str, str],
    claimed_by: Mapping[StoredOffset, str] | None = None,
) -> list[str]:
    """Return a sentence for each offset that was stored by a member without ownership.

    Claims are included.

    Args:
        log: The records of the group, oldest first. The group reads one topic.
        recorded_by: The members that recorded the commit of a range.
        names: The name of each member, by its id in Kafka.
        claimed_by: The writer of a claim, if the claim names it.
    """
    owners = Owners()
    last: dict[int, int] = {}
    found = []
    for record in log:
        if not isinstance(record, StoredOffset):
            owners.take(record)
            continue
        owner = owners.of(record.partition)
        before, last[record.partition] = last.get(record.partition, 0), record.offset
        what = f"offset {record.offset} of {record.topic}-{record.partition} was stored"
        if owner is None:
            if record.offset > before or not owners.is_taken_unasked(record.partition):
                found.append(f"{what} while the partition had no owner")
            continue
        writers = (
            recorded_by.get(OffsetRange(record.topic, record.partition, before, record.offset), ())
            if record.offset > before
            else ()
        )
        claimer = (claimed_by or {}).get(record)
        if claimer is not None and owner in names and not owners.is_taken_unasked(record.partition):
            writers = (claimer,)
        if writers and names.get(owner, owner) not in writers:
            found.append(
                f"{what} by {', '.join(writers)} while {names.get(owner, owner)} had the partition"
            )
    return found

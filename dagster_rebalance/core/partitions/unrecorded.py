"""Unrecorded commits of a partition: the records that Dagster lacks, and when they are due."""

# Theory of operation: each commit is in one record
#
# A commit is stored in Kafka first, and Dagster has no transaction with Kafka. So the note beside
# the committed offset (`core.model.claims.LastCommit`) names what may still lack a record, and the
# next owner of the partition records it. A commit never waits for a record. Example:
#
#   commit [0,10)     records: [0,10) grows             note: [0,10)
#   it is issued      records: [0,10) issued
#   commit [10,20)    records: [0,10) issued, [10,20) grows      note: [0,10) [10,20)
#   commit [20,30)    records: [0,10) issued, [10,30) grows      note: [0,10) [10,30)
#   its answer        records: [10,30) grows            note: as before
#
# Rules:
#
# 1. An issued record does not grow, and no record is issued while a commit is being written.
#    Therefore the records that this member can have issued are exactly parts of the last note, or
#    of the note before it if the last one did not arrive. A storage thread that hangs may store
#    them at any later time.
# 2. While records are issued, no others are: what is committed in the meantime grows into one
#    record behind them. So the note has one part for each issued record and one that grows.
# 3. The next owner issues the parts of the note after the last one that Dagster has, each with the
#    bounds and the run in the note. It does not join them with each other or with later commits,
#    since the former owner may still store them.
#    The records of a partition are stored in order, so all before the last one are stored, too.
# 4. Before a record is stored, `RecordCommit.without` removes the commits that Dagster has already,
#    identified by start, end and run. By rules 1 and 3 the records of both owners have the same
#    start, so that either order of storing them leaves each commit in one record. The end of a
#    record that has grown behind the note is later than that in the note; its commits up to there
#    are known, because the ends of the newest commits in a record are never merged.
# 5. A record that Kafka may or may not have extended (a commit whose answer was lost) is dropped
#    when the partition may not commit any more: only the note in Kafka names its end.
# 6. A dead letter has a separate record, which closes the record before it.
#
# The former owner stops storing when it notices that it has lost the partition: the records that it
# has not begun to store are cancelled. The same holds for a storage thread that hangs, after
# another one has taken its work over. The one record that is being stored at that moment races with
# the next owner between its look-up and its insertion, as Dagster has no conditional write. A
# member that does not notice the loss, such as a frozen one, looks up again what is recorded if its
# look-up is older than a second.
#
# The size of the metadata limits the parts. Each dead letter adds one, and each crash or release
# that leaves a record to the next owner: if Dagster's storage is slow, or if the record waits for
# the budget (`core.engine.record_budget`). If the closed records take half of the parts, they do
# not wait for the budget any more (`leaves_little_room`). Therefore commits wait only if the
# storage is unavailable during several crashes, beyond `_MOST_PARTS`.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import LastCommit

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.offsets import OffsetRange

_MOST_PARTS = 4
_MOST_PARTS_WITH_CLAIMS = 2
_MANY_CLAIMS = 20
"""With more claims, the metadata has room for `_MOST_PARTS_WITH_CLAIMS` parts."""


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """Consecutive records that Dagster lacks.

    Attributes:
        parts: The records, oldest first. Only the last one may grow.
        issued: How many of them were issued.
        issued_at: When they were last issued.
        due_at: When the growing record is due.
    """

    parts: tuple[RecordCommit, ...] = ()
    issued: int = 0
    issued_at: float | None = None
    due_at: float = float("-inf")

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def range(self) -> OffsetRange:
        """The offsets of all records."""
        return replace(self.parts[-1].range, start=self.parts[0].range.start)

    @property
    def growing(self) -> RecordCommit | None:
        """The record that the next commit joins, if any."""
        last = self.parts[-1] if len(self.parts) > self.issued else None
        return None if last is None or last.is_late or last.is_dead_letter else last

    @property
    def closed(self) -> tuple[RecordCommit, ...]:
        """The records that do not grow."""
        return self.parts if self.growing is None else self.parts[:-1]

    @property
    def waiting_since(self) -> float:
        """When the first record was due; minus infinity for a record of an earlier owner."""
        made_at = self.parts[0].committed_at
        return float("-inf") if made_at is None else max(self.due_at, made_at)

    def grows(self, *, is_dead_letter: bool) -> RecordCommit | None:
        """Return the record that a commit joins; None if it has a separate one."""
        return None if is_dead_letter else self.growing

    def has_room(self, claims: int, *, is_dead_letter: bool) -> bool:
        """Whether the note of one more commit fits into the metadata, beside some claims."""
        joins = self.grows(is_dead_letter=is_dead_letter) is not None
        return joins or len(self.parts) < _most_parts(claims)

    def leaves_little_room(self, claims: int) -> bool:
        """Whether the closed records take half of the note, so that commits could wait for them.

        True whenever `has_room` is false.
        """
        return 2 * len(self.closed) >= _most_parts(claims)

    def noted(self, *, is_dead_letter: bool) -> tuple[LastCommit, ...]:
        """Return the records that the note of the next commit names before that of the commit."""
        joins = self.grows(is_dead_letter=is_dead_letter) is not None
        return tuple(
            LastCommit(part.range.start, part.batch_id, part.run_id, part.is_dead_letter)
            for part in (self.parts[:-1] if joins else self.parts)
        )

    def committed(self, record: RecordCommit) -> Unrecorded:
        """Add a commit: `record` begins with the record that it joins."""
        joins = self.grows(is_dead_letter=record.is_dead_letter) is not None
        return replace(self, parts=(*(self.parts[:-1] if joins else self.parts), record))

    def due(self, now: float, *, all_now: bool) -> int:
        """Return how many records to issue; issued ones are issued again. `all_now` for no delay.

        A record that does not grow is not delayed.
        """
        if self.issued:
            return self.issued
        return len(self.parts if all_now or now >= self.due_at else self.closed)

    def issue(self, records: int, now: float, every_s: float) -> Unrecorded:
        """Note that the first records are issued. The next one is due after the interval."""
        due_at = self.due_at if self.issued else now + every_s
        return replace(self, issued=records, issued_at=now, due_at=due_at)

    def recorded(self, records: Collection[RecordCommit]) -> Unrecorded:
        """Remove issued records that Dagster has."""
        issued, others = self.parts[: self.issued], self.parts[self.issued :]
        left = tuple(part for part in issued if part not in records)
        issued_at = self.issued_at if left else None
        return replace(self, parts=(*left, *others), issued=len(left), issued_at=issued_at)

    def without_growing(self) -> Unrecorded:
        """Drop the growing record: a commit that would join it is unconfirmed."""
        return replace(self, parts=self.closed)


def _most_parts(claims: int) -> int:
    return _MOST_PARTS if claims <= _MANY_CLAIMS else _MOST_PARTS_WITH_CLAIMS


NOTHING = Unrecorded()

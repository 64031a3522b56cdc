"""Offset ledger: claimed ranges of one partition in one epoch, and the next offset to commit.

An offset may be committed only if the range that ends there and all earlier ranges have
succeeded or are in the dead-letter topic. Ranges are contiguous by construction, so gaps from
transactions or compaction do not matter. Results from another epoch are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    FailureStreak,
    InFlight,
    Progress,
    Succeeded,
    ToRequest,
    blocking,
)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A claimed range and its progress.

    Attributes:
        claimed_at: When this member wrote the claim; None if it took the claim over.
        due_at: When a run may be requested.
        taken_from: The batch that had the range before, until its runs are known to have ended;
            empty for none.
        progress_at_takeover: The progress when this member reassigned the range to the batch, if it
            did.
        working_since: When a run began to work on it, if known.
    """

    range: OffsetRange
    batch_id: str
    claimed_at: float | None = None
    progress: Progress = ToRequest()  # noqa: RUF009 - frozen, so sharing the default is safe
    due_at: float = float("-inf")
    taken_from: str = ""
    progress_at_takeover: ToRequest | Exhausted | None = None
    working_since: float | None = None

    @property
    def is_own(self) -> bool:
        """Whether this member wrote the claim, in this epoch."""
        return self.claimed_at is not None

    def reassigned(self, batch_id: str, claimed_at: float) -> LedgerEntry:
        """Return the entry for another batch, whose first run is the next attempt."""
        progress_at_takeover = None
        if isinstance(self.progress, ToRequest | Exhausted):
            progress_at_takeover = self.progress.next_attempt
        return replace(
            self,
            batch_id=batch_id,
            claimed_at=claimed_at,
            progress=progress_at_takeover or self.progress,
            taken_from="" if self.is_own else self.batch_id,
            progress_at_takeover=progress_at_takeover,
        )

    @property
    def is_takeover_open(self) -> bool:
        """Whether it was taken from another batch whose runs have not been read since."""
        return (
            self.taken_from != ""
            and self.completed_by is None
            and not isinstance(self.progress, InFlight)
        )

    @property
    def live_runs(self) -> tuple[str, ...]:
        """The runs that may work on the range."""
        return self.progress.run_ids if isinstance(self.progress, InFlight) else ()

    @property
    def unstarted_runs(self) -> tuple[str, ...]:
        """The live runs that have not started."""
        if not isinstance(self.progress, InFlight):
            return ()
        return (*self.progress.waiting, *self.progress.launching)

    @property
    def batch_ids(self) -> tuple[str, ...]:
        """The batches whose runs may work on the range."""
        return (self.batch_id, self.taken_from) if self.taken_from else (self.batch_id,)

    @property
    def completed_by(self) -> str | None:
        """The run that succeeded, or the last failed run of a dead letter."""
        return self.progress.run_id if isinstance(self.progress, Succeeded | DeadLettered) else None

    @property
    def is_dead_letter(self) -> bool:
        """Whether the dead-letter topic has the range."""
        return isinstance(self.progress, DeadLettered)


@dataclass(frozen=True, slots=True)
class OffsetLedger:
    """Claimed ranges of a partition, in offset order.

    Attributes:
        epoch: The assignment of the partition that the ledger belongs to.
        next_offset: The committed offset.
        entries: The claimed ranges from `next_offset` on.
    """

    partition: TopicPartition
    epoch: int
    next_offset: int
    entries: tuple[LedgerEntry, ...] = ()

    @property
    def claimed_until(self) -> int:
        """The end of the last claimed range, where the next claim starts."""
        return self.entries[-1].range.until if self.entries else self.next_offset

    @property
    def _in_flight(self) -> tuple[InFlight, ...]:
        return tuple(
            entry.progress for entry in self.entries if isinstance(entry.progress, InFlight)
        )

    @property
    def live_runs(self) -> frozenset[str]:
        """The runs that may still work on the partition."""
        return frozenset(run for entry in self.entries for run in entry.live_runs)

    @property
    def unstarted_runs(self) -> frozenset[str]:
        """The live runs that have not started."""
        return frozenset(run for entry in self.entries for run in entry.unstarted_runs)

    @property
    def started_runs(self) -> frozenset[str]:
        """The live runs that have started and are not being cancelled."""
        return frozenset(run for progress in self._in_flight for run in progress.started)

    @property
    def blocked(self) -> tuple[LedgerEntry, Exhausted | FailureStreak] | None:
        """The first range that stops the partition, and the cause."""
        return next(
            (
                (entry, cause)
                for entry in self.entries
                if (cause := blocking(entry.progress)) is not None
            ),
            None,
        )

    @property
    def committable(self) -> LedgerEntry | None:
        """The first range, if it is done."""
        return (
            self.entries[0] if self.entries and self.entries[0].completed_by is not None else None
        )

    def claim(
        self,
        batch_id: str,
        until: int,
        claimed_at: float | None = None,
        *,
        taken_from: str = "",
    ) -> OffsetLedger:
        """Add the range `[claimed_until, until)` for a batch."""
        range_ = OffsetRange(
            self.partition.topic, self.partition.partition, self.claimed_until, until
        )
        entry = LedgerEntry(range_, batch_id, claimed_at, taken_from=taken_from)
        return replace(self, entries=(*self.entries, entry))

    def reclaimed(self, range_: OffsetRange, batch_id: str, claimed_at: float) -> OffsetLedger:
        """Assign a claimed range to another batch."""
        entries = tuple(
            entry.reassigned(batch_id, claimed_at) if entry.range == range_ else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def without_ownership(self) -> OffsetLedger:
        """Forget which claims without runs this member has written."""
        entries = tuple(
            replace(entry, claimed_at=None) if isinstance(entry.progress, ToRequest) else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def with_progress(
        self,
        epoch: int,
        range_: OffsetRange,
        progress: Progress,
        *,
        due_at: float = float("-inf"),
        working_since: float | None = None,
    ) -> OffsetLedger:
        """Set the progress of a range. Progress from another epoch or of a done range is ignored.

        Unchanged progress keeps its times.
        """
        if epoch != self.epoch:
            return self
        entries = tuple(
            replace(entry, progress=progress, due_at=due_at, working_since=working_since)
            if entry.range == range_
            and entry.completed_by is None
            and (
                entry.progress != progress
                or (entry.working_since is None and working_since is not None)
            )
            else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def taken_over(
        self, range_: OffsetRange, progress_at_takeover: ToRequest | Exhausted
    ) -> OffsetLedger:
        """Complete the takeover of a range: no run of its former batch works any more.

        A done range does not change: until its commit is stored, the claim must name the batch of
        its run.
        """
        entries = tuple(
            replace(entry, taken_from="", progress_at_takeover=progress_at_takeover.next_attempt)
            if entry.range == range_ and entry.completed_by is None
            else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def due_now(self, *, exhausted_too: bool) -> OffsetLedger:
        """Make all ranges that wait for their next run due now."""
        tried = (ToRequest, Exhausted) if exhausted_too else ToRequest
        entries = tuple(
            replace(entry, due_at=float("-inf")) if isinstance(entry.progress, tried) else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def committed(self, entry: LedgerEntry) -> OffsetLedger:
        """Remove a committed range.

        Raises:
            IllegalStateError: The range is not `committable`: an offset would be skipped.
        """
        if entry != self.committable:
            msg = (
                f"{entry.range} cannot be committed at offset {self.next_offset}: it is not the "
                "first range, or is not done"
            )
            raise IllegalStateError(msg)
        return replace(self, next_offset=entry.range.until, entries=self.entries[1:])

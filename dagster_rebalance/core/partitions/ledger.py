"""The claimed ranges of one partition in one epoch, from its committed offset on.

An offset may be committed only if the range that ends there and all earlier ranges have
succeeded or are in the dead-letter topic. There is never a gap between two ranges, because only
`claim` adds ranges; gaps from transactions or compaction do not matter. `with_progress` ignores
progress of another epoch; callers of the other methods check the epoch.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.claims import LEFT_OUT, Claim
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.runs.bisection import Part, is_waiting, whole_batch
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

if TYPE_CHECKING:
    from collections.abc import Callable


class LedgerEntry(NamedTuple):
    """A claimed range and its progress.

    Attributes:
        claimed_at: When this member wrote the claim in this epoch; if `is_early`, when its batch
            began. None if the claim was inherited, or `without_ownership` was called since.
        due_at: When a run may be requested.
        previous_batch_id: The batch that claimed the range before, while its runs may still work
            on it; empty for none.
        previous_progress: The progress before the reassignment, as the next attempt sees it; None
            without one.
        working_since: When a run began to work on the range, if known.
        is_early: Whether the claim was written while another batch was at work, see `Claim`.
        is_repeat: Whether a batch with an earlier claim may have processed a part of the range. An
            interrupted batch is no attempt, but may have stored letters.
    """

    range: OffsetRange
    batch_id: str
    claimed_at: float | None = None
    progress: Progress = ToRequest()
    due_at: float = float("-inf")
    previous_batch_id: str = ""
    previous_progress: ToRequest | Exhausted | None = None
    working_since: float | None = None
    is_early: bool = False
    is_repeat: bool = False

    @property
    def claim(self) -> Claim:
        """The claim to store: it is early until its batch has begun."""
        is_early = self.is_early and (self.previous_batch_id != "" or self.progress == ToRequest())
        return Claim(self.range.until, self.batch_id, self.previous_batch_id, is_early)

    @property
    def is_own(self) -> bool:
        """Whether this member wrote the claim, see `claimed_at`."""
        return self.claimed_at is not None

    def reassigned(self, batch_id: str, claimed_at: float) -> LedgerEntry:
        """Return the entry for another batch, whose first run is the next attempt.

        Raises:
            IllegalStateError: A run of the former batch may still work on the range.
        """
        if self.is_reassignment_open:
            former = self.previous_batch_id
            msg = f"{self.range} cannot be claimed: runs of {former} may still work on it"
            raise IllegalStateError(msg)
        previous_progress = None
        if isinstance(self.progress, ToRequest | Exhausted):
            previous_progress = self.progress.next_attempt
        return self._replace(
            batch_id=batch_id,
            claimed_at=claimed_at,
            progress=previous_progress or self.progress,
            previous_batch_id="" if self.is_own else self.batch_id,
            previous_progress=previous_progress,
            is_early=self.is_early and not self.is_own,
            is_repeat=self.is_repeat or not self.is_own or self.progress != ToRequest(),
        )

    def with_progress(
        self, progress: Progress, due_at: float, working_since: float | None
    ) -> LedgerEntry:
        """Return the entry with other progress. An own early claim begins with its first run."""
        begins = self.is_early and self.is_own and self.progress == ToRequest()
        claimed_at = working_since if begins and working_since is not None else self.claimed_at
        return self._replace(
            progress=progress, due_at=due_at, working_since=working_since, claimed_at=claimed_at
        )

    @property
    def is_reassignment_open(self) -> bool:
        """Whether it is not known yet if runs of `previous_batch_id` work on the range."""
        return (
            self.previous_batch_id != ""
            and self.completed_by is None
            and not isinstance(self.progress, InFlight)
        )

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a bisected range."""
        return Part.parse(self.batch_id) is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is a part of a bisected range that is not attempted as it is."""
        return is_waiting(self.batch_id)

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
        if self.is_waiting:
            return ()
        others = (self.previous_batch_id, whole_batch(self.batch_id))
        return (self.batch_id, *filter(None, others))

    @property
    def completed_by(self) -> str | None:
        """The run that succeeded, or the last failed run of a dead letter."""
        return self.progress.run_id if isinstance(self.progress, Succeeded | DeadLettered) else None

    @property
    def is_dead_letter(self) -> bool:
        """Whether the dead-letter topic has the range."""
        return isinstance(self.progress, DeadLettered)


class OffsetLedger(NamedTuple):
    """Claimed ranges of a partition, in offset order.

    Attributes:
        epoch: The number of this assignment. Not Kafka's member epoch or leader epoch.
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

    def with_claim(
        self,
        batch_id: str,
        until: int,
        claimed_at: float | None = None,
        *,
        previous_batch_id: str = "",
        is_early: bool = False,
    ) -> OffsetLedger:
        """Add the range `[claimed_until, until)` for a batch."""
        range_ = OffsetRange(
            self.partition.topic, self.partition.partition, self.claimed_until, until
        )
        entry = LedgerEntry(
            range_, batch_id, claimed_at, previous_batch_id=previous_batch_id, is_early=is_early
        )
        return self._replace(entries=(*self.entries, entry))

    def with_left_out(self, until: int) -> OffsetLedger:
        """Add the range `[claimed_until, until)` as done: the filter leaves out its records."""
        added = self.with_claim(LEFT_OUT, until)
        last = added.entries[-1]._replace(progress=Succeeded(LEFT_OUT))
        return added._replace(entries=(*self.entries, last))

    def with_reassigned(
        self, range_: OffsetRange, batch_id: str, claimed_at: float
    ) -> OffsetLedger:
        """Assign a claimed range to another batch."""
        entries = tuple(
            entry.reassigned(batch_id, claimed_at) if entry.range == range_ else entry
            for entry in self.entries
        )
        return self._replace(entries=entries)

    def without_ownership(self) -> OffsetLedger:
        """Remove `claimed_at` from the claims without runs: they are claimed again."""
        entries = tuple(
            entry._replace(claimed_at=None) if isinstance(entry.progress, ToRequest) else entry
            for entry in self.entries
        )
        return self._replace(entries=entries)

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

        Unchanged progress keeps its times, unless it is now known when the work began.
        """
        if epoch != self.epoch:
            return self
        entries = tuple(
            entry.with_progress(progress, due_at, working_since)
            if entry.range == range_
            and entry.completed_by is None
            and (
                entry.progress != progress
                or (entry.working_since is None and working_since is not None)
            )
            else entry
            for entry in self.entries
        )
        is_same = all(map(operator.is_, entries, self.entries))
        return self if is_same else self._replace(entries=entries)

    def with_completed_reassignment(
        self, range_: OffsetRange, previous_progress: ToRequest | Exhausted
    ) -> OffsetLedger:
        """Complete the reassignment of a range: no run of its former batch works any more.

        A done range is unchanged: until its commit is stored, the claim must name the batch of the
        run that succeeded.
        """
        entries = tuple(
            entry._replace(
                previous_batch_id="",
                previous_progress=previous_progress.next_attempt,
                is_early=False,
            )
            if entry.range == range_ and entry.completed_by is None
            else entry
            for entry in self.entries
        )
        return self._replace(entries=entries)

    def with_all_due(self, is_retried: Callable[[Exhausted], bool]) -> OffsetLedger:
        """Make all ranges that wait for their next run due now."""
        entries = tuple(
            entry._replace(due_at=float("-inf"))
            if isinstance(entry.progress, ToRequest)
            or (isinstance(entry.progress, Exhausted) and is_retried(entry.progress))
            else entry
            for entry in self.entries
        )
        return self._replace(entries=entries)

    def after_commit(self, entry: LedgerEntry) -> OffsetLedger:
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
        return self._replace(next_offset=entry.range.until, entries=self.entries[1:])

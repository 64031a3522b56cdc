"""The offset ledger holds the ranges of one partition in one epoch and the next offset to commit.

It knows the ranges in flight and those that finished out of order.

An offset may be committed only when the range that ends there, and every earlier range, has
succeeded or, where the settings say so, is in the dead-letter topic. Ranges are contiguous by
construction (each starts where the one before it ends), so gaps that transactions or compaction
leave between offsets do not matter. A completion that carries another epoch belongs to an earlier
ownership of the partition and is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    InFlight,
    Progress,
    Succeeded,
    ToRequest,
    Trouble,
    blocking,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A claimed range and how far the work on it is.

    Attributes:
        range: What is claimed.
        batch_id: The batch that it belongs to.
        claimed_at: When this member wrote the claim, on its clock; None when it took the claim
            over.
        progress: What the runs of the batch say.
        due_at: When a run may be asked for, on this member's clock.
        taken_from: The batch that this one has taken the range from, until it is known that nothing
            works under its id; empty for none.
        earlier: What was known of the range when this member gave it to the batch; None where it
            gave it to none.
        since: Since when a run works on it, on this member's clock; None where that is not known.
    """

    range: OffsetRange
    batch_id: str
    claimed_at: float | None = None
    progress: Progress = ToRequest()  # noqa: RUF009 - frozen, so sharing the default is safe
    due_at: float = float("-inf")
    taken_from: str = ""
    earlier: ToRequest | Exhausted | None = None
    since: float | None = None

    @property
    def is_own(self) -> bool:
        """Whether this member has written the claim itself, in this ownership."""
        return self.claimed_at is not None

    def given_to(self, batch_id: str, claimed_at: float) -> Entry:
        """The entry for another batch, whose first run is the next one.

        What stops the range, and when it is due, stay known: the next run is the same attempt.
        """
        earlier = None
        if isinstance(self.progress, ToRequest | Exhausted):
            earlier = self.progress.next_attempt
        return replace(
            self,
            batch_id=batch_id,
            claimed_at=claimed_at,
            progress=earlier or self.progress,
            taken_from="" if self.is_own else self.batch_id,
            earlier=earlier,
        )

    @property
    def is_in_question(self) -> bool:
        """Whether it was taken from another batch, and its runs were not looked up since."""
        return (
            self.taken_from != ""
            and self.done_by is None
            and not isinstance(self.progress, InFlight)
        )

    @property
    def live_runs(self) -> tuple[str, ...]:
        """The runs that may work on the range."""
        return self.progress.run_ids if isinstance(self.progress, InFlight) else ()

    @property
    def unstarted_runs(self) -> tuple[str, ...]:
        """Those of them that have not started."""
        if not isinstance(self.progress, InFlight):
            return ()
        return (*self.progress.waiting, *self.progress.launching)

    @property
    def looked_up_as(self) -> tuple[str, ...]:
        """The batches whose runs may work on the range."""
        return (self.batch_id, self.taken_from) if self.taken_from else (self.batch_id,)

    @property
    def done_by(self) -> str | None:
        """Return the run that made the range done; None while it is not done.

        That is the run that succeeded on it, or the last one that failed before the range went to
        the dead-letter topic.
        """
        return self.progress.run_id if isinstance(self.progress, Succeeded | DeadLettered) else None

    @property
    def is_dead_letter(self) -> bool:
        """Whether the dead-letter topic has it."""
        return isinstance(self.progress, DeadLettered)


@dataclass(frozen=True, slots=True)
class OffsetLedger:
    """What is in flight for a partition, in offset order.

    Attributes:
        partition: The partition.
        epoch: The assignment of the partition to this member that the ledger belongs to.
        next_offset: The committed offset.
        entries: The claimed ranges from `next_offset` on.
    """

    partition: TopicPartition
    epoch: int
    next_offset: int
    entries: tuple[Entry, ...] = ()

    @property
    def claimed_until(self) -> int:
        """The offset behind the last claimed range: where the next claim starts."""
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
        """Those of the live runs that have not started."""
        return frozenset(run for entry in self.entries for run in entry.unstarted_runs)

    @property
    def started_runs(self) -> frozenset[str]:
        """Those of the live runs that have started, and that nobody has asked to end."""
        return frozenset(run for progress in self._in_flight for run in progress.started)

    @property
    def blocked(self) -> tuple[Entry, Exhausted | Trouble] | None:
        """The first range that a person has to look at, and for what; None when there is none."""
        return next(
            (
                (entry, found)
                for entry in self.entries
                if (found := blocking(entry.progress)) is not None
            ),
            None,
        )

    @property
    def committable(self) -> Entry | None:
        """The first range, if it is done: what may be committed next."""
        return self.entries[0] if self.entries and self.entries[0].done_by is not None else None

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
        entry = Entry(range_, batch_id, claimed_at, taken_from=taken_from)
        return replace(self, entries=(*self.entries, entry))

    def claimed_again(self, range_: OffsetRange, batch_id: str, claimed_at: float) -> OffsetLedger:
        """Give a claimed range to another batch, with the same bounds."""
        entries = tuple(
            entry.given_to(batch_id, claimed_at) if entry.range == range_ else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def disowned(self) -> OffsetLedger:
        """Forget which claims this member has written, of those that no run works on."""
        entries = tuple(
            replace(entry, claimed_at=None) if isinstance(entry.progress, ToRequest) else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def note(
        self,
        epoch: int,
        range_: OffsetRange,
        progress: Progress,
        *,
        due_at: float = float("-inf"),
        since: float | None = None,
    ) -> OffsetLedger:
        """Note how far the work on a range is, since when, and when it may be asked for.

        News from another epoch, or once it is done, changes nothing.

        What is known already keeps its times.
        """
        if epoch != self.epoch:
            return self
        entries = tuple(
            replace(entry, progress=progress, due_at=due_at, since=since)
            if entry.range == range_
            and entry.done_by is None
            and (entry.progress != progress or (entry.since is None and since is not None))
            else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def taken(self, range_: OffsetRange, earlier: ToRequest | Exhausted) -> OffsetLedger:
        """Nothing works on a range under the id of the batch that it was taken from.

        Once the range is done, that changes nothing: its commit may be under way, and as long as
        Kafka does not have it, the claim must name the batch whose run has done it.

        Args:
            range_: The range.
            earlier: What is known of it under that id.
        """
        entries = tuple(
            replace(entry, taken_from="", earlier=earlier.next_attempt)
            if entry.range == range_ and entry.done_by is None
            else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def tried_now(self, *, exhausted_too: bool) -> OffsetLedger:
        """Let each range that waits for its next run be due."""
        tried = (ToRequest, Exhausted) if exhausted_too else ToRequest
        entries = tuple(
            replace(entry, due_at=float("-inf")) if isinstance(entry.progress, tried) else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def committed(self, entry: Entry) -> OffsetLedger:
        """Drop a range whose end was committed.

        Raises:
            IllegalStateError: It is not the one that may be committed next, so an offset would have
                been skipped.
        """
        if entry != self.committable:
            msg = (
                f"{entry.range} cannot be committed at offset {self.next_offset}: it is not the "
                "first range, or is not done"
            )
            raise IllegalStateError(msg)
        return replace(self, next_offset=entry.range.until, entries=self.entries[1:])

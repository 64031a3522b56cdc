"""Owned partition: state of one partition of this member, as a frozen value.

Every change of phase goes through the table in `state_machine`. Offset writes are built from the
ledger, so the stored claims always agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import Backlog
from dagster_rebalance.core.model.claims import Claim, LastCommit, StoredPartition, encode
from dagster_rebalance.core.model.commands import OffsetWrite, RecordCommit
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    Log,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
)
from dagster_rebalance.core.partitions.state_machine import Change, Phase, after
from dagster_rebalance.core.runs.progress import InFlight, blocking

if TYPE_CHECKING:
    from dagster_rebalance.core.model.commands import StoreDeadLetter
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.partitions.ledger import LedgerEntry, OffsetLedger


_HANGING_AFTER_S = 960.0
"""Brokers abort a transaction after at most `transaction.max.timeout.ms`, by default 900 s."""


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """Offset write that Kafka has not confirmed.

    Without `commit`, `claim` and `reclaim` it stores the start position of a group or the
    identity of the log.

    Attributes:
        commit: The entry whose end it commits.
        claim: The new claim, as (batch id, until).
        reclaim: The claimed range that it assigns to another batch, and the id of that batch.
        sent_at: When it was first sent.
        resent_at: When it was last sent again.
        refused: Why Kafka permanently refuses it; empty if it does not.
    """

    write: OffsetWrite
    sent_at: float
    commit: LedgerEntry | None = None
    claim: tuple[str, int] | None = None
    reclaim: tuple[OffsetRange, str] | None = None
    resent_at: float | None = None
    refused: str = ""

    @property
    def claimed_batch(self) -> str:
        """The batch that it claims a range for; empty for none."""
        if self.claim is not None:
            return self.claim[0]
        return "" if self.reclaim is None else self.reclaim[1]

    @property
    def last_sent_at(self) -> float:
        """When it was last sent."""
        return self.sent_at if self.resent_at is None else self.resent_at


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a partition cannot start or continue.

    Attributes:
        reason: The reason, and what to do.
        moved_from: The stop ends only when the committed offset differs from this one, because a
            log that has grown again no longer shows its truncation. None if the reason is evaluated
            on each read.
    """

    reason: str
    moved_from: OffsetAndMetadata | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A range on its way to the dead-letter topic.

    Attributes:
        command: The issued command.
        due_at: When the command is repeated.
        is_stored: Whether the topic has the range.
        failures: Number of failures to store it.
        problem: The last failure; empty for none.
    """

    command: StoreDeadLetter
    due_at: float
    is_stored: bool = False
    failures: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that blocks reading.

    Attributes:
        offset: Its first offset, as far as known.
        records: Offsets from there to the high watermark.
        since: When it was first seen.
        is_hanging: Whether it is older than brokers allow.
    """

    offset: int
    records: int
    since: float
    is_hanging: bool = False


@dataclass(frozen=True, slots=True)
class OwnedPartition:
    """One partition in one epoch.

    Attributes:
        epoch: Increases with each assignment of any partition to this member.
        stored: What Kafka stores, as last read or written; None without a committed offset.
        ledger: None until the stored offset has been read.
        last_commit: The last commit in the stored metadata.
        log: The log when the partition was restored.
        stored_log: The log in the stored metadata.
        bounds: The bounds as last read.
        backlog_since: Since when there are offsets to claim; None if there are none.
        seen_since: When the first of them was seen, also if a later batch had no room for it.
        has_claimed: Whether this member has claimed a batch of it. The first batch does not wait
            for more records, as its previous waiting time is unknown.
        unrecorded: Commits that Dagster has not recorded yet.
        recorded_at: When `unrecorded` was last issued. Later commits are not added to it.
        record_due_at: Until then, commits are joined into one record.
        held_since: When its release was requested.
        runs_are_known: Whether the runs of its claims were read, and again since its release was
            requested.
        stop_reason: Why it is stopped; empty if it is not.
        refused: Why it could not be restored the last time.
        blocked_by: Runs without a claim that work on it; they must end before it is restored.
        dead_letter: The dead letter of its first range.
        rechecked_runs: Runs that refused themselves and after which the claims were read again,
            once for each, because that restarts the delays of the ranges.
        has_foreign_write: Whether a foreign write was found while draining; nothing more is
            committed.
        directive: The pause or stop directive in force.
        previous: The state before it is read again; None for the first read, and if Kafka now
            stores something else.
    """

    partition: TopicPartition
    epoch: int
    phase: Phase = Phase.RESTORING
    stored: OffsetAndMetadata | None = None
    ledger: OffsetLedger | None = None
    last_commit: LastCommit | None = None
    log: Log = Log()  # noqa: RUF009 - frozen, so sharing the default is safe
    stored_log: Log = Log()  # noqa: RUF009 - frozen, as above
    bounds: Bounds | None = None
    backlog_since: float | None = None
    seen_since: float | None = None
    has_claimed: bool = False
    pending: PendingWrite | None = None
    unrecorded: RecordCommit | None = None
    recorded_at: float | None = None
    record_due_at: float = float("-inf")
    held_since: float | None = None
    runs_are_known: bool = False
    stop_reason: str = ""
    open_transaction: OpenTransaction | None = None
    refused: Refused | None = None
    blocked_by: tuple[str, ...] = ()
    dead_letter: DeadLetter | None = None
    rechecked_runs: frozenset[str] = frozenset()
    has_foreign_write: bool = False
    directive: Directive | None = None
    previous: OwnedPartition | None = None

    def changed(self, change: Change) -> OwnedPartition:
        """Return the partition after a change of phase.

        In a phase without commits, a pending write is dropped, as its answer comes too late. A
        pending commit also drops `unrecorded`, because only Kafka knows where the commits to record
        end.

        Raises:
            IllegalStateError: The change is not legal in this phase.
        """
        changed = replace(self, phase=after(self.phase, change))
        if changed.phase.may_commit or self.pending is None:
            return changed
        unrecorded = None if self.pending.commit is not None else self.unrecorded
        return replace(changed, pending=None, unrecorded=unrecorded)

    def draining(self) -> OwnedPartition:
        """Return the partition after its release was requested.

        While it is read again, it drains in its previous state, since known runs may still work on
        it. That is safe: each commit is compared with the stored offset, and names the log that the
        next owner compares with the log of the partition.
        """
        if self.previous is None:
            return self.changed(Change.GIVE_UP_REQUESTED)
        phase = after(self.phase, Change.LOOK_UP_DROPPED)
        return replace(self.previous, phase=phase, directive=self.directive)

    def restored(self, now: float) -> OwnedPartition:
        """Return the restored partition; offsets in its bounds may be claimed at once."""
        restored = replace(
            self.changed(Change.RESTORED), blocked_by=(), refused=None, previous=None
        )
        return restored if self.bounds is None else restored.with_bounds(self.bounds, now)

    def with_directive(self, directive: Directive | None) -> OwnedPartition:
        """Return the partition under another directive, or under none.

        After a resume, claims without a started batch are claimed again: other ranges of the batch
        may have been processed, and a streaming run starts no batch twice.
        """
        if directive is not None or self.ledger is None:
            return replace(self, directive=directive)
        return replace(self, directive=None, ledger=self.ledger.without_ownership())

    def due_now(self, *, exhausted_too: bool) -> OwnedPartition:
        """Return the partition with its delayed ranges and refused write due now.

        With a dead-letter topic, exhausted ranges (`exhausted_too`) are being stored there instead.
        """
        pending = self.pending
        if pending is not None and pending.refused:
            pending = replace(pending, resent_at=float("-inf"))
        ledger = self.ledger
        if ledger is not None:
            ledger = ledger.due_now(exhausted_too=exhausted_too)
        return replace(self, ledger=ledger, pending=pending)

    def with_bounds(self, bounds: Bounds, now: float) -> OwnedPartition:
        """Return the partition with new bounds."""
        is_behind = self.ledger is not None and bounds.until > self.ledger.claimed_until
        if not is_behind:
            return replace(self, bounds=bounds, backlog_since=None, seen_since=None)
        since = now if self.backlog_since is None else self.backlog_since
        seen_since = since if self.seen_since is None else self.seen_since
        return replace(self, bounds=bounds, backlog_since=since, seen_since=seen_since)

    @property
    def is_idle(self) -> bool:
        """Whether only an event, and not time alone, can give the partition work."""
        if (
            self.phase is not Phase.OWNED
            or self.ledger is None
            or self.stored is None
            or self.bounds is None
        ):
            return False
        if (
            self.ledger.entries
            or self.pending is not None
            or self.unrecorded is not None
            or self.backlog_since is not None
        ):
            return False
        if self.stored_log != self.log or self.open_transaction is not None:
            return False
        return (
            self.bounds.start <= self.ledger.next_offset
            and self.bounds.until <= self.ledger.next_offset
        )

    def is_quiet(self, entry: LedgerEntry, at: float) -> bool:
        """Return whether no run works on a claimed range and none is due at a time."""
        if isinstance(entry.progress, InFlight):
            return False
        if self.directive is not None and self.phase is Phase.OWNED:
            return not entry.is_takeover_open
        return self.phase is Phase.STOPPED and (at < entry.due_at or self.directive is not None)

    @property
    def has_backlog(self) -> bool:
        """Whether there are offsets that may be claimed."""
        return self.backlog_since is not None and self.directive is None

    @property
    def is_claiming(self) -> bool:
        """Whether a claim is being written and not refused."""
        return (
            self.pending is not None
            and self.pending.claimed_batch != ""
            and not self.pending.refused
        )

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The claimed ranges."""
        return self.ledger.entries if self.ledger else ()

    @property
    def previous_entries(self) -> tuple[LedgerEntry, ...]:
        """The claimed ranges before it is read again."""
        return self.previous.entries if self.previous is not None else ()

    @property
    def known_entries(self) -> tuple[LedgerEntry, ...]:
        """The claimed ranges, or the previous ones while it is read again."""
        return (
            self.previous.entries
            if self.ledger is None and self.previous is not None
            else self.entries
        )

    @property
    def ahead(self) -> OffsetRange:
        """All offsets that are not committed yet, including future ones."""
        start = self.ledger.next_offset if self.ledger else 0
        return OffsetRange(self.partition.topic, self.partition.partition, start, MAX_OFFSET)

    @property
    def live_runs(self) -> frozenset[str]:
        """The runs that may still work on it."""
        if self.previous is not None:
            return self.previous.live_runs
        return self.ledger.live_runs if self.ledger else frozenset()

    @property
    def last_failure(self) -> tuple[str, str, str] | None:
        """Run, batch and error of the first range that stops it, or None."""
        for entry in self.entries:
            blocked = blocking(entry.progress)
            if blocked is not None:
                return blocked.run_id, entry.batch_id, blocked.reason
        return None

    @property
    def unstarted_runs(self) -> frozenset[str]:
        """The live runs that have not started."""
        return self.ledger.unstarted_runs if self.ledger else frozenset()

    @property
    def started_runs(self) -> frozenset[str]:
        """The live runs that have started and are not being cancelled."""
        return self.ledger.started_runs if self.ledger else frozenset()

    @property
    def lag(self) -> int:
        """Uncommitted offsets in Kafka, as far as known."""
        if self.ledger is None or self.bounds is None:
            return 0
        return max(0, self.bounds.until - self.ledger.next_offset)

    @property
    def is_behind_deletion(self) -> bool:
        """Whether Kafka has deleted the record at the committed offset."""
        return (
            self.ledger is not None
            and self.bounds is not None
            and self.ledger.next_offset < self.bounds.start
        )

    @property
    def needs_operator(self) -> bool:
        """Whether it continues only after an operator moves its committed offset."""
        is_at_rest = not self.live_runs and self.pending is None
        return self.phase is Phase.STOPPED and (
            self.ledger is None or (self.is_behind_deletion and is_at_rest)
        )

    @property
    def committing(self) -> LedgerEntry | None:
        """The range whose commit is due or unconfirmed."""
        if self.pending is not None and self.pending.commit is not None:
            return self.pending.commit
        return self.ledger.committable if self.ledger and not self.has_foreign_write else None

    @property
    def has_new_leader(self) -> bool:
        """Whether it has a new leader since it was restored, so its log may have been truncated."""
        return self.bounds is not None and self.bounds.leader_epoch not in {
            None,
            self.log.leader_epoch,
        }

    @property
    def backlog(self) -> Backlog | None:
        """Offsets that may be planned now, or None."""
        if (
            not self.phase.may_plan
            or self.ledger is None
            or self.bounds is None
            or self.pending
            or self.backlog_since is None
            or self.directive is not None
        ):
            return None
        if self.has_new_leader:  # after a stop, it is not restored yet
            return None
        return Backlog(
            self.partition,
            self.ledger.claimed_until,
            self.bounds.until,
            self.backlog_since if self.has_claimed else float("-inf"),
            len(self.entries),
            self.seen_since,
        )

    def is_record_due(self, now: float) -> bool:
        """Return whether Dagster has to record `unrecorded` before the next commit.

        A record that was issued must not grow, since Dagster may have it. The same holds for the
        record of a commit found in Kafka, which the earlier owner may still issue. A dead letter
        has its own record.
        """
        record = self.unrecorded
        if record is None or (self.pending is not None and self.pending.commit is not None):
            return False
        if self.phase is not Phase.OWNED or self.recorded_at is not None:
            return True
        if record.is_late or record.is_dead_letter:
            return True
        following = self.ledger.committable if self.ledger else None
        return now >= self.record_due_at or (following is not None and following.is_dead_letter)

    def commit_write(self, now: float) -> PendingWrite | None:
        """Return the commit that is due, unless another write is pending."""
        if (
            self.ledger is None
            or self.pending
            or self.has_foreign_write
            or self.is_record_due(now)
            or not self.phase.may_commit
        ):
            return None
        entry = self.ledger.committable
        if entry is None or entry.completed_by is None:
            return None
        write = self._write(self.ledger.committed(entry), self._last_commit(entry))
        return PendingWrite(write, now, commit=entry)

    def claim_write(self, batch_id: str, until: int, now: float) -> PendingWrite:
        """Return the claim of the offsets up to `until` for a batch."""
        if self.ledger is None:
            raise self._unknown
        return PendingWrite(
            self._write(self.ledger.claim(batch_id, until), self.last_commit),
            now,
            claim=(batch_id, until),
        )

    @property
    def _unknown(self) -> IllegalStateError:
        return IllegalStateError(
            f"{self.partition} cannot be claimed before its committed offset is known"
        )

    def reclaim_write(self, range_: OffsetRange, batch_id: str, now: float) -> PendingWrite:
        """Return the claim of a claimed range for another batch."""
        if self.ledger is None:
            raise self._unknown
        ledger = self.ledger.reclaimed(range_, batch_id, now)
        return PendingWrite(self._write(ledger, self.last_commit), now, reclaim=(range_, batch_id))

    def first_write(self, now: float) -> PendingWrite | None:
        """Return the first write of a restored partition, or None if Kafka has it.

        It stores the start position of a new group, which a rebalance must not move, and the
        identity of the log for the next owner.
        """
        if self.pending or self.ledger is None or self.phase is not Phase.OWNED:
            return None
        if self.stored is not None and self.stored_log == self.log:
            return None
        return PendingWrite(self._write(self.ledger, self.last_commit), now)

    def written(self, write: OffsetWrite, now: float) -> OwnedPartition:
        """Return the partition after Kafka confirmed a write; only a pending one counts."""
        pending = self.pending
        if pending is None or pending.write != write or self.ledger is None:
            return self
        done = replace(self, stored=write.new, stored_log=self.log, pending=None)
        if pending.claim is not None:
            ledger = self.ledger.claim(*pending.claim, claimed_at=now)
            is_cut = self.bounds is not None and self.bounds.until > ledger.claimed_until
            seen_since = self.seen_since if is_cut else None
            return replace(
                done, ledger=ledger, backlog_since=None, seen_since=seen_since, has_claimed=True
            )
        if pending.reclaim is not None:
            return replace(done, ledger=self.ledger.reclaimed(*pending.reclaim, now))
        entry = pending.commit
        if entry is None:
            return done
        last = self._last_commit(entry)
        record = RecordCommit(
            range=replace(entry.range, start=last.start),
            epoch=self.epoch,
            batch_id=last.batch_id,
            run_id=last.run_id,
            lag=max(0, self.bounds.until - entry.range.until) if self.bounds else 0,
            claim_to_commit_s=None if entry.claimed_at is None else now - entry.claimed_at,
            drain_s=None if self.held_since is None else now - self.held_since,
            is_dead_letter=last.is_dead_letter,
            joined=self.unrecorded.ends if self.unrecorded else (),
        )
        ledger = self.ledger.committed(entry)
        committed = replace(done, ledger=ledger, last_commit=last, dead_letter=None)
        return replace(committed, recorded_at=None, unrecorded=record)

    def _last_commit(self, entry: LedgerEntry) -> LastCommit:
        """The last commit, from the first unrecorded offset on, for the next owner to record."""
        if entry.completed_by is None:
            msg = f"{entry.range} cannot be committed before it is done"
            raise IllegalStateError(msg)
        start = self.unrecorded.range.start if self.unrecorded else entry.range.start
        return LastCommit(start, entry.batch_id, entry.completed_by, entry.is_dead_letter)

    def _write(self, ledger: OffsetLedger, last: LastCommit | None) -> OffsetWrite:
        claims = tuple(
            Claim(entry.range.until, entry.batch_id, entry.taken_from) for entry in ledger.entries
        )
        new = encode(StoredPartition(ledger.next_offset, claims, last, self.log))
        return OffsetWrite(self.partition, self.epoch, self.stored, new)


def track_transaction(
    before: OpenTransaction | None, bounds: Bounds, now: float
) -> OpenTransaction | None:
    """Return the open transaction that bounds show, if any.

    Without a high watermark, bounds only show whether the known transaction has ended.
    """
    same = before if before is not None and before.offset == bounds.until else None
    if bounds.high_watermark is None:
        return same
    records = bounds.high_watermark - bounds.until
    if records <= 0:
        return None
    since = now if same is None else same.since
    return OpenTransaction(bounds.until, records, since, now - since >= _HANGING_AFTER_S)


def why_hanging(partition: TopicPartition, open_transaction: OpenTransaction | None) -> str | None:
    """Return why an operator must act on a transaction, or None."""
    if open_transaction is None or not open_transaction.is_hanging:
        return None
    return (
        f"{partition}: {open_transaction.records} records wait behind a transaction that has been "
        f"open at offset {open_transaction.offset} "
        "for longer than brokers allow (transaction.max.timeout.ms), so it hangs. Inspect it with "
        "kafka-transactions find-hanging and end it with kafka-transactions abort; the partition "
        "then continues"
    )

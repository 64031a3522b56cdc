"""Owned partition: state of one partition of this member, as a frozen value.

Every change of phase goes through the table in `state_machine`. Offset writes are built from the
ledger, so the stored claims always agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.batches.planning import Backlog
from dagster_rebalance.core.model.claims import LastCommit, StoredPartition, encode
from dagster_rebalance.core.model.commands import OffsetWrite, RecordCommit
from dagster_rebalance.core.model.commit_parts import NO_COMMITS, CommitPart, CommitParts
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    Log,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
)
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.partitions.bisected import after_commit, after_failure
from dagster_rebalance.core.partitions.state_machine import Change, Phase, after
from dagster_rebalance.core.partitions.unrecorded import NOTHING, Unrecorded
from dagster_rebalance.core.runs.progress import InFlight, blocking
from dagster_rebalance.core.runs.stream_batch import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.commands import StoreDeadLetter
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.partitions.ledger import LedgerEntry, OffsetLedger
    from dagster_rebalance.core.runs.progress import Exhausted


_HANGING_AFTER_S = 960.0
"""Brokers abort a transaction after at most `transaction.max.timeout.ms`, by default 900 s."""


class PendingWrite(NamedTuple):
    """Offset write that Kafka has not confirmed.

    A write without `commit`, `claim` and `reassign` stores the start position of a group or the
    identity of the log.

    Attributes:
        commit: The entry whose end the write commits.
        claim: The new claim, as (batch id, until, whether it is early).
        reassign: The claimed range that the write assigns to another batch, and that batch's id.
        bisects: Whether the write halves the first claim.
        sent_at: When the write was first sent.
        resent_at: When the write was last sent again.
        refused: Why Kafka permanently refuses the write; empty if it does not.
    """

    write: OffsetWrite
    sent_at: float
    commit: LedgerEntry | None = None
    claim: tuple[str, int, bool] | None = None
    reassign: tuple[OffsetRange, str] | None = None
    bisects: bool = False
    resent_at: float | None = None
    refused: str = ""

    @property
    def claimed_batch(self) -> str:
        """The batch for which the write claims a range; empty for none."""
        if self.claim is not None:
            return self.claim[0]
        return "" if self.reassign is None else self.reassign[1]

    @property
    def last_sent_at(self) -> float:
        """When it was last sent."""
        return self.sent_at if self.resent_at is None else self.resent_at


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a partition cannot start or continue.

    Attributes:
        reason: The reason, and what to do.
        moved_from: The stop ends only when the committed offset differs from this offset, because a
            log that has grown again no longer shows its truncation. None if each read evaluates the
            reason again.
    """

    reason: str
    moved_from: OffsetAndMetadata | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A range on its way to the dead-letter topic.

    Attributes:
        command: The issued command.
        due_at: When the command is repeated.
        is_stored: Whether the range is in the dead-letter topic.
        failures: Number of failures to store the range.
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
        offset: The first offset of the transaction, as far as known.
        records: Number of offsets from there to the high watermark.
        since: When the transaction was first seen.
        is_hanging: Whether the transaction is older than brokers allow.
    """

    offset: int
    records: int
    since: float
    is_hanging: bool = False


class FilterScan(NamedTuple):
    """A scan of the records from the last claim on, see `core.engine.filter_scans`.

    Attributes:
        number: The number of its command.
        until: The end of the scanned range.
        since: When the scan began.
        has_hit: Whether there is a record that the filter processes; None while the scan runs.
    """

    number: int
    until: int
    since: float
    has_hit: bool | None = None

    @property
    def is_running(self) -> bool:
        """Whether the result is unknown."""
        return self.has_hit is None


class OwnedPartition(NamedTuple):
    """One partition in one epoch.

    Attributes:
        epoch: Increases with each assignment of any partition to this member.
        stored: The committed offset, as last read or written; None if Kafka has none.
        ledger: None until the stored offset has been read.
        last_commit: The last commit in the stored metadata.
        log: The log when the partition was restored.
        stored_log: The log in the stored metadata.
        bounds: The bounds as last read.
        backlog_since: Since when there are offsets to claim; None if there are none.
        seen_since: When the first of these offsets was seen, also if a later batch had no room.
        has_claimed: Whether this member has claimed a batch. The first batch does not wait for more
            records, because its previous waiting time is unknown.
        unrecorded: The commits that Dagster lacks.
        held_since: When the release of the partition was requested.
        runs_are_known: Whether the runs of the claims were read; in a hold, whether they were read
            since the release was requested.
        stop_reason: Why the partition is stopped; empty if it is not.
        refused: Why the last restore was refused.
        blocked_by: Runs that work on the partition without a claim: they must end before a restore.
        dead_letter: The dead letter of the first range.
        rechecked_runs: Runs that their start check refused, and after which the claims were read
            again. This happens once per run, because it restarts the delays of the ranges.
        has_foreign_write: Whether a foreign write was found while draining; nothing more is
            committed.
        directive: The pause or stop that applies.
        scan: The scan of the next range for the filter of the group; None before it.
        previous: The state before the partition is read again; None for the first read, and if the
            committed offset has changed.
    """

    partition: TopicPartition
    epoch: int
    phase: Phase = Phase.RESTORING
    stored: OffsetAndMetadata | None = None
    ledger: OffsetLedger | None = None
    last_commit: LastCommit | None = None
    log: Log = Log()
    stored_log: Log = Log()
    bounds: Bounds | None = None
    backlog_since: float | None = None
    seen_since: float | None = None
    has_claimed: bool = False
    pending: PendingWrite | None = None
    unrecorded: Unrecorded = NOTHING
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
    scan: FilterScan | None = None
    previous: OwnedPartition | None = None

    def changed(self, change: Change) -> OwnedPartition:
        """Return the partition after a change of phase.

        In a phase without commits, a pending write is dropped, because its answer comes too late. A
        pending commit also drops the record that it joins, because only Kafka knows its end.

        Raises:
            IllegalStateError: The change is not legal in this phase.
        """
        changed = self._replace(phase=after(self.phase, change))
        if changed.phase.may_commit or self.pending is None:
            return changed
        commit, unrecorded = self.pending.commit, self.unrecorded
        if commit is not None and not commit.is_dead_letter:
            unrecorded = unrecorded.without_growing()
        return changed._replace(pending=None, unrecorded=unrecorded)

    def stopped_as_reported(self, reason: str) -> OwnedPartition:
        """Return the partition with the stop that its owner has reported; empty for none.

        A partition with a live run continues already, and one that is stopped has a newer reason.
        """
        if not reason or self.live_runs or self.phase is not Phase.OWNED:
            return self
        return self._replace(phase=Phase.STOPPED, stop_reason=reason)

    def draining(self) -> OwnedPartition:
        """Return the partition after its release was requested.

        A partition that is being read again drains in its previous state, because known runs may
        still work on it. This is safe: each commit is compared with the stored offset, and has the
        identity of the log, which the next owner compares with the log of the partition.
        """
        if self.previous is None:
            return self.changed(Change.GIVE_UP_REQUESTED)
        phase = after(self.phase, Change.LOOK_UP_DROPPED)
        return self.previous._replace(phase=phase, directive=self.directive)

    def restored(self, now: float) -> OwnedPartition:
        """Return the restored partition; offsets in its bounds may be claimed at once."""
        restored = self.changed(Change.RESTORED)._replace(
            blocked_by=(), refused=None, previous=None
        )
        return restored if self.bounds is None else restored.with_bounds(self.bounds, now)

    def with_directive(self, directive: Directive | None) -> OwnedPartition:
        """Return the partition with another pause or stop, or with none.

        After a resume, ranges whose batch has not started are claimed again: other ranges of that
        batch may have been processed, and a streaming run never starts a batch id twice.
        """
        if directive is not None or self.ledger is None:
            return self._replace(directive=directive)
        return self._replace(directive=None, ledger=self.ledger.without_ownership())

    def with_all_due(self, is_retried: Callable[[Exhausted], bool]) -> OwnedPartition:
        """Return the partition with its delayed ranges and refused write due now.

        `is_retried` selects the exhausted ranges.
        """
        pending = self.pending
        if pending is not None and pending.refused:
            pending = pending._replace(resent_at=float("-inf"))
        ledger = self.ledger
        if ledger is not None:
            ledger = ledger.with_all_due(is_retried)
        return self._replace(ledger=ledger, pending=pending)

    def with_bounds(self, bounds: Bounds, now: float) -> OwnedPartition:
        """Return the partition with new bounds."""
        since = seen_since = None
        if self.ledger is not None and bounds.until > self.ledger.claimed_until:
            since = now if self.backlog_since is None else self.backlog_since
            seen_since = since if self.seen_since is None else self.seen_since
        if (bounds, since, seen_since) == (self.bounds, self.backlog_since, self.seen_since):
            return self
        return self._replace(bounds=bounds, backlog_since=since, seen_since=seen_since)

    def left_out(self, until: int) -> OwnedPartition:
        """Return the partition with the offsets up to `until` as done, without a claim."""
        if self.ledger is None:
            raise self._unknown
        return self.after_claim(self.ledger.with_left_out(until))

    def after_claim(self, ledger: OffsetLedger) -> OwnedPartition:
        """Return the partition with a ledger that has another range."""
        is_cut = self.bounds is not None and self.bounds.until > ledger.claimed_until
        return self._replace(
            ledger=ledger,
            backlog_since=None,
            seen_since=self.seen_since if is_cut else None,
            has_claimed=True,
            scan=None,
        )

    @property
    def is_idle(self) -> bool:
        """Whether the partition has no work until an event arrives, however much time passes."""
        return not self.unrecorded and self._is_at_rest

    @property
    def is_done_with_bounds(self) -> bool:
        """Whether another read of the same bounds cannot change the partition."""
        if not self._is_at_rest or self.ledger is None or self.bounds is None:
            return False
        is_behind = self.bounds.until < self.ledger.next_offset
        return not (self.unrecorded and (is_behind or self.has_new_leader))

    @property
    def _is_at_rest(self) -> bool:
        """Whether the partition has no work, or only lacks records in Dagster."""
        if (
            self.phase is not Phase.OWNED
            or self.ledger is None
            or self.stored is None
            or self.bounds is None
        ):
            return False
        if self.ledger.entries or self.pending is not None or self.backlog_since is not None:
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
            return not entry.is_reassignment_open
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
        """The claimed ranges from before the current read."""
        return self.previous.entries if self.previous is not None else ()

    @property
    def known_entries(self) -> tuple[LedgerEntry, ...]:
        """The claimed ranges; while the partition is read again, the previous ranges."""
        return (
            self.previous.entries
            if self.ledger is None and self.previous is not None
            else self.entries
        )

    @property
    def ahead(self) -> OffsetRange:
        """The range from the committed offset on, including records not produced yet."""
        start = self.ledger.next_offset if self.ledger else 0
        return OffsetRange(self.partition.topic, self.partition.partition, start, MAX_OFFSET)

    @property
    def live_runs(self) -> frozenset[str]:
        """The runs that may still work on the partition."""
        if self.previous is not None:
            return self.previous.live_runs
        return self.ledger.live_runs if self.ledger else frozenset()

    @property
    def last_failure(self) -> tuple[str, str, str] | None:
        """Run, batch and error of the first range that stops the partition, or None."""
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
        """Whether the committed offset is below the log start offset."""
        return (
            self.ledger is not None
            and self.bounds is not None
            and self.ledger.next_offset < self.bounds.start
        )

    @property
    def is_troubled(self) -> bool:
        """Whether it is stopped, or failed runs, a refused write or a transaction may stop it."""
        return (
            self.phase is Phase.STOPPED
            or self.stop_reason != ""
            or self.open_transaction is not None
            or (self.pending is not None and self.pending.refused != "")
            or (self.ledger is not None and self.ledger.blocked is not None)
        )

    @property
    def needs_operator(self) -> bool:
        """Whether the partition continues only after an operator moves its committed offset."""
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
        """Whether a new leader was elected since the restore: the log may have been truncated."""
        epoch = None if self.bounds is None else self.bounds.leader_epoch
        return epoch is not None and epoch != self.log.leader_epoch

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

    def due_records(self, now: float) -> int:
        """Return how many records of its commits to issue."""
        if self.pending is not None and self.pending.commit is not None:
            return 0
        return self.unrecorded.due(now, all_now=self.phase is not Phase.OWNED)

    def lacks_record(self, now: float) -> bool:
        """Whether a record in Dagster is unconfirmed, or still missing before the release."""
        is_awaited = self.unrecorded.issued > 0 or not self.phase.is_kept
        return is_awaited and self.due_records(now) > 0

    def commit_write(self, now: float) -> PendingWrite | None:
        """Return the write of the due commit, if any, unless another write is pending."""
        if (
            self.ledger is None
            or self.pending
            or self.has_foreign_write
            or not self.phase.may_commit
        ):
            return None
        entry = self.ledger.committable
        if entry is None or entry.completed_by is None:
            return None
        is_letter = entry.is_dead_letter
        if not self.unrecorded.has_room(len(self.entries), is_dead_letter=is_letter):
            return None
        ledger = after_commit(self.ledger.after_commit(entry), now)
        write = self._write(ledger, self._last_commit(entry))
        return PendingWrite(write, now, commit=entry)

    def claim_write(
        self, batch_id: str, until: int, now: float, *, is_early: bool = False
    ) -> PendingWrite:
        """Return the write that claims the offsets up to `until` for a batch."""
        if self.ledger is None:
            raise self._unknown
        ledger = self.ledger.with_claim(batch_id, until, is_early=is_early)
        write = self._write(ledger, self.last_commit)
        return PendingWrite(write, now, claim=(batch_id, until, is_early))

    @property
    def _unknown(self) -> IllegalStateError:
        return IllegalStateError(
            f"{self.partition} cannot be claimed before its committed offset is known"
        )

    def reassign_write(self, range_: OffsetRange, batch_id: str, now: float) -> PendingWrite:
        """Return the write that assigns a claimed range to another batch."""
        if self.ledger is None:
            raise self._unknown
        ledger = self.ledger.with_reassigned(range_, batch_id, now)
        return PendingWrite(self._write(ledger, self.last_commit), now, reassign=(range_, batch_id))

    def bisect_write(self, now: float) -> PendingWrite:
        """Return the write that halves the first claim."""
        if self.ledger is None:
            raise self._unknown
        ledger = after_failure(self.ledger, now)
        return PendingWrite(self._write(ledger, self.last_commit), now, bisects=True)

    def first_write(self, now: float) -> PendingWrite | None:
        """Return the first write of a restored partition, or None if Kafka already stores it.

        It stores the start position of a new group, which a rebalance must not move, and the
        identity of the log for the next owner.
        """
        if self.pending or self.ledger is None or self.phase is not Phase.OWNED:
            return None
        if self.stored is not None and self.stored_log == self.log:
            return None
        return PendingWrite(self._write(self.ledger, self.last_commit), now)

    def written(self, write: OffsetWrite, now: float, most_parts: int) -> OwnedPartition:
        """Return the partition after Kafka confirmed a write; unchanged unless it is pending.

        `most_parts` is the limit of the parts of its record.
        """
        pending = self.pending
        if pending is None or pending.write != write or self.ledger is None:
            return self
        done = self._replace(stored=write.new, stored_log=self.log, pending=None)
        if pending.claim is not None:
            batch_id, until, is_early = pending.claim
            ledger = self.ledger.with_claim(batch_id, until, now, is_early=is_early)
            return done.after_claim(ledger)
        if pending.reassign is not None:
            return done._replace(ledger=self.ledger.with_reassigned(*pending.reassign, now))
        if pending.bisects:
            return done._replace(ledger=after_failure(self.ledger, now))
        entry = pending.commit
        if entry is None:
            return done
        last = self._last_commit(entry)
        grows = self.unrecorded.grows(is_dead_letter=entry.is_dead_letter)
        record = RecordCommit(
            range=replace(entry.range, start=last.start),
            epoch=self.epoch,
            batch_id=last.batch_id,
            run_id=last.run_id,
            lag=max(0, self.bounds.until - entry.range.until) if self.bounds else 0,
            claim_to_commit_s=None if entry.claimed_at is None else now - entry.claimed_at,
            drain_s=None if self.held_since is None else now - self.held_since,
            is_dead_letter=last.is_dead_letter,
            joined=_parts(grows, most_parts) if grows else NO_COMMITS,
            committed_at=now,
        )
        return done._replace(
            ledger=after_commit(self.ledger.after_commit(entry), now),
            last_commit=last,
            dead_letter=None,
            unrecorded=self.unrecorded.committed(record),
        )

    def _last_commit(self, entry: LedgerEntry) -> LastCommit:
        """The commits that may lack a record, with this one, for the next owner to record."""
        if entry.completed_by is None:
            msg = f"{entry.range} cannot be committed before it is done"
            raise IllegalStateError(msg)
        is_letter = entry.is_dead_letter
        grows = self.unrecorded.grows(is_dead_letter=is_letter)
        return LastCommit(
            entry.range.start if grows is None else grows.range.start,
            entry.batch_id,
            entry.completed_by,
            is_letter,
            self.unrecorded.noted(is_dead_letter=is_letter),
        )

    def _write(self, ledger: OffsetLedger, last: LastCommit | None) -> OffsetWrite:
        claims = tuple(entry.claim for entry in ledger.entries)
        new = encode(StoredPartition(ledger.next_offset, claims, last, self.log))
        return OffsetWrite(self.partition, self.epoch, self.stored, new, self.log.topic_id)


def _parts(record: RecordCommit, most: int) -> CommitParts:
    """Return all commits of a record, for the record that joins the next commit to them."""
    number = number_of(record.batch_id)
    last = CommitPart(record.range.until, record.run_id, number, number, record.committed_at)
    return record.joined.append(last, most)


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


def why_hanging(
    partition: TopicPartition, open_transaction: OpenTransaction | None
) -> Reason | None:
    """Return why an operator must act on a transaction, or None."""
    if open_transaction is None or not open_transaction.is_hanging:
        return None
    return Reason(
        f"{partition}: {open_transaction.records} records wait for a transaction that has been "
        f"open at offset {open_transaction.offset} "
        "for longer than brokers allow (transaction.max.timeout.ms), so it hangs",
        "Inspect it with kafka-transactions find-hanging and end it with kafka-transactions abort; "
        "the partition then continues",
    )

"""An owned partition is the state of one partition of this member.

It holds the phase, what Kafka stores for the partition, and what is in flight. It is a frozen
value. Every change of phase goes through the table in `state_machine.py`. This module builds what a
member writes to Kafka from the ledger, so that the stored claims and the ledger cannot say
different things.
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
    from dagster_rebalance.core.partitions.ledger import Entry, OffsetLedger
    from dagster_rebalance.core.partitions.open_transaction import OpenTransaction


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A pending write is one that Kafka has not confirmed.

    It also says what it means for the ledger: a commit, a claim, a claim that changes hands, or
    none of them: the first position of a group, or the log that its offset belongs to.

    Attributes:
        write: What is to be written.
        commits: The entry whose end it commits.
        claims: The claim that it adds, as (batch id, until).
        claims_again: The claimed range that it gives to another batch, and the id of that batch.
        asked_at: When it was given to the shell first.
        again_at: When it was given to the shell again, the last time.
        refused: Why Kafka refuses it, for a reason that waiting does not mend; empty while that is
            not known.
    """

    write: OffsetWrite
    asked_at: float
    commits: Entry | None = None
    claims: tuple[str, int] | None = None
    claims_again: tuple[OffsetRange, str] | None = None
    again_at: float | None = None
    refused: str = ""

    @property
    def claiming(self) -> str:
        """The batch that it claims a range for; empty when it claims none."""
        if self.claims is not None:
            return self.claims[0]
        return "" if self.claims_again is None else self.claims_again[1]

    @property
    def last_asked_at(self) -> float:
        """When it was given to the shell last."""
        return self.asked_at if self.again_at is None else self.again_at


@dataclass(frozen=True, slots=True)
class Refused:
    """The partition cannot start or go on.

    Attributes:
        reason: Why, and what to do.
        moved_from: Only another committed offset than this one ends the stop, for nothing else can
            show any more what has happened: a log that has grown again looks as if it had always
            been there. None when the reason is looked up anew each time.
    """

    reason: str
    moved_from: OffsetAndMetadata | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A record for the dead-letter topic.

    Attributes:
        command: What the shell was asked for.
        due_at: When it is asked for again.
        is_stored: Whether the topic has it.
        failures: How often it could not be stored.
        problem: Why not, the last time; empty when nothing is wrong.
    """

    command: StoreDeadLetter
    due_at: float
    is_stored: bool = False
    failures: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class OwnedPartition:
    """One partition in one epoch.

    Attributes:
        partition: The partition.
        epoch: Grows with each assignment of any partition to this member.
        phase: What may be done with it.
        stored: What Kafka stores, as last read or written; None when the group has no committed
            offset.
        ledger: What is in flight; None until the stored offset has been read.
        last_commit: The last commit that the stored metadata names.
        log: Which log Kafka had of the partition when it was taken in, and its stored offsets
            fitted.
        stored_log: The one that the stored metadata names.
        bounds: The offsets that Kafka had when last asked.
        backlog_since: Since when there are offsets to claim, on the caller's clock; None when there
            are none.
        seen_since: When the first of them was seen, also if a batch has been claimed since that had
            no room for all; None when there are none.
        has_claimed: Whether this member has claimed a batch of it. Nobody knows for how long the
            first one has waited, so that waits for no more records.
        pending: The write under way.
        unrecorded: What is committed and Dagster has not recorded yet: one commit, or several that
            are joined.
        recorded_at: When `unrecorded` was last given to the shell; from then on nothing more is
            joined to it.
        record_due_at: Until then commits are joined, on this member's clock.
        held_since: When the partition was asked for.
        runs_are_known: Whether the runs of its claims were looked up, and again since it has to be
            given up.
        stop_reason: Why it is stopped; empty when it is not.
        open_transaction: The transaction that keeps records from being read, if there is one.
        refused: Why it could not be taken in the last time; None once it was.
        blocked_by: Runs that work on it without a claim; while there are any, it is not restored.
        letter: The record in the dead-letter topic for its first range, asked for or there.
        doubted_by: The runs that refused themselves, and after which the claims were looked up
            again: once for each, because a look-up begins the waits of the ranges anew.
        is_overtaken: Whether Kafka stores what this member did not write, found while it is given
            up: nothing more is committed.
        order: What a person has ordered, so that nothing new is begun; None when nobody has.
        before: What it was until it is taken in again; None the first time, and when Kafka stores
            something else by now.
    """

    partition: TopicPartition
    epoch: int
    phase: Phase = Phase.RESTORING
    stored: OffsetAndMetadata | None = None
    ledger: OffsetLedger | None = None
    last_commit: LastCommit | None = None
    log: Log = Log()  # noqa: RUF009 - frozen, so sharing the default is safe
    stored_log: Log = Log()  # noqa: RUF009 - likewise
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
    letter: Letter | None = None
    doubted_by: frozenset[str] = frozenset()
    is_overtaken: bool = False
    order: Directive | None = None
    before: OwnedPartition | None = None

    def changed(self, change: Change) -> OwnedPartition:
        """The partition after a change of phase.

        A write under way is forgotten where none is allowed: its answer comes too late.

        What that write was to be joined with is forgotten, too: only Kafka knows now where the
        commits end that are to be recorded.

        Raises:
            IllegalStateError: The change is not in the table for the present phase.
        """
        changed = replace(self, phase=after(self.phase, change))
        if changed.phase.may_commit or self.pending is None:
            return changed
        unrecorded = None if self.pending.commits is not None else self.unrecorded
        return replace(changed, pending=None, unrecorded=unrecorded)

    def asked_back(self) -> OwnedPartition:
        """The partition after it has to be given up.

        One that is taken in again may be worked on by runs that it knew before. They are waited
        for: each commit is compared with what Kafka stores, and names the log that the next owner
        compares with the partition's.
        """
        if self.before is None:
            return self.changed(Change.GIVE_UP_REQUESTED)
        phase = after(self.phase, Change.LOOK_UP_DROPPED)
        return replace(self.before, phase=phase, order=self.order)

    def restored(self, now: float) -> OwnedPartition:
        """The partition once all is known of it.

        Its bounds were looked up with its offset, so what can be read may be claimed at once.
        """
        known = replace(self.changed(Change.RESTORED), blocked_by=(), refused=None, before=None)
        return known if self.bounds is None else known.with_bounds(self.bounds, now)

    def under(self, order: Directive | None) -> OwnedPartition:
        """The partition under another order, or under none any more.

        What was claimed and not begun before is claimed anew: other ranges of its batch may have
        been worked on meanwhile, and a streaming run begins no batch twice.
        """
        if order is not None or self.ledger is None:
            return replace(self, order=order)
        return replace(self, order=None, ledger=self.ledger.disowned())

    def tried_now(self, *, exhausted_too: bool) -> OwnedPartition:
        """The partition after a person wants what waits on it to be tried.

        Args:
            exhausted_too: Whether ranges whose attempts are exhausted are tried as well. With a
                dead-letter topic, their record is under way.
        """
        pending = self.pending
        if pending is not None and pending.refused:
            pending = replace(pending, again_at=float("-inf"))
        ledger = self.ledger
        if ledger is not None:
            ledger = ledger.tried_now(exhausted_too=exhausted_too)
        return replace(self, ledger=ledger, pending=pending)

    def with_bounds(self, bounds: Bounds, now: float) -> OwnedPartition:
        """The partition after a look at what can be read, which may be more than is claimed."""
        has_backlog = self.ledger is not None and bounds.until > self.ledger.claimed_until
        if not has_backlog:
            return replace(self, bounds=bounds, backlog_since=None, seen_since=None)
        since = now if self.backlog_since is None else self.backlog_since
        seen_since = since if self.seen_since is None else self.seen_since
        return replace(self, bounds=bounds, backlog_since=since, seen_since=seen_since)

    @property
    def is_idle(self) -> bool:
        """Tell whether the partition has nothing to do until something happens.

        Time alone changes nothing.
        """
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

    def is_quiet(self, entry: Entry, at: float) -> bool:
        """Tell whether nothing of a claimed range is at work, or due by then.

        Only a person can change that.
        """
        if isinstance(entry.progress, InFlight):
            return False
        if self.order is not None and self.phase is Phase.OWNED:
            return not entry.is_in_question
        return self.phase is Phase.STOPPED and (at < entry.due_at or self.order is not None)

    @property
    def has_more(self) -> bool:
        """Whether there are offsets that may be claimed."""
        return self.backlog_since is not None and self.order is None

    @property
    def is_claiming(self) -> bool:
        """Whether the claim of a batch is being written, and Kafka does not refuse it."""
        return self.pending is not None and self.pending.claiming != "" and not self.pending.refused

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The claimed ranges."""
        return self.ledger.entries if self.ledger else ()

    @property
    def known_before(self) -> tuple[Entry, ...]:
        """The claimed ranges from before it was taken in again."""
        return self.before.entries if self.before is not None else ()

    @property
    def known_entries(self) -> tuple[Entry, ...]:
        """The claimed ranges; those from before while it is taken in again."""
        return (
            self.before.entries if self.ledger is None and self.before is not None else self.entries
        )

    @property
    def ahead(self) -> OffsetRange:
        """Everything that is not committed yet, whether Kafka has it already or not."""
        start = self.ledger.next_offset if self.ledger else 0
        return OffsetRange(self.partition.topic, self.partition.partition, start, MAX_OFFSET)

    @property
    def live_runs(self) -> frozenset[str]:
        """The runs that may still work on it."""
        if self.before is not None:
            return self.before.live_runs
        return self.ledger.live_runs if self.ledger else frozenset()

    @property
    def last_failure(self) -> tuple[str, str, str] | None:
        """The last run that failed on the range that stops it, its batch and its error.

        None where no run has failed.

        What is stopped for another reason has none.
        """
        for entry in self.entries:
            blocked = blocking(entry.progress)
            if blocked is not None:
                return blocked.run_id, entry.batch_id, blocked.why
        return None

    @property
    def unstarted_runs(self) -> frozenset[str]:
        """Those of the live runs that have not started."""
        return self.ledger.unstarted_runs if self.ledger else frozenset()

    @property
    def started_runs(self) -> frozenset[str]:
        """Those of the live runs that have started, and that nobody has asked to end."""
        return self.ledger.started_runs if self.ledger else frozenset()

    @property
    def lag(self) -> int:
        """Offsets in Kafka that are not committed yet, as far as known."""
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
    def waits_for_a_person(self) -> bool:
        """Whether only somebody who moves its committed offset can make it go on."""
        is_at_rest = not self.live_runs and self.pending is None
        return self.phase is Phase.STOPPED and (
            self.ledger is None or (self.is_behind_deletion and is_at_rest)
        )

    @property
    def committing(self) -> Entry | None:
        """The range whose commit is due, or not confirmed by Kafka; None when there is none."""
        if self.pending is not None and self.pending.commits is not None:
            return self.pending.commits
        return self.ledger.committable if self.ledger and not self.is_overtaken else None

    @property
    def has_new_leader(self) -> bool:
        """Tell whether the partition has a new leader since this member took it in.

        The log may have been truncated meanwhile.
        """
        return self.bounds is not None and self.bounds.leader_epoch not in {
            None,
            self.log.leader_epoch,
        }

    @property
    def backlog(self) -> Backlog | None:
        """What may be planned for it now; None when nothing may."""
        if (
            not self.phase.may_plan
            or self.ledger is None
            or self.bounds is None
            or self.pending
            or self.backlog_since is None
            or self.order is not None
        ):
            return None
        if self.has_new_leader:  # a partition whose stop has just ended was not taken in anew yet
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
        """Whether Dagster is to record what is committed, before anything more is.

        A record that was asked for must not grow: Dagster may have it already. One that was found
        in Kafka does not either, because its earlier owner may still ask for it. A range that went
        to the dead-letter topic has a record of its own.
        """
        record = self.unrecorded
        if record is None or (self.pending is not None and self.pending.commits is not None):
            return False
        if self.phase is not Phase.OWNED or self.recorded_at is not None:
            return True
        if record.is_late or record.is_dead_letter:
            return True
        following = self.ledger.committable if self.ledger else None
        return now >= self.record_due_at or (following is not None and following.is_dead_letter)

    def commit_write(self, now: float) -> PendingWrite | None:
        """The commit that is due, if one is and nothing else is under way."""
        if (
            self.ledger is None
            or self.pending
            or self.is_overtaken
            or self.is_record_due(now)
            or not self.phase.may_commit
        ):
            return None
        entry = self.ledger.committable
        if entry is None or entry.done_by is None:
            return None
        write = self._write(self.ledger.committed(entry), self._last_commit(entry))
        return PendingWrite(write, now, commits=entry)

    def claim_write(self, batch_id: str, until: int, now: float) -> PendingWrite:
        """The claim of the offsets up to `until` for a batch."""
        if self.ledger is None:
            raise self._unknown
        return PendingWrite(
            self._write(self.ledger.claim(batch_id, until), self.last_commit),
            now,
            claims=(batch_id, until),
        )

    @property
    def _unknown(self) -> IllegalStateError:
        return IllegalStateError(
            f"{self.partition} cannot be claimed before its committed offset is known"
        )

    def claim_again_write(self, range_: OffsetRange, batch_id: str, now: float) -> PendingWrite:
        """The same claim for another batch."""
        if self.ledger is None:
            raise self._unknown
        ledger = self.ledger.claimed_again(range_, batch_id, now)
        return PendingWrite(
            self._write(ledger, self.last_commit), now, claims_again=(range_, batch_id)
        )

    def first_write(self, now: float) -> PendingWrite | None:
        """Return the first write of a partition that the member has taken in.

        Return None if Kafka stores it already. The first position of a group that has committed
        nothing must not move on a rebalance, and the next owner of the partition must find which
        log its offsets belong to.
        """
        if self.pending or self.ledger is None or self.phase is not Phase.OWNED:
            return None
        if self.stored is not None and self.stored_log == self.log:
            return None
        return PendingWrite(self._write(self.ledger, self.last_commit), now)

    def written(self, write: OffsetWrite, now: float) -> OwnedPartition:
        """The partition after Kafka confirmed a write.

        An answer to a write that is not under way changes nothing.
        """
        pending = self.pending
        if pending is None or pending.write != write or self.ledger is None:
            return self
        done = replace(self, stored=write.new, stored_log=self.log, pending=None)
        if pending.claims is not None:
            ledger = self.ledger.claim(*pending.claims, claimed_at=now)
            is_cut = self.bounds is not None and self.bounds.until > ledger.claimed_until
            seen_since = self.seen_since if is_cut else None
            return replace(
                done, ledger=ledger, backlog_since=None, seen_since=seen_since, has_claimed=True
            )
        if pending.claims_again is not None:
            return replace(done, ledger=self.ledger.claimed_again(*pending.claims_again, now))
        entry = pending.commits
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
        committed = replace(done, ledger=ledger, last_commit=last, letter=None)
        return replace(committed, recorded_at=None, unrecorded=record)

    def _last_commit(self, entry: Entry) -> LastCommit:
        """The note of a commit.

        It reaches back to the first offset that no record was asked for: the next owner must find
        them all.
        """
        if entry.done_by is None:
            msg = f"{entry.range} cannot be committed before it is done"
            raise IllegalStateError(msg)
        start = self.unrecorded.range.start if self.unrecorded else entry.range.start
        return LastCommit(start, entry.batch_id, entry.done_by, entry.is_dead_letter)

    def _write(self, ledger: OffsetLedger, last: LastCommit | None) -> OffsetWrite:
        claims = tuple(
            Claim(entry.range.until, entry.batch_id, entry.taken_from) for entry in ledger.entries
        )
        new = encode(StoredPartition(ledger.next_offset, claims, last, self.log))
        return OffsetWrite(self.partition, self.epoch, self.stored, new)

"""Engine: the decision core of one member. Events go in, commands come out.

The engine reads no clock (`now` is an argument) and performs no I/O. Any command may fail without
an answer, and repeating it is safe; the engine reissues those that still matter after `retry_s`.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.batches.engine_settings import ROUNDING_S
from dagster_rebalance.core.batches.planning import plan
from dagster_rebalance.core.engine import dead_letter_policy
from dagster_rebalance.core.engine.agenda import Agenda
from dagster_rebalance.core.engine.claimed_work import ClaimedWork
from dagster_rebalance.core.engine.directive_cancels import DirectiveCancels
from dagster_rebalance.core.engine.filter_scans import FilterScans
from dagster_rebalance.core.engine.record_budget import DueRecords, RecordBudget
from dagster_rebalance.core.engine.refresh import Refresh
from dagster_rebalance.core.engine.run_requests import requested_range, requested_ranges
from dagster_rebalance.core.engine.run_results import apply_runs
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.commit_parts import most_parts
from dagster_rebalance.core.model.directives import Directive, in_force, new_retries
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import Log, names_of
from dagster_rebalance.core.partitions.assigned import AssignedPartitions, Role
from dagster_rebalance.core.partitions.bisected import bisection_of
from dagster_rebalance.core.partitions.owned import (
    OwnedPartition,
    Refused,
    track_transaction,
    why_hanging,
)
from dagster_rebalance.core.partitions.recovery import (
    is_new_reason,
    moved_offset_note,
    out_of_range,
    refused_write,
    restore,
)
from dagster_rebalance.core.partitions.state_machine import Change, Phase
from dagster_rebalance.core.partitions.unrecorded import NOTHING
from dagster_rebalance.core.revokes.hold import Forecast, HeldPartitions
from dagster_rebalance.core.runs.progress import InFlight, Succeeded
from dagster_rebalance.core.runs.retry import why_not_ended, why_not_started
from dagster_rebalance.core.runs.run_index import RunIndex
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from dagster_rebalance.core.streaming.stream_claims import StreamClaims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.engine.run_requests import RequestedRanges
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot
    from dagster_rebalance.core.revokes.hold import Hold

    _Commands: TypeAlias = Iterable[commands.Command]


class Engine:
    """Decisions for one member. Not thread-safe: one thread owns it."""

    def __init__(
        self, settings: EngineSettings, *, new_batch_id: Callable[..., str], now: float
    ) -> None:
        self.settings = settings
        self.partitions = AssignedPartitions()
        self.liveness = settings.liveness
        self.directives: tuple[Directive, ...] = ()
        self.forecast = Forecast()
        self._new_batch_id = new_batch_id
        self._epoch = self._directives_epoch = 0
        self._last_tick_at = self._now = now
        self._rechecked_at = float("-inf")
        self._requested_since: dict[BatchRequest, float] = {}
        self._quiet: tuple[int, float] | None = None
        self.record_budget = RecordBudget(settings.records_per_minute, now)
        self._due_records = DueRecords(settings, self.partitions, self.record_budget)
        self._agenda = Agenda(settings, self.partitions)
        self._claimed_work = ClaimedWork(settings, self.partitions)
        self._streaming = StreamClaims(settings, new_batch_id)
        self._scans = FilterScans(
            settings.limits, self.partitions, is_on=settings.has_filter and not settings.worker
        )
        self._held = HeldPartitions(settings, self.partitions, self._streaming)
        self._refresh = Refresh(settings, self.partitions)
        self._directive_cancels = DirectiveCancels(settings.retry_s)
        self._late: tuple[float, object, RequestedRanges] = (now, None, {})
        self._handlers: dict[type[object], Callable[..., _Commands]] = {
            events.PartitionsAssigned: self._on_assigned,
            events.RevokeRequested: self._on_revoke_requested,
            events.PartitionsRevoked: self._on_revoked,
            events.PartitionsLost: self._on_lost,
            events.LeaveRequested: self._on_leave_requested,
            events.TickArrived: self._on_tick,
            events.TimePassed: self._on_time,
            events.StoredOffsetsRead: self._on_stored_offsets,
            events.DirectivesRead: self._on_directives,
            events.RunsRead: self._on_runs,
            events.DeadRunEnded: self._on_dead_run_ended,
            events.BoundsRead: self._on_bounds,
            events.RangesScanned: self._on_scanned,
            events.OffsetsWritten: self._on_written,
            events.CommitsRecorded: self._on_recorded,
            events.DeadLetterStored: self._on_dead_letter,
            events.DeadLetterFailed: self._on_dead_letter,
        }

    def handle(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Apply an event and return the commands that follow."""
        return (*self.apply(event, now), *self.decide(now))

    def apply(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Apply an event. If several events arrive together, call `decide` after the last one."""
        self._now = now
        if type(event) is not events.TimePassed:
            self._quiet = None
        return tuple(self._handlers[type(event)](event, now))

    def decide(self, now: float) -> tuple[commands.Command, ...]:
        """Return the commands that follow from all events so far.

        The duration of a call depends on what has changed or is due, and not on the number of
        partitions.
        """
        self._now = now
        if self._is_quiet(now):
            self._refresh.note_unchanged(now)
            return ()
        due = [owned.partition for owned in self._due(now)]
        self._scans.leave_out(due)
        decided = [
            *self._store_dead_letters(due, now),
            *self._record(due, now),  # first, so that the next commit does not join this record
            *self._commit(due, now),
            *self._held.advance(now),
            *self._directive_cancels.due(self.partitions.of(Role.DIRECTED), now),
            *self._claim_again(now),
        ]
        reads = tuple(
            self._refresh.due(
                # A working run without a claim has no entry. It may be deleted or marked as ended
                # in Dagster before its process ends.
                self.liveness.batch_ids,
                now,
                epoch=self._epoch,
                directives_epoch=self._directives_epoch,
                is_holding=bool(self.holds),
                is_leaving=self.leaving is not None,
                is_at_work=self.settings.worker != "" and not self._has_room(now),
            )
        )
        if not (self.settings.worker and self._refresh.awaits_bounds(now)):
            decided += self._claim(now)
            decided += self._scan(now)
        decided += reads
        self._quiet = None if decided else self._quiet_until(now)
        return tuple(decided)

    def _is_quiet(self, now: float) -> bool:
        return (
            self._quiet is not None
            and self._quiet[0] == self.partitions.version
            and now < self._quiet[1]
        )

    def _due(self, now: float) -> list[OwnedPartition]:
        """The partitions about which decisions may have changed."""
        return self._agenda.take(now)

    def _quiet_until(self, now: float) -> tuple[int, float] | None:
        """The version of the partitions that needs no decision, and until when; None if unknown."""
        if self.partitions.has_changed or self.holds or self.leaving is not None:
            return None
        if self._due_requests and self._streaming.may_claim_again(self._claims):
            return None
        times = (
            *self._refresh.next_due(
                now, epoch=self._epoch, directives_epoch=self._directives_epoch
            ),
            self._directive_cancels.next_due,
            self._due_records.next_due(now),
        )
        early = (at - ROUNDING_S for at in times)
        at = min((at for at in early if at > now - 2 * ROUNDING_S), default=float("inf"))
        return self.partitions.version, min(at, self._agenda.next_due)

    @property
    def batch_requests(self) -> tuple[BatchRequest, ...]:
        """The runs to request from Dagster, or the batches that a streaming run begins next."""
        return self._streaming.to_begin(self._due_requests)

    @property
    def _due_requests(self) -> tuple[BatchRequest, ...]:
        return self._claimed_work.requests(self._now, self.directives)

    @property
    def _claims(self) -> list[OwnedPartition]:
        self._claimed_work.look(self._now)
        return self._claimed_work.partitions

    @property
    def has_settled(self) -> bool:
        """Whether all assigned partitions are restored and their available records are claimed."""
        return bool(self.partitions) and not self.partitions.has(Role.UNSETTLED)

    @property
    def claimed(self) -> frozenset[str]:
        """The ids of batches with a claim on an assigned partition."""
        return self._claimed_work.batch_ids(self._now)

    def count_group(self, partitions: int) -> None:
        """Set the number of partitions in the topics of the group, for the share of the budget."""
        self._due_records.group_partitions = partitions

    def owe_records(self, records: int, now: float) -> None:
        """Count records that do not wait, such as observations, towards the budget of the group."""
        self.record_budget.owe(records, now)

    def log_of(self, partition: TopicPartition) -> Log:
        """The identity of a partition's log, as far as it is known."""
        owned = self.partitions.get(partition)
        return Log() if owned is None else owned.log

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The open holds, in the order of their requests."""
        return self._held.holds

    @property
    def leaving(self) -> str | None:
        """Why the member leaves the group; None while it stays."""
        return self._held.leaving

    @property
    def held(self) -> frozenset[TopicPartition]:
        """The partitions whose revoke must be delayed; the same set until they change."""
        return self._held.revoked

    @property
    def given_up(self) -> frozenset[TopicPartition]:
        """The partitions of all holds; the same set until they change."""
        return self._held.held

    # Events from Kafka

    def _on_assigned(self, event: events.PartitionsAssigned, _now: float) -> _Commands:
        for partition in event.partitions:
            if partition in self.partitions:
                msg = f"{partition} was assigned twice without a revoke in between"
                raise IllegalStateError(msg)
        for partition in event.partitions:
            self._epoch += 1
            owned = OwnedPartition(
                partition, self._epoch, directive=in_force(self.directives, partition)
            )
            self.partitions[partition] = (
                owned.changed(Change.GIVE_UP_REQUESTED) if self.leaving else owned
            )
        self._refresh.read_stored_offsets()
        self._refresh.read_directives()
        yield commands.Note(
            f"assigned {names_of(event.partitions)}",
            EventKind.PARTITIONS_ASSIGNED,
            {"partitions": event.partitions},
        )

    def _on_revoke_requested(self, event: events.RevokeRequested, now: float) -> _Commands:
        yield from self._held.revoke(event, now)
        self._refresh.read_runs()

    def _on_leave_requested(self, event: events.LeaveRequested, now: float) -> _Commands:
        was_leaving = self.leaving is not None
        yield from self._held.leave(event, now)
        if not was_leaving:
            self._refresh.read_runs()

    def _on_revoked(self, event: events.PartitionsRevoked, now: float) -> _Commands:
        """Treat revoked partitions that were not released as lost."""
        lost = tuple(owned.partition for owned in self.partitions.known(event.partitions))
        return self._on_lost(events.PartitionsLost(lost), now) if lost else ()

    def _on_lost(self, event: events.PartitionsLost, now: float) -> _Commands:
        return self._held.lose(event, now)

    def _on_stored_offsets(self, event: events.StoredOffsetsRead, _now: float) -> _Commands:
        self._refresh.stored_offsets_were_read(len(event.epochs))
        for partition, epoch in event.epochs.items():
            owned = self.partitions.get(partition)
            if (
                owned is None
                or owned.epoch != epoch
                or owned.phase is not Phase.RESTORING
                or owned.ledger is not None
            ):
                continue
            lookup = event.lookups[partition]
            restored = restore(
                owned,
                lookup,
                start_from=self.settings.start_from,
                foreign_metadata=self.settings.foreign_metadata,
            )
            if isinstance(restored, Refused):
                yield from self._stop(owned._replace(refused=restored), restored.reason)
                continue
            self.partitions[partition] = restored
            self._refresh.read_runs()
            if owned.previous is not None:
                yield from _passed_deletion(owned.previous)
            moved = moved_offset_note(restored, lookup.recorded)
            if moved is not None:
                yield moved

    def _on_bounds(self, event: events.BoundsRead, now: float) -> _Commands:
        self._refresh.bounds_were_read()
        for partition, bounds in self.partitions.news_in(event.bounds):
            owned = self.partitions.get(partition)
            if owned is None or owned.ledger is None:
                continue
            if owned.bounds == bounds and owned.is_done_with_bounds:
                continue
            ledger, transaction = (
                owned.ledger,
                track_transaction(owned.open_transaction, bounds, now),
            )
            is_changed = owned.open_transaction != transaction
            owned = owned.with_bounds(bounds, now)
            if is_changed:
                owned = owned._replace(open_transaction=transaction)
            self.partitions[partition] = owned
            if is_changed:
                yield from self._stop_or_resume(owned)
                owned = self.partitions[partition]
            if owned.phase is not Phase.OWNED or owned.pending is not None:
                continue
            is_out_of_range = (
                not ledger.entries
                and out_of_range(partition, ledger.claimed_until, bounds) is not None
            )
            if is_out_of_range or owned.has_new_leader:
                self.partitions[partition] = self._distrusted(owned)
        for owned in self.partitions.known(event.refused):
            if owned.phase is Phase.OWNED and owned.pending is None:
                self.partitions[owned.partition] = self._distrusted(owned)

    def _on_scanned(self, event: events.RangesScanned, _now: float) -> _Commands:
        self._scans.apply(event)
        return ()

    def _on_written(self, event: events.OffsetsWritten, now: float) -> _Commands:
        most = most_parts(len(self.partitions))
        for write in event.written:
            owned = self.partitions.get(write.partition)
            if owned is not None and owned.epoch == write.epoch:
                after = owned.written(write, now, most)
                if self._streaming.claims_ahead and after.bounds is not None:
                    after = after.with_bounds(after.bounds, now)  # the rest may be claimed ahead
                yield from self._apply_written(owned, after)
        for write, reason in event.refused:
            owned = self.partitions.get(write.partition)
            if owned is not None and owned.pending is not None and owned.pending.write == write:
                self.partitions[write.partition] = refused = owned._replace(
                    pending=owned.pending._replace(refused=reason)
                )
                yield from self._stop_or_resume(refused)
        for write, failure in event.failed:
            owned = self.partitions.get(write.partition)
            if (
                owned is not None
                and owned.pending is not None
                and owned.pending.write == write
                and failure is events.WriteFailure.CHANGED
            ):
                yield from self._on_changed_offset(owned)

    def _on_changed_offset(self, owned: OwnedPartition) -> _Commands:
        changed = f"another client has changed the stored offset of {owned.partition}: "
        if owned.phase is Phase.DRAINING and owned.live_runs:
            yield commands.Note(f"{changed}no further commits; waiting for its runs")
            overtaken = owned._replace(pending=None, unrecorded=NOTHING, has_foreign_write=True)
            self.partitions[owned.partition] = overtaken
        else:
            yield commands.Note(f"{changed}reading it again")
            self.partitions[owned.partition] = self._distrusted(owned)._replace(previous=None)
            yield from _passed_deletion(owned)

    def _apply_written(self, before: OwnedPartition, after: OwnedPartition) -> _Commands:
        self.partitions[after.partition] = after
        if any(entry.previous_batch_id for entry in after.entries):
            self._refresh.read_runs()
        self._note_committed(before, after)
        if not after.is_behind_deletion:
            yield from _passed_deletion(before)
        if before.pending is not None and before.pending.refused:
            yield from self._stop_or_resume(after)
        halved = (
            before.pending is not None and before.pending.bisects and bisection_of(after.entries)
        )
        if halved:
            interval, part = halved
            yield commands.Note(
                f"{after.partition}: bisecting [{interval.start}, {interval.until}), attempt on "
                f"[{part.start}, {part.until})"
            )

    def _note_committed(self, before: OwnedPartition, after: OwnedPartition) -> None:
        if after.unrecorded == before.unrecorded or not after.unrecorded:
            return
        record = after.unrecorded.parts[-1]
        if record.claim_to_commit_s is not None:
            self.forecast = self.forecast.with_duration(record.claim_to_commit_s)
        succeeded = {
            entry.progress.run_id
            for entry in before.entries
            if isinstance(entry.progress, Succeeded)
        }
        self._held.note_committed(after, record.range.until, succeeded)

    def _distrusted(self, owned: OwnedPartition) -> OwnedPartition:
        self._refresh.read_stored_offsets()
        distrusted = owned._replace(
            previous=owned if owned.ledger is not None else None,
            pending=None,
            ledger=None,
            stored=None,
            backlog_since=None,
            seen_since=None,
            dead_letter=None,
            scan=None,
        )
        return distrusted.changed(Change.DISTRUSTED)

    # Events from Dagster and the clock

    def _on_tick(self, _event: events.TickArrived, now: float) -> _Commands:
        if now - self._last_tick_at > self.settings.plan_patience_s:
            self._requested_since = {}
        self._last_tick_at = now
        self._requested_since = {
            request: self._requested_since.get(request, now) for request in self.batch_requests
        }
        return ()

    def _on_time(self, _event: events.TimePassed, now: float) -> _Commands:
        silence_s = now - self._last_tick_at
        if silence_s > self.settings.lease_s and self.leaving is None and not self.settings.worker:
            reason = f"its sensor has not ticked for {silence_s:.0f} s"
            self._quiet = None
            yield from self._on_leave_requested(events.LeaveRequested(reason), now)
        if now - self._rechecked_at >= self.settings.recheck_s:
            self._rechecked_at = now
            for owned in self.partitions.of(Role.TROUBLED):
                if owned.needs_operator:
                    self.partitions[owned.partition] = self._distrusted(owned)

    def _on_directives(self, event: events.DirectivesRead, _now: float) -> _Commands:
        # A new member retries everything on assignment, so earlier retry directives are done.
        is_first_read = self._directives_epoch == 0
        self._directives_epoch = max(event.epoch, self._directives_epoch)
        if event.directives == self.directives:
            return
        retries = [] if is_first_read else new_retries(self.directives, event.directives)
        self.directives = event.directives
        for retry in retries:
            yield from self._retry(retry)
        changed: dict[Directive | None, list[TopicPartition]] = {}
        for owned in list(self.partitions.values()):
            directive = in_force(event.directives, owned.partition)
            if directive != owned.directive:
                self.partitions[owned.partition] = owned.with_directive(directive)
                changed.setdefault(directive, []).append(owned.partition)
        if None in changed:
            self._refresh.read_runs()
        for directive, partitions in changed.items():
            yield _ordered(
                partitions,
                "resumed, and continues where it stopped" if directive is None else directive,
            )

    def _retry(self, directive: Directive) -> _Commands:
        covered = [owned for owned in self.partitions.values() if directive.covers(owned.partition)]
        for owned in covered:
            tried = dead_letter_policy.retried(owned, self.settings)
            is_stopped = tried.needs_operator
            self.partitions[owned.partition] = self._distrusted(tried) if is_stopped else tried
        if covered:
            yield _ordered([owned.partition for owned in covered], directive)

    def _on_runs(self, event: events.RunsRead, now: float) -> _Commands:
        if self._refresh.is_stale(event):
            return
        if not event.is_from_worker:
            event = replace(event, runs=self.liveness.with_deleted(event.runs, event.batch_ids))
            yield from self._check_liveness(event.runs, now)
        runs = RunIndex(event.runs)
        for owned in self._concerned(event.batch_ids, now):
            if owned.ledger is None:
                continue
            results = apply_runs(
                owned, owned.ledger, event.batch_ids, runs, settings=self.settings, now=now
            )
            yield from map(commands.Note, results.notes)
            self.partitions[owned.partition] = results.owned
            is_known = event.with_live and results.covers_all
            if owned.phase is Phase.RESTORING and is_known and self._knows_directives(owned):
                yield from self._restore(results.owned, runs, now)
            yield from self._stop_or_resume(self.partitions[owned.partition])
            yield from self._check_claims(self.partitions[owned.partition], results.refused)

    def _concerned(self, batch_ids: Iterable[str], now: float) -> list[OwnedPartition]:
        """The partitions that a read of the runs of these batches may change."""
        partitions = self.partitions
        others = (*partitions.restoring(is_read=True), *partitions.of(Role.TROUBLED, Role.UNREAD))
        concerned = partitions.claimed_by(batch_ids).union(map(attrgetter("partition"), others))
        if self._late_requests(now) or self._stuck_runs(now):
            concerned.update(owned.partition for owned in self.partitions.of(Role.CLAIMED))
        return self.partitions.by_epoch(concerned)

    def _knows_directives(self, owned: OwnedPartition) -> bool:
        """Whether the directives were read after the partition was assigned."""
        return owned.epoch <= self._directives_epoch

    def _check_liveness(self, runs: Iterable[RunSnapshot], now: float) -> _Commands:
        followed = [
            run
            for run in runs
            if run.is_live
            and run.run_id != self.settings.worker
            and (
                any(r.topic_partition in self.partitions for r in run.ranges)
                or any(partition in self.partitions for partition in run.active_partitions or ())
            )
        ]
        self.liveness, dead = self.liveness.observe(followed, now)
        if dead:
            yield commands.EndDeadRuns(
                {run_id: self.liveness.tracked[run_id].run.heartbeat for run_id in dead}
            )

    def _check_claims(self, owned: OwnedPartition, refused: frozenset[str]) -> _Commands:
        new = refused - owned.rechecked_runs
        if new and owned.phase.is_kept and owned.pending is None:
            yield commands.Note(
                f"reading the claims of {owned.partition} again, because the start check refused "
                f"{', '.join(sorted(new))}"
            )
            doubted = owned._replace(rechecked_runs=owned.rechecked_runs | new)
            self.partitions[owned.partition] = self._distrusted(doubted)

    def _on_dead_run_ended(self, event: events.DeadRunEnded, _now: float) -> _Commands:
        self.liveness = self.liveness.without(event.run_id)
        self._refresh.read_runs()  # a deleted run may still be in the last result
        return ()

    def _restore(self, owned: OwnedPartition, runs: RunIndex, now: float) -> _Commands:
        claims = [(entry.range, entry.batch_id) for entry in owned.entries]
        streams = {batch.run_id for _, name in claims if (batch := StreamBatch.parse(name))}
        blocked_by = (
            *runs.unclaimed(owned.ahead, claims),
            *runs.other_streams(owned.partition, streams | {self.settings.worker}),
        )
        if blocked_by:
            blocked = owned._replace(blocked_by=blocked_by)
            yield from self._show_stop(blocked, self._not_ended(blocked) or owned.stop_reason)
            return
        self.partitions[owned.partition] = owned.restored(now)._replace(stop_reason="")
        if owned.stop_reason:
            yield commands.ShowStop(owned.partition, "")
        for entry in owned.entries:
            if isinstance(entry.progress, InFlight):
                run_ids = entry.progress.run_ids
                yield commands.Note(
                    f"adopted {', '.join(run_ids)}, which works on {entry.range}",
                    EventKind.BATCH_ADOPTED,
                    {"batch_id": entry.batch_id, "run_ids": run_ids, **entry.range.fields},
                )

    def _stop_or_resume(self, owned: OwnedPartition) -> _Commands:
        reason = (
            dead_letter_policy.why_stopped(owned, self.settings)
            or refused_write(owned)
            or why_hanging(owned.partition, owned.open_transaction)
            or self._unanswered(owned)
            or self._not_ended(owned)
        )
        if reason is not None and owned.phase is Phase.OWNED:
            yield from self._stop(owned, reason)
        elif reason is not None and owned.phase is Phase.STOPPED and reason != owned.stop_reason:
            yield from self._show_stop(owned, reason)
        elif reason is None and owned.phase is Phase.STOPPED and owned.ledger is not None:
            self.partitions[owned.partition] = owned.changed(Change.STOP_CLEARED)._replace(
                stop_reason=""
            )
            yield commands.ShowStop(owned.partition, "")

    def _late_requests(self, now: float) -> RequestedRanges:
        """The ranges of requests that have been waiting for their run for too long."""
        if self._late[:2] != (now, self._requested_since):
            limit_s = self.settings.stalled_after_s
            late = (one for one, since in self._requested_since.items() if now - since >= limit_s)
            self._late = (now, self._requested_since, requested_ranges(late))
        return self._late[2]

    def _stuck_runs(self, now: float) -> frozenset[str]:
        """The dead runs that could not be ended for too long."""
        return self.liveness.not_ended(now - self.settings.stalled_after_s)

    def _unanswered(self, owned: OwnedPartition) -> str | None:
        late = self._late_requests(self._now)
        found = requested_range(owned, late, self._now) if late else None
        if found is None:
            return None
        return why_not_started(found[0], found[1].run_key, self.settings.stalled_after_s)

    def _not_ended(self, owned: OwnedPartition) -> str | None:
        stuck = self._stuck_runs(self._now)
        stuck = stuck and stuck & owned.live_runs.union(owned.blocked_by)
        if not stuck:
            return None
        return why_not_ended(owned.partition, min(stuck), self.settings.stalled_after_s)

    def _stop(self, owned: OwnedPartition, reason: str) -> _Commands:
        return self._show_stop(owned.changed(Change.STOP_CAUSED)._replace(previous=None), reason)

    def _show_stop(self, owned: OwnedPartition, reason: str) -> _Commands:
        self.partitions[owned.partition] = owned._replace(stop_reason=reason)
        if is_new_reason(reason, owned.stop_reason):
            yield commands.ShowStop(owned.partition, reason)

    def _on_recorded(self, event: events.CommitsRecorded, _now: float) -> _Commands:
        of: dict[TopicPartition, list[commands.RecordCommit]] = {}
        for record in event.records:
            of.setdefault(record.range.topic_partition, []).append(record)
        for owned in self.partitions.known(of):
            unrecorded = owned.unrecorded.recorded(of[owned.partition])
            self.partitions[owned.partition] = owned._replace(unrecorded=unrecorded)
        return ()

    def _on_dead_letter(
        self, event: events.DeadLetterStored | events.DeadLetterFailed, now: float
    ) -> _Commands:
        owned = dead_letter_policy.answered(
            self.partitions.get(event.letter.range.topic_partition),
            event,
            now,
            self.settings.retry_s,
        )
        if owned is not None:
            self.partitions[owned.partition] = owned
            if isinstance(event, events.DeadLetterStored):
                self._refresh.read_runs()
            yield from self._stop_or_resume(owned)

    # Decisions

    def _store_dead_letters(self, due: list[TopicPartition], now: float) -> _Commands:
        if not self.settings.dead_letter_topic:
            return
        for owned in self.partitions.known(due):
            letter = dead_letter_policy.due_letter(owned, now, self.settings)
            if letter is not None:
                self.partitions[owned.partition] = owned._replace(dead_letter=letter)
                yield letter.command

    def _commit(self, due: list[TopicPartition], now: float) -> _Commands:
        writes = []
        for owned in self.partitions.known(due):
            pending = owned.pending
            is_stopped_by_it = (
                owned.phase is Phase.STOPPED and pending is not None and pending.refused
            )
            wait_s = self.settings.recheck_s if is_stopped_by_it else self.settings.retry_s
            if pending is not None and now - pending.last_sent_at >= wait_s:
                pending = pending._replace(resent_at=now)
            elif pending is None:
                pending = (
                    owned.first_write(now)
                    or owned.commit_write(now)
                    or dead_letter_policy.due_halving(owned, now, self.settings)
                )
            if pending is not None and pending is not owned.pending:
                self.partitions[owned.partition] = owned._replace(pending=pending)
                writes.append(pending.write)
        return [commands.WriteOffsets(tuple(writes))] if writes else []

    def _record(self, due: list[TopicPartition], now: float) -> _Commands:
        issued = self._due_records.issue(self.partitions.known(due), now)
        return [commands.RecordCommits(issued)] if issued else []

    def _claim_again(self, now: float) -> _Commands:
        request = next(iter(self._due_requests), None)
        if request is not None and self._streaming.may_claim_again(self._claims):
            yield from self._streaming.claim_again(request, self.partitions, now)

    def _in_flight(self, now: float) -> frozenset[str]:
        retries = not (self.settings.worker and self._streaming.is_new_next)
        return self._claimed_work.in_flight(now, retries=retries)

    def _has_room(self, now: float) -> bool:
        """Whether another batch may be claimed; a streaming run has one at a time."""
        return len(self._in_flight(now)) < self.settings.limits.max_runs_in_flight

    def _may_plan(self, now: float) -> bool:
        has_ticks = now - self._last_tick_at <= self.settings.plan_patience_s
        return self.leaving is None and (has_ticks or self.settings.worker != "")

    def _scan(self, now: float) -> _Commands:
        return self._scans.due(now) if self._may_plan(now) else ()

    def _claim(self, now: float) -> _Commands:
        worker = self.settings.worker
        if not self._may_plan(now):
            return
        if not self.partitions.has(Role.MORE):
            return
        if (
            worker and self.batch_requests
        ):  # the worker begins its claimed batch before the next claim
            return
        in_flight = self._in_flight(now)
        is_ahead = len(in_flight) >= self.settings.limits.max_runs_in_flight
        if is_ahead and not self._streaming.may_claim_ahead(in_flight, self._claims):
            return
        batches = plan(
            [*self._streaming.backlogs(self._scans.claimable(), is_ahead=is_ahead)],
            self.settings.limits,
            runs_in_flight=0 if is_ahead else len(in_flight),
            new_batch_id=self._new_batch_id,
            now=now,
            only_full=is_ahead,
        )
        writes = []
        for batch in batches:
            for range_ in batch.ranges:
                owned = self.partitions[range_.topic_partition]
                pending = owned.claim_write(batch.batch_id, range_.until, now, is_early=is_ahead)
                self.partitions[owned.partition] = owned._replace(pending=pending)
                writes.append(pending.write)
        if writes:
            self._streaming.is_new_next = False
            yield commands.WriteOffsets(tuple(writes))


def _passed_deletion(before: OwnedPartition) -> _Commands:
    """Clear a stop that a group snapshot may have shown for deleted records.

    The runs had read the records in time, which a snapshot of the group cannot see.
    """
    if before.is_behind_deletion:
        yield commands.ShowStop(before.partition, "")


def _ordered(partitions: list[TopicPartition], directive: Directive | str) -> commands.Note:
    return commands.Note(
        f"{names_of(partitions)}: {directive}",
        EventKind.DIRECTIVES_CHANGED,
        {"partitions": tuple(partitions), "order": str(directive)},
    )

"""Engine: the decision core of one member. Events go in, commands come out.

The engine reads no clock (`now` is an argument) and performs no I/O. Any command may fail without
an answer, and repeating it is safe; the engine reissues those that still matter after `retry_s`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.batches.planning import plan
from dagster_rebalance.core.engine import dead_letter_policy
from dagster_rebalance.core.engine.directive_cancels import DirectiveCancels
from dagster_rebalance.core.engine.refresh import Refresh, due_times
from dagster_rebalance.core.engine.run_requests import (
    batches_in_flight,
    due_requests,
    requested_range,
)
from dagster_rebalance.core.engine.run_results import apply_runs
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Directive, in_force, new_retries
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import Log, names_of
from dagster_rebalance.core.model.run_snapshot import RunSnapshot
from dagster_rebalance.core.partitions.assigned import AssignedPartitions
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
from dagster_rebalance.core.revokes.hold import Forecast, HeldPartitions
from dagster_rebalance.core.runs.progress import (
    InFlight,
    Succeeded,
    other_streaming_runs,
    unclaimed_runs,
)
from dagster_rebalance.core.runs.retry import why_not_ended, why_not_started
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from dagster_rebalance.core.streaming.stream_claims import StreamClaims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.revokes.hold import Hold

    _Commands: TypeAlias = Iterable[commands.Command]

_ROUNDING_S = 1e-6


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
        self._requests: tuple[object, object, object, tuple[BatchRequest, ...]] | None = None
        self._claimed: tuple[object, frozenset[str]] | None = None
        self._quiet: tuple[int, float] | None = None
        self._streaming = StreamClaims(settings, new_batch_id)
        self._held = HeldPartitions(settings, self.partitions, self._streaming)
        self._refresh = Refresh(settings, self.partitions)
        self._directive_cancels = DirectiveCancels(settings.retry_s)
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
            events.OffsetsWritten: self._on_written,
            events.CommitRecorded: self._on_recorded,
            events.DeadLetterStored: self._on_dead_letter,
            events.DeadLetterFailed: self._on_dead_letter,
        }

    def handle(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Apply an event and return the commands that follow."""
        return (*self.apply(event, now), *self.decide(now))

    def apply(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Apply an event. Call `decide` after the last of the events that arrived together."""
        self._now = now
        if type(event) is not events.TimePassed:
            self._quiet = None
        return tuple(self._handlers[type(event)](event, now))

    def decide(self, now: float) -> tuple[commands.Command, ...]:
        """Return the commands that follow from all events so far.

        While nothing changes and nothing is due, there are no commands, and the cost of a turn of
        the member loop does not grow with the number of partitions.
        """
        self._now = now
        if self._is_quiet(now):
            self._refresh.stay(now)
            return ()
        decided = (
            *self._store_dead_letters(now),
            *self._commit(now),
            *self._record(now),
            *self._held.advance(now),
            *self._directive_cancels.due(self.partitions.busy, now),
            *self._claim_again(now),
            *self._claim(now),
            *self._refresh.due(
                # A working run without a claim has no entry. It may be deleted or marked as ended
                # in Dagster before its process ends.
                self.liveness.batch_ids,
                now,
                epoch=self._epoch,
                directives_epoch=self._directives_epoch,
                is_holding=bool(self.holds),
                is_leaving=self.leaving is not None,
            ),
        )
        self._quiet = None if decided else self._quiet_until(now)
        return decided

    def _is_quiet(self, now: float) -> bool:
        return (
            self._quiet is not None
            and self._quiet[0] == self.partitions.version
            and now < self._quiet[1]
        )

    def _quiet_until(self, now: float) -> tuple[int, float] | None:
        """The version of the partitions that needs no decision, and until when; None if unknown."""
        is_claiming_again = self._streaming.may_claim_again(self.partitions.busy)
        if self.holds or self.leaving is not None or (is_claiming_again and self._due_requests):
            return None
        times = (
            *self._refresh.next_due(now, directives_epoch=self._directives_epoch),
            self._directive_cancels.next_due,
            *(at for owned in self.partitions.busy for at in due_times(owned, self.settings)),
        )
        # Some decisions compare `now - since` with a limit, which rounds differently.
        early = (at - _ROUNDING_S for at in times)
        return self.partitions.version, min(
            (at for at in early if at > now - 2 * _ROUNDING_S), default=float("inf")
        )

    @property
    def batch_requests(self) -> tuple[BatchRequest, ...]:
        """The runs to request from Dagster, or the batches that a streaming run begins next."""
        return self._streaming.to_begin(self._due_requests)

    @property
    def _due_requests(self) -> tuple[BatchRequest, ...]:
        """Cached for each state: a turn of the member loop reads it several times."""
        since = self._quiet if self._is_quiet(self._now) else self._now
        busy, cached = self.partitions.busy, self._requests
        if (
            cached is None
            or cached[0] is not since
            or cached[1] is not busy
            or cached[2] is not self.directives
        ):
            requests = due_requests(
                busy,
                self._now,
                max_runs=self.settings.limits.max_runs_in_flight,
                directives=self.directives,
                worker=self.settings.worker,
            )
            self._requests = cached = (since, busy, self.directives, requests)
        return cached[3]

    @property
    def has_settled(self) -> bool:
        """Whether all assigned partitions are restored and their available records are claimed."""
        return bool(self.partitions) and not any(
            owned.phase is Phase.RESTORING
            or (owned.pending is not None and not owned.pending.refused)
            for owned in self.partitions.busy
        )

    @property
    def claimed(self) -> frozenset[str]:
        """The ids of batches with a claim on an assigned partition, cached for each state."""
        busy, cached = self.partitions.busy, self._claimed
        if cached is None or cached[0] is not busy:
            claimed = frozenset(e.batch_id for owned in busy for e in owned.known_entries)
            self._claimed = cached = (busy, claimed)
        return cached[1]

    def log_of(self, partition: TopicPartition) -> Log:
        """The log of a partition, as far as the member knows it."""
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
        """The partitions whose revoke must be delayed."""
        return self._held.revoked if self._held.holds else frozenset()

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
                yield from self._stop(replace(owned, refused=restored), restored.reason)
                continue
            self.partitions[partition] = restored
            self._refresh.read_runs()
            if owned.previous is not None:
                yield from _passed_deletion(owned.previous)
            moved = moved_offset_note(restored, lookup.recorded)
            if moved is not None:
                yield moved

    def _on_bounds(self, event: events.BoundsRead, now: float) -> _Commands:
        for partition, bounds in event.bounds.items():
            owned = self.partitions.get(partition)
            if owned is None or owned.ledger is None or (owned.is_idle and owned.bounds == bounds):
                continue
            ledger, transaction = (
                owned.ledger,
                track_transaction(owned.open_transaction, bounds, now),
            )
            is_changed = owned.open_transaction != transaction
            self.partitions[partition] = owned = replace(
                owned.with_bounds(bounds, now), open_transaction=transaction
            )
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

    def _on_written(self, event: events.OffsetsWritten, now: float) -> _Commands:
        for write in event.written:
            owned = self.partitions.get(write.partition)
            if owned is not None and owned.epoch == write.epoch:
                yield from self._apply_written(owned, owned.written(write, now))
        for write, reason in event.refused:
            owned = self.partitions.get(write.partition)
            if owned is not None and owned.pending is not None and owned.pending.write == write:
                self.partitions[write.partition] = refused = replace(
                    owned, pending=replace(owned.pending, refused=reason)
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
            overtaken = replace(owned, pending=None, unrecorded=None, has_foreign_write=True)
            self.partitions[owned.partition] = overtaken
        else:
            yield commands.Note(f"{changed}reading it again")
            self.partitions[owned.partition] = replace(self._distrusted(owned), previous=None)
            yield from _passed_deletion(owned)

    def _apply_written(self, before: OwnedPartition, after: OwnedPartition) -> _Commands:
        self.partitions[after.partition] = after
        if any(entry.taken_from for entry in after.entries):
            self._refresh.read_runs()
        self._note_committed(before, after)
        if not after.is_behind_deletion:
            yield from _passed_deletion(before)
        if before.pending is not None and before.pending.refused:
            yield from self._stop_or_resume(after)

    def _note_committed(self, before: OwnedPartition, after: OwnedPartition) -> None:
        record = after.unrecorded
        if record is None or record == before.unrecorded:
            return
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
        distrusted = replace(
            owned,
            previous=owned if owned.ledger is not None else None,
            pending=None,
            ledger=None,
            stored=None,
            backlog_since=None,
            seen_since=None,
            dead_letter=None,
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
            for owned in [o for o in self.partitions.busy if o.needs_operator]:
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
        exhausted_too = self.settings.dead_letter_topic is None
        covered = [owned for owned in self.partitions.values() if directive.covers(owned.partition)]
        for owned in covered:
            tried = owned.due_now(exhausted_too=exhausted_too)
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
        runs = defaultdict[str, list[RunSnapshot]](list)
        for run in event.runs:
            runs[run.batch_id].append(run)
        working = tuple(run for run in event.runs if run.may_work)
        for owned in self.partitions.busy:
            if owned.ledger is None:
                continue
            results = apply_runs(
                owned, owned.ledger, event.batch_ids, runs, settings=self.settings, now=now
            )
            yield from map(commands.Note, results.notes)
            self.partitions[owned.partition] = results.owned
            is_known = event.with_live and results.covers_all
            if owned.phase is Phase.RESTORING and is_known and self._knows_directives(owned):
                yield from self._restore(results.owned, working, now)
            yield from self._stop_or_resume(self.partitions[owned.partition])
            yield from self._check_claims(self.partitions[owned.partition], results.refused)

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
                f"reading the claims of {owned.partition} again, because "
                f"{', '.join(sorted(new))} refused to work"
            )
            doubted = replace(owned, rechecked_runs=owned.rechecked_runs | new)
            self.partitions[owned.partition] = self._distrusted(doubted)

    def _on_dead_run_ended(self, event: events.DeadRunEnded, _now: float) -> _Commands:
        self.liveness = self.liveness.without(event.run_id)
        self._refresh.read_runs()  # a deleted run may still be in the last result
        return ()

    def _restore(
        self, owned: OwnedPartition, runs: tuple[RunSnapshot, ...], now: float
    ) -> _Commands:
        claims = [(entry.range, entry.batch_id) for entry in owned.entries]
        streams = {batch.run_id for _, name in claims if (batch := StreamBatch.parse(name))}
        blocked_by = (
            *unclaimed_runs([owned.ahead], claims, runs),
            *other_streaming_runs(owned.partition, streams | {self.settings.worker}, runs),
        )
        if blocked_by:
            blocked = replace(owned, blocked_by=blocked_by)
            yield from self._show_stop(blocked, self._not_ended(blocked) or owned.stop_reason)
            return
        self.partitions[owned.partition] = replace(owned.restored(now), stop_reason="")
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
            dead_letter_policy.why_stopped(owned, self.settings.dead_letter_topic)
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
            self.partitions[owned.partition] = replace(
                owned.changed(Change.STOP_CLEARED), stop_reason=""
            )
            yield commands.ShowStop(owned.partition, "")

    def _unanswered(self, owned: OwnedPartition) -> str | None:
        limit_s = self.settings.stalled_after_s
        late = {
            request
            for request, since in self._requested_since.items()
            if self._now - since >= limit_s
        }
        found = requested_range(owned, late, self._now) if late else None
        return None if found is None else why_not_started(found[0], found[1].run_key, limit_s)

    def _not_ended(self, owned: OwnedPartition) -> str | None:
        limit_s = self.settings.stalled_after_s
        waited_for = owned.live_runs.union(owned.blocked_by)
        stuck = sorted(self.liveness.not_ended(self._now - limit_s) & waited_for)
        return why_not_ended(owned.partition, stuck[0], limit_s) if stuck else None

    def _stop(self, owned: OwnedPartition, reason: str) -> _Commands:
        return self._show_stop(replace(owned.changed(Change.STOP_CAUSED), previous=None), reason)

    def _show_stop(self, owned: OwnedPartition, reason: str) -> _Commands:
        self.partitions[owned.partition] = replace(owned, stop_reason=reason)
        if is_new_reason(reason, owned.stop_reason):
            yield commands.ShowStop(owned.partition, reason)

    def _on_recorded(self, event: events.CommitRecorded, now: float) -> _Commands:
        partition = event.record.range.topic_partition
        owned = self.partitions.get(partition)
        if owned is not None and owned.unrecorded == event.record:
            self.partitions[partition] = replace(
                owned,
                unrecorded=None,
                recorded_at=None,
                record_due_at=now + self.settings.record_every_s,
            )
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

    def _store_dead_letters(self, now: float) -> _Commands:
        for owned in self.partitions.busy if self.settings.dead_letter_topic else ():
            letter = dead_letter_policy.due_letter(owned, now, self.settings.retry_s)
            if letter is not None:
                self.partitions[owned.partition] = replace(owned, dead_letter=letter)
                yield letter.command

    def _commit(self, now: float) -> _Commands:
        writes = []
        for owned in self.partitions.busy:
            pending = owned.pending
            is_stopped_by_it = (
                owned.phase is Phase.STOPPED and pending is not None and pending.refused
            )
            wait_s = self.settings.recheck_s if is_stopped_by_it else self.settings.retry_s
            if pending is not None and now - pending.last_sent_at >= wait_s:
                pending = replace(pending, resent_at=now)
            elif pending is None:
                pending = owned.first_write(now) or owned.commit_write(now)
            if pending is not None and pending is not owned.pending:
                self.partitions[owned.partition] = replace(owned, pending=pending)
                writes.append(pending.write)
        return [commands.WriteOffsets(tuple(writes))] if writes else []

    def _record(self, now: float) -> _Commands:
        for owned in self.partitions.busy:
            record = owned.unrecorded
            if record is None or owned.phase is Phase.RESTORING or not owned.is_record_due(now):
                continue
            if owned.recorded_at is None or now - owned.recorded_at >= self.settings.retry_s:
                self.partitions[owned.partition] = replace(owned, recorded_at=now)
                yield record

    def _claim_again(self, now: float) -> _Commands:
        if self._streaming.may_claim_again(self.partitions.busy):
            request = next(iter(self._due_requests), None)
            yield from self._streaming.claim_again(request, self.partitions, now)

    def _claim(self, now: float) -> _Commands:
        worker = self.settings.worker
        has_ticks = now - self._last_tick_at <= self.settings.plan_patience_s
        if self.leaving is not None or not (has_ticks or worker):
            return
        if (
            worker and self.batch_requests
        ):  # the worker begins its claimed batch before the next claim
            return
        retries = not (worker and self._streaming.is_new_next)
        in_flight = batches_in_flight(self.partitions.busy, now, worker=worker, retries=retries)
        batches = plan(
            [backlog for owned in self.partitions.busy if (backlog := owned.backlog) is not None],
            self.settings.limits,
            runs_in_flight=len(in_flight),
            new_batch_id=self._new_batch_id,
            now=now,
        )
        writes = []
        for batch in batches:
            for range_ in batch.ranges:
                owned = self.partitions[range_.topic_partition]
                pending = owned.claim_write(batch.batch_id, range_.until, now)
                self.partitions[owned.partition] = replace(owned, pending=pending)
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

"""The engine: the one mutable object of the core. Events go in, commands come out.

It owns the partitions of one member, their holds, and when something is asked for again. It reads
no clock and does nothing itself: `now` is an argument, and a shell carries out the commands. Every
command may go unanswered; what matters is given again after `retry_s`.

Outline of one call: apply the event; then each partition, in this order: dead letter, commit,
record; then one step of each hold (`hold`) and the end of those that are over; then what people
have stopped is cancelled; then the claims of a streaming run (`claims`), and new ones; then
what has to be read again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import plan
from dagster_rebalance.core.engine import dead_letters
from dagster_rebalance.core.engine.directive_cancels import DirectiveCancels
from dagster_rebalance.core.engine.refresh import Refresh
from dagster_rebalance.core.engine.run_requests import asked_for_in, batches_under_way, offers_of
from dagster_rebalance.core.engine.run_results import taken_in
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Directive, in_force, new_retries
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.member_events import Occurred
from dagster_rebalance.core.model.offsets import Log, named
from dagster_rebalance.core.model.run import RunSeen
from dagster_rebalance.core.partitions.assigned import AssignedPartitions
from dagster_rebalance.core.partitions.open_transaction import noticed, why_hanging
from dagster_rebalance.core.partitions.owned import OwnedPartition, Refused
from dagster_rebalance.core.partitions.recovery import (
    is_news,
    moved_offset,
    out_of_range,
    refused_write,
    take_in,
)
from dagster_rebalance.core.partitions.state_machine import Change, Phase
from dagster_rebalance.core.revokes.eta import Forecast
from dagster_rebalance.core.revokes.holds import HeldPartitions
from dagster_rebalance.core.runs.progress import InFlight, Succeeded, others_on, unclaimed_workers
from dagster_rebalance.core.runs.retry import not_ended, unanswered
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from dagster_rebalance.core.streaming.claims import StreamClaims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.batches.settings import EngineSettings
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.revokes.hold import Hold
    from dagster_rebalance.core.runs.offer import Offer


class Engine:
    """Decides for one member. Not safe for several threads: one thread owns it."""

    def __init__(
        self, settings: EngineSettings, *, new_batch_id: Callable[..., str], now: float
    ) -> None:
        self.settings = settings
        self.partitions = AssignedPartitions()
        self._new_batch_id = new_batch_id
        self._epoch = 0
        self.pulse = settings.pulse
        self._last_tick_at = self._now = now
        self._asked_since: dict[Offer, float] = {}
        self._wanted_in: tuple[tuple[object, ...], tuple[Offer, ...]] | None = None
        self._streaming = StreamClaims(settings, new_batch_id)
        self._given_up = HeldPartitions(settings, self.partitions, self._streaming)
        self._lookups = Refresh(settings)
        self._rechecked_at = float("-inf")
        self.orders: tuple[Directive, ...] = ()
        self.forecast = Forecast()
        self._ordered_epoch = 0
        self._obedience = DirectiveCancels(settings.retry_s)
        self._handlers: dict[type[object], Callable[..., Iterable[commands.Command]]] = {
            events.PartitionsAssigned: self._on_assigned,
            events.RevokeRequested: self._on_revoke_requested,
            events.PartitionsRevoked: self._on_revoked,
            events.PartitionsLost: self._on_lost,
            events.LeaveRequested: self._on_leave_requested,
            events.TickArrived: self._on_tick,
            events.TimePassed: self._on_time,
            events.StoredOffsetsRead: self._on_stored,
            events.DirectivesRead: self._on_orders,
            events.RunsRead: self._on_runs,
            events.DeadRunEnded: self._on_dead_run_ended,
            events.BoundsRead: self._on_bounds,
            events.OffsetsWritten: self._on_written,
            events.CommitRecorded: self._on_recorded,
            events.DeadLetterStored: self._on_letter,
            events.DeadLetterFailed: self._on_letter,
        }

    def handle(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Apply an event, and return the commands that follow."""
        return (*self.apply(event, now), *self.decide(now))

    def apply(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Apply an event. Call `decide` after the last one of those that arrive together."""
        self._now = now
        return tuple(self._handlers[type(event)](event, now))

    def decide(self, now: float) -> tuple[commands.Command, ...]:
        """Return the commands that follow from all events so far."""
        self._now = now
        decided: list[commands.Command] = []
        decided += self._store_letters(now)
        decided += self._commit(now)
        decided += self._record(now)
        decided += self._given_up.advance(now)
        decided += self._obedience.due(self.partitions.busy, now)
        decided += self._claim_again(now)
        decided += self._claim(now)
        # A run that works without being the work of a claim has no entry, and may be deleted, or
        # end in Dagster, before it is over.
        followed = self.pulse.batch_ids
        decided += self._lookups.due(
            self.partitions,
            followed,
            now,
            epoch=self._epoch,
            ordered_epoch=self._ordered_epoch,
            holds=bool(self.holds),
            leaves=self.leaving is not None,
        )
        return tuple(decided)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The runs that Dagster shall start, as of the last event.

        To the worker of a streaming run: the batches that it shall work on.
        """
        return self._streaming.to_begin(self._wanted)

    @property
    def _wanted(self) -> tuple[Offer, ...]:
        """Computed once for each state: a turn asks several times."""
        state = (self.partitions.busy, self._now, self.orders)
        if self._wanted_in is None or any(
            a is not b for a, b in zip(state, self._wanted_in[0], strict=True)
        ):
            wanted = offers_of(
                self.partitions.busy,
                self._now,
                most_runs=self.settings.limits.max_runs_in_flight,
                orders=self.orders,
                worker=self.settings.worker,
            )
            self._wanted_in = (state, wanted)
        return self._wanted_in[1]

    @property
    def has_settled(self) -> bool:
        """Whether all that is assigned was taken in, and what is ready of it was claimed."""
        return bool(self.partitions) and not any(
            owned.phase is Phase.RESTORING
            or (owned.pending is not None and not owned.pending.refused)
            for owned in self.partitions.busy
        )

    @property
    def claimed(self) -> frozenset[str]:
        """The batches that have claimed a range of an assigned partition."""
        return frozenset(
            entry.batch_id for owned in self.partitions.busy for entry in owned.known_entries
        )

    def log_of(self, partition: TopicPartition) -> Log:
        """Which log a partition has, as far as the member knows."""
        owned = self.partitions.get(partition)
        return Log() if owned is None else owned.log

    @property
    def holds(self) -> tuple[Hold, ...]:
        """What is given up, in the order of the requests."""
        return self._given_up.holds

    @property
    def leaving(self) -> str | None:
        """Why the member leaves the group; None while it stays."""
        return self._given_up.leaving

    @property
    def held(self) -> frozenset[TopicPartition]:
        """The partitions whose revoke must still be delayed."""
        return self._given_up.revoked

    # What Kafka says

    def _on_assigned(
        self, event: events.PartitionsAssigned, _now: float
    ) -> Iterable[commands.Command]:
        for partition in event.partitions:
            if partition in self.partitions:
                msg = f"{partition} was assigned twice without being given up in between"
                raise IllegalStateError(msg)
        for partition in event.partitions:
            self._epoch += 1
            owned = OwnedPartition(partition, self._epoch, order=in_force(self.orders, partition))
            self.partitions[partition] = (
                owned.changed(Change.GIVE_UP_REQUESTED) if self.leaving else owned
            )
        self._lookups.want_stored()
        self._lookups.want_orders()
        yield commands.Note(
            f"assigned {named(event.partitions)}",
            Occurred.PARTITIONS_ASSIGNED,
            {"partitions": event.partitions},
        )

    def _on_revoke_requested(
        self, event: events.RevokeRequested, now: float
    ) -> Iterable[commands.Command]:
        yield from self._given_up.revoke(event, now)
        self._lookups.want_runs()

    def _on_leave_requested(
        self, event: events.LeaveRequested, now: float
    ) -> Iterable[commands.Command]:
        was_leaving = self.leaving is not None
        yield from self._given_up.leave(event, now)
        if not was_leaving:
            self._lookups.want_runs()

    def _on_revoked(
        self, event: events.PartitionsRevoked, now: float
    ) -> Iterable[commands.Command]:
        """What was not released was taken away."""
        taken = tuple(owned.partition for owned in self.partitions.known(event.partitions))
        return self._on_lost(events.PartitionsLost(taken), now) if taken else ()

    def _on_lost(self, event: events.PartitionsLost, now: float) -> Iterable[commands.Command]:
        return self._given_up.lose(event, now)

    # What Dagster and the clock say

    def _on_tick(self, _event: events.TickArrived, now: float) -> Iterable[commands.Command]:
        if now - self._last_tick_at > self.settings.plan_patience_s:
            self._asked_since = {}
        self._last_tick_at = now
        self._asked_since = {offer: self._asked_since.get(offer, now) for offer in self.offers}
        return ()

    def _on_time(self, _event: events.TimePassed, now: float) -> Iterable[commands.Command]:
        silence_s = now - self._last_tick_at
        if self.leaving is None and silence_s > self.settings.lease_s and not self.settings.worker:
            yield from self._on_leave_requested(
                events.LeaveRequested(f"its sensor has not ticked for {silence_s:.0f} s"), now
            )
        if now - self._rechecked_at >= self.settings.recheck_s:
            self._rechecked_at = now
            for owned in [o for o in self.partitions.busy if o.waits_for_a_person]:
                self.partitions[owned.partition] = self._distrusted(owned)

    def _on_stored(
        self, event: events.StoredOffsetsRead, _now: float
    ) -> Iterable[commands.Command]:
        for partition, epoch in event.epochs.items():
            owned = self.partitions.get(partition)
            if (
                owned is None
                or owned.epoch != epoch
                or owned.phase is not Phase.RESTORING
                or owned.ledger is not None
            ):
                continue
            found = event.found[partition]
            taken = take_in(
                owned,
                found,
                start_from=self.settings.start_from,
                foreign_metadata=self.settings.foreign_metadata,
            )
            if isinstance(taken, Refused):
                yield from self._stop(replace(owned, refused=taken), taken.reason)
                continue
            self.partitions[partition] = taken
            self._lookups.want_runs()
            if owned.before is not None:
                yield from _passed_deletion(owned.before)
            moved = moved_offset(taken, found.recorded)
            if moved is not None:
                yield moved

    def _on_orders(self, event: events.DirectivesRead, _now: float) -> Iterable[commands.Command]:
        knows_orders = self._ordered_epoch > 0
        self._ordered_epoch = max(event.epoch, self._ordered_epoch)
        if event.orders == self.orders:
            return
        # What was to be retried before this member was there, it has tried when it took over.
        retries = new_retries(self.orders, event.orders) if knows_orders else []
        self.orders = event.orders
        for retry in retries:
            yield from self._retry(retry)
        changed: dict[Directive | None, list[TopicPartition]] = {}
        for owned in list(self.partitions.values()):
            order = in_force(event.orders, owned.partition)
            if order != owned.order:
                self.partitions[owned.partition] = owned.under(order)
                changed.setdefault(order, []).append(owned.partition)
        if None in changed:
            self._lookups.want_runs()
        for order, partitions in changed.items():
            said = "resumed, and goes on where it stood" if order is None else order
            yield commands.Note(
                f"{named(partitions)}: {said}",
                Occurred.PARTITIONS_ORDERED,
                {"partitions": tuple(partitions), "order": str(said)},
            )

    def _retry(self, order: Directive) -> Iterable[commands.Command]:
        exhausted_too = self.settings.dead_letter_topic is None
        covered = [owned for owned in self.partitions.values() if order.covers(owned.partition)]
        for owned in covered:
            tried = owned.tried_now(exhausted_too=exhausted_too)
            is_stopped = tried.waits_for_a_person
            self.partitions[owned.partition] = self._distrusted(tried) if is_stopped else tried
        if covered:
            partitions = tuple(owned.partition for owned in covered)
            yield commands.Note(
                f"{named(partitions)}: {order}",
                Occurred.PARTITIONS_ORDERED,
                {"partitions": partitions, "order": str(order)},
            )

    def _on_runs(self, event: events.RunsRead, now: float) -> Iterable[commands.Command]:
        return () if self._lookups.is_stale(event) else self._take_in_runs(event, now)

    def _take_in_runs(self, event: events.RunsRead, now: float) -> Iterable[commands.Command]:
        if not event.is_own:
            event = replace(event, runs=self.pulse.completed(event.runs, event.batch_ids))
            yield from self._feel_pulse(event.runs, now)
        runs = defaultdict[str, list[RunSeen]](list)
        for run in event.runs:
            runs[run.batch_id].append(run)
        for owned in self.partitions.busy:
            if owned.ledger is not None:
                news = taken_in(
                    owned, owned.ledger, event.batch_ids, runs, settings=self.settings, now=now
                )
                yield from map(commands.Note, news.notes)
                self.partitions[owned.partition] = news.owned
                is_known = event.with_live and news.covers_all
                if owned.phase is Phase.RESTORING and is_known and self._is_ordered(owned):
                    yield from self._restore(news.owned, event.runs, now)
                yield from self._stop_or_go_on(self.partitions[owned.partition])
                yield from self._doubt(self.partitions[owned.partition], news.refused)

    def _is_ordered(self, owned: OwnedPartition) -> bool:
        """Whether what people have ordered was read since the partition was assigned."""
        return owned.epoch <= self._ordered_epoch

    def _feel_pulse(self, runs: Iterable[RunSeen], now: float) -> Iterable[commands.Command]:
        mine = [
            run
            for run in runs
            if run.is_live
            and run.run_id != self.settings.worker
            and (
                any(r.topic_partition in self.partitions for r in run.ranges)
                or any(partition in self.partitions for partition in run.may_work_on or ())
            )
        ]
        self.pulse, dead = self.pulse.observe(mine, now)
        if dead:
            yield commands.EndDeadRuns(
                {run_id: self.pulse.signs[run_id].run.heartbeat for run_id in dead}
            )

    def _doubt(self, owned: OwnedPartition, refused: frozenset[str]) -> Iterable[commands.Command]:
        new = refused - owned.doubted_by
        if new and owned.phase.is_kept and owned.pending is None:
            yield commands.Note(
                f"it is looked up whether the claims of {owned.partition} still stand, because "
                f"{', '.join(sorted(new))} refused to work"
            )
            doubted = replace(owned, doubted_by=owned.doubted_by | new)
            self.partitions[owned.partition] = self._distrusted(doubted)

    def _on_dead_run_ended(
        self, event: events.DeadRunEnded, _now: float
    ) -> Iterable[commands.Command]:
        self.pulse = self.pulse.without(event.run_id)
        self._lookups.want_runs()  # a deleted run that was read before is not there any more
        return ()

    def _restore(
        self, owned: OwnedPartition, runs: tuple[RunSeen, ...], now: float
    ) -> Iterable[commands.Command]:
        claims = [(entry.range, entry.batch_id) for entry in owned.entries]
        streams = {batch.run_id for _, name in claims if (batch := StreamBatch.read(name))}
        blocked_by = (
            *unclaimed_workers([owned.ahead], claims, runs),
            *others_on(owned.partition, streams | {self.settings.worker}, runs),
        )
        if blocked_by:
            blocked = replace(owned, blocked_by=blocked_by)
            reason = self._not_ended(blocked) or owned.stop_reason
            self.partitions[owned.partition] = replace(blocked, stop_reason=reason)
            if is_news(reason, owned.stop_reason):
                yield commands.ShowStop(owned.partition, reason)
            return
        self.partitions[owned.partition] = owned.restored(now)
        if owned.stop_reason:
            self.partitions[owned.partition] = replace(
                self.partitions[owned.partition], stop_reason=""
            )
            yield commands.ShowStop(owned.partition, "")
        for entry in owned.entries:
            if isinstance(entry.progress, InFlight):
                yield _adopted(entry.range, entry.batch_id, entry.progress)

    def _stop_or_go_on(self, owned: OwnedPartition) -> Iterable[commands.Command]:
        failed = dead_letters.why_stopped(owned, self.settings.dead_letter_topic)
        stuck = refused_write(owned) or why_hanging(owned.partition, owned.open_transaction)
        reason = failed or stuck or self._unanswered(owned) or self._not_ended(owned)
        if reason is not None and owned.phase is Phase.OWNED:
            yield from self._stop(owned, reason)
        elif reason is not None and owned.phase is Phase.STOPPED and reason != owned.stop_reason:
            self.partitions[owned.partition] = replace(owned, stop_reason=reason)
            if is_news(reason, owned.stop_reason):
                yield commands.ShowStop(owned.partition, reason)
        elif reason is None and owned.phase is Phase.STOPPED and owned.ledger is not None:
            self.partitions[owned.partition] = replace(
                owned.changed(Change.STOP_CLEARED), stop_reason=""
            )
            yield commands.ShowStop(owned.partition, "")

    def _unanswered(self, owned: OwnedPartition) -> str | None:
        limit_s = self.settings.unanswered_s
        late = {offer for offer, since in self._asked_since.items() if self._now - since >= limit_s}
        found = asked_for_in(owned, late, self._now) if late else None
        return None if found is None else unanswered(found[0], found[1].run_key, limit_s)

    def _not_ended(self, owned: OwnedPartition) -> str | None:
        limit_s = self.settings.unanswered_s
        waited_for = owned.live_runs.union(owned.blocked_by)
        stuck = sorted(self.pulse.not_ended(self._now - limit_s) & waited_for)
        return not_ended(owned.partition, stuck[0], limit_s) if stuck else None

    def _stop(self, owned: OwnedPartition, reason: str) -> Iterable[commands.Command]:
        self.partitions[owned.partition] = replace(
            owned.changed(Change.STOP_CAUSED), stop_reason=reason, before=None
        )
        if is_news(reason, owned.stop_reason):
            yield commands.ShowStop(owned.partition, reason)

    def _on_bounds(self, event: events.BoundsRead, now: float) -> Iterable[commands.Command]:
        for partition, bounds in event.bounds.items():
            owned = self.partitions.get(partition)
            if owned is None or owned.ledger is None or (owned.is_idle and owned.bounds == bounds):
                continue
            ledger = owned.ledger
            had, has = owned.open_transaction, noticed(owned.open_transaction, bounds, now)
            self.partitions[partition] = owned = replace(
                owned.with_bounds(bounds, now), open_transaction=has
            )
            if had != has:
                yield from self._stop_or_go_on(owned)
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

    def _on_written(self, event: events.OffsetsWritten, now: float) -> Iterable[commands.Command]:
        for write in event.written:
            owned = self.partitions.get(write.partition)
            if owned is not None and owned.epoch == write.epoch:
                yield from self._take_in_written(owned, owned.written(write, now))
        for write, reason in event.refused:
            owned = self.partitions.get(write.partition)
            if owned is not None and owned.pending is not None and owned.pending.write == write:
                self.partitions[write.partition] = refused = replace(
                    owned, pending=replace(owned.pending, refused=reason)
                )
                yield from self._stop_or_go_on(refused)
        for write, failure in event.failed:
            owned = self.partitions.get(write.partition)
            if (
                owned is None
                or owned.pending is None
                or owned.pending.write != write
                or failure is not events.WriteFailure.CHANGED
            ):
                continue
            if owned.phase is Phase.DRAINING and owned.live_runs:
                yield commands.Note(
                    f"the stored offset of {write.partition} is not what this member wrote: "
                    "nothing more is committed for it, and its runs are waited for"
                )
                overtaken = replace(owned, pending=None, unrecorded=None, is_overtaken=True)
                self.partitions[write.partition] = overtaken
                continue
            yield commands.Note(
                f"the stored offset of {write.partition} is not what this member wrote: it is "
                "looked up again"
            )
            self.partitions[write.partition] = replace(self._distrusted(owned), before=None)
            yield from _passed_deletion(owned)

    def _take_in_written(
        self, before: OwnedPartition, after: OwnedPartition
    ) -> Iterable[commands.Command]:
        self.partitions[after.partition] = after
        if any(entry.taken_from for entry in after.entries):
            self._lookups.want_runs()
        self._note_committed(before, after)
        if not after.is_behind_deletion:
            yield from _passed_deletion(before)
        if before.pending is not None and before.pending.refused:
            yield from self._stop_or_go_on(after)

    def _note_committed(self, before: OwnedPartition, after: OwnedPartition) -> None:
        record = after.unrecorded
        if record is None or record == before.unrecorded:
            return
        if record.claim_to_commit_s is not None:
            self.forecast = self.forecast.after(record.claim_to_commit_s)
        succeeded = {
            entry.progress.run_id
            for entry in before.entries
            if isinstance(entry.progress, Succeeded)
        }
        self._given_up.note_committed(after, record.range.until, succeeded)

    def _distrusted(self, owned: OwnedPartition) -> OwnedPartition:
        self._lookups.want_stored()
        before = owned if owned.ledger is not None else None
        distrusted = replace(
            owned,
            before=before,
            pending=None,
            ledger=None,
            stored=None,
            backlog_since=None,
            seen_since=None,
            letter=None,
        )
        return distrusted.changed(Change.DISTRUSTED)

    def _on_recorded(self, event: events.CommitRecorded, now: float) -> Iterable[commands.Command]:
        partition = event.record.range.topic_partition
        owned = self.partitions.get(partition)
        if owned is not None and owned.unrecorded == event.record:
            recorded = replace(owned, unrecorded=None, recorded_at=None)
            self.partitions[partition] = replace(
                recorded, record_due_at=now + self.settings.record_every_s
            )
        return ()

    def _on_letter(
        self, event: events.DeadLetterStored | events.DeadLetterFailed, now: float
    ) -> Iterable[commands.Command]:
        owned = dead_letters.answered(
            self.partitions.get(event.letter.range.topic_partition),
            event,
            now,
            self.settings.retry_s,
        )
        if owned is not None:
            self.partitions[owned.partition] = owned
            if isinstance(event, events.DeadLetterStored):
                self._lookups.want_runs()
            yield from self._stop_or_go_on(owned)

    # What follows

    def _store_letters(self, now: float) -> Iterable[commands.Command]:
        for owned in self.partitions.busy if self.settings.dead_letter_topic else ():
            letter = dead_letters.due_letter(owned, now, self.settings.retry_s)
            if letter is not None:
                self.partitions[owned.partition] = replace(owned, letter=letter)
                yield letter.command

    def _commit(self, now: float) -> Iterable[commands.Command]:
        writes = []
        for owned in self.partitions.busy:
            pending = owned.pending
            is_stopped_by_it = (
                owned.phase is Phase.STOPPED and pending is not None and pending.refused
            )
            wait_s = self.settings.recheck_s if is_stopped_by_it else self.settings.retry_s
            if pending is not None and now - pending.last_asked_at >= wait_s:
                pending = replace(pending, again_at=now)
            elif pending is None:
                pending = owned.first_write(now) or owned.commit_write(now)
            if pending is not None and pending is not owned.pending:
                self.partitions[owned.partition] = replace(owned, pending=pending)
                writes.append(pending.write)
        return [commands.WriteOffsets(tuple(writes))] if writes else []

    def _record(self, now: float) -> Iterable[commands.Command]:
        for owned in self.partitions.busy:
            record = owned.unrecorded
            if record is None or owned.phase is Phase.RESTORING or not owned.is_record_due(now):
                continue
            if owned.recorded_at is None or now - owned.recorded_at >= self.settings.retry_s:
                self.partitions[owned.partition] = replace(owned, recorded_at=now)
                yield record

    def _claim_again(self, now: float) -> Iterable[commands.Command]:
        if self._streaming.may_write_again(self.partitions.busy):
            wanted = next(iter(self._wanted), None)
            yield from self._streaming.written_again(wanted, self.partitions, now)

    def _claim(self, now: float) -> Iterable[commands.Command]:
        if self.leaving is not None:
            return
        has_ticks = now - self._last_tick_at <= self.settings.plan_patience_s
        if not has_ticks and not self.settings.worker:
            return
        worker = self.settings.worker
        if worker and self.offers:  # what is claimed is begun before anything else is claimed
            return
        retries = not (worker and self._streaming.is_new_next)
        under_way = batches_under_way(self.partitions.busy, now, worker=worker, retries=retries)
        batches = plan(
            [backlog for owned in self.partitions.busy if (backlog := owned.backlog) is not None],
            self.settings.limits,
            runs_in_flight=len(under_way),
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


def _passed_deletion(before: OwnedPartition) -> Iterable[commands.Command]:
    """Show that a partition goes on that looked stopped to others, if it did.

    Its runs had read in time what Kafka deleted, and a look at the whole group cannot know that.
    """
    if before.is_behind_deletion:
        yield commands.ShowStop(before.partition, "")


def _adopted(range_: OffsetRange, batch_id: str, progress: InFlight) -> commands.Note:
    return commands.Note(
        f"adopted {', '.join(progress.run_ids)}, which works on {range_}",
        Occurred.BATCH_ADOPTED,
        {"batch_id": batch_id, "run_ids": progress.run_ids, **range_.fields},
    )

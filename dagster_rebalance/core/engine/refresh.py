"""Refresh: when a member reads stored offsets, directives, runs and log bounds again.

Stopped partitions and delayed ranges are read rarely: a group with a thousand stopped partitions
must not read their runs each second.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from dagster_rebalance.core.model import commands
from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.events import RunsRead
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_MAX_IDLE_PER_READ = 1_000
"""Idle partitions take turns, so a member with many of them does not read all each second."""
_AT_ONCE = float("-inf")
_PARTITION_ORDER = attrgetter("topic", "partition")  # faster than TopicPartition.__lt__
_IDLE_AFTER_S = 3.0


class Refresh:
    """The reads of one member and when they are due."""

    def __init__(self, settings: EngineSettings, partitions: AssignedPartitions) -> None:
        self._settings = settings
        self._partitions = partitions
        self._look = 0
        self._runs_at = self._all_runs_at = self._bounds_at = self._stored_at = _AT_ONCE
        self._busy_at = self._directives_at = _AT_ONCE
        self._is_busy = False

    def read_directives(self) -> None:
        """Read the directives at once: they are unknown for new partitions."""
        self._directives_at = _AT_ONCE

    def read_stored_offsets(self) -> None:
        """Read the stored offsets of restoring partitions at once."""
        self._stored_at = _AT_ONCE

    def read_runs(self) -> None:
        """Read all runs at once, and ignore the result of earlier reads."""
        self._look += 1
        self._runs_at = _AT_ONCE

    def is_stale(self, event: RunsRead) -> bool:
        """Whether the runs were read before the last call of `read_runs`."""
        return event.sequence is not None and event.sequence < self._look

    def due(
        self,
        followed: frozenset[str],
        now: float,
        *,
        epoch: int,
        directives_epoch: int,
        is_holding: bool,
        is_leaving: bool,
    ) -> Iterable[commands.Command]:
        """Return the reads that are due.

        `followed` are batches whose runs are read although no claim names them. The directives are
        known up to `directives_epoch`.
        """
        owned = self._partitions.busy
        if self._partitions and now - self._directives_at >= self._directives_interval_s(
            owned, directives_epoch
        ):
            self._directives_at = now
            yield commands.ReadDirectives(epoch)
        unread = {
            o.partition: o.epoch for o in owned if o.phase is Phase.RESTORING and o.ledger is None
        }
        if unread and now - self._stored_at >= self._settings.retry_s:
            self._stored_at = now
            yield commands.ReadStoredOffsets(unread)
        if now - self._runs_at >= self._runs_interval_s(owned, is_holding=is_holding):
            yield from self._runs(owned, followed, now)
        self._is_busy = any(
            (o.entries and o.directive is None) or o.live_runs or o.has_backlog for o in owned
        )
        self.stay(now)
        if not is_leaving:
            yield from self._bounds(owned, now)

    def stay(self, now: float) -> None:
        """Note that the state has not changed up to a time."""
        if self._is_busy:
            self._busy_at = now

    def next_due(self, now: float, *, directives_epoch: int) -> Iterable[float]:
        """Yield the times at which reads are due if no event changes the state.

        A time may be too early. A time in the past stands for a read that waits for an event. The
        member must neither hold partitions nor be leaving.
        """
        owned, settings = self._partitions.busy, self._settings
        if self._partitions:
            yield self._directives_at + self._directives_interval_s(owned, directives_epoch)
        yield self._stored_at + settings.retry_s
        yield self._runs_at + self._runs_interval_s(owned, is_holding=False)
        yield self._all_runs_at + settings.recheck_s
        yield self._bounds_at + self._bounds_interval_s(now)

    def _directives_interval_s(
        self, owned: Iterable[OwnedPartition], directives_epoch: int
    ) -> float:
        is_known = all(o.epoch <= directives_epoch for o in owned if o.phase is Phase.RESTORING)
        return self._settings.directives_s if is_known else self._settings.retry_s

    def _runs_interval_s(self, owned: Iterable[OwnedPartition], *, is_holding: bool) -> float:
        """Shorter while a hold, or a partition with more records, waits for the end of a run."""
        if is_holding:
            return self._settings.poll_s / 4
        has_more = any(o.has_backlog and o.phase is Phase.OWNED for o in owned)
        return self._settings.poll_s / 2 if has_more else self._settings.poll_s

    def _runs(
        self, owned: Sequence[OwnedPartition], followed: frozenset[str], now: float
    ) -> Iterable[commands.Command]:
        restoring = any(o.phase is Phase.RESTORING and o.ledger is not None for o in owned)
        recheck_s = self._settings.recheck_s
        is_complete = self._runs_at == _AT_ONCE or now - self._all_runs_at >= recheck_s
        # An operator may have re-executed a run shortly before the next attempt is due.
        soon = now + recheck_s
        batch_ids = followed.union(
            batch_id
            for o in owned
            for e in o.entries
            if is_complete or not o.is_quiet(e, soon)
            for batch_id in e.batch_ids
        )
        self._all_runs_at = now if is_complete else self._all_runs_at
        if not (batch_ids or restoring):
            return
        self._runs_at = now
        claims = frozenset(
            (batch_id, e.range)
            for o in owned
            for e in o.entries
            for batch_id in e.batch_ids
            if batch_id in batch_ids
        )
        others = {
            batch_id
            for o in owned
            for e in o.known_entries
            for batch_id in (e.batch_ids if not e.is_own else e.batch_ids[1:])
        }
        own = (batch_ids - others - followed) if self._settings.worker else frozenset()
        yield commands.ReadRuns(batch_ids, restoring, self._look, claims, own)

    def _bounds(self, owned: Sequence[OwnedPartition], now: float) -> Iterable[commands.Command]:
        if now - self._bounds_at < self._bounds_interval_s(now):
            return
        readable = [
            *(o.partition for o in owned if o.ledger is not None),
            *self._partitions.next_idle(_MAX_IDLE_PER_READ),
        ]
        if readable:
            self._bounds_at = now
            yield commands.ReadBounds(tuple(sorted(readable, key=_PARTITION_ORDER)))

    def _bounds_interval_s(self, now: float) -> float:
        is_idle = now - self._busy_at >= _IDLE_AFTER_S
        return self._settings.idle_bounds_s if is_idle else self._settings.bounds_s


def due_times(owned: OwnedPartition, settings: EngineSettings) -> Iterable[float]:
    """Yield when time alone can change a decision about a partition; passed times do not count."""
    if owned.pending is not None:
        yield owned.pending.last_sent_at + settings.retry_s
        yield owned.pending.last_sent_at + settings.recheck_s
    if owned.unrecorded is not None:
        yield owned.record_due_at
        if owned.recorded_at is not None:
            yield owned.recorded_at + settings.retry_s
    if owned.dead_letter is not None:
        yield owned.dead_letter.due_at
    if owned.backlog_since is not None:
        seen_since = owned.backlog_since if owned.seen_since is None else owned.seen_since
        yield min(owned.backlog_since, seen_since) + settings.limits.max_wait_s
    for entry in owned.entries:
        yield entry.due_at
        yield entry.due_at - settings.recheck_s  # its runs are read again

"""Schedules the reads of a member: stored offsets, directives, runs and log bounds.

The runs of stopped partitions and delayed ranges are read rarely: a group with a thousand stopped
partitions must not read their runs each second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model import commands
from dagster_rebalance.core.partitions.assigned import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.events import RunsRead
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_MAX_IDLE_PER_READ = 1_000
"""The maximum number of idle partitions per request for bounds; they take turns."""
_MAX_RESTORED_PER_READ = 500
"""The maximum number of partitions whose stored offsets are read at once. The member claims records
of the first partitions while it restores the others."""
_RUNS_PATIENCE = 5
"""How much longer than `retry_s` the next partitions wait for the runs of the last ones."""
_AT_ONCE = float("-inf")
_NO_EPOCH = 0
_IDLE_AFTER_S = 3.0
_AT_WORK_S = 2.0


class Refresh:
    """The reads of one member and when they are due."""

    def __init__(self, settings: EngineSettings, partitions: AssignedPartitions) -> None:
        self._settings = settings
        self._partitions = partitions
        self._sequence = 0
        self._runs_at = self._all_runs_at = self._bounds_at = self._stored_at = _AT_ONCE
        self._busy_at = self._directives_at = _AT_ONCE
        self._stored_up_to, self._stored_asked = _NO_EPOCH, 0
        self._is_stored_read = self._has_silent_leader = False
        self._is_member_busy = self._is_at_work = self._awaits_bounds = False

    def read_directives(self) -> None:
        """Read the directives at once: they are unknown for new partitions."""
        self._directives_at = _AT_ONCE

    def read_stored_offsets(self) -> None:
        """Read the stored offsets of all restoring partitions at once."""
        self._stored_at, self._stored_up_to = _AT_ONCE, _NO_EPOCH

    def stored_offsets_were_read(self, found: int) -> None:
        """Note that a read of stored offsets was answered: the next partitions may follow.

        An answer lacks the partitions of a silent leader. Each read would wait for that leader, and
        the rest is read at once.
        """
        self._is_stored_read = True
        self._has_silent_leader = found < self._stored_asked

    def read_runs(self) -> None:
        """Read all runs at once, and ignore the result of earlier reads."""
        self._sequence += 1
        self._runs_at = _AT_ONCE

    def bounds_were_read(self) -> None:
        """Note that the bounds of logs were read."""
        self._awaits_bounds = False

    def awaits_bounds(self, now: float) -> bool:
        """Whether bounds are being read now: the next claim covers all records up to them.

        If the read fails, claims continue with the earlier bounds.
        """
        return self._awaits_bounds and self._bounds_at == now

    def is_stale(self, event: RunsRead) -> bool:
        """Whether the runs were read before the last call of `read_runs`."""
        return event.sequence is not None and event.sequence < self._sequence

    def due(
        self,
        followed: frozenset[str],
        now: float,
        *,
        epoch: int,
        directives_epoch: int,
        is_holding: bool,
        is_leaving: bool,
        is_at_work: bool,
    ) -> Iterable[commands.Command]:
        """Yield the due reads and mark them as sent; consume it fully.

        While a batch of the worker is at work (`is_at_work`), the ends of logs are read seldom,
        because no claim follows. The runs of the batches in `followed` are read although no claim
        names them. `epoch`: the newest assignment; `directives_epoch`: the newest one that the last
        read of directives covers.
        """
        if self._partitions and now - self._directives_at >= self._directives_interval_s(
            epoch, directives_epoch
        ):
            self._directives_at = now
            yield commands.ReadDirectives(epoch)
        restoring = self._partitions.restoring(is_read=True)
        yield from self._stored_offsets(restoring, now)
        if now - self._runs_at >= self._runs_interval_s(is_holding=is_holding):
            yield from self._runs(followed, now, restoring=bool(restoring))
        self._is_at_work = is_at_work
        self._is_member_busy = self._partitions.has(Role.ACTIVE)
        self.note_unchanged(now)
        if not is_leaving:
            yield from self._bounds(now)

    def _stored_offsets(
        self, restoring: list[OwnedPartition], now: float
    ) -> Iterable[commands.Command]:
        """Yield the read of the next stored offsets.

        The next ones follow once the runs of the last ones are known (`restoring`): the result of a
        read of runs that began before a read of stored offsets is ignored.
        """
        follows = self._is_stored_read and all(o.blocked_by for o in restoring)
        is_due = now - self._stored_at >= self._settings.retry_s
        if not (follows or is_due):  # of thousands of partitions, not in each decision
            return
        unread = self._partitions.restoring(is_read=False)
        later = [o for o in unread if o.epoch > self._stored_up_to]
        if later and self._is_stored_read and not follows:
            is_due = now - self._stored_at >= _RUNS_PATIENCE * self._settings.retry_s
        if not (follows or is_due):
            return
        most = None if self._has_silent_leader else _MAX_RESTORED_PER_READ
        part = (later or (unread if is_due else []))[:most]
        self._is_stored_read = False
        if part:
            self._stored_at, self._stored_up_to = now, part[-1].epoch
            self._stored_asked = len(part)
            yield commands.ReadStoredOffsets({o.partition: o.epoch for o in part})

    def note_unchanged(self, now: float) -> None:
        """Extend the time of the last activity if the member was busy at the last `due`."""
        if self._is_member_busy:
            self._busy_at = now

    def next_due(self, now: float, *, epoch: int, directives_epoch: int) -> Iterable[float]:
        """Yield the times at which reads are due if no event changes the state.

        Times may be too early, or in the past: ignore those. Do not call while partitions are held
        or the member is leaving.
        """
        settings = self._settings
        if self._partitions:
            yield self._directives_at + self._directives_interval_s(epoch, directives_epoch)
        yield self._stored_at + settings.retry_s
        yield self._runs_at + self._runs_interval_s(is_holding=False)
        yield self._all_runs_at + settings.recheck_s
        yield self._bounds_at + self._bounds_interval_s(now)

    def _directives_interval_s(self, epoch: int, directives_epoch: int) -> float:
        is_known = epoch <= directives_epoch
        return self._settings.directives_s if is_known else self._settings.retry_s

    def _runs_interval_s(self, *, is_holding: bool) -> float:
        """Return the interval: shorter in a hold, or while a partition has unclaimed records.

        A worker reports its results without a read, so its unclaimed records wait for no read.
        """
        if is_holding:
            return self._settings.poll_s / 4
        waits = self._partitions.has(Role.MORE) and not self._settings.worker
        return self._settings.poll_s / 2 if waits else self._settings.poll_s

    def _runs(
        self, followed: frozenset[str], now: float, *, restoring: bool
    ) -> Iterable[commands.Command]:
        owned = self._partitions.of(Role.CLAIMED)
        recheck_s = self._settings.recheck_s
        is_complete = self._runs_at == _AT_ONCE or now - self._all_runs_at >= recheck_s
        # Runs are read again `recheck_s` before the next attempt: an operator may have re-executed
        # one.
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
        others = {e.previous_batch_id for o in owned for e in o.known_entries}
        others |= {e.batch_id for o in owned for e in o.known_entries if not e.is_own}
        own = (batch_ids - others - followed) if self._settings.worker else frozenset()
        yield commands.ReadRuns(
            batch_ids,
            with_live=restoring,
            sequence=self._sequence,
            claims=claims,
            worker_batch_ids=own,
        )

    def _bounds(self, now: float) -> Iterable[commands.Command]:
        if now - self._bounds_at < self._bounds_interval_s(now):
            return
        readable = self._partitions.readable(_MAX_IDLE_PER_READ)
        if readable:
            self._bounds_at, self._awaits_bounds = now, True
            yield commands.ReadBounds(readable)

    def _bounds_interval_s(self, now: float) -> float:
        if self._is_at_work:
            return max(_AT_WORK_S, self._settings.bounds_s)
        is_idle = now - self._busy_at >= _IDLE_AFTER_S
        return self._settings.idle_bounds_s if is_idle else self._settings.bounds_s

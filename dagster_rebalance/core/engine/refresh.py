"""What a member looks up again, and when: stored offsets, orders, runs, and bounds of the log.

Owns how often Kafka and Dagster are asked. What waits for a person, or for a time that has not
come, is asked for seldom: a group of which a thousand partitions are stopped must not read their
runs each second.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from dagster_rebalance.core.model import commands
from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.batches.settings import EngineSettings
    from dagster_rebalance.core.model.events import RunsRead
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_IDLE_READ = 1_000
"""So many idle partitions are asked for news at a time, so that a member with very many has not to
ask for all each second."""
_AT_ONCE = float("-inf")
_IN_ORDER = attrgetter("topic", "partition")
"""As partitions are ordered, without a call for each comparison."""
_IDLE_AFTER_S = 3.0


class Refresh:
    """Says which questions are due.

    Args:
        settings: How often.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._look = 0
        self._runs_at = self._quiet_at = self._bounds_at = self._stored_at = _AT_ONCE
        self._busy_at = self._orders_at = _AT_ONCE

    def want_orders(self) -> None:
        """Read the orders of people at once: they are not known for what was assigned just now."""
        self._orders_at = _AT_ONCE

    def want_stored(self) -> None:
        """Read the stored offsets of what is taken in at once."""
        self._stored_at = _AT_ONCE

    def want_runs(self) -> None:
        """Read all runs at once; what was read before says nothing about now."""
        self._look += 1
        self._runs_at = _AT_ONCE

    def is_stale(self, event: RunsRead) -> bool:
        """Whether the runs were read before they were wanted."""
        return event.look is not None and event.look < self._look

    def due(
        self,
        partitions: AssignedPartitions,
        followed: frozenset[str],
        now: float,
        *,
        epoch: int,
        ordered_epoch: int,
        holds: bool,
        leaves: bool,
    ) -> Iterable[commands.Command]:
        """The questions that are due.

        Args:
            partitions: What the member owns.
            followed: Batches whose runs are wanted although no claim names them.
            now: On the member's clock.
            epoch: The newest epoch.
            ordered_epoch: Up to this epoch it is known what people have ordered.
            holds: Whether a hold waits for runs.
            leaves: Whether the member claims nothing any more.
        """
        settings = self._settings
        owned = partitions.busy
        are_orders_known = all(
            o.epoch <= ordered_epoch for o in owned if o.phase is Phase.RESTORING
        )
        orders_s = settings.orders_s if are_orders_known else settings.retry_s
        if partitions and now - self._orders_at >= orders_s:
            self._orders_at = now
            yield commands.ReadDirectives(epoch)
        unread = {
            o.partition: o.epoch for o in owned if o.phase is Phase.RESTORING and o.ledger is None
        }
        if unread and now - self._stored_at >= settings.retry_s:
            self._stored_at = now
            yield commands.ReadStoredOffsets(unread)
        restoring = any(o.phase is Phase.RESTORING and o.ledger is not None for o in owned)
        if now - self._runs_at >= self._runs_wait_s(owned, holds=holds):
            is_complete = self._runs_at == _AT_ONCE or now - self._quiet_at >= settings.recheck_s
            # Not up to the time at which a run is due: a person may have begun one a moment before.
            soon = now + settings.recheck_s
            wanted = [
                batch_id
                for o in owned
                for e in o.entries
                if is_complete or not o.is_quiet(e, soon)
                for batch_id in e.looked_up_as
            ]
            batch_ids = followed.union(wanted)
            self._quiet_at = now if is_complete else self._quiet_at
            if batch_ids or restoring:
                self._runs_at = now
                claims = frozenset(
                    (batch_id, e.range)
                    for o in owned
                    for e in o.entries
                    for batch_id in e.looked_up_as
                    if batch_id in batch_ids
                )
                others = {
                    batch_id
                    for o in owned
                    for e in o.known_entries
                    for batch_id in (e.looked_up_as if not e.is_own else e.looked_up_as[1:])
                }
                own = (batch_ids - others - followed) if settings.worker else frozenset()
                yield commands.ReadRuns(batch_ids, restoring, self._look, claims, own)
        if any((o.entries and o.order is None) or o.live_runs or o.has_more for o in owned):
            self._busy_at = now
        is_idle = now - self._busy_at >= _IDLE_AFTER_S
        look_s = settings.idle_look_s if is_idle else settings.look_s
        if not leaves and now - self._bounds_at >= look_s:
            readable = [
                *(o.partition for o in owned if o.ledger is not None),
                *partitions.next_idle(_IDLE_READ),
            ]
            if readable:
                self._bounds_at = now
                yield commands.ReadBounds(tuple(sorted(readable, key=_IN_ORDER)))

    def _runs_wait_s(self, owned: Iterable[OwnedPartition], *, holds: bool) -> float:
        """Return how many seconds a look at the runs is good for.

        The time is shorter while a hold or a partition with more records waits for one of them to
        end.
        """
        if holds:
            return self._settings.poll_s / 4
        has_more = any(o.has_more and o.phase is Phase.OWNED for o in owned)
        return self._settings.poll_s / 2 if has_more else self._settings.poll_s

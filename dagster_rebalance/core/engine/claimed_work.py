"""Claimed work: the runs that a member's claims need, computed once for each state of the claims.

A turn of the member loop reads the result several times. It changes with the claims, their progress
and the directives, and when a delayed range becomes due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.engine.run_requests import due_requests, runs_in_flight
from dagster_rebalance.core.partitions.assigned import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition


class ClaimedWork:
    """The claims of one member.

    Attributes:
        partitions: The partitions with claims, in the order of their epochs.
    """

    def __init__(self, settings: EngineSettings, partitions: AssignedPartitions) -> None:
        self._settings = settings
        self._assigned = partitions
        self.partitions: list[OwnedPartition] = []
        self._version = -1
        self._until = float("inf")
        self._batch_ids: frozenset[str] | None = None
        self._requests: tuple[Sequence[Directive], tuple[BatchRequest, ...]] | None = None
        self._in_flight: dict[bool, frozenset[str]] = {}

    def look(self, now: float) -> None:
        """Drop the results that changes since the last call have made outdated."""
        if self._assigned.claims_version != self._version:
            self._version = self._assigned.claims_version
            self.partitions = self._assigned.of(Role.CLAIMED)
            self._batch_ids = None
        elif now < self._until:
            return
        self._requests, self._in_flight = None, {}
        due = (entry.due_at for owned in self.partitions for entry in owned.entries)
        self._until = min((at for at in due if at > now), default=float("inf"))

    def batch_ids(self, now: float) -> frozenset[str]:
        """Return the ids of all claims."""
        self.look(now)
        if self._batch_ids is None:
            self._batch_ids = frozenset(
                entry.batch_id for owned in self.partitions for entry in owned.known_entries
            )
        return self._batch_ids

    def requests(self, now: float, directives: Sequence[Directive]) -> tuple[BatchRequest, ...]:
        """Return the runs to request now."""
        self.look(now)
        if self._requests is None or self._requests[0] is not directives:
            requests = due_requests(
                self.partitions,
                now,
                max_runs=self._settings.limits.max_runs_in_flight,
                max_attempts=self._settings.max_attempts,
                directives=directives,
                worker=self._settings.worker,
            )
            self._requests = (directives, requests)
        return self._requests[1]

    def in_flight(self, now: float, *, retries: bool) -> frozenset[str]:
        """Return what counts towards the limit of runs in flight."""
        self.look(now)
        if retries not in self._in_flight:
            self._in_flight[retries] = runs_in_flight(
                self.partitions, now, worker=self._settings.worker, retries=retries
            )
        return self._in_flight[retries]

"""Cancellation of runs on partitions that an operator has paused or stopped.

Requests for the same run are repeated at growing intervals: a launcher may be unable to reach the
run, and each request adds two events to its log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.commands import CancelRuns
from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_MAX_INTERVAL_S = 60.0


class DirectiveCancels:
    """The requested cancellations. The first one is repeated after `retry_s` seconds."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._repeats: dict[str, tuple[float, float]] = {}  # run id: due at, next interval

    @property
    def next_due(self) -> float:
        """When the first request is repeated."""
        return min((at for at, _ in self._repeats.values()), default=float("inf"))

    def due(self, partitions: Iterable[OwnedPartition], now: float) -> Iterable[CancelRuns]:
        """Cancel all runs of stopped partitions, and the unstarted runs of paused partitions."""
        unwanted: dict[Directive, set[str]] = {}
        for owned in partitions:
            if owned.directive is not None:
                unwanted.setdefault(owned.directive, set()).update(
                    _unwanted(owned, owned.directive)
                )
        known = {run_id for run_ids in unwanted.values() for run_id in run_ids}
        self._repeats = {run_id: at for run_id, at in self._repeats.items() if run_id in known}
        for directive, run_ids in unwanted.items():
            due = sorted(run_id for run_id in run_ids if self._is_due(run_id, now))
            is_again = all(run_id in self._repeats for run_id in due)
            for run_id in due:
                interval_s = self._repeats.get(run_id, (now, self._retry_s))[1]
                self._repeats[run_id] = (now + interval_s, min(2 * interval_s, _MAX_INTERVAL_S))
            if due:
                yield CancelRuns(
                    tuple(due),
                    f"{directive.partitions} was {directive}",
                    only_unstarted=directive.action is not Action.STOP,
                    is_again=is_again,
                    is_for_directive=True,
                )

    def _is_due(self, run_id: str, now: float) -> bool:
        return run_id not in self._repeats or now >= self._repeats[run_id][0]


def _unwanted(owned: OwnedPartition, directive: Directive) -> Iterable[str]:
    is_restoring = owned.phase is Phase.RESTORING
    if directive.action is not Action.STOP:
        return () if is_restoring else owned.unstarted_runs
    # A run may work on the partition without a claim.
    return owned.blocked_by if is_restoring else owned.live_runs

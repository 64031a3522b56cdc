"""What is cancelled because people have paused or stopped partitions.

Owns how often Dagster is asked for it. That becomes less and less often while a run does not end:
a launcher may not reach it at all, and each time costs two events in the log of the run.
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

_LONGEST_WAIT_S = 60.0


class DirectiveCancels:
    """Which runs were asked to end, and when they are asked again.

    Args:
        retry_s: Seconds until a run is asked for the second time.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._again: dict[str, tuple[float, float]] = {}

    def due(self, partitions: Iterable[OwnedPartition], now: float) -> Iterable[CancelRuns]:
        """Cancel what people have stopped, and what has not started of what they have paused."""
        unwanted: dict[Directive, set[str]] = {}
        for owned in partitions:
            if owned.order is not None:
                unwanted.setdefault(owned.order, set()).update(_unwanted(owned, owned.order))
        known = {run_id for run_ids in unwanted.values() for run_id in run_ids}
        self._again = {run_id: again for run_id, again in self._again.items() if run_id in known}
        for order, run_ids in unwanted.items():
            due = sorted(run_id for run_id in run_ids if self._is_due(run_id, now))
            is_again = all(run_id in self._again for run_id in due)
            for run_id in due:
                self._ask_again(run_id, now)
            if due:
                reason = f"{order.partitions} was {order}"
                only_unstarted = order.action is not Action.STOP
                yield CancelRuns(
                    tuple(due),
                    reason,
                    only_unstarted=only_unstarted,
                    is_again=is_again,
                    is_ordered=True,
                )

    def _is_due(self, run_id: str, now: float) -> bool:
        return run_id not in self._again or now >= self._again[run_id][0]

    def _ask_again(self, run_id: str, now: float) -> None:
        wait_s = self._again[run_id][1] if run_id in self._again else self._retry_s
        self._again[run_id] = (now + wait_s, min(2 * wait_s, _LONGEST_WAIT_S))


def _unwanted(owned: OwnedPartition, order: Directive) -> Iterable[str]:
    """The runs of a partition that must not go on, or not begin."""
    if order.action is not Action.STOP:
        return () if owned.phase is Phase.RESTORING else owned.unstarted_runs
    # Before a partition is taken in, it is known what works on it without a claim.
    return owned.blocked_by if owned.phase is Phase.RESTORING else owned.live_runs

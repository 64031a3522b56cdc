"""The search for finished runs that late records of commits name.

Such a record only has ranges in sum. `dagster-rebalance rerun` reads their bounds in the events of
the run, so the run stays while Kafka has the records. The next owner of a partition makes the
record after the run has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.operators.prune_runs import FinishedRun

CLOCKS_DIFFER_S = 60.0
LATE_WITHIN_S = 3 * 86_400.0
"""The next owner of a partition records the last commits of a run within this time of the first
record after its end. With thousands of partitions, these records wait for the budget of the group.
"""


class CommitRecord(NamedTuple):
    """When a commit was recorded, and the run that it needs; empty if it needs none."""

    at: float
    needs: str = ""


class LateSearch:
    """Reads the records of a group in pages, in the order in which they were made.

    Args:
        runs: The runs to search.
        most: The limit of records that are read once a run was found that none needs. Before, the
            search goes on: the next search would begin with the same runs.
    """

    def __init__(self, runs: Iterable[FinishedRun], most: int) -> None:
        self.left = sorted(runs, key=lambda run: run.ended_at)
        """The runs that are not decided."""
        self.needed: set[str] = set()
        self._most = most
        self._has_unneeded = False
        self._continued: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether no more records are to be read."""
        return not self.left or self._most <= 0

    @property
    def after(self) -> float:
        """The time after which the records of the runs that are left were made."""
        return max(0.0, self.left[0].ended_at - CLOCKS_DIFFER_S)

    def add(self, page: Sequence[CommitRecord]) -> None:
        """Add the next records.

        A clock that is ahead closes no search: all records of a page are later.
        """
        if self._has_unneeded:
            self._most -= len(page)
        self.needed |= {record.needs for record in page} - {""}
        times = sorted(record.at for record in page)
        self.left = [run for run in self.left if self._is_left(run, times)]

    def _is_left(self, run: FinishedRun, times: Sequence[float]) -> bool:
        if run.run_id in self.needed:
            return False
        following = bisect_right(times, run.ended_at)
        if following < len(times):
            self._continued.setdefault(run.run_id, times[following])
        until = self._continued.get(run.run_id, inf) + LATE_WITHIN_S
        is_left = not times or times[0] < until
        self._has_unneeded |= not is_left
        return is_left

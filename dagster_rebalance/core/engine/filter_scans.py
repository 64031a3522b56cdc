"""Filter scans: which new records a member compares with the filter of its group, and the results.

Before a range is claimed, the member searches it for a record that the filter processes. Without
one, it commits the range without a run. It claims nothing for a scan, so a revoke or a pause needs
no wait, and after a crash the next owner scans again. A range is scanned when its batch would be
claimed, up to the end of the longest possible range. If a scan fails or has no answer, the range is
claimed, and its run applies the filter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import is_ready, range_of
from dagster_rebalance.core.model.commands import ScanRanges
from dagster_rebalance.core.partitions.assigned import Role
from dagster_rebalance.core.partitions.owned import FilterScan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.batches.planning import BatchLimits
    from dagster_rebalance.core.model.events import RangesScanned
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition

SCAN_PATIENCE_S = 90.0
"""A scan reads for at most a third of this time."""
_MOST_SCANS = 3
"""An unavailable leader delays the partitions of its scan only."""


class FilterScans:
    """The scans of one member.

    Attributes:
        is_on: Whether the group has a filter, and its ranges are scanned before they are claimed.
    """

    def __init__(self, limits: BatchLimits, partitions: AssignedPartitions, *, is_on: bool) -> None:
        self.is_on = is_on
        self._limits = limits
        self._partitions = partitions
        self._number = 0

    def claimable(self) -> list[OwnedPartition]:
        """Return the partitions from which a batch may be claimed."""
        more = self._partitions.of(Role.MORE)
        if not self.is_on:
            return more
        return [owned for owned in more if owned.scan is not None and owned.scan.has_hit]

    def due(self, now: float) -> Iterable[ScanRanges]:
        """Begin a scan of the ranges that would be claimed now."""
        if not self.is_on:
            return
        more, ranges = self._partitions.of(Role.MORE), []
        in_progress = {owned.scan.number for owned in more if owned.scan and owned.scan.is_running}
        for owned in more:
            scan, backlog = owned.scan, owned.backlog
            if scan is not None and scan.is_running and now - scan.since >= SCAN_PATIENCE_S:
                self._partitions[owned.partition] = owned._replace(scan=scan._replace(has_hit=True))
            if scan is not None or backlog is None or len(in_progress) >= _MOST_SCANS:
                continue
            if is_ready(backlog, self._limits, now):
                range_ = range_of(backlog, self._limits)
                ranges.append(range_)
                running = FilterScan(self._number + 1, range_.until, now)
                self._partitions[owned.partition] = owned._replace(scan=running)
        if ranges:
            self._number += 1
            yield ScanRanges(self._number, tuple(ranges))

    def apply(self, event: RangesScanned) -> None:
        """Apply results. Those of a scan that has become pointless change nothing."""
        for range_, has_hit in event.results:
            owned = self._partitions.get(range_.topic_partition)
            scan = None if owned is None else owned.scan
            if owned is None or scan is None or scan.number != event.number:
                continue
            # A scan that ran out of time has results up to an earlier offset.
            ended = scan._replace(until=range_.until, has_hit=has_hit)
            self._partitions[owned.partition] = owned._replace(scan=ended)

    def leave_out(self, due: Iterable[TopicPartition]) -> None:
        """Complete the scanned ranges without a hit, to be committed next.

        In a paused partition they wait, and behind claimed ranges, too: a range that no run
        processes has no claim.
        """
        for owned in self._partitions.known(due):
            scan, backlog = owned.scan, owned.backlog
            if scan is None or scan.has_hit is not False or backlog is None or owned.entries:
                continue
            self._partitions[owned.partition] = owned.left_out(scan.until)

"""Scans of new records for the filter of a group, beside the member loop.

Each scan reads in its own thread, because it may take longer than a turn of the loop. It keeps no
record, and commits nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_rebalance.core.engine.filter_scans import SCAN_PATIENCE_S
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.model.events import RangesScanned
from dagster_rebalance.core.model.offsets import next_offset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.core.batches.record_filter import RecordPredicate
    from dagster_rebalance.core.model.commands import ScanRanges
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.kafka.reading.range_reader import RangeReader

logger = logging.getLogger(__name__)
_FIRST_PART, _GROWTH = 500, 4
"""A range is read in parts, because a read cannot drop a partition after its first hit."""
_TIMEOUT_S = 5.0
"""How long a silent leader delays the other partitions of its scan."""
_LIMIT_S = SCAN_PATIENCE_S / 3


class FilterScanner:
    """The scans of one member.

    Args:
        only: The filter of the group.
        reader: Reads the records. The scanner closes it.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        only: RecordPredicate,
        reader: RangeReader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._only = only
        self._reader = reader
        self._clock = clock
        self._answers: deque[RangesScanned] = deque()
        self._is_closed = False

    def begin(
        self,
        scan: ScanRanges,
        start: Callable[[str, Callable[[], None]], None],
        wake: Callable[[], None],
    ) -> None:
        """Begin a scan in a thread, which `start` starts. `wake` is called after each answer."""
        start(f"filter scan {scan.number}", partial(self._scan, scan, wake))

    def answers(self) -> Iterator[RangesScanned]:
        """Take the answers so far."""
        while self._answers:
            yield self._answers.popleft()

    def close(self) -> None:
        """End all scans: each stops at its next record."""
        self._is_closed = True
        self._reader.close()

    # Thread of a scan

    def _scan(self, scan: ScanRanges, wake: Callable[[], None]) -> None:
        left = {range_: range_ for range_ in scan.ranges}
        try:
            for results in self._results(left):
                if results:
                    self._answers.append(RangesScanned(scan.number, tuple(results)))
                    wake()
        except Exception as error:  # noqa: BLE001 - the runs of the ranges report it
            level = logging.INFO if isinstance(error, DagsterRebalanceError) else logging.WARNING
            logger.log(level, "a filter scan failed, and runs read its ranges: %s", error)
        if left and not self._is_closed:
            unread = tuple((range_, True) for range_ in left)
            self._answers.append(RangesScanned(scan.number, unread))
            wake()

    def _results(
        self, left: dict[OffsetRange, OffsetRange]
    ) -> Iterator[list[tuple[OffsetRange, bool]]]:
        """Yield results, and remove their ranges from `left`, which has the unread rest of each."""
        limit_at, size = self._clock() + _LIMIT_S, _FIRST_PART
        is_over = False
        while left and not (is_over or self._is_closed):
            parts = [
                replace(rest, until=min(rest.until, rest.start + size)) for rest in left.values()
            ]
            hits, reached = self._read(parts, limit_at)
            is_over = self._clock() >= limit_at
            results = []
            for whole, part in zip(tuple(left), parts, strict=True):
                until = reached[part]
                if part in hits:
                    results.append((whole, True))
                elif until == whole.until or (is_over and until > whole.start):
                    results.append((replace(whole, until=until), False))
                else:
                    left[whole] = replace(whole, start=until)
                    continue
                del left[whole]
            yield results
            size *= _GROWTH

    def _read(
        self, parts: list[OffsetRange], limit_at: float
    ) -> tuple[set[OffsetRange], dict[OffsetRange, int]]:
        """Return the parts with a record that the filter processes, and the next offset of each."""
        of = {(part.topic, part.partition): part for part in parts}
        hits: set[OffsetRange] = set()
        reached = {part: part.start for part in parts}
        for messages in self._reader.read_lists(parts, _TIMEOUT_S):
            for message in messages:
                part = of[message.topic() or "", message.partition() or 0]
                reached[part] = next_offset(message.offset() or 0)
                if part not in hits and self._only.passes(message):
                    hits.add(part)
            if len(hits) == len(parts) or self._is_closed or self._clock() >= limit_at:
                return hits, reached
        return hits, {part: part.until for part in parts}

"""Records of commits on their way to the storage thread.

The member adds records; the storage thread takes those of several partitions at once, and stores
one after the other. Until a record is being stored, it can be cancelled: the next owner of a lost
partition records it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.offsets import OffsetRange

_MOST_AT_ONCE = 100
"""Other jobs of the storage thread wait for a job, so it stores a limited number."""


class TakenRecords:
    """The records of one job.

    Attributes:
        commits: The records, in order.
    """

    def __init__(self, commits: Iterable[RecordCommit] = ()) -> None:
        self.commits = tuple(commits)
        self._wanted = {commit.range for commit in self.commits}

    def is_wanted(self, commit: RecordCommit) -> bool:
        """Return whether a record is not cancelled. Ask immediately before you store it."""
        return commit.range in self._wanted

    def cancel(self, ranges: Iterable[OffsetRange]) -> None:
        """Cancel the records with these ranges."""
        self._wanted.difference_update(ranges)

    def cancel_all(self) -> None:
        """Cancel all records."""
        self._wanted.clear()


class QueuedRecords:
    """The records of one member that the storage thread has not stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[OffsetRange, RecordCommit] = {}
        self._taken = TakenRecords()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, commits: Iterable[RecordCommit]) -> None:
        """Add records at the end; one with the same range replaces an earlier one."""
        with self._lock:
            for commit in commits:
                self._waiting.pop(commit.range, None)
                self._waiting[commit.range] = commit

    def cancel(self, commits: Iterable[RecordCommit]) -> None:
        """Remove records, also taken ones."""
        ranges = [commit.range for commit in commits]
        with self._lock:
            for range_ in ranges:
                self._waiting.pop(range_, None)
            self._taken.cancel(ranges)

    def clear(self) -> None:
        """Remove all records, also taken ones."""
        with self._lock:
            self._waiting.clear()
            self._taken.cancel_all()

    def take(self) -> TakenRecords:
        """Return, and remove, the records that were added first (storage thread).

        Records that were taken before and are not stored yet are cancelled: the thread that took
        them hangs, and the member adds them again.

        Consecutive records of one partition are taken together. Otherwise the later one may be
        stored while the earlier one failed, and the next owner takes all commits before the last
        record for recorded.
        """
        with self._lock:
            waiting = list(self._waiting.values())
            most = min(_MOST_AT_ONCE, len(waiting))
            while 0 < most < len(waiting) and _is_same_partition(*waiting[most - 1 : most + 1]):
                most += 1
            for commit in waiting[:most]:
                del self._waiting[commit.range]
            self._taken.cancel_all()
            self._taken = TakenRecords(waiting[:most])
            return self._taken


def _is_same_partition(first: RecordCommit, second: RecordCommit) -> bool:
    return first.range.topic_partition == second.range.topic_partition

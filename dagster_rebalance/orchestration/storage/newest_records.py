"""The newest records of the offsets asset, cached by one process.

A record of a commit may be requested again after it was stored, or by two members, so the newest
records are read before a record is written. The process caches the newest record of each partition,
and reads only later records: one query serves all partitions, however many records the group has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.orchestration.storage.commit_history import commits_in, metadata_of, newest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.offsets import TopicPartition

_RECORDS_PER_QUERY = 1_000
_PARTITIONS_PER_QUERY = 500


@dataclass(slots=True)
class Recorded:
    """The recorded commits of a partition, as far as they were read.

    Attributes:
        until: The end of the newest record; None if unknown.
        commits: The start, the end and the run of the commits that were read.
        is_searched: Whether `commits` includes the last few records.
    """

    until: int | None = None
    commits: set[tuple[int, int, str]] = field(default_factory=set)
    is_searched: bool = False

    def add(self, commits: Iterable[tuple[int, int, str]]) -> None:
        """Add the commits of the next record."""
        for start, until, run_id in commits:
            self.commits.add((start, until, run_id))
            self.until = until

    @property
    def highest(self) -> int | None:
        """The highest end; None without commits."""
        return max((until for _, until, _ in self.commits), default=None)


class NewestRecords:
    """The newest records of the partitions of a group.

    Args:
        instance: The Dagster instance.
        offsets: The offsets asset of the group.
    """

    def __init__(self, instance: dg.DagsterInstance, offsets: dg.AssetKey) -> None:
        self._instance = instance
        self._offsets = offsets
        self._seen: dict[TopicPartition, tuple[int, int | None]] = {}
        """The storage id and the end of the newest record; (0, None) if there was none."""

    def read(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Recorded]:
        """Read the records after the cached records, in one or two queries per 500 partitions."""
        found: dict[TopicPartition, Recorded] = {}
        known = [one for one in dict.fromkeys(partitions) if one in self._seen]
        # Apart, because the query reads from the lowest storage id on.
        without = [one for one in known if not self._seen[one][0]]
        for part in (without, [one for one in known if self._seen[one][0]]):
            for start in range(0, len(part), _PARTITIONS_PER_QUERY):
                found |= self._read(part[start : start + _PARTITIONS_PER_QUERY])
        return found

    def _read(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Recorded]:
        after = min(self._seen[one][0] for one in partitions)
        named = {str(one): one for one in partitions}
        wanted = dg.AssetRecordsFilter(
            self._offsets, asset_partitions=[*named], after_storage_id=after
        )
        page = self._instance.fetch_materializations(wanted, limit=_RECORDS_PER_QUERY)
        if page.has_more:  # the cached record of a partition is old
            return {}
        found = {one: Recorded(self._seen[one][1], is_searched=not after) for one in partitions}
        for record in reversed(page.records):
            partition = named.get(record.partition_key or "")
            if partition is not None and record.storage_id > self._seen[partition][0]:
                self._add(found[partition], partition, record)
        return found

    def search(self, partition: TopicPartition) -> Recorded:
        """Read the last few records of a partition."""
        found = Recorded(is_searched=True)
        self._seen.setdefault(partition, (0, None))
        for record in reversed([*newest(self._instance, self._offsets, partition)]):
            self._add(found, partition, record)
        return found

    def _add(self, found: Recorded, partition: TopicPartition, record: dg.EventLogRecord) -> None:
        found.add(commits_in(metadata_of(record)))
        if found.until is not None:
            self._seen[partition] = (record.storage_id, found.until)

    def rest_of(
        self, commit: RecordCommit, found: Recorded | None
    ) -> tuple[RecordCommit | None, Recorded]:
        """Return the part of a commit that is not recorded, and the records of its partition.

        A commit that begins where the newest record ends has no recorded part. Any other commit may
        have a part in an earlier record.
        """
        if found is not None:
            rest = commit.without(found.commits)
            if rest is None or rest.range.start == found.until or found.is_searched:
                return rest, found
        found = self.search(commit.range.topic_partition)
        return commit.without(found.commits), found

"""The commits of a group, as materialisations of its offsets asset.

This module defines the format of their metadata. One materialisation may record several commits.
Materialisations that users report without offsets are ignored.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.commands import recorded_commits
from dagster_rebalance.core.model.events import LastRecorded
from dagster_rebalance.core.model.offsets import MAX_OFFSET, OffsetRange
from dagster_rebalance.core.operators.rerun_selection import ProcessedRange, joined_ranges
from dagster_rebalance.orchestration.storage.run_tags import ranges_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.offsets import TopicPartition

_RECORDS_PER_QUERY = 1_000
_SHOWN_READ = 1_000
"""The limit of events to read: a run may have made many commits after those of a late record."""
_PARTITIONS_PER_QUERY = 500
_COMMITS_READ = 10
"""The last commit may be older than some materialisations that users reported."""


def materialisation(
    commit: RecordCommit, offsets: dg.AssetKey, member: str
) -> dg.AssetMaterialization:
    """Return the record of a commit in the offsets asset; `member` is the committing member."""
    partition = commit.range.topic_partition
    metadata: dict[str, Any] = {
        "start": commit.range.start,
        "until": commit.range.until,
        "offsets": len(commit.range),
        "dagster/uri": f"kafka://{partition.topic}/{partition.partition}",
        "lag": commit.lag,
        "run": dg.MetadataValue.dagster_run(commit.run_id),
        "batch": commit.batch_id,
        "epoch": commit.epoch,
        "member": member,
    }
    if commit.claim_to_commit_s is not None:
        metadata["claim_to_commit_seconds"] = round(commit.claim_to_commit_s, 3)
    if commit.drain_s is not None:
        metadata["drain_seconds"] = round(commit.drain_s, 3)
    if commit.is_late:
        metadata["recorded_late"] = True
    description = f"{commit.range} committed"
    if commit.joined:
        metadata["commits"] = len(commit.ends)
        metadata["joined"] = dg.MetadataValue.json(_ends_by_run(commit.joined))
        description = f"{description} in {len(commit.ends)} commits"
    if commit.is_dead_letter:
        metadata["dead_letter"] = True
        description = (
            f"the attempts of {commit.range} are exhausted, the last run is {commit.run_id}: the "
            "range is in the dead-letter topic"
        )
    return dg.AssetMaterialization(
        asset_key=offsets, partition=str(partition), description=description, metadata=metadata
    )


def metadata_of(record: dg.EventLogRecord) -> dict[str, object]:
    """Return the metadata of a materialisation."""
    event = record.asset_materialization
    return {} if event is None else {name: value.value for name, value in event.metadata.items()}


def commits_in(metadata: Mapping[str, object]) -> Iterator[tuple[int, int, str]]:
    """Return the commits of a record: their common start, the end of each, and its run."""
    start, until, run_id, joined = (
        metadata.get(name) for name in ("start", "until", "run", "joined")
    )
    if isinstance(start, int) and isinstance(until, int) and isinstance(run_id, str):
        yield from recorded_commits(start, (*_joined_ends(joined), (until, run_id)))


def _ends_by_run(ends: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ends of the commits of each run: a streaming run makes many."""
    by_run: dict[str, list[int]] = {}
    for end, run_id in ends:
        by_run.setdefault(run_id, []).append(end)
    return by_run


def _joined_ends(joined: object) -> list[tuple[int, str]]:
    """Return the ends of `_ends_by_run`, or of the list of pairs of earlier versions, in order."""
    pairs: list[tuple[object, object]] = []
    if isinstance(joined, dict):
        pairs = [(end, run) for run, ends in joined.items() for end in _items(ends)]
    elif isinstance(joined, list):
        pairs = [(each[0], each[1]) for each in joined if len(_items(each)) == 2]  # noqa: PLR2004 - a pair
    return sorted((end, str(run)) for end, run in pairs if isinstance(end, int))


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def newest(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partition: TopicPartition
) -> Iterator[dict[str, object]]:
    """Return the metadata of the last records of a partition, newest first."""
    records = dg.AssetRecordsFilter(asset_key=offsets, asset_partitions=[str(partition)])
    page = instance.fetch_materializations(records, limit=_COMMITS_READ)
    yield from map(metadata_of, page.records)


def last_recorded(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, LastRecorded]:
    """Return the last recorded commit of each partition that has one.

    This takes two queries per 500 partitions, and one for each partition whose last materialisation
    has no offset.
    """
    result: dict[TopicPartition, LastRecorded] = {}
    for start in range(0, len(partitions), _PARTITIONS_PER_QUERY):
        part = partitions[start : start + _PARTITIONS_PER_QUERY]
        for partition, metadata in _newest_of_each(instance, offsets, part).items():
            last = _last_in([metadata]) or _last_in(newest(instance, offsets, partition))
            if last is not None:
                result[partition] = last
    return result


def _newest_of_each(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, dict[str, object]]:
    """Return the metadata of the last materialisation of each partition that has one."""
    named = {str(partition): partition for partition in partitions}
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    ids = instance.get_latest_storage_id_by_partition(offsets, kind, set(named))
    if not ids:
        return {}
    wanted = dg.AssetRecordsFilter(asset_key=offsets, storage_ids=sorted(ids.values()))
    records = instance.fetch_materializations(wanted, limit=len(ids)).records
    metadata = {record.partition_key: metadata_of(record) for record in records}
    return {named[name]: metadata.get(name, {}) for name in ids}


def _last_in(records: Iterable[Mapping[str, object]]) -> LastRecorded | None:
    """Return the first of the records that has an offset."""
    return next(
        (
            LastRecorded(until, str(record.get("run", "")))
            for record in records
            if isinstance(until := record.get("until"), int) and 0 <= until <= MAX_OFFSET
        ),
        None,
    )


def processed(
    instance: dg.DagsterInstance,
    offsets: dg.AssetKey,
    partition: TopicPartition,
    *,
    start: int = 0,
    since: float = 0.0,
) -> Iterator[ProcessedRange]:
    """Return the committed ranges of a partition, newest first.

    Args:
        instance: Dagster.
        offsets: The offsets asset of the group.
        partition: The partition.
        start: Stop once the commits reach back to this offset.
        since: Stop at records made more than a second before this time, in seconds since 1970.
    """
    wanted = dg.AssetRecordsFilter(
        asset_key=offsets,
        asset_partitions=[str(partition)],
        # The bound is exclusive, and storages round times.
        after_timestamp=max(0.0, since - 1.0),
    )
    lowest: int | None = None
    cursor: str | None = None
    has_more = True
    while has_more:
        page = instance.fetch_materializations(wanted, limit=_RECORDS_PER_QUERY, cursor=cursor)
        for record in page.records:
            for one in _processed_in(instance, record, partition):
                yield one
                if lowest is None or one.range.until >= lowest:
                    lowest = one.range.start if lowest is None else min(lowest, one.range.start)
        cursor, has_more = page.cursor, page.has_more and (lowest is None or lowest > start)


def _processed_in(
    instance: dg.DagsterInstance, record: dg.EventLogRecord, partition: TopicPartition
) -> Iterator[ProcessedRange]:
    """Return the ranges of one record, newest first."""
    metadata = metadata_of(record)
    commits = sorted(commits_in(metadata))
    ends = [commits[0][0], *(until for _, until, _ in commits)] if commits else []
    try:
        ranges = [
            OffsetRange(partition.topic, partition.partition, start, until)
            for start, until in pairwise(ends)
        ]
    except ValueError:  # reported by a person
        return
    is_whole = True
    if ranges and metadata.get("recorded_late") is True:
        parts = _parts(instance, ranges[-1], metadata)
        is_whole, ranges = bool(parts), [*(parts or ranges)]
    for range_ in reversed(ranges):
        yield ProcessedRange(range_, record.timestamp, is_whole)


def _parts(
    instance: dg.DagsterInstance, commit: OffsetRange, metadata: Mapping[str, object]
) -> tuple[OffsetRange, ...]:
    """Return the ranges that a late record covers, as its run shows them; empty if unknown."""
    run = instance.get_run_by_id(str(metadata.get("run")))
    if run is None:
        return ()
    ranges = ranges_in(run.run_config, str(metadata.get("batch")))
    if ranges:
        return (commit,) if commit in ranges else ()
    # A streaming run materialises its assets with the ranges of each batch before it commits them.
    records = instance.get_records_for_run(
        run.run_id,
        of_type=dg.DagsterEventType.ASSET_MATERIALIZATION,
        limit=_SHOWN_READ,
        ascending=False,
    ).records
    return joined_ranges(commit, [str(metadata_of(record).get("ranges")) for record in records])

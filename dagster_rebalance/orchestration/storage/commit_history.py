"""What the materialisations of the offsets asset say: the commits of a group, and so its past.

Owns what a record says, and how it is read back, whoever wrote it: people report materialisations,
too, and these say nothing. A record may stand for several commits.
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
"""A late record stands for the last commits of a run, which may have had others after them."""
_PARTITIONS_PER_QUERY = 500
_COMMITS_READ = 10
"""Dagster's UI lets people report materialisations, which have no offsets: the last commit may be
behind some of them."""


def materialisation(
    commit: RecordCommit, offsets: dg.AssetKey, member: str
) -> dg.AssetMaterialization:
    """The record of a commit.

    Args:
        commit: What was committed.
        offsets: The offsets asset of the group.
        member: The code location of the member that records it.
    """
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
        metadata["joined"] = dg.MetadataValue.json(_by_run(commit.joined))
        description = f"{description} in {len(commit.ends)} commits"
    if commit.is_dead_letter:
        metadata["dead_letter"] = True
        description = (
            f"the attempts of {commit.range} are exhausted, the last run is {commit.run_id}: "
            "the dead-letter topic has it"
        )
    return dg.AssetMaterialization(
        asset_key=offsets, partition=str(partition), description=description, metadata=metadata
    )


def metadata_of(record: dg.EventLogRecord) -> dict[str, object]:
    """The metadata of a materialisation."""
    event = record.asset_materialization
    return {} if event is None else {name: value.value for name, value in event.metadata.items()}


def commits_in(metadata: Mapping[str, object]) -> Iterator[tuple[int, int, str]]:
    """The commits of a record: where they begin together, where each ends, and its run.

    There are none in what somebody else has reported.
    """
    start, until, run_id, joined = (
        metadata.get(name) for name in ("start", "until", "run", "joined")
    )
    if isinstance(start, int) and isinstance(until, int) and isinstance(run_id, str):
        yield from recorded_commits(start, (*_joined_in(joined), (until, run_id)))


def _by_run(ends: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Where the commits of each run ended: a streaming run makes many, and has one id."""
    found: dict[str, list[int]] = {}
    for end, run_id in ends:
        found.setdefault(run_id, []).append(end)
    return found


def _joined_in(joined: object) -> list[tuple[int, str]]:
    """The commits of `_by_run` in order, or of a list of pairs, as earlier versions wrote them."""
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
    """What the last commits of a partition were recorded with, newest first."""
    these = dg.AssetRecordsFilter(asset_key=offsets, asset_partitions=[str(partition)])
    yield from map(metadata_of, instance.fetch_materializations(these, limit=_COMMITS_READ).records)


def last_recorded(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, LastRecorded]:
    """The last recorded commit of each partition that has one.

    It takes two queries for 500 partitions, and one more for each of those whose last
    materialisation somebody else has reported.
    """
    found: dict[TopicPartition, LastRecorded] = {}
    for start in range(0, len(partitions), _PARTITIONS_PER_QUERY):
        these = partitions[start : start + _PARTITIONS_PER_QUERY]
        for partition, said in _newest_of_each(instance, offsets, these).items():
            last = _last_in([said]) or _last_in(newest(instance, offsets, partition))
            if last is not None:
                found[partition] = last
    return found


def _newest_of_each(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, dict[str, object]]:
    """The metadata of the last materialisation of each partition that has one."""
    named = {str(partition): partition for partition in partitions}
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    ids = instance.get_latest_storage_id_by_partition(offsets, kind, set(named))
    if not ids:
        return {}
    these = dg.AssetRecordsFilter(asset_key=offsets, storage_ids=sorted(ids.values()))
    records = instance.fetch_materializations(these, limit=len(ids)).records
    said = {record.partition_key: metadata_of(record) for record in records}
    return {named[name]: said.get(name, {}) for name in ids}


def _last_in(records: Iterable[Mapping[str, object]]) -> LastRecorded | None:
    """The first of the records that says an offset."""
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
    """The committed ranges of a partition, newest first.

    Args:
        instance: Where they are recorded.
        offsets: The offsets asset of the group.
        partition: The partition.
        start: Nothing is read that lies behind commits which reach back to this offset.
        since: Nothing is read that was recorded more than a second before this time, in seconds
            since 1970.
    """
    these = dg.AssetRecordsFilter(
        asset_key=offsets,
        asset_partitions=[str(partition)],
        # Only what is recorded after it passes, and storages round times.
        after_timestamp=max(0.0, since - 1.0),
    )
    lowest: int | None = None
    cursor: str | None = None
    has_more = True
    while has_more:
        page = instance.fetch_materializations(these, limit=_RECORDS_PER_QUERY, cursor=cursor)
        for record in page.records:
            for one in _processed_in(instance, record, partition):
                yield one
                if lowest is None or one.range.until >= lowest:
                    lowest = one.range.start if lowest is None else min(lowest, one.range.start)
        cursor, has_more = page.cursor, page.has_more and (lowest is None or lowest > start)


def _processed_in(
    instance: dg.DagsterInstance, record: dg.EventLogRecord, partition: TopicPartition
) -> Iterator[ProcessedRange]:
    """The ranges of one record, newest first."""
    metadata = metadata_of(record)
    said = sorted(commits_in(metadata))
    ends = [said[0][0], *(until for _, until, _ in said)] if said else []
    try:
        ranges = [
            OffsetRange(partition.topic, partition.partition, start, until)
            for start, until in pairwise(ends)
        ]
    except ValueError:  # people report what they like
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
    """The ranges that a late commit stands for, as its run says; empty when that is not known."""
    run = instance.get_run_by_id(str(metadata.get("run")))
    if run is None:
        return ()
    given = ranges_in(run.run_config, str(metadata.get("batch")))
    if given:
        return (commit,) if commit in given else ()
    # A streaming run has shown the ranges of each batch before it committed them.
    shown = instance.get_records_for_run(
        run.run_id,
        of_type=dg.DagsterEventType.ASSET_MATERIALIZATION,
        limit=_SHOWN_READ,
        ascending=False,
    ).records
    return joined_ranges(commit, [str(metadata_of(record).get("ranges")) for record in shown])

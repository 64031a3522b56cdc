"""The commits of a group, as materializations of its offsets asset.

This module defines the format of their metadata. One materialization may record several commits.
Materializations that users report without offsets are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.commands import recorded_commits
from dagster_rebalance.core.model.commit_parts import CommitPart, unpacked
from dagster_rebalance.core.model.events import LastRecorded
from dagster_rebalance.core.model.offsets import MAX_OFFSET, OffsetRange
from dagster_rebalance.core.operators.rerun_selection import (
    ProcessedRange,
    joined_ranges,
    shown_ranges,
)
from dagster_rebalance.core.reporting.joined_ranges import unpacked_ranges
from dagster_rebalance.core.runs.stream_batch import number_of
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
"""The last commit may be older than some materializations that users reported."""


def materialisation(
    commit: RecordCommit, offsets: dg.AssetKey, member: str, committed_at: float | None = None
) -> dg.AssetMaterialization:
    """Return the record of a commit in the offsets asset.

    Args:
        commit: The commit.
        offsets: The offsets asset of the group.
        member: The committing member.
        committed_at: Time of the last commit in seconds since 1970, unless that is the time of the
            record.
    """
    partition = commit.range.topic_partition
    metadata: dict[str, Any] = {
        "start": commit.range.start,
        "until": commit.range.until,
        "offsets": len(commit.range),
        "lag": commit.lag,
        "run": commit.run_id
        if commit.run_id == LEFT_OUT
        else dg.MetadataValue.dagster_run(commit.run_id),
        "batch": commit.batch_id,
        "member": member,
    }
    if commit.claim_to_commit_s is not None:
        metadata["claim_to_commit_seconds"] = round(commit.claim_to_commit_s, 3)
    if commit.drain_s is not None:
        metadata["drain_seconds"] = round(commit.drain_s, 3)
    if commit.is_late:
        metadata["recorded_late"] = True
    if committed_at is not None:
        metadata["committed_at"] = dg.MetadataValue.timestamp(committed_at)
    description = f"{commit.range} committed"
    if commit.joined:
        metadata["commits"] = commit.commits
        metadata["joined"] = dg.MetadataValue.json(_packed(commit, committed_at))
        description = f"{description} in {commit.commits} commits"
    if commit.left_out:
        metadata["left_out_offsets"] = commit.left_out
        if commit.left_out == len(commit.range):
            description = f"{description}: the filter `only` leaves out all of its records"
    if commit.is_dead_letter:
        metadata["dead_letter"] = True
        description = (
            f"the attempts of {commit.range} are exhausted, the last run is {commit.run_id}: its "
            "letter is in the dead-letter topic"
        )
    return dg.AssetMaterialization(
        asset_key=offsets, partition=str(partition), description=description, metadata=metadata
    )


def _packed(commit: RecordCommit, committed_at: float | None) -> dict[str, object]:
    ahead_s = None
    if committed_at is not None and commit.committed_at is not None:
        ahead_s = committed_at - commit.committed_at
    packed = commit.joined.packed(ahead_s)
    return {"runs": packed.runs, "at": packed.first_at, "parts": packed.text}


def metadata_of(record: dg.EventLogRecord) -> dict[str, object]:
    """Return the metadata of a materialization."""
    event = record.asset_materialization
    return {} if event is None else {name: value.value for name, value in event.metadata.items()}


def commits_in(metadata: Mapping[str, object]) -> Iterator[tuple[int, int, str]]:
    """Return the commits of a record, each with the common start, its end and its run."""
    start = metadata.get("start")
    parts = parts_in(metadata)
    if isinstance(start, int) and parts:
        yield from recorded_commits(start, ((part.until, part.run_id) for part in parts))


def parts_in(metadata: Mapping[str, object]) -> list[CommitPart]:
    """Return the commits of a record in order; empty if it has no offsets."""
    start, until, run_id = (metadata.get(name) for name in ("start", "until", "run"))
    if not (isinstance(start, int) and isinstance(until, int) and isinstance(run_id, str)):
        return []
    at = metadata.get("committed_at")
    number = number_of(str(metadata.get("batch")))
    last = CommitPart(until, run_id, number, number, at if isinstance(at, float) else None)
    return [*_earlier_parts(metadata.get("joined")), last]


def _earlier_parts(joined: object) -> list[CommitPart]:
    """Return the commits of `_packed`, or of the formats of earlier versions, in order.

    Earlier versions stored `{run: [end, ...]}`, and before that `[[end, run], ...]`.
    """
    pairs: list[tuple[object, object]] = []
    if isinstance(joined, dict) and isinstance(joined.get("parts"), str):
        at = joined.get("at")
        try:
            runs = list(map(str, _items(joined.get("runs"))))
            first_at = at if isinstance(at, float) else None
            return list(unpacked(joined["parts"], runs, first_at))
        except ValueError:  # changed by a user
            return []
    if isinstance(joined, dict):
        pairs = [(end, run) for run, ends in joined.items() for end in _items(ends)]
    elif isinstance(joined, list):
        pairs = [(each[0], each[1]) for each in joined if len(_items(each)) == 2]  # noqa: PLR2004 - a pair
    parts = (CommitPart(end, str(run)) for end, run in pairs if isinstance(end, int))
    return sorted(parts, key=lambda part: part.until)


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def newest(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partition: TopicPartition
) -> Sequence[dg.EventLogRecord]:
    """Return the last records of a partition, newest first."""
    records = dg.AssetRecordsFilter(asset_key=offsets, asset_partitions=[str(partition)])
    return instance.fetch_materializations(records, limit=_COMMITS_READ).records


def last_recorded(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, LastRecorded]:
    """Return the last recorded commit of each partition that has one.

    This takes two queries per 500 partitions, and one query for each partition whose last
    materialization has no offset.
    """
    result: dict[TopicPartition, LastRecorded] = {}
    for start in range(0, len(partitions), _PARTITIONS_PER_QUERY):
        part = partitions[start : start + _PARTITIONS_PER_QUERY]
        for partition, metadata in _newest_of_each(instance, offsets, part).items():
            last = _last_in([metadata]) or _last_in(
                map(metadata_of, newest(instance, offsets, partition))
            )
            if last is not None:
                result[partition] = last
    return result


def _newest_of_each(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, dict[str, object]]:
    """Return the metadata of the last materialization of each partition that has one."""
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
    """Return the first of the records with an offset."""
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
        instance: The Dagster instance.
        offsets: The offsets asset of the group.
        partition: The partition.
        start: Stop when the commits reach back to this offset.
        since: Stop at records from more than a second before this time, in seconds since 1970.
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
    is_late = metadata.get("recorded_late") is True
    found: list[ProcessedRange] = []
    start = metadata.get("start")
    if not isinstance(start, int):
        return
    parts = parts_in(metadata)
    try:
        for part in parts:
            range_ = OffsetRange(partition.topic, partition.partition, start, part.until)
            start = part.until
            at = record.timestamp if part.at is None else part.at
            if part.commits == 1 and not (is_late and part is parts[-1]):
                found.append(ProcessedRange(range_, at))
                continue
            ranges = ranges_of_commit(instance, range_, part.run_id, str(metadata.get("batch")))
            found += [ProcessedRange(one, at, bool(ranges)) for one in ranges or (range_,)]
    except ValueError:  # reported by a user
        return
    yield from reversed(found)


def ranges_of_commit(
    instance: dg.DagsterInstance,
    commit: OffsetRange,
    run_id: str,
    batch_id: str,
    outputs: Sequence[dg.EventLogRecord] | None = None,
) -> tuple[OffsetRange, ...]:
    """Return the ranges of a late record or of merged commits, as the run shows them.

    Empty if they are unknown. `outputs` are the `newest_outputs` of the run, unless they are to be
    read.
    """
    run = instance.get_run_by_id(run_id)
    if run is None:
        return ()
    ranges = ranges_in(run.run_config, batch_id)
    if ranges:
        return (commit,) if commit in ranges else ()
    # A streaming run materializes its assets with the ranges of their batches.
    records = newest_outputs(instance, run_id)[0] if outputs is None else outputs
    shown = (one for record in records for one in shown_in(metadata_of(record)))
    return joined_ranges(commit, [range_ for range_, count in shown if count == 1])


def newest_outputs(
    instance: dg.DagsterInstance, run_id: str
) -> tuple[Sequence[dg.EventLogRecord], bool]:
    """Return the last materializations of a run, newest first, and whether it has more."""
    page = instance.get_records_for_run(
        run_id,
        of_type=dg.DagsterEventType.ASSET_MATERIALIZATION,
        limit=_SHOWN_READ,
        ascending=False,
    )
    return page.records, page.has_more


def shown_in(metadata: Mapping[str, object]) -> Iterator[tuple[OffsetRange, int]]:
    """Yield the ranges in a materialization of a user's asset, of one batch or of several.

    Each range comes with the number of ranges that are merged in it.
    """
    for one in shown_ranges(str(metadata.get("ranges"))):
        yield one, 1
    joined = metadata.get("joined")
    if isinstance(joined, dict) and isinstance(joined.get("ranges"), str):
        yield from unpacked_ranges(joined["ranges"])

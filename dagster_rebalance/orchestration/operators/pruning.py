"""Deletion of old runs of a group, with the public API of Dagster.

`DagsterInstance.delete_run` deletes a run with its events. Records of the group belong to no run:
Dagster can only delete all of them at once (`wipe_assets`), and members need the newest ones, so
they stay.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from dagster_rebalance.core.model.offsets import parse_partitions
from dagster_rebalance.core.operators.late_search import CommitRecord, LateSearch
from dagster_rebalance.core.operators.prune_runs import (
    NOT_CHECKED,
    FinishedRun,
    PrunePlan,
    PruneSearch,
    References,
)
from dagster_rebalance.orchestration.runs.run_ledger import LIVE_STATUSES
from dagster_rebalance.orchestration.storage.commit_history import metadata_of
from dagster_rebalance.orchestration.storage.dynamic_partitions import GroupJobs, RerunStore
from dagster_rebalance.orchestration.storage.run_tags import (
    BATCH_TAG,
    GROUP_TAG,
    SLOT_TAG,
    STREAM_TAG,
    ranges_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.orchestration.storage.names import GroupAssets

DAY_S = 86_400.0
MOST_RUNS = 500
_FINISHED = [
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
]
_PAGE = 100
_READ_PER_DELETED = 10
_RECORDS_PER_QUERY = 1_000
_ASSETS_PER_RUN = 1_000
_MOST_RECORDS = 200_000
"""The limit of records of commits that a search reads: about half a minute."""


class KafkaPositions(NamedTuple):
    """The committed offset of each partition of a group, and the first offset of its log."""

    stored: Mapping[TopicPartition, OffsetAndMetadata | None]
    starts: Mapping[TopicPartition, int]


class Pruning:
    """Deletes old runs of one group.

    Args:
        instance: Dagster.
        assets: The assets of the group.
        group_id: The group.
    """

    def __init__(self, instance: dg.DagsterInstance, assets: GroupAssets, group_id: str) -> None:
        self._instance = instance
        self._assets = assets
        self._group_id = group_id
        self._jobs = GroupJobs(instance, group_id, None)
        self._newest: dict[dg.AssetKey, frozenset[str]] = {}

    def plan(
        self,
        read: Callable[[], KafkaPositions],
        *,
        days: float,
        most: int = MOST_RUNS,
    ) -> PrunePlan:
        """Return the oldest runs that may be deleted, at most `most`.

        Args:
            read: Reads all partitions of the group from Kafka.
            days: Runs that ended in the last days stay.
            most: The limit of runs.
        """
        search = PruneSearch(most, most * _READ_PER_DELETED)
        runs = self._finished(time.time() - days * DAY_S)
        while not search.is_over:
            size = max(search.missing, _PAGE)
            page = list(islice(runs, size))
            # A finished run makes no claims, so the claims are read after it was found.
            positions = read()
            references = replace(References.in_kafka(positions.stored), reruns=self._reruns())
            first = PrunePlan.of(filter(None, page), references)
            needed = self._needed(first.runs, positions.starts)
            last = PrunePlan.of(first.runs, replace(references, needed=needed))
            search.add(first, last, read=len(page), is_at_end=len(page) < size)
        return search.plan()

    def delete(self, plan: PrunePlan) -> Iterator[FinishedRun]:
        """Delete the runs of a plan, and yield each one that was deleted."""
        for run in plan.runs:
            found = self._instance.get_run_by_id(run.run_id)
            if found is not None and found.is_finished:
                self._instance.delete_run(run.run_id)
                yield run

    def _reruns(self) -> frozenset[str]:
        store = RerunStore(self._instance, self._assets.reruns_name)
        return frozenset(one.rerun.rerun_id for one in store.read())

    def _finished(self, before: float) -> Iterator[FinishedRun | None]:
        """The finished runs of the group, the first created ones first.

        None is a run that ended after a time, or of another code location.
        """
        wanted = dg.RunsFilter(
            tags={GROUP_TAG: self._group_id},
            statuses=_FINISHED,
            created_before=datetime.fromtimestamp(before, timezone.utc),
        )
        cursor, has_more = None, True
        while has_more:
            records = self._instance.get_run_records(
                wanted, limit=_PAGE, cursor=cursor, ascending=True
            )
            for record in records:
                run = record.dagster_run
                is_old = (record.end_time or before) < before and self._jobs.have(run)
                yield _finished_run(run, record.end_time or 0.0) if is_old else None
            has_more = len(records) == _PAGE
            cursor = records[-1].dagster_run.run_id if records else None

    def _needed(
        self, runs: Sequence[FinishedRun], starts: Mapping[TopicPartition, int]
    ) -> dict[str, str]:
        """Return the runs among those to delete that others need, and why."""
        if not runs:
            return {}
        needed = dict.fromkeys(self._with_live_children(), "a live run repeats it")
        for stream in {run.stream for run in runs} - {""}:
            sensor, _, slot = stream.rpartition("/")
            newest = self._instance.get_run_records(
                dg.RunsFilter(tags={STREAM_TAG: sensor}), limit=_PAGE
            )
            same = (r.dagster_run for r in newest if r.dagster_run.tags.get(SLOT_TAG, "") == slot)
            last = next(same, None)
            if last is not None:
                needed[last.run_id] = "the newest run of its sensor"
        for run in runs:
            if any(run.run_id in self._newest_of(asset) for asset in self._materialised(run)):
                needed[run.run_id] = "made the newest materialization of an asset"
        # The last step: it may end at its limit once it has found a run that nothing needs.
        return needed | self._late([run for run in runs if run.run_id not in needed], starts)

    def _with_live_children(self) -> Iterator[str]:
        for run in self._instance.get_runs(dg.RunsFilter(statuses=LIVE_STATUSES)):
            yield from filter(None, (run.parent_run_id, run.root_run_id))

    def _materialised(self, run: FinishedRun) -> set[dg.AssetKey]:
        """The assets that a run may have materialized: those that were planned, and others."""
        found: set[dg.AssetKey] = set()
        for kind in (
            dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
            dg.DagsterEventType.ASSET_MATERIALIZATION,
        ):
            records = self._instance.get_records_for_run(
                run.run_id, of_type=kind, limit=_ASSETS_PER_RUN, ascending=False
            ).records
            found |= {one.asset_key for one in records if one.asset_key is not None}
        return found

    def _newest_of(self, asset: dg.AssetKey) -> frozenset[str]:
        """The runs with the newest materialization of an asset, and of each of its partitions."""
        if asset not in self._newest:
            instance = self._instance
            last = instance.get_latest_materialization_event(asset)
            ids = sorted(
                instance.get_latest_storage_id_by_partition(
                    asset, dg.DagsterEventType.ASSET_MATERIALIZATION
                ).values()
            )
            found = set() if last is None else {last.run_id}
            for start in range(0, len(ids), _RECORDS_PER_QUERY):
                part = ids[start : start + _RECORDS_PER_QUERY]
                records = instance.fetch_materializations(
                    dg.AssetRecordsFilter(asset, storage_ids=part), limit=len(part)
                ).records
                found |= {one.event_log_entry.run_id for one in records}
            self._newest[asset] = frozenset(found)
        return self._newest[asset]

    def _late(
        self, runs: Iterable[FinishedRun], starts: Mapping[TopicPartition, int]
    ) -> dict[str, str]:
        """Return the runs that late records need while Kafka has the records."""
        search = LateSearch(runs, _MOST_RECORDS)
        cursor, has_more, after = None, True, None
        while has_more and not search.is_over:
            # Late records follow the end of most runs soon, so the first page is small.
            limit = _RECORDS_PER_QUERY if after == search.after else _PAGE
            after = search.after
            page = self._instance.fetch_materializations(
                dg.AssetRecordsFilter(self._assets.offsets, after_timestamp=after),
                limit=limit,
                cursor=cursor,
                ascending=True,
            )
            search.add([_commit_record(record, starts) for record in page.records])
            cursor, has_more = page.cursor, page.has_more
        unchecked = {run.run_id: NOT_CHECKED for run in search.left if has_more}
        return unchecked | dict.fromkeys(search.needed, "rerun needs the bounds of its ranges")


def _commit_record(record: dg.EventLogRecord, starts: Mapping[TopicPartition, int]) -> CommitRecord:
    metadata = metadata_of(record)
    until, is_late = metadata.get("until"), metadata.get("recorded_late") is True
    partition = next(parse_partitions([record.partition_key]), None)
    start = 0 if partition is None else starts.get(partition, 0)
    is_needed = is_late and isinstance(until, int) and until > start
    return CommitRecord(record.timestamp, str(metadata.get("run")) if is_needed else "")


def _finished_run(run: dg.DagsterRun, ended_at: float) -> FinishedRun:
    sensor, batch_id = run.tags.get(STREAM_TAG, ""), run.tags.get(BATCH_TAG, "")
    stream = f"{sensor}/{run.tags.get(SLOT_TAG, '')}" if sensor else ""
    return FinishedRun(run.run_id, ended_at, stream, batch_id, ranges_in(run.run_config, batch_id))

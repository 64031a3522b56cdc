"""Look-up of one offset in the records of its group, for `dagster-rebalance explain`.

Reads a few dozen events, however many the group has, and never scans an asset.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.offsets import MAX_OFFSET, OffsetRange
from dagster_rebalance.core.reporting.explain_offset import (
    CommittedOffset,
    MovedOffset,
    OffsetFacts,
)
from dagster_rebalance.core.reporting.record_search import OLDEST, Place, StoredRecord, search
from dagster_rebalance.core.runs.stream_batch import is_batch_of
from dagster_rebalance.orchestration.storage.commit_history import (
    metadata_of,
    newest_outputs,
    parts_in,
    ranges_of_commit,
)
from dagster_rebalance.orchestration.storage.output_lookup import OutputLookup, Window, pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.reporting.explain_offset import Output
    from dagster_rebalance.orchestration.storage.names import GroupAssets

_PAGE = 100
_BATCH_LASTS_S = 24 * 3600.0
_CLOCKS_DIFFER_S = 2.0
_RECORDS_BEFORE = 3


class OffsetLookup:
    """Reads the records in Dagster about offsets of one partition.

    Args:
        instance: The Dagster instance.
        assets: The assets of the group.
        partition: The partition.
    """

    def __init__(
        self, instance: dg.DagsterInstance, assets: GroupAssets, partition: TopicPartition
    ) -> None:
        self._instance = instance
        self._assets = assets
        self._partition = partition
        self._records: dict[int, dg.EventLogRecord] = {}
        self._after: int | None = None
        self._of_run: tuple[Sequence[dg.EventLogRecord], bool] | None = None
        """The last materializations of the run of a late record, and whether it has more."""

    def facts(self, offset: int, stored: OffsetAndMetadata | None, bounds: Bounds) -> OffsetFacts:
        """Return the known facts about an offset."""
        self._after = self._of_run = None
        place = self._find(offset)
        self._after = self._moved_back(place, offset)
        again = place if self._after is None else self._find(offset)
        place = place if again.covering is None else again
        committed = None if place.covering is None else self._commit(place.covering, offset)
        run = None if committed is None else self._instance.get_run_by_id(committed.run_id)
        outputs: list[Output] = []
        outputs_read = 0
        if committed is not None and run is not None and place.covering is not None:
            lookup = OutputLookup(self._instance, run.run_id, self._partition, offset)
            outputs = self._outputs(committed, place.covering, lookup)
            outputs_read = 0 if lookup.is_complete else lookup.read
        return OffsetFacts(
            self._partition,
            offset,
            stored,
            bounds,
            committed,
            (
                None if place.before is None else place.before.until,
                None if place.after is None else place.after.start,
            ),
            has_run=run is not None,
            outputs=outputs,
            outputs_read=outputs_read,
            moves=() if committed is not None else tuple(self._moves_between(place, offset)),
        )

    def _find(self, offset: int) -> Place:
        searching = search(offset)
        try:
            below = next(searching)
            while True:
                below = searching.send(self._newest_below(below))
        except StopIteration as done:
            place: Place = done.value
            return place

    def _newest_below(self, storage_id: int | None) -> StoredRecord | None:
        is_oldest, limit = storage_id == OLDEST, 1
        bound = None if is_oldest else storage_id
        while True:
            wanted = dg.AssetRecordsFilter(
                self._assets.offsets,
                asset_partitions=[str(self._partition)],
                before_storage_id=None if is_oldest else bound,
                after_storage_id=bound if is_oldest and self._after is None else self._after,
            )
            page = self._instance.fetch_materializations(wanted, limit=limit, ascending=is_oldest)
            for record in page.records:
                parts = parts_in(metadata := metadata_of(record))
                start = metadata.get("start")
                if parts and isinstance(start, int) and 0 <= start < parts[-1].until <= MAX_OFFSET:
                    self._records[record.storage_id] = record
                    return StoredRecord(record.storage_id, start, parts[-1].until)
            if not page.records or not page.has_more:
                return None
            # Users can report materializations without offsets.
            bound, limit = page.records[-1].storage_id, _PAGE

    def _commit(self, found: StoredRecord, offset: int) -> CommittedOffset:
        record = self._records[found.storage_id]
        metadata = metadata_of(record)
        parts = parts_in(metadata)
        index = next(number for number, part in enumerate(parts) if part.until > offset)
        part, is_last = parts[index], index == len(parts) - 1
        range_ = self._range(parts[index - 1].until if index else found.start, part.until)
        batch_id = str(metadata.get("batch", "")) if is_last else ""
        commits: int | None = part.commits
        numbers = (part.first_number, part.number)
        is_run_known = True
        if metadata.get("recorded_late") is True and is_last:
            self._of_run = newest_outputs(self._instance, part.run_id)
            ranges = ranges_of_commit(
                self._instance, range_, part.run_id, batch_id, self._of_run[0]
            )
            of_batch = next((one for one in ranges if one.start <= offset < one.until), None)
            commits = None if of_batch is None else 1
            is_run_known = of_batch is not None or is_batch_of(batch_id, part.run_id)
            if of_batch is None or of_batch.until != range_.until:
                numbers, batch_id = (0, 0), ""
            range_ = of_batch or range_
        return CommittedOffset(
            range_,
            part.run_id,
            batch_id,
            numbers,
            commits,
            part.at,
            record.timestamp,
            is_dead_letter=metadata.get("dead_letter") is True,
            is_run_known=is_run_known,
        )

    def _range(self, start: int, until: int) -> OffsetRange:
        return OffsetRange(self._partition.topic, self._partition.partition, start, until)

    def _outputs(
        self, commit: CommittedOffset, found: StoredRecord, outputs: OutputLookup
    ) -> list[Output]:
        # A late record may not tell the number of the batch, but it has the id of the last one.
        last_id = str(metadata_of(self._records[found.storage_id]).get("batch"))
        is_streamed = bool(commit.numbers[1]) or is_batch_of(last_id, commit.run_id)
        if not is_streamed:
            return outputs.all() if commit.is_run_known else []
        shown: list[Output] = []
        if self._of_run is not None:
            records, has_more = self._of_run
            shown = outputs.among(records)
            if not has_more:
                return shown
        known = {one.asset for one in shown}
        return [*shown, *outputs.around(self._window(commit, found), commit.numbers, known)]

    def _window(self, commit: CommittedOffset, found: StoredRecord) -> Window:
        """Return where the batch has materialized its assets.

        The assets are materialized before the commit. The record of the commit, and joined
        materializations, follow later.
        """
        low: StoredRecord | None = found
        for _ in range(_RECORDS_BEFORE):
            low = None if low is None else self._newest_below(low.storage_id)
        at = commit.recorded_at if commit.at is None else commit.at
        since = None if commit.at is None else max(0.0, at - _BATCH_LASTS_S)
        lowest = 0 if low is None else low.storage_id
        return Window(lowest, found.storage_id, since, at + _CLOCKS_DIFFER_S)

    def _moves_between(self, place: Place, offset: int) -> Iterator[MovedOffset]:
        """The newest move over the offset between the records around it."""
        before, after = self._times(place)
        for _, move in self._moves(
            None if before is None else before - _CLOCKS_DIFFER_S,
            None if after is None else after + _CLOCKS_DIFFER_S,
        ):
            if move.before <= offset < move.until:
                yield move
                return

    def _moved_back(self, place: Place, offset: int) -> int | None:
        """The storage id of the newest move back over an offset that no record seems to cover.

        Of few records between two moves, the search may have read none.
        """
        _, after = self._times(place)
        if place.covering is not None or after is None:
            return None
        moves = self._moves(after - _CLOCKS_DIFFER_S, None)
        return next((at for at, move in moves if move.until <= offset < move.before), None)

    def _times(self, place: Place) -> Iterator[float | None]:
        for one in (place.before, place.after):
            yield None if one is None else self._records[one.storage_id].timestamp

    def _moves(
        self, after: float | None, before: float | None
    ) -> Iterator[tuple[int, MovedOffset]]:
        """The resets of the partition in a time, newest first, with their storage ids."""
        wanted = dg.AssetRecordsFilter(
            self._assets.group, after_timestamp=after, before_timestamp=before
        )
        for record in pages(partial(self._instance.fetch_observations, wanted)):
            event = record.asset_observation
            said = {} if event is None else {n: one.value for n, one in event.metadata.items()}
            moves = said.get("moves")
            move = moves.get(str(self._partition)) if isinstance(moves, dict) else None
            match move:
                case [int(start), int(end)]:
                    by = str(said.get("by", ""))
                    yield record.storage_id, MovedOffset(start, end, record.timestamp, by)
                case _:  # anyone may report to the asset
                    pass

"""Look-up of the materializations that show the batch of an offset.

A streaming run may have materialized its assets 100,000 times. A look-up reads the events of an
asset around the time of the commit, and of a late record, which has no time, also the last
materializations of the run. Whether it has read everything is part of the result: an output that
was not read is not denied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.reporting.explain_offset import Output
from dagster_rebalance.core.runs.stream_batch import is_batch_of, number_of
from dagster_rebalance.orchestration.storage.commit_history import metadata_of, shown_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import TopicPartition

EVENTS_READ = 1_000
"""Limit of the events of an asset that are read on one side of the commit. Other runs write events
of the asset, too."""
_FIRST_PAGE = 20
_PAGE = 100
_BEYOND = 20
"""The search ends after this many outputs of other batches in its direction: a materialization that
the storage refused at first is stored after later ones."""
_OUTPUTS_OF_RUN = 100


@dataclass(frozen=True, slots=True)
class Window:
    """The storage ids and times between which the batch has materialized its assets.

    Attributes:
        low: The storage id of an earlier record.
        high: The storage id of the record of the commit; only joined materializations are stored
            after it.
        since: The earliest time, if the time of the commit is known.
        at: The time of the commit, or of its record.
    """

    low: int
    high: int
    since: float | None
    at: float


class OutputLookup:
    """Reads the materializations of one streaming run for one offset.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        partition: The partition.
        offset: The offset.

    Attributes:
        read: The number of materializations that were read.
        is_complete: Whether no other materialization of the run may show the offset.
    """

    def __init__(
        self, instance: dg.DagsterInstance, run_id: str, partition: TopicPartition, offset: int
    ) -> None:
        self._instance = instance
        self._run_id = run_id
        self._partition = partition
        self._offset = offset
        self.read = 0
        self.is_complete = True

    def all(self) -> list[Output]:
        """Return all outputs of a run that processes one batch."""
        page = self._instance.get_records_for_run(
            self._run_id,
            of_type=dg.DagsterEventType.ASSET_MATERIALIZATION,
            limit=_OUTPUTS_OF_RUN,
        )
        return [
            Output(record.asset_key.to_user_string(), record.timestamp)
            for record in page.records
            if record.asset_key is not None
        ]

    def among(self, records: Sequence[dg.EventLogRecord]) -> list[Output]:
        """Return the outputs among the last materializations of the run, one per asset."""
        self.read += len(records)
        newest: dict[str, Output] = {}
        for record in records:
            found = self._output(record)
            if found is not None:
                newest.setdefault(found.asset, found)
        return [newest[asset] for asset in sorted(newest)]

    def around(
        self, window: Window, numbers: tuple[int, int], known: Collection[str]
    ) -> Iterator[Output]:
        """Yield the output of each planned asset that is found near the commit.

        Args:
            window: Where to search.
            numbers: The numbers of the first and the last batch of the commit; (0, 0) if unknown.
            known: The assets whose output has been found.
        """
        for asset in self._planned():
            if asset.to_user_string() in known:
                continue
            records = self._near(asset, window, numbers)
            found = next(filter(None, map(self._output, records)), None)
            if found is not None:
                yield found

    def _output(self, record: dg.EventLogRecord) -> Output | None:
        metadata = metadata_of(record)
        if record.asset_key is None or not any(
            one.topic_partition == self._partition and one.start <= self._offset < one.until
            for one, _ in shown_in(metadata)
        ):
            return None
        is_joined = isinstance(metadata.get("joined"), dict)
        number = 0 if is_joined else self._number(record)
        return Output(record.asset_key.to_user_string(), record.timestamp, is_joined, number)

    def _planned(self) -> list[dg.AssetKey]:
        planned = self._instance.get_records_for_run(
            self._run_id,
            of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
            limit=_OUTPUTS_OF_RUN,
        ).records
        return sorted({one.asset_key for one in planned if one.asset_key is not None})

    def _near(
        self, asset: dg.AssetKey, window: Window, numbers: tuple[int, int]
    ) -> Iterator[dg.EventLogRecord]:
        first, last = numbers
        earlier = dg.AssetRecordsFilter(
            asset,
            after_storage_id=window.low,
            before_storage_id=window.high,
            before_timestamp=window.at,
            after_timestamp=window.since,
        )
        later = dg.AssetRecordsFilter(asset, after_storage_id=window.low, after_timestamp=window.at)
        fetch = self._instance.fetch_materializations
        yield from self._own(partial(fetch, earlier), lambda number: 0 < number < first)
        yield from self._own(
            partial(fetch, later, ascending=True), lambda number: 0 < last < number
        )

    def _own(
        self, fetch: Callable[..., dg.EventRecordsResult], is_beyond: Callable[[int], bool]
    ) -> Iterator[dg.EventLogRecord]:
        """Yield the materializations of the run until they are beyond the batch."""
        beyond = 0
        for record in self._counted(pages(fetch)):
            if record.event_log_entry.run_id != self._run_id:
                continue
            yield record
            beyond += is_beyond(self._number(record))
            if beyond == _BEYOND:
                return

    def _counted(self, records: Iterable[dg.EventLogRecord]) -> Iterator[dg.EventLogRecord]:
        before = self.read
        for record in records:
            self.read += 1
            yield record
        if self.read - before >= EVENTS_READ:
            self.is_complete = False

    def _number(self, record: dg.EventLogRecord) -> int:
        batch_id = str(metadata_of(record).get("batch"))
        return number_of(batch_id) if is_batch_of(batch_id, self._run_id) else 0


def pages(fetch: Callable[..., dg.EventRecordsResult]) -> Iterator[dg.EventLogRecord]:
    """Read up to `EVENTS_READ` events, in pages."""
    cursor: str | None = None
    limit, left = _FIRST_PAGE, EVENTS_READ
    while left > 0:
        page = fetch(limit=min(limit, left), cursor=cursor)
        yield from page.records
        if not page.records or not page.has_more:
            return
        cursor, limit, left = page.cursor, _PAGE, left - len(page.records)

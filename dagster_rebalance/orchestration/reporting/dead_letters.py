"""Dead letters of ranges whose attempts are exhausted; `core/model/letters.py` has their format.

Such a letter contains no records of the range: the records stay in their topic within its
retention. Other applications may write to the dead-letter topic, so a letter is verified before its
range is processed again (`recorded_letters`).
"""

from __future__ import annotations

import json
from collections import deque
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Protocol

import dagster as dg

from dagster_rebalance.core.model.events import DeadLetterFailed, DeadLetterStored
from dagster_rebalance.core.model.letters import Headers, Letter, LetterKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.core.model.commands import StoreDeadLetter
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.kafka.producers.dead_letter_producer import Delivery
    from dagster_rebalance.orchestration.reporting.record_letters import RecordLetters

_RECORDS_PER_QUERY = 100
MOST_ERROR_CHARACTERS = 8_000
"""Limit of a stack trace in a record."""


class Sender(Protocol):
    """The port to the producer, `kafka.producers.dead_letter_producer.DeadLetterProducer`."""

    def send(self, key: str, value: bytes | None, headers: Headers) -> None:
        """Send a record, unless a record with the same key is in flight."""

    def deliveries(self) -> tuple[Delivery, ...]:
        """Return the deliveries since the last call."""


class DeadLetters:
    """The dead letters of one member: of ranges by `sender`, of records by `records`."""

    def __init__(self, sender: Sender, group_id: str, records: RecordLetters | None = None) -> None:
        self._sender = sender
        self._records = records
        self._group_id = group_id
        self._under_way: dict[str, StoreDeadLetter] = {}
        self._ended: deque[Delivery] = deque()

    def is_under_way(self, range_: OffsetRange) -> bool:
        """Whether the dead letter of a range is being sent."""
        of_record = self._records is not None and self._records.is_under_way(range_)
        return of_record or range_.key in self._under_way

    def store(self, letter: StoreDeadLetter, error: str) -> None:
        """Send a dead letter with the error of its last run, without waiting."""
        if self.is_under_way(letter.range):
            return
        if letter.is_record and self._records is not None:
            self._records.store(letter, error)
        else:
            self._sender.send(*self._letter(letter, error).record)
            self._under_way[letter.range.key] = letter  # only if `send` did not raise

    def answers(self) -> Iterator[DeadLetterStored | DeadLetterFailed]:
        """Yield the results of sent dead letters. The next call yields those that the caller left.

        A dead letter is in flight until its result is taken, so it is not sent twice.
        """
        if self._records is not None:
            yield from self._records.answers()
        self._ended.extend(self._sender.deliveries())
        while self._ended:
            delivery = self._ended.popleft()
            letter = self._under_way.pop(delivery.key)
            yield (
                DeadLetterFailed(letter, delivery.problem)
                if delivery.problem
                else DeadLetterStored(letter)
            )

    def _letter(self, letter: StoreDeadLetter, error: str) -> Letter:
        now = datetime.now(timezone.utc)
        value = {
            **letter.range.fields,
            "group_id": self._group_id,
            "batch_id": letter.batch_id,
            "run_ids": list(letter.run_ids),
            "error": error[:MOST_ERROR_CHARACTERS],
            "time": now.isoformat(timespec="seconds"),
        }
        return Letter(
            letter.range,
            error,
            json.dumps(value).encode(),
            LetterKind.RANGE,
            group_id=self._group_id,
            batch_id=letter.batch_id,
            run_id=letter.run_ids[-1],
            attempt=len(letter.run_ids),
            time_ms=int(now.timestamp() * 1000),
        )


def recorded_letters(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, ranges: Iterable[OffsetRange]
) -> frozenset[OffsetRange]:
    """Return those of some ranges that the group has recorded as dead letters.

    Args:
        instance: The instance in which the group records its commits.
        offsets: The offsets asset of the group.
        ranges: The ranges.
    """
    left: dict[TopicPartition, set[OffsetRange]] = {}
    for range_ in ranges:
        left.setdefault(range_.topic_partition, set()).add(range_)
    found: set[OffsetRange] = set()
    for partition, wanted in left.items():
        for start, until in _recorded(instance, offsets, partition):
            hits = {range_ for range_ in wanted if (range_.start, range_.until) == (start, until)}
            found |= hits
            wanted.difference_update(hits)
            if not wanted:
                break
    return frozenset(found)


def _recorded(
    instance: dg.DagsterInstance, offsets: dg.AssetKey, partition: TopicPartition
) -> Iterator[tuple[object, object]]:
    """Yield the bounds of the recorded dead letters of a partition, newest first."""
    wanted = dg.AssetRecordsFilter(offsets, asset_partitions=[str(partition)])
    cursor: str | None = None
    has_more = True
    while has_more:
        page = instance.fetch_materializations(wanted, limit=_RECORDS_PER_QUERY, cursor=cursor)
        for commit in (record.asset_materialization for record in page.records):
            if commit is not None and "dead_letter" in commit.metadata:
                yield commit.metadata["start"].value, commit.metadata["until"].value
        cursor, has_more = page.cursor, page.has_more

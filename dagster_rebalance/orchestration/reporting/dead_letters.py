"""Dead letters of ranges whose attempts are exhausted; `core/model/letters.py` has their format.

Such a letter contains no records of the range: the records stay in their topic within its
retention. Other applications may write to the dead-letter topic, so a dead letter that you read
from it must be verified.
"""

from __future__ import annotations

import json
import operator
from collections import deque
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Protocol

import dagster as dg

from dagster_rebalance.core.model.errors import BatchRefusedError
from dagster_rebalance.core.model.events import DeadLetterFailed, DeadLetterStored
from dagster_rebalance.core.model.letters import Headers, Letter, LetterKind
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.model.commands import StoreDeadLetter
    from dagster_rebalance.kafka.producers.dead_letter_producer import Delivery
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

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
    """The dead letters of one member, sent by `sender`."""

    def __init__(self, sender: Sender, group_id: str) -> None:
        self._sender = sender
        self._group_id = group_id
        self._under_way: dict[str, StoreDeadLetter] = {}
        self._ended: deque[Delivery] = deque()

    def is_under_way(self, range_: OffsetRange) -> bool:
        """Whether the dead letter of a range is being sent."""
        return range_.key in self._under_way

    def store(self, letter: StoreDeadLetter, error: str) -> None:
        """Send a dead letter with the error of its last run, without waiting."""
        if not self.is_under_way(letter.range):
            self._sender.send(*self._letter(letter, error).record)
            self._under_way[letter.range.key] = letter  # only if `send` did not raise

    def answers(self) -> Iterator[DeadLetterStored | DeadLetterFailed]:
        """Yield the results of sent dead letters. The next call yields those that the caller left.

        A dead letter is in flight until its result is taken, so it is not sent twice.
        """
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


def dead_lettered_range(
    instance: dg.DagsterInstance, kafka: KafkaConsumerResource, letter: str | bytes
) -> OffsetRange:
    """Return the range that a dead letter names, if the group has recorded it.

    You may then process this range again, with the same bounds. The letter alone proves nothing:
    anyone with write access to its topic could name a range that is done, or of another topic.

    Args:
        instance: The instance in which the group records its commits.
        kafka: The resource of the group.
        letter: The value of the record.

    Raises:
        BatchRefusedError: The record is no dead letter of the group, or is not recorded in Dagster.
    """
    try:
        value = json.loads(letter)
        range_ = OffsetRange(
            value["topic"],
            *(operator.index(value[name]) for name in ("partition", "start", "until")),
        )
        group_id = value["group_id"]
    except (ValueError, TypeError, KeyError) as error:
        msg = (
            "this is not a dead letter: it needs the fields topic, partition, start, until and "
            "group_id"
        )
        raise BatchRefusedError(msg) from error
    if group_id != kafka.group_id or not Topics.of(kafka.topics).have(range_.topic):
        msg = (
            f"this dead letter does not belong to group {kafka.group_id} and one of its topics "
            f"({', '.join(kafka.topics)})"
        )
        raise BatchRefusedError(msg)
    if not _is_recorded(instance, kafka.group_id, range_):
        msg = (
            f"Dagster has no record of a dead letter of group {kafka.group_id} for {range_}: "
            "processing the range again could duplicate its records"
        )
        raise BatchRefusedError(msg)
    return range_


def _is_recorded(instance: dg.DagsterInstance, group_id: str, range_: OffsetRange) -> bool:
    wanted = dg.AssetRecordsFilter(
        GroupAssets.of(group_id).offsets, asset_partitions=[str(range_.topic_partition)]
    )
    cursor: str | None = None
    while True:
        found = instance.fetch_materializations(wanted, limit=_RECORDS_PER_QUERY, cursor=cursor)
        for commit in (record.asset_materialization for record in found.records):
            if commit is not None and "dead_letter" in commit.metadata:
                bounds = [commit.metadata[name].value for name in ("start", "until")]
                if bounds == [range_.start, range_.until]:
                    return True
        if not found.has_more:
            return False
        cursor = found.cursor

"""What a member writes into the dead-letter topic: one JSON record for each range that was given up, keyed by the range.

Owns the fields of the record, and what Dagster can say about why the last run failed. It holds no record of the range itself: those stay in
their topic for as long as its retention lets them.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.core.events import DeadLetterFailed, DeadLetterStored

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.consumer.dead_letters import Delivery
    from dagster_rebalance.core.commands import StoreDeadLetter
    from dagster_rebalance.orchestration.runs import RunLedger

MOST_ERROR_CHARACTERS = 8_000
"""A stack trace may be as long as it likes; a record may not."""


class Sender(Protocol):
    """What sends the records: `consumer.dead_letters.DeadLetterProducer`."""

    def send(self, key: str, value: str) -> None:
        """Begin to send a record, unless one with its key is under way."""

    def deliveries(self) -> tuple[Delivery, ...]:
        """The records that ended since the last call."""


def _now() -> datetime:
    return datetime.now(timezone.utc)


class DeadLetters:
    """The dead letters of one member.

    Args:
        sender: Sends them.
        runs: Says why runs failed.
        group_id: The consumer group.
        now: The time that a record carries.
    """

    def __init__(self, sender: Sender, runs: RunLedger, group_id: str, *, now: Callable[[], datetime] = _now) -> None:
        self._sender = sender
        self._runs = runs
        self._group_id = group_id
        self._now = now
        self._under_way: dict[str, StoreDeadLetter] = {}

    def store(self, letter: StoreDeadLetter) -> None:
        """Begin to store a letter. Does not wait."""
        if letter.range.key not in self._under_way:
            value = self._value(letter)
            self._under_way[letter.range.key] = letter
            self._sender.send(letter.range.key, value)

    def answers(self) -> tuple[DeadLetterStored | DeadLetterFailed, ...]:
        """What became of the letters since the last call."""
        found = ((self._under_way.pop(delivery.key), delivery.problem) for delivery in self._sender.deliveries())
        return tuple(DeadLetterFailed(letter, problem) if problem else DeadLetterStored(letter) for letter, problem in found)

    def _value(self, letter: StoreDeadLetter) -> str:
        range_ = letter.range
        return json.dumps(
            {
                "topic": range_.topic,
                "partition": range_.partition,
                "start": range_.start,
                "until": range_.until,
                "group_id": self._group_id,
                "batch_id": letter.batch_id,
                "run_ids": list(letter.run_ids),
                "error": self._runs.why_failed(letter.run_ids[-1])[:MOST_ERROR_CHARACTERS],
                "time": self._now().isoformat(timespec="seconds"),
            }
        )

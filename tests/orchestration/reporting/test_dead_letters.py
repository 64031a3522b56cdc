"""Letters on their way to the dead-letter topic: what fails is asked for again."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from tests.orchestration.parts import span

LETTER = StoreDeadLetter(span(0), 1, "b", ("3f61351e-1",))


class Sender:
    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.sent: list[str] = []

    def send(self, key: str, value: str) -> None:
        if self.fails:
            self.fails -= 1
            msg = f"no token to log in with for {len(value)} bytes"
            raise BrokerError(msg, retriable=True)
        self.sent.append(key)


def test_letter_that_could_not_be_sent_is_sent_again() -> None:
    sender = Sender(1)
    letters = DeadLetters(sender, "etl")  # type: ignore[arg-type]
    with pytest.raises(BrokerError, match="no token"):
        letters.store(LETTER, "the disk is full")
    assert not letters.is_under_way(LETTER.range)
    letters.store(LETTER, "the disk is full")
    assert letters.is_under_way(LETTER.range)
    assert sender.sent == [LETTER.range.key]

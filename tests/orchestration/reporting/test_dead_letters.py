"""Letters on their way to the dead-letter topic: what fails is asked for again."""

from __future__ import annotations

import json

import pytest

from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.letters import Headers, Letter, LetterKind, parse_record
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from tests.orchestration.parts import span

LETTER = StoreDeadLetter(span(0), 1, "b", ("3f61351e-1",))


class Sender:
    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.sent: list[tuple[str, bytes | None, Headers]] = []

    def send(self, key: str, value: bytes | None, headers: Headers) -> None:
        if self.fails:
            self.fails -= 1
            msg = "no token to log in with"
            raise BrokerError(msg, retriable=True)
        self.sent.append((key, value, headers))


def test_letter_that_could_not_be_sent_is_sent_again() -> None:
    sender = Sender(1)
    letters = DeadLetters(sender, "etl")  # type: ignore[arg-type]
    with pytest.raises(BrokerError, match="no token"):
        letters.store(LETTER, "the disk is full")
    assert not letters.is_under_way(LETTER.range)
    letters.store(LETTER, "the disk is full")
    assert letters.is_under_way(LETTER.range)
    (sent,) = sender.sent
    letter = parse_record(*sent)
    assert isinstance(letter, Letter)
    assert (letter.kind, letter.range, letter.reason) == (
        LetterKind.RANGE,
        LETTER.range,
        "the disk is full",
    )
    assert (letter.group_id, letter.batch_id, letter.run_id) == ("etl", "b", "3f61351e-1")
    assert json.loads(letter.value or b"")["run_ids"] == ["3f61351e-1"]

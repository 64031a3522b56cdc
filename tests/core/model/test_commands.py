"""Phrases of commands, and the comparison of writes with what Kafka stores."""

from __future__ import annotations

from typing import get_args

import pytest

from dagster_rebalance.core.model import commands
from dagster_rebalance.core.model.letters import Letter, LetterKind
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from tests.core.world import span, tp


def test_each_command_has_a_distinct_phrase() -> None:
    kinds = get_args(commands.Command)
    phrases = [command.doing for command in kinds]
    assert len(set(phrases)) == len(kinds)
    assert not [phrase for phrase in phrases if not phrase.split()[0].endswith("ing")]


@pytest.mark.parametrize("kind", LetterKind)
def test_command_has_the_key_of_its_letter(kind: LetterKind) -> None:
    range_ = span(0, 9, 10)
    is_record = kind is LetterKind.RECORD
    command = commands.StoreDeadLetter(range_, 1, "b1", ("run1",), is_record=is_record)
    assert command.key == Letter(range_, "bad", kind=kind).key


@pytest.mark.parametrize(
    ("expected", "topic_id", "found", "is_due"),
    [
        (None, "old", {"orders": "new"}, False),
        (None, "old", {"orders": "old"}, True),
        (None, "old", {}, True),
        (None, "", {"orders": "new"}, True),
        (OffsetAndMetadata(5), "old", {"orders": "new"}, True),
    ],
)
def test_first_write_is_due_unless_its_topic_was_recreated(
    expected: OffsetAndMetadata | None, topic_id: str, found: dict[str, str], *, is_due: bool
) -> None:
    write = commands.OffsetWrite(tp(0), 1, expected, OffsetAndMetadata(7), topic_id)
    ids = {topic: found.get(topic, topic_id) for topic in commands.topics_to_verify([write])}
    result = commands.sort_writes([write], {tp(0): expected}, ids)
    assert (result.due, result.changed) == (([write], []) if is_due else ([], [write]))

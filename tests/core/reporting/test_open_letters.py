"""The open dead letters of a group."""

from __future__ import annotations

from dagster_rebalance.core.model.letters import (
    Letter,
    LetterKind,
    LetterState,
    Malformed,
    Place,
    StateChange,
)
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.core.reporting.open_letters import (
    LetterCount,
    LetterPace,
    OpenLetterFold,
    OpenLetters,
    count_letters,
)
from tests.core.operators.test_letter_selection import letter


def test_letters_are_counted_by_partition_and_reason_without_numbers() -> None:
    letters = [
        letter(1, reason="record 1 has no id"),
        letter(22, reason="record 22\nhas no id"),
        letter(3, partition=1, reason="record 3 has no id"),
        letter(30, until=40, reason="record 30 has no id"),
    ]
    assert count_letters(letters) == [
        LetterCount(TopicPartition("orders", 0), LetterKind.RECORD, "record # has no id", 2),
        LetterCount(TopicPartition("orders", 0), LetterKind.RANGE, "record # has no id", 1),
        LetterCount(TopicPartition("orders", 1), LetterKind.RECORD, "record # has no id", 1),
    ]


def test_only_open_letters_are_kept() -> None:
    fold = OpenLetterFold("dead", "shop")
    found: list[Letter | StateChange | Malformed] = [
        *(letter(at, reason=f"row {at}") for at in range(3)),
        StateChange("orders-0-1", LetterState.REPLAYED, "ada", "", 5),
        StateChange("orders-0-9", LetterState.DISCARDED, "ada", "", 5),
        Malformed("it is empty"),
    ]
    for at, one in enumerate(found):
        fold.add(Place(0, at), one)
    row = LetterCount(TopicPartition("orders", 0), LetterKind.RECORD, "row #", 2)
    assert fold.open_letters() == OpenLetters("dead", 2, 1, 1, (row,))
    assert str(fold.open_letters()) == "2 open dead letters, 2 of orders-0: row #"
    fold.add(Place(0, 6), letter(1, reason="row 1"))
    assert fold.open_letters().letters == 3, "a letter that is stored again is open"


def test_letter_of_another_partition_that_is_read_after_its_change_is_closed() -> None:
    """The topic has got more partitions, and a read does not follow the times of the records."""
    fold = OpenLetterFold("dead", "shop")
    for at in (1, 2, 3):
        fold.add(Place(1, at), StateChange(f"orders-0-{at}", LetterState.REPLAYED, "ada", "", 5))
    fold.add(Place(0, 0), letter(1, time_ms=3))
    fold.add(Place(0, 1), letter(2, time_ms=4))
    fold.add(Place(1, 9), letter(2, time_ms=6))
    found = fold.open_letters()
    assert (found.letters, found.closed) == (1, 1), "letter 2 was stored again, 3 has no letter"
    fold.add(Place(1, 10), letter(1, time_ms=7))
    fold.add(Place(1, 11), letter(3, time_ms=7))
    assert fold.open_letters().letters == 3, "stored again after their change"


def test_many_reasons_are_cut() -> None:
    fold = OpenLetterFold("dead", "shop")
    assert str(fold.open_letters()) == "no open dead letter"
    for at in range(23):
        fold.add(Place(0, at), letter(1, partition=at))
    shown = fold.open_letters()
    assert (shown.letters, len(shown.rows), shown.more) == (23, 20, 3)


def test_first_letter_is_shown_at_once_and_others_after_five_minutes() -> None:
    none, one, two = (OpenLetters("dead", number, 0, 0) for number in range(3))
    assert LetterPace().is_due(0.0)
    assert LetterPace().is_news(none, 0.0)
    shown = LetterPace(10.0, one, 10.0)
    assert not shown.is_due(39.0)
    assert shown.is_due(40.0)
    assert shown.is_news(none, 11.0)
    assert not shown.is_news(two, 309.0)
    assert shown.is_news(two, 310.0)
    assert not shown.is_news(one, 999.0)

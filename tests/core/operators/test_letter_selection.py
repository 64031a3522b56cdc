"""Which letters an operator names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.letters import (
    Letter,
    LetterEntry,
    LetterFold,
    LetterKind,
    LetterState,
    Place,
    StateChange,
)
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.operators.letter_selection import (
    LetterFilter,
    chosen_letters,
    named_letters,
    newest_first,
)

PLACE = {"topic": "dead", "group_id": "my shop"}


def letter(
    offset: int, *, partition: int = 0, until: int = 0, reason: str = "bad", time_ms: int = 0
) -> Letter:
    """The letter of a record, or of a range."""
    return Letter(
        OffsetRange("orders", partition, offset, until or offset + 1),
        reason,
        b"{}",
        LetterKind.RANGE if until else LetterKind.RECORD,
        group_id="shop",
        time_ms=time_ms,
    )


def folded(*found: Letter | StateChange) -> dict[str, LetterEntry]:
    fold = LetterFold()
    for at, one in enumerate(found):
        fold.add(Place(0, at), one)
    return fold.entries


def taken(wanted: LetterFilter, *found: Letter | StateChange) -> list[str]:
    return [
        entry.letter.key
        for entry in folded(*found).values()
        if wanted.takes(entry) and entry.letter
    ]


def test_filter_takes_partitions_by_selector_or_name() -> None:
    letters = [letter(1), letter(1, partition=12), letter(2, partition=12)]
    assert taken(LetterFilter(), *letters) == ["orders-0-1", "orders-12-1", "orders-12-2"]
    for selector in ("orders:12", "orders-12", "ord*:12"):
        assert taken(LetterFilter([selector]), *letters) == ["orders-12-1", "orders-12-2"]
    assert taken(LetterFilter(["orders"]), *letters) == taken(LetterFilter(), *letters)
    assert not taken(LetterFilter(["pay*", "orders:1"]), *letters)


def test_selectors_that_cannot_match_are_refused_and_those_without_letters_named() -> None:
    entries = folded(letter(1), letter(1, partition=12)).values()
    wanted = LetterFilter(["orders:12", "orders:3", "orders-0", "pay"])
    assert wanted.unmatched(entries) == ("orders:3", "pay")
    for selector in ("", "orders:1@3", "a b"):
        with pytest.raises(ConfigurationError, match="cannot name partitions: write orders:3"):
            LetterFilter([selector])


def test_filter_takes_reasons_times_and_states() -> None:
    letters = [letter(1, reason="ValueError: X", time_ms=5), letter(2, time_ms=9)]
    closed = StateChange("orders-0-2", LetterState.DISCARDED, "ada", "", 10)
    lost = StateChange("orders-0-3", LetterState.DISCARDED, "ada", "", 10)
    assert taken(LetterFilter(containing="valueerror"), *letters) == ["orders-0-1"]
    assert taken(LetterFilter(since_ms=6), *letters) == ["orders-0-2"]
    is_open = LetterFilter(states=frozenset({LetterState.OPEN}))
    assert taken(is_open, *letters, closed, lost) == ["orders-0-1"]


def test_newest_letters_come_first_and_changes_without_letters_are_left_out() -> None:
    lost = StateChange("orders-0-3", LetterState.DISCARDED, "ada", "", 10)
    entries = folded(letter(1, time_ms=9), letter(2, time_ms=4), letter(4, time_ms=9), lost)
    keys = [entry.letter and entry.letter.key for entry in newest_first(entries.values())]
    assert keys == ["orders-0-4", "orders-0-1", "orders-0-2"]


def test_named_letters_are_found_once_and_missing_ones_refused() -> None:
    lost = StateChange("orders-0-3", LetterState.DISCARDED, "ada", "", 10)
    entries = folded(letter(1), letter(2), lost)
    (found,) = named_letters(entries, ["orders-0-2", "orders-0-2"], **PLACE)
    assert found is entries["record:orders-0-2"]
    with pytest.raises(
        ConfigurationError, match=r"dead has no letter orders-0-3, x: `dag"
    ) as problem:
        named_letters(entries, ["orders-0-1", "orders-0-3", "x"], **PLACE)
    assert "--group 'my shop' --topic dead`" in str(problem.value)
    with pytest.raises(ConfigurationError, match=r"has no letter 0, 1, 2, 3, 4 and 2 more: "):
        named_letters(entries, map(str, range(7)), **PLACE)


def test_open_letters_are_chosen_by_key_or_all_by_reason() -> None:
    entries = folded(
        letter(1, reason="no id"),
        letter(2),
        letter(3),
        StateChange("orders-0-3", LetterState.REPLAYED, "ada", "fixed", 10),
    )

    def chosen(*keys: str, everything: bool = False, containing: str = "") -> list[str]:
        found = chosen_letters(entries, keys, everything=everything, containing=containing, **PLACE)
        return [entry.letter.key for entry in found if entry.letter]

    assert chosen("orders-0-2") == ["orders-0-2"]
    assert chosen(everything=True) == ["orders-0-1", "orders-0-2"]
    assert chosen(everything=True, containing="NO") == ["orders-0-1"]
    for keys, more, problem in (
        ((), {}, "name either the keys of letters, or --all"),
        (("orders-0-1",), {"everything": True}, "name either the keys of letters, or --all"),
        (("orders-0-1",), {"containing": "no"}, "pass it with --all, without keys"),
        ((), {"everything": True, "containing": "yes"}, "no open letter matches"),
        (("orders-0-3",), {}, "letter orders-0-3 is already replayed by ada: name open"),
        (("orders-0-4",), {}, "has no letter orders-0-4"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            chosen(*keys, **more)


def test_key_of_two_letters_is_refused_and_each_has_an_id() -> None:
    record = replace(letter(1), range=OffsetRange("orders-3", 1, 2, 3))
    range_ = replace(letter(1, until=2), range=OffsetRange("orders", 3, 1, 2))
    entries = folded(record, range_)
    with pytest.raises(ConfigurationError, match="record:orders-3-1-2 or range:orders-3-1-2"):
        named_letters(entries, ["orders-3-1-2"], **PLACE)
    found = named_letters(entries, ["range:orders-3-1-2", "record:orders-3-1-2"], **PLACE)
    assert [entry.letter for entry in found] == [range_, record]
    assert len(chosen_letters(entries, [], everything=True, containing="", **PLACE)) == 2

"""Dead letters are parsed from their Kafka records, and folded into open and closed ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.letters import (
    MAX_REASON_CHARACTERS,
    Headers,
    Letter,
    LetterFold,
    LetterKind,
    LetterLimit,
    LetterStamp,
    LetterState,
    Malformed,
    Place,
    StateChange,
    parse_record,
)
from dagster_rebalance.core.model.offsets import MAX_OFFSET, OffsetRange
from tests.core.world import span

LETTER = Letter(
    span(3, 1207, 1208),
    "no such customer",
    b"{}",
    record_key=b"k",
    headers=(("trace", b"1"), ("empty", None)),
    timestamp_ms=1_000,
    group_id="orders",
    batch_id="b-1",
    run_id="run1",
    attempt=0,
    time_ms=2_000,
)
RANGE = Letter(span(3, 0, 10), "Boom", b"{...}", LetterKind.RANGE, group_id="orders", time_ms=1)
DISCARDED = StateChange(LETTER.key, LetterState.DISCARDED, "ann", "test data", 3_000)
REPLAYED = StateChange(LETTER.key, LetterState.REPLAYED, "ann", "fixed", 3_000, "run9")
OLD_RANGE = {
    "topic": "orders",
    "partition": 3,
    "start": 0,
    "until": 10,
    "group_id": "orders",
    "batch_id": "b-1",
    "run_ids": ["run1", "run2"],
    "error": "Boom",
    "time": "1970-01-01T00:00:02+00:00",
}


@pytest.mark.parametrize("letter", [LETTER, RANGE, Letter(span(0, 5, 6), "")])
def test_parsed_letter_is_the_stored_one(letter: Letter) -> None:
    assert parse_record(*letter.record) == letter


@pytest.mark.parametrize("change", [DISCARDED, REPLAYED])
def test_parsed_state_is_the_stored_one_and_its_value_is_not_null(change: StateChange) -> None:
    assert change.record.value == b""
    assert parse_record(*change.record) == change


def test_stamp_names_the_attempt() -> None:
    bare = replace(LETTER, group_id="", batch_id="", run_id="", attempt=None, time_ms=None)
    assert bare.stamped(LetterStamp("orders", "b-1", "run1", 0, 2_000)) == LETTER


def test_letter_headers_follow_those_of_the_record() -> None:
    key, value, headers = LETTER.record
    assert (key, value) == ("orders-3-1207", b"{}")
    assert headers == [
        ("trace", b"1"),
        ("empty", None),
        ("dead_letter.kind", b"record"),
        ("dead_letter.topic", b"orders"),
        ("dead_letter.partition", b"3"),
        ("dead_letter.offset", b"1207"),
        ("dead_letter.timestamp_ms", b"1000"),
        ("dead_letter.reason", b"no such customer"),
        ("dead_letter.group_id", b"orders"),
        ("dead_letter.batch_id", b"b-1"),
        ("dead_letter.run_id", b"run1"),
        ("dead_letter.attempt", b"0"),
        ("dead_letter.time_ms", b"2000"),
        ("dead_letter.key", b"k"),
    ]
    assert ("dead_letter.until", b"10") in RANGE.record.headers


def test_letter_of_a_letter_keeps_the_headers_of_the_first() -> None:
    """A group may read the dead-letter topic of another group."""
    inner: Headers = [*LETTER.record.headers, *DISCARDED.record.headers]
    outer = replace(LETTER, range=OffsetRange("orders-dead", 0, 1, 2), headers=tuple(inner))
    empty = replace(outer, value=b"")
    assert parse_record(*outer.record) == outer
    assert parse_record(*empty.record) == empty


def test_long_reason_is_cut_and_surrogates_are_escaped() -> None:
    long = parse_record(*replace(LETTER, reason="\ud800" + "x" * 9_999).record)
    assert isinstance(long, Letter)
    assert long.reason == "\\ud800" + "x" * (MAX_REASON_CHARACTERS - 1)


def test_record_letter_of_an_earlier_version_is_read() -> None:
    headers = [
        ("trace", b"1"),
        ("dead_letter.topic", b"orders"),
        ("dead_letter.partition", b"3"),
        ("dead_letter.offset", b"1207"),
        ("dead_letter.reason", b"value: no"),
        ("dead_letter.key", None),
    ]
    assert parse_record(b"orders-3-1207", None, headers) == Letter(
        span(3, 1207, 1208), "value: no", headers=(("trace", b"1"),)
    )


@pytest.mark.parametrize(("runs", "last"), [(["run1", "run2"], "run2"), ([], "")])
def test_range_letter_of_an_earlier_version_is_read(runs: list[str], last: str) -> None:
    value = json.dumps({**OLD_RANGE, "run_ids": runs})
    assert parse_record("orders-3-0-10", value, None) == Letter(
        span(3, 0, 10),
        "Boom",
        value.encode(),
        LetterKind.RANGE,
        group_id="orders",
        batch_id="b-1",
        run_id=last,
        time_ms=2_000,
    )


KIND = ("dead_letter.kind", b"record")
ORIGIN = [("dead_letter.topic", b"orders"), ("dead_letter.partition", b"3")]


@pytest.mark.parametrize(
    ("key", "value", "headers", "problem"),
    [
        (None, None, None, "neither the headers of a letter nor a JSON object"),
        ("k", b"\xff", [], "cannot be read"),
        ("k", "[" * 100_000, [], "RecursionError"),
        ("k", json.dumps({**OLD_RANGE, "until": 0}), [], "0 <= start < until"),
        ("k", json.dumps({**OLD_RANGE, "topic": 5}), [], "TypeError"),
        ("k", json.dumps({**OLD_RANGE, "time": 5}), [], "TypeError"),
        ("k", json.dumps(OLD_RANGE), [], "its key is not orders-3-0-10"),
        ("k", None, [("dead_letter.kind", b"other")], "'other' is not a valid LetterKind"),
        ("k", None, [KIND], "invalid literal"),
        ("k", None, [KIND, *ORIGIN, ("dead_letter.offset", b"5")], "its key is not orders-3-5"),
        ("k", None, [KIND, ("dead_letter.offset", b"9" * 5_000)], "ValueError"),
        ("k", None, [("dead_letter.kind", None), *ORIGIN, ("dead_letter.offset", b"-1")], "0 <="),
        ("k", b"", [("dead_letter.state", b"open")], "cannot be marked as open"),
        ("k", b"", [("dead_letter.state", b"\xff")], "is not a valid LetterState"),
        ("k", b"{}", [("dead_letter.state", b"discarded")], "KeyError"),
    ],
)
def test_record_of_another_program_is_named(
    key: str | None, value: str | bytes | None, headers: Headers | None, problem: str
) -> None:
    found = parse_record(key, value, headers)
    assert isinstance(found, Malformed)
    assert problem in found.problem
    assert len(found.problem) < 400


_NAMES = st.sampled_from(["kind", "state", "topic", "partition", "offset", "until", "time_ms", "x"])
_VALUES = st.none() | st.binary(max_size=9) | st.sampled_from([b"record", b"range", b"discarded"])


@given(
    st.none() | st.binary(max_size=9),
    st.none() | st.binary(max_size=30) | st.sampled_from([b"[]", b"{}", b"1e999"]),
    st.lists(st.tuples(_NAMES.map("dead_letter.{}".format), _VALUES)),
)
def test_parse_never_raises(key: bytes | None, value: bytes | None, headers: Headers) -> None:
    LetterFold().add(Place(0, 0), parse_record(key, value, headers))


@given(
    st.builds(
        Letter,
        st.builds(span, st.integers(0, 9), st.just(1), st.integers(2, MAX_OFFSET)),
        st.text(max_size=9, alphabet=st.characters(codec="utf-8")),
        st.none() | st.binary(max_size=9),
        st.just(LetterKind.RANGE),
        st.none() | st.binary(max_size=9),
        st.lists(
            st.tuples(st.text(st.characters(codec="utf-8")), st.none() | st.binary(max_size=3))
        ).map(tuple),
        st.none() | st.integers(),
        attempt=st.none() | st.integers(0, 9),
    )
)
def test_every_letter_is_parsed_back(letter: Letter) -> None:
    assert parse_record(*letter.record) == letter


def fold(*records: tuple[int, int, Letter | StateChange | Malformed]) -> LetterFold:
    folded = LetterFold()
    for partition, offset, found in records:
        folded.add(Place(partition, offset), found)
    return folded


def states(folded: LetterFold) -> dict[str, LetterState]:
    counted = {state: number for state, number in folded.counts.items() if number}
    shown = [entry for state in LetterState for entry in folded.in_state(state)]
    by_state: dict[LetterState, int] = {}
    for entry in shown:
        by_state[entry.state] = by_state.get(entry.state, 0) + 1
    assert counted == by_state
    return {entry.letter.key: entry.state for entry in shown if entry.letter}


def test_newest_record_of_a_key_counts() -> None:
    both = fold((0, 0, LETTER), (0, 1, RANGE), (0, 2, DISCARDED))
    assert states(both) == {
        "orders-3-1207": LetterState.DISCARDED,
        "orders-3-0-10": LetterState.OPEN,
    }
    both.add(Place(0, 3), replace(REPLAYED, key=RANGE.key, kind=LetterKind.RANGE))
    assert states(both)["orders-3-0-10"] is LetterState.REPLAYED
    both.add(Place(0, 4), REPLAYED)
    assert states(both)["orders-3-1207"] is LetterState.REPLAYED


def test_record_and_range_with_the_same_key_are_two_letters() -> None:
    record = replace(LETTER, range=OffsetRange("orders-3", 1, 2, 3))
    range_ = replace(RANGE, range=OffsetRange("orders", 3, 1, 2))
    assert record.key == range_.key == "orders-3-1-2"
    closed = replace(DISCARDED, key=range_.key, kind=LetterKind.RANGE)
    both = fold((0, 0, record), (0, 1, range_), (0, 2, closed))
    assert {name: entry.state for name, entry in both.entries.items()} == {
        "record:orders-3-1-2": LetterState.OPEN,
        "range:orders-3-1-2": LetterState.DISCARDED,
    }
    assert parse_record(*closed.record) == closed


def test_letter_after_a_state_is_open_again_with_the_new_reason() -> None:
    again = fold((0, 0, LETTER), (0, 1, REPLAYED), (0, 2, replace(LETTER, reason="still")))
    assert states(again) == {LETTER.key: LetterState.OPEN}
    entry = again.entries[LETTER.id]
    assert (entry.letter and entry.letter.reason, entry.place) == ("still", Place(0, 2))


def test_repeat_of_an_open_letter_is_dropped_and_counted() -> None:
    repeated = fold((0, 0, LETTER), (0, 1, replace(LETTER, reason="again")), (1, 0, LETTER))
    entry = repeated.entries[LETTER.id]
    assert (entry.letter, entry.place, entry.repeats) == (LETTER, Place(0, 0), 2)
    assert states(repeated) == {LETTER.key: LetterState.OPEN}


def test_letter_of_another_record_with_the_same_offset_replaces_the_former() -> None:
    """The source topic was recreated, so its records have other timestamps."""
    newer = replace(LETTER, timestamp_ms=(LETTER.timestamp_ms or 0) + 1, reason="new")
    entry = fold((0, 0, LETTER), (0, 1, newer)).entries[LETTER.id]
    assert (entry.letter, entry.place, entry.repeats) == (newer, Place(0, 1), 0)
    without_time = replace(newer, timestamp_ms=None)
    assert fold((0, 0, LETTER), (0, 1, without_time)).entries[LETTER.id].repeats == 1


def test_fold_of_a_group_has_its_letters_only() -> None:
    own, other = replace(LETTER, group_id="orders"), replace(LETTER, group_id="audit")
    folded = LetterFold("orders")
    folded.add(Place(0, 0), own)
    folded.add(Place(0, 1), other)
    folded.add(Place(0, 2), replace(DISCARDED, group_id="audit"))
    folded.add(Place(0, 3), replace(RANGE, group_id=""))
    assert (folded.entries[LETTER.id].letter, folded.others) == (own, 2)
    assert states(folded) == {LETTER.key: LetterState.OPEN, RANGE.key: LetterState.OPEN}
    folded.add(Place(0, 9), replace(DISCARDED, group_id=""))
    assert states(folded)[LETTER.key] is LetterState.DISCARDED
    change = replace(DISCARDED, group_id="audit")
    assert parse_record(*change.record) == change


def test_record_that_is_read_twice_changes_nothing() -> None:
    records: list[tuple[int, int, Letter | StateChange | Malformed]]
    records = [(0, 0, LETTER), (0, 1, DISCARDED), (0, 2, LETTER), (0, 3, REPLAYED)]
    twice = fold(*records, *records)
    assert twice == fold(*records)


def test_state_without_a_letter_is_not_counted() -> None:
    """Retention has deleted the letter."""
    orphan = fold((0, 5, DISCARDED), (0, 6, REPLAYED))
    assert (states(orphan), orphan.entries[LETTER.id].state) == ({}, LetterState.REPLAYED)
    orphan.add(Place(0, 7), LETTER)
    assert states(orphan) == {LETTER.key: LetterState.OPEN}


def test_time_decides_across_partitions() -> None:
    """The partition of a key changes when the dead-letter topic grows."""
    state_first = fold((1, 0, DISCARDED), (0, 9, LETTER))
    letter_first = fold((0, 9, LETTER), (1, 0, DISCARDED))
    assert states(state_first) == states(letter_first) == {LETTER.key: LetterState.DISCARDED}
    assert state_first.entries[LETTER.id].place == Place(0, 9)
    later = replace(LETTER, time_ms=4_000)
    assert states(fold((1, 0, DISCARDED), (0, 9, LETTER), (0, 10, later))) == {
        LETTER.key: LetterState.OPEN
    }
    assert states(fold((0, 9, later), (1, 0, DISCARDED))) == {LETTER.key: LetterState.OPEN}


def test_old_letter_of_a_partition_does_not_replace_the_state_that_follows_it() -> None:
    lost = fold((0, 5, DISCARDED), (0, 4, LETTER))
    assert states(lost) == {}


def test_malformed_records_are_counted_and_the_first_named() -> None:
    folded = fold(*((0, offset, Malformed("no")) for offset in range(20)))
    assert (folded.malformed, len(folded.malformed_shown)) == (20, 10)
    assert folded.malformed_shown[0] == "partition 0 offset 0: no"
    assert states(folded) == {}


def test_fold_without_values_keeps_no_payload() -> None:
    slim = LetterFold(keeps_values=False)
    slim.add(Place(0, 0), LETTER)
    bare = replace(LETTER, value=None, record_key=None, headers=())
    assert slim.entries[LETTER.id].letter == bare


@pytest.mark.parametrize(
    ("text", "offsets", "allowed"),
    [
        ("100", 5, 100),
        (" 1 ", 1_000_000, 1),
        ("1%", 100_000, 1_000),
        (" 1 % ", 100_000, 1_000),
        ("0.01%", 1_000_000, 100),
        ("0.01%", 1, 10),
        ("100%", 50, 50),
    ],
)
def test_limit_is_a_number_or_a_share(text: str, offsets: int, allowed: int) -> None:
    assert LetterLimit.parse(text).allowed(offsets) == allowed


@pytest.mark.parametrize("text", ["", "0", "0%", "-1", "1.5", "101%", "x", "1 %%", "1e3", "\u0661"])
def test_limit_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="such as 100, or a share"):
        LetterLimit.parse(text)

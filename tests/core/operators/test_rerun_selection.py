"""The ranges of a rerun."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import Bounds, OffsetRange
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.operators.rerun_selection import (
    DisjointRanges,
    PartitionHistory,
    ProcessedRange,
    Selection,
    Span,
    joined_ranges,
    select,
    shown_ranges,
)
from dagster_rebalance.core.runs.rerun_batch import (
    MOST_RANGES_PER_RUN,
    MOST_RUNS,
    Rerun,
    RerunBatch,
    batches_of,
    packed,
    rerun_of,
    unpacked,
)
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from tests.core.world import span, tp

if TYPE_CHECKING:
    from collections.abc import Iterable

RERUN = Rerun("abc", "ada", "the fix of 1.4", 1_700_000_000.0)
NOT_YET = "not committed yet: the group is at offset {}, and processes them itself"
THREE = [span(0, 0, 10), span(0, 10, 20), span(0, 20, 30)]


def past(
    ranges: Iterable[OffsetRange], committed: int | None = 30, log: Bounds | None = None
) -> PartitionHistory:
    """A partition whose ranges were committed one after the other, at 100, 101 and so on."""
    oldest_first = [ProcessedRange(range_, 100.0 + number) for number, range_ in enumerate(ranges)]
    return PartitionHistory(oldest_first[::-1], committed, log or Bounds(0, 1_000))


def chosen(
    meant: Span,
    one: PartitionHistory | None = None,
    runs: Iterable[RunSnapshot] = (),
    planned: Iterable[RerunBatch] = (),
) -> Selection:
    """The selection for one partition; by default with three committed ranges."""
    return select(meant, {tp(0): past(THREE) if one is None else one}, runs, planned)


def left(selection: Selection) -> list[str]:
    """The offsets left out, with the reasons."""
    return list(map(str, selection.left_out))


# The span


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"until": 5},
        {"before": 5.0},
        {"start": 0, "since": 1.0},
        {"start": 0, "before": 1.0},
        {"since": 0.0, "until": 1},
    ],
)
def test_span_has_either_offsets_or_times(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="name the part to process again"):
        Span(**parts)


@pytest.mark.parametrize("parts", [{"start": 5, "until": 5}, {"since": 5.0, "before": 4.0}])
def test_span_that_ends_before_it_begins_raises(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be after its beginning"):
        Span(**parts)


# Whole recorded ranges


@pytest.mark.parametrize(
    ("meant", "ranges", "widened"),
    [
        (Span(0), THREE, []),
        (Span(10, 20), THREE[1:2], []),
        (Span(12, 15), THREE[1:2], THREE[1:2]),
        (Span(5, 25), THREE, [THREE[0], THREE[2]]),
        (Span(29), THREE[2:], THREE[2:]),
        (Span(since=101.0), THREE[1:], []),
        (Span(since=100.5, before=102.0), THREE[1:2], []),
    ],
)
def test_recorded_ranges_are_repeated_whole(
    meant: Span, ranges: list[OffsetRange], widened: list[OffsetRange]
) -> None:
    selection = chosen(meant)
    assert selection.ranges == tuple(ranges)
    assert selection.widened == tuple(widened)
    assert left(selection) == []


def test_partitions_are_repeated_in_order() -> None:
    both = {tp(1): past([span(1, 0, 5)], 5), tp(0): past(THREE)}
    assert select(Span(since=0.0), both, (), ()).ranges == (*THREE, span(1, 0, 5))


def test_range_recorded_twice_is_repeated_once() -> None:
    assert chosen(Span(0), past([*THREE, THREE[1]])).ranges == tuple(THREE)


def test_range_is_selected_by_each_of_its_times() -> None:
    twice = past([*THREE, THREE[1]])
    for hour in (Span(since=101.0, before=102.0), Span(since=103.0)):
        assert chosen(hour, twice).ranges == (THREE[1],)


def test_replaced_range_is_left_out() -> None:
    again = [span(0, 10, 15), span(0, 15, 30)]
    selection = chosen(Span(0), past([*THREE, *again]))
    assert selection.ranges == (THREE[0], *again)
    again_later = "some of its offsets were processed again later with other bounds"
    assert left(selection) == [
        f"{THREE[1]}: {again_later}: {again[0]}, {again[1]}",
        f"{THREE[2]}: {again_later}: {again[1]}",
    ]
    # An old one that reaches back behind the new ones cannot be repeated either.
    selection = chosen(Span(0), past([span(0, 0, 20), span(0, 10, 30)]))
    assert selection.ranges == (span(0, 10, 30),)
    assert left(selection)[0] == f"orders-0 [0, 20): {again_later}: orders-0 [10, 30)"
    selection = chosen(Span(0), past([span(0, 0, 20), *(span(0, n, n + 1) for n in range(7))]))
    assert left(selection)[0].endswith(f", {span(0, 4, 5)} and 2 more")
    # A selection by time reports only the commits of that time.
    assert left(chosen(Span(since=103.0), past([*THREE, *again]))) == []


# Left out


def test_uncommitted_range_is_left_to_the_group() -> None:
    selection = chosen(Span(0, 40), past(THREE, committed=15))
    assert selection.ranges == (THREE[0],)
    assert left(selection) == [
        "orders-0 [10, 20): the group is at offset 15, so it will process these offsets itself",
        "orders-0 [20, 30): the group is at offset 15, so it will process these offsets itself",
        f"orders-0 [30, 40): {NOT_YET.format(15)}",
    ]


def test_selection_without_a_committed_offset_raises() -> None:
    with pytest.raises(
        ConfigurationError, match=r"nothing to process again: orders-0 \[0, 10\): t"
    ):
        chosen(Span(0), past(THREE, committed=None))
    with pytest.raises(ConfigurationError, match="nothing to process again: no commit of that"):
        chosen(Span(since=900.0))


def test_unrecorded_offsets_are_left_out() -> None:
    selection = chosen(Span(5, 50), past([span(0, 10, 20), span(0, 25, 30)], committed=40))
    assert selection.ranges == (span(0, 10, 20), span(0, 25, 30))
    assert left(selection) == [
        "orders-0 [5, 10): no recorded commit covers these offsets",
        "orders-0 [20, 25): no recorded commit covers these offsets",
        "orders-0 [30, 40): no recorded commit covers these offsets",
        f"orders-0 [40, 50): {NOT_YET.format(40)}",
    ]


def test_commit_with_unknown_ranges_is_left_out() -> None:
    late = replace(past(THREE), processed=[ProcessedRange(span(0, 0, 30), 1.0, is_whole=False)])
    with pytest.raises(ConfigurationError, match="recorded by the next owner"):
        chosen(Span(0), late)


def test_range_with_a_live_run_is_left_out() -> None:
    at_work = RunSnapshot("abcdef1234", "b-1", (span(0, 5, 12),), RunState.STARTED)
    ended = RunSnapshot("ended", "b-2", (span(0, 20, 30),), RunState.SUCCEEDED)
    selection = chosen(Span(0), runs=[at_work, ended])
    assert selection.ranges == (THREE[2],)
    assert left(selection) == [
        f"{range_}: run abcdef12 of the group may be working on it" for range_ in THREE[:2]
    ]


@pytest.mark.parametrize(
    ("shown", "parts"),
    [
        (["- `orders-0 [0, 4)`\n- `orders-1 [0, 9)`", "- `orders-0 [4, 9)`"], [(0, 4), (4, 9)]),
        (["`orders-0 [0, 9)`", "`orders-0 [9, 12)`", "`orders-0 [0, 9)`"], [(0, 9)]),
        (["`orders-0 [0, 4)`"], []),
        (["`orders-0 [0, 4)` `orders-0 [5, 9)`"], []),
        (["`orders-0 [0, 6)` `orders-0 [4, 9)`"], []),
        (["`orders-0 [0, 99)`", "`orders-0 [4, 4)`", "other text"], []),
        ([], []),
    ],
)
def test_joined_ranges_come_from_the_texts_of_the_run(
    shown: list[str], parts: list[tuple[int, int]]
) -> None:
    ranges = [one for text in shown for one in shown_ranges(text)]
    assert joined_ranges(span(0, 0, 9), ranges) == tuple(span(0, *part) for part in parts)


# Refused


@pytest.mark.parametrize(
    ("runs", "planned", "said"),
    [
        ([], [RerunBatch(RERUN, 1, (span(0, 5, 12),))], "rerun abc already includes"),
        (
            [RunSnapshot("abcdef1234", "r.xyz.1", (span(0, 5, 12),), RunState.WAITING)],
            [],
            "run abcdef12 of rerun xyz already includes",
        ),
    ],
)
def test_range_of_another_rerun_is_refused(
    runs: list[RunSnapshot], planned: list[RerunBatch], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        chosen(Span(0), runs=runs, planned=planned)
    assert chosen(Span(20), runs=runs, planned=planned).ranges == (THREE[2],)


def test_deleted_records_are_refused() -> None:
    there = "The first complete range begins at 20: rerun orders:0 --from-offset 20"
    with pytest.raises(ConfigurationError, match=rf"of orders-0 \[0, 10\).*begins at 15.*{there}"):
        chosen(Span(0), past(THREE, log=Bounds(15, 1_000)))
    assert chosen(Span(20), past(THREE, log=Bounds(15, 1_000))).ranges == (THREE[2],)
    with pytest.raises(ConfigurationError, match="Kafka has no complete range of the partition"):
        chosen(Span(0), past(THREE, log=Bounds(25, 1_000)))


def test_truncated_log_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"ends at 25\. It was truncated"):
        chosen(Span(0), past(THREE, log=Bounds(0, 25)))


def test_overlapping_finds_ranges_by_offsets() -> None:
    apart = DisjointRanges([span(0, 20, 30), span(0, 0, 10), span(1, 10, 20)])
    assert apart.overlapping(span(0, 10, 20)) == []
    assert apart.overlapping(span(2, 0, 10)) == []
    assert apart.overlapping(span(0, 9, 25))[:1] == [span(0, 0, 10)]
    assert apart.overlapping(span(0, 10, 99))[:1] == [span(0, 20, 30)]
    assert apart.overlapping(span(0, 29, 99))[:1] == [span(0, 20, 30)]
    assert apart.overlapping(span(0, 30, 99)) == []
    assert apart.overlapping(span(0, 9, 25)) == [span(0, 0, 10), span(0, 20, 30)]
    assert apart.overlapping(span(0, 10, 20)) == []


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(
    lengths=lengths,
    again_from=st.none() | st.integers(0, 60),
    again=lengths,
    skipped=st.sets(st.integers(0, 11), max_size=3),
    committed=st.integers(0, 110),
    meant=st.builds(
        lambda start, length: Span(start, start + length if length else None),
        st.integers(0, 110),
        st.integers(0, 120),
    ),
)
def test_each_offset_is_in_its_newest_range_or_left_out(
    *,
    lengths: list[int],
    again_from: int | None,
    again: list[int],
    skipped: set[int],
    committed: int,
    meant: Span,
) -> None:
    ranges = [r for n, r in enumerate(_in_a_row(0, lengths)) if n not in skipped]
    if again_from is not None:
        ranges += _in_a_row(again_from, again)
    start = meant.start or 0
    recorded = past(ranges, committed)
    try:
        selection = chosen(meant, recorded)
    except ConfigurationError as error:
        assert "nothing to process again" in str(error)  # noqa: PT017 - no error is fine, too
        return
    repeated = [offset for r in selection.ranges for offset in range(r.start, r.until)]
    assert len(set(repeated)) == len(repeated)
    assert set(selection.ranges) <= set(ranges)
    assert max(repeated) < committed
    newest = {offset: r for r in ranges for offset in range(r.start, r.until)}
    assert all(newest[o] == r for r in selection.ranges for o in range(r.start, r.until))
    told = {o for one in selection.left_out for o in range(one.range.start, one.range.until)}
    end = committed if meant.until is None else meant.until
    assert set(range(start, end)) <= {*repeated, *told}


def _in_a_row(start: int, lengths: list[int]) -> list[OffsetRange]:
    found = []
    for length in lengths:
        found.append(span(0, start, start + length))
        start += length
    return found


# Batches


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"by": " "}, "give a name for the rerun"),
        ({"reason": ""}, "give a reason for the rerun"),
        ({"by": "x" * 61}, "a name may have at most 60 characters, and this one has 61"),
        ({"reason": "x" * 301}, "a reason may have at most 300 characters"),
        ({"runs_at_once": 0}, "runs_at_once=0 must be at least 1"),
    ],
)
def test_rerun_as_text(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        replace(RERUN, **parts)
    assert str(RERUN) == "rerun abc by ada: the fix of 1.4"


def test_batches_are_limited_by_records() -> None:
    ranges = [*THREE, span(0, 30, 99), span(0, 99, 100), span(1, 0, 5)]
    batches = batches_of(RERUN, ranges, records_per_run=20)
    assert [batch.ranges for batch in batches] == [
        tuple(THREE[:2]),
        (THREE[2],),
        (span(0, 30, 99),),
        (span(0, 99, 100), span(1, 0, 5)),
    ]
    assert [batch.batch_id for batch in batches] == ["r.abc.1", "r.abc.2", "r.abc.3", "r.abc.4"]
    assert {batch.rerun.batches for batch in batches} == {4}
    with pytest.raises(ConfigurationError, match="must be at least 1"):
        batches_of(RERUN, ranges, records_per_run=0)


def test_batch_fits_into_a_database_key() -> None:
    apart = [span(0, 10**12 + 9 * n, 10**12 + 9 * n + 1) for n in range(300)]
    for ranges in (apart, _in_a_row(10**12, [7] * 450)):
        batches = batches_of(RERUN, ranges, records_per_run=10**9)
        assert tuple(range_ for batch in batches for range_ in batch.ranges) == tuple(ranges)
        assert all(len(packed(batch.ranges)) <= 1_000 for batch in batches)
        assert all(len(batch.ranges) <= MOST_RANGES_PER_RUN for batch in batches)
    assert len(batches_of(RERUN, _in_a_row(0, [7] * 450), records_per_run=10**9)) == 3


def test_rerun_with_too_many_runs_raises() -> None:
    ranges = _in_a_row(0, [1] * (MOST_RUNS + 1))
    said = "would have 1001 runs, and 1000 is the maximum: "
    with pytest.raises(ConfigurationError, match=f"{said}select a shorter time"):
        batches_of(RERUN, ranges, records_per_run=1)
    with pytest.raises(ConfigurationError, match=f"{said}replay fewer letters"):
        batches_of(replace(RERUN, letters="dead"), ranges, records_per_run=1)


def test_batch_ids_of_reruns_are_distinct() -> None:
    assert rerun_of("r.abc.12") == "abc"
    for group_own in ("b-0123456789abcdef", str(StreamBatch("run-1", 1)), "", "r.abc", "r.a.b.1"):
        assert rerun_of(group_own) == ""
    assert StreamBatch.parse("r.abc.12") is None


@given(
    st.lists(
        st.builds(
            lambda topic, partition, start, length: OffsetRange(
                topic, partition, start, start + length
            ),
            st.sampled_from(["orders", "a.b-c_d"]),
            st.integers(0, 3),
            st.integers(0, 2**50),
            st.integers(1, 2**40),
        ),
        max_size=20,
    )
)
def test_packed_ranges_round_trip(ranges: list[OffsetRange]) -> None:
    assert unpacked(packed(ranges)) == tuple(ranges)


@pytest.mark.parametrize("text", ["orders", "orders:1:x+3", "orders:1:0+0", "o:1:0+1:2"])
def test_invalid_packed_text_raises(text: str) -> None:
    with pytest.raises(ValueError, match=re.compile(".")):
        unpacked(text)

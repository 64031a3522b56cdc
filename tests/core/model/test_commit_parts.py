"""Packed commits: nothing that another record can name is lost, whatever is merged."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.commit_parts import (
    _NEVER_MERGED,
    NO_COMMITS,
    CommitPart,
    CommitParts,
    most_parts,
    unpacked,
)
from tests.core.world import span

if TYPE_CHECKING:
    from collections.abc import Sequence


@st.composite
def commit_lists(draw: st.DrawFn, most: int = 90) -> list[CommitPart]:
    """Commits of streaming runs that take a partition over from each other."""
    first = draw(st.integers(0, 2**60))
    lengths = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=most))
    parts: list[CommitPart] = []
    run, number, at = 0, 0, draw(st.sampled_from([0.0, 1_790_000_000.0]))
    for until in list(accumulate(lengths, initial=first))[1:]:
        if draw(st.integers(0, 20)) == 0:
            run, number = draw(st.integers(0, 3)), 0
        number += draw(st.integers(1, 3))
        at += draw(st.integers(0, 50)) / 10
        parts.append(CommitPart(until, f"run-{run}", number, number, at))
    return parts


def appended(parts: Sequence[CommitPart], most: int = 1_000) -> CommitParts:
    result = NO_COMMITS
    for part in parts:
        result = result.append(part, most)
    return result


def rounded(parts: Sequence[CommitPart]) -> list[CommitPart]:
    return [part._replace(at=None if part.at is None else round(part.at, 1)) for part in parts]


@given(commit_lists())
def test_commit_parts_below_the_limit_are_exact(parts: list[CommitPart]) -> None:
    joined = appended(parts)
    assert rounded(list(joined)) == rounded(parts)
    assert (len(joined), joined.commits) == (len(parts), len(parts))
    assert (joined.until, NO_COMMITS.until) == (parts[-1].until, 0)


@given(commit_lists(), st.integers(16, 40))
def test_packed_commit_parts_are_unpacked_as_they_were(parts: list[CommitPart], most: int) -> None:
    joined = appended(parts, most)
    packed = joined.packed(0.0)
    assert rounded(list(packed)) == rounded(list(joined))
    again = list(unpacked(packed.text, packed.runs, packed.first_at))
    assert again == list(packed)
    assert sum(part.commits for part in again) == joined.commits == len(parts)


@given(commit_lists(), st.integers(16, 40))
def test_merged_commit_parts_cover_all_commits_in_order(parts: list[CommitPart], most: int) -> None:
    at = 0
    for merged in appended(parts, most):
        inner = parts[at : at + merged.commits]
        at += merged.commits
        assert {part.run_id for part in inner} == {merged.run_id}
        assert merged.until == inner[-1].until
        assert (merged.first_number, merged.number) == (inner[0].number, inner[-1].number)
        assert round(merged.at or 0, 1) == round(inner[-1].at or 0, 1)
    assert at == len(parts)


@given(commit_lists(most=300), st.integers(16, 40))
def test_commits_of_one_run_stay_within_the_limit(parts: list[CommitPart], most: int) -> None:
    joined = appended([part._replace(run_id="run") for part in parts], most)
    assert len(joined) <= most
    assert [part.commits for part in list(joined)[-_NEVER_MERGED:]] == [1] * min(
        len(parts), _NEVER_MERGED
    )


@pytest.mark.parametrize("most", range(_NEVER_MERGED + 3))
def test_commit_parts_under_a_tiny_limit_are_merged_to_few(most: int) -> None:
    joined = appended([CommitPart(end, "run", end, end) for end in range(1, 1_001)], most)
    assert len(joined) <= _NEVER_MERGED + 3
    assert joined.commits == 1_000


def test_no_merged_part_has_most_of_the_commits() -> None:
    parts = [CommitPart(end, "run", end, end, float(end)) for end in range(1, 3_001)]
    sizes = [part.commits for part in appended(parts, 16)]
    assert len(sizes) <= 16
    assert max(sizes) < 3_000 / 2


def test_commits_of_different_runs_are_not_merged() -> None:
    parts = [CommitPart(end, f"run-{end}") for end in range(1, 101)]
    joined = appended(parts, 16)
    assert [part.until for part in joined] == list(range(1, 101))
    assert joined.merges_from > joined.old.size


def _record(start: int, parts: Sequence[CommitPart], most: int) -> RecordCommit:
    last = parts[-1]
    range_ = span(0, start, last.until)
    joined = appended(parts[:-1], most)
    return RecordCommit(range_, 1, "b", last.run_id, 0, None, None, joined=joined)


@given(st.data(), commit_lists(), st.integers(16, 40))
def test_record_with_merged_commits_leaves_out_what_the_next_owner_has_recorded(
    data: st.DataObject, parts: list[CommitPart], most: int
) -> None:
    """The next owner has read the offset after one of the newest commits, and recorded up to it."""
    start = parts[0].until - 1
    exact, merged = _record(start, parts, 1_000), _record(start, parts, most)
    named = data.draw(st.lists(st.sampled_from(parts[-_NEVER_MERGED:]), max_size=3))
    others = data.draw(st.lists(st.integers(start, parts[-1].until), max_size=3))
    recorded = {(start, part.until, part.run_id) for part in named}
    recorded |= {(start, end, "another run") for end in others}
    recorded |= {(start + 1, end, parts[-1].run_id) for end in others}
    wanted, rest = exact.without(recorded), merged.without(recorded)
    assert (wanted is None) == (rest is None)
    if wanted is not None and rest is not None:
        assert wanted.range == rest.range
        assert rest.commits == wanted.commits


@given(st.data(), commit_lists(), st.integers(16, 40))
def test_late_record_is_left_out_if_a_record_with_merged_commits_has_it(
    data: st.DataObject, parts: list[CommitPart], most: int
) -> None:
    start = parts[0].until - 1
    merged = _record(start, parts, most)
    known = {(start, until, run_id) for until, run_id in merged.ends}
    part = data.draw(st.sampled_from(parts[-_NEVER_MERGED:]))
    late = replace(merged, range=span(0, start, part.until), run_id=part.run_id, joined=NO_COMMITS)
    assert late.without(known) is None


def test_limit_of_parts_falls_with_the_number_of_partitions() -> None:
    limits = [most_parts(count) for count in (0, 1, 8, 100, 500, 1_000, 10_000)]
    assert limits == [2_500, 2_500, 2_500, 200, 40, 20, 16]


def test_packed_commits_take_few_bytes() -> None:
    """5 minutes of a busy partition: 900 batches of about 40 offsets."""
    ends = accumulate((40 + number % 7 for number in range(900)), initial=10**9)
    parts = [
        CommitPart(end, "8a0d5d8c-98a5-4c49-8d5b-c4a5d0e4f9f6", number, number, number / 3)
        for number, end in enumerate(ends)
    ]
    joined = appended(parts)
    assert len(joined.packed(0.0).text) < 2_000
    assert sum(map(len, joined.old.columns)) < 7_000


def test_times_are_packed_on_another_clock_or_left_out() -> None:
    joined = appended([CommitPart(1, "r", at=5.0), CommitPart(2, "r", at=5.5)])
    assert [part.at for part in joined.packed(100.0)] == [105.0, 105.5]
    assert [part.at for part in joined.packed()] == [None, None]
    assert [part.at for part in appended([CommitPart(1, "r")]).packed(1.0)] == [None]


def test_limit_that_falls_merges_what_is_there() -> None:
    """More partitions were assigned since."""
    joined = appended([CommitPart(end, "run", end, end) for end in range(1, 901)])
    assert len(joined) == 900
    for end in range(901, 905):
        joined = joined.append(CommitPart(end, "run", end, end), 16)
    assert len(joined) <= 16
    assert joined.commits == 904


def _text(*numbers: int) -> str:
    return base64.b64encode(zlib.compress(bytes(numbers))).decode()


@pytest.mark.parametrize(
    "text",
    [
        "no base64!",
        base64.b64encode(b"no zlib").decode(),
        _text(),
        _text(5, 1),
        _text(1, 1, 9, 0, 0, 0, 0),
        _text(2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        _text(1, *[255] * 9, 127, 0, 0, 0, 0, 0),
    ],
    ids=["base64", "zlib", "empty", "cut", "no such run", "end does not grow", "too large"],
)
def test_damaged_parts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="are damaged"):
        unpacked(text, ["run"], None)

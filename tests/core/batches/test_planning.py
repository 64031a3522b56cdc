"""Which offsets are read next, and by which run."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.planning import (
    MOST_CLAIMS,
    Backlog,
    Batch,
    BatchLimits,
    is_ready,
    plan,
    runs_at_once,
    wait_limits,
)
from dagster_rebalance.core.model.errors import ConfigurationError
from tests.core.world import span, tp


def planned(
    backlogs: list[Backlog], limits: BatchLimits, *, runs_in_flight: int = 0, now: float = 100.0
) -> tuple[Batch, ...]:
    """The plan, with batch ids b1, b2 ..."""
    ids = count(1)
    return plan(
        backlogs,
        limits,
        runs_in_flight=runs_in_flight,
        new_batch_id=lambda _: f"b{next(ids)}",
        now=now,
    )


@st.composite
def backlogs(draw: st.DrawFn) -> list[Backlog]:
    """Backlogs of different partitions."""
    numbers = draw(st.lists(st.integers(0, 50), unique=True, max_size=20))
    return [
        Backlog(
            tp(number),
            start := draw(st.integers(0, 1000)),
            start + draw(st.integers(-5, 500)),
            draw(st.floats(0, 100)),
            draw(st.integers(0, 2)),
        )
        for number in numbers
    ]


limits_any = st.builds(
    BatchLimits,
    max_records_per_range=st.integers(1, 200),
    max_records_per_batch=st.integers(1, 400),
    max_ranges_per_run=st.integers(1, 4),
    max_runs_in_flight=st.integers(1, 5),
    max_claims_per_partition=st.integers(1, 2),
    min_records=st.integers(1, 50),
    max_wait_s=st.floats(0.1, 60),
)


@given(backlogs(), limits_any, st.integers(0, 6))
def test_plan_keeps_all_limits(
    given_backlogs: list[Backlog], limits: BatchLimits, runs_in_flight: int
) -> None:
    batches = planned(given_backlogs, limits, runs_in_flight=runs_in_flight)
    by_partition = {backlog.partition: backlog for backlog in given_backlogs}
    assert len(batches) <= max(0, limits.max_runs_in_flight - runs_in_flight)
    assert len({batch.batch_id for batch in batches}) == len(batches)
    ranges = [range_ for batch in batches for range_ in batch.ranges]
    assert len({range_.topic_partition for range_ in ranges}) == len(ranges)
    for batch in batches:
        assert 1 <= len(batch.ranges) <= limits.max_ranges_per_run
        assert sum(map(len, batch.ranges)) <= limits.max_records_per_batch
    for range_ in ranges:
        backlog = by_partition[range_.topic_partition]
        assert range_.start == backlog.start
        assert range_.until <= backlog.end
        assert len(range_) <= limits.max_records_per_range
        assert backlog.claims < limits.max_claims_per_partition
    assert not ranges or any(is_ready(backlog, limits, 100.0) for backlog in given_backlogs)


@given(backlogs(), limits_any, st.integers(0, 6))
def test_ready_partitions_fill_the_runs_in_order_of_waiting(
    given_backlogs: list[Backlog], limits: BatchLimits, runs_in_flight: int
) -> None:
    limits = replace(limits, max_records_per_batch=1_000)
    batches = planned(given_backlogs, limits, runs_in_flight=runs_in_flight)
    chosen = {range_.topic_partition for batch in batches for range_ in batch.ranges}
    ready = [
        b
        for b in given_backlogs
        if b.end > b.start
        and b.claims < limits.max_claims_per_partition
        and (b.end - b.start >= limits.min_records or 100.0 - b.waiting_since >= limits.max_wait_s)
    ]
    room = max(0, limits.max_runs_in_flight - runs_in_flight) * limits.max_ranges_per_run
    assert len(chosen & {b.partition for b in ready}) == min(room, len(ready))
    assert len(chosen) <= room
    left_out = [(b.waiting_since, b.start - b.end) for b in ready if b.partition not in chosen]
    taken = [(b.waiting_since, b.start - b.end) for b in ready if b.partition in chosen]
    assert not left_out or not taken or min(left_out) >= max(taken)


def test_backlogs_are_spread_over_free_runs() -> None:
    found = planned(
        [Backlog(tp(n), 0, 10 * (n + 1), 0.0) for n in range(4)],
        BatchLimits(max_records_per_range=40, max_runs_in_flight=3),
        runs_in_flight=1,
    )
    assert found == (
        Batch("b1", (span(1, 0, 20), span(3, 0, 40))),
        Batch("b2", (span(0, 0, 10), span(2, 0, 30))),
    )


@pytest.mark.parametrize(
    ("records", "runs"),
    [(1, 1), (25, 1), (26, 2), (50, 2), (51, 3), (75, 3), (76, 4), (100, 4), (1000, 4)],
)
def test_run_is_filled_before_next_is_opened(records: int, runs: int) -> None:
    backlogs = [Backlog(tp(n), 0, records, 0.0) for n in range(4)]
    found = planned(backlogs, BatchLimits(max_records_per_range=100))
    assert len(found) == runs
    assert sum(len(batch.ranges) for batch in found) == 4


def test_run_is_full_with_records_of_one_batch() -> None:
    found = planned(
        [Backlog(tp(n), 0, 100, 0.0) for n in range(8)],
        BatchLimits(max_records_per_batch=100, max_runs_in_flight=4),
    )
    assert [sum(map(len, batch.ranges)) for batch in found] == [100] * 4


def test_run_is_full_with_maximum_ranges() -> None:
    found = planned(
        [Backlog(tp(n), 0, 1, 0.0) for n in range(5)], BatchLimits(max_ranges_per_run=2)
    )
    assert sorted(len(batch.ranges) for batch in found) == [1, 2, 2]


def test_batch_is_cut_to_its_record_limit() -> None:
    sizes = (10, 500, 300)
    (batch,) = planned(
        [Backlog(tp(n), 0, size, 0.0) for n, size in enumerate(sizes)],
        BatchLimits(max_records_per_batch=100, max_runs_in_flight=1),
    )
    assert batch.ranges == (span(0, 0, 10), span(1, 0, 45), span(2, 0, 45))
    (few,) = planned(
        [Backlog(tp(n), 0, 9, waiting_since=float(n)) for n in range(3)],
        BatchLimits(max_records_per_batch=2, max_runs_in_flight=1),
    )
    assert few.ranges == (span(0, 0, 1), span(1, 0, 1)), "those that have waited longest"


def test_few_records_wait_until_max_wait() -> None:
    limits = BatchLimits(min_records=50, max_wait_s=10)
    few = Backlog(tp(0), 0, 49, waiting_since=95.0)
    assert planned([few], limits, now=104.9) == ()
    assert planned([few], limits, now=105.0) == (Batch("b1", (span(0, 0, 49),)),)


@pytest.mark.parametrize(
    ("given", "streams", "waits"),
    [
        ((None, None), False, (1000, 30.0)),
        ((None, None), True, (1000, 0.2)),
        ((None, 0.0), True, (1, 0.0)),
        ((1, None), True, (1, 0.0)),
        ((None, 0.0), False, (1, 0.0)),
        ((None, 5.0), False, (1000, 5.0)),
        ((None, 5.0), True, (1000, 5.0)),
        ((1, None), False, (1, 0.0)),
        ((7, None), False, (7, 30.0)),
        ((7, None), True, (7, 30.0)),
        ((7, 5.0), True, (7, 5.0)),
    ],
)
def test_wait_limits_default_by_form_of_run(
    given: tuple[int | None, float | None], *, streams: bool, waits: tuple[int, float]
) -> None:
    assert wait_limits(*given, most=5000, streams=streams) == waits


@pytest.mark.parametrize(
    ("given", "local", "runs"), [(None, False, 4), (None, True, 1), (3, False, 3), (3, True, 3)]
)
def test_runs_in_flight_default_to_one_with_local_spark(
    given: int | None, *, local: bool, runs: int
) -> None:
    assert runs_at_once(given, has_local_spark=local) == runs


def test_min_records_default_is_capped_by_range_size() -> None:
    assert wait_limits(None, None, most=10, streams=False) == (10, 30.0)


def test_waiting_partitions_join_due_runs() -> None:
    limits = BatchLimits(min_records=50, max_wait_s=30, max_ranges_per_run=2)
    due, *others = (Backlog(tp(n), 0, 5, waiting_since=70.0 + n) for n in range(3))
    assert planned([*others], limits) == ()
    assert planned([due, *others], limits) == (Batch("b1", (span(0, 0, 5), span(1, 0, 5))),)


def test_waiting_partitions_displace_no_due_records() -> None:
    limits = BatchLimits(max_records_per_batch=100, min_records=50, max_wait_s=30)
    due, small, large = (
        Backlog(tp(n), 0, size, waiting_since=99.0) for n, size in enumerate((90, 10, 40))
    )
    assert planned([due, large, small], limits) == (Batch("b1", (span(0, 0, 90), span(1, 0, 10))),)


def test_leftover_records_wait_since_first_seen() -> None:
    limits = BatchLimits(min_records=50, max_wait_s=30)
    left = Backlog(tp(0), 60, 70, waiting_since=90.0, seen_since=75.0)
    assert planned([left], limits, now=104.9) == ()
    assert planned([left], limits, now=105.0) == (Batch("b1", (span(0, 60, 70),)),)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_records_per_range": 0}, "max_records_per_range=0 must be at least 1"),
        ({"max_records_per_batch": 0}, "max_records_per_batch=0 must be at least 1"),
        ({"max_ranges_per_run": 0}, "max_ranges_per_run=0"),
        ({"max_runs_in_flight": 0}, "max_runs_in_flight=0"),
        ({"max_claims_per_partition": 0}, "max_claims_per_partition=0"),
        (
            {"max_claims_per_partition": MOST_CLAIMS + 1},
            f"max_claims_per_partition={MOST_CLAIMS + 1} must be at most {MOST_CLAIMS}",
        ),
        ({"min_records": 0}, "min_records=0"),
        ({"min_records": 100}, "min_records=100 needs a max_wait_s above 0"),
    ],
)
def test_invalid_limits_are_refused(settings: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        BatchLimits(**settings)

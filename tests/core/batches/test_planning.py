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
    waits_for,
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
def test_a_plan_keeps_all_limits(
    given_backlogs: list[Backlog], limits: BatchLimits, runs_in_flight: int
) -> None:
    """Each range starts where its partition stands and ends within its bounds.

    No partition is named twice.
    """
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
def test_no_ready_partition_waits_while_there_is_room(
    given_backlogs: list[Backlog], limits: BatchLimits, runs_in_flight: int
) -> None:
    """No partition starves behind larger backlogs.

    A partition is left out only when all runs are full, and none that came later was preferred.
    """
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


def test_backlogs_are_spread_over_the_free_runs() -> None:
    """Runs work side by side; the long ones do not meet in one run."""
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
def test_a_run_is_filled_before_the_next_is_opened(records: int, runs: int) -> None:
    """Each run costs seconds, and a Spark of its own: a trickle must not open all there may be."""
    backlogs = [Backlog(tp(n), 0, records, 0.0) for n in range(4)]
    found = planned(backlogs, BatchLimits(max_records_per_range=100))
    assert len(found) == runs
    assert sum(len(batch.ranges) for batch in found) == 4


def test_a_run_is_full_with_as_many_records_as_one_batch_may_have() -> None:
    """Else one run works on a sliver of each partition, and nobody works beside it."""
    found = planned(
        [Backlog(tp(n), 0, 100, 0.0) for n in range(8)],
        BatchLimits(max_records_per_batch=100, max_runs_in_flight=4),
    )
    assert [sum(map(len, batch.ranges)) for batch in found] == [100] * 4


def test_a_run_is_full_with_as_many_ranges_as_it_may_have() -> None:
    """However few their records."""
    found = planned(
        [Backlog(tp(n), 0, 1, 0.0) for n in range(5)], BatchLimits(max_ranges_per_run=2)
    )
    assert sorted(len(batch.ranges) for batch in found) == [1, 2, 2]


def test_a_batch_is_no_longer_than_all_its_ranges_may_be_together() -> None:
    """A revoke waits for the batch at work; a trickle beside a backlog is read whole."""
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


def test_few_records_wait_for_more_but_not_for_ever() -> None:
    """`min_records` saves runs, `max_wait_s` bounds the latency."""
    limits = BatchLimits(min_records=50, max_wait_s=10)
    few = Backlog(tp(0), 0, 49, waiting_since=95.0)
    assert planned([few], limits, now=104.9) == ()
    assert planned([few], limits, now=105.0) == (Batch("b1", (span(0, 0, 49),)),)


@pytest.mark.parametrize(
    ("given", "streams", "waits"),
    [
        ((None, None), False, (1000, 30.0)),
        ((None, None), True, (1, 0.0)),
        ((None, 0.0), False, (1, 0.0)),
        ((None, 5.0), False, (1000, 5.0)),
        ((None, 5.0), True, (1000, 5.0)),
        ((1, None), False, (1, 0.0)),
        ((7, None), False, (7, 30.0)),
        ((7, None), True, (7, 30.0)),
        ((7, 5.0), True, (7, 5.0)),
    ],
)
def test_a_run_for_each_batch_waits_for_company_unless_told_otherwise(
    given: tuple[int | None, float | None], *, streams: bool, waits: tuple[int, float]
) -> None:
    """A trickle would make 28,000 runs a day, while streaming runs answer within a second."""
    assert waits_for(*given, most=5000, streams=streams) == waits


@pytest.mark.parametrize(
    ("given", "local", "runs"), [(None, False, 4), (None, True, 1), (3, False, 3), (3, True, 3)]
)
def test_one_run_with_a_local_spark_works_at_a_time_unless_told_otherwise(
    given: int | None, *, local: bool, runs: int
) -> None:
    """Four of them took three times as long for the same records as one."""
    assert runs_at_once(given, has_local_spark=local) == runs


def test_a_full_range_waits_for_no_company() -> None:
    """More records would not make it larger."""
    assert waits_for(None, None, most=10, streams=False) == (10, 30.0)


def test_what_waits_for_company_comes_along_with_what_is_due() -> None:
    """Else the partitions of a trickle get a run each, one after the other."""
    limits = BatchLimits(min_records=50, max_wait_s=30, max_ranges_per_run=2)
    due, *others = (Backlog(tp(n), 0, 5, waiting_since=70.0 + n) for n in range(3))
    assert planned([*others], limits) == ()
    assert planned([due, *others], limits) == (Batch("b1", (span(0, 0, 5), span(1, 0, 5))),)


def test_company_takes_nothing_from_what_is_due() -> None:
    """A trickle that may still wait would leave a backlog an eighth of its batch."""
    limits = BatchLimits(max_records_per_batch=100, min_records=50, max_wait_s=30)
    due, small, large = (
        Backlog(tp(n), 0, size, waiting_since=99.0) for n, size in enumerate((90, 10, 40))
    )
    assert planned([due, large, small], limits) == (Batch("b1", (span(0, 0, 90), span(1, 0, 10))),)


def test_what_a_batch_has_left_over_waits_no_longer_than_other_records() -> None:
    """It was there when the batch was cut, but has to wait for its turn behind others."""
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
def test_limits_that_cannot_work_are_refused(settings: dict[str, int], reason: str) -> None:
    """A limit of zero would be a silent standstill."""
    with pytest.raises(ConfigurationError, match=reason):
        BatchLimits(**settings)

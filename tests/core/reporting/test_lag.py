"""Lag of a group: its definition, observer, interval and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.events import PartitionLookup
from dagster_rebalance.core.model.offsets import (
    ANY_BOUNDS,
    Bounds,
    OffsetAndMetadata,
    TopicPartition,
)
from dagster_rebalance.core.model.topics import StartFrom
from dagster_rebalance.core.reporting.lag import (
    NO_LIMIT,
    FirstSince,
    GroupLag,
    GroupState,
    LagLimit,
    LagPace,
    Late,
    PartitionLag,
    Waiting,
    find_late,
    group_lag,
    is_lag_observer,
    watches_topics,
)
from tests.core.world import tp

EVERYTHING = [tp(0), tp(1), tp(2)]


def found(committed: int | None, until: int, start: int = 0) -> PartitionLookup:
    """What Kafka says of a partition."""
    stored = None if committed is None else OffsetAndMetadata(committed)
    return PartitionLookup(stored, Bounds(start, until))


def lag_of(
    said: dict[TopicPartition, PartitionLookup],
    standing: GroupState | None = None,
    start_from: StartFrom = StartFrom.EARLIEST,
    late: tuple[TopicPartition, ...] = (),
) -> GroupLag:
    """The lag of three partitions."""
    return group_lag(
        EVERYTHING,
        said,
        standing or GroupState(),
        start_from=start_from,
        late=Late(frozenset(late)),
    )


def test_lag_is_the_end_minus_the_committed_offset() -> None:
    lag = lag_of({tp(0): found(10, 12), tp(1): found(0, 40), tp(2): found(7, 7)})
    assert [(row.partition, row.lag) for row in lag.partitions] == [
        (tp(1), 40),
        (tp(0), 2),
        (tp(2), 0),
    ]
    assert (lag.total, lag.most, lag.unknown) == (42, 40, ())
    assert str(lag) == "lag 42 in 3 partitions, largest orders-1 (40)"


def test_lag_is_never_negative() -> None:
    assert lag_of({tp(0): found(13, 12)}).total == 0


@pytest.mark.parametrize(("start_from", "lag"), [(StartFrom.EARLIEST, 30), (StartFrom.LATEST, 0)])
def test_lag_without_a_committed_offset_counts_from_the_start_position(
    start_from: StartFrom, lag: int
) -> None:
    assert lag_of({tp(0): found(None, 50, 20)}, start_from=start_from).total == lag


@pytest.mark.parametrize("said", [{}, {tp(0): PartitionLookup(OffsetAndMetadata(3), ANY_BOUNDS)}])
def test_unknown_lag_is_not_zero(said: dict[TopicPartition, PartitionLookup]) -> None:
    lag = lag_of({**said, tp(1): found(0, 5), tp(2): found(5, 5)})
    assert lag.unknown == (tp(0),)
    assert lag.partitions[0].state == "its leader did not answer in time"
    assert (lag.total, lag.most) == (5, 5)
    assert str(lag) == (
        "lag 5 in 2 of 3 partitions, largest orders-1 (5); the lag of orders-0 is not known: no "
        "leader answered in time"
    )


def test_row_has_state_and_run() -> None:
    standing = GroupState(
        {tp(0): "orders-0: it failed"},
        {tp(0): "paused", tp(1): "paused"},
        {tp(2): "run-1"},
        {tp(0): ("run-0", "b-0", "")},
    )
    lag = lag_of(dict.fromkeys([tp(0), tp(1), tp(2)], found(0, 1)), standing)
    assert [(row.state, row.run_id, row.failed_run) for row in lag.partitions] == [
        ("it failed", "", "run-0"),
        ("paused", "", ""),
        ("", "run-1", ""),
    ]
    assert (lag.stopped, lag.paused) == (1, 1)
    assert str(lag).endswith("; 1 run working on 1 of them; 1 stopped; 1 paused by an operator")


def test_lag_of_one_partition_or_none_as_text() -> None:
    assert str(GroupLag(())) == "lag 0 in 0 partitions"
    assert GroupLag(()).most == 0
    assert str(GroupLag((PartitionLag(tp(0), 0, 9, 9),))) == "lag 9 in 1 partition"


def row(committed: int, end: int) -> PartitionLag:
    """The lag of the first partition."""
    (found_row,) = group_lag(
        [tp(0)], {tp(0): found(committed, end)}, GroupState(), start_from=StartFrom.EARLIEST
    ).partitions
    return found_row


@pytest.mark.parametrize(
    ("committed", "first_since", "late"),
    [
        (3, 5, True),
        (5, 5, False),
        (7, 5, False),
        (9, None, True),  # all that waits is older than the limit
        (10, None, False),
        (10, 5, False),
    ],
)
def test_record_older_than_the_limit_is_late(
    *, committed: int, first_since: int | None, late: bool
) -> None:
    first = None if first_since is None else FirstSince(first_since, at_s=50.0)
    said = find_late([row(committed, 10)], {tp(0): first}, 30.0, 80.0)
    assert said == Late(frozenset({tp(0)} if late else ()))


def test_unknown_lag_is_not_late() -> None:
    unknown = PartitionLag(tp(0), 3, None, None)
    assert find_late([unknown], {tp(0): FirstSince(5, 50.0)}, 30.0, 80.0) == Late()


FUTURE = FirstSince(1, at_s=9e9)
"""Offset 1 has a timestamp in the future, so it is the first record since any time."""


def test_records_after_a_future_timestamp_are_late_by_earlier_scans() -> None:
    waiting = Waiting().observe([row(3, 10)], 100.0)
    for at, late in ((130.0, False), (130.1, True)):
        waiting = waiting.observe([row(4, 12)], at)
        said = find_late([row(4, 12)], {tp(0): FUTURE}, 30.0, at, waiting)
        assert said == Late(frozenset({tp(0)} if late else ()))


@pytest.mark.parametrize(
    ("committed", "end", "why"),
    [
        (10, 12, "all that was in the log has been committed"),
        (12, 12, "nothing waits"),
        (2, 12, "a person has moved the offset back"),
        (3, 9, "the topic was made again"),
    ],
)
def test_backlog_restarts_after_a_commit_or_reset(committed: int, end: int, why: str) -> None:
    waiting = Waiting().observe([row(3, 10)], 100.0)
    now = [row(committed, end)]
    assert not waiting.for_longer_than(30.0, now[0], 200.0), why
    assert not waiting.observe(now, 200.0).for_longer_than(30.0, now[0], 230.0), why


def test_backlog_is_kept_without_an_answer() -> None:
    unknown = PartitionLag(tp(0), 3, None, None)
    waiting = Waiting().observe([row(3, 10)], 100.0).observe([unknown], 110.0)
    assert not waiting.for_longer_than(30.0, unknown, 200.0)
    assert waiting.for_longer_than(30.0, row(3, 10), 200.0)
    assert Waiting().observe([unknown], 110.0) == Waiting()


def test_future_timestamp_without_earlier_scans_is_undated() -> None:
    late = find_late([row(3, 10)], {tp(0): FUTURE}, 30.0, 80.0)
    assert late == Late(undated=frozenset({tp(0)}))
    lag = group_lag(
        [tp(0)], {tp(0): found(3, 10)}, GroupState(), start_from=StartFrom.EARLIEST, late=late
    )
    (text,) = LagLimit(seconds=30.0).exceeded(lag)
    assert "the waiting time of records of orders-0 is not known" in text


def test_exceeded_limits_are_named() -> None:
    lag = lag_of({tp(0): found(0, 9), tp(1): found(0, 2), tp(2): found(0, 0)}, late=(tp(1),))
    assert LagLimit(10).exceeded(lag) == ("11 offsets wait, more than 10",)
    assert LagLimit(11).exceeded(lag) == ()
    assert LagLimit(None, 30).exceeded(lag) == ("records of orders-1 wait for more than 30 s",)
    assert len(LagLimit(0, 30).exceeded(lag)) == 2
    assert (
        LagLimit(None, 30).exceeded(lag_of({p: found(0, 9) for p in (tp(0), tp(1), tp(2))})) == ()
    )


def test_unknown_lag_exceeds_every_limit() -> None:
    lag = GroupLag((PartitionLag(tp(0), 3, None, None),))
    said = ("the lag of orders-0 is not known: no leader answered",)
    assert str(lag) == "lag not known; the lag of orders-0 is not known: no leader answered in time"
    some = GroupLag((*lag.partitions, PartitionLag(tp(1), 0, 9, 9)))
    assert str(some).startswith("lag 9 in 1 of 2 partitions, largest orders-1 (9); the lag of")
    assert LagLimit(1000).exceeded(lag) == LagLimit(None, 60).exceeded(lag) == said
    assert NO_LIMIT.exceeded(lag) == ()


def test_limit_with_a_value_is_true() -> None:
    assert (bool(NO_LIMIT), bool(LagLimit(0)), bool(LagLimit(None, 1.0))) == (False, True, True)


@pytest.mark.parametrize(
    ("records", "seconds", "said"),
    [
        (-1, None, "lag_within_records=-1 must be at least 0"),
        (1, 0, "lag_within_s=0 must be a number above"),
        (1, float("inf"), "lag_within_s=inf must be a number above"),
        (1, float("nan"), "lag_within_s=nan must be a number above"),
    ],
)
def test_invalid_limit_raises(records: int, seconds: float | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        LagLimit(records, seconds)


def test_owner_of_the_first_partition_observes_the_lag() -> None:
    first = TopicPartition("a", 0)
    assert is_lag_observer({first, tp(3)}, ["orders", "a"])
    assert not is_lag_observer({TopicPartition("a", 1), tp(0)}, ["orders", "a"])
    assert not is_lag_observer(set(), [])


def test_possible_observers_watch_the_topics() -> None:
    assert watches_topics({tp(0)}, ["orders", "a"])
    assert watches_topics(set(), ["orders", "a"])
    assert not watches_topics({tp(1)}, ["orders", "a"])


def test_missing_topic_exceeds_every_limit() -> None:
    lag = group_lag(
        [tp(0)], {tp(0): found(3, 9)}, GroupState(missing=("a",)), start_from=StartFrom.EARLIEST
    )
    assert str(lag).startswith("lag 6 in 1 partition; topic a does not exist, or the principal may")
    assert "Create it, grant the ACL READ on it, or remove it from `topics`" in str(lag)
    assert LagLimit(6).exceeded(lag) == ("the lag of a is not known",)
    assert NO_LIMIT.exceeded(lag) == ()


def test_lag_is_read_at_its_interval() -> None:
    pace = LagPace(60.0)
    assert pace.is_due(0.0)
    pace = replace(pace, looked_at=100.0)
    assert not pace.is_due(159.0)
    assert pace.is_due(160.0)
    assert not LagPace(0.0).is_due(1e9)


def test_lag_is_shown_every_fifth_time_unless_it_needs_attention() -> None:
    lag, more = lag_of({tp(0): found(0, 1)}), lag_of({tp(0): found(0, 9)})
    pace = LagPace(60.0, shown=lag, shown_at=100.0)
    assert not pace.is_news(more, 399.0)
    assert pace.is_news(lag, 400.0)
    assert LagPace(60.0).is_news(lag, 160.0), "the first one"
    assert pace.is_news(replace(lag, stopped=1), 160.0)
    assert pace.is_news(replace(lag, paused=1), 160.0)
    assert pace.is_news(replace(lag, missing=("orders",)), 160.0)
    within = LagLimit(records=5)
    everywhere = dict.fromkeys(EVERYTHING, found(0, 1))
    pace = replace(pace, shown=lag_of(everywhere))
    assert not pace.is_news(lag_of(everywhere), 160.0, within)
    assert pace.is_news(lag_of({**everywhere, tp(0): found(0, 9)}), 160.0, within)

"""Which runs may be deleted: none that anything refers to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.claims import Claim, LastCommit, StoredPartition, encode
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.operators.prune_runs import (
    NOT_CHECKED,
    FinishedRun,
    PrunedKind,
    PrunePlan,
    PruneSearch,
    References,
    why_kept,
)
from tests.core.world import span, tp

STORED = {
    tp(0): encode(StoredPartition(100, (Claim(120, "b-5", "b-4"),), LastCommit(90, "b-3", "r-3"))),
    tp(1): encode(
        StoredPartition(
            100,
            (Claim(120, "s.r-7.4.1", "s.r-6.9.1"),),
            LastCommit(90, "s.r-5.8.1", "r-5", earlier=(LastCommit(80, "s.r-8.3.1", "r-9"),)),
        )
    ),
    tp(2): None,
    tp(5): encode(StoredPartition(100)),
}
FOUND = References.in_kafka(STORED)
BATCH = FinishedRun("r-1", 10.0, batch_id="b-1", ranges=(span(0, 0, 90), span(1, 0, 100)))
STREAM = FinishedRun("r-1", 10.0, stream="shop:stream/0")
RERUN = replace(BATCH, batch_id="r.3f2a.1")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (BATCH, ""),
        (STREAM, ""),
        (RERUN, ""),
        (replace(RERUN, batch_id="r.open.1"), "of an unfinished rerun"),
        (replace(BATCH, batch_id=""), "has no batch"),
        (replace(BATCH, ranges=()), "has no batch"),
        (replace(BATCH, ranges=(span(0, 90, 101),)), "its ranges are not committed"),
        (replace(BATCH, ranges=(span(2, 0, 1),)), "its ranges are not committed"),
        (replace(BATCH, ranges=(span(3, 0, 1),)), "its ranges are not committed"),
        *((replace(BATCH, batch_id=name), "named in Kafka") for name in ("b-3", "b-4", "b-5")),
        (replace(BATCH, run_id="r-3"), "named in Kafka"),
        *(
            (replace(STREAM, run_id=name), "named in Kafka")
            for name in ("r-5", "r-6", "r-7", "r-8", "r-9")
        ),
        (replace(STREAM, run_id="newest"), "the newest"),
    ],
)
def test_run_stays_while_anything_refers_to_it(run: FinishedRun, reason: str) -> None:
    references = replace(FOUND, needed={"newest": "the newest"}, reruns=frozenset({"open"}))
    assert why_kept(run, references) == reason


def test_unreadable_metadata_keeps_all_runs() -> None:
    with pytest.raises(ConfigurationError, match="metadata of the offsets of orders-4 cannot"):
        References.in_kafka({**STORED, tp(4): OffsetAndMetadata(5, "foreign")})


def test_plan_counts_runs_by_kind_and_by_reason() -> None:
    later = replace(STREAM, run_id="r-2", ended_at=5.0)
    plan = PrunePlan.of([STREAM, BATCH, later, replace(STREAM, run_id="r-7")], FOUND)
    assert plan.by_kind() == {PrunedKind.STREAMING: [later, STREAM], PrunedKind.BATCH: [BATCH]}
    assert plan.kept == {"named in Kafka": 1}
    assert PrunePlan((replace(STREAM, stream=""),), {}).by_kind() == {}


NOTHING = PrunePlan((), {})
KEPT = PrunePlan((), {"named in Kafka": 3})


def runs(*ends: float) -> PrunePlan:
    return PrunePlan(tuple(replace(BATCH, run_id=f"r-{end}", ended_at=end) for end in ends), {})


def test_search_goes_on_past_its_limit_until_a_run_is_found() -> None:
    search = PruneSearch(most=2, most_read=4)
    for _ in range(5):
        search.add(KEPT, NOTHING, read=3, is_at_end=False)
        assert not search.is_over
    search.add(KEPT, runs(1.0), read=9, is_at_end=False)
    assert not search.is_over
    search.add(KEPT, PrunePlan((), {"named in Kafka": 1}), read=4, is_at_end=False)
    assert search.is_over
    assert search.plan() == PrunePlan(runs(1.0).runs, {"named in Kafka": 22}, is_partial=True)


def test_search_that_finds_enough_runs_ends_with_the_oldest() -> None:
    search = PruneSearch(most=3, most_read=100)
    search.add(NOTHING, runs(5.0), read=1, is_at_end=False)
    assert search.missing == 2
    search.add(NOTHING, runs(9.0, 8.0, 7.0), read=3, is_at_end=False)
    assert search.is_over
    assert search.plan() == runs(5.0, 7.0, 8.0)


def test_search_at_the_last_run_ends_with_a_full_plan() -> None:
    search = PruneSearch(most=3, most_read=1)
    search.add(KEPT, runs(5.0), read=1, is_at_end=True)
    assert search.is_over
    assert search.plan() == replace(runs(5.0), kept=KEPT.kept)


@pytest.mark.parametrize("is_at_end", [False, True])
def test_search_with_runs_that_were_not_checked_ends_with_a_partial_plan(is_at_end: bool) -> None:  # noqa: FBT001
    search = PruneSearch(most=3, most_read=100)
    search.add(NOTHING, replace(runs(5.0), kept={NOT_CHECKED: 1}), read=2, is_at_end=is_at_end)
    assert search.is_over
    assert search.plan().is_partial == (not is_at_end)

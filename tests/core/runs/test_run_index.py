"""Index of runs by claimed range and by partition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.engine.run_results import apply_runs
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.partitions.ledger import LedgerEntry, OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.runs.run_index import RunIndex
from tests.core.world import span, tp

if TYPE_CHECKING:
    import pytest

WORKER = RunSnapshot("r1", "b", (), RunState.STARTED, active_partitions=frozenset({tp(0)}))


def test_run_index_keeps_order_of_runs_on_one_range() -> None:
    runs = [replace(WORKER, run_id=name, ranges=(span(0, 0, 5),)) for name in ("r2", "r1")]
    assert [run.run_id for run in RunIndex(runs).of("b", span(0, 0, 5))] == ["r2", "r1"]


def test_run_index_names_streaming_run_once_for_all_its_batches() -> None:
    """A streaming run is shown once for each claim that it has made."""
    index = RunIndex([replace(WORKER, batch_id=name) for name in "bcd"])
    assert index.other_streams(tp(0), {"r2"}) == ("r1",)
    assert index.other_streams(tp(0), {"r1"}) == ()
    assert index.other_streams(tp(1), ()) == ()


def test_run_results_compare_each_range_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a streaming run may have 10,000 ranges, and its end is applied to each."""
    ranges = tuple(span(number, 0, 5) for number in range(100))
    compared = 0
    equal = OffsetRange.__eq__

    def count(one: OffsetRange, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    index = RunIndex([replace(WORKER, ranges=ranges)])
    monkeypatch.setattr(OffsetRange, "__eq__", count)
    for range_ in ranges:
        ledger = OffsetLedger(range_.topic_partition, 1, 0, (LedgerEntry(range_, "b", 1.0),))
        owned = OwnedPartition(TopicPartition(range_.topic, range_.partition), 1, ledger=ledger)
        apply_runs(owned, ledger, frozenset("b"), index, settings=EngineSettings(), now=2.0)
    assert compared <= 10 * len(ranges)

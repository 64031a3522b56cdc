"""Deletion of old runs, on each storage: nothing that anything refers to is deleted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.operators import late_search
from dagster_rebalance.core.operators.prune_runs import FinishedRun
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.orchestration.operators import pruning
from dagster_rebalance.orchestration.operators.pruning import DAY_S, KafkaPositions, Pruning
from dagster_rebalance.orchestration.storage.commit_history import materialisation
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import GROUP_TAG, SLOT_TAG, STREAM_TAG
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import EACH_STORAGE, batch_request, claimed, make_run, span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange

TOMORROW = -1.0
"""Days, so that runs that have just ended are old."""


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


@dg.asset
def orders() -> None:
    """An asset."""


class Ground:
    """A group whose offset 100 of two partitions is committed."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.group_id = unique_name("group")
        self.assets = GroupAssets.of(self.group_id)
        self.stored: dict[object, OffsetAndMetadata | None] = {
            tp(0): encode(StoredPartition(100)),
            tp(1): encode(StoredPartition(100)),
        }
        self.starts = dict.fromkeys((tp(0), tp(1)), 0)
        self.kept: dict[str, int] = {}
        self.is_partial = False

    def batch(self, batch_id: str, *ranges: OffsetRange, is_live: bool = False) -> str:
        run = make_run(
            self.instance,
            batch_request(batch_id, *ranges),
            dg.DagsterRunStatus.STARTED,
            group_id=self.group_id,
        )
        if not is_live:
            self.end(run)
        return run.run_id

    def end(self, run: dg.DagsterRun) -> None:
        ended = dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=run.job_name)
        self.instance.report_dagster_event(ended, run.run_id)

    def stream(self, slot: int = 0) -> str:
        tags = {GROUP_TAG: self.group_id, STREAM_TAG: f"shop:{self.group_id}", SLOT_TAG: str(slot)}
        return dg.materialize([orders], instance=self.instance, tags=tags).run_id

    def late(self, run_id: str, range_: OffsetRange) -> None:
        commit = RecordCommit(range_, 1, "b", run_id, 0, None, None, is_late=True)
        record = materialisation(commit, self.assets.offsets, "blue")
        self.instance.report_runless_asset_event(record)

    def prune(self, *, days: float = TOMORROW, most: int = 100) -> set[str]:
        of_group = Pruning(self.instance, self.assets, self.group_id)
        positions = KafkaPositions(self.stored, self.starts)  # type: ignore[arg-type] # partitions
        plan = of_group.plan(lambda: positions, days=days, most=most)
        before = self.runs()
        assert before >= {run.run_id for run in plan.runs}
        deleted = {run.run_id for run in of_group.delete(plan)}
        assert self.runs() == before - deleted
        self.kept = dict(plan.kept)
        self.is_partial = plan.is_partial
        return deleted

    def runs(self) -> set[str]:
        of_group = dg.RunsFilter(tags={GROUP_TAG: self.group_id})
        return {run.run_id for run in self.instance.get_runs(of_group)}


@pytest.fixture
def ground(instance: dg.DagsterInstance) -> Ground:
    return Ground(instance)


def test_runs_of_committed_batches_are_deleted_with_their_events(ground: Ground) -> None:
    done = ground.batch("b-1", span(0, 0, 50), span(1, 0, 100))
    open_ = ground.batch("b-2", span(0, 50, 101))
    live = ground.batch("b-3", span(0, 0, 10), is_live=True)
    ground.stored[tp(1)] = claimed(100, 120, "b-4")
    named = ground.batch("b-4", span(1, 0, 10))
    assert ground.prune(days=3) == set()
    assert ground.prune() == {done}
    assert ground.runs() == {open_, live, named}
    assert ground.kept == {"its ranges are not committed": 1, "named in Kafka": 1}
    assert not ground.instance.all_logs(done)
    assert ground.prune() == set()


def test_runs_of_other_groups_stay(ground: Ground) -> None:
    other = Ground(ground.instance)
    run_id = other.batch("b-1", span(0, 0, 50))
    assert ground.prune() == set()
    assert other.prune() == {run_id}


def test_newest_run_of_a_sensor_and_of_an_asset_stays(ground: Ground) -> None:
    first, second, third = ground.stream(), ground.stream(1), ground.stream()
    assert ground.prune() == {first}
    assert ground.kept == {
        "the newest run of its sensor": 1,
        "made the newest materialization of an asset": 1,
    }
    last = ground.instance.get_latest_materialization_event(orders.key)
    assert last is not None
    assert last.run_id == third
    assert ground.runs() == {second, third}


def test_oldest_runs_are_deleted_up_to_the_limit(ground: Ground) -> None:
    runs = [ground.batch(f"b-{number}", span(0, number, number + 1)) for number in range(5)]
    assert ground.prune(most=2) == set(runs[:2])
    assert ground.prune(most=9) == set(runs[2:])


def test_run_that_a_live_run_repeats_stays(ground: Ground) -> None:
    parent_id = ground.batch("b-1", span(0, 0, 50))
    parent = ground.instance.get_run_by_id(parent_id)
    again = make_run(
        ground.instance,
        batch_request("b-1", span(0, 0, 50)),
        dg.DagsterRunStatus.STARTED,
        group_id=ground.group_id,
        parent=parent,
    )
    assert ground.prune() == set()
    ground.end(again)
    assert ground.prune() == {parent_id, again.run_id}


def test_run_of_a_late_record_stays_while_kafka_has_the_records(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_RECORDS_PER_QUERY", 1)
    late, other = ground.batch("b-1", span(0, 0, 50)), ground.batch("b-2", span(1, 0, 50))
    ground.late("some run", span(1, 0, 5))
    ground.late(late, span(0, 0, 50))
    assert ground.prune() == {other}
    ground.starts[tp(0)] = 50
    assert ground.prune() == {late}


@pytest.mark.parametrize("days", [0.5, 2.0, 40.0])
def test_late_record_is_found_however_long_the_group_was_off(ground: Ground, days: float) -> None:
    """Nothing was recorded between the end of the run and its late record."""
    killed = FinishedRun("killed", time.time() - days * DAY_S, stream="shop:orders/0")
    ground.late(killed.run_id, span(0, 0, 50))
    late = Pruning(ground.instance, ground.assets, ground.group_id)._late([killed], {})
    assert late == {"killed": "rerun needs the bounds of its ranges"}


def test_runs_after_the_last_read_record_stay_and_the_next_call_deletes_them(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_search, "LATE_WITHIN_S", 1e-6)
    monkeypatch.setattr(late_search, "CLOCKS_DIFFER_S", 0.0)
    monkeypatch.setattr(pruning, "_PAGE", 1)
    monkeypatch.setattr(pruning, "_RECORDS_PER_QUERY", 1)
    monkeypatch.setattr(pruning, "_MOST_RECORDS", 1)
    runs = []
    for number in range(2):
        runs.append(ground.batch(f"b-{number}", span(0, 0, 50)))
        for _ in range(3):
            ground.late("some run", span(1, 0, 5))
    assert ground.prune() == {runs[0]}
    assert ground.kept == {"not checked yet: call prune again": 1}
    assert ground.prune() == {runs[1]}


def test_runs_that_stay_do_not_hide_later_runs(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many runs stay for each reason, the same ones would be the oldest of each call."""
    monkeypatch.setattr(pruning, "_PAGE", 2)
    monkeypatch.setattr(pruning, "_READ_PER_DELETED", 1)
    late = [ground.batch(f"late-{number}", span(0, 0, 50)) for number in range(5)]
    for run_id in late:
        ground.late(run_id, span(0, 0, 50))
    for number in range(5):
        ground.batch(f"open-{number}", span(0, 100, 101))
    done = [ground.batch(f"done-{number}", span(1, 0, 50)) for number in range(5)]
    assert ground.prune(most=2) == set(done[:2])
    assert ground.kept["rerun needs the bounds of its ranges"] == 5
    assert ground.kept["its ranges are not committed"] == 5
    assert ground.prune(most=2) == set(done[2:4])
    assert ground.prune(most=2) == set(done[4:])
    assert not ground.is_partial
    assert ground.prune(most=2) == set()
    assert not ground.is_partial


def test_call_that_has_read_many_runs_ends_once_it_has_found_one(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_PAGE", 1)
    monkeypatch.setattr(pruning, "_READ_PER_DELETED", 1)
    first = ground.batch("b-1", span(0, 0, 50))
    for number in range(4):
        ground.batch(f"open-{number}", span(0, 100, 101))
    last = ground.batch("b-2", span(0, 0, 50))
    assert ground.prune(most=2) == {first}
    assert ground.is_partial
    assert ground.prune(most=2) == {last}


def test_claims_are_read_after_each_page_of_finished_runs(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends while prune reads may have made claims until then."""
    monkeypatch.setattr(pruning, "_PAGE", 1)
    ground.batch("open", span(0, 100, 101))
    of_group = Pruning(ground.instance, ground.assets, ground.group_id)
    calls = 0

    def read() -> KafkaPositions:
        nonlocal calls
        calls += 1
        if calls == 1:
            ground.batch("b-1", span(0, 0, 50))
            ground.stored[tp(1)] = claimed(100, 120, "b-1")
        return KafkaPositions({**ground.stored}, ground.starts)  # type: ignore[dict-item] # same

    plan = of_group.plan(read, days=TOMORROW, most=1)
    assert plan.runs == ()
    assert plan.kept == {"its ranges are not committed": 1, "named in Kafka": 1}
    assert calls == 3


def test_runs_of_an_unfinished_rerun_stay(ground: Ground) -> None:
    rerun = Rerun("3f2a", "ada", "fix", time.time())
    batch = RerunBatch(rerun, 1, (span(0, 0, 50),))
    store = RerunStore(ground.instance, ground.assets.reruns_name)
    store.add([batch])
    run_id = ground.batch(batch.batch_id, span(0, 0, 50))
    assert ground.prune() == set()
    store.remove([batch])
    assert ground.prune() == {run_id}


def test_unreadable_metadata_deletes_nothing(ground: Ground) -> None:
    ground.batch("b-1", span(0, 0, 50))
    ground.stored[tp(1)] = OffsetAndMetadata(5, "foreign")
    with pytest.raises(ConfigurationError, match="nothing was deleted"):
        ground.prune()


def test_run_that_was_deleted_since_the_plan_is_passed_over(ground: Ground) -> None:
    run_id = ground.batch("b-1", span(0, 0, 50))
    of_group = Pruning(ground.instance, ground.assets, ground.group_id)
    positions = KafkaPositions(ground.stored, ground.starts)  # type: ignore[arg-type] # partitions
    plan = of_group.plan(lambda: positions, days=TOMORROW)
    ground.instance.delete_run(run_id)
    assert list(of_group.delete(plan)) == []

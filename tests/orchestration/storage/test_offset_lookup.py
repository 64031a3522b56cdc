"""Look-up of an offset in the records of a group, on each storage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import KafkaBatch
from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.commit_parts import CommitPart, CommitParts
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata
from dagster_rebalance.core.operators.reset_offsets import Move
from dagster_rebalance.core.reporting.explain_offset import OffsetFacts, explain_offset
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.storage.commit_history import materialisation
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.offset_lookup import OffsetLookup
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import EACH_STORAGE, span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange

BOUNDS = Bounds(0, 10**6)


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


class Ground:
    """A group with recorded commits."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.assets = GroupAssets.of(unique_name("group"))

    def record(self, range_: OffsetRange, run_id: str, batch_id: str, **more: Any) -> None:  # noqa: ANN401 - fields of all kinds
        commit = RecordCommit(range_, 1, batch_id, run_id, 0, None, None, **more)
        self.instance.report_runless_asset_event(
            materialisation(commit, self.assets.offsets, "blue", commit.committed_at)
        )

    def move(self, before: int, after: int) -> None:
        move = Move(tp(0), OffsetAndMetadata(before), OffsetAndMetadata(after))
        Catalogue(self.instance, self.assets, NO_MEMBER).record_moves([move], by="ada", reason="")

    def facts(self, offset: int, committed: int = 10**6) -> OffsetFacts:
        stored = encode(StoredPartition(committed))
        return OffsetLookup(self.instance, self.assets, tp(0)).facts(offset, stored, BOUNDS)

    def explain(self, offset: int, committed: int = 10**6) -> str:
        return "\n".join(explain_offset(self.facts(offset, committed)))


@pytest.fixture
def ground(instance: dg.DagsterInstance) -> Ground:
    return Ground(instance)


def streamed(ground: Ground, *batches: list[OffsetRange]) -> str:
    """Let a streaming run materialize its asset for each batch, and return the id of the run."""

    @dg.asset
    def orders(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
        for ranges in batches:
            shown = KafkaBatch.for_testing(ranges).metadata()
            context.log_event(dg.AssetMaterialization("orders", metadata=shown))

    return dg.materialize([orders], instance=ground.instance).run_id


def test_offset_of_a_joined_record_names_its_batch_and_output(ground: Ground) -> None:
    run_id = streamed(ground, [span(0, 0, 10), span(1, 0, 9)], [span(0, 10, 20)], [span(0, 20, 30)])
    parts = CommitParts.of(
        [CommitPart(10, run_id, 1, 1, 100.0), CommitPart(20, run_id, 2, 2, 101.0)]
    )
    ground.record(span(0, 0, 30), run_id, f"s.{run_id}.3.1", joined=parts)
    for offset, number, key in ((0, 1, "0-10"), (19, 2, "10-20"), (20, 3, "20-30")):
        said = ground.explain(offset)
        assert f"batch {number} of streaming run {run_id}" in said
        assert f"`orders-0-{key}`," in said
        assert "asset orders has a materialization of" in said


def test_offset_of_a_run_of_one_batch_names_its_outputs(ground: Ground) -> None:
    run_id = streamed(ground, [span(0, 0, 10)])
    ground.record(span(0, 0, 10), run_id, "b-1")
    facts = ground.facts(5)
    assert facts.committed is not None
    assert (facts.committed.batch_id, facts.committed.range) == ("b-1", span(0, 0, 10))
    assert {output.asset for output in facts.outputs} == {"orders"}
    ground.instance.delete_run(run_id)
    assert f"no longer has run {run_id}" in ground.explain(5)


def test_offset_of_a_late_record_has_the_range_that_its_run_shows(ground: Ground) -> None:
    run_id = streamed(ground, [span(0, 0, 10)], [span(0, 10, 30)])
    ground.record(span(0, 0, 30), run_id, f"s.{run_id}.2.1", is_late=True)
    first, last = ground.facts(5).committed, ground.facts(10).committed
    assert first is not None
    assert last is not None
    assert (first.range, first.numbers, first.commits) == (span(0, 0, 10), (0, 0), 1)
    assert (last.range, last.numbers, last.commits) == (span(0, 10, 30), (2, 2), 1)


def test_offset_of_a_late_record_without_its_run_is_in_one_of_the_ranges(ground: Ground) -> None:
    ground.record(span(0, 0, 30), "gone", "s.gone.2.1", is_late=True)
    assert "one of those in [0, 30)" in ground.explain(5)


MANY = 45
"""More outputs than one page has on both sides of a commit."""


def streamed_fast(ground: Ground) -> str:
    """Let a run materialize its asset for many batches within a second."""

    @dg.asset
    def orders(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
        for number in range(1, MANY + 1):
            batch = KafkaBatch.for_testing([span(0, number * 10 - 10, number * 10)])
            shown = {**batch.metadata(), "batch": f"s.{context.run_id}.{number}.1"}
            context.log_event(dg.AssetMaterialization("orders", metadata=shown))

    return dg.materialize([orders], instance=ground.instance).run_id


def test_late_record_of_many_batches_names_the_output_of_each(ground: Ground) -> None:
    run_id = streamed_fast(ground)
    ground.record(span(0, 0, MANY * 10), run_id, f"s.{run_id}.{MANY}.1", is_late=True)
    for number in (1, MANY // 2, MANY - 1):
        said = ground.explain(number * 10 - 5)
        assert f"range of the batch is [{number * 10 - 10}, {number * 10})" in said
        assert said.endswith(f" UTC, by batch {number} of the run")


def test_output_is_found_among_many_of_one_second(ground: Ground) -> None:
    run_id = streamed_fast(ground)
    shown = ground.instance.get_records_for_run(
        run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    ).records
    parts = [
        CommitPart(number * 10, run_id, number, number, one.timestamp)
        for number, one in enumerate(shown, 1)
    ]
    joined = CommitParts.of(parts[:-1])
    last = parts[-1].at
    ground.record(
        span(0, 0, MANY * 10), run_id, f"s.{run_id}.{MANY}.1", joined=joined, committed_at=last
    )
    for number in (1, MANY // 2, MANY):
        (output,) = ground.facts(number * 10 - 5).outputs
        assert (output.number, output.is_joined) == (number, False)


def test_output_behind_the_limit_of_a_lookup_is_not_denied(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "dagster_rebalance.orchestration.storage"
    monkeypatch.setattr(f"{folder}.commit_history._SHOWN_READ", 5)
    monkeypatch.setattr(f"{folder}.output_lookup.EVENTS_READ", 30)
    run_id = streamed_fast(ground)
    ground.record(span(0, 0, MANY * 10), run_id, f"s.{run_id}.{MANY}.1", is_late=True)
    assert "shows its range among the 35 that were read" in ground.explain(5)
    (output,) = ground.facts((MANY - 10) * 10 + 5).outputs
    assert output.number == MANY - 9


def test_late_record_lists_no_output_of_other_batches(ground: Ground) -> None:
    """The run was killed before it showed the ranges of its last batches."""
    run_id = streamed(ground, [span(0, 0, 10)], [span(0, 10, 20)])
    ground.record(span(0, 20, 60), run_id, f"s.{run_id}.7.1", is_late=True)
    facts = ground.facts(25)
    assert facts.committed is not None
    assert (facts.committed.commits, facts.committed.is_run_known) == (None, True)
    assert not facts.outputs


def test_late_record_of_several_runs_names_the_last_one_as_possible(ground: Ground) -> None:
    """The note in Kafka has one run, and each batch of a sensor has its own."""
    run_id = streamed(ground, [span(0, 20, 30)])
    ground.record(span(0, 10, 30), run_id, "b-2", is_late=True)
    assert not ground.facts(15).outputs
    assert f"committed by run {run_id}, or by an earlier run, recorded" in ground.explain(15)


@pytest.mark.parametrize("others", [19, 150])
def test_output_is_found_among_those_of_other_runs(ground: Ground, others: int) -> None:
    run_id = streamed(ground, [span(0, 0, 10)])
    for _ in range(others):
        ground.instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
    ground.record(span(0, 0, 10), run_id, f"s.{run_id}.1.1")
    assert [output.asset for output in ground.facts(5).outputs] == ["orders"]


def test_reset_is_found_among_other_events_of_the_group(ground: Ground) -> None:
    ground.record(span(0, 0, 10), "run-1", "b-1")
    ground.move(10, 50)
    for _ in range(150):
        ground.instance.report_runless_asset_event(dg.AssetObservation(ground.assets.group))
    ground.record(span(0, 50, 60), "run-1", "b-2")
    assert "moved from 10 to 50 by ada" in ground.explain(20)


def test_skipped_offsets_that_were_processed_after_a_move_back_are_committed(
    ground: Ground,
) -> None:
    for start in range(0, 50, 10):
        ground.record(span(0, start, start + 10), "old", f"b-{start}")
    ground.move(50, 80)
    ground.record(span(0, 80, 90), "old", "b-80")
    ground.move(90, 50)
    for start in range(50, 400, 10):
        ground.record(span(0, start, start + 10), "new", f"c-{start}")
    for offset in range(50, 90, 10):
        assert f"committed by run new, batch c-{offset}" in ground.explain(offset + 5)
    assert "committed by run old, batch b-40" in ground.explain(45)


def test_offset_in_a_dead_letter_is_explained(ground: Ground) -> None:
    ground.record(span(0, 0, 30), "run-1", "b-1", is_dead_letter=True)
    assert "in a dead letter" in ground.explain(5)


def test_offset_that_a_reset_skipped_names_the_reset(ground: Ground) -> None:
    ground.record(span(0, 0, 10), "run-1", "b-1")
    ground.move(10, 50)
    assert "moved from 10 to 50 by ada" in ground.explain(20, committed=50)
    ground.record(span(0, 50, 60), "run-1", "b-2")
    assert "moved from 10 to 50 by ada" in ground.explain(20)
    assert "before the first record" not in ground.explain(20)


def test_newest_record_of_an_offset_wins_after_a_move_back(ground: Ground) -> None:
    for start in (0, 10, 20, 30):
        ground.record(span(0, start, start + 10), "old", f"b-{start}")
    ground.record(span(0, 10, 30), "new", "b-again")
    facts = ground.facts(15, committed=30)
    assert facts.committed is not None
    assert facts.committed.run_id == "new"
    said = ground.explain(35, committed=30)
    assert "not committed" in said


def test_materializations_of_users_are_no_records(ground: Ground) -> None:
    ground.record(span(0, 0, 10), "run-1", "b-1")
    for _ in range(3):
        ground.instance.report_runless_asset_event(
            dg.AssetMaterialization(ground.assets.offsets, partition="orders-0")
        )
    facts = ground.facts(5)
    assert facts.committed is not None
    assert facts.committed.run_id == "run-1"


def test_offset_of_another_partition_has_no_record(ground: Ground) -> None:
    ground.record(replace(span(0, 0, 10), partition=1), "run-1", "b-1")
    assert ground.facts(5).recorded == (None, None)


def test_lookup_reads_few_events_of_many(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        ground.record(span(0, number * 10, number * 10 + 10), "run-1", f"b-{number}")
    reads: list[int] = []
    fetch = ground.instance.fetch_materializations

    def counted(*arguments: Any, **more: Any) -> Any:  # noqa: ANN401 - those of Dagster
        page = fetch(*arguments, **more)
        reads.append(len(page.records))
        return page

    monkeypatch.setattr(ground.instance, "fetch_materializations", counted)
    for offset in (0, 5, 1234, 2999):
        facts = ground.facts(offset)
        assert facts.committed is not None
        assert facts.committed.batch_id == f"b-{offset // 10}"
        assert sum(reads) < 50
        reads.clear()

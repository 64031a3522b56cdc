"""The worker of a streaming run reports its work to others in an order they rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from dagster_rebalance.core.model.offsets import Log
from dagster_rebalance.core.model.run_snapshot import BatchRequest, FailureCause, RunState
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from dagster_rebalance.orchestration.streaming.worker import StreamWorker
from tests.core.world import span, tp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.orchestration.ports import RunsPort

CLAIM = ("s.r1.1.1", span(0, 0, 5))


class Others:
    """Reports to others, in order: outcomes of work, and the partitions of the run."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.ages: list[tuple[str, str, float]] = []
        self.is_away = False
        self.work = StreamWorker(
            "r1",
            cast("RunsPort", self),
            wake=lambda: None,
            interrupt=lambda: None,
            beat=lambda: self.heard.append(self.work.active_partitions),
        )

    def record_outcomes(self, outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        if self.is_away:
            message = "database is locked"
            raise OSError(message)
        self.heard.append(dict(outcomes))

    def record_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        self.ages.append((run_id, batch_id, seconds))


@pytest.fixture
def others() -> Others:
    others = Others()
    others.work.begin(
        [BatchRequest(CLAIM[0], 1, (CLAIM[1],))], {CLAIM[0]}, lambda _: Log("an id", 1)
    )
    others.work.report([tp(0)])
    others.work.abandon([CLAIM])
    others.work.end(BatchOutcome.SUCCEEDED)
    return others


def test_outcome_is_reported_before_the_partition_is_released(others: Others) -> None:
    others.work.report([tp(1)])
    assert others.heard == [{tp(0)}, {CLAIM: BatchOutcome.SUCCEEDED}, {tp(1)}]
    others.work.report([tp(1)])
    assert others.heard[3:] == [{tp(1)}]


def test_partition_is_kept_while_the_outcome_cannot_be_reported(others: Others) -> None:
    others.is_away = True
    with pytest.raises(OSError, match="locked"):
        others.work.report([])
    assert others.heard == [{tp(0)}]
    assert others.work.unreported == {CLAIM: BatchOutcome.SUCCEEDED}


@pytest.mark.parametrize(
    ("until", "cause", "is_kept"),
    [
        (2, FailureCause.RECORDS, False),
        (1, FailureCause.RECORDS, True),
        (2, FailureCause.ENVIRONMENT, True),
    ],
)
def test_error_of_a_part_that_is_halved_is_stored_only_for_other_members(
    until: int, cause: FailureCause, *, is_kept: bool
) -> None:
    """A search has tens of such parts, and each error would be two writes to Dagster."""
    others, part = Others(), span(0, 0, until)
    batch_id = f"{CLAIM[0]}.t0-8"
    heard: list[object] = others.heard
    work = StreamWorker(
        "r1",
        cast("RunsPort", others),
        wake=lambda: None,
        interrupt=lambda: None,
        beat=lambda: None,
        keep=lambda batch, failed: heard.append((batch.ranges, failed.error)),
        note=lambda ranges, failed: heard.append((ranges, failed.error, failed.cause)),
    )
    work.begin([BatchRequest(batch_id, 1, (part,))], {batch_id}, lambda _: Log("an id", 1))
    work.end(BatchOutcome.FAILED, "ValueError: 7", cause)
    assert heard == ([((part,), "ValueError: 7")] if is_kept else [])
    (news,) = work.results()
    assert (news.runs[-1].error, news.runs[-1].cause) == ("ValueError: 7", cause)
    heard.clear()
    work.report([])
    outcome = {(batch_id, part): BatchOutcome.FAILED}
    assert heard == ([outcome] if is_kept else [((part,), "ValueError: 7", cause), outcome])


def test_error_of_a_part_that_was_halved_is_not_stored() -> None:
    heard: list[object] = []
    work = StreamWorker(
        "r1",
        cast("RunsPort", Others()),
        wake=lambda: None,
        interrupt=lambda: None,
        beat=lambda: None,
        note=lambda ranges, _: heard.append(ranges),
    )
    parts = [span(0, 0, 4), span(0, 0, 2)]
    for number, part in enumerate(parts):
        batch_id = f"s.r1.{number}.1.t0-8"
        work.begin([BatchRequest(batch_id, 1, (part,))], {batch_id}, lambda _: Log("an id", 1))
        work.end(BatchOutcome.FAILED, "ValueError: 7", FailureCause.RECORDS)
    work.report([])
    assert heard == [(parts[1],)], "the other claim is gone"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def at_work(clock: Clock, done: list[str]) -> tuple[Others, StreamWorker]:
    others = Others()
    work = StreamWorker(
        "r1",
        cast("RunsPort", others),
        wake=lambda: None,
        interrupt=lambda: done.append("interrupt"),
        beat=lambda: None,
        give_up=lambda: done.append("give up"),
        limit_s=60.0,
        patience_s=30.0,
        clock=clock,
    )
    work.begin([BatchRequest(CLAIM[0], 1, (CLAIM[1],))], {CLAIM[0]}, lambda _: Log("an id", 1))
    return others, work


def test_batch_above_its_limit_is_interrupted_and_then_its_run_ended() -> None:
    clock, done = Clock(), list[str]()
    _, work = at_work(clock, done)
    clock.now = 59.0
    work.watch()
    assert (done, work.is_late) == ([], False)
    clock.now = 60.0
    work.watch()
    assert (done, work.is_late) == (["interrupt"], True)
    clock.now = 90.0
    work.watch()
    assert done == ["interrupt", "give up"]
    work.end(BatchOutcome.INTERRUPTED)
    assert not work.is_late
    (news,) = work.results()
    assert news.runs[-1].state is RunState.FAILED
    assert work.why_failed("r1", CLAIM[0]) == "it was interrupted after batch_timeout_s=60"


def test_stop_by_a_directive_is_no_interruption() -> None:
    done = list[str]()
    _, work = at_work(Clock(), done)
    work.stop(["r1"])
    work.cancel("r1")
    work.end(BatchOutcome.INTERRUPTED)
    (news,) = work.results()
    assert done == ["interrupt"]
    assert (news.runs[-1].is_interrupted, news.runs[-1].is_cancelled_by_member) == (False, True)


def test_stop_of_another_run_does_not_affect_the_batch() -> None:
    clock = Clock()
    _, work = at_work(clock, [])
    work.stop(["r2"])
    clock.now = 60.0
    work.watch()
    work.end(BatchOutcome.INTERRUPTED)
    (news,) = work.results()
    assert news.runs[-1].state is RunState.FAILED


def test_start_of_a_long_batch_is_recorded_once() -> None:
    clock = Clock()
    others, work = at_work(clock, [])
    clock.now = 5.0
    work.report([tp(0)])
    assert not work.must_report([tp(0)])
    clock.now = 12.0
    assert work.must_report([tp(0)])
    work.report([tp(0)])
    assert others.ages == [("r1", CLAIM[0], 12.0)]
    assert not work.must_report([tp(0)])


def test_partitions_are_reported_again_after_an_uncertain_heartbeat() -> None:
    arrived: list[frozenset[TopicPartition]] = []

    def beat() -> None:
        arrived.append(work.active_partitions)
        if len(arrived) == 2:
            msg = "the storage did not answer"
            raise ConnectionError(msg)

    work = StreamWorker(
        "r1",
        cast("RunsPort", Others()),
        wake=lambda: None,
        interrupt=lambda: None,
        beat=beat,
    )
    work.report(())
    with pytest.raises(ConnectionError):
        work.report([tp(0)])
    assert work.must_report(())
    work.report(())
    assert arrived == [frozenset(), {tp(0)}, frozenset()]
    assert not work.must_report(())


def test_late_report_does_not_replace_a_newer_one() -> None:
    """The storage worker continues in another thread while a report hangs."""
    others = Others()
    beaten: list[frozenset[TopicPartition]] = []
    work = StreamWorker(
        "r1",
        cast("RunsPort", others),
        wake=lambda: None,
        interrupt=lambda: None,
        beat=lambda: beaten.append(work.active_partitions),
    )
    record = others.record_outcomes

    def hung(outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        vars(others)["record_outcomes"] = record
        work.report([tp(0), tp(1)])
        record(outcomes)

    vars(others)["record_outcomes"] = hung
    work.abandon([CLAIM])
    work.report([tp(0)])
    assert beaten == [{tp(0), tp(1)}]
    assert work.active_partitions == {tp(0), tp(1)}
    assert not work.must_report([tp(0), tp(1)])

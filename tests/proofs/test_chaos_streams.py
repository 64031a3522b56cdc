"""The judgement of streaming runs by their journals."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.runs.bisection import Part, PartKind
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from proofs.chaos.faults import Fault, Kind
from proofs.chaos.journal import BodySeen, Journal, read_journals
from proofs.chaos.parts import member_of
from proofs.chaos.reasons import Evidence, reasons
from proofs.chaos.report import Shown
from proofs.chaos.spans import Span
from proofs.chaos.stalls import History, judge
from proofs.chaos.streams import (
    Streams,
    Worked,
    at_once,
    claimed_by,
    done_again,
    runs_of,
    taken_over_after_s,
    turns_of,
    without_a_fault,
)
from proofs.witness.catalogue import Event, Recorded
from proofs.witness.offsets_topic import StoredOffset

if TYPE_CHECKING:
    from pathlib import Path

UNTIL = 100.0
KEY = "numbers-0-0-10"
ONE, TWO = "11111111-run", "22222222-run"
FIRST, SECOND = member_of(ONE), member_of(TWO)


def body(
    run_id: str, began_at: float, ended_at: float | None, *keys: str, is_done: bool = True
) -> BodySeen:
    """Return a batch of a run, by default on `numbers-0`."""
    batch_id = f"{run_id}@{began_at}"
    return BodySeen(run_id, batch_id, keys or (KEY,), began_at, ended_at, is_done)


def worked(*bodies: BodySeen, faults: tuple[Fault, ...] = ()) -> list[Worked]:
    """The batches, of runs that live on."""
    return [Worked(one, UNTIL, faults) for one in bodies]


def test_journal_has_the_end_of_each_batch(tmp_path: Path) -> None:
    journal = Journal(tmp_path / ONE)
    batch_ids = [f"s.{ONE}.{number}.1" for number in (1, 2, 3, 4)]
    for batch_id in batch_ids:
        with suppress(RuntimeError), journal.step(batch_id, [KEY], is_last=False):
            if batch_id == batch_ids[1]:
                raise RuntimeError
        if batch_id == batch_ids[0]:
            with journal.step(batch_id, [KEY], is_last=True):
                pass
    killed_in = journal.step(batch_ids[-1], [KEY], is_last=True)
    killed_in.__enter__()
    seen = read_journals(tmp_path)
    assert [one.batch_id for one in seen] == batch_ids
    assert [one.is_done for one in seen] == [True, False, False, False]
    assert [one.ended_at is None for one in seen] == [False, False, False, True]
    assert {(one.run_id, one.keys) for one in seen} == {(ONE, (KEY,))}


def test_journal_has_a_repeated_attempt_as_a_batch(tmp_path: Path) -> None:
    journal = Journal(tmp_path / ONE)
    with suppress(ValueError), journal.step("s.1.1", [KEY], is_last=True):
        raise ValueError
    with journal.step("s.1.1", [KEY], is_last=True):
        pass
    assert [one.is_done for one in read_journals(tmp_path)] == [False, True]


def test_part_that_waits_is_no_claim_of_the_run_in_its_batch_id() -> None:
    """The next owner halves a range whose batch id names the run that failed on it."""
    whole = StreamBatch.parse("s.11111111-run.1.3")
    assert whole is not None
    kept = str(Part(str(whole), PartKind.NEXT, 0, 8))
    tried = str(Part("s.22222222-run.1.1", PartKind.TRIED, 0, 8))
    halved, claimed = (
        StoredOffset("numbers", "numbers", 0, one.offset, at, one.metadata)
        for at, one in enumerate(
            encode(StoredPartition(0, (Claim(4, batch_id),))) for batch_id in (kept, tried)
        )
    )
    assert claimed_by([halved, claimed]) == {claimed: SECOND}


def test_concurrent_batches_on_one_offset_are_reported() -> None:
    meeting = worked(body(ONE, 10, 14), body(TWO, 13, 15, "numbers-0-9-20"))
    assert at_once(meeting) == [
        f"{FIRST} and {SECOND} worked on numbers-0 [0, 10) at once for 1.0 s"
    ]
    assert not at_once(worked(body(ONE, 10, 14), body(TWO, 13, 15, "numbers-0-10-20")))
    assert not at_once(worked(body(ONE, 10, 14), body(TWO, 13, 15, "numbers-1-0-10")))
    assert not at_once(worked(body(ONE, 10, 14), body(TWO, 14, 15)))


def test_killed_or_frozen_process_works_on_nothing() -> None:
    killed = Fault(Kind.RUN_WORKER_KILLED, FIRST, 12.0, mended_at=12.0)
    assert not at_once(worked(body(ONE, 10, None), body(TWO, 30, 31), faults=(killed,)))
    assert at_once(worked(body(ONE, 10, None), body(TWO, 30, 31)))
    frozen = Fault(Kind.RUN_FROZEN_LONG, FIRST, 12.0, mended_at=40.0)
    woken = worked(body(ONE, 10, 41), body(TWO, 35, 45), faults=(frozen,))
    assert [one.spans for one in woken] == [[(10, 12), (40, 41)], [(35, 45)]]
    assert not at_once(woken)
    assert at_once(worked(body(ONE, 10, 43), body(TWO, 35, 45), faults=(frozen,)))


def test_range_may_be_repeated_only_after_a_fault() -> None:
    for faults, is_told in (
        ((), True),
        ((Fault(Kind.RUN_WORKER_KILLED, FIRST, 14.5, mended_at=14.5),), False),
        ((Fault(Kind.BROKER_KILLED, "node 1", 13.0, mended_at=20.0),), False),
        ((Fault(Kind.RUN_WORKER_KILLED, SECOND, 14.5, mended_at=14.5),), True),
        ((Fault(Kind.RUN_WORKER_KILLED, FIRST, 60.0, mended_at=60.0),), True),
        ((Fault(Kind.DAEMON_KILLED, "the daemon", 13.0, mended_at=20.0),), True),
    ):
        again = list(done_again(worked(body(ONE, 10, 14), body(TWO, 30, 31), faults=faults)))
        assert [range_ for range_, _ in again] == [OffsetRange("numbers", 0, 0, 10)]
        assert bool(without_a_fault(again, faults)) is is_told
    assert not list(done_again(worked(body(ONE, 10, 14, is_done=False), body(TWO, 30, 31))))


def _stalls(
    *batches: Worked,
    faults: tuple[Fault, ...] = (),
    owned: tuple[tuple[float, str | None], ...] = ((1.0, "id-1"),),
    assigned: tuple[Event, ...] = (),
) -> list[Span]:
    """When a partition that always has something to read stood still; it is the first run's."""
    history = History(
        name="numbers-0",
        ends=[(10.0, 100)],
        commits=[],
        claims=[],
        runs=runs_of(batches, 0),
        owners=owned,
        turns=turns_of(batches, 0, [(Span(1.0, UNTIL), FIRST)]),
    )
    evidence = Evidence(faults, (), assigned, (), {}, is_streaming=True)
    found = list(reasons(evidence, [history], UNTIL))
    return [stall.span for stall in judge([history], None, found, UNTIL).stalls]


def test_partition_without_a_batch_at_work_is_a_stall() -> None:
    assert _stalls(*worked(body(ONE, 11, 40), body(ONE, 45, UNTIL))) == [Span(40, 45)]


def test_partition_without_an_owner_for_too_long_is_a_stall() -> None:
    history = History("numbers-0", [(2.0, 9)], [], [], [], [(1.0, "id-1"), (5.0, None)])
    found = judge([history], None, (), 200.0).stalls
    assert [stall.span for stall in found] == [Span(2, 5), Span(95, 200)]


def test_partition_may_wait_a_limited_time_for_its_turn() -> None:
    other = "numbers-1-0-10"
    mine = (body(ONE, 11, 40), body(ONE, 60, UNTIL))
    assert not _stalls(*worked(*mine[:1], body(ONE, 40, 49, other), body(ONE, 49, UNTIL)))
    assert _stalls(*worked(*mine, body(ONE, 40, 60, other))) == [Span(50, 60)]
    assert _stalls(*worked(*mine, body(TWO, 40, 60, other))) == [Span(40, 60)], "not its owner's"
    moved = _stalls(*worked(*mine, body(ONE, 52, 60, other)), owned=((1.0, "id-2"), (52.0, "id-1")))
    assert moved == [Span(40, 52)], "it waits for each of its owners"


@pytest.mark.parametrize(
    ("fault", "until"),
    [
        (Fault(Kind.RUN_WORKER_KILLED, FIRST, 40.0, frozenset({0}), 40.0), 80.0),
        (Fault(Kind.RUN_WORKER_KILLED, FIRST, 40.0, frozenset({1}), 40.0), 40.0),
        (Fault(Kind.RUN_FROZEN, FIRST, 40.0, frozenset({0}), 44.0), 49.0),
        (Fault(Kind.RUN_FROZEN, FIRST, 40.0, frozenset({0}), 54.0), 80.0),
        (Fault(Kind.STORAGE_LOCKED, "all databases", 40.0, None, 45.0), 50.0),
        (Fault(Kind.BROKER_KILLED, "node 1", 40.0, None, 45.0), 50.0),
        (Fault(Kind.RUN_CANCELLED, FIRST, 40.0, frozenset({0}), 45.0), 40.0),
        (Fault(Kind.DAEMON_KILLED, "the daemon", 40.0, None, 45.0), 40.0),
        (Fault(Kind.CODE_SERVER_RELOADED, "purple", 40.0, None, 45.0), 40.0),
    ],
)
def test_fault_explains_only_stalls_of_parts_that_streaming_runs_need(
    fault: Fault, until: float
) -> None:
    batches = worked(body(ONE, 11, 40), body(TWO, 90, UNTIL))
    assert _stalls(*batches, faults=(fault,)) == [Span(until, 90)]


def test_fault_explains_no_stall_after_another_run_has_worked() -> None:
    killed = Fault(Kind.RUN_WORKER_KILLED, FIRST, 40.0, frozenset({0}), 40.0)
    batches = worked(body(ONE, 11, 40), body(TWO, 50, 51), body(TWO, 60, UNTIL))
    assert _stalls(*batches, faults=(killed,)) == [Span(51, 60)]
    assert taken_over_after_s([killed], batches) == {"run_worker_killed": [10.0]}


@pytest.mark.parametrize(("frozen_at", "until"), [(42.0, 82.0), (39.0, 41.0), (60.0, 41.0)])
def test_fault_of_the_former_owner_explains_the_wait_of_the_next(
    frozen_at: float, until: float
) -> None:
    """Kafka has taken the partition from a run with a batch at work, and then it is frozen."""
    frozen = Fault(Kind.RUN_FROZEN_LONG, FIRST, frozen_at, frozenset({1}), 90.0)
    event = Event("assigned", FIRST, "", (), {"member_id": "id-1"}, at=2.0)
    batches = worked(body(ONE, 11, 40), body(TWO, 95, UNTIL))
    owned = ((1.0, "id-1"), (41.0, "id-2"))
    found = _stalls(*batches, faults=(frozen,), owned=owned, assigned=(event,))
    assert [stall.begin for stall in found] == [until]


def test_batch_begun_in_a_storage_outage_ends_with_its_run() -> None:
    hangs = Fault(Kind.STORAGE_HANGS, "Postgres", 40.0, None, 61.0)
    owned = ((1.0, "id-1"), (60.0, None), (65.0, "id-2"))
    begun = worked(body(ONE, 11, 40), body(ONE, 42, 43), body(TWO, 75, UNTIL))
    assert not _stalls(*begun, faults=(hangs,), owned=owned)
    later = worked(body(ONE, 11, 40), body(TWO, 66, 67), body(TWO, 75, UNTIL))
    assert _stalls(*later, faults=(hangs,), owned=owned) == [Span(67, 75)]


def test_joined_commits_are_compared_by_offset() -> None:
    made = [OffsetRange("numbers", 0, start, start + 10) for start in (0, 10, 20)]
    joined = Recorded("blue", OffsetRange("numbers", 0, 0, 20), inner=(10,))
    assert joined.commits == made[:2]
    late = Recorded("green", OffsetRange("numbers", 0, 20, 30), is_late=True)
    assert Shown.of(made, [joined, late], [], is_joined=True).problems == []
    for shown, problem in (
        ([joined], "not shown by Dagster: the commit of numbers-0 [20, 30)"),
        (
            [joined, joined, late],
            (
                "shown by Dagster, and not committed, or not so often: 20 offsets of numbers-0, "
                "by blue at 0.00 [0, 20), blue at 0.00 [0, 20)"
            ),
        ),
    ):
        assert Shown.of(made, shown, [], is_joined=True).problems == [problem]


def test_report_has_a_figure_for_each_problem_of_streams() -> None:
    batches = worked(body(ONE, 10, 14), body(TWO, 13, 15))
    streams = Streams(batches, [], ["a run failed"])
    assert len(streams.problems) == 3
    assert streams.figures == {
        "batches": 2,
        "worked_on_at_once": 1,
        "runs_failed_alone": 1,
        "ranges_done_again": 1,
        "taken_over_after_s": {},
    }

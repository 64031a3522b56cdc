"""The judgement of `python -m proofs chaos`: stalls are detected, explained idleness is not."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.runs.bisection import Part, PartKind
from proofs.chaos.bystander import SQLITE_FILES, Bystander, wait_for_writes
from proofs.chaos.draw import Draw
from proofs.chaos.faults import Fault, Kind
from proofs.chaos.play import Assigned
from proofs.chaos.reasons import Evidence, reasons
from proofs.chaos.report import claimed_in, covered_twice, failures_in, shown_again, uncovered
from proofs.chaos.spans import Span, without
from proofs.chaos.stalls import Explained, History, Judgement, RunSeen, clock, judge
from proofs.witness.catalogue import Event, HoldSeen, Recorded
from proofs.witness.offsets_topic import StoredOffset

if TYPE_CHECKING:
    from pathlib import Path

TICKS = {
    "id-1": [float(at) for at in range(0, 101, 5)],
    "id-2": [float(at) for at in range(1, 101, 5)],
}
UNTIL = 100.0
WORKED_OFF = History(
    name="numbers-0",
    ends=[(10.0, 5), (50.0, 9)],
    commits=[(10.5, 0), (20.0, 5), (50.4, 5), (60.0, 9)],
    claims=[(10.5, 5), (50.4, 9)],
    runs=[RunSeen(15.0, 19.5, succeeded=True), RunSeen(55.0, 59.0, succeeded=True)],
    owners=[(1.0, "id-1")],
)


def _judged(history: History, *given: Explained) -> Judgement:
    return judge([history], TICKS, given, UNTIL)


def _stalls(history: History, *given: Explained) -> list[Span]:
    return [stall.span for stall in _judged(history, *given).stalls]


def test_partition_with_running_work_or_without_lag_has_no_stall() -> None:
    judgement = _judged(WORKED_OFF)
    assert not judgement.stalls
    assert judgement.watched_s == 20.0


def test_late_commit_is_a_stall() -> None:
    late = replace(WORKED_OFF, commits=[(10.5, 0), (24.0, 5), (50.4, 5), (60.0, 9)])
    assert _stalls(late) == [Span(19.5, 24.0)]
    (told,) = map(str, judge([late], TICKS, (), UNTIL).stalls)
    assert told == (
        f"{late.name} stood still for 4.5 s from {clock(19.5)} on, after a run succeeded at "
        f"{clock(19.5)} "
        f"and until a commit up to 5 at {clock(24.0)}"
    )


def test_late_claim_is_a_stall() -> None:
    late = replace(WORKED_OFF, claims=[(10.5, 5), (54.0, 9)])
    assert _stalls(late) == [Span(50.0, 54.0)]


def test_batch_may_wait_for_two_ticks_of_its_owner() -> None:
    late = replace(
        WORKED_OFF,
        runs=[RunSeen(30.0, 39.5, succeeded=True), WORKED_OFF.runs[1]],
        commits=[(40.0, 5), (60.0, 9)],
    )
    assert _stalls(late) == [Span(25.0, 30.0)], (
        "claimed at 10.5, ticks at 15 and 20, and 5 s to make the run"
    )


def test_ticks_of_another_member_start_no_runs() -> None:
    never = replace(
        WORKED_OFF,
        owners=[(1.0, "id-3")],
        runs=[],
        commits=[],
        claims=[(10.0, 5)],
        ends=[(10.0, 5)],
    )
    assert _stalls(never) == [Span(40.0, UNTIL)]


def test_batch_may_wait_for_ticks_while_other_code_locations_occupy_the_daemon() -> None:
    late = replace(
        WORKED_OFF,
        ends=[(10.0, 9)],
        claims=[(10.5, 9)],
        runs=[RunSeen(75.0, 79.0, succeeded=True)],
        commits=[(79.5, 9)],
    )
    assert [stall.span for stall in judge([late], {"id-1": [35.0, 60.0]}, (), UNTIL).stalls] == [
        Span(65.0, 75.0)
    ]
    assert [stall.span for stall in judge([late], {"id-1": [35.0, 69.0]}, (), UNTIL).stalls] == [
        Span(65.0, 75.0)
    ], "30 s after the first"


def test_batch_of_a_failed_run_waits_for_the_next_run() -> None:
    again = [
        RunSeen(15.0, 17.0, succeeded=False),
        RunSeen(26.0, 29.0, succeeded=True),
        WORKED_OFF.runs[1],
    ]
    assert not _stalls(replace(WORKED_OFF, runs=again, commits=[(29.5, 5), (60.0, 9)]))
    assert _stalls(replace(WORKED_OFF, runs=[again[0], again[2]], commits=[(60.0, 9)])) == [
        Span(30.0, 50.4)
    ]


def test_each_part_of_a_bisected_range_is_claimed_at_its_own_time() -> None:
    whole, first, second = (
        encode(StoredPartition(offset, (Claim(until, batch_id),)))
        for offset, until, batch_id in (
            (0, 8, "b"),
            (0, 4, f"{Part('b', PartKind.NEXT, 0, 8)}"),
            (4, 8, f"{Part('b', PartKind.NEXT, 0, 8)}"),
        )
    )
    log = [
        StoredOffset("numbers", "numbers", 0, one.offset, at, one.metadata)
        for at, one in enumerate([whole, whole, first, second, second], 1)
    ]
    assert [*claimed_in(log)] == [(1, 8), (3, 4), (4, 8)]


def test_batch_found_by_a_new_owner_waits_for_its_ticks() -> None:
    owners = [(1.0, "id-1"), (16.5, "id-2")]
    taken = replace(
        WORKED_OFF,
        owners=owners,
        runs=[RunSeen(12.0, 14.0, succeeded=False), RunSeen(30.5, 34.0, succeeded=True)],
    )
    assert not _stalls(replace(taken, commits=[(34.5, 9)], ends=[(10.0, 9)]))
    late = replace(
        taken,
        runs=[*taken.runs[:1], RunSeen(35.0, 39.0, succeeded=True)],
        commits=[(39.5, 9)],
        ends=[(10.0, 9)],
    )
    assert _stalls(late) == [Span(31.0, 35.0)], "ticks of the new owner at 21 and 26"


def test_batch_delayed_by_a_fault_waits_for_the_ticks_after_it() -> None:
    fault = Explained(Span(12.0, 27.0), "broker_killed", WORKED_OFF.name, is_fault=True)
    late = replace(
        WORKED_OFF,
        runs=[RunSeen(41.0, 44.5, succeeded=True), WORKED_OFF.runs[1]],
        commits=[(45.0, 5), (60.0, 9)],
    )
    assert _stalls(late, replace(fault, is_fault=False)) == [Span(27.0, 41.0)]
    assert _stalls(late, fault) == [], "ticks at 30 and 35, and 5 s to make the run"
    later = replace(late, runs=[RunSeen(43.0, 44.5, succeeded=True), late.runs[1]])
    assert _stalls(later, fault) == [Span(40.0, 43.0)]
    done = replace(late, runs=WORKED_OFF.runs)
    assert _stalls(done, fault) == [Span(27.0, 45.0)]


def test_partition_without_an_owner_is_no_stall_of_a_member() -> None:
    taken = replace(
        WORKED_OFF,
        claims=[(10.5, 5), (58.5, 9)],
        owners=[(1.0, "id-1"), (45.0, None), (58.0, "id-2")],
        runs=WORKED_OFF.runs[:1],
    )
    judgement = _judged(replace(taken, commits=[*WORKED_OFF.commits[:3], (61.0, 9)]))
    assert not judgement.stalls
    assert judgement.idle_s == {"Kafka has assigned it to no member": 8.0}


def test_reason_of_one_partition_does_not_explain_a_stall_of_another() -> None:
    late = replace(WORKED_OFF, claims=[(10.5, 5), (54.0, 9)])
    assert not _stalls(late, Explained(Span(49.0, 53.0), "held", "numbers-0"))
    assert _stalls(late, Explained(Span(49.0, 53.0), "held", "numbers-1"))


def _reasons(
    *faults: Fault,
    history: History = WORKED_OFF,
    holds: tuple[HoldSeen, ...] = (),
    assigned: tuple[Event, ...] = (),
    left: tuple[Event, ...] = (),
    is_classic: bool = False,
) -> list[str]:
    found = reasons(
        Evidence(faults, holds, assigned, left, TICKS, is_classic=is_classic), [history], UNTIL
    )
    return [
        f"{one.why}: {one.span.begin:g} to {one.span.end:g}"
        for one in found
        if one.span.seconds > 0
    ]


MOVED = replace(WORKED_OFF, owners=[(1.0, "id-1"), (30.0, "id-2")])


@pytest.mark.parametrize(
    ("fault", "reach"),
    [
        (Fault(Kind.MEMBER_KILLED, "blue", 20.0, frozenset({0}), 24.0), "20 to 30"),
        (Fault(Kind.MEMBER_KILLED, "blue", 20.0, frozenset({1}), 24.0), None),
        (Fault(Kind.MEMBER_KILLED, "blue", 31.0, frozenset({0}), 33.0), "31 to 100"),
        (Fault(Kind.COORDINATOR_MOVED, "node 1", 20.0, None, 24.0), "20 to 29"),
        (Fault(Kind.BROKER_KILLED, "node 1", 20.0, frozenset({1}), 24.0), None),
        (Fault(Kind.STORAGE_LOCKED, "all databases", 20.0, None, 24.5), "20 to 30"),
        (Fault(Kind.LAUNCH_REFUSED, "all runs", 80.0, None, 82.0), "80 to 91"),
        (Fault(Kind.DAEMON_KILLED, "the daemon", 20.0, None, 32.0), "20 to 36"),
        (Fault(Kind.RUN_FAILED, "a run", 20.0, frozenset(), 20.0), None),
        (Fault(Kind.PARTITIONS_ADDED, "numbers-0", 20.0, frozenset({0}), 20.0), None),
    ],
)
def test_fault_explains_only_stalls_of_its_target(fault: Fault, reach: str | None) -> None:
    assert _reasons(fault, history=MOVED) == ([f"{fault.kind.value}: {reach}"] if reach else [])


def test_hold_explains_stalls_of_held_partitions() -> None:
    hold = HoldSeen("blue", "drained", "revoke", ("numbers-0",), seconds=4.0, ended_at=24.0, runs=1)
    assert _reasons(holds=(hold,)) == ["held: 20 to 24"]


def test_classic_rebalance_that_waits_for_one_member_explains_stalls_of_others() -> None:
    """The member holds, or is gone and this is not detected yet."""
    hold = HoldSeen("blue", "drained", "revoke", ("numbers-1",), seconds=4.0, ended_at=24.0, runs=1)
    frozen = Fault(Kind.MEMBER_FROZEN, "green", 40.0, frozenset({1}), 60.0)
    assigned = Event("assigned", "purple", "", ("numbers-1",), {"member_id": "id-3"}, 50.0)
    assert _reasons(frozen, holds=(hold,), assigned=(assigned,)) == ["held: 20 to 24"], (
        "the hold of the same partition"
    )
    waits = "a classic rebalance waits for a member"
    found = _reasons(frozen, holds=(hold,), assigned=(assigned,), is_classic=True)
    assert found == [
        "held: 20 to 24",
        f"{waits}: 20 to 27",
        f"{waits}: 47 to 50",
        f"{waits}: 40 to 50",
    ]


def test_member_may_receive_its_partitions_a_little_later() -> None:
    heard = Event("assigned", "green", "", ("numbers-0",), {}, at=31.0)
    assert _reasons(history=MOVED, assigned=(heard,)) == [
        f"on its way to its new owner: {span}" for span in ("1 to 11", "30 to 31")
    ]


def test_broker_fault_may_delay_the_assignment_of_a_member() -> None:
    heard = Event("assigned", "green", "", ("numbers-0",), {}, at=55.0)
    on_its_way = "on its way to its new owner: 30 to {}"
    away = Fault(Kind.BROKER_KILLED, "node 1", 29.0, mended_at=35.0)
    assert on_its_way.format(55) in _reasons(away, history=MOVED, assigned=(heard,))
    earlier = replace(away, began_at=2.0, mended_at=4.0)
    assert on_its_way.format(40) in _reasons(earlier, history=MOVED, assigned=(heard,))


def test_leaving_member_may_be_assigned_partitions_that_it_does_not_process() -> None:
    fault = Fault(Kind.MEMBER_TERMINATED, "blue", 20.0, frozenset({5}), 40.0)
    lives = (("id-1", "old", 21.0), ("id-9", "new", 38.0))
    told = tuple(
        Event("assigned", "blue", "", (), {"member_id": member, "incarnation": life}, at)
        for member, life, at in lives
    )
    left = (Event("left", "blue", "", (), {"incarnation": "old"}, 35.0),)

    def explained(*owners: tuple[float, str | None]) -> list[str]:
        history = replace(WORKED_OFF, owners=owners)
        return [
            why
            for why in _reasons(fault, history=history, assigned=told, left=left)
            if why.startswith("member terminated")
        ]

    assert explained((1.0, "id-2"), (25.0, "id-1"), (36.0, "id-2")) == [
        "member terminated (SIGTERM), as in a deploy: 25 to 35"
    ]
    assert explained((1.0, "id-2"), (25.0, "id-1"), (30.0, "id-2")) == [
        "member terminated (SIGTERM), as in a deploy: 25 to 30"
    ]
    assert explained((1.0, "id-1"), (36.0, "id-9")) == [], (
        "it had it before, or has another owner now"
    )
    assert explained((1.0, "id-2"), (25.0, "id-9")) == []
    assert explained((1.0, "id-1"), (25.0, "id-2")) == []


def test_member_that_has_just_left_may_be_assigned_partitions() -> None:
    fault = Fault(Kind.MEMBER_KILLED, "blue", 20.0, frozenset({5}), 24.0)
    told = (Event("assigned", "blue", "", (), {"member_id": "id-1"}, 12.0),)

    def explained(*owners: tuple[float, str | None]) -> list[str]:
        history = replace(WORKED_OFF, owners=owners)
        found = _reasons(fault, history=history, assigned=told)
        return [why for why in found if why.startswith("member killed")]

    killed = "member killed (SIGKILL), its runs live on"
    assert explained((1.0, "id-2"), (19.5, "id-1"), (27.0, "id-2")) == [f"{killed}: 20 to 27"]
    assert explained((1.0, "id-2"), (21.0, "id-1"), (27.0, "id-2")) == [f"{killed}: 21 to 27"]
    assert explained((1.0, "id-2"), (10.0, "id-1"), (27.0, "id-2")) == [], "it had it: see above"
    assert explained((1.0, "id-2"), (25.0, "id-1")) == [], "a new process"
    assert explained((1.0, "id-2"), (21.0, "id-3")) == []


def test_broker_fault_may_cost_members_their_heartbeats() -> None:
    killed = Fault(Kind.BROKER_KILLED, "node 1", 20.0, mended_at=26.0)
    history = replace(WORKED_OFF, owners=[(1.0, "id-1"), (35.0, None), (36.0, "id-1")])
    missed = "broker killed and restarted: 20 to 35"
    assert missed in _reasons(killed, history=history)
    assert missed not in _reasons(replace(killed, mended_at=24.0), history=history), "too late"
    moved = replace(history, owners=[(1.0, "id-1"), (35.0, "id-2")])
    assert missed not in _reasons(killed, history=moved), "it was taken in order"
    left = Event("left", "blue", "", (), {"incarnation": "old"}, 34.0)
    assert missed not in _reasons(killed, history=history, left=(left,))


def test_sensor_without_ticks_explains_missing_claims() -> None:
    found = reasons(Evidence((), (), (), (), {"id-1": [5.0, 40.0, 95.0]}), [WORKED_OFF], UNTIL)
    assert [(one.span.begin, one.span.end) for one in found if one.why.startswith("Dagster")] == [
        (20.0, 41.0),
        (55.0, 96.0),
    ]


def test_bystander_waits_for_the_writer_that_locks_the_storage(tmp_path: Path) -> None:
    for name in SQLITE_FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    frozen = sqlite3.connect(tmp_path / SQLITE_FILES[1], isolation_level=None)
    frozen.execute("BEGIN IMMEDIATE")
    waits = threading.Thread(target=wait_for_writes, args=(tmp_path,))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    frozen.close()
    waits.join(120)
    assert not waits.is_alive()


def test_delay_measured_by_a_bystander_is_no_stall() -> None:
    late = replace(WORKED_OFF, commits=[(10.5, 0), (24.0, 5), (50.4, 5), (60.0, 9)])
    for slow, stands in ([Span(20.0, 23.0)], []), ([Span(20.0, 21.0)], [Span(21.0, 24.0)]):
        found = reasons(Evidence((), (), (), (), TICKS, slow), [late], UNTIL)
        assert _stalls(late, *found) == stands


def test_bystander_records_slow_queries() -> None:
    times = iter([10.0, 10.1, 11.0, 12.0, 13.0])
    problems = iter([None, None, OSError("locked")])

    def ask() -> None:
        problem = next(problems)
        if problem is not None:
            raise problem

    bystander = Bystander(ask, lambda: next(times))
    for _ in range(3):
        bystander.look()
    assert bystander.slow == [Span(11.0, 12.0)]


def test_spans_are_cut_by_overlapping_holes() -> None:
    assert without(
        [Span(0, 10), Span(20, 30)], [Span(2, 4), Span(3, 6), Span(9, 21), Span(40, 50)]
    ) == [
        Span(0, 2),
        Span(6, 9),
        Span(21, 30),
    ]


def test_offsets_of_two_successful_runs_are_counted() -> None:
    ranges = [
        OffsetRange("numbers", 0, 0, 10),
        OffsetRange("numbers", 0, 10, 20),
        OffsetRange("numbers", 0, 5, 12),
        OffsetRange("numbers", 1, 0, 9),
    ]
    assert covered_twice(ranges) == {"numbers-0": 7}


def test_records_missing_in_the_second_asset_are_reported() -> None:
    seen = [OffsetRange("numbers", 0, 0, 5), OffsetRange("numbers", 0, 9, 12)]
    assert uncovered(
        seen, [(TopicPartition("numbers", 0), 5), (TopicPartition("numbers", 0), 15)]
    ) == [
        "numbers-0 [5, 9)",
        "numbers-0 [12, 15)",
    ]
    assert uncovered(seen, [(TopicPartition("numbers", 0), 5)]) == []


def _draw(seed: int) -> Draw[Kind]:
    return Draw(list(Kind), random.Random(seed))  # noqa: S311 - no secret


def test_draw_has_each_kind_once_a_round_in_the_order_of_the_seed() -> None:
    kinds = len(Kind)
    drawn = [
        [draw.next(lambda _: True) for _ in range(2 * kinds)]
        for draw in (_draw(1), _draw(1), _draw(2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(Counter(drawn[0]).values()) == {2}
    assert set(drawn[0][:kinds]) == set(Kind)


def test_draw_of_an_impossible_kind_is_postponed_until_it_is_possible() -> None:
    draw, others = _draw(1), set(Kind) - {Kind.BROKER_KILLED}
    assert {draw.next(others.__contains__) for _ in others} == others
    assert {draw.next(others.__contains__) for _ in others} == others
    assert draw.next(lambda _: True) is Kind.BROKER_KILLED


def test_draw_without_a_possible_kind_returns_none() -> None:
    assert _draw(1).next(lambda _: False) is None


def test_commit_may_be_recorded_twice_only_after_a_delay_of_its_member() -> None:
    commit = OffsetRange("numbers", 3, 0, 65)
    pair = [Recorded("blue", commit, at=11.0), Recorded("green", commit, is_late=True, at=25.0)]
    freeze = Fault(Kind.MEMBER_FROZEN, "blue", began_at=11.1, mended_at=30.0)
    assert shown_again(pair, [freeze]) == [commit]
    assert shown_again(
        pair, [replace(freeze, kind=Kind.STORAGE_LOCKED, target="all databases")]
    ) == [commit]
    assert shown_again(pair, [replace(freeze, kind=Kind.RUN_FROZEN_LONG)]) == [commit]
    both_late = [replace(one, is_late=True) for one in pair]
    assert shown_again(both_late, [freeze]) == [commit], "its member had it from another one"
    assert shown_again(pair[1:], [freeze]) == [], "shown once"
    assert shown_again([pair[0], replace(pair[1], is_late=False)], [freeze]) == []
    assert shown_again([*pair, pair[0]], [freeze]) == [], "its member recorded it twice"
    others = [
        replace(freeze, target="purple"),
        replace(freeze, kind=Kind.MEMBER_KILLED),
        replace(freeze, began_at=26.0),
    ]
    assert shown_again(pair, [*others, replace(freeze, mended_at=14.0)]) == []


def test_member_that_ends_with_an_error_is_reported_with_it() -> None:
    log = [
        "the member blue/kafka_batches_sensor failed",
        "Traceback (most recent call last):",
        "dagster_rebalance.core.model.errors.BrokerError: reading offsets failed for numbers-0",
        "owns numbers-0",
        "the member blue/kafka_batches_sensor failed",
    ]
    assert failures_in(log) == [
        "the member blue/kafka_batches_sensor failed: reading offsets failed for numbers-0",
        log[-1],
    ]


def _said(kind: str, member: str, numbers: range, at: float) -> Event:
    return Event(kind, member, "", tuple(f"numbers-{number}" for number in numbers), {}, at)


def test_owners_do_not_depend_on_the_order_of_the_reports() -> None:
    assigned = Assigned()
    for event in (
        _said("assigned", "purple", range(3, 5), 50.2),
        _said("assigned", "blue", range(6), 50.3),
        _said("hold", "blue", range(2, 6), 51.0),
    ):
        assigned.take(event)
    assert assigned.members == ["purple", "blue"]
    assert (assigned.of("purple"), assigned.of("blue")) == (frozenset({3, 4}), frozenset({0, 1}))


def test_partitions_of_a_killed_member_belong_to_the_next_owner() -> None:
    assigned = Assigned()
    assigned.take(_said("assigned", "blue", range(2), 50.0))
    assigned.take(_said("assigned", "green", range(2), 95.0))
    assert assigned.members == ["green"]
    assert assigned.of("blue") == frozenset()

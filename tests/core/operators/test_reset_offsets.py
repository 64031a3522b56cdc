"""Resets of committed offsets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.engine_settings import ForeignMetadata
from dagster_rebalance.core.model.claims import LastCommit, StoredPartition, decode, encode
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.events import LastRecorded, PartitionLookup
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, Bounds, Log, OffsetAndMetadata
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.operators.reset_offsets import GroupWork, plan_moves, unreadable
from dagster_rebalance.core.partitions.recovery import check_position
from dagster_rebalance.core.reporting.group_status import GroupMember, Owners, RecordedAssignment
from tests.core.world import span, tp

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUND = PartitionLookup(OffsetAndMetadata(50), Bounds(10, 100, leader_epoch=3), topic_id="AAAA")
NOBODY = Owners(())


def at_work(
    *runs: RunSnapshot, owners: Owners = NOBODY, written_off: Sequence[RunSnapshot] = ()
) -> GroupWork:
    """The group 40 s after the end of `WRITTEN_OFF`."""
    return GroupWork(owners, runs, written_off, now_s=1040.0, heartbeat_timeout_s=60.0)


def moved(offset: int, found: PartitionLookup | None = FOUND, claims: int = 0) -> str:
    """The move of a partition, as it is shown to the operator."""
    known = {} if found is None else {tp(0): found}
    (move,) = plan_moves({tp(0): offset}, known, {tp(0): claims})
    return str(move)


def test_move_as_text() -> None:
    assert moved(40) == "orders-0: 50 -> 40, 10 offsets again"
    assert moved(100, claims=1) == "orders-0: 50 -> 100, skips 50 offsets, drops 1 claim"
    assert moved(50, claims=2) == "orders-0: 50 -> 50, the same offset, drops 2 claims"
    assert (
        moved(10, PartitionLookup(None, Bounds(10, 20))) == "orders-0: nothing is committed -> 10"
    )


@pytest.mark.parametrize(
    ("offset", "found", "claims", "may_repeat"),
    [
        (100, FOUND, 0, False),
        (100, FOUND, 1, True),
        (50, FOUND, 0, True),
        (40, FOUND, 0, True),
        (20, PartitionLookup(None, Bounds(10, 20)), 0, True),
    ],
    ids=["skips", "drops a claim", "drops the text", "back", "nothing was committed"],
)
def test_move_may_repeat_offsets_of_the_output(
    offset: int, found: PartitionLookup, claims: int, *, may_repeat: bool
) -> None:
    (move,) = plan_moves({tp(0): offset}, {tp(0): found}, {tp(0): claims})
    assert move.may_repeat is may_repeat


@pytest.mark.parametrize("offset", [20, 50, 100])
@pytest.mark.parametrize(
    ("recorded", "ranges"),
    [
        (None, [(10, 30), (30, 50)]),
        (LastRecorded(30, "run-1"), [(30, 50)]),
        (LastRecorded(50, "run-2"), []),
        (LastRecorded(50, "run-3"), [(10, 30), (30, 50)]),
    ],
)
def test_move_has_the_commits_that_only_the_old_metadata_names(
    recorded: LastRecorded | None, ranges: list[tuple[int, int]], offset: int
) -> None:
    last = LastCommit(30, "b-2", "run-2", earlier=(LastCommit(10, "b-1", "run-1"),))
    found = replace(FOUND, stored=encode(StoredPartition(50, last_commit=last)), recorded=recorded)
    (move,) = plan_moves({tp(0): offset}, {tp(0): found}, {})
    assert [(one.range.start, one.range.until) for one in move.unrecorded] == ranges
    assert all(one.is_late for one in move.unrecorded)


@pytest.mark.parametrize("stored", [None, OffsetAndMetadata(50), OffsetAndMetadata(50, "foreign")])
def test_move_without_a_note_has_no_commits(stored: OffsetAndMetadata | None) -> None:
    (move,) = plan_moves({tp(0): 20}, {tp(0): replace(FOUND, stored=stored)}, {})
    assert move.unrecorded == ()


@pytest.mark.parametrize("offset", [9, 101])
def test_move_to_a_missing_offset_raises(offset: int) -> None:
    with pytest.raises(ConfigurationError, match=r"Kafka has 10 \(--to-earliest\) to 100 \(--to"):
        moved(offset)


@pytest.mark.parametrize("found", [None, PartitionLookup(OffsetAndMetadata(50), ANY_BOUNDS)])
def test_move_without_a_leader_raises(found: PartitionLookup | None) -> None:
    with pytest.raises(ConfigurationError, match="the leader of orders-0 does not answer"):
        moved(50, found)


def test_next_owner_continues_at_the_moved_offset() -> None:
    (move,) = plan_moves({tp(0): 40}, {tp(0): FOUND}, {})
    read = check_position(
        tp(0), PartitionLookup(move.stored, FOUND.bounds, topic_id="AAAA"), ForeignMetadata.REFUSE
    )
    assert read == decode(move.stored)
    assert decode(move.stored).log == Log("AAAA", 3)


def test_members_and_live_runs_are_obstacles() -> None:
    members = (GroupMember("m1", "a@b", frozenset()), GroupMember("m2", "c@d", frozenset()))
    known = (RecordedAssignment("m1", "blue", "p", frozenset()),)
    runs = (
        RunSnapshot("ab12cd34", "b", (span(0, 0, 9),), RunState.STARTED),
        RunSnapshot("done", "b", (span(0, 0, 9),), RunState.SUCCEEDED),
        RunSnapshot("elsewhere", "b", (span(1, 0, 9),), RunState.STARTED),
        RunSnapshot("stream01", "", (), RunState.STARTED, active_partitions=frozenset({tp(0)})),
    )
    found = list(at_work(*runs, owners=Owners(members, known)).obstacles([tp(0)]))
    assert len(found) == 3
    assert found[0].startswith("the group has 2 members (blue, c@d): turn its sensor off")
    assert found[1] == ("run ab12cd34 may be working on orders-0: wait for its end, or cancel it")
    assert found[2].startswith("run stream01 may be working on orders-0")
    alone = next(at_work(owners=Owners(members[1:])).obstacles([]))
    assert alone.startswith("the group has 1 member (c@d)")
    assert not list(at_work().obstacles([tp(0)]))


WRITTEN_OFF = RunSnapshot(
    "ab12cd34", "b", (span(0, 0, 9),), RunState.FAILED, is_over=False, ended_at=1000.0
)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (WRITTEN_OFF, "has not confirmed that. It counts as dead in 80 s"),
        (replace(WRITTEN_OFF, ranges=()), "It counts as dead in 80 s"),
        (replace(WRITTEN_OFF, heartbeat_timeout_s=90), "It counts as dead in 140 s"),
        (replace(WRITTEN_OFF, state=RunState.DELETED, ended_at=None), "Turn the sensor on until"),
        (replace(WRITTEN_OFF, awaits_retry=True), "wait for its end, or cancel it"),
    ],
)
def test_written_off_run_is_an_obstacle(run: RunSnapshot, says: str) -> None:
    (found,) = at_work(run, written_off=[run]).obstacles([tp(0)])
    assert found.startswith("run ab12cd34 may be working on orders-0")
    assert says in found


def test_written_off_run_is_dead_after_two_timeouts() -> None:
    gone, late = replace(WRITTEN_OFF, is_gone=True), replace(WRITTEN_OFF, ended_at=880.0)
    for run in (gone, late):
        assert not list(at_work(run, written_off=[run]).obstacles([tp(0)]))
        (doubt,) = at_work(written_off=[run]).doubts([tp(0)])
        assert doubt.startswith("run ab12cd34 ended in Dagster, its process has not confirmed that")
    both = at_work(written_off=[gone, replace(late, run_id="ef56")])
    assert "runs ab12cd34, ef56 ended in Dagster, their process has not confirmed" in next(
        both.doubts([tp(0)])
    )
    assert not list(at_work(written_off=[gone]).doubts([tp(1)]))
    assert not list(at_work(written_off=[WRITTEN_OFF]).doubts([tp(0)]))


def test_unreadable_metadata_is_found() -> None:
    found = {
        tp(0): FOUND,
        tp(1): replace(FOUND, stored=OffsetAndMetadata(5, "not ours")),
        tp(2): replace(FOUND, stored=None),
    }
    assert unreadable(found) == (tp(1),)

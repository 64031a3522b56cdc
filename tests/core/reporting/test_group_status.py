"""Status of a group for clients outside of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.events import PartitionLookup
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, Bounds, OffsetAndMetadata
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.group_status import (
    GroupMember,
    Owners,
    PartitionStatus,
    RecordedAssignment,
    SensorState,
    explanation,
    status_of,
    why_no_member,
)
from dagster_rebalance.core.runs.progress import (
    Exhausted,
    FailureKind,
    FailureStreak,
    InFlight,
    ToRequest,
)
from tests.core.engine.test_run_requests import owned
from tests.core.world import span, tp

RUN = "ab12cd34-5678"
BLUE, GREEN = (
    GroupMember("m1", "rdkafka@10.0.0.1", frozenset({tp(0)})),
    GroupMember("m2", "x@y", frozenset()),
)
KNOWN = (
    RecordedAssignment("m2", "green", "p2", frozenset()),
    RecordedAssignment("m1", "blue", "p1", frozenset({tp(0), tp(1)})),
    RecordedAssignment("m0", "red", "p0", frozenset({tp(2)})),
)


def holds(*members: GroupMember, number: int = 1) -> str:
    """The sentence about the hold of a partition."""
    return Owners(members, KNOWN).hold(tp(number))


def test_owner_is_named_by_its_code_location() -> None:
    owners = Owners((BLUE,), KNOWN)
    assert owners.owner(tp(0)) == "blue"
    assert owners.owner(tp(1)) == ""
    assert Owners((BLUE,)).owner(tp(0)) == "rdkafka@10.0.0.1"
    assert owners.owned_by("p1") == {tp(0)}
    assert owners.owned_by("p2") == frozenset()


@pytest.mark.parametrize(
    ("progress", "says"),
    [
        (ToRequest(), "[0, 10): waits for the next member, attempt 1"),
        (
            ToRequest(3, 2, FailureStreak(FailureKind.FAILED, 2, RUN)),
            "[0, 10): waits for the next member, attempt 3 (2 attempts failed)",
        ),
    ],
)
def test_claim_without_a_member_waits_for_the_next_one(progress: ToRequest, says: str) -> None:
    partition = owned(0, ("b", 10, progress))
    found = PartitionLookup(OffsetAndMetadata(0), Bounds(0, 10))
    alone = status_of(partition, found, Owners(()), now=0.0)
    assert alone.sentence == f"orders-0: {says}"
    there = status_of(owned(0, ("b", 10, ToRequest())), found, Owners((BLUE,)), now=0.0)
    assert "waits for Dagster to start its run" in there.sentence


def test_status_of_a_streaming_run_names_no_request() -> None:
    owners = Owners((BLUE,), (replace(KNOWN[1], is_run=True),))
    found = PartitionLookup(OffsetAndMetadata(0), Bounds(0, 10))
    said = status_of(owned(0, ("b", 10, ToRequest())), found, owners, now=0.0).sentence
    assert "next, after the current batch" in said


def test_partition_without_owner_is_held_by_its_last_owner() -> None:
    heir = replace(GREEN, is_to_own=frozenset({tp(1)}))
    assert holds(BLUE, heir) == "held by blue, green waits for it"
    assert holds(BLUE) == "held by blue"
    assert holds(heir) == "green waits for it", "its last owner is gone"
    assert holds(GREEN, number=3) == "no member owns it"
    assert holds(GREEN, number=2) == "no member owns it"
    assert holds() == ""


def test_partition_with_another_target_names_it() -> None:
    heir = replace(GREEN, is_to_own=frozenset({tp(0)}))
    assert holds(replace(BLUE, is_to_own=frozenset()), heir, number=0) == "green waits for it"
    assert holds(replace(BLUE, is_to_own=frozenset({tp(0)})), number=0) == ""


def row(
    partition: OwnedPartition, found: PartitionLookup | None, *members: GroupMember
) -> PartitionStatus:
    """The row of a partition."""
    return status_of(partition, found, Owners(members, KNOWN), now=0.0)


def test_status_has_offsets_claims_and_runs() -> None:
    partition = owned(0, ("b", 40, InFlight((RUN,))))
    found = PartitionLookup(OffsetAndMetadata(0), Bounds(10, 100))
    seen = row(partition, found, BLUE)
    assert (seen.owner, seen.committed, seen.end, seen.lag) == ("blue", 0, 100, 90)
    assert seen.claims == ((span(0, 0, 40), "b"),)
    assert seen.runs == (RUN,)
    assert seen.sentence == "orders-0: run ab12cd34 works on [0, 40)"


def test_status_without_a_leader_has_no_lag() -> None:
    refused = OwnedPartition(tp(0), 1)
    assert row(refused, PartitionLookup(OffsetAndMetadata(7), ANY_BOUNDS)).lag is None
    assert row(refused, PartitionLookup(OffsetAndMetadata(7), Bounds(0, 9))).lag == 2
    assert row(refused, PartitionLookup(None, Bounds(0, 9))).lag is None
    assert row(refused, None).committed is None


def test_lag_without_a_member_waits_for_one() -> None:
    found = PartitionLookup(OffsetAndMetadata(0), Bounds(0, 9))
    partition = owned(0)
    assert row(partition, found).sentence == "orders-0: 9 offsets wait for a member"
    claimed = owned(0, ("b", 9, InFlight((RUN,))))
    assert row(claimed, found).sentence == "orders-0: run ab12cd34 works on [0, 9)"
    assert "wait for a member" not in row(partition, found, BLUE).sentence


def test_status_has_the_directive() -> None:
    partition = owned(0)._replace(directive=Directive(Action.PAUSE, "*", "ada", 0.0, "away"))
    seen = row(partition, PartitionLookup(OffsetAndMetadata(0), Bounds(0, 0)))
    assert seen.paused == "paused by ada since 1970-01-01 00:00:00 UTC: away"


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (SensorState("s", is_on=False), "Sensor s is off: turn it on"),
        (SensorState("s", is_on=True), "Sensor s is on, and has no tick. Its code location does"),
        (
            SensorState("s", is_on=True, silent_for_s=300.0),
            "no tick for 300 s. Its code location does not load or does not answer in time, or",
        ),
        (
            SensorState("s", is_on=True, silent_for_s=300.0, error="KeyError: 'X'"),
            "s is on, and has had no tick for 300 s, and the last one failed: KeyError: 'X'. Its",
        ),
        (
            SensorState("s", is_on=True, silent_for_s=4.0, error="KeyError: 'X'"),
            "Sensor s is on, and its last tick failed 4 s ago: KeyError: 'X'",
        ),
        (
            SensorState("s", is_on=True, silent_for_s=4.0),
            "Sensor s is on, and its last tick was 4 s ago. Read that tick",
        ),
    ],
)
def test_why_no_member_names_the_state_of_the_sensor(seen: SensorState, said: str) -> None:
    first, second = why_no_member([seen])
    assert first == "The group has no member, so no new batch starts"
    assert said in second


def test_explanation_names_the_owner_or_holder() -> None:
    partition, found = owned(0), PartitionLookup(OffsetAndMetadata(0), Bounds(0, 0))
    assert len(explanation(row(partition, found), has_members=False)) == 1
    assert why_no_member(())[0] == "The group has no member, so no new batch starts"
    assert why_no_member(())[1].startswith("Turn its sensor on")
    assert explanation(row(partition, found, BLUE), has_members=True)[1] == "Its owner is blue"
    heir = replace(GREEN, is_to_own=frozenset({tp(0)}))
    moving = explanation(row(partition, found, BLUE, heir), has_members=True)
    assert moving[1] == "Its owner is blue; green waits for it"
    held = explanation(row(owned(1), None, BLUE), has_members=True)
    assert held[1].startswith("It has no owner at the moment: held by blue. The holder waits for")
    assert held[2] == "Its leader does not answer: check the brokers"


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        (
            owned(0, ("b", 10, Exhausted((RUN,))))._replace(phase=Phase.STOPPED, stop_reason="no"),
            "stopped: no",
        ),
        (
            owned(0, ("b", 10, ToRequest(2, 1, FailureStreak(FailureKind.FAILED, 1, RUN)))),
            "run ab12cd34 for [0, 10) failed; next run (attempt 2)",
        ),
    ],
)
def test_status_has_no_delays(partition: OwnedPartition, says: str) -> None:
    found = PartitionLookup(OffsetAndMetadata(0), Bounds(0, 10))
    assert status_of(partition, found, Owners((BLUE,)), now=0.0).sentence == f"orders-0: {says}"


def test_stop_that_its_owner_reported_is_the_state_of_an_idle_partition() -> None:
    idle = owned(0)
    stopped = idle.stopped_as_reported("orders-0: no letter. Mend it")
    assert (stopped.phase, stopped.stop_reason) == (Phase.STOPPED, "orders-0: no letter. Mend it")
    status = status_of(stopped, None, Owners((BLUE,)), 0.0)
    assert status.sentence == "orders-0: stopped: no letter. Mend it"
    for other in (
        stopped,
        idle._replace(phase=Phase.RESTORING),
        owned(0, ("b", 9, InFlight((RUN,)))),
    ):
        assert other.stopped_as_reported("orders-0: older") is other
    assert idle.stopped_as_reported("") is idle

"""The member table, derived from the records of members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.reporting.group_status import (
    Kind,
    MemberRecord,
    MemberTable,
    member_table,
)
from tests.core.world import tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition


def told(*events: tuple[str, Kind, tuple[int, ...]]) -> MemberTable:
    """The member table after records about partitions, a second apart."""
    return member_table(
        MemberRecord(kind, member, member.title(), float(at), tuple(map(tp, numbers)))
        for at, (member, kind, numbers) in enumerate(events)
    )


def owned(found: MemberTable) -> dict[str, set[TopicPartition]]:
    """What each member owns."""
    return {member.first.name: member.owns for member in found.members}


def held(found: MemberTable) -> list[tuple[str, frozenset[TopicPartition]]]:
    """The open holds."""
    return [(said.name, left) for said, left in found.holds]


def test_assignments_add_and_receipts_remove_partitions() -> None:
    found = told(
        ("blue", Kind.JOINED, ()),
        ("blue", Kind.ASSIGNED, (0, 1)),
        ("blue", Kind.ASSIGNED, (2,)),
        ("blue", Kind.HOLD, (1,)),
    )
    assert owned(found) == {"Blue": {tp(0), tp(2)}}
    assert found.members[0].first.at == 0.0


def test_members_are_sorted_by_name() -> None:
    found = told(("green", Kind.JOINED, ()), ("blue", Kind.ASSIGNED, (0,)))
    assert list(owned(found)) == ["Blue", "Green"]


def test_member_that_left_is_removed_with_its_holds() -> None:
    found = told(
        ("blue", Kind.ASSIGNED, (0,)), ("blue", Kind.HOLDING, (0,)), ("blue", Kind.LEFT, ())
    )
    assert (found.members, found.holds) == ((), ())
    assert told(("blue", Kind.LEFT, ())).members == ()


def test_killed_member_is_removed_when_others_own_its_partitions() -> None:
    found = told(
        ("blue", Kind.JOINED, ()),
        ("blue", Kind.ASSIGNED, (0, 1)),
        ("blue", Kind.HOLDING, (1,)),
        ("green", Kind.ASSIGNED, (1,)),
    )
    assert owned(found) == {"Blue": {tp(0)}, "Green": {tp(1)}}
    assert found.holds == ()
    found = told(
        ("blue", Kind.JOINED, ()), ("blue", Kind.ASSIGNED, (0,)), ("green", Kind.ASSIGNED, (0,))
    )
    assert owned(found) == {"Green": {tp(0)}}


def test_member_without_partitions_is_listed() -> None:
    found = told(
        ("blue", Kind.JOINED, ()), ("green", Kind.ASSIGNED, (0,)), ("green", Kind.HOLD, (0,))
    )
    assert owned(found) == {"Blue": set(), "Green": set()}


def test_hold_is_open_until_all_its_partitions_have_a_receipt() -> None:
    begun = [("blue", Kind.ASSIGNED, (0, 1, 2)), ("blue", Kind.HOLDING, (0, 1))]
    assert held(told(*begun)) == [("Blue", frozenset({tp(0), tp(1)}))]
    assert held(told(*begun, ("blue", Kind.HOLD, (0,)))) == [("Blue", frozenset({tp(1)}))]
    assert held(told(*begun, ("blue", Kind.HOLD, (0,)), ("blue", Kind.HOLD, (1,)))) == []


def test_holds_are_sorted_by_age() -> None:
    found = told(("green", Kind.HOLDING, (3,)), ("blue", Kind.HOLDING, (1,)))
    assert [name for name, _ in held(found)] == ["Green", "Blue"]


def test_last_ten_receipts_are_kept_newest_first() -> None:
    found = told(*(("blue", Kind.HOLD, (number,)) for number in range(12)))
    assert [said.partitions for said in found.receipts] == [(tp(n),) for n in range(11, 1, -1)]

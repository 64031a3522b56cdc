"""Detection of offsets that were stored by a member without ownership."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from proofs.witness.offsets_topic import (
    GenerationAssigned,
    GroupRecord,
    MemberAssigned,
    StoredOffset,
)
from proofs.witness.owners import Owners, stored_without_owning

NAMES = {"id-1": "blue", "id-2": "green"}


def _member(member_id: str, *partitions: int, asked_back: tuple[int, ...] = ()) -> MemberAssigned:
    return MemberAssigned("shop", member_id, frozenset(partitions), 0.0, frozenset(asked_back))


def _generation(**members: tuple[int, ...]) -> GenerationAssigned:
    assigned = {name.replace("_", "-"): frozenset(numbers) for name, numbers in members.items()}
    return GenerationAssigned("shop", assigned, 0.0)


def _stored(partition: int, offset: int) -> StoredOffset:
    return StoredOffset("shop", "orders", partition, offset, 0.0)


def _found(*log: GroupRecord, **recorded: tuple[int, int, int]) -> list[str]:
    recorded_by = {
        OffsetRange("orders", *range_): name.split("_and_") for name, range_ in recorded.items()
    }
    return stored_without_owning(log, recorded_by, NAMES)


def test_owner_of_a_partition_may_store_its_offset() -> None:
    assert not _found(_member("id-1", 0), _stored(0, 0), _stored(0, 5), blue=(0, 0, 5))


@pytest.mark.parametrize(
    "log",
    [
        [_stored(0, 5)],
        [_member("id-1", 0), MemberAssigned("shop", "id-1", None, 0.0), _stored(0, 5)],
    ],
)
def test_offset_stored_without_an_owner_is_reported(log: list[GroupRecord]) -> None:
    assert _found(*log) == ["offset 5 of orders-0 was stored while the partition had no owner"]


def test_offset_stored_after_a_revoke_is_reported() -> None:
    log = (
        _member("id-1", 0, 1),
        _member("id-1", 0, 1, asked_back=(1,)),
        _stored(1, 5),
        _member("id-1", 0),
        _stored(1, 9),
    )
    assert _found(*log) == ["offset 9 of orders-1 was stored while the partition had no owner"]


def test_member_may_store_offsets_until_it_receives_the_revoke() -> None:
    """Seen with a member that joined a busy broker: its first heartbeats reported no partitions."""
    taken = (_member("id-1", 0, 1), _member("id-1", 0), _stored(1, 0))
    assert not _found(*taken)
    assert _found(*taken, _stored(1, 5)) == [
        "offset 5 of orders-1 was stored while the partition had no owner"
    ], "claims are all it can store so soon"
    assert _found(*taken, _member("id-1", 0), _stored(1, 0)) == [
        "offset 0 of orders-1 was stored while the partition had no owner"
    ]
    assert _found(*taken, MemberAssigned("shop", "id-1", None, 0.0), _stored(1, 0))
    assert _found(
        *taken, _member("id-2", 1), MemberAssigned("shop", "id-2", None, 0.0), _stored(1, 0)
    )


def test_commit_by_the_former_owner_is_reported() -> None:
    log = (_member("id-1", 0), _stored(0, 5), _member("id-1"), _member("id-2", 0), _stored(0, 9))
    assert _found(*log, blue=(0, 5, 9)) == [
        "offset 9 of orders-0 was stored by blue while green had the partition"
    ]
    assert not _found(*log, green=(0, 5, 9))


def test_member_that_records_the_commit_of_the_owner_has_not_written_it() -> None:
    """A suspended member finds the commit that it wanted to write, and records it once more."""
    assert not _found(_member("id-2", 0), _stored(0, 9), blue_and_green=(0, 0, 9))


def test_classic_partition_has_its_owner_until_the_next_assignment() -> None:
    """A cooperative hand-over has a generation without an owner, and the hold is in that time."""
    log = (
        _generation(id_1=(0, 1)),
        _generation(id_1=(1,), id_2=()),
        _stored(0, 5),
        _generation(id_1=(1,), id_2=(0,)),
        _stored(0, 9),
    )
    assert not _found(*log, blue=(0, 0, 5), green=(0, 5, 9))
    assert _found(*log, blue=(0, 5, 9)) == [
        "offset 9 of orders-0 was stored by blue while green had the partition"
    ]


def test_classic_member_that_has_left_owns_nothing() -> None:
    log = (_generation(id_1=(0,)), _generation(id_2=()), _stored(0, 5))
    assert _found(*log) == ["offset 5 of orders-0 was stored while the partition had no owner"]


@pytest.mark.parametrize(
    ("log", "asked_back"),
    [
        ([_member("id-1", 0, 1)], []),
        ([_member("id-1", 0, 1, asked_back=(1,))], [1]),
        ([_member("id-1", 0, 1, asked_back=(1,)), _member("id-1", 0)], []),
        ([_generation(id_1=(0, 1)), _generation(id_1=(0,), id_2=())], [1]),
        ([_generation(id_1=(0, 1)), _generation(id_1=(0,), id_2=()), _generation(id_2=(1,))], []),
    ],
)
def test_revoke_request_is_known_until_the_release(
    log: list[GroupRecord], asked_back: list[int]
) -> None:
    owners = Owners()
    for record in log:
        owners.take(record)
    assert [number for number in range(3) if owners.is_asked_back(number)] == asked_back

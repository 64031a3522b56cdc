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


def test_who_has_a_partition_may_store_its_offset() -> None:
    assert not _found(_member("id-1", 0), _stored(0, 0), _stored(0, 5), blue=(0, 0, 5))


@pytest.mark.parametrize(
    "log",
    [
        [_stored(0, 5)],
        [_member("id-1", 0), MemberAssigned("shop", "id-1", None, 0.0), _stored(0, 5)],
    ],
)
def test_what_was_stored_while_nobody_had_the_partition_is_told(log: list[GroupRecord]) -> None:
    assert _found(*log) == ["offset 5 of orders-0 was stored while nobody had the partition"]


def test_a_member_that_gave_a_partition_up_stores_nothing_for_it_any_more() -> None:
    log = (
        _member("id-1", 0, 1),
        _member("id-1", 0, 1, asked_back=(1,)),
        _stored(1, 5),
        _member("id-1", 0),
        _stored(1, 9),
    )
    assert _found(*log) == ["offset 9 of orders-1 was stored while nobody had the partition"]


def test_a_member_that_was_not_asked_for_a_partition_cannot_know_that_it_was_taken() -> None:
    """Seen with a member that joined a busy broker: its first heartbeats reported no partitions."""
    taken = (_member("id-1", 0, 1), _member("id-1", 0), _stored(1, 0))
    assert not _found(*taken)
    assert _found(*taken, _stored(1, 5)) == [
        "offset 5 of orders-1 was stored while nobody had the partition"
    ], "claims are all it can store so soon"
    assert _found(*taken, _member("id-1", 0), _stored(1, 0)) == [
        "offset 0 of orders-1 was stored while nobody had the partition"
    ]
    assert _found(*taken, MemberAssigned("shop", "id-1", None, 0.0), _stored(1, 0))
    assert _found(
        *taken, _member("id-2", 1), MemberAssigned("shop", "id-2", None, 0.0), _stored(1, 0)
    )


def test_a_commit_by_the_former_owner_is_told() -> None:
    log = (_member("id-1", 0), _stored(0, 5), _member("id-1"), _member("id-2", 0), _stored(0, 9))
    assert _found(*log, blue=(0, 5, 9)) == [
        "offset 9 of orders-0 was stored by blue while green had the partition"
    ]
    assert not _found(*log, green=(0, 5, 9))


def test_who_only_found_the_commit_of_the_owner_did_not_write_it() -> None:
    """A suspended member finds the commit that it wanted to write, and records it once more."""
    assert not _found(_member("id-2", 0), _stored(0, 9), blue_and_green=(0, 0, 9))


def test_in_classic_a_partition_stays_with_its_owner_until_it_is_assigned_to_another() -> None:
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


def test_in_classic_a_member_that_is_gone_has_nothing() -> None:
    log = (_generation(id_1=(0,)), _generation(id_2=()), _stored(0, 5))
    assert _found(*log) == ["offset 5 of orders-0 was stored while nobody had the partition"]


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
def test_what_kafka_wants_back_is_known_until_it_is_given_up(
    log: list[GroupRecord], asked_back: list[int]
) -> None:
    owners = Owners()
    for record in log:
        owners.take(record)
    assert [number for number in range(3) if owners.is_asked_back(number)] == asked_back

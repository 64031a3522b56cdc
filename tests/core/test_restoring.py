"""Taking in a partition: nothing is assumed from before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.claims import Claim, LastCommit, StoredPartition, encode
from dagster_rebalance.core.commands import RecordCommit
from dagster_rebalance.core.events import Bounds
from dagster_rebalance.core.owned_partition import OwnedPartition
from dagster_rebalance.core.partition import OffsetAndMetadata
from dagster_rebalance.core.restoring import ForeignMetadata, Refused, StartFrom, is_news, moved_offset, out_of_range, take_in
from tests.core.world import span, tp

BOUNDS = Bounds(0, 500)
LAST = LastCommit(100, "b", "r1")
COMMITTED = encode(StoredPartition(120, (), LAST))


def taken(
    stored: OffsetAndMetadata | None,
    recorded_until: int | None = None,
    *,
    bounds: Bounds = BOUNDS,
    start_from: StartFrom = StartFrom.EARLIEST,
    foreign_metadata: ForeignMetadata = ForeignMetadata.REFUSE,
) -> OwnedPartition | Refused:
    """Take in orders-0 in epoch 4."""
    return take_in(OwnedPartition(tp(0), 4), stored, bounds, recorded_until, start_from=start_from, foreign_metadata=foreign_metadata)


def test_claims_become_the_ledger() -> None:
    """Same ranges, same batch ids; nothing is known of their runs yet."""
    owned = taken(encode(StoredPartition(120, (Claim(130, "x"), Claim(140, "y")), LAST)), 120)
    assert isinstance(owned, OwnedPartition)
    assert [(entry.range, entry.batch_id, entry.claimed_at) for entry in owned.entries] == [
        (span(0, 120, 130), "x", None),
        (span(0, 130, 140), "y", None),
    ]
    assert owned.last_commit == LAST
    assert (owned.lag, owned.unrecorded) == (380, None)


@pytest.mark.parametrize(("start_from", "offset"), [(StartFrom.EARLIEST, 30), (StartFrom.LATEST, 500)])
def test_a_group_without_a_commit_starts_where_the_setting_says(start_from: StartFrom, offset: int) -> None:
    """There is nothing to obey yet."""
    owned = taken(None, bounds=Bounds(30, 500), start_from=start_from)
    assert isinstance(owned, OwnedPartition)
    assert owned.ledger is not None
    assert owned.ledger.next_offset == offset


def test_a_dead_letter_that_was_never_recorded_is_found_as_such() -> None:
    """Else it would look as if a run had succeeded."""
    owned = taken(encode(StoredPartition(120, (), replace(LAST, is_dead_letter=True))))
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded is not None
    assert (owned.unrecorded.is_dead_letter, owned.unrecorded.run_id) == (True, "r1")


@pytest.mark.parametrize("recorded_until", [None, 100])
def test_a_commit_that_was_never_recorded_is_found(recorded_until: int | None) -> None:
    """Its member went away between the commit and the materialisation."""
    owned = taken(COMMITTED, recorded_until)
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded == RecordCommit(
        span(0, 100, 120), epoch=4, batch_id="b", run_id="r1", lag=380, claim_to_commit_s=None, drain_s=None, is_late=True
    )


@pytest.mark.parametrize("recorded_until", [120, 300])
def test_a_commit_that_was_recorded_is_not_recorded_again(recorded_until: int) -> None:
    """One materialisation for each commit."""
    owned = taken(COMMITTED, recorded_until)
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded is None


def test_an_offset_that_somebody_moved_is_obeyed_and_said() -> None:
    """An operator's reset writes no metadata of ours."""
    owned = taken(OffsetAndMetadata(50), 120)
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded is None
    assert moved_offset(owned, 120) == (
        "orders-0 continues at offset 50, which was set by somebody else: the last recorded commit ended at 120"
    )


@pytest.mark.parametrize(("stored", "recorded_until"), [(OffsetAndMetadata(50), None), (OffsetAndMetadata(50), 50), (COMMITTED, 100)])
def test_an_offset_that_nobody_moved_is_not_spoken_of(stored: OffsetAndMetadata, recorded_until: int | None) -> None:
    """A new group, the usual case, and a commit that is still to be recorded."""
    owned = taken(stored, recorded_until)
    assert isinstance(owned, OwnedPartition)
    assert moved_offset(owned, recorded_until) is None


def test_an_offset_of_a_partition_that_is_not_read_yet_was_not_moved() -> None:
    """There is nothing to compare."""
    assert moved_offset(OwnedPartition(tp(0), 4), 120) is None


def test_offsets_deleted_by_retention_are_refused_with_what_to_do() -> None:
    """To skip them silently would lose records."""
    refused = taken(COMMITTED, bounds=Bounds(200, 500))
    assert isinstance(refused, Refused)
    assert "the offsets 120 to 200 were deleted by Kafka's retention" in refused.reason
    assert "kafka-consumer-groups --reset-offsets" in refused.reason


def test_an_offset_behind_the_end_is_refused() -> None:
    """The topic was made again: what is at these offsets are other records."""
    refused = taken(COMMITTED, bounds=Bounds(0, 119))
    assert isinstance(refused, Refused)
    assert "the group is at offset 120, but the partition ends at 119" in refused.reason


def test_foreign_metadata_is_refused_with_what_to_do() -> None:
    """Another application commits to this group."""
    refused = taken(OffsetAndMetadata(120, "host-7"))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("orders-0: the metadata 'host-7' was not written by dagster_rebalance")
    assert "give this one a group of its own" in refused.reason


def test_foreign_metadata_is_overwritten_only_when_asked_for() -> None:
    """The offset beside it is kept."""
    owned = taken(OffsetAndMetadata(120, "host-7"), foreign_metadata=ForeignMetadata.OVERWRITE)
    assert isinstance(owned, OwnedPartition)
    assert owned.ledger is not None
    assert (owned.ledger.next_offset, owned.entries) == (120, ())


def test_a_number_that_changed_is_no_news() -> None:
    """Retention moves the first offset every few minutes, and each piece of news costs a look at the whole group."""
    before = out_of_range(tp(0), 5, Bounds(100, 200))
    after = out_of_range(tp(0), 5, Bounds(150, 250))
    assert before is not None
    assert after is not None
    assert before != after
    assert not is_news(after, before)
    assert is_news(before, "")
    assert is_news(before, "orders-0: 3 runs failed on orders-0 [5, 10), the last one is ab12")

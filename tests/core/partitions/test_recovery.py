"""Taking in a partition: nothing is assumed from before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import ForeignMetadata
from dagster_rebalance.core.model.claims import Claim, LastCommit, StoredPartition, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.events import LastRecorded, PartitionLookup
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import (
    ANY_BOUNDS,
    Bounds,
    Log,
    LogPosition,
    OffsetAndMetadata,
)
from dagster_rebalance.core.model.topics import StartFrom
from dagster_rebalance.core.partitions.owned import OwnedPartition, Refused
from dagster_rebalance.core.partitions.recovery import (
    check_position,
    is_new_reason,
    moved_offset_note,
    position_to_verify,
    restore,
)
from dagster_rebalance.core.partitions.unrecorded import NOTHING, Unrecorded
from tests.core.world import span, tp

BOUNDS = Bounds(0, 500)
LAST = LastCommit(100, "b", "r1")
LATE = RecordCommit(
    span(0, 100, 120),
    epoch=4,
    batch_id="b",
    run_id="r1",
    lag=380,
    claim_to_commit_s=None,
    drain_s=None,
    is_late=True,
)
EARLIER = replace(LATE, range=span(0, 80, 100), batch_id="a", run_id="r0")
IN_PARTS = encode(StoredPartition(120, (), replace(LAST, earlier=(LastCommit(80, "a", "r0"),))))
COMMITTED = encode(StoredPartition(120, (), LAST))


def taken(
    stored: OffsetAndMetadata | None,
    recorded: LastRecorded | None = None,
    *,
    bounds: Bounds = BOUNDS,
    topic_id: str = "",
    is_truncated: bool = False,
    refused: Refused | None = None,
    start_from: StartFrom = StartFrom.EARLIEST,
    foreign_metadata: ForeignMetadata = ForeignMetadata.REFUSE,
) -> OwnedPartition | Refused:
    """Take in orders-0 in epoch 4."""
    found = PartitionLookup(stored, bounds, recorded, topic_id, is_truncated)
    owned = OwnedPartition(tp(0), 4, refused=refused)
    return restore(owned, found, start_from=start_from, foreign_metadata=foreign_metadata)


def test_restore_builds_ledger_from_claims() -> None:
    owned = taken(
        encode(StoredPartition(120, (Claim(130, "x"), Claim(140, "y")), LAST)),
        LastRecorded(120, "r1"),
    )
    assert isinstance(owned, OwnedPartition)
    assert [(entry.range, entry.batch_id, entry.claimed_at) for entry in owned.entries] == [
        (span(0, 120, 130), "x", None),
        (span(0, 130, 140), "y", None),
    ]
    assert owned.last_commit == LAST
    assert (owned.lag, owned.unrecorded) == (380, NOTHING)


@pytest.mark.parametrize(
    ("start_from", "offset"), [(StartFrom.EARLIEST, 30), (StartFrom.LATEST, 500)]
)
def test_restore_without_commit_starts_at_setting(start_from: StartFrom, offset: int) -> None:
    owned = taken(None, bounds=Bounds(30, 500), start_from=start_from)
    assert isinstance(owned, OwnedPartition)
    assert owned.ledger is not None
    assert owned.ledger.next_offset == offset


def test_unrecorded_dead_letter_is_restored_as_such() -> None:
    owned = taken(encode(StoredPartition(120, (), replace(LAST, is_dead_letter=True))))
    assert isinstance(owned, OwnedPartition)
    (record,) = owned.unrecorded.parts
    assert (record.is_dead_letter, record.run_id) == (True, "r1")


@pytest.mark.parametrize(
    "recorded", [None, LastRecorded(100, "r0"), LastRecorded(300, "r0"), LastRecorded(120, "r0")]
)
def test_unrecorded_commit_is_restored(recorded: LastRecorded | None) -> None:
    """After a rewind, older commits are recorded with higher or equal offsets."""
    owned = taken(COMMITTED, recorded)
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded == Unrecorded((LATE,))


@pytest.mark.parametrize(
    ("recorded", "left"),
    [
        (None, (EARLIER, LATE)),
        (LastRecorded(80, "r9"), (EARLIER, LATE)),
        (LastRecorded(100, "r0"), (LATE,)),
        (LastRecorded(100, "r9"), (EARLIER, LATE)),
        (LastRecorded(120, "r1"), ()),
        (LastRecorded(120, ""), ()),
    ],
)
def test_commits_noted_in_parts_are_restored_after_the_last_recorded_one(
    recorded: LastRecorded | None, left: tuple[RecordCommit, ...]
) -> None:
    owned = taken(IN_PARTS, recorded)
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded.parts == left


@pytest.mark.parametrize("run_id", ["r1", ""])
def test_recorded_commit_is_not_recorded_again(run_id: str) -> None:
    owned = taken(COMMITTED, LastRecorded(120, run_id))
    assert isinstance(owned, OwnedPartition)
    assert not owned.unrecorded


def test_moved_offset_is_kept_and_noted() -> None:
    owned = taken(OffsetAndMetadata(50), LastRecorded(120))
    assert isinstance(owned, OwnedPartition)
    assert not owned.unrecorded
    note = moved_offset_note(owned, LastRecorded(120))
    assert note is not None
    assert note.text == (
        "orders-0 continues at offset 50, which was set externally: the last recorded commit "
        "ended at 120"
    )
    assert note.kind is EventKind.OFFSETS_MOVED
    assert note.fields == {"topic": "orders", "partition": 0, "recorded_until": 120, "offset": 50}


@pytest.mark.parametrize(
    ("stored", "recorded"),
    [
        (OffsetAndMetadata(50), None),
        (OffsetAndMetadata(50), LastRecorded(50)),
        (COMMITTED, LastRecorded(100)),
    ],
)
def test_unmoved_offset_is_not_noted(
    stored: OffsetAndMetadata, recorded: LastRecorded | None
) -> None:
    owned = taken(stored, recorded)
    assert isinstance(owned, OwnedPartition)
    assert moved_offset_note(owned, recorded) is None


def test_moved_offset_note_without_ledger_is_none() -> None:
    assert moved_offset_note(OwnedPartition(tp(0), 4), LastRecorded(120)) is None


def test_offset_deleted_by_retention_is_refused_with_remedy() -> None:
    refused = taken(COMMITTED, bounds=Bounds(200, 500))
    assert isinstance(refused, Refused)
    assert (
        "Kafka's retention deleted records from offset 120 on before they were processed"
        in refused.reason
    )
    assert "dagster-rebalance reset orders:0 --to-earliest --yes" in refused.reason


def test_reason_is_stable_while_retention_continues() -> None:
    assert taken(COMMITTED, bounds=Bounds(200, 500)) == taken(COMMITTED, bounds=Bounds(300, 500))


def test_offset_beyond_end_is_refused() -> None:
    refused = taken(COMMITTED, bounds=Bounds(0, 119))
    assert isinstance(refused, Refused)
    assert (
        "the group is at offset 120, but the log lost records before that offset" in refused.reason
    )
    assert "--to-offset <that offset>" in refused.reason


def test_truncated_log_that_grew_again_stays_refused() -> None:
    refused = taken(COMMITTED, bounds=Bounds(0, 119))
    assert isinstance(refused, Refused)
    assert taken(COMMITTED, bounds=Bounds(0, 500), refused=refused) is refused
    moved = taken(OffsetAndMetadata(110), bounds=Bounds(0, 500), refused=refused)
    assert isinstance(moved, OwnedPartition)


def test_offset_beyond_end_with_leader_epoch_is_checked_again() -> None:
    """A new leader may learn the end of the log late."""
    stored = encode(StoredPartition(120, (), LAST, Log(leader_epoch=3)))
    refused = taken(stored, bounds=Bounds(0, 119, 4))
    assert isinstance(refused, Refused)
    assert isinstance(taken(stored, bounds=Bounds(0, 120, 4), refused=refused), OwnedPartition)


def test_unseen_truncation_is_verified_by_leader_epoch() -> None:
    stored = encode(StoredPartition(120, (Claim(130, "b"),), LAST, Log(leader_epoch=3)))
    assert position_to_verify(stored, Bounds(0, 500, 4)) == LogPosition(130, 3)
    refused = taken(stored, bounds=Bounds(0, 500, 4), is_truncated=True)
    assert isinstance(refused, Refused)
    assert (
        "the group is at offset 130, but the log lost records before that offset" in refused.reason
    )


def test_reset_advice_does_not_skip_claimed_ranges() -> None:
    stored = encode(StoredPartition(120, (Claim(130, "b"),), LAST, Log(leader_epoch=3)))
    refused = taken(stored, bounds=Bounds(0, 500, 4), is_truncated=True)
    assert isinstance(refused, Refused)
    assert "--to-offset <that offset, or 120 if that is lower>" in refused.reason


@pytest.mark.parametrize(
    ("stored", "bounds"),
    [
        (None, Bounds(0, 500, 4)),
        (OffsetAndMetadata(120), Bounds(0, 500, 4)),
        (OffsetAndMetadata(120, "host-7"), Bounds(0, 500, 4)),
        (encode(StoredPartition(120, (), LAST, Log(leader_epoch=4))), Bounds(0, 500, 4)),
        (encode(StoredPartition(120, (), LAST, Log(leader_epoch=4))), Bounds(0, 500)),
    ],
)
def test_only_earlier_leader_epoch_is_verified(
    stored: OffsetAndMetadata | None, bounds: Bounds
) -> None:
    assert position_to_verify(stored, bounds) is None


@pytest.mark.parametrize("start_from", list(StartFrom))
def test_vanished_offset_is_refused(start_from: StartFrom) -> None:
    """With `latest` it would skip records, with `earliest` repeat the whole topic."""
    refused = taken(None, LastRecorded(300), start_from=start_from)
    assert isinstance(refused, Refused)
    assert (
        "the group has no committed offset in Kafka any more, although Dagster has recorded its "
        "commits up to 300" in refused.reason
    )
    assert "dagster-rebalance reset orders:0 --to-offset 300 --yes" in refused.reason
    assert "wipe the materializations of its offsets asset in Dagster" in refused.reason


def test_vanished_offset_behind_the_end_of_the_log_is_not_named_as_remedy() -> None:
    refused = taken(None, LastRecorded(300), bounds=Bounds(0, 200))
    assert isinstance(refused, Refused)
    assert "Its log ends before that offset. To continue" in refused.reason
    assert "dagster-rebalance reset orders:0 --to-earliest --yes" in refused.reason
    assert "--to-offset" not in refused.reason


def test_recreated_topic_is_refused() -> None:
    stored = encode(StoredPartition(120, (), LAST, Log("old-id")))
    refused = taken(stored, LastRecorded(120), topic_id="new-id")
    assert isinstance(refused, Refused)
    assert (
        "the topic was deleted and recreated, or the offsets were copied to another cluster"
        in refused.reason
    )
    assert "move the old output away" in refused.reason
    assert isinstance(taken(stored, LastRecorded(120), topic_id="old-id"), OwnedPartition)
    assert isinstance(taken(stored, LastRecorded(120)), OwnedPartition)


def test_known_log_is_kept_if_kafka_does_not_report_it() -> None:
    stored = encode(StoredPartition(120, (), LAST, Log("id", 3)))
    owned = taken(stored, LastRecorded(120))
    assert isinstance(owned, OwnedPartition)
    assert (owned.log, owned.stored_log) == (Log("id", 3), Log("id", 3))
    told = taken(stored, LastRecorded(120), topic_id="id", bounds=Bounds(0, 500, 5))
    assert isinstance(told, OwnedPartition)
    assert (told.log, told.stored_log) == (Log("id", 5), Log("id", 3))


def test_unknown_bounds_are_not_out_of_range() -> None:
    assert check_position(
        tp(0), PartitionLookup(COMMITTED, ANY_BOUNDS), ForeignMetadata.REFUSE
    ) == StoredPartition(120, (), LAST)


def test_foreign_metadata_is_refused_with_remedy() -> None:
    refused = taken(OffsetAndMetadata(120, "host-7"))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith(
        "orders-0: the metadata 'host-7' was not written by dagster_rebalance"
    )
    assert "give one of the two another group.id" in refused.reason
    assert "run dagster-rebalance reset orders:0 --to-current --yes" in refused.reason


def test_foreign_metadata_is_overwritten_with_policy() -> None:
    owned = taken(OffsetAndMetadata(120, "host-7"), foreign_metadata=ForeignMetadata.OVERWRITE)
    assert isinstance(owned, OwnedPartition)
    assert owned.ledger is not None
    assert (owned.ledger.next_offset, owned.entries) == (120, ())


def test_changed_number_is_no_new_reason() -> None:
    before, after = "orders-0: the group is at offset 120", "orders-0: the group is at offset 150"
    assert not is_new_reason(after, before)
    assert is_new_reason(before, "")
    assert is_new_reason(
        before, "orders-0: 3 runs failed on orders-0 [5, 10), the last one is ab12"
    )

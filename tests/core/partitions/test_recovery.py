"""Taking in a partition: nothing is assumed from before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.settings import ForeignMetadata
from dagster_rebalance.core.model.claims import Claim, LastCommit, StoredPartition, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.events import Found, LastRecorded
from dagster_rebalance.core.model.member_events import Occurred
from dagster_rebalance.core.model.offsets import (
    ANY_BOUNDS,
    Bounds,
    Log,
    LogPosition,
    OffsetAndMetadata,
)
from dagster_rebalance.core.model.start_position import StartFrom
from dagster_rebalance.core.partitions.owned import OwnedPartition, Refused
from dagster_rebalance.core.partitions.recovery import (
    is_news,
    judge,
    moved_offset,
    position_to_verify,
    take_in,
)
from tests.core.world import span, tp

BOUNDS = Bounds(0, 500)
LAST = LastCommit(100, "b", "r1")
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
    found = Found(stored, bounds, recorded, topic_id, is_truncated)
    owned = OwnedPartition(tp(0), 4, refused=refused)
    return take_in(owned, found, start_from=start_from, foreign_metadata=foreign_metadata)


def test_claims_become_the_ledger() -> None:
    """Same ranges, same batch ids; nothing is known of their runs yet."""
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
    assert (owned.lag, owned.unrecorded) == (380, None)


@pytest.mark.parametrize(
    ("start_from", "offset"), [(StartFrom.EARLIEST, 30), (StartFrom.LATEST, 500)]
)
def test_a_group_without_a_commit_starts_where_the_setting_says(
    start_from: StartFrom, offset: int
) -> None:
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


@pytest.mark.parametrize(
    "recorded", [None, LastRecorded(100, "r0"), LastRecorded(300, "r0"), LastRecorded(120, "r0")]
)
def test_a_commit_that_was_never_recorded_is_found(recorded: LastRecorded | None) -> None:
    """Its member went away between the commit and the materialisation.

    Behind a rewind, older commits are recorded with higher offsets, or with the same one.
    """
    owned = taken(COMMITTED, recorded)
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded == RecordCommit(
        span(0, 100, 120),
        epoch=4,
        batch_id="b",
        run_id="r1",
        lag=380,
        claim_to_commit_s=None,
        drain_s=None,
        is_late=True,
    )


@pytest.mark.parametrize("run_id", ["r1", ""])
def test_a_commit_that_was_recorded_is_not_recorded_again(run_id: str) -> None:
    """One materialisation for each commit; somebody else's tool may have reported it."""
    owned = taken(COMMITTED, LastRecorded(120, run_id))
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded is None


def test_an_offset_that_somebody_moved_is_obeyed_and_said() -> None:
    """An operator's reset writes no metadata of ours."""
    owned = taken(OffsetAndMetadata(50), LastRecorded(120))
    assert isinstance(owned, OwnedPartition)
    assert owned.unrecorded is None
    note = moved_offset(owned, LastRecorded(120))
    assert note is not None
    assert note.text == (
        "orders-0 continues at offset 50, which was set by somebody else: the last recorded commit "
        "ended at 120"
    )
    assert note.what is Occurred.OFFSETS_MOVED
    assert note.fields == {"topic": "orders", "partition": 0, "recorded_until": 120, "offset": 50}


@pytest.mark.parametrize(
    ("stored", "recorded"),
    [
        (OffsetAndMetadata(50), None),
        (OffsetAndMetadata(50), LastRecorded(50)),
        (COMMITTED, LastRecorded(100)),
    ],
)
def test_an_offset_that_nobody_moved_is_not_spoken_of(
    stored: OffsetAndMetadata, recorded: LastRecorded | None
) -> None:
    """A new group, the usual case, and a commit that is still to be recorded."""
    owned = taken(stored, recorded)
    assert isinstance(owned, OwnedPartition)
    assert moved_offset(owned, recorded) is None


def test_an_offset_of_a_partition_that_is_not_read_yet_was_not_moved() -> None:
    """There is nothing to compare."""
    assert moved_offset(OwnedPartition(tp(0), 4), LastRecorded(120)) is None


def test_offsets_deleted_by_retention_are_refused_with_what_to_do() -> None:
    """To skip them silently would lose records."""
    refused = taken(COMMITTED, bounds=Bounds(200, 500))
    assert isinstance(refused, Refused)
    assert (
        "Kafka's retention deleted records from offset 120 on before they were processed"
        in refused.reason
    )
    assert "dagster-rebalance reset orders:0 --to-earliest --yes" in refused.reason


def test_a_reason_does_not_change_while_retention_goes_on() -> None:
    """Each new reason is shown, and retention deletes something every few minutes."""
    assert taken(COMMITTED, bounds=Bounds(200, 500)) == taken(COMMITTED, bounds=Bounds(300, 500))


def test_an_offset_behind_the_end_is_refused() -> None:
    """The topic was made again or truncated: what is at these offsets will be other records."""
    refused = taken(COMMITTED, bounds=Bounds(0, 119))
    assert isinstance(refused, Refused)
    assert (
        "the group is at offset 120, but the log lost records before that offset" in refused.reason
    )
    assert "--to-offset <that offset>" in refused.reason


def test_a_truncated_log_that_has_grown_again_stays_refused() -> None:
    """The records produced since the truncation have offsets that the group has passed."""
    refused = taken(COMMITTED, bounds=Bounds(0, 119))
    assert isinstance(refused, Refused)
    assert taken(COMMITTED, bounds=Bounds(0, 500), refused=refused) is refused
    moved = taken(OffsetAndMetadata(110), bounds=Bounds(0, 500), refused=refused)
    assert isinstance(moved, OwnedPartition)


def test_what_the_leader_epoch_can_tell_later_is_looked_up_anew() -> None:
    """A new leader may know the end of the log a moment late.

    The member asks it each time whether the log was truncated.
    """
    stored = encode(StoredPartition(120, (), LAST, Log(leader_epoch=3)))
    refused = taken(stored, bounds=Bounds(0, 119, 4))
    assert isinstance(refused, Refused)
    assert isinstance(taken(stored, bounds=Bounds(0, 120, 4), refused=refused), OwnedPartition)


def test_a_log_that_was_truncated_and_has_grown_again_unseen_is_refused() -> None:
    """Its bounds look as if nothing had happened."""
    stored = encode(StoredPartition(120, (Claim(130, "b"),), LAST, Log(leader_epoch=3)))
    assert position_to_verify(stored, Bounds(0, 500, 4)) == LogPosition(130, 3)
    refused = taken(stored, bounds=Bounds(0, 500, 4), is_truncated=True)
    assert isinstance(refused, Refused)
    assert (
        "the group is at offset 130, but the log lost records before that offset" in refused.reason
    )


def test_nobody_is_told_to_pass_over_what_is_claimed_and_not_done() -> None:
    """The log may have been cut off behind the committed offset.

    From the committed offset to the cut all records are left.
    """
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
def test_a_leader_is_asked_for_an_earlier_epoch_only(
    stored: OffsetAndMetadata | None, bounds: Bounds
) -> None:
    """Nothing was truncated while no other broker has led the partition.

    An offset that was written without an epoch cannot be verified.
    """
    assert position_to_verify(stored, bounds) is None


@pytest.mark.parametrize("start_from", list(StartFrom))
def test_an_offset_that_vanished_is_no_new_group(start_from: StartFrom) -> None:
    """A vanished offset must not start the group anew.

    With `latest` it would skip everything since the last commit, with `earliest` it would do the
    whole topic again.
    """
    refused = taken(None, LastRecorded(300), start_from=start_from)
    assert isinstance(refused, Refused)
    assert (
        "the group has no committed offset in Kafka any more, although Dagster has recorded its "
        "commits up to 300" in refused.reason
    )
    assert "dagster-rebalance reset orders:0 --to-offset 300 --yes" in refused.reason
    assert "wipe the materialisations of its offsets asset in Dagster" in refused.reason


def test_a_topic_that_was_made_again_is_refused() -> None:
    """The offsets of the new topic are those of other records.

    Its ranges would replace the output of the old ones.
    """
    stored = encode(StoredPartition(120, (), LAST, Log("old-id")))
    refused = taken(stored, LastRecorded(120), topic_id="new-id")
    assert isinstance(refused, Refused)
    assert (
        "the topic was deleted and made again, or the offsets were copied to another cluster"
        in refused.reason
    )
    assert "move the old output away" in refused.reason
    assert isinstance(taken(stored, LastRecorded(120), topic_id="old-id"), OwnedPartition)
    assert isinstance(taken(stored, LastRecorded(120)), OwnedPartition)


def test_what_is_known_of_the_log_is_kept_where_kafka_does_not_tell_it() -> None:
    """A broker that is upgraded later must find what was known before."""
    stored = encode(StoredPartition(120, (), LAST, Log("id", 3)))
    owned = taken(stored, LastRecorded(120))
    assert isinstance(owned, OwnedPartition)
    assert (owned.log, owned.stored_log) == (Log("id", 3), Log("id", 3))
    told = taken(stored, LastRecorded(120), topic_id="id", bounds=Bounds(0, 500, 5))
    assert isinstance(told, OwnedPartition)
    assert (told.log, told.stored_log) == (Log("id", 5), Log("id", 3))


def test_from_outside_a_leader_that_does_not_answer_says_nothing() -> None:
    """The check must not fail because a broker restarts."""
    assert judge(tp(0), Found(COMMITTED, ANY_BOUNDS), ForeignMetadata.REFUSE) == StoredPartition(
        120, (), LAST
    )


def test_foreign_metadata_is_refused_with_what_to_do() -> None:
    """Another application commits to this group."""
    refused = taken(OffsetAndMetadata(120, "host-7"))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith(
        "orders-0: the metadata 'host-7' was not written by dagster_rebalance"
    )
    assert "give this one a group of its own" in refused.reason
    assert "run dagster-rebalance reset orders:0 --to-current --yes" in refused.reason


def test_foreign_metadata_is_overwritten_only_when_asked_for() -> None:
    """The offset beside it is kept."""
    owned = taken(OffsetAndMetadata(120, "host-7"), foreign_metadata=ForeignMetadata.OVERWRITE)
    assert isinstance(owned, OwnedPartition)
    assert owned.ledger is not None
    assert (owned.ledger.next_offset, owned.entries) == (120, ())


def test_a_number_that_changed_is_no_news() -> None:
    """Each piece of news costs a look at the whole group."""
    before, after = "orders-0: the group is at offset 120", "orders-0: the group is at offset 150"
    assert not is_news(after, before)
    assert is_news(before, "")
    assert is_news(before, "orders-0: 3 runs failed on orders-0 [5, 10), the last one is ab12")

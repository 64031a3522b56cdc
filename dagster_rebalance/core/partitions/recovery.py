"""Taking in a partition: what its stored offset, its claims and Kafka's bounds mean on assignment.

Nothing is assumed from before. Owns the reasons for which a partition cannot start or go on,
whoever looks (`judge`), and how a commit that was never recorded is found. Offsets that vanished,
went back or belong to another log never make a partition skip or repeat anything: it stops until a
person has committed an offset.
"""

# Theory of operation: the hand-over
#
# The former owner promises nothing, since it may have crashed. Everything that the next owner needs
# is in Kafka (offset, claims, last commit, log) and in Dagster (runs, heartbeats, records). On each
# assignment, and after each election of a leader, a partition passes these steps:
#
# 1. Read the committed offset, the bounds of the log and the last record of a commit.
# 2. Judge them (`judge`). If the offset vanished, is out of range, or belongs to another log (topic
#    id or leader epoch), the partition is stopped with a reason until an operator commits an
#    offset. No branch skips or repeats records on its own.
# 3. Record the last commit if Dagster lacks its record.
# 4. Read the runs of the claims and all live runs of the group. Wait for a run that works on the
#    partition without a claim (an operator has moved the offset).
# 5. For each claim, in order: adopt a live run, commit a success, request everything else again
#    under the same batch id and bounds.
#
# A draining owner therefore has nothing to send to its successor. It can release a partition at any
# moment, and whatever it could not finish is decided by step 5 of the next owner. Answers that
# arrive after the release carry an earlier epoch and are dropped.
#
# In streaming runs a claim names the run in its batch id. The next owner takes the range over under
# its own id (`core.streaming.stream_claims`), once the former run reports that it no longer works
# on the partition, or its lease has expired.

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.settings import ForeignMetadata
from dagster_rebalance.core.model.claims import StoredPartition, decode
from dagster_rebalance.core.model.commands import Note, RecordCommit
from dagster_rebalance.core.model.directives import selector_of
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.member_events import Occurred
from dagster_rebalance.core.model.offsets import (
    Log,
    LogPosition,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
    is_same_commit,
)
from dagster_rebalance.core.model.start_position import first_offset
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import Refused

if TYPE_CHECKING:
    from dagster_rebalance.core.model.events import Found, LastRecorded
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.model.start_position import Start
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_NUMBER = re.compile(r"\b\d+\b")


def position_to_verify(stored: OffsetAndMetadata | None, bounds: Bounds) -> LogPosition | None:
    """What the leader has to be asked: whether the log of that leader epoch reached this offset.

    None when nobody else has led the partition since the offset was written, or when that is not
    known.
    """
    read = None if stored is None else read_stored(stored)
    if (
        not isinstance(read, StoredPartition)
        or read.log.leader_epoch in {None, bounds.leader_epoch}
        or bounds.leader_epoch is None
    ):
        return None
    return LogPosition(read.claimed_until, read.log.leader_epoch)


def take_in(
    owned: OwnedPartition, found: Found, *, start_from: Start, foreign_metadata: ForeignMetadata
) -> OwnedPartition | Refused:
    """Build the ledger of a partition from what was found."""
    bounds = found.bounds
    held = owned.refused
    if (
        held is not None
        and held.moved_from is not None
        and is_same_commit(held.moved_from, found.stored)
    ):
        return held
    read = judge(owned.partition, found, foreign_metadata)
    if isinstance(read, Refused):
        return read
    if read is None:
        read = StoredPartition(first_offset(start_from, bounds, found.not_older))
    ledger = OffsetLedger(owned.partition, owned.epoch, read.next_offset)
    for claim in read.claims:
        ledger = ledger.claim(claim.batch_id, claim.until, taken_from=claim.taken_from)
    taken = replace(
        owned,
        stored=found.stored,
        ledger=ledger,
        last_commit=read.last_commit,
        log=Log(
            found.topic_id or read.log.topic_id,
            read.log.leader_epoch if bounds.leader_epoch is None else bounds.leader_epoch,
        ),
        stored_log=read.log,
        bounds=bounds,
        pending=None,
        backlog_since=None,
        seen_since=None,
        before=owned.before
        if owned.before is not None and is_same_commit(owned.before.stored, found.stored)
        else None,
    )
    return replace(taken, unrecorded=_unrecorded(taken, found.recorded), recorded_at=None)


def read_stored(stored: OffsetAndMetadata) -> StoredPartition | ClaimError:
    """Return what a group has stored for a partition, or why the text cannot be read."""
    try:
        return decode(stored)
    except ClaimError as error:
        return error


def judge(
    partition: TopicPartition, found: Found, foreign_metadata: ForeignMetadata
) -> StoredPartition | Refused | None:
    """Return what the group has stored for a partition.

    Return None when the group begins with this partition, or why nobody may go on without a
    person's word.
    """
    stored = found.stored
    if stored is None:
        return _without_offset(partition, found)
    read = read_stored(stored)
    if isinstance(read, ClaimError):
        if foreign_metadata is ForeignMetadata.REFUSE:
            return Refused(
                f"{partition}: {read}. To go on at the committed offset without that text, "
                f"{_reset(partition, '--to-current')}"
            )
        read = StoredPartition(stored.offset)
    if read.log.topic_id and found.topic_id and read.log.topic_id != found.topic_id:
        return Refused(_made_anew(partition, stored.offset))
    if found.is_truncated:
        return Refused(_truncated(partition, read.claimed_until, read.next_offset))
    problem = out_of_range(partition, read.next_offset, found.bounds)
    if problem is None:
        return read
    is_beyond = read.next_offset > found.bounds.until
    return Refused(problem, stored if is_beyond and read.log.leader_epoch is None else None)


def _without_offset(partition: TopicPartition, found: Found) -> Refused | None:
    if found.refused:
        return Refused(f"{partition}: {found.refused}")
    return None if found.recorded is None else Refused(_vanished(partition, found.recorded.until))


def out_of_range(
    partition: TopicPartition, offset: int, bounds: Bounds, *, committed: int | None = None
) -> str | None:
    """Why reading cannot go on at `offset`, or None when Kafka has it.

    `committed` is the offset of the group, if it is another one.
    """
    # Without the bounds: they change all the time, and each change would be a new reason to show.
    if offset < bounds.start:
        return (
            f"{partition}: Kafka's retention deleted records from offset {offset} on before they "
            "were processed. To go on "
            f"without them, {_reset(partition, '--to-earliest')}"
        )
    if offset > bounds.until:
        return _truncated(partition, offset, offset if committed is None else committed)
    return None


def refused_write(owned: OwnedPartition) -> str | None:
    """Say why a person must act before Kafka stores what the partition has to store.

    Return None if Kafka refuses nothing.
    """
    if owned.pending is None or not owned.pending.refused:
        return None
    return (
        f"{owned.partition}: Kafka refuses to store its offset: {owned.pending.refused}. It is "
        "tried again every few seconds"
    )


def is_news(reason: str, before: str) -> bool:
    """Whether a reason says something else than the one before.

    A number that has changed is no news.

    Retention that goes on deleting changes it every few minutes.
    """
    return _NUMBER.sub("", reason) != _NUMBER.sub("", before)


def _vanished(partition: TopicPartition, recorded_until: int) -> str:
    return (
        f"{partition}: the group has no committed offset in Kafka any more, although Dagster has "
        "recorded its commits up to "
        f"{recorded_until}. Kafka drops offsets when a group has been without members for longer "
        "than offsets.retention.minutes, "
        "when somebody deletes the group or its offsets, and when the topic is deleted; a mirrored "
        "cluster may have none. To go on, "
        f"{_reset(partition, f'--to-offset {recorded_until}')}. {_IF_MADE_ANEW}. If this group is "
        "to begin anew where start_from "
        "says, wipe the materialisations of its offsets asset in Dagster; the partition then "
        "starts by itself"
    )


def _made_anew(partition: TopicPartition, offset: int) -> str:
    return (
        f"{partition}: the group's offset {offset} belongs to another topic of this name: the "
        "topic was deleted and made again, or the "
        f"offsets were copied to another cluster. {_IF_MADE_ANEW}. Where the offsets of a copy are "
        "the same, "
        f"{_reset(partition, '--to-current')}"
    )


def _truncated(partition: TopicPartition, offset: int, committed: int) -> str:
    # What is claimed and not committed has not been done: nobody may be told to go to the cut where
    # that is behind it.
    where = (
        "<that offset>"
        if committed == offset
        else f"<that offset, or {committed} if that is lower>"
    )
    return (
        f"{partition}: the group is at offset {offset}, but the log lost records before that "
        "offset: it was truncated, as an unclean "
        "election of a leader does, or the topic was deleted and made again. Records that were "
        "produced since have offsets that the "
        "group has passed. Find out which offset the log was cut at (the log of the partition's "
        "leader says `Truncating to offset`), then "
        f"{_reset(partition, f'--to-offset {where}')}"
    )


_IF_MADE_ANEW = (
    "If the topic was made again, use --to-earliest, and first move the old output away: ranges of "
    "the new topic have the same keys, "
    "so they would replace it"
)


def _reset(partition: TopicPartition, where: str) -> str:
    """How a person gives the word. Kafka refuses it while the group has members."""
    return (
        "turn the sensors of the group off, cancel its streaming runs, wait until its members have "
        "left, run "
        f"dagster-rebalance reset {selector_of(partition)} {where} --yes, and turn the sensors on "
        "again"
    )


def moved_offset(owned: OwnedPartition, recorded: LastRecorded | None) -> Note | None:
    """A sentence that says that somebody moved the committed offset, or None."""
    if recorded is None or owned.ledger is None or owned.unrecorded is not None:
        return None
    here = owned.ledger.next_offset
    if recorded.until == here:
        return None
    return Note(
        f"{owned.partition} continues at offset {here}, which was set by somebody else: the last "
        f"recorded commit ended at {recorded.until}",
        Occurred.OFFSETS_MOVED,
        {
            "topic": owned.partition.topic,
            "partition": owned.partition.partition,
            "recorded_until": recorded.until,
            "offset": here,
        },
    )


def _unrecorded(owned: OwnedPartition, recorded: LastRecorded | None) -> RecordCommit | None:
    """Return the last commit if Dagster does not know it.

    Its member went away between the commit and its materialisation. After a rewind another run may
    have committed up to the same offset.
    """
    last = owned.last_commit
    if last is None or owned.ledger is None:
        return None
    if (
        recorded is not None
        and recorded.until == owned.ledger.next_offset
        and recorded.run_id in {"", last.run_id}
    ):
        return None
    return RecordCommit(
        range=OffsetRange(
            owned.partition.topic, owned.partition.partition, last.start, owned.ledger.next_offset
        ),
        epoch=owned.epoch,
        batch_id=last.batch_id,
        run_id=last.run_id,
        lag=owned.lag,
        claim_to_commit_s=None,
        drain_s=None,
        is_late=True,
        is_dead_letter=last.is_dead_letter,
    )

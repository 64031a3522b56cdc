"""Recovery of a partition on assignment, from its stored offset, claims and bounds.

This module decides when a partition cannot start or continue. If offsets vanished, moved back or
belong to another log, no records are skipped or repeated: the partition stops until an operator
commits an offset.
"""

# Theory of operation: the hand-over
#
# The former owner may have crashed, so it guarantees nothing. Everything that the next owner needs
# is in Kafka (offset, claims, last commit, log) and in Dagster (runs, heartbeats, records). On each
# assignment, and after each election of a leader, a partition passes these steps:
#
# 1. Read the committed offset, the bounds of the log and the last record of a commit.
# 2. Check them (`check_position`). If the offset vanished, is out of range, or belongs to another
#    log (topic id or leader epoch), the partition is stopped with a reason until an operator
#    commits an offset. No branch skips or repeats records on its own.
# 3. Record the last commits if Dagster lacks their records (`core.partitions.unrecorded`).
# 4. Read the runs of the claims and all live runs of the group. Wait for a run that works on the
#    partition without a claim (an operator has moved the offset).
# 5. For each claim, in order: adopt a live run, commit a success, request everything else again
#    under the same batch id and bounds.
#
# A draining owner therefore has nothing to send to its successor. It can release a partition at any
# moment: step 5 of the next owner decides about all unfinished work. Answers that arrive after the
# release carry an earlier epoch and are dropped.
#
# In streaming runs a claim names the run in its batch id. The next owner takes the range over under
# its own id (`core.streaming.stream_claims`), once the former run reports that it no longer works
# on the partition, or its lease has expired.

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import ForeignMetadata
from dagster_rebalance.core.model.claims import StoredPartition, decode
from dagster_rebalance.core.model.commands import Note, RecordCommit
from dagster_rebalance.core.model.directives import selector_of
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import (
    Log,
    LogPosition,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
    is_same_commit,
)
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.model.topics import first_offset
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import Refused
from dagster_rebalance.core.partitions.unrecorded import Unrecorded

if TYPE_CHECKING:
    from dagster_rebalance.core.model.events import LastRecorded, PartitionLookup
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.model.topics import Start
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_NUMBER = re.compile(r"\b\d+\b")


def position_to_verify(stored: OffsetAndMetadata | None, bounds: Bounds) -> LogPosition | None:
    """Return the position whose leader epoch the leader has to verify.

    None if the leader epoch is still the one in the metadata of the offset, or is unknown.
    """
    read = None if stored is None else read_stored(stored)
    if (
        not isinstance(read, StoredPartition)
        or read.log.leader_epoch in {None, bounds.leader_epoch}
        or bounds.leader_epoch is None
    ):
        return None
    return LogPosition(read.claimed_until, read.log.leader_epoch)


def restore(
    owned: OwnedPartition,
    lookup: PartitionLookup,
    *,
    start_from: Start,
    foreign_metadata: ForeignMetadata,
) -> OwnedPartition | Refused:
    """Build the ledger of a partition from its lookup."""
    bounds = lookup.bounds
    earlier = owned.refused
    if (
        earlier is not None
        and earlier.moved_from is not None
        and is_same_commit(earlier.moved_from, lookup.stored)
    ):
        return earlier
    state = check_position(owned.partition, lookup, foreign_metadata)
    if isinstance(state, Refused):
        return state
    if state is None:
        state = StoredPartition(first_offset(start_from, bounds, lookup.offset_at_start_time))
    ledger = OffsetLedger(owned.partition, owned.epoch, state.next_offset)
    for claim in state.claims:
        ledger = ledger.with_claim(
            claim.batch_id,
            claim.until,
            previous_batch_id=claim.previous_batch_id,
            is_early=claim.is_early,
        )
    restored = owned._replace(
        stored=lookup.stored,
        ledger=ledger,
        last_commit=state.last_commit,
        log=Log(
            lookup.topic_id or state.log.topic_id,
            state.log.leader_epoch if bounds.leader_epoch is None else bounds.leader_epoch,
        ),
        stored_log=state.log,
        bounds=bounds,
        pending=None,
        backlog_since=None,
        seen_since=None,
        previous=owned.previous
        if owned.previous is not None and is_same_commit(owned.previous.stored, lookup.stored)
        else None,
    )
    left = unrecorded_commits(
        owned.partition, state, lookup.recorded, epoch=owned.epoch, lag=restored.lag
    )
    return restored._replace(unrecorded=Unrecorded(left))


def read_stored(stored: OffsetAndMetadata) -> StoredPartition | ClaimError:
    """Parse a committed offset; return the error if it is unreadable."""
    try:
        return decode(stored)
    except ClaimError as error:
        return error


def check_position(
    partition: TopicPartition, lookup: PartitionLookup, foreign_metadata: ForeignMetadata
) -> StoredPartition | Refused | None:
    """Return the stored state, None without a commit, or the reason why the partition stops."""
    stored = lookup.stored
    if stored is None:
        return _without_offset(partition, lookup)
    state = read_stored(stored)
    if isinstance(state, ClaimError):
        if foreign_metadata is ForeignMetadata.REFUSE:
            return Refused(
                Reason(
                    f"{partition}: {state}",
                    "To continue at the committed offset without it, "
                    f"{_reset(partition, '--to-current')}",
                )
            )
        state = StoredPartition(stored.offset)
    if state.log.topic_id and lookup.topic_id and state.log.topic_id != lookup.topic_id:
        return Refused(_recreated(partition, stored.offset))
    if lookup.is_truncated:
        return Refused(_truncated(partition, state.claimed_until, state.next_offset))
    problem = out_of_range(partition, state.next_offset, lookup.bounds)
    if problem is None:
        return state
    is_beyond = state.next_offset > lookup.bounds.until
    return Refused(problem, stored if is_beyond and state.log.leader_epoch is None else None)


def _without_offset(partition: TopicPartition, lookup: PartitionLookup) -> Refused | None:
    if lookup.refused:
        return Refused(f"{partition}: {lookup.refused}")
    if lookup.recorded is None:
        return None
    until = lookup.recorded.until
    return Refused(_vanished(partition, until, log_ends_before=lookup.bounds.until < until))


def out_of_range(
    partition: TopicPartition, offset: int, bounds: Bounds, *, committed: int | None = None
) -> Reason | None:
    """Return why reading cannot continue at `offset`, or None if Kafka has it.

    `committed` is the offset of the group, if different.
    """
    # The bounds change all the time, and each change in the text would be a new reason to show.
    if offset < bounds.start:
        return Reason(
            f"{partition}: Kafka's retention deleted records from offset {offset} on before they "
            "were processed",
            f"To continue without them, {_reset(partition, '--to-earliest')}",
        )
    if offset > bounds.until:
        return _truncated(partition, offset, offset if committed is None else committed)
    return None


def refused_write(owned: OwnedPartition) -> Reason | None:
    """Return why an operator must act before Kafka stores the pending write, or None."""
    if owned.pending is None or not owned.pending.refused:
        return None
    return Reason(
        f"{owned.partition}: Kafka refuses to store its offset: {owned.pending.refused}",
        "It is retried every few seconds",
    )


def is_new_reason(reason: str, before: str) -> bool:
    """Return whether a reason differs from the previous one in more than numbers.

    Ongoing retention changes the numbers every few minutes.
    """
    return _NUMBER.sub("", reason) != _NUMBER.sub("", before)


def _vanished(partition: TopicPartition, recorded_until: int, *, log_ends_before: bool) -> Reason:
    option = "--to-earliest" if log_ends_before else f"--to-offset {recorded_until}"
    where = "Its log ends before that offset. " if log_ends_before else ""
    return Reason(
        f"{partition}: the group has no committed offset in Kafka any more, although Dagster has "
        f"recorded its commits up to {recorded_until}",
        "Kafka deletes offsets with their group or topic, and if the group has no members for "
        "offsets.retention.minutes; a mirrored cluster may not have them. "
        f"{where}To continue, {_reset(partition, option)}. {_IF_RECREATED}. To "
        "start again at start_from instead, wipe the materializations of its offsets asset in "
        "Dagster; the partition then starts automatically",
    )


def _recreated(partition: TopicPartition, offset: int) -> Reason:
    return Reason(
        f"{partition}: the group's offset {offset} belongs to another topic of this name: the "
        "topic was deleted and recreated, or the offsets were copied to another cluster",
        f"{_IF_RECREATED}. If a copied topic has the same offsets, "
        f"{_reset(partition, '--to-current')}",
    )


def _truncated(partition: TopicPartition, offset: int, committed: int) -> Reason:
    # Claimed ranges are not processed yet, so the offset to reset to must not exceed the committed
    # one.
    where = (
        "<that offset>"
        if committed == offset
        else f"<that offset, or {committed} if that is lower>"
    )
    return Reason(
        f"{partition}: the group is at offset {offset}, but the log lost records before that "
        "offset: it was truncated (unclean leader election), or the topic was deleted and "
        "recreated",
        "Later records have offsets that the group has passed. Find the offset at which "
        "the log was truncated (`Truncating to offset` in the log of the partition leader), then "
        f"{_reset(partition, f'--to-offset {where}')}",
    )


_IF_RECREATED = (
    "If the topic was recreated, use --to-earliest, and first move the old output away: ranges of "
    "the new topic have the same keys, so they would replace it"
)


def _reset(partition: TopicPartition, where: str) -> str:
    """The steps to commit another offset. Kafka refuses the commit while the group has members."""
    return (
        "turn the sensors of the group off, cancel its streaming runs, wait until its members have "
        "left, run "
        f"dagster-rebalance reset {selector_of(partition)} {where} --yes, and turn the sensors on "
        "again"
    )


def moved_offset_note(owned: OwnedPartition, recorded: LastRecorded | None) -> Note | None:
    """Return a note if the committed offset differs from the last recorded commit, or None."""
    if recorded is None or owned.ledger is None or owned.unrecorded:
        return None
    here = owned.ledger.next_offset
    if recorded.until == here:
        return None
    return Note(
        f"{owned.partition} continues at offset {here}, which was set externally: the last "
        f"recorded commit ended at {recorded.until}",
        EventKind.OFFSETS_MOVED,
        {
            "topic": owned.partition.topic,
            "partition": owned.partition.partition,
            "recorded_until": recorded.until,
            "offset": here,
        },
    )


def unrecorded_commits(
    partition: TopicPartition,
    state: StoredPartition,
    recorded: LastRecorded | None,
    *,
    epoch: int = 0,
    lag: int = 0,
) -> tuple[RecordCommit, ...]:
    """Return the commits in the stored metadata after the last one that Dagster has.

    After a rewind, another run may have committed up to the same offset.
    """
    last = state.last_commit
    if last is None:
        return ()
    left: list[RecordCommit] = []
    for part, until in last.ends(state.next_offset):
        if (
            recorded is not None
            and recorded.until == until
            and recorded.run_id in {"", part.run_id}
        ):
            left.clear()
            continue
        left.append(
            RecordCommit(
                range=OffsetRange(partition.topic, partition.partition, part.start, until),
                epoch=epoch,
                batch_id=part.batch_id,
                run_id=part.run_id,
                lag=lag,
                claim_to_commit_s=None,
                drain_s=None,
                is_late=True,
                is_dead_letter=part.is_dead_letter,
            )
        )
    return tuple(left)

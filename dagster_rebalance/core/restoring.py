"""Taking in a partition: what its stored offset, its claims and Kafka's bounds mean on assignment.

Nothing is assumed from before. Owns the reasons for which a partition cannot start or go on, and how a commit that was never recorded is
found.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.claims import StoredPartition, decode
from dagster_rebalance.core.commands import RecordCommit
from dagster_rebalance.core.errors import ClaimError
from dagster_rebalance.core.ledger import OffsetLedger
from dagster_rebalance.core.partition import OffsetAndMetadata, OffsetRange, TopicPartition

if TYPE_CHECKING:
    from dagster_rebalance.core.events import Bounds
    from dagster_rebalance.core.owned_partition import OwnedPartition
    from dagster_rebalance.core.runs import GaveUp

_NUMBER = re.compile(r"\b\d+\b")


class StartFrom(enum.Enum):
    """Where a group that has committed nothing for a partition begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


class ForeignMetadata(enum.Enum):
    """What to do with a committed offset whose metadata is not ours."""

    REFUSE = "refuse"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class Refused:
    """The partition cannot start; `reason` says why and what to do."""

    reason: str


def take_in(
    owned: OwnedPartition,
    stored: OffsetAndMetadata | None,
    bounds: Bounds,
    recorded_until: int | None,
    *,
    start_from: StartFrom,
    foreign_metadata: ForeignMetadata,
) -> OwnedPartition | Refused:
    """Build the ledger of a partition from what Kafka stores for it."""
    partition = owned.partition
    try:
        read = _position(bounds, start_from) if stored is None else decode(stored)
    except ClaimError as error:
        if stored is None or foreign_metadata is ForeignMetadata.REFUSE:
            return Refused(
                f"{partition}: {error}. Stop the other application, or give this one a group of its own; "
                "if the text may be thrown away, set foreign_metadata to overwrite"
            )
        read = StoredPartition(stored.offset)
    problem = out_of_range(partition, read.next_offset, bounds)
    if problem is not None:
        return Refused(problem)
    ledger = OffsetLedger(partition, owned.epoch, read.next_offset)
    for claim in read.claims:
        ledger = ledger.claim(claim.batch_id, claim.until)
    taken = replace(owned, stored=stored, ledger=ledger, last_commit=read.last_commit, bounds=bounds, pending=None, backlog_since=None)
    return replace(taken, unrecorded=_unrecorded(taken, recorded_until), recorded_at=None)


def out_of_range(partition: TopicPartition, offset: int, bounds: Bounds) -> str | None:
    """Why reading cannot go on at `offset`, or None when Kafka has it."""
    advice = "stop the sensor and move the group's offset with Kafka's tools (kafka-consumer-groups --reset-offsets)"
    if offset < bounds.start:
        return (
            f"{partition}: the offsets {offset} to {bounds.start} were deleted by Kafka's retention before they were processed. "
            f"To go on without them, {advice}"
        )
    if offset > bounds.until:
        return (
            f"{partition}: the group is at offset {offset}, but the partition ends at {bounds.until}: the topic was deleted and "
            f"made again, or truncated. To go on, {advice}"
        )
    return None


def refused_write(owned: OwnedPartition) -> str | None:
    """Why a person must act before Kafka stores what the partition has to store, or None while that is not so."""
    if owned.pending is None or not owned.pending.refused:
        return None
    return f"{owned.partition}: Kafka refuses to store its offset: {owned.pending.refused}. It is tried again every few seconds"


def is_news(reason: str, before: str) -> bool:
    """Whether a reason says something else than the one before. A number that has changed is no news.

    Retention that goes on deleting changes it every few minutes.
    """
    return _NUMBER.sub("", reason) != _NUMBER.sub("", before)


def failed_too_often(range_: OffsetRange, progress: GaveUp) -> str:
    """Why a person must act before the partition of a range goes on."""
    return (
        f"{range_.topic_partition}: {progress.attempts} runs failed on {range_}, the last one is {progress.run_id}. "
        "Mend the cause, then re-execute that run in Dagster: when it succeeds, the partition goes on"
    )


def moved_offset(owned: OwnedPartition, recorded_until: int | None) -> str | None:
    """A sentence that says that somebody moved the committed offset, or None."""
    if recorded_until is None or owned.ledger is None or owned.unrecorded is not None:
        return None
    here = owned.ledger.next_offset
    if recorded_until == here:
        return None
    return (
        f"{owned.partition} continues at offset {here}, which was set by somebody else: the last recorded commit ended at {recorded_until}"
    )


def _position(bounds: Bounds, start_from: StartFrom) -> StoredPartition:
    return StoredPartition(bounds.start if start_from is StartFrom.EARLIEST else bounds.until)


def _unrecorded(owned: OwnedPartition, recorded_until: int | None) -> RecordCommit | None:
    """The last commit, if Dagster does not know it: its member went away between the commit and its materialisation."""
    last = owned.last_commit
    if last is None or owned.ledger is None or recorded_until == owned.ledger.next_offset:
        return None
    if recorded_until is not None and recorded_until > owned.ledger.next_offset:
        return None
    return RecordCommit(
        range=OffsetRange(owned.partition.topic, owned.partition.partition, last.start, owned.ledger.next_offset),
        epoch=owned.epoch,
        batch_id=last.batch_id,
        run_id=last.run_id,
        lag=owned.lag,
        claim_to_commit_s=None,
        drain_s=None,
        is_late=True,
        is_dead_letter=last.is_dead_letter,
    )

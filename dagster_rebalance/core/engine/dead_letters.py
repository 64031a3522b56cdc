"""A dead letter records in a topic a range whose attempts are exhausted; its partition goes on.

This module owns when a member may record a range, and when the range counts as done. A member
records only the first range of a partition, so that it passes over nothing. It records none while
the partition has to be given up, so that no drain waits for it; none because a person cancelled
runs; and none because Kafka does not have the offsets any more. The record comes first, then
another look at the runs, then the commit. A member that ends in between leaves the range to be
recorded again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.core.model.events import DeadLetterFailed, DeadLetterStored
from dagster_rebalance.core.partitions.owned import Letter
from dagster_rebalance.core.partitions.recovery import out_of_range
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    InFlight,
    Progress,
    Succeeded,
)
from dagster_rebalance.core.runs.retry import failures, why_blocked

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.ledger import Entry
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_LONGEST_WAIT_S = 60.0
_MOST_DOUBLINGS = 10


def due_letter(owned: OwnedPartition, now: float, retry_s: float) -> Letter | None:
    """The letter that is to be stored now, if one is."""
    entry = owned.entries[0] if owned.entries else None
    if entry is None or not isinstance(entry.progress, Exhausted) or not owned.phase.is_kept:
        return None
    if owned.order is not None:
        return None
    if entry.progress.is_cancelled or _deleted(owned, entry.range) is not None:
        return None
    command = StoreDeadLetter(entry.range, owned.epoch, entry.batch_id, entry.progress.run_ids)
    letter = owned.letter
    if letter is None or letter.command.range != entry.range:
        return Letter(command, now + retry_s)
    if letter.is_stored or now < letter.due_at:
        return None
    return replace(letter, command=command, due_at=now + retry_s)


def is_wanted(owned: OwnedPartition | None, command: StoreDeadLetter) -> bool:
    """Whether a letter is still to be stored.

    What its last run failed with is looked up first, which may take long.
    """
    if owned is None or owned.letter is None or not owned.phase.is_kept:
        return False
    if owned.order is not None:
        return False
    return owned.letter.command == command and not owned.letter.is_stored


def answered(
    owned: OwnedPartition | None,
    event: DeadLetterStored | DeadLetterFailed,
    now: float,
    retry_s: float,
) -> OwnedPartition | None:
    """Return the partition after an answer, or None when the answer is late.

    A late answer is from another epoch, or about a range that is done. If the letter could not be
    stored, the member tries again, later each time.
    """
    letter = owned.letter if owned is not None and owned.epoch == event.letter.epoch else None
    if owned is None or letter is None or letter.command.range != event.letter.range:
        return None
    if isinstance(event, DeadLetterStored):
        return replace(owned, letter=replace(letter, is_stored=True, problem=""))
    wait_s = min(_LONGEST_WAIT_S, retry_s * 2 ** min(letter.failures, _MOST_DOUBLINGS))
    return replace(
        owned,
        letter=replace(
            letter, problem=event.reason, failures=letter.failures + 1, due_at=now + wait_s
        ),
    )


def settled(owned: OwnedPartition, range_: OffsetRange, progress: Progress) -> Progress:
    """Return the progress of a range from the look at its runs after its letter was stored.

    A range that is still exhausted is done.
    """
    return (
        DeadLettered(progress.run_id)
        if isinstance(progress, Exhausted) and _is_stored(owned, range_)
        else progress
    )


def obsolete(owned: OwnedPartition, entry: Entry, progress: Progress) -> str | None:
    """Return a sentence for people if a run has succeeded on a range after its letter was stored.

    Otherwise return None.
    """
    if (
        entry.done_by is not None
        or not isinstance(progress, Succeeded)
        or not _is_stored(owned, entry.range)
    ):
        return None
    return (
        f"run {progress.run_id} has succeeded on {entry.range} after all: the record with the key "
        f"{entry.range.key} in the dead-letter "
        "topic is obsolete"
    )


def why_stopped(owned: OwnedPartition, dead_letter_topic: str | None) -> str | None:
    """Say why a person must look at the partition after runs that did not succeed.

    Return None while the partition goes on by itself.
    """
    blocked = owned.ledger.blocked if owned.ledger else None
    if blocked is None:
        return None
    entry, progress = blocked
    range_ = entry.range
    deleted = _deleted(owned, range_) if isinstance(progress, Exhausted) else None
    if deleted is not None:
        return deleted
    if not isinstance(progress, Exhausted) or dead_letter_topic is None or progress.is_cancelled:
        return why_blocked(range_, progress, entry.batch_id)
    letter = owned.letter
    if (
        isinstance(entry.progress, InFlight)
        or letter is None
        or letter.command.range != range_
        or not letter.problem
    ):
        return None
    return (
        f"{owned.partition}: {failures(progress, range_)}, and the range could not be recorded in "
        f"the dead-letter topic {dead_letter_topic}: {letter.problem}. It is tried again"
    )


def _is_stored(owned: OwnedPartition, range_: OffsetRange) -> bool:
    return (
        owned.letter is not None and owned.letter.is_stored and owned.letter.command.range == range_
    )


def _deleted(owned: OwnedPartition, range_: OffsetRange) -> str | None:
    """Why the records of a range cannot be read by anybody, so that the runs had to fail."""
    if owned.bounds is None:
        return None
    committed = owned.ledger.next_offset if owned.ledger else range_.start
    return out_of_range(owned.partition, range_.start, owned.bounds) or out_of_range(
        owned.partition, range_.until, owned.bounds, committed=committed
    )

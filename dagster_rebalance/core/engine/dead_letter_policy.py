"""Dead-letter policy: which failed ranges go to the dead-letter topic, and when they count as done.

Only the first range of a partition is recorded, so no offset is skipped. A range is not recorded
while its partition drains, after an operator cancelled its runs, or if Kafka has deleted its
offsets. The order is: record, read the runs again, commit. If the member ends in between, the next
owner records the range again. With `bisects`, a range is halved instead, and only a record that has
failed alone becomes a letter. If its letter is refused, an operator's `retry` has it processed
again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.core.model.events import DeadLetterFailed, DeadLetterStored
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.partitions.owned import DeadLetter
from dagster_rebalance.core.partitions.recovery import out_of_range
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    InFlight,
    Progress,
    Succeeded,
)
from dagster_rebalance.core.runs.retry import NEVER, describe_failures, why_blocked
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.ledger import LedgerEntry
    from dagster_rebalance.core.partitions.owned import OwnedPartition, PendingWrite

_MAX_WAIT_S = 60.0
_MAX_DOUBLINGS = 10


def due_letter(owned: OwnedPartition, now: float, settings: EngineSettings) -> DeadLetter | None:
    """Return the dead letter to store now, if any."""
    entry, retry_s = _settled_by_letter(owned, settings), settings.retry_s
    if entry is None or not isinstance(entry.progress, Exhausted) or _is_halved(entry, settings):
        return None
    if entry.due_at != NEVER:  # an operator has it processed again
        return None
    is_stream = StreamBatch.parse(entry.batch_id) is not None
    command = StoreDeadLetter(
        entry.range,
        owned.epoch,
        entry.batch_id,
        entry.progress.run_ids,
        settings.bisects,
        error=entry.progress.reason if is_stream else "",
    )
    letter = owned.dead_letter
    if letter is None or letter.command.range != entry.range:
        return DeadLetter(command, now + retry_s)
    if letter.is_stored or now < letter.due_at:
        return None
    return replace(letter, command=command, due_at=now + retry_s)


def retried(owned: OwnedPartition, settings: EngineSettings) -> OwnedPartition:
    """Return the partition with its delayed ranges due now, as an operator's `retry` requests.

    A range that becomes a letter or is bisected is excluded. A bisected record whose letter was
    refused is processed again before its letter is stored: its function may have been mended.
    """
    letter, first = owned.dead_letter, owned.entries[0].progress if owned.entries else None
    is_refused = letter is not None and letter.command.is_record and letter.problem != ""

    def is_retried(exhausted: Exhausted) -> bool:
        if exhausted is first and is_refused:
            return True
        is_kept = settings.dead_letter_topic is None or settings.bisects
        return is_kept and not settings.continues_after(exhausted)

    tried = owned.with_all_due(is_retried)
    return tried._replace(dead_letter=None) if is_refused else tried


def due_halving(owned: OwnedPartition, now: float, settings: EngineSettings) -> PendingWrite | None:
    """Return the write that halves the first range now, if any."""
    entry = _settled_by_letter(owned, settings)
    is_due = entry is not None and _is_halved(entry, settings) and owned.pending is None
    return owned.bisect_write(now) if is_due else None


def _settled_by_letter(owned: OwnedPartition, settings: EngineSettings) -> LedgerEntry | None:
    """Return the first range, if the partition may continue without a success on it."""
    entry = owned.entries[0] if owned.entries else None
    if (
        entry is None
        or not isinstance(entry.progress, Exhausted)
        or not settings.continues_after(entry.progress)
        or not owned.phase.is_kept
        or owned.directive is not None
        or _why_deleted(owned, entry.range) is not None
    ):
        return None
    return entry


def _is_halved(entry: LedgerEntry, settings: EngineSettings) -> bool:
    return settings.bisects and (len(entry.range) > 1 or not entry.is_part)


def is_wanted(owned: OwnedPartition | None, command: StoreDeadLetter) -> bool:
    """Whether a dead letter must still be stored after the error of its last run was read."""
    if (
        owned is None
        or owned.dead_letter is None
        or not owned.phase.is_kept
        or owned.directive is not None
    ):
        return False
    return owned.dead_letter.command == command and not owned.dead_letter.is_stored


def answered(
    owned: OwnedPartition | None,
    event: DeadLetterStored | DeadLetterFailed,
    now: float,
    retry_s: float,
) -> OwnedPartition | None:
    """Return the partition after an answer; None if the answer is for another epoch or range.

    The delay before the next try grows with each failure.
    """
    letter = owned.dead_letter if owned is not None and owned.epoch == event.letter.epoch else None
    if owned is None or letter is None or letter.command.range != event.letter.range:
        return None
    if isinstance(event, DeadLetterStored):
        return owned._replace(dead_letter=replace(letter, is_stored=True, problem=""))
    due_at = now + min(_MAX_WAIT_S, retry_s * 2 ** min(letter.failures, _MAX_DOUBLINGS))
    failed = replace(letter, problem=event.reason, failures=letter.failures + 1, due_at=due_at)
    return owned._replace(dead_letter=failed)


def settled(owned: OwnedPartition, range_: OffsetRange, progress: Progress) -> Progress:
    """Return the progress: done if the range is still exhausted after its letter was stored."""
    return (
        DeadLettered(progress.run_id)
        if isinstance(progress, Exhausted) and _is_stored(owned, range_)
        else progress
    )


def why_obsolete(owned: OwnedPartition, entry: LedgerEntry, progress: Progress) -> str | None:
    """Return a note if a run succeeded on a range after its letter was stored."""
    letter = owned.dead_letter
    if (
        letter is None
        or entry.completed_by is not None
        or not isinstance(progress, Succeeded)
        or not _is_stored(owned, entry.range)
    ):
        return None
    return (
        f"run {progress.run_id} has succeeded on {entry.range} after all: the record with the key "
        f"{letter.command.key} in the dead-letter topic is obsolete"
    )


def why_stopped(owned: OwnedPartition, settings: EngineSettings) -> Reason | None:
    """Return why failed runs stop the partition, or None if they do not."""
    blocked = owned.ledger.blocked if owned.ledger else None
    if blocked is None:
        return None
    entry, progress = blocked
    range_ = entry.range
    deleted = _why_deleted(owned, range_) if isinstance(progress, Exhausted) else None
    if deleted is not None:
        return deleted
    if not isinstance(progress, Exhausted) or not settings.continues_after(progress):
        return why_blocked(range_, progress, entry.batch_id, settings.backoff)
    letter = owned.dead_letter
    if (
        isinstance(entry.progress, InFlight)
        or letter is None
        or letter.command.range != range_
        or not letter.problem
    ):
        return None
    what = "record" if letter.command.is_record else "range"
    return Reason(
        f"{owned.partition}: {describe_failures(progress, range_)}, and the {what} could not be "
        f"recorded in the dead-letter topic {settings.dead_letter_topic}: {letter.problem}",
        "The member retries",
    )


def _is_stored(owned: OwnedPartition, range_: OffsetRange) -> bool:
    letter = owned.dead_letter
    return letter is not None and letter.is_stored and letter.command.range == range_


def _why_deleted(owned: OwnedPartition, range_: OffsetRange) -> Reason | None:
    """Why no run can read the records of a range."""
    if owned.bounds is None:
        return None
    committed = owned.ledger.next_offset if owned.ledger else range_.start
    return out_of_range(owned.partition, range_.start, owned.bounds) or out_of_range(
        owned.partition, range_.until, owned.bounds, committed=committed
    )

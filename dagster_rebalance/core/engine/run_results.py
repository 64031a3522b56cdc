"""Run results: apply a snapshot of Dagster runs to the claimed ranges of one partition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.engine import dead_letter_policy
from dagster_rebalance.core.runs.bisection import Part, whole_batch
from dagster_rebalance.core.runs.progress import (
    Exhausted,
    FailureKind,
    FailureStreak,
    InFlight,
    Succeeded,
    ToRequest,
    blocking,
    failure_kind,
    newest_refusal,
    progress_of,
)
from dagster_rebalance.core.runs.retry import NEVER
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.partitions.ledger import LedgerEntry, OffsetLedger
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.runs.progress import Progress
    from dagster_rebalance.core.runs.run_index import RunIndex


class RunResults(NamedTuple):
    """A partition after a snapshot of runs.

    Attributes:
        owned: The partition.
        covers_all: Whether the snapshot has the runs of all its claims.
        refused: Runs that their start check refused, without a successor: claims are read again.
        notes: Messages for the log of the member.
    """

    owned: OwnedPartition
    covers_all: bool
    refused: frozenset[str]
    notes: tuple[str, ...]


def apply_runs(
    owned: OwnedPartition,
    ledger: OffsetLedger,
    batch_ids: frozenset[str],
    runs: RunIndex,
    *,
    settings: EngineSettings,
    now: float,
) -> RunResults:
    """Apply the runs of `batch_ids`, oldest first, to the ranges of a partition."""
    refused: set[str] = set()
    notes = []
    for entry in ledger.entries:
        if entry.is_waiting or not batch_ids.issuperset(entry.batch_ids):
            continue
        own_runs, earlier = runs.of(entry.batch_id, entry.range), entry.previous_progress
        progress, before = _progress(entry, runs, settings.max_attempts)
        if isinstance(before, InFlight | Succeeded):
            progress = before
        else:
            if isinstance(before, ToRequest | Exhausted):
                ledger, earlier = (
                    ledger.with_completed_reassignment(entry.range, before),
                    before.next_attempt,
                )
            progress = _after(earlier, entry, progress, own_runs)
        settled = dead_letter_policy.settled(owned, entry.range, progress)
        ledger = ledger.with_progress(
            owned.epoch,
            entry.range,
            settled,
            due_at=_due_at(owned, entry, settled, own_runs, settings=settings, now=now),
            working_since=_since(entry, settled, now),
        )
        if isinstance(progress, ToRequest | Exhausted):
            refused |= newest_refusal(own_runs)
        obsolete = dead_letter_policy.why_obsolete(owned, entry, progress)
        if obsolete is not None:
            notes.append(obsolete)
    covers_all = batch_ids >= {batch_id for entry in ledger.entries for batch_id in entry.batch_ids}
    runs_are_known = owned.runs_are_known or covers_all
    if ledger is not owned.ledger or runs_are_known is not owned.runs_are_known:
        owned = owned._replace(ledger=ledger, runs_are_known=runs_are_known)
    return RunResults(owned, covers_all, frozenset(refused), tuple(notes))


def _progress(
    entry: LedgerEntry, runs: RunIndex, max_attempts: int
) -> tuple[Progress, Progress | None]:
    """Return the progress of the batch of a range, and of the batch that it was taken from."""

    def of(batch_id: str, *, is_early: bool) -> Progress:
        return progress_of(
            entry.range,
            batch_id,
            runs,
            max_attempts=max_attempts,
            is_early=is_early,
            is_part=Part.parse(batch_id) is not None,
        )

    whole = _of_whole(entry, runs, max_attempts)
    if whole is not None:
        return whole, None
    if not entry.previous_batch_id:
        return of(entry.batch_id, is_early=entry.is_early), None
    # A run that read the claim before it was taken over may work on the range.
    before = of(entry.previous_batch_id, is_early=entry.is_early)
    return of(entry.batch_id, is_early=False), before


def _of_whole(entry: LedgerEntry, runs: RunIndex, max_attempts: int) -> Progress | None:
    """Return the progress of a part by a run on its bisected range, if such a run counts.

    An operator re-executed the run before the range was halved.
    """
    part, whole_id = Part.parse(entry.batch_id), whole_batch(entry.batch_id)
    if part is None or not whole_id:
        return None
    range_ = part.bisected(entry.range)
    progress = progress_of(range_, whole_id, runs, max_attempts=max_attempts)
    return progress if isinstance(progress, InFlight | Succeeded) else None


def _after(
    earlier: ToRequest | Exhausted | None,
    entry: LedgerEntry,
    progress: Progress,
    runs: Sequence[RunSnapshot],
) -> Progress:
    """Combine the progress of a range with its progress before this batch took it over.

    The batch id has the number of earlier attempts, but not their runs.
    """
    batch = StreamBatch.parse(entry.batch_id)
    if earlier is None or batch is None:
        return progress
    if isinstance(progress, InFlight) and progress.stop_cause is not None:
        return replace(progress, stop_cause=blocking(earlier))
    has_begun = any(run.attempt >= batch.attempt for run in runs)
    return progress if has_begun or not entry.is_own else earlier


def _due_at(
    owned: OwnedPartition,
    entry: LedgerEntry,
    progress: Progress,
    runs: Sequence[RunSnapshot],
    *,
    settings: EngineSettings,
    now: float,
) -> float:
    """When a run may be requested.

    A new owner retries a failed range at once. If the process of a streaming run died, or too many
    runs were interrupted, a new owner waits unless its code is newer, because the range may also
    crash its process.
    """
    wait_s = settings.backoff.wait_s(
        progress,
        is_settled=isinstance(progress, Exhausted) and settings.continues_after(progress),
    )
    if entry.is_own or entry.progress != ToRequest() or wait_s == NEVER:
        return now + wait_s
    before = next((known for known in owned.previous_entries if known.range == entry.range), None)
    if before is not None:
        return before.due_at if before.progress == progress else now + wait_s
    last = runs[-1] if runs else None
    if last is None or failure_kind(last) not in {FailureKind.FAILED, FailureKind.INTERRUPTED}:
        return now + wait_s
    has_new_code = settings.code_version not in {"", last.code_version}
    is_risk = last.has_died or isinstance(blocking(progress), FailureStreak)
    return now + wait_s if is_risk and not has_new_code else now


def _since(entry: LedgerEntry, progress: Progress, now: float) -> float | None:
    """When the current run began to work on a range."""
    if not isinstance(progress, InFlight):
        return None
    if progress.working_s is not None:
        return now - progress.working_s
    # A streaming run claims a range right before it begins the range, unless it claims it early.
    return now if entry.is_early and entry.is_own else entry.claimed_at

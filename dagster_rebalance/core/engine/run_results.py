"""Run results: apply a snapshot of Dagster runs to the claimed ranges of one partition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.engine import dead_letter_policy
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
    from collections.abc import Mapping, Sequence

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.partitions.ledger import LedgerEntry, OffsetLedger
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.runs.progress import Progress


class RunResults(NamedTuple):
    """A partition after a snapshot of runs.

    Attributes:
        owned: The partition.
        covers_all: Whether the snapshot has the runs of all its claims.
        refused: Runs that refused themselves and have no successor, so the claims are read again.
        notes: Sentences for the log of the member.
    """

    owned: OwnedPartition
    covers_all: bool
    refused: frozenset[str]
    notes: tuple[str, ...]


def apply_runs(
    owned: OwnedPartition,
    ledger: OffsetLedger,
    batch_ids: frozenset[str],
    runs: Mapping[str, Sequence[RunSnapshot]],
    *,
    settings: EngineSettings,
    now: float,
) -> RunResults:
    """Apply the runs of `batch_ids`, oldest first by batch, to the ranges of a partition."""
    refused: set[str] = set()
    notes = []
    for entry in ledger.entries:
        if not batch_ids.issuperset(entry.batch_ids):
            continue
        own_runs, earlier = runs.get(entry.batch_id, ()), entry.progress_at_takeover
        progress = progress_of(
            entry.range, entry.batch_id, own_runs, max_attempts=settings.max_attempts
        )
        before: Progress | None = None
        if entry.taken_from:
            # A run that read the claim before it was taken over may work on the range.
            before = progress_of(
                entry.range,
                entry.taken_from,
                runs.get(entry.taken_from, ()),
                max_attempts=settings.max_attempts,
            )
        if isinstance(before, InFlight | Succeeded):
            progress = before
        else:
            if isinstance(before, ToRequest | Exhausted):
                ledger, earlier = ledger.taken_over(entry.range, before), before.next_attempt
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
            refused |= newest_refusal(entry.range, entry.batch_id, own_runs)
        obsolete = dead_letter_policy.why_obsolete(owned, entry, progress)
        if obsolete is not None:
            notes.append(obsolete)
    covers_all = batch_ids >= {batch_id for entry in ledger.entries for batch_id in entry.batch_ids}
    known = replace(owned, ledger=ledger, runs_are_known=owned.runs_are_known or covers_all)
    return RunResults(known, covers_all, frozenset(refused), tuple(notes))


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
    has_begun = any(entry.range in run.ranges and run.attempt >= batch.attempt for run in runs)
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
    runs were interrupted, a new owner waits unless its code is newer, because the range may end its
    process too.
    """
    wait_s = settings.backoff.wait_s(
        progress, has_dead_letters=settings.dead_letter_topic is not None
    )
    if entry.is_own or entry.progress != ToRequest() or wait_s == NEVER:
        return now + wait_s
    before = next((known for known in owned.previous_entries if known.range == entry.range), None)
    if before is not None:
        return before.due_at if before.progress == progress else now + wait_s
    last = next((run for run in reversed(runs) if entry.range in run.ranges), None)
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
    # A streaming run claims a range again right before it begins the range.
    return entry.claimed_at

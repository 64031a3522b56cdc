"""Run requests: the claimed ranges that wait for a run.

A request is repeated on every tick until its run exists, because Dagster drops the requests of a
tick that times out. Its run key stays the same, so one run starts; the key changes with the attempt
and the ranges, because Dagster never starts a run for a known key. A failed range gets separate
runs, so one bad record does not block the other ranges of its batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.bisection import Part
from dagster_rebalance.core.runs.progress import Exhausted, InFlight, ToRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.ledger import LedgerEntry
    from dagster_rebalance.core.partitions.owned import OwnedPartition


def due_requests(
    partitions: Iterable[OwnedPartition],
    now: float,
    *,
    max_runs: int,
    directives: Sequence[Directive] = (),
    worker: str = "",
) -> tuple[BatchRequest, ...]:
    """Return the runs to request now. A `worker` processes the ranges of a partition in order.

    One run processes the ranges of a batch that have the same attempt. A failed range gets a
    separate run, and so does a part of a bisected range; with a `worker`, so does a range that was
    interrupted twice in a row. A batch is not requested while one of its claims is still being
    written, so it is not split over two runs.

    Failed ranges are requested while fewer than `max_runs` runs are working or requested, longest
    wait first. With a `worker` (a streaming run), other runs do not count. A run that Dagster has
    created but not submitted is not requested again while `directives` pause one of its partitions,
    even a partition of another member.
    """
    partitions = tuple(partitions)
    partly_claimed = {
        batch_id
        for owned in partitions
        if owned.phase.may_plan and owned.pending and (batch_id := owned.pending.claimed_batch)
    }
    together: dict[tuple[str, int, int, bool], list[OffsetRange]] = {}
    alone: list[tuple[float, BatchRequest]] = []
    unsubmitted: dict[str, RunSnapshot] = {}
    for entry in (e for owned in partitions for e in _requestable(owned, now, worker)):
        match entry.progress:
            case InFlight(unsubmitted=RunSnapshot() as run):
                unsubmitted[run.run_id] = run
            case ToRequest(attempt, failures=0) as wanted if (
                not worker or wanted.interruptions <= 1
            ) and not is_part(entry):
                if entry.batch_id not in partly_claimed:
                    interruptions = wanted.interruptions if worker else 0
                    key = (entry.batch_id, attempt, interruptions, entry.is_own)
                    together.setdefault(key, []).append(entry.range)
            case _:
                alone.append((entry.due_at, _request_alone(entry)))
    requests = dict.fromkeys(
        BatchRequest(run.batch_id, run.attempt, run.ranges, unsubmitted=run.run_id)
        for run in unsubmitted.values()
        if not any(in_force(directives, range_.topic_partition) for range_ in run.ranges)
    )
    requests |= dict.fromkeys(
        BatchRequest(
            batch_id, attempt, tuple(sorted(ranges)), interruptions=interruptions, is_own=is_own
        )
        for (batch_id, attempt, interruptions, is_own), ranges in together.items()
    )
    working = {
        run_id
        for owned in partitions
        for entry in owned.known_entries
        for run_id in _working(entry)
        if worker in {"", run_id}
    }
    room = max(0, max_runs - len(working) - len(requests))
    alone.sort(key=lambda waiting: (waiting[0], waiting[1].ranges))
    return (*requests, *(request for _, request in alone[:room]))


RequestedRanges: TypeAlias = "Mapping[tuple[str, int, OffsetRange], BatchRequest]"
"""Requests by batch id, attempt and range."""


def requested_ranges(requests: Iterable[BatchRequest]) -> RequestedRanges:
    """Return the ranges of requests."""
    return {
        (request.batch_id, request.attempt, range_): request
        for request in requests
        for range_ in request.ranges
    }


def requested_range(
    owned: OwnedPartition, requests: RequestedRanges, now: float
) -> tuple[OffsetRange, BatchRequest] | None:
    """Return the first range of a partition that is in one of the requests, and that request."""
    found = (
        (entry.range, requests.get((*_run_of(entry), entry.range)))
        for entry in _requestable(owned, now)
    )
    return next(((range_, request) for range_, request in found if request is not None), None)


def batches_in_flight(
    partitions: Iterable[OwnedPartition], now: float, *, worker: str = "", retries: bool = True
) -> frozenset[str]:
    """Return the batches that count towards the limit of runs in flight.

    A batch counts if a run works on it, or is or will be requested for it. It does not count while
    it is delayed or its partition is stopped or draining, nor, with a `worker`, if it is the batch
    of another run. Failed ranges that are due count only with `retries`. The batch that a `worker`
    has claimed ahead counts.
    """
    batch_ids = set()
    for owned in partitions:
        if owned.pending is not None and owned.is_claiming:
            batch_ids.add(owned.pending.claimed_batch)
        batch_ids |= {
            entry.batch_id
            for entry in owned.known_entries
            if isinstance(entry.progress, InFlight)
            and (not worker or worker in entry.progress.run_ids)
        }
        batch_ids |= {entry.batch_id for entry in owned.entries if entry.is_reassignment_open}
        batch_ids |= {
            entry.batch_id
            for entry in (*_requestable(owned, now, worker), *_ahead(owned, worker))
            if retries or not _has_failed(entry)
        }
    return frozenset(batch_ids)


def is_part(entry: LedgerEntry) -> bool:
    """Return whether a range is a part of a bisected range, which has a separate run."""
    return Part.parse(entry.batch_id) is not None


def _has_failed(entry: LedgerEntry) -> bool:
    progress = entry.progress
    return (
        isinstance(progress, Exhausted)
        or is_part(entry)
        or (isinstance(progress, ToRequest) and progress.failures + progress.interruptions > 0)
    )


def _ahead(owned: OwnedPartition, worker: str) -> Iterable[LedgerEntry]:
    """The range that a worker has claimed behind the range that it is working on."""
    if not worker or not owned.phase.may_plan or owned.directive is not None:
        return
    for before, entry in pairwise(owned.entries):
        if worker in before.live_runs and entry.is_early:
            yield entry


def _requestable(owned: OwnedPartition, now: float, worker: str = "") -> Iterable[LedgerEntry]:
    """The ranges of a partition for which a run may be requested.

    A stopped partition, or one of a worker, has only its first undone range, and a paused one has
    none. A partition whose write Kafka refuses has none either, because its results could not be
    committed.
    """
    if owned.directive is not None or (owned.pending is not None and owned.pending.refused):
        return []
    undone = [entry for entry in owned.entries if entry.completed_by is None]
    if owned.phase is not Phase.STOPPED and not owned.phase.may_plan:
        undone = []
    elif owned.phase is Phase.STOPPED or worker:
        undone = undone[:1]
    return [entry for entry in undone if entry.due_at <= now and _needs_run(entry)]


def _needs_run(entry: LedgerEntry) -> bool:
    """Whether a run must be requested for a claimed range.

    A range that was taken from another batch waits until no run of that batch works on it. A run of
    that batch is requested only if it is unsubmitted, because nothing else would end it.
    """
    if isinstance(entry.progress, InFlight):
        return entry.progress.unsubmitted is not None
    if entry.is_waiting:
        return False
    return isinstance(entry.progress, ToRequest | Exhausted) and not entry.previous_batch_id


def _run_of(entry: LedgerEntry) -> tuple[str, int]:
    """The batch id and attempt of the run to request."""
    progress = entry.progress
    run = progress.unsubmitted if isinstance(progress, InFlight) else None
    if run is not None:
        return run.batch_id, run.attempt
    return entry.batch_id, progress.attempt if isinstance(progress, ToRequest | Exhausted) else 0


def _request_alone(entry: LedgerEntry) -> BatchRequest:
    progress = entry.progress
    wanted = progress if isinstance(progress, ToRequest) else ToRequest()
    failures = progress.attempts if isinstance(progress, Exhausted) else wanted.failures
    batch_id, attempt = _run_of(entry)
    return BatchRequest(
        batch_id,
        attempt,
        (entry.range,),
        failures,
        wanted.interruptions,
        is_own=entry.is_own,
        is_part=is_part(entry),
    )


def _working(entry: LedgerEntry) -> tuple[str, ...]:
    """The runs of an entry that exist and need no request."""
    progress = entry.progress
    return (
        progress.run_ids if isinstance(progress, InFlight) and progress.unsubmitted is None else ()
    )

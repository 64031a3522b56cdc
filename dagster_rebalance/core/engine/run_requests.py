"""Run requests: the claimed ranges that wait for a run.

A request is repeated on every tick until its run exists, because Dagster drops the requests of a
tick that times out. Its run key stays the same, so one run starts; the key changes with the attempt
and the ranges, because Dagster never starts a run for a known key.

A failed batch is divided, so one bad record does not block the other ranges of the batch: with each
failed attempt, the partitions of a run are distributed over `_SHARES` runs. The last of several
attempts on a range has a separate run, so a range is not stopped for the records of another one.
The share of a range depends only on its partition and its failures. So it is the same on each tick
and for each owner, while other ranges of the batch are committed or move.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import Exhausted, InFlight, ToRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.ledger import LedgerEntry
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_SHARES = 8
"""Number of runs for the ranges of one failed run. If all fail, or a process was killed, few runs
suffice; if one record is bad, eight runs and those of an eighth of the ranges."""
_MOST_DIVISIONS = 4
_A_RETRY = "a retry"


class _Share(NamedTuple):
    """What the ranges of one run have in common."""

    batch_id: str
    attempt: int
    failures: int
    interruptions: int
    is_own: bool
    number: int


def due_requests(
    partitions: Iterable[OwnedPartition],
    now: float,
    *,
    max_runs: int,
    max_attempts: int,
    directives: Sequence[Directive] = (),
    worker: str = "",
) -> tuple[BatchRequest, ...]:
    """Return the runs to request now. A `worker` processes the ranges of a partition in order.

    One run processes the ranges of a batch that have the same attempt. A failed batch is divided;
    with a `worker`, so is a batch that was interrupted twice in a row. The last of `max_attempts`
    and a part of a bisected range have a separate run. A batch is not requested while one of its
    claims is still being written, so it is not split over two runs.

    Failed ranges are requested while fewer than `max_runs` runs are working or requested, longest
    wait first. One of several runs is left to new batches, as `runs_in_flight` leaves one to failed
    ranges. With a `worker` (a streaming run), other runs do not count. A run that Dagster has
    created but not submitted is not requested again while `directives` pause one of its partitions,
    even a partition of another member.
    """
    partitions = tuple(partitions)
    partly_claimed = {
        batch_id
        for owned in partitions
        if owned.phase.may_plan and owned.pending and (batch_id := owned.pending.claimed_batch)
    }
    shares: dict[_Share, list[LedgerEntry]] = {}
    failed: list[tuple[float, BatchRequest]] = []
    unsubmitted: dict[str, RunSnapshot] = {}
    for entry in (e for owned in partitions for e in _requestable(owned, now, worker)):
        if isinstance(entry.progress, InFlight) and entry.progress.unsubmitted is not None:
            unsubmitted[entry.progress.unsubmitted.run_id] = entry.progress.unsubmitted
        elif (share := _share(entry, max_attempts, worker)) is None:
            failed.append((entry.due_at, _request_alone(entry)))
        elif entry.batch_id not in partly_claimed:
            shares.setdefault(share, []).append(entry)
    requests = dict.fromkeys(
        BatchRequest(run.batch_id, run.attempt, run.ranges, unsubmitted=run.run_id)
        for run in unsubmitted.values()
        if not any(in_force(directives, range_.topic_partition) for range_ in run.ranges)
    )
    for share, entries in shares.items():
        request = BatchRequest(
            share.batch_id,
            share.attempt,
            tuple(sorted(entry.range for entry in entries)),
            share.failures,
            share.interruptions,
            is_own=share.is_own,
            is_repeat=any(entry.is_repeat for entry in entries),
        )
        if _divisions(share.failures, share.interruptions):
            failed.append((max(entry.due_at for entry in entries), request))
        else:
            requests[request] = None
    working, retries = _working(partitions, worker)
    room = max(0, min(max_runs - len(working) - len(requests), max(1, max_runs - 1) - len(retries)))
    failed.sort(key=lambda waiting: (waiting[0], waiting[1].ranges))
    return (*requests, *(request for _, request in failed[:room]))


def _share(entry: LedgerEntry, max_attempts: int, worker: str) -> _Share | None:
    """Return the run that a range may share with others, or None if it needs a separate one."""
    wanted = entry.progress
    if not isinstance(wanted, ToRequest) or entry.is_part:
        return None
    if wanted.failures >= max(1, max_attempts - 1):
        return None
    interruptions = wanted.interruptions if worker else 0
    shares = _SHARES ** _divisions(wanted.failures, interruptions)
    number = entry.range.topic_partition.partition % shares
    return _Share(
        entry.batch_id, wanted.attempt, wanted.failures, interruptions, entry.is_own, number
    )


def _divisions(failures: int, interruptions: int) -> int:
    """Return how often a batch is divided. A first interruption divides nothing."""
    return min(_MOST_DIVISIONS, failures + max(0, interruptions - 1))


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


def runs_in_flight(
    partitions: Iterable[OwnedPartition], now: float, *, worker: str = "", retries: bool = True
) -> frozenset[str]:
    """Return the runs that count towards the limit of runs in flight.

    These are the runs at work, by id, and those that are or will be requested for new batches, by
    batch. A batch does not count while it is delayed or its partition is stopped or draining. With
    `retries`, one run counts for failed ranges that are due, unless one of their runs is at work.

    The batches of a `worker` are counted by batch, with the batch that it has claimed ahead, and
    not those of other runs.
    """
    partitions = tuple(partitions)
    working, retried = _working(partitions, worker)
    in_flight = set(working)
    for owned in partitions:
        if owned.pending is not None and owned.is_claiming:
            in_flight.add(owned.pending.claimed_batch)
        in_flight |= {entry.batch_id for entry in owned.entries if entry.is_reassignment_open}
        for entry in (*_requestable(owned, now, worker), *_ahead(owned, worker)):
            if isinstance(entry.progress, InFlight):
                in_flight |= set(entry.live_runs)
            elif not _has_failed(entry):
                in_flight.add(entry.batch_id)
            elif retries and not retried:
                in_flight.add(_A_RETRY)
    return frozenset(in_flight)


def _has_failed(entry: LedgerEntry) -> bool:
    progress = entry.progress
    return (
        isinstance(progress, Exhausted)
        or entry.is_part
        or (isinstance(progress, ToRequest | InFlight) and progress.is_retry)
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
        is_part=entry.is_part,
        is_repeat=entry.is_repeat,
    )


def _working(
    partitions: Iterable[OwnedPartition], worker: str
) -> tuple[frozenset[str], frozenset[str]]:
    """The runs that exist and need no request, and those of them that retry failed ranges.

    The batches of a worker, which are one run.
    """
    at_work = [
        (entry.batch_id if worker else run_id, _has_failed(entry))
        for owned in partitions
        for entry in owned.known_entries
        if isinstance(entry.progress, InFlight) and entry.progress.unsubmitted is None
        for run_id in entry.progress.run_ids
        if worker in {"", run_id}
    ]
    return frozenset(one for one, _ in at_work), frozenset(one for one, again in at_work if again)

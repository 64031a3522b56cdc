"""Offers: batches that wait for Dagster to start a run.

An offer is made again on every tick until a run for it exists, because a tick that times out or is
interrupted throws its requests away. Its run key is the same each time, so asking twice starts one
run; it changes with the attempt and with the ranges, because Dagster ignores a key that it has
seen, for ever and whatever became of the run. A range that has failed gets runs of its own from
then on, so that one bad record keeps no other range of its batch back. Not every range may be asked
for at any time: `retry` has the delays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.run import RunSeen
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.offer import Offer
from dagster_rebalance.core.runs.progress import Exhausted, InFlight, ToRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.ledger import Entry
    from dagster_rebalance.core.partitions.owned import OwnedPartition


def offers_of(
    partitions: Iterable[OwnedPartition],
    now: float,
    *,
    most_runs: int,
    orders: Sequence[Directive] = (),
    worker: str = "",
) -> tuple[Offer, ...]:
    """Return the runs that Dagster shall start now.

    One run takes the ranges of a batch that are at the same attempt, and one run takes each range
    that has failed; with a `worker`, also each range whose batch was interrupted. A batch is not
    offered while one of its claims is still being written, so that it is not split over two runs.
    Failed ranges are offered in the order in which they have waited, the longest first, while fewer
    than `most_runs` runs are at work or requested; with a `worker`, no other run counts. A run that
    Dagster has created and not submitted is not requested again while `orders` keep one of its
    partitions from being worked on, whoever owns that.
    """
    partitions = tuple(partitions)
    in_part = {
        batch_id
        for owned in partitions
        if owned.phase.may_plan and owned.pending and (batch_id := owned.pending.claiming)
    }
    together: dict[tuple[str, int, bool], list[OffsetRange]] = {}
    again: list[tuple[float, Offer]] = []
    offers: dict[Offer, None] = {}
    for entry in (entry for owned in partitions for entry in _requestable(owned, now)):
        match entry.progress:
            case InFlight(unsubmitted=RunSeen() as run):
                if not any(in_force(orders, range_.topic_partition) for range_ in run.ranges):
                    offers[Offer(run.batch_id, run.attempt, run.ranges, unsubmitted=run.run_id)] = (
                        None
                    )
            case ToRequest(attempt, failures=0) as wanted if not (worker and wanted.interruptions):
                if entry.batch_id in in_part:
                    continue
                key = (entry.batch_id, attempt, entry.is_own)
                together.setdefault(key, []).append(entry.range)
            case _:
                again.append((entry.due_at, _alone(entry)))
    offers |= dict.fromkeys(
        Offer(batch_id, attempt, tuple(sorted(found)), is_own=is_own)
        for (batch_id, attempt, is_own), found in together.items()
    )
    live = {
        run_id
        for owned in partitions
        for entry in owned.known_entries
        for run_id in _at_work(entry)
        if worker in {"", run_id}
    }
    room = max(0, most_runs - len(live) - len(offers))
    again.sort(key=lambda waiting: (waiting[0], waiting[1].ranges))
    return (*offers, *(offer for _, offer in again[:room]))


def asked_for_in(
    owned: OwnedPartition, offers: Collection[Offer], now: float
) -> tuple[OffsetRange, Offer] | None:
    """Return the first range of a partition that one of the offers requests, and that offer.

    Return None where the run has come, or no offer wants it.
    """
    wanted = {
        (offer.batch_id, offer.attempt, range_): offer
        for offer in offers
        for range_ in offer.ranges
    }
    asked = (
        (entry.range, wanted.get((*_asked_as(entry), entry.range)))
        for entry in _requestable(owned, now)
    )
    return next(((range_, offer) for range_, offer in asked if offer is not None), None)


def batches_under_way(
    partitions: Iterable[OwnedPartition], now: float, *, worker: str = "", retries: bool = True
) -> frozenset[str]:
    """Return the batches that take room among the runs in flight.

    A run works on them, or is or will be requested. A batch that is not requested, because its
    delay is not over, or its partition is stopped or has to be given up, takes no room from the
    others. With a `worker`, neither does one that another run works on. Ranges that have failed and
    are due count only with `retries`.
    """
    found = set()
    for owned in partitions:
        if owned.pending is not None and owned.is_claiming:
            found.add(owned.pending.claiming)
        found |= {
            entry.batch_id
            for entry in owned.known_entries
            if isinstance(entry.progress, InFlight)
            and (not worker or worker in entry.progress.run_ids)
        }
        found |= {entry.batch_id for entry in owned.entries if entry.is_in_question}
        found |= {
            entry.batch_id
            for entry in _requestable(owned, now)
            if retries or not _has_failed(entry)
        }
    return frozenset(found)


def _has_failed(entry: Entry) -> bool:
    progress = entry.progress
    return isinstance(progress, Exhausted) or (
        isinstance(progress, ToRequest) and progress.failures + progress.interruptions > 0
    )


def _requestable(owned: OwnedPartition, now: float) -> Iterable[Entry]:
    """The ranges of a partition that a run may be asked for.

    Of a stopped one that is the first that is not done; of one that a person has paused, none, and
    of one for which Kafka refuses what is to be stored, none: nothing could be committed, and who
    works on the claims could not be stored.
    """
    if owned.order is not None or (owned.pending is not None and owned.pending.refused):
        return []
    undone = [entry for entry in owned.entries if entry.done_by is None]
    if owned.phase is Phase.STOPPED:
        undone = undone[:1]
    elif not owned.phase.may_plan:
        undone = []
    return [entry for entry in undone if entry.due_at <= now and _is_asked_for(entry)]


def _asked_as(entry: Entry) -> tuple[str, int]:
    """The batch and the number of the run that may be asked for."""
    progress = entry.progress
    run = progress.unsubmitted if isinstance(progress, InFlight) else None
    if run is not None:
        return run.batch_id, run.attempt
    return entry.batch_id, progress.attempt if isinstance(progress, ToRequest | Exhausted) else 0


def _is_asked_for(entry: Entry) -> bool:
    """A range that was taken from another batch waits until nothing works on it for that one.

    Only a run that Dagster has created for the other batch and not submitted is asked for: nothing
    else would end it.
    """
    if isinstance(entry.progress, InFlight):
        return entry.progress.unsubmitted is not None
    return isinstance(entry.progress, ToRequest | Exhausted) and not entry.taken_from


def _alone(entry: Entry) -> Offer:
    """The offer of one range that has failed, or whose batch was interrupted."""
    progress = entry.progress
    wanted = progress if isinstance(progress, ToRequest) else ToRequest()
    failures = progress.attempts if isinstance(progress, Exhausted) else wanted.failures
    batch_id, attempt = _asked_as(entry)
    return Offer(
        batch_id,
        attempt,
        (entry.range,),
        failures,
        wanted.interruptions,
        is_own=entry.is_own,
    )


def _at_work(entry: Entry) -> tuple[str, ...]:
    """The runs that are there without being asked for any more."""
    progress = entry.progress
    return (
        progress.run_ids if isinstance(progress, InFlight) and progress.unsubmitted is None else ()
    )

"""Word the state for people: holds, partitions and members.

The sentences say what a hold waits for, why a partition does or does not make progress, and what a
member does, in a few lines. This module reads the state and words it; it decides nothing and
changes nothing. It cuts ids of runs to eight characters, as Dagster's pages show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import how_to_resume, selector_of
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition, named
from dagster_rebalance.core.model.receipt import Cause
from dagster_rebalance.core.model.run import RunState, named_runs
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.revokes.hold import Hold, named_waits, waits_of
from dagster_rebalance.core.runs.progress import DeadLettered, Exhausted, InFlight, ToRequest
from dagster_rebalance.core.runs.retry import NEVER
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.partitions.ledger import Entry
    from dagster_rebalance.core.partitions.owned import OwnedPartition, PendingWrite
    from dagster_rebalance.core.revokes.eta import Forecast

_PARTITIONS_EXPLAINED = 10
"""A tick stores the summary, and a person reads it."""


@dataclass(frozen=True, slots=True)
class _Member:
    """Whose partitions are explained.

    Attributes:
        now: What its clock shows.
        streams: Whether it is a streaming run, which works on its batches itself.
        is_there: Whether there is a member at all.
        is_outside: Whether the partition is seen from outside, where no delay is known.
    """

    now: float
    streams: bool
    is_there: bool = True
    is_outside: bool = False


def explain_hold(
    hold: Hold,
    partitions: Mapping[TopicPartition, OwnedPartition],
    now: float,
    forecast: Forecast,
) -> str:
    """What a hold waits for, how long that is likely to take, and how much time it has.

    Example:
        `holding orders-4, orders-5 for 12 s: waiting for run ab12cd34 on orders-4 [120, 240),
        likely for 19 s more (batches took 31 s); 278 s left`

    Args:
        hold: The hold.
        partitions: Those of the member.
        now: What the member's clock shows.
        forecast: How long its last batches took.
    """
    held = [
        owned
        for owned in (partitions.get(partition) for partition in sorted(hold.epochs))
        if owned is not None
    ]
    draining = [owned for owned in held if owned.phase is Phase.DRAINING]
    waits = named_waits(
        wait for owned in draining for wait in waits_of(owned, hands_over=hold.hands_over)
    )
    likely = ""
    verb = "holding" if hold.cause is Cause.REVOKE else "leaving the group with"
    if hold.hands_over:
        verb = "handing over to the successor"
    else:
        under_way = [
            entry.claimed_at
            for owned in draining
            for entry in owned.entries
            if isinstance(entry.progress, InFlight) and entry.claimed_at is not None
        ]
        likely = forecast.of(under_way, now)
    texts = ", ".join(filter(None, (waits, likely)))
    what = f"waiting for {texts}" if texts else "nothing left to wait for"
    return (
        f"{verb} {named(hold.epochs)} for {now - hold.requested_at:.0f} s: {what}; "
        f"{_time_left(hold, now)}"
    )


def explain_partition(
    owned: OwnedPartition,
    now: float,
    *,
    streams: bool = False,
    has_members: bool = True,
    is_outside: bool = False,
) -> str:
    """Why a partition does or does not make progress right now.

    Args:
        owned: The partition.
        now: What the member's clock shows.
        streams: Whether the member is a streaming run.
        has_members: Whether the group has any.
        is_outside: Whether the partition is seen from outside of its member.
    """
    state = _state(owned, _Member(now, streams, has_members, is_outside))
    if owned.order is None:
        return f"{owned.partition}: {state}"
    ordered = f"{owned.order}; resume with `{how_to_resume(selector_of(owned.partition))}`"
    return f"{owned.partition}: {ordered}; {state}"


def summary(engine: Engine, now: float) -> tuple[str, ...]:
    """A member in a few lines: what it owns, and all that does not simply work."""
    partitions = engine.partitions.busy
    count = len(engine.partitions)
    first = f"owns {named(engine.partitions)}"
    if count:
        first += f" ({count} partition{_s(count)}), {_lag(partitions)}; "
        first += _running(partitions, now, engine.settings.worker)
    return (
        first,
        *((f"leaving the group: {engine.leaving}",) if engine.leaving is not None else ()),
        *(explain_hold(hold, engine.partitions, now, engine.forecast) for hold in engine.holds),
        *(
            _unconfirmed(engine.pulse.signs[run_id].run, left_s)
            for run_id, left_s in engine.pulse.unconfirmed.items()
        ),
        *_ordered(engine.partitions.values()),
        *_explained(
            [
                o
                for o in partitions
                if o.phase in {Phase.STOPPED, Phase.RESTORING} or _is_set_back(o)
            ],
            now,
            streams=bool(engine.settings.worker),
        ),
    )


def _lag(partitions: Collection[OwnedPartition]) -> str:
    """The lag of a member. That of a partition is not known until its offsets were read."""
    known = [o for o in partitions if o.ledger is not None and o.bounds is not None]
    if partitions and not known:
        return "lag not known yet"
    return f"lag {'at least ' * (len(known) < len(partitions))}{sum(o.lag for o in known)}"


def _running(partitions: Iterable[OwnedPartition], now: float, worker: str) -> str:
    """The runs of a member, or the batch of a streaming run, and how long the oldest has taken."""
    in_flight = [
        entry
        for owned in partitions
        for entry in owned.known_entries
        if isinstance(entry.progress, InFlight)
    ]
    of_worker = [entry for entry in in_flight if worker in entry.live_runs]
    runs = {run for entry in in_flight for run in entry.live_runs} - {worker}
    unstarted = {run for entry in in_flight for run in entry.unstarted_runs}
    texts = []
    if worker:
        ranges = len(of_worker)
        on = f" on {ranges} partition{_s(ranges)}{_age(of_worker, now)}"
        texts.append(f"a batch running{on}" if of_worker else "no batch running")
    if runs - unstarted or not (worker or runs):
        started = len(runs - unstarted)
        others = [entry for entry in in_flight if runs & {*entry.live_runs} - unstarted]
        texts.append(
            f"{started or 'no'}{' other' * bool(worker)} run{_s(started or 1)} working"
            f"{_age(others, now)}"
        )
    if unstarted:
        texts.append(f"{len(unstarted)} run{_s(len(unstarted))} requested, not started yet")
    return ", ".join(texts)


def _age(entries: Iterable[Entry], now: float) -> str:
    """For how long the oldest of some ranges has been worked on; empty where that is not known."""
    since = min((entry.since for entry in entries if entry.since is not None), default=None)
    return "" if since is None else f" for {max(0.0, now - since):.0f} s"


def glance(engine: Engine) -> str:
    """A member in a few words, so that a list of ticks tells a stopped group from an idle one.

    Trouble comes first: Dagster cuts longer texts in their middle.

    Example:
        `1 stopped, 1 paused, holding 2, 6 owned, lag 2400, 3 runs`
    """
    partitions = engine.partitions.busy
    runs = len({run for owned in partitions for run in owned.live_runs})
    stopped = sum(owned.phase is Phase.STOPPED for owned in partitions)
    paused = sum(owned.order is not None for owned in engine.partitions.values())
    held = sum(len(hold.epochs) for hold in engine.holds)
    said = {
        f"{stopped} stopped": stopped,
        f"{paused} paused": paused,
        f"holding {held}": held,
        "leaving": engine.leaving is not None,
        f"{len(engine.partitions)} owned": True,
        _lag(partitions): engine.partitions,
        f"{runs} run{_s(runs)}": runs,
    }
    return ", ".join(text for text, is_told in said.items() if is_told)


def _ordered(partitions: Iterable[OwnedPartition]) -> Iterator[str]:
    """What people have paused or stopped, one line for each order."""
    under: dict[Directive, list[TopicPartition]] = {}
    for owned in partitions:
        if owned.order is not None:
            under.setdefault(owned.order, []).append(owned.partition)
    for order, those in under.items():
        yield f"{named(those)}: {order}; resume with `{how_to_resume(order.partitions)}`"


def _explained(partitions: list[OwnedPartition], now: float, *, streams: bool) -> Iterator[str]:
    for owned in partitions[:_PARTITIONS_EXPLAINED]:
        yield explain_partition(owned, now, streams=streams)
    more = partitions[_PARTITIONS_EXPLAINED:]
    if more:
        stopped = sum(owned.phase is Phase.STOPPED for owned in more)
        restoring = sum(owned.phase is Phase.RESTORING for owned in more)
        again = len(more) - stopped - restoring
        yield f"and {stopped} more stopped, {restoring} more starting" + (
            f", {again} more tried again" if again else ""
        )


def _is_set_back(owned: OwnedPartition) -> bool:
    """Whether the partition works but degraded; always False while it is paused."""
    if owned.order is not None:
        return False
    requests = (entry.progress for entry in owned.entries if owned.phase is Phase.OWNED)
    return any(
        (isinstance(found, ToRequest) and found.trouble is not None)
        or (isinstance(found, InFlight) and found.unsubmitted is not None)
        for found in requests
    )


def _state(owned: OwnedPartition, member: _Member) -> str:
    match owned.phase:
        case Phase.RESTORING:
            return _restoring(owned)
        case Phase.OWNED:
            return _work(owned, member) or _backlog(owned, member)
        case Phase.STOPPED:
            reason = f"stopped: {owned.stop_reason.removeprefix(f'{owned.partition}: ')}"
            texts = (_of_stopped(entry, owned, member) for entry in owned.entries)
            return "; ".join((reason, *filter(None, texts)))
        case Phase.DRAINING:
            return f"to be given up, waits for {named_waits(waits_of(owned))}"
        case Phase.DRAINED:
            return "drained, waits for the other partitions of the hold"
        case _:
            return f"{owned.phase.value}: this member does not own it any more"


def _time_left(hold: Hold, now: float) -> str:
    if now < hold.deadline_at:
        return f"{hold.deadline_at - now:.0f} s left"
    return f"past its deadline, released in {max(0.0, hold.limit_at - now):.0f} s whatever happens"


def _restoring(owned: OwnedPartition) -> str:
    if owned.ledger is None:
        return "starting: reads its committed offset"
    if owned.blocked_by:
        return f"starting: waits for {named_runs(owned.blocked_by)}, working on it without a claim"
    return "starting: asks Dagster for the runs of its claims, and for orders to pause"


def _work(owned: OwnedPartition, member: _Member) -> str:
    """What is under way; empty when nothing is."""
    # Of a paused partition no run is asked for.
    texts = [
        _entry(entry, member)
        for entry in owned.entries
        if owned.order is None or not isinstance(entry.progress, ToRequest | Exhausted)
    ]
    if owned.pending is not None:
        texts.append(
            f"{_write(owned.pending)} has waited {member.now - owned.pending.asked_at:.1f} s for "
            "Kafka's confirmation"
        )
    if owned.unrecorded is not None and owned.is_record_due(member.now):
        texts.append(
            f"the commit of {_span(owned.unrecorded.range)} is not recorded by Dagster yet"
        )
    return "; ".join(texts)


def _of_stopped(entry: Entry, owned: OwnedPartition, member: _Member) -> str:
    """What is done about a range of a stopped partition; empty when a person has to act."""
    if isinstance(entry.progress, InFlight):
        return _entry(entry, member)
    if member.is_outside and member.is_there:  # the reason says how it is tried again
        return ""
    is_tried = (
        isinstance(entry.progress, Exhausted | ToRequest)
        and entry.due_at != NEVER
        and not (owned.pending is not None and owned.pending.refused)
    )
    return f"{_span(entry.range)} is tried again{_when(entry, member)}" if is_tried else ""


def _when(entry: Entry, member: _Member) -> str:
    if not member.is_there:
        return " by the next member"
    if entry.due_at > member.now:
        return f" in {entry.due_at - member.now:.0f} s"
    if member.streams:
        return " after the current batch"
    return ": waits for a free run"


def _request(entry: Entry, wanted: ToRequest, member: _Member) -> str:
    span, trouble = _span(entry.range), wanted.trouble
    if not member.is_there:
        failed = f" ({_failures(wanted.failures)})" if wanted.failures else ""
        return f"{span}: waits for the next member, attempt {wanted.attempt}{failed}"
    if trouble is not None and (entry.due_at > member.now or member.is_outside):
        why = f": {trouble.why}" if trouble.why else ""
        lacks = (
            f", and a run that succeeded left out {', '.join(wanted.left_out)}"
            if wanted.left_out
            else ""
        )
        ended = f"run {trouble.run_id[:8]} for {span} {trouble.kind.value}{why}{lacks}"
        following = "tried again" if member.streams else "next run"
        when = "" if member.is_outside else f" in {entry.due_at - member.now:.0f} s"
        return f"{ended}; {following} (attempt {wanted.attempt}){when}"
    if member.streams:
        return f"{span}: next, after the current batch (attempt {wanted.attempt})"
    what = "a free run" if wanted.failures else "Dagster to start its run"
    return f"{span}: waits for {what} (attempt {wanted.attempt})"


def _entry(entry: Entry, member: _Member) -> str:
    span = _span(entry.range)
    match entry.progress:
        case ToRequest() as wanted:
            return _request(entry, wanted, member)
        case InFlight():
            return _in_flight(entry, entry.progress, member)
        case Exhausted() as exhausted:
            if StreamBatch.read(entry.batch_id) is not None:
                return f"{_failures(exhausted.attempts)} on {span}"
            return f"{exhausted.failed_runs} run{_s(exhausted.failed_runs)} failed on {span}"
        case DeadLettered():
            return f"{span} is in the dead-letter topic and is committed in its turn"
        case _:
            return f"{span} has succeeded and is committed in its turn"


def _in_flight(entry: Entry, progress: InFlight, member: _Member) -> str:
    span = _span(entry.range)
    runs = set(progress.run_ids)
    if progress.unsubmitted is not None:
        again = "waits for the next member"
        if member.is_there:
            again = "is cancelled" if member.streams else "is requested again"
        return (
            f"{named_runs(progress.run_ids)} for {span} is created but not submitted, and {again}"
        )
    if runs <= set(progress.waiting):
        return f"{named_runs(progress.run_ids)} for {span} waits in Dagster's queue"
    if runs <= {*progress.waiting, *progress.launching}:
        return f"{named_runs(progress.run_ids)} for {span}: being launched"
    if runs <= set(progress.unconfirmed):
        ended = (
            "was deleted from Dagster" if runs <= set(progress.deleted) else "has ended in Dagster"
        )
        return (
            f"{named_runs(progress.run_ids)} for {span} {ended}, and its process may still be "
            "running"
        )
    age = _age([entry], member.now).removeprefix(" ")
    return f"{named_runs(progress.run_ids)} works on {span}" + (f" ({age})" if age else "")


def _backlog(owned: OwnedPartition, member: _Member) -> str:
    if owned.order is not None:
        return _waiting(owned.lag)
    if owned.bounds is None or owned.ledger is None:
        return "waits for Kafka's end offset"
    size = owned.bounds.until - owned.ledger.claimed_until
    waits = owned.open_transaction
    if size <= 0 and waits is not None:
        return (
            f"{_waiting(waits.records)} behind a transaction that has been open at offset "
            f"{waits.offset} for {member.now - waits.since:.0f} s"
        )
    if size <= 0:
        return f"idle at the end, offset {owned.ledger.claimed_until}"
    since = owned.backlog_since
    age = "" if since is None else f"({member.now - since:.0f} s so far) "
    for_what = (
        "the end of the current batch, or for min_records"
        if member.streams
        else "a free run, for min_records, or for a tick of the sensor"
    )
    return f"{_waiting(size)} {age}for {for_what}"


def _waiting(offsets: int) -> str:
    return f"{offsets} offset{'' if offsets == 1 else 's'} wait{'s' * (offsets == 1)}"


def _failures(attempts: int) -> str:
    return f"{attempts} attempt{_s(attempts)} failed"


def _write(pending: PendingWrite) -> str:
    if pending.commits is not None:
        return f"the commit at {pending.write.new.offset}"
    if pending.claims is not None:
        return f"the claim up to {pending.claims[1]}"
    if pending.claims_again is not None:
        return f"the claim of {_span(pending.claims_again[0])} for another batch"
    if pending.write.expected is None:
        return f"the first position {pending.write.new.offset}"
    return f"the note of the log of offset {pending.write.new.offset}"


def _span(range_: OffsetRange) -> str:
    return f"[{range_.start}, {range_.until})"


def _unconfirmed(run: RunSeen, left_s: float) -> str:
    ended = "was deleted from Dagster" if run.state is RunState.DELETED else "has ended in Dagster"
    return (
        f"{named_runs([run.run_id])} {ended}, and its process may still be running: without a "
        f"sign of life it counts as dead in {left_s:.0f} s, and its work elsewhere is stopped"
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"

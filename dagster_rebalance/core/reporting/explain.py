"""Messages for operators about holds, partitions and members. Run ids are cut to 8 characters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.commands import Cause
from dagster_rebalance.core.model.directives import resume_command, selector_of
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition, names_of
from dagster_rebalance.core.model.run_snapshot import RunState, format_runs
from dagster_rebalance.core.partitions.assigned import Role
from dagster_rebalance.core.partitions.bisected import bisection_of
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.revokes.hold import Hold, named_waits, waits_of
from dagster_rebalance.core.runs.progress import DeadLettered, Exhausted, InFlight, ToRequest
from dagster_rebalance.core.runs.retry import NEVER
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.partitions.ledger import LedgerEntry
    from dagster_rebalance.core.partitions.owned import OwnedPartition, PendingWrite
    from dagster_rebalance.core.revokes.hold import Forecast

_MAX_PARTITIONS_EXPLAINED = 10
"""A tick stores the summary."""
_EXPLAINED = (Phase.STOPPED, Phase.RESTORING)


@dataclass(frozen=True, slots=True)
class _Viewpoint:
    """The viewpoint of a member, or of a group snapshot (`is_outside`), without delays."""

    now: float
    streams: bool
    has_member: bool = True
    is_outside: bool = False


def explain_hold(
    hold: Hold,
    partitions: Mapping[TopicPartition, OwnedPartition],
    now: float,
    forecast: Forecast,
) -> str:
    """Return the reasons, the likely duration and the time left of a hold.

    Example:
        `holding orders-4, orders-5 for 12 s: waiting for run ab12cd34 on orders-4 [120, 240),
        likely for 19 s more (batches took 31 s); 278 s left`
    """
    held = [partitions[p] for p in sorted(hold.epochs) if p in partitions]
    draining = [owned for owned in held if owned.phase is Phase.DRAINING]
    waits = named_waits(
        wait for owned in draining for wait in waits_of(owned, hands_over=hold.hands_over)
    )
    likely = ""
    verb = "holding" if hold.cause is Cause.REVOKE else "leaving the group with"
    if hold.hands_over:
        verb = "handing over to the successor"
    else:
        claimed_at = [
            entry.claimed_at
            for owned in draining
            for entry in owned.entries
            if isinstance(entry.progress, InFlight) and entry.claimed_at is not None
        ]
        likely = forecast.remaining(claimed_at, now)
    texts = ", ".join(filter(None, (waits, likely)))
    what = f"waiting for {texts}" if texts else "nothing left to wait for"
    if now < hold.deadline_at:
        left = f"{hold.deadline_at - now:.0f} s left"
    else:
        left_s = max(0.0, hold.limit_at - now)
        left = f"past its deadline, released in {left_s:.0f} s at the latest"
    return f"{verb} {names_of(hold.epochs)} for {now - hold.requested_at:.0f} s: {what}; {left}"


def explain_partition(
    owned: OwnedPartition,
    now: float,
    *,
    streams: bool = False,
    has_members: bool = True,
    is_outside: bool = False,
) -> str:
    """Return why a partition does or does not make progress now.

    `streams`: the member is a streaming run. `is_outside`: for a group snapshot, in which the
    retry delays are unknown.
    """
    state = _state(owned, _Viewpoint(now, streams, has_members, is_outside))
    if owned.directive is None:
        return f"{owned.partition}: {state}"
    ordered = f"{owned.directive}; resume with `{resume_command(selector_of(owned.partition))}`"
    return f"{owned.partition}: {ordered}; {state}"


def summary(engine: Engine, now: float) -> tuple[str, ...]:
    """Describe a member in a few lines: its partitions, and every problem or delay."""
    partitions = engine.partitions.busy
    count = len(engine.partitions)
    first = f"owns {engine.partitions.names}"
    if count:
        first += f" ({count} partition{_s(count)}), {_lag(partitions)}; "
        first += _running(engine.partitions.of(Role.CLAIMED), now, engine.settings.worker)
    explained = [
        o
        for o in engine.partitions.of(Role.RESTORING, Role.TROUBLED, Role.CLAIMED)
        if o.phase in _EXPLAINED or _is_degraded(o)
    ]
    return (
        first,
        *((f"leaving the group: {engine.leaving}",) if engine.leaving is not None else ()),
        *(explain_hold(hold, engine.partitions, now, engine.forecast) for hold in engine.holds),
        *(
            _unconfirmed(engine.liveness.tracked[run_id].run, left_s)
            for run_id, left_s in engine.liveness.unconfirmed.items()
        ),
        *_ordered(_directed(engine)),
        *_explained(explained, now, streams=bool(engine.settings.worker)),
    )


def headline(engine: Engine) -> str:
    """Describe a member in a few words, for the list of ticks.

    Problems come first, because Dagster cuts long texts in their middle.

    Example:
        `1 stopped, 1 paused, holding 2, 6 owned, lag 2400, 3 runs`
    """
    partitions = engine.partitions.busy
    claimed, troubled = engine.partitions.of(Role.CLAIMED), engine.partitions.of(Role.TROUBLED)
    runs = len({run for owned in claimed for run in owned.live_runs})
    stopped = sum(owned.phase is Phase.STOPPED for owned in troubled)
    paused = len(_directed(engine))
    held = sum(len(hold.epochs) for hold in engine.holds)
    texts = {
        f"{stopped} stopped": stopped,
        f"{paused} paused": paused,
        f"holding {held}": held,
        "leaving": engine.leaving is not None,
        f"{len(engine.partitions)} owned": True,
        _lag(partitions): engine.partitions,
        f"{runs} run{_s(runs)}": runs,
    }
    return ", ".join(text for text, is_shown in texts.items() if is_shown)


def _directed(engine: Engine) -> list[OwnedPartition]:
    """The partitions that operators have paused or stopped; without directives there are none."""
    if not engine.directives:
        return []
    return [owned for owned in engine.partitions.values() if owned.directive is not None]


def _lag(partitions: Collection[OwnedPartition]) -> str:
    known = [o for o in partitions if o.ledger is not None and o.bounds is not None]
    if partitions and not known:
        return "lag not known yet"
    return f"lag {'at least ' * (len(known) < len(partitions))}{sum(o.lag for o in known)}"


def _running(partitions: Iterable[OwnedPartition], now: float, worker: str) -> str:
    """The runs of a member, or the batch of a streaming run, with the age of the oldest run."""
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


def _age(entries: Iterable[LedgerEntry], now: float) -> str:
    since = min(
        (entry.working_since for entry in entries if entry.working_since is not None), default=None
    )
    return "" if since is None else f" for {max(0.0, now - since):.0f} s"


def _ordered(partitions: Iterable[OwnedPartition]) -> Iterator[str]:
    by_directive: dict[Directive | None, list[TopicPartition]] = {}
    for owned in partitions:
        by_directive.setdefault(owned.directive, []).append(owned.partition)
    for directive, covered in by_directive.items():
        resume = "" if directive is None else resume_command(directive.partitions)
        yield f"{names_of(covered)}: {directive}; resume with `{resume}`"


def _explained(partitions: list[OwnedPartition], now: float, *, streams: bool) -> Iterator[str]:
    for owned in partitions[:_MAX_PARTITIONS_EXPLAINED]:
        yield explain_partition(owned, now, streams=streams)
    more = partitions[_MAX_PARTITIONS_EXPLAINED:]
    if more:
        stopped = sum(owned.phase is Phase.STOPPED for owned in more)
        restoring = sum(owned.phase is Phase.RESTORING for owned in more)
        retried = len(more) - stopped - restoring
        yield f"and {stopped} more stopped, {restoring} more starting" + (
            f", {retried} more to be retried" if retried else ""
        )


def _is_degraded(owned: OwnedPartition) -> bool:
    """Whether a partition works, but with a failed or unsubmitted run; False while paused."""
    if owned.directive is not None or owned.phase is not Phase.OWNED:
        return False
    return any(
        (isinstance(entry.progress, ToRequest) and entry.progress.streak is not None)
        or (isinstance(entry.progress, InFlight) and entry.progress.unsubmitted is not None)
        for entry in owned.entries
    )


def _state(owned: OwnedPartition, view: _Viewpoint) -> str:
    match owned.phase:
        case Phase.RESTORING:
            return _restoring(owned)
        case Phase.OWNED:
            return _work(owned, view) or _backlog(owned, view)
        case Phase.STOPPED:
            reason = f"stopped: {owned.stop_reason.removeprefix(f'{owned.partition}: ')}"
            texts = (_retry_of_stopped(entry, owned, view) for entry in owned.entries)
            return "; ".join((reason, *filter(None, texts)))
        case Phase.DRAINING:
            return f"being released, waits for {named_waits(waits_of(owned))}"
        case Phase.DRAINED:
            return "drained, waits for the other partitions of the hold"
        case _:
            return f"{owned.phase.value}: this member no longer owns it"


def _restoring(owned: OwnedPartition) -> str:
    if owned.ledger is None:
        return "starting: reads its committed offset"
    if owned.blocked_by:
        return f"starting: waits for {format_runs(owned.blocked_by)}, working on it without a claim"
    return "starting: reads the runs of its claims and the directives from Dagster"


def _work(owned: OwnedPartition, view: _Viewpoint) -> str:
    """The work in flight; empty if there is none. No run is requested for a paused partition."""
    undone = next((entry for entry in owned.entries if entry.completed_by is None), None)
    texts = [
        _entry(entry, view, undone)
        for entry in owned.entries
        if not entry.is_waiting
        and (owned.directive is None or not isinstance(entry.progress, ToRequest | Exhausted))
    ]
    searched = bisection_of(owned.entries)
    if searched is not None:
        texts.insert(0, f"bisecting {_span(searched[0])}, attempt on {_span(searched[1])}")
    if owned.pending is not None:
        texts.append(
            f"{_write(owned.pending)} has waited {view.now - owned.pending.sent_at:.1f} s for "
            "Kafka's confirmation"
        )
    if owned.lacks_record(view.now):
        texts.append(
            f"the commit of {_span(owned.unrecorded.range)} is not recorded by Dagster yet"
        )
    return "; ".join(texts)


def _retry_of_stopped(entry: LedgerEntry, owned: OwnedPartition, view: _Viewpoint) -> str:
    """When a range of a stopped partition is retried; empty if an operator must act."""
    if isinstance(entry.progress, InFlight):
        return _entry(entry, view)
    if entry.is_waiting:
        return ""
    if view.is_outside and view.has_member:  # the stop reason has the next try
        return ""
    is_retried = (
        isinstance(entry.progress, Exhausted | ToRequest)
        and entry.due_at != NEVER
        and not (owned.pending is not None and owned.pending.refused)
    )
    if not is_retried:
        return ""
    if not view.has_member:
        when = " by the next member"
    elif entry.due_at > view.now:
        when = f" in {entry.due_at - view.now:.0f} s"
    else:
        when = " after the current batch" if view.streams else ": waits for a free run"
    return f"{_span(entry.range)} is retried{when}"


def _request(
    entry: LedgerEntry, wanted: ToRequest, view: _Viewpoint, first: LedgerEntry | None
) -> str:
    span, streak = _span(entry.range), wanted.streak
    if not view.has_member:
        failed = f" ({_failures(wanted.failures)})" if wanted.failures else ""
        return f"{span}: waits for the next member, attempt {wanted.attempt}{failed}"
    if streak is not None and (entry.due_at > view.now or view.is_outside):
        why = f": {streak.reason}" if streak.reason else ""
        lacks = (
            f", and a run that succeeded left out {', '.join(wanted.left_out)}"
            if wanted.left_out
            else ""
        )
        ended = f"run {streak.run_id[:8]} for {span} {streak.kind.value}{why}{lacks}"
        following = "next try" if view.streams else "next run"
        when = "" if view.is_outside else f" in {entry.due_at - view.now:.0f} s"
        return f"{ended}; {following} (attempt {wanted.attempt}){when}"
    if view.streams and first is not None and first != entry:
        return f"{span}: waits for {_span(first.range)} (attempt {wanted.attempt})"
    if view.streams:
        return f"{span}: next, after the current batch (attempt {wanted.attempt})"
    what = "a free run" if wanted.failures or entry.is_part else "Dagster to start its run"
    return f"{span}: waits for {what} (attempt {wanted.attempt})"


def _entry(entry: LedgerEntry, view: _Viewpoint, first: LedgerEntry | None = None) -> str:
    """What happens to a range, given the first range of its partition that is not done."""
    span = _span(entry.range)
    match entry.progress:
        case ToRequest() as wanted:
            return _request(entry, wanted, view, first)
        case InFlight():
            return _in_flight(entry, entry.progress, view)
        case Exhausted() as exhausted:
            if StreamBatch.parse(entry.batch_id) is not None:
                return f"{_failures(exhausted.attempts)} on {span}"
            return f"{exhausted.failed_runs} run{_s(exhausted.failed_runs)} failed on {span}"
        case DeadLettered():
            return f"{span} is a dead letter and is committed in order"
        case _:
            is_left_out = entry.completed_by == LEFT_OUT
            did = (
                "has no record that the filter `only` processes,"
                if is_left_out
                else "has succeeded"
            )
            return f"{span} {did} and is committed in order"


def _in_flight(entry: LedgerEntry, progress: InFlight, view: _Viewpoint) -> str:
    span, runs, names = _span(entry.range), set(progress.run_ids), format_runs(progress.run_ids)
    if progress.unsubmitted is not None:
        following = "waits for the next member"
        if view.has_member:
            following = "is cancelled" if view.streams else "is requested again"
        return f"{names} for {span} is created but not submitted, and {following}"
    if runs <= set(progress.waiting):
        return f"{names} for {span} waits in Dagster's queue"
    if runs <= {*progress.waiting, *progress.launching}:
        return f"{names} for {span}: being launched"
    if runs <= set(progress.unconfirmed):
        return f"{names} for {span} {_ended(is_deleted=runs <= set(progress.deleted))}"
    age = _age([entry], view.now).removeprefix(" ")
    return f"{names} works on {span}" + (f" ({age})" if age else "")


def _backlog(owned: OwnedPartition, view: _Viewpoint) -> str:
    if owned.directive is not None:
        return _waiting(owned.lag)
    if owned.bounds is None or owned.ledger is None:
        return "waits for Kafka's end offset"
    size = owned.bounds.until - owned.ledger.claimed_until
    waits = owned.open_transaction
    if size <= 0 and waits is not None:
        return (
            f"{_waiting(waits.records)} for a transaction that has been open at offset "
            f"{waits.offset} for {view.now - waits.since:.0f} s"
        )
    if size <= 0:
        return f"idle at the end, offset {owned.ledger.claimed_until}"
    if owned.scan is not None and owned.scan.is_running:
        return f"{_waiting(size)}: the filter `only` is applied up to offset {owned.scan.until}"
    since = owned.backlog_since
    age = "" if since is None else f"({view.now - since:.0f} s so far) "
    for_what = (
        "the end of the current batch, or for min_records"
        if view.streams
        else "a free run, for min_records, or for a tick of the sensor"
    )
    return f"{_waiting(size)} {age}for {for_what}"


def _waiting(offsets: int) -> str:
    return f"{offsets} offset{_s(offsets)} wait{'s' * (offsets == 1)}"


def _failures(attempts: int) -> str:
    return f"{attempts} attempt{_s(attempts)} failed"


def _write(pending: PendingWrite) -> str:
    if pending.commit is not None:
        return f"the commit at {pending.write.new.offset}"
    if pending.claim is not None:
        return f"the claim up to {pending.claim[1]}"
    if pending.reassign is not None:
        return f"the claim of {_span(pending.reassign[0])} for another batch"
    if pending.bisects:
        return "the halving of the first claim"
    if pending.write.expected is None:
        return f"the start position {pending.write.new.offset}"
    return f"the identity of the log at offset {pending.write.new.offset}"


def _span(range_: OffsetRange) -> str:
    return f"[{range_.start}, {range_.until})"


def _unconfirmed(run: RunSnapshot, left_s: float) -> str:
    return (
        f"{format_runs([run.run_id])} {_ended(is_deleted=run.state is RunState.DELETED)}: without "
        f"a heartbeat it counts as dead in {left_s:.0f} s, and its external work is stopped"
    )


def _ended(*, is_deleted: bool) -> str:
    ended = "was deleted from Dagster" if is_deleted else "has ended in Dagster"
    return f"{ended}, and its process may still be running"


def _s(count: int) -> str:
    return "" if count == 1 else "s"

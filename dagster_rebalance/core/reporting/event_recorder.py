"""Event recorder: apply events to the engine and derive member events.

The recorder compares the state of the engine before and after the events, so the engine needs no
code that reports commits, claims and attempts. Member events never influence a decision.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.member_events import SUCCEEDED, EventKind, MemberEvent
from dagster_rebalance.core.model.offsets import OffsetRange, names_of
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.runs.progress import FailureKind, InFlight, failure_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.ledger import LedgerEntry
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_Ranges: TypeAlias = "dict[tuple[str, str, str], list[OffsetRange]]"
"""Ranges by run, batch and outcome."""
_OUTCOMES = {
    FailureKind.FAILED: "failed",
    FailureKind.NOT_STARTED: "not_started",
    FailureKind.REFUSED: "refused",
    FailureKind.INTERRUPTED: "interrupted",
    None: "taken_back",
}


def record_events(
    engine: Engine,
    arrived: Iterable[events.Event],
    now: float,
    begin: Callable[[], events.Event | None] = lambda: None,
) -> tuple[tuple[commands.Command, ...], tuple[MemberEvent, ...]]:
    """Apply events that arrived together, decide once, and return commands and member events.

    `begin` begins the next batch of a streaming run if it is claimed, before any command follows.
    """
    recorded: list[MemberEvent] = []
    issued: list[commands.Command] = []
    for event in _then(arrived, begin):
        recorded += _of_event(event, engine.partitions, now)
        if isinstance(event, events.RunsRead):
            before = _working(engine.partitions, event.batch_ids)
            issued += engine.apply(event, now)
            after = _working(engine.partitions, event.batch_ids)
            recorded += _attempts(before, after, event.runs)
        else:
            issued += engine.apply(event, now)
    issued += engine.decide(now)
    for command in issued:
        recorded += _of_command(command)
    return tuple(issued), tuple(recorded)


def _then(
    arrived: Iterable[events.Event], begin: Callable[[], events.Event | None]
) -> Iterator[events.Event]:
    yield from arrived
    begun = begin()
    if begun is not None:
        yield begun


def _of_event(
    event: events.Event, partitions: AssignedPartitions, now: float
) -> Iterator[MemberEvent]:
    """The member events of an event that the engine has not applied yet."""
    match event:
        case events.OffsetsWritten(written, failed, refused):
            yield from _written(written, partitions, now)
            for write, failure in failed:
                yield _not_written(write.partition, failure.value)
            for write, _ in refused:
                yield _not_written(write.partition, "refused")
        case events.CommitsRecorded(records):
            for record in records:
                yield MemberEvent(
                    EventKind.OFFSETS_RECORDED,
                    f"{record.range} is recorded",
                    {**record.range.fields, "commits": record.commits},
                )
        case events.DeadLetterStored(letter):
            yield MemberEvent(
                EventKind.DEAD_LETTER_STORED,
                f"the dead-letter topic has {letter.range}",
                _letter(letter),
            )
        case events.DeadLetterFailed(letter, reason):
            yield MemberEvent(
                EventKind.DEAD_LETTER_FAILED,
                f"{letter.range} could not be sent to the dead-letter topic: {reason}",
                {**_letter(letter), "reason": reason},
            )
        case _:
            return


def _written(
    writes: Iterable[commands.OffsetWrite], partitions: AssignedPartitions, now: float
) -> Iterator[MemberEvent]:
    claimed: defaultdict[tuple[str, bool], list[OffsetRange]] = defaultdict(list)
    for write in writes:
        owned = partitions.get(write.partition)
        pending = None if owned is None else owned.pending
        if owned is None or owned.ledger is None or pending is None or pending.write != write:
            continue
        if pending.reassign is not None:
            range_, batch_id = pending.reassign
            claimed[batch_id, True].append(range_)
        elif pending.claim is not None:
            batch_id, until, _ = pending.claim
            start, tp = owned.ledger.claimed_until, owned.partition
            claimed[batch_id, False].append(OffsetRange(tp.topic, tp.partition, start, until))
        elif pending.commit is not None:
            yield _committed(owned, pending.commit, now)
    for (batch_id, is_again), ranges in claimed.items():
        fields = {
            "batch_id": batch_id,
            "ranges": tuple(ranges),
            "offsets": sum(map(len, ranges)),
            "is_again": is_again,
        }
        text = f"batch {batch_id} has claimed {_partitions(ranges)}"
        yield MemberEvent(EventKind.BATCH_CLAIMED, text, fields)


def _committed(owned: OwnedPartition, entry: LedgerEntry, now: float) -> MemberEvent:
    fields = {
        **entry.range.fields,
        "offsets": len(entry.range),
        "batch_id": entry.batch_id,
        "attempt_run_id": entry.completed_by,
        "claim_to_commit_s": None if entry.claimed_at is None else now - entry.claimed_at,
        "lag": None if owned.bounds is None else max(0, owned.bounds.until - entry.range.until),
        "is_dead_letter": entry.is_dead_letter,
    }
    return MemberEvent(EventKind.OFFSETS_COMMITTED, f"{entry.range} is committed", fields)


def _not_written(partition: TopicPartition, failure: str) -> MemberEvent:
    return MemberEvent(
        EventKind.WRITE_FAILED,
        f"the offset of {partition} was not written: {failure}",
        {"topic": partition.topic, "partition": partition.partition, "failure": failure},
    )


def _letter(letter: commands.StoreDeadLetter) -> dict[str, Any]:
    run_id = letter.run_ids[-1]
    return {**letter.range.fields, "batch_id": letter.batch_id, "attempt_run_id": run_id}


def _working(
    partitions: AssignedPartitions, batch_ids: Iterable[str]
) -> list[tuple[LedgerEntry, InFlight]]:
    """The ranges with a run in flight, of the partitions that the batches have claimed."""
    return [
        (entry, entry.progress)
        for owned in partitions.by_epoch(partitions.claimed_by(batch_ids))
        for entry in owned.entries
        if isinstance(entry.progress, InFlight)
    ]


def _attempts(
    before: list[tuple[LedgerEntry, InFlight]],
    after: list[tuple[LedgerEntry, InFlight]],
    runs: Iterable[RunSnapshot],
) -> Iterator[MemberEvent]:
    """Yield an event for each attempt that started or ended between two snapshots of the runs."""
    had = {entry.range: flight for entry, flight in before}
    has = {entry.range: flight for entry, flight in after}
    started: _Ranges = defaultdict(list)
    for entry, flight in after:
        known = had.get(entry.range)
        for run_id in flight.started:
            if known is None or run_id not in known.started:
                started[run_id, entry.batch_id, ""].append(entry.range)
    ended: _Ranges = defaultdict(list)
    last_runs = {(run.run_id, range_): run for run in runs for range_ in run.ranges}
    for entry, flight in before:
        current = has.get(entry.range)
        for run_id in flight.run_ids:
            run = last_runs.get((run_id, entry.range))
            if run is not None and (current is None or run_id not in current.run_ids):
                outcome = SUCCEEDED if run.has_succeeded else _OUTCOMES[failure_kind(run)]
                ended[run_id, entry.batch_id, outcome].append(entry.range)
    for (run_id, batch_id, outcome), ranges in (*started.items(), *ended.items()):
        fields = {"batch_id": batch_id, "attempt_run_id": run_id, "ranges": tuple(ranges)}
        text = f"{format_runs([run_id])}, batch {batch_id}, {_partitions(ranges)}"
        yield (
            MemberEvent(
                EventKind.ATTEMPT_ENDED, f"{text}: {outcome}", {**fields, "outcome": outcome}
            )
            if outcome
            else MemberEvent(EventKind.ATTEMPT_STARTED, f"{text}: working", fields)
        )


def _of_command(command: commands.Command) -> Iterator[MemberEvent]:
    what: EventKind
    fields: dict[str, Any]
    match command:
        case commands.Note(text, note, note_fields):
            yield MemberEvent(note, text, note_fields)
            return
        case commands.ShowHold(cause, partitions, run_ids, limit_s):
            what = EventKind.HOLD_WAITING
            fields = {"cause": cause, "partitions": partitions, "run_ids": run_ids}
            fields["limit_s"] = limit_s
        case commands.RecordReceipt(receipt):
            what = EventKind.HOLD_ENDED
            fields = {
                "outcome": receipt.outcome,
                "cause": receipt.cause,
                "partitions": receipt.partitions,
                "seconds": receipt.seconds,
                "run_ids": receipt.run_ids,
                "cancelled_run_ids": receipt.cancelled,
                "handed_over": receipt.handed_over,
            }
        case commands.ShowStop(partition, reason, is_released):
            what = EventKind.PARTITION_STOPPED if reason else EventKind.PARTITION_RESUMED
            fields = {"topic": partition.topic, "partition": partition.partition}
            fields |= {"reason": reason} if reason else {"is_released": is_released}
        case commands.CancelRuns(run_ids, reason, is_again=False):
            what, fields = EventKind.RUNS_CANCELLED, {"run_ids": run_ids, "reason": reason}
        case commands.EndDeadRuns(signs):
            what, fields = EventKind.RUNS_DEAD, {"run_ids": tuple(signs)}
        case _:
            return
    subject = command.receipt if isinstance(command, commands.RecordReceipt) else command
    yield MemberEvent(what, str(subject), fields)


def _partitions(ranges: list[OffsetRange]) -> str:
    return names_of(range_.topic_partition for range_ in ranges)

"""Member events: what the member logs and counts, found beside the decisions of the engine.

`observed` applies events to the engine, and compares its state before and after them. So the engine
need not report a commit, a claim or an attempt. Nothing here changes its state.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.member_events import SUCCEEDED, Occurred, Occurrence
from dagster_rebalance.core.model.offsets import OffsetRange, named
from dagster_rebalance.core.model.run import named_runs
from dagster_rebalance.core.runs.progress import InFlight, Setback, setback_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.ledger import Entry
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_Ranges: TypeAlias = "dict[tuple[str, str, str], list[OffsetRange]]"
"""Ranges by run, batch, and how it ended."""
_SETBACKS = {
    Setback.FAILED: "failed",
    Setback.NOT_STARTED: "not_started",
    Setback.REFUSED: "refused",
    Setback.INTERRUPTED: "interrupted",
    None: "taken_back",
}
REFUSED = "refused"


def observed(
    engine: Engine, arrived: Iterable[events.Event], now: float
) -> tuple[tuple[commands.Command, ...], tuple[Occurrence, ...]]:
    """Apply events that arrived together to the engine, and let it decide once.

    Returns:
        The commands of the engine, and what has happened.
    """
    told: list[Occurrence] = []
    decided: list[commands.Command] = []
    for event in arrived:
        told += _told_by(event, engine.partitions, now)
        before = _working(engine.partitions) if isinstance(event, events.RunsRead) else []
        decided += engine.apply(event, now)
        if isinstance(event, events.RunsRead):
            told += _attempts(before, _working(engine.partitions), event.runs)
    decided += engine.decide(now)
    for command in decided:
        told += _told_of(command)
    return tuple(decided), tuple(told)


def _told_by(
    event: events.Event, partitions: AssignedPartitions, now: float
) -> Iterator[Occurrence]:
    """What an event says, before the engine has heard of it."""
    match event:
        case events.OffsetsWritten(written, failed, refused):
            yield from _written(written, partitions, now)
            for write, failure in failed:
                yield _not_written(write.partition, failure.value)
            for write, _ in refused:
                yield _not_written(write.partition, REFUSED)
        case events.CommitRecorded(record):
            yield Occurrence(
                Occurred.OFFSETS_RECORDED,
                f"{record.range} is recorded",
                {**record.range.fields, "commits": len(record.ends)},
            )
        case events.DeadLetterStored(letter):
            yield Occurrence(
                Occurred.DEAD_LETTER_STORED,
                f"the dead-letter topic has {letter.range}",
                _letter(letter),
            )
        case events.DeadLetterFailed(letter, reason):
            yield Occurrence(
                Occurred.DEAD_LETTER_FAILED,
                f"{letter.range} could not be sent to the dead-letter topic: {reason}",
                {**_letter(letter), "reason": reason},
            )
        case _:
            return


def _written(
    writes: Iterable[commands.OffsetWrite], partitions: AssignedPartitions, now: float
) -> Iterator[Occurrence]:
    claimed: defaultdict[tuple[str, bool], list[OffsetRange]] = defaultdict(list)
    for write in writes:
        owned = partitions.get(write.partition)
        pending = None if owned is None else owned.pending
        if owned is None or owned.ledger is None or pending is None or pending.write != write:
            continue
        if pending.claims_again is not None:
            range_, batch_id = pending.claims_again
            claimed[batch_id, True].append(range_)
        elif pending.claims is not None:
            batch_id, until = pending.claims
            start, tp = owned.ledger.claimed_until, owned.partition
            claimed[batch_id, False].append(OffsetRange(tp.topic, tp.partition, start, until))
        elif pending.commits is not None:
            yield _committed(owned, pending.commits, now)
    for (batch_id, is_again), ranges in claimed.items():
        yield Occurrence(
            Occurred.BATCH_CLAIMED,
            f"batch {batch_id} has claimed {_shown(ranges)}",
            {
                "batch_id": batch_id,
                "ranges": tuple(ranges),
                "offsets": sum(map(len, ranges)),
                "is_again": is_again,
            },
        )


def _committed(owned: OwnedPartition, entry: Entry, now: float) -> Occurrence:
    until = entry.range.until
    return Occurrence(
        Occurred.OFFSETS_COMMITTED,
        f"{entry.range} is committed",
        {
            **entry.range.fields,
            "offsets": len(entry.range),
            "batch_id": entry.batch_id,
            "attempt_run_id": entry.done_by,
            "claim_to_commit_s": None if entry.claimed_at is None else now - entry.claimed_at,
            "lag": None if owned.bounds is None else max(0, owned.bounds.until - until),
            "is_dead_letter": entry.is_dead_letter,
        },
    )


def _not_written(partition: TopicPartition, failure: str) -> Occurrence:
    return Occurrence(
        Occurred.WRITE_FAILED,
        f"the offset of {partition} was not written: {failure}",
        {"topic": partition.topic, "partition": partition.partition, "failure": failure},
    )


def _letter(letter: commands.StoreDeadLetter) -> dict[str, Any]:
    return {
        **letter.range.fields,
        "batch_id": letter.batch_id,
        "attempt_run_id": letter.run_ids[-1],
    }


def _working(partitions: AssignedPartitions) -> list[tuple[Entry, InFlight]]:
    """The claimed ranges that runs work on."""
    return [
        (entry, entry.progress)
        for owned in partitions.busy
        for entry in owned.entries
        if isinstance(entry.progress, InFlight)
    ]


def _attempts(
    before: list[tuple[Entry, InFlight]],
    after: list[tuple[Entry, InFlight]],
    runs: Iterable[RunSeen],
) -> Iterator[Occurrence]:
    """Which runs have begun to work, and which do not work any more."""
    had = {entry.range: flight for entry, flight in before}
    have = {entry.range: flight for entry, flight in after}
    begun: _Ranges = defaultdict(list)
    for entry, flight in after:
        known = had.get(entry.range)
        for run_id in flight.started:
            if known is None or run_id not in known.started:
                begun[run_id, entry.batch_id, ""].append(entry.range)
    ended: _Ranges = defaultdict(list)
    told = {(run.run_id, range_): run for run in runs for range_ in run.ranges}  # the last one
    for entry, flight in before:
        goes_on = have.get(entry.range)
        for run_id in flight.run_ids:
            run = told.get((run_id, entry.range))
            if run is not None and (goes_on is None or run_id not in goes_on.run_ids):
                outcome = SUCCEEDED if run.has_succeeded else _SETBACKS[setback_of(run)]
                ended[run_id, entry.batch_id, outcome].append(entry.range)
    for (run_id, batch_id, outcome), ranges in (*begun.items(), *ended.items()):
        fields = {"batch_id": batch_id, "attempt_run_id": run_id, "ranges": tuple(ranges)}
        said = f"{named_runs([run_id])}, batch {batch_id}, {_shown(ranges)}"
        yield (
            Occurrence(Occurred.ATTEMPT_ENDED, f"{said}: {outcome}", {**fields, "outcome": outcome})
            if outcome
            else Occurrence(Occurred.ATTEMPT_STARTED, f"{said}: at work", fields)
        )


def _told_of(command: commands.Command) -> Iterator[Occurrence]:
    """What a command of the engine says."""
    match command:
        case commands.Note(text, what, fields):
            yield Occurrence(what, text, fields)
        case commands.ShowHold(cause, partitions, run_ids, limit_s):
            yield Occurrence(
                Occurred.HOLD_WAITING,
                str(command),
                {"cause": cause, "partitions": partitions, "run_ids": run_ids, "limit_s": limit_s},
            )
        case commands.RecordReceipt(receipt):
            yield Occurrence(
                Occurred.HOLD_ENDED,
                str(receipt),
                {
                    "outcome": receipt.outcome,
                    "cause": receipt.cause,
                    "partitions": receipt.partitions,
                    "seconds": receipt.seconds,
                    "run_ids": receipt.run_ids,
                    "cancelled_run_ids": receipt.cancelled,
                    "handed_over": receipt.handed_over,
                },
            )
        case commands.ShowStop(partition, reason):
            fields = {"topic": partition.topic, "partition": partition.partition}
            yield (
                Occurrence(Occurred.PARTITION_STOPPED, str(command), {**fields, "reason": reason})
                if reason
                else Occurrence(
                    Occurred.PARTITION_RESUMED,
                    str(command),
                    {**fields, "is_released": command.is_released},
                )
            )
        case commands.CancelRuns(run_ids, reason, is_again=False):
            yield Occurrence(
                Occurred.RUNS_CANCELLED, str(command), {"run_ids": run_ids, "reason": reason}
            )
        case commands.EndDeadRuns(signs):
            yield Occurrence(Occurred.RUNS_DEAD, str(command), {"run_ids": tuple(signs)})
        case _:
            return


def _shown(ranges: list[OffsetRange]) -> str:
    return named(range_.topic_partition for range_ in ranges)

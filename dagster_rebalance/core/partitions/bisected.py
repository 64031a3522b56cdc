"""Claims of a bisected range: how a failure and a commit change them.

`core.runs.bisection` describes the search. There are at most three claims at a time, in this order:
a part that is attempted, the `SUSPECT` rest of the failing interval, and the `REST` of the range.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.partitions.ledger import LedgerEntry
from dagster_rebalance.core.runs.bisection import Part, PartKind, halves, is_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.ledger import OffsetLedger


def after_failure(ledger: OffsetLedger, now: float) -> OffsetLedger:
    """Halve the first range, which has failed.

    A range of one offset is attempted alone first, because its attempts may have shared a run.
    """
    failed, *others = ledger.entries
    range_ = failed.range
    part = Part.parse(failed.batch_id)
    if part is None:
        part = Part(failed.batch_id, PartKind.NEXT, range_.start, range_.until)
        others_of_range, behind = [], others
    else:
        behind = [entry for entry in others if entry.range.start >= part.until]
        others_of_range = others[: len(others) - len(behind)]
    whole = [(range_, part.of(PartKind.NEXT))]
    parts = [*_halved(range_, part)] if len(range_) > 1 else whole
    if others_of_range:
        rest = replace(range_, start=range_.until, until=part.until)
        parts.append((rest, part.of(PartKind.REST)))
    return _with_parts(ledger, parts, behind, now)


def after_commit(ledger: OffsetLedger, now: float) -> OffsetLedger:
    """Choose the next attempt if the first range is a part that waits."""
    first = ledger.entries[0] if ledger.entries else None
    part = None if first is None or not is_waiting(first.batch_id) else Part.parse(first.batch_id)
    if first is None or part is None:
        return ledger
    range_ = first.range
    if part.kind is PartKind.SUSPECT and len(range_) > 1:
        parts = [*_halved(range_, part)]
    elif part.kind is PartKind.SUSPECT:
        parts = [(range_, part.of(PartKind.NEXT))]
    else:
        _, until = part.node_at(range_.start)
        parts = [(replace(range_, until=until), part.of(PartKind.NEXT))]
        if until < range_.until:
            parts.append((replace(range_, start=until), part.of(PartKind.REST)))
    return _with_parts(ledger, parts, ledger.entries[1:], now)


def _halved(range_: OffsetRange, part: Part) -> Iterator[tuple[OffsetRange, str]]:
    middle = halves(range_.start, range_.until)
    yield replace(range_, until=middle), part.of(PartKind.NEXT)
    yield replace(range_, start=middle), part.of(PartKind.SUSPECT)


def _with_parts(
    ledger: OffsetLedger,
    parts: list[tuple[OffsetRange, str]],
    behind: Sequence[LedgerEntry],
    now: float,
) -> OffsetLedger:
    claimed_at = now if ledger.entries[0].is_own else None
    # Other failed ranges that are due come first.
    entries = (
        LedgerEntry(one, batch_id, claimed_at, due_at=now, is_repeat=True)
        for one, batch_id in parts
    )
    return ledger._replace(entries=(*entries, *behind))


def bisection_of(entries: Sequence[LedgerEntry]) -> tuple[OffsetRange, OffsetRange] | None:
    """Return the interval that is bisected and the part that is attempted, or None.

    `entries` are the claims of a partition.
    """
    first, *others = entries or (None,)
    part = Part.parse(first.batch_id) if first is not None else None
    if first is None or part is None:
        return None
    parts = [Part.parse(entry.batch_id) for entry in others]
    is_suspect = bool(parts) and parts[0] is not None and parts[0].kind is PartKind.SUSPECT
    if is_suspect:
        return replace(first.range, until=others[0].range.until), first.range
    return part.bisected(first.range), first.range

"""A look at the runs tells how far each claimed range of one partition is.

It also tells whether the claims of the partition are in doubt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core import dead_letters
from dagster_rebalance.core.runs import (
    Exhausted,
    InFlight,
    Succeeded,
    ToRequest,
    progress_of,
    refused_last,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster_rebalance.core.ledger import OffsetLedger
    from dagster_rebalance.core.owned_partition import OwnedPartition
    from dagster_rebalance.core.runs import RunSeen
    from dagster_rebalance.core.settings import DriverSettings


class RunNews(NamedTuple):
    """The partition after a look at its runs.

    Attributes:
        owned: The partition.
        covers_all: Whether the runs of all its claims were looked up.
        refused: The runs that refused themselves and have no successor, so that the claims are to
            be looked up again.
        notes: Sentences for people.
    """

    owned: OwnedPartition
    covers_all: bool
    refused: frozenset[str]
    notes: tuple[str, ...]


def taken_in(
    owned: OwnedPartition,
    ledger: OffsetLedger,
    batch_ids: frozenset[str],
    runs: Mapping[str, Sequence[RunSeen]],
    *,
    settings: DriverSettings,
    now: float,
) -> RunNews:
    """Note what the runs say of the claimed ranges of a partition.

    Args:
        owned: The partition.
        ledger: Its ledger.
        batch_ids: The batches whose runs were read.
        runs: The runs of each batch that has some, oldest first.
        settings: How often a range is tried, and how fast.
        now: On the member's clock.
    """
    refused: set[str] = set()
    notes = []
    for entry in ledger.entries:
        if not batch_ids.issuperset(entry.looked_up_as):
            continue
        mine = runs.get(entry.batch_id, ())
        progress = progress_of(
            entry.range, entry.batch_id, mine, max_attempts=settings.max_attempts
        )
        if entry.taken_from:
            # A run that had looked at the claim before it was taken may work on the range.
            before = progress_of(
                entry.range,
                entry.taken_from,
                runs.get(entry.taken_from, ()),
                max_attempts=settings.max_attempts,
            )
            if isinstance(before, InFlight | Succeeded):
                progress = before
            else:
                ledger = ledger.taken(entry.range)
        settled = dead_letters.settled(owned, entry.range, progress)
        wait_s = settings.pace.wait_s(
            settled, has_dead_letters=settings.dead_letter_topic is not None
        )
        ledger = ledger.note(owned.epoch, entry.range, settled, due_at=now + wait_s)
        if isinstance(progress, ToRequest | Exhausted):
            refused |= refused_last(entry.range, entry.batch_id, mine)
        obsolete = dead_letters.obsolete(owned, entry, progress)
        if obsolete is not None:
            notes.append(obsolete)
    covers_all = batch_ids >= {
        batch_id for entry in ledger.entries for batch_id in entry.looked_up_as
    }
    known = replace(owned, ledger=ledger, runs_are_known=owned.runs_are_known or covers_all)
    return RunNews(known, covers_all, frozenset(refused), tuple(notes))

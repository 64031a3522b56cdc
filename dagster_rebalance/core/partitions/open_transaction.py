"""An open transaction hides the records behind its first offset.

A partition with one looks idle while records pile up. This module owns since when such a
transaction is known, and when a person has to hear of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import Bounds, TopicPartition

_HANGING_AFTER_S = 960.0
"""Brokers abort a transaction after `transaction.max.timeout.ms` at the latest, by default 900 s:
one that is older hangs."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that keeps records from being read.

    Attributes:
        offset: Its first offset, as far as known.
        records: How many offsets lie behind, its own included.
        since: When it was first seen, on the caller's clock.
        is_hanging: Whether it is older than any broker lets a transaction live.
    """

    offset: int
    records: int
    since: float
    is_hanging: bool = False


def noticed(before: OpenTransaction | None, bounds: Bounds, now: float) -> OpenTransaction | None:
    """The transaction that bounds show.

    Without a high watermark they only say whether the one that is known has ended.
    """
    same = before if before is not None and before.offset == bounds.until else None
    if bounds.high_watermark is None:
        return same
    records = bounds.high_watermark - bounds.until
    if records <= 0:
        return None
    since = now if same is None else same.since
    return OpenTransaction(bounds.until, records, since, now - since >= _HANGING_AFTER_S)


def why_hanging(partition: TopicPartition, open_transaction: OpenTransaction | None) -> str | None:
    """Why a person must act before the partition goes on, or None."""
    if open_transaction is None or not open_transaction.is_hanging:
        return None
    return (
        f"{partition}: {open_transaction.records} records wait behind a transaction that has been "
        f"open at offset {open_transaction.offset} "
        "for longer than brokers let one live (transaction.max.timeout.ms): it hangs. Look at it "
        "with kafka-transactions find-hanging, "
        "and end it with kafka-transactions abort; the partition then goes on by itself"
    )

"""Offers: batches that wait for Dagster to start a run.

An offer is made again on every tick until a run for it exists, because a tick that times out or is interrupted throws its requests away.
Its run key is the same each time, so asking twice starts one run; it changes with the attempt and with the ranges, because Dagster ignores
a key that it has seen, for ever and whatever became of the run.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.runs import InFlight, ToRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.owned_partition import OwnedPartition
    from dagster_rebalance.core.partition import OffsetRange


@dataclass(frozen=True, slots=True)
class Offer:
    """A run to be started.

    Attributes:
        batch_id: The batch.
        attempt: How often a run was asked for, this one included.
        ranges: What the run shall process. After a rebalance that may be a part of the batch.
    """

    batch_id: str
    attempt: int
    ranges: tuple[OffsetRange, ...]

    @property
    def run_key(self) -> str:
        """The key under which Dagster starts at most one run."""
        digest = zlib.crc32(" ".join(map(str, self.ranges)).encode())
        return f"{self.batch_id}.{digest:08x}.{self.attempt}"


def offers_of(partitions: Iterable[OwnedPartition]) -> tuple[Offer, ...]:
    """The offers of all partitions that may start work: one run for the ranges of a batch that are at the same attempt.

    A batch of which a claim is still being written is not offered, so that it is not split over two runs.
    """
    ranges: dict[tuple[str, int], list[OffsetRange]] = {}
    working = [owned for owned in partitions if owned.phase.may_plan]
    in_part = {owned.pending.claims[0] for owned in working if owned.pending and owned.pending.claims}
    for entry in (entry for owned in working for entry in owned.entries):
        if isinstance(entry.progress, ToRequest) and entry.batch_id not in in_part:
            ranges.setdefault((entry.batch_id, entry.progress.attempt), []).append(entry.range)
    return tuple(Offer(batch_id, attempt, tuple(sorted(found))) for (batch_id, attempt), found in ranges.items())


def batches_under_way(partitions: Iterable[OwnedPartition]) -> frozenset[str]:
    """The batches that take room among the runs in flight: a run works on them, or is or will be asked for.

    What is not asked for, because its partition is stopped or has to be given up, takes no room from the others.
    """
    found = set()
    for owned in partitions:
        if owned.pending is not None and owned.pending.claims is not None:
            found.add(owned.pending.claims[0])
        for entry in owned.entries:
            if isinstance(entry.progress, InFlight) or (isinstance(entry.progress, ToRequest) and owned.phase.may_plan):
                found.add(entry.batch_id)
    return frozenset(found)

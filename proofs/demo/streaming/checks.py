"""The checks of the story of streaming runs: recorded commits and the deploy."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import dagster as dg

from proofs.demo.checks import Check, some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange
    from proofs.demo.streaming.state import StreamingRun


def check_recorded(recorded: Sequence[OffsetRange], ends: Mapping[int, int]) -> Check:
    """Dagster shows each committed offset in one materialization."""
    by_partition: dict[int, list[OffsetRange]] = defaultdict(list)
    for range_ in recorded:
        by_partition[range_.partition].append(range_)
    found = []
    for number, end in sorted(ends.items()):
        ranges = sorted(by_partition[number], key=lambda range_: range_.start)
        bounds = [0, *(range_.until for range_ in ranges)]
        wrong = [
            range_ for range_, begin in zip(ranges, bounds, strict=False) if range_.start != begin
        ]
        if wrong or bounds[-1] != end:
            shown = f"{some(wrong)} does not follow" if wrong else f"ends at {bounds[-1]}"
            found.append(f"partition {number}, which ends at {end}: {shown}")
    return Check(
        "Dagster shows each committed offset once",
        not found,
        "; ".join(found) or f"{len(recorded)} materializations",
    )


def check_deploy(left: Sequence[StreamingRun]) -> Check:
    """Each run of the old code ended in order: none failed, and none was cancelled."""
    found = [
        f"{run.name} ended as {run.status.value}"
        for run in left
        if run.status is not dg.DagsterRunStatus.SUCCESS
    ]
    if not left:
        found.append("no run of the old code was replaced")
    return Check(
        "the runs of the old code left in order",
        not found,
        "; ".join(found) or f"{len(left)} runs ended as {dg.DagsterRunStatus.SUCCESS.value}",
    )

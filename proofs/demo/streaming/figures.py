"""What the play shows in figures: how long records wait, and how long a partition stands still.

All figures are functions of what was read elsewhere: when each record was produced, and what Kafka
stored when. Must not start, read or write anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proofs.witness.committed import longest_gap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proofs.demo.streaming.acts import Act
    from proofs.demo.streaming.work_log import Done


@dataclass(frozen=True, slots=True)
class Waits:
    """How long something took, in seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits:
        """The median, and what 99 % are below; 0 of nothing."""
        found = sorted(seconds) or [0.0]
        return cls(*(round(found[int((len(found) - 1) * part)], 3) for part in (0.5, 0.99)))


@dataclass(frozen=True, slots=True)
class ActFigures:
    """An act in figures.

    Attributes:
        name: The act.
        seconds: How long it took.
        records: Records that were produced in it.
        record_to_commit: From the production of a record to the commit of its offset.
        longest_gap_s: The longest time without a commit of any one partition.
        gap_partition: Which one that was.
    """

    name: str
    seconds: float
    records: int
    record_to_commit: Waits
    longest_gap_s: float
    gap_partition: int


def figures_of(
    act: Act, done: Sequence[Done], produced_at: Mapping[int, Mapping[int, float]]
) -> ActFigures:
    """An act in figures.

    Args:
        act: When it was played.
        done: All commits.
        produced_at: When each record was produced, by partition and offset.
    """
    waits = [
        one.at - at
        for one in done
        for offset in range(one.range.start, one.range.until)
        if act.began_at <= (at := produced_at[one.range.partition][offset]) < act.ended_at
    ]
    # What a partition waits for behind the act is due to the next one: the kill, not the deploy.
    commits = [(one.range.partition, one.at) for one in done if one.at <= act.ended_at]
    longest_gap_s, gap_partition = longest_gap(commits, act.began_at, act.ended_at)
    return ActFigures(
        act.name,
        round(act.ended_at - act.began_at, 1),
        len(waits),
        Waits.of(waits),
        round(longest_gap_s, 2),
        gap_partition,
    )


def claim_to_commit(done: Sequence[Done]) -> Waits:
    """From the claim of a range to the commit of its offsets."""
    return Waits.of([one.at - one.claimed_at for one in done])

"""The figures of the story: waits of records, and gaps of partitions, from Kafka's timestamps."""

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
    """Durations in seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits:
        """Return the median and the 99th percentile; 0 without values."""
        found = sorted(seconds) or [0.0]
        return cls(*(round(found[int((len(found) - 1) * part)], 3) for part in (0.5, 0.99)))


@dataclass(frozen=True, slots=True)
class ActFigures:
    """The figures of an act.

    Attributes:
        name: The act.
        seconds: Its duration.
        records: Records produced in it.
        record_to_commit: Time from the production of a record to the commit of its offset.
        longest_gap_s: The longest time without a commit of a partition.
        gap_partition: That partition.
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
    """Return the figures of an act from all commits and the production time of each record."""
    waits = [
        one.at - at
        for one in done
        for offset in range(one.range.start, one.range.until)
        if act.began_at <= (at := produced_at[one.range.partition][offset]) < act.ended_at
    ]
    # A wait of a partition after the act is due to the next one: the kill, not the deploy.
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
    """Return the times from the claim of a range to its commit."""
    return Waits.of([one.at - one.claimed_at for one in done])

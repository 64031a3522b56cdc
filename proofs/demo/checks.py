"""The demo's checks judge the output, Kafka and Dagster, never a member's own counters.

Owns the checks; all are functions of what was read elsewhere. Must not start, read or write
anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster_rebalance.core.partition import OffsetRange
    from proofs.witness.catalogue import HoldSeen
    from proofs.witness.offsets_topic import Commit
    from proofs.witness.output import Output

DRAINED = "drained"
DRAINED_HOLDS_WANTED = 2
SHORTEST_JUDGED_S = 8.0
"""A run takes about as long: a hold that was shorter cannot show whether the other partitions went
on."""
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be true.

    Attributes:
        name: What.
        passed: Whether it is.
        detail: What was found.
    """

    name: str
    passed: bool
    detail: str


def is_retained(commit: Commit, hold: HoldSeen) -> bool:
    """Whether a commit is progress of another partition while the hold lasted."""
    return (
        str(commit.range.topic_partition) not in hold.partitions
        and hold.ended_at - hold.seconds <= commit.at <= hold.ended_at
    )


def check_output(output: Output) -> Check:
    """Every produced record is in the output exactly once."""
    faults = {
        "lost": output.lost,
        "doubled": output.doubled,
        "not as produced": [row.number for row in output.wrong],
    }
    found = [f"{len(items)} {what} ({_some(items)})" for what, items in faults.items() if items]
    return Check(
        "every record exactly once",
        not found,
        "; ".join(found) or f"{output.records} records, none lost, none doubled",
    )


def check_committed(committed: Mapping[int, int], ends: Mapping[int, int]) -> Check:
    """The group has committed everything that is in Kafka."""
    behind = [
        f"partition {p}: {committed.get(p, 0)} of {end}"
        for p, end in sorted(ends.items())
        if committed.get(p, 0) != end
    ]
    return Check(
        "committed offsets equal end offsets",
        not behind,
        "; ".join(behind) or f"{len(ends)} partitions at their end",
    )


def check_materialisations(
    commits: Sequence[Commit], went_back: Sequence[str], materialised: Sequence[OffsetRange]
) -> Check:
    """Dagster shows each commit once, and nothing else."""
    made, shown = Counter(commit.range for commit in commits), Counter(materialised)
    missing, extra = list((made - shown).elements()), list((shown - made).elements())
    found = list(went_back)
    found += [f"{len(missing)} not shown by Dagster ({_some(missing)})"] if missing else []
    found += [f"{len(extra)} shown that Kafka has not ({_some(extra)})"] if extra else []
    return Check(
        "one materialisation for each commit",
        not found,
        "; ".join(found) or f"{len(commits)} commits, {len(materialised)} shown",
    )


def check_holds(holds: Sequence[HoldSeen]) -> Check:
    """Holds were drained, and the partitions that were not held went on meanwhile."""
    drained = [hold for hold in holds if hold.outcome == DRAINED]
    # Who leaves retains nothing; that no batch of another member happens to end meanwhile says
    # nothing about the hold.
    still = [
        hold
        for hold in drained
        if hold.cause == "revoke"
        and hold.seconds >= SHORTEST_JUDGED_S
        and not hold.retained_records
    ]
    found = [
        f"no progress elsewhere while {hold.member} held {', '.join(hold.partitions)}"
        for hold in still
    ]
    if len(drained) < DRAINED_HOLDS_WANTED:
        found.append(
            f"{len(drained)} holds were drained, at least {DRAINED_HOLDS_WANTED} are wanted"
        )
    if not any(hold.retained_records for hold in drained):
        found.append("no record of a retained partition was committed during any hold")
    total = sum(hold.retained_records for hold in drained)
    return Check(
        "retained partitions went on during holds",
        not found,
        "; ".join(found) or f"{total} records during {len(drained)} holds",
    )


def _some(items: Sequence[object]) -> str:
    named = ", ".join(map(str, items[:_NAMED]))
    return f"{named}, ..." if len(items) > _NAMED else named

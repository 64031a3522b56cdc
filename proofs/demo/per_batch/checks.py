"""The checks of the story of per-batch runs: holds and recorded commits."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from proofs.demo.checks import Check, some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange
    from proofs.witness.catalogue import HoldSeen
    from proofs.witness.offsets_topic import Commit

DRAINED = "drained"
DRAINED_HOLDS_WANTED = 2
SHORTEST_JUDGED_S = 8.0
"""A run takes about this long: a shorter hold cannot show progress of the other partitions."""


def is_retained(commit: Commit, hold: HoldSeen) -> bool:
    """Return whether a commit is progress of another partition during the hold."""
    return (
        str(commit.range.topic_partition) not in hold.partitions
        and hold.ended_at - hold.seconds <= commit.at <= hold.ended_at
    )


def check_materialisations(
    commits: Sequence[Commit], went_back: Sequence[str], materialised: Sequence[OffsetRange]
) -> Check:
    """Dagster shows each commit once, and nothing else."""
    made, shown = Counter(commit.range for commit in commits), Counter(materialised)
    missing, extra = list((made - shown).elements()), list((shown - made).elements())
    found = list(went_back)
    found += [f"{len(missing)} not shown by Dagster ({some(missing)})"] if missing else []
    found += [f"{len(extra)} shown that Kafka has not ({some(extra)})"] if extra else []
    return Check(
        "one materialization for each commit",
        not found,
        "; ".join(found) or f"{len(commits)} commits, {len(materialised)} shown",
    )


def check_holds(holds: Sequence[HoldSeen]) -> Check:
    """Holds were drained, and the retained partitions progressed during them."""
    drained = [hold for hold in holds if hold.outcome == DRAINED]
    # A member that leaves retains no partition: the batches of others during its hold are no
    # evidence for or against the hold.
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

"""The checks of both stories, from the output, Kafka and Dagster, not from members' counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proofs.witness.output import Output

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    detail: str


def check_output(output: Output) -> Check:
    """Every produced record is in the output exactly once."""
    faults = {
        "lost": output.lost,
        "doubled": output.doubled,
        "not as produced": [row.number for row in output.wrong],
    }
    found = [f"{len(items)} {what} ({some(items)})" for what, items in faults.items() if items]
    return Check(
        "every record exactly once",
        not found,
        "; ".join(found) or f"{output.records} records, none lost, none doubled",
    )


def check_committed(committed: Mapping[int, int], ends: Mapping[int, int]) -> Check:
    """The group has committed everything in Kafka."""
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


def some(items: Sequence[object]) -> str:
    """Return the first values for a message."""
    named = ", ".join(map(str, items[:_NAMED]))
    return f"{named}, ..." if len(items) > _NAMED else named

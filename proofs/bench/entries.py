"""Results of benchmarks with their goals, as JSON (`build/bench.json`) and as a table."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_COMPARE = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a ratio: `>=` or `<=` a bound."""

    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"

    def is_met(self, ratio: float) -> bool:
        return bool(_COMPARE[self.sign](ratio, self.bound))


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one run, for ours and the peer; `peer` is None without a peer."""

    ours: float
    peer: float | None
    ratio: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The result of one comparison over all runs.

    Attributes:
        name: The benchmark.
        case: The compared cases.
        ratio_of: Meaning of the ratio.
        unit: Unit of `ours` and `peer`.
        goal: Goal of the ratio.
        samples: The runs.
        note: Remarks for the reader.
    """

    name: str
    case: str
    ratio_of: str
    unit: str
    goal: Goal
    samples: Sequence[Sample]
    note: str = ""

    @property
    def ours(self) -> float:
        """The median of the runs."""
        return median(sample.ours for sample in self.samples)

    @property
    def peer(self) -> float | None:
        """The median of the runs with a peer."""
        found = [sample.peer for sample in self.samples if sample.peer is not None]
        return median(found) if found else None

    @property
    def ratio(self) -> float:
        """The median of the runs' ratios, each from figures that were measured side by side."""
        return median(sample.ratio for sample in self.samples)

    @property
    def met(self) -> bool:
        return self.goal.is_met(self.ratio)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "case": self.case,
            "ours": round(self.ours, 3),
            "peer": None if self.peer is None else round(self.peer, 3),
            "ratio": round(self.ratio, 4),
            "ratio_of": self.ratio_of,
            "unit": self.unit,
            "runs": len(self.samples),
            "ratios": [round(sample.ratio, 4) for sample in self.samples],
            "ours_by_run": [round(sample.ours, 4) for sample in self.samples],
            "peer_by_run": [
                None if sample.peer is None else round(sample.peer, 4) for sample in self.samples
            ],
            "goal": str(self.goal),
            "met": self.met,
            "note": self.note,
        }


def write_json(entries: Sequence[Entry], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([entry.as_json() for entry in entries], indent=2) + "\n")


def table_of(entries: Sequence[Entry]) -> Table:
    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("case")
    for column in ("ours", "peer"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unit")
    for column in ("ratio", "lowest", "highest", "runs", "goal"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    for entry in entries:
        ratios = [sample.ratio for sample in entry.samples]
        case = f"{entry.case} ({entry.note})" if entry.note else entry.case
        peer = "-" if entry.peer is None else _short(entry.peer)
        spread = [f"{value:.3f}" for value in (entry.ratio, min(ratios), max(ratios))]
        verdict = "[green]yes[/green]" if entry.met else "[bold red]no[/bold red]"
        table.add_row(
            entry.name,
            case,
            _short(entry.ours),
            peer,
            entry.unit,
            *spread,
            str(len(ratios)),
            str(entry.goal),
            verdict,
        )
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"  # noqa: PLR2004 - from here on, digits behind the point say nothing

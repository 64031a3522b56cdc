from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from proofs.demo.streaming.state import Life
from proofs.demo.view import short

if TYPE_CHECKING:
    from proofs.demo.streaming.state import Lane, Snapshot, StreamingRun
    from proofs.demo.streaming.work_log import Done

_COLOURS = ("dodger_blue1", "green3", "orange1", "magenta", "cyan", "yellow3")
_COLUMNS = (
    ("partition", "left", 9),
    ("owner", "left", 13),
    ("committed", "right", 9),
    ("lag", "right", 5),
    ("records/s", "right", 9),
    ("last batch", "right", 13),
    ("now", "left", 28),
)
"""Columns with their fixed widths."""


@dataclass(frozen=True)
class StreamBoard:
    """A row per partition, and a line per live run."""

    snapshot: Snapshot

    def table(self) -> Table:
        table = Table()
        for name, justify, width in _COLUMNS:
            table.add_column(
                name,
                justify="right" if justify == "right" else "left",
                min_width=width,
                no_wrap=True,
            )
        for lane in self.snapshot.lanes:
            table.add_row(
                lane.name,
                _owner(lane.owner),
                f"{lane.committed:,}",
                f"{lane.lag:,}",
                f"{lane.per_second:,.0f}",
                _last(lane.last),
                _now(lane),
            )
        table.add_section()
        lanes = self.snapshot.lanes
        table.add_row(
            "all",
            "",
            f"{sum(lane.committed for lane in lanes):,}",
            f"{self.snapshot.lag:,}",
            f"{self._per_second:,.0f}",
            "",
            self._starting,
        )
        return table

    def in_words(self) -> str:
        owners: dict[str, list[str]] = {}
        for lane in self.snapshot.lanes:
            owners.setdefault(_owner(lane.owner), []).append(lane.name)
        parts = [f"{owner}: {short(names)}" for owner, names in owners.items()]
        committed = sum(lane.committed for lane in self.snapshot.lanes)
        parts += [f"{self._per_second:,.0f} records/s", f"committed {committed:,}"]
        parts += [f"lag {self.snapshot.lag:,}", *filter(None, [self._held, self._starting])]
        return "; ".join(parts)

    @property
    def _per_second(self) -> float:
        return sum(lane.per_second for lane in self.snapshot.lanes)

    @property
    def _held(self) -> str:
        held = [lane.name for lane in self.snapshot.lanes if lane.is_asked_back]
        return f"held until the batch at work is committed: {short(held)}" if held else ""

    @property
    def _starting(self) -> str:
        starting = [painted(run) for run in self.snapshot.runs if run.life is Life.STARTING]
        return f"{' and '.join(starting)} starting" if starting else ""


def painted(run: StreamingRun) -> str:
    """Return the name of a run in its colour."""
    colour = _COLOURS[(run.number - 1) % len(_COLOURS)]
    return f"[{colour}]{run.name}[/{colour}]"


def _owner(run: StreamingRun | None) -> str:
    if run is None:
        return "[dim]no owner[/dim]"
    if run.life is Life.KILLED:
        return f"{painted(run)} [bold red]killed[/bold red]"
    return f"{painted(run)} code {run.code}"


def _last(done: Done | None) -> str:
    if done is None:
        return ""
    return f"{len(done.range)} in {done.at - done.claimed_at:.2f} s"


def _now(lane: Lane) -> str:
    if lane.owner is not None and lane.owner.life is Life.KILLED:
        return "[bold red]waits for session timeout[/bold red]"
    if lane.is_asked_back:
        return "[bold yellow]held until its batch is done[/bold yellow]"
    if lane.in_hand is not None:
        return f"works on {len(lane.in_hand.range)} records"
    return ""

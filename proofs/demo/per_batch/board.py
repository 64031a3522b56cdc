from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from proofs.demo.view import short

if TYPE_CHECKING:
    from proofs.demo.per_batch.state import Lane, Snapshot

_COLOURS = {"blue": "dodger_blue1", "green": "green3"}


@dataclass(frozen=True)
class LaneBoard:
    """A row per partition, with its owner and its run."""

    snapshot: Snapshot

    def table(self) -> Table:
        table = Table()
        for name, justify in (
            ("partition", "left"),
            ("owner", "left"),
            ("committed", "right"),
            ("lag", "right"),
            ("at work", "left"),
        ):
            table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
        for lane in self.snapshot.lanes:
            table.add_row(
                lane.name, _owner(lane), f"{lane.committed:,}", f"{lane.lag:,}", _work(lane)
            )
        return table

    def in_words(self) -> str:
        owners: dict[str, list[Lane]] = {}
        for lane in self.snapshot.lanes:
            owners.setdefault(
                f"{painted(lane.owner) or 'no owner'}{' drains' if lane.is_draining else ''}", []
            ).append(lane)
        parts = [
            f"{owner}: {short(lane.name for lane in lanes)}"
            for owner, lanes in sorted(owners.items())
        ]
        return (
            f"{'; '.join(parts)}; lag {self.snapshot.lag:,}; {len(self.snapshot.runs)} runs at work"
        )


def painted(member: str) -> str:
    """Return the name of a member in its colour."""
    colour = _COLOURS.get(member)
    return f"[{colour}]{member}[/{colour}]" if colour else member


def _owner(lane: Lane) -> str:
    if not lane.owner:
        return "[dim]no owner[/dim]"
    return painted(lane.owner) + (" [bold yellow]drains[/bold yellow]" if lane.is_draining else "")


def _work(lane: Lane) -> str:
    if lane.run is None:
        return ""
    if lane.run.is_queued:
        return f"run {lane.run.run_id[:8]} in the queue"
    return f"run {lane.run.run_id[:8]} " + (
        f"for {lane.run.seconds:.0f} s" if lane.run.seconds else "is being started"
    )

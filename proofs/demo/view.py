"""A person sees the demo as a live table in a terminal, and as lines of text anywhere else.

Owns the words and the layout. Must not read or change anything by itself.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dagster_rebalance.core.partition import TopicPartition, named

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from rich.console import RenderableType
    from typing_extensions import Self

    from proofs.demo.state import Lane, Snapshot

_LINE_EVERY_S = 15.0
_COLOURS = {"blue": "dodger_blue1", "green": "green3"}


class View:
    """Shows how the demo goes on."""

    def __init__(self) -> None:
        # Without a terminal rich takes it to have 80 columns, and would wrap at them.
        self.console = (
            Console(highlight=False)
            if sys.stdout.isatty()
            else Console(highlight=False, soft_wrap=True, width=120)
        )
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._began_at = time.monotonic()
        self._line_due_at = float("-inf")
        self._now = ""

    @property
    def is_terminal(self) -> bool:
        """Whether a person watches."""
        return self.console.is_terminal

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began_at

    def __enter__(self) -> Self:
        if self.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def act(self, title: str, text: str) -> None:
        """A new act begins."""
        self._now = text
        self._line_due_at = time.monotonic() + _LINE_EVERY_S
        self.console.print(f"\n[bold]{self._clock()} {title}[/bold]  {text}")

    def say(self, text: str) -> None:
        """Something happened."""
        self.console.print(f"[dim]{self._clock()}[/dim]   {text}")

    def step(self, text: str) -> None:
        """Something is being started."""
        self.say(escape(text))
        if self.is_terminal:
            self._live.update(Text(f"        {text} ...", style="dim"))

    def show(self, snapshot: Snapshot, waits_for: str) -> None:
        """How things stand."""
        if self.is_terminal:
            self._live.update(self._table(snapshot, waits_for))
        elif time.monotonic() >= self._line_due_at:
            self._line_due_at = time.monotonic() + _LINE_EVERY_S
            self.say(in_words(snapshot))

    def print(self, what: RenderableType) -> None:
        """Something that stays."""
        self.console.print(what)

    def clear(self) -> None:
        """Take the table away, for good."""
        self._live.stop()

    def _clock(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        return f"{minutes}:{seconds:02}"

    def _table(self, snapshot: Snapshot, waits_for: str) -> Table:
        table = Table(
            title=self._now,
            caption=f"{self._clock()}  waiting for {waits_for}",
            title_justify="left",
            caption_justify="left",
        )
        for name, justify in (
            ("partition", "left"),
            ("owner", "left"),
            ("committed", "right"),
            ("lag", "right"),
            ("at work", "left"),
        ):
            table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
        for lane in snapshot.lanes:
            table.add_row(
                lane.name, _owner(lane), f"{lane.committed:,}", f"{lane.lag:,}", _work(lane)
            )
        return table


def painted(member: str) -> str:
    """The name of a member in its colour."""
    colour = _COLOURS.get(member)
    return f"[{colour}]{member}[/{colour}]" if colour else member


def _owner(lane: Lane) -> str:
    if not lane.owner:
        return "[dim]nobody[/dim]"
    return painted(lane.owner) + (" [bold yellow]drains[/bold yellow]" if lane.is_draining else "")


def _work(lane: Lane) -> str:
    if lane.run is None:
        return ""
    if lane.run.is_queued:
        return f"run {lane.run.run_id[:8]} in the queue"
    return f"run {lane.run.run_id[:8]} " + (
        f"for {lane.run.seconds:.0f} s" if lane.run.seconds else "is being started"
    )


def in_words(snapshot: Snapshot) -> str:
    """How things stand, in a line."""
    owners: dict[str, list[Lane]] = {}
    for lane in snapshot.lanes:
        owners.setdefault(
            f"{painted(lane.owner) or 'nobody'}{' drains' if lane.is_draining else ''}", []
        ).append(lane)
    parts = [
        f"{owner}: {short(lane.name for lane in lanes)}" for owner, lanes in sorted(owners.items())
    ]
    return f"{'; '.join(parts)}; lag {snapshot.lag:,}; {len(snapshot.runs)} runs at work"


def short(names: Iterable[str]) -> str:
    """Partitions in short: `orders-0..3, orders-7`."""
    split = [name.rpartition("-") for name in names]
    return named(TopicPartition(topic, int(number)) for topic, _, number in split)

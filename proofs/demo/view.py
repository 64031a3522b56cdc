"""The display of the demo: a live table in a terminal, or lines of text."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from dagster_rebalance.core.model.offsets import TopicPartition, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table
    from typing_extensions import Self

    from proofs.demo.checks import Check


class Board(Protocol):
    """A state to display."""

    def table(self) -> Table:
        """Return the table for a terminal."""

    def in_words(self) -> str:
        """Return the state as one line."""


class View:
    """Displays the progress of the demo.

    Args:
        line_every_s: Interval of status lines where there is no terminal.
    """

    def __init__(self, line_every_s: float) -> None:
        self._line_every_s = line_every_s
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
        return self.console.is_terminal

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began_at

    def __enter__(self) -> Self:
        if self.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def act(self, title: str, text: str) -> None:
        """Start a new act."""
        self._now = text
        self._line_due_at = time.monotonic() + self._line_every_s
        self.console.print(f"\n[bold]{self._clock()} {title}[/bold]  {text}")

    def say(self, text: str) -> None:
        """Print an event."""
        self.console.print(f"[dim]{self._clock()}[/dim]   {text}")

    def step(self, text: str) -> None:
        """Print that something is being started."""
        self._line_due_at = time.monotonic() + self._line_every_s
        self.say(escape(text))
        if self.is_terminal:
            self._live.update(Text(f"        {text} ...", style="dim"))

    def show(self, board: Board, waits_for: str) -> None:
        """Display the state."""
        if self.is_terminal:
            table = board.table()
            table.title = self._now
            table.caption = f"{self._clock()}  waiting for {waits_for}"
            table.title_justify = table.caption_justify = "left"
            self._live.update(table)
        elif time.monotonic() >= self._line_due_at:
            self._line_due_at = time.monotonic() + self._line_every_s
            self.say(board.in_words())

    def print(self, what: RenderableType) -> None:
        """Print a permanent line."""
        self.console.print(what)

    def checks(self, checks: Iterable[Check]) -> None:
        """Print the results of the checks."""
        for check in checks:
            self.print(
                f"{'[green]passed[/green]' if check.passed else '[bold red]FAILED[/bold red]'}  "
                f"{check.name}: {escape(check.detail)}"
            )

    def clear(self) -> None:
        """Remove the table."""
        self._live.stop()

    def _clock(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        return f"{minutes}:{seconds:02}"


def plain(text: str) -> str:
    """Return a text without its colours."""
    return Text.from_markup(text).plain


def short(names: Iterable[str]) -> str:
    """Return a short form of partitions: `orders-0..3, orders-7`."""
    split = [name.rpartition("-") for name in names]
    return names_of(TopicPartition(topic, int(number)) for topic, _, number in split)

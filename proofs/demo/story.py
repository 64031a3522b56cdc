"""A story is one form of the demo: what it starts, what it plays, and what it reports.

Owns what the command needs to know of a story, and what both stories do in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dagster_rebalance.core.model.errors import DagsterRebalanceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from dagster_rebalance.testing.processes import ChildProcess
    from proofs.demo.checks import Check
    from proofs.demo.view import View
    from proofs.interrupts import Interrupts


class Report(Protocol):
    """What came out of a play."""

    @property
    def checks(self) -> Sequence[Check]:
        """What was judged."""

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""

    def show(self, view: View) -> None:
        """The report for a person."""


class Stage(Protocol):
    """Everything that a story runs on."""

    @property
    def logs(self) -> Sequence[Path]:
        """The files with what the parts have to say."""

    @property
    def pages(self) -> Iterable[tuple[str, str]]:
        """What a person can look at in Dagster's UI, and where."""

    def play(self, view: View, interrupts: Interrupts) -> Report:
        """Play all acts, and judge what came out.

        Raises:
            DagsterRebalanceError: An act did not come to its end, or a part has ended by itself.
        """


class Story(Protocol):
    """A form of the demo."""

    @property
    def line_every_s(self) -> float:
        """How often a line says how things stand where there is no terminal."""

    def stage(
        self, step: Callable[[str], None], interrupts: Interrupts
    ) -> AbstractContextManager[Stage]:
        """Start everything; it is gone when the context is left.

        Args:
            step: Gets a sentence before each part is started.
            interrupts: Ended first when everything is to be ended.

        Raises:
            DagsterRebalanceError: A part did not start; the message says which, and holds the end
                of its log.
        """


def check_running(processes: Iterable[ChildProcess]) -> None:
    """See that parts are at work.

    Raises:
        DagsterRebalanceError: One has ended by itself.
    """
    for process in processes:
        if not process.is_running:
            msg = (
                f"{process.name} has ended by itself with exit code {process.exit_code}; "
                f"{process.log} ends with:\n{process.tail()}"
            )
            raise DagsterRebalanceError(msg)

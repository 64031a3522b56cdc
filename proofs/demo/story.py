"""The interface of a story, and common code of both stories."""

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
    """The result of a story."""

    @property
    def checks(self) -> Sequence[Check]:
        """The judged properties."""

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""

    def show(self, view: View) -> None:
        """Print the report."""


class Stage(Protocol):
    """The processes of a story."""

    @property
    def logs(self) -> Sequence[Path]:
        """The log files."""

    @property
    def pages(self) -> Iterable[tuple[str, str]]:
        """The pages in Dagster's UI, by title."""

    def play(self, view: View, interrupts: Interrupts) -> Report:
        """Play all acts, and return the report.

        Raises:
            DagsterRebalanceError: An act timed out, or a process has ended unexpectedly.
        """


class Story(Protocol):
    """A form of the demo."""

    @property
    def line_every_s(self) -> float:
        """Interval of status lines where there is no terminal."""

    def stage(
        self, step: Callable[[str], None], interrupts: Interrupts
    ) -> AbstractContextManager[Stage]:
        """Start all processes; they end with the context.

        Args:
            step: Receives a sentence before each start.
            interrupts: Ended first in the shutdown.

        Raises:
            DagsterRebalanceError: A process did not start; the message includes the end of its log.
        """


def check_running(processes: Iterable[ChildProcess]) -> None:
    """Check that all processes run.

    Raises:
        DagsterRebalanceError: A process has ended unexpectedly.
    """
    for process in processes:
        if not process.is_running:
            msg = (
                f"{process.name} ended unexpectedly with exit code {process.exit_code}; "
                f"{process.log} ends with:\n{process.tail()}"
            )
            raise DagsterRebalanceError(msg)

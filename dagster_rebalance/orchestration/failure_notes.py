"""A failure note is the error of the last failed attempt on a range, for members and commands.

A streaming run keeps the errors of its batches in memory, and is replaced by each deploy. So it
stores them where its claims are found: in places of `work_notes`, one for each range. Dagster+ has
no such places for user code: there, the error is in the log of the run alone.
"""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.core.failed_attempts import FailedAttempt, Place, error_text
from dagster_rebalance.orchestration.tags import spelled
from dagster_rebalance.orchestration.work_notes import Places, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import dagster as dg

    from dagster_rebalance.core.partition import OffsetRange

_PACKAGE = str(Path(__file__).parents[1])
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>[0-9]+), in (?P<function>.*)')
_MOST_CAUSES = 20
_OF_DAGSTER = frozenset({"DagsterExecutionStepExecutionError", "SensorExecutionError"})
"""Dagster raises these from the error of an asset or a sensor, which is their cause."""


class ErrorInfo(Protocol):
    """An error as Dagster stores it."""

    @property
    def message(self) -> str:
        """The type and the message."""

    @property
    def stack(self) -> Sequence[str]:
        """The lines of the traceback."""

    @property
    def cls_name(self) -> str | None:
        """The type."""

    @property
    def cause(self) -> ErrorInfo | None:
        """The error that it was raised from."""


class FailureNotes:
    """The failure notes of one group.

    Args:
        instance: Where they are stored.
        group_id: The group.
    """

    def __init__(self, instance: dg.DagsterInstance, group_id: str) -> None:
        self._places = Places(instance)
        self._group_id = group_id

    def write(self, ranges: Iterable[OffsetRange], failed: FailedAttempt) -> None:
        """Note what an attempt on some ranges has failed with."""
        names = [self._name(range_) for range_ in ranges]
        self._places.put(
            {
                _place(name): json.dumps([name, failed.run_id, failed.attempt, failed.error])
                for name in names
            }
        )

    def read(self, ranges: Iterable[OffsetRange]) -> dict[OffsetRange, FailedAttempt]:
        """Return the notes on ranges, of those that have one."""
        names = {range_: self._name(range_) for range_ in ranges}
        stored = self._places.get(map(_place, names.values()))
        found = {}
        for range_, name in names.items():
            whose, *said = json.loads(stored.get(_place(name)) or "[null]")
            if whose == name:
                found[range_] = FailedAttempt(*said)
        return found

    def _name(self, range_: OffsetRange) -> str:
        return f"{self._group_id} {spelled(range_)}"


def text_of_error(problem: BaseException) -> str:
    """Return the text of what a body of a streaming run has raised.

    To ask an error of a JVM that has died for its message is an error, too.
    """
    name = type(problem).__name__
    try:
        said = f"{name}: {problem}"
    except Exception:  # noqa: BLE001 - of any library
        said = f"{name}, which has no text"
    frames = traceback.walk_tb(problem.__traceback__)
    return error_text(
        said,
        [
            Place(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in frames
            if not frame.f_code.co_filename.startswith(_PACKAGE)
        ],
    )


def text_of_event(entry: dg.EventLogEntry | None) -> str:
    """Return the text of what a run has failed with, by the event of its failure."""
    event = None if entry is None else entry.dagster_event
    if event is None:
        return ""
    error = event.job_failure_data.error if event.event_specific_data else None
    return text_of_info(error) if error else error_text(event.message or "")


def text_of_info(error: ErrorInfo) -> str:
    """Return the text of an error that Dagster has stored."""
    for _ in range(_MOST_CAUSES):
        if error.cls_name not in _OF_DAGSTER or error.cause is None:
            break
        error = error.cause
    frames = filter(None, map(_FRAME.match, error.stack))
    return error_text(
        error.message, [Place(f["file"], int(f["line"]), f["function"]) for f in frames]
    )


def _place(name: str) -> str:
    return place("failure", name)

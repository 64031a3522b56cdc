"""A failure note is the error of the last failed attempt on a range, for members and commands.

A streaming run keeps the errors of its batches in memory, and is replaced by each deploy. So it
stores them where its claims are found: in places of `range_owners`, one for each range. Dagster+
has no such places for user code: there, the error is in the log of the run alone.
"""

from __future__ import annotations

import json
import re
import traceback
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import dagster as dg

from dagster_rebalance.core.runs.failed_attempt import FailedAttempt, Place, error_text
from dagster_rebalance.orchestration.storage.range_owners import Places, place
from dagster_rebalance.orchestration.storage.run_tags import spelled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange

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
    """Return the text of what a body of a streaming run has raised."""
    first, *causes = islice(_chain(problem), _MOST_CAUSES)
    # The frames of a group are those of the library that collects its errors.
    raised = next((error for error in (first, *causes) if not _members(error)), first)
    frames = traceback.walk_tb(raised.__traceback__)
    return error_text(
        _said(first),
        [
            Place(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in frames
            if not frame.f_code.co_filename.startswith(_PACKAGE)
        ],
        list(map(_said, causes)),
    )


def _chain(problem: BaseException) -> Iterator[BaseException]:
    """Return an error and its causes: the errors of a group, or the one that it was raised from."""
    yield problem
    cause = problem.__cause__
    for error in _members(problem) or ([] if cause is None else [cause]):
        yield from _chain(error)


def _members(problem: BaseException) -> tuple[BaseException, ...]:
    """Return the errors of a group. Python 3.10 has a backport of groups alone."""
    held = getattr(problem, "exceptions", ())
    is_group = isinstance(held, tuple) and all(isinstance(one, BaseException) for one in held)
    return held if is_group else ()


def _said(problem: BaseException) -> str:
    """Return the type, the message, the notes and the metadata of an error.

    To ask an error of a JVM that has died for its message is an error, too.
    """
    name = type(problem).__name__
    told: list[object] = []
    try:
        told.append(problem.description if isinstance(problem, dg.Failure) else str(problem))
    except Exception:  # noqa: BLE001 - of any library
        return f"{name}, which has no text"
    told += getattr(problem, "__notes__", ())
    if isinstance(problem, dg.Failure):
        told += (f"{key}: {value.value}" for key, value in problem.metadata.items())
    text = ", ".join(map(str, filter(None, told)))
    return f"{name}: {text}" if text else name


def text_of_event(entry: dg.EventLogEntry | None) -> str:
    """Return the text of what a run has failed with, by the event of its failure."""
    event = None if entry is None else entry.dagster_event
    if event is None:
        return ""
    error = event.job_failure_data.error if event.event_specific_data else None
    return text_of_info(error) if error else error_text(event.message or "")


def text_of_info(error: ErrorInfo) -> str:
    """Return the text of an error that Dagster has stored."""
    chain = [error]
    while len(chain) < _MOST_CAUSES and chain[-1].cause is not None:
        chain.append(chain[-1].cause)
    while len(chain) > 1 and chain[0].cls_name in _OF_DAGSTER:
        del chain[0]
    frames = filter(None, map(_FRAME.match, chain[0].stack))
    return error_text(
        chain[0].message,
        [Place(f["file"], int(f["line"]), f["function"]) for f in frames],
        [cause.message for cause in chain[1:]],
    )


def _place(name: str) -> str:
    return place("failure", name)

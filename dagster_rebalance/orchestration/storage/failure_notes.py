"""Failure notes: the error of the last failed attempt on a range, for members and commands.

A streaming run keeps the errors of its batches in memory, and each deploy replaces the run. So the
run also stores the errors as key-values, one per range. Dagster+ has no key-values: the error is
only in the log of the run. This module also formats the text of an error.
"""

from __future__ import annotations

import json
import re
import traceback
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import dagster as dg

from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.failure_cause import cause_of
from dagster_rebalance.core.runs.retry import FailedAttempt, Place, error_text
from dagster_rebalance.orchestration.storage.key_values import KeyValues, slot_key
from dagster_rebalance.orchestration.storage.run_tags import CAUSE_TAG, format_range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange

_PACKAGE = str(Path(__file__).parents[1])
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>[0-9]+), in (?P<function>.*)')
_MAX_CAUSES = 20
_CAUSES = frozenset(cause.value for cause in FailureCause)
_DAGSTER_WRAPPERS = frozenset({"DagsterExecutionStepExecutionError", "SensorExecutionError"})
"""Dagster raises these errors from the error of an asset or a sensor, which is their cause."""


class ErrorInfo(Protocol):
    """An error as Dagster stores it; Dagster exports no name for its class."""

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
        """The error that this error was raised from."""

    @property
    def context(self) -> ErrorInfo | None:
        """The error that was being handled."""


class FailureNotes:
    """The failure notes of one group."""

    def __init__(self, instance: dg.DagsterInstance, group_id: str) -> None:
        self._values = KeyValues(instance)
        self._group_id = group_id

    def write(self, ranges: Iterable[OffsetRange], failed: FailedAttempt) -> None:
        """Record the failed attempt on some ranges."""
        names = [self._name(range_) for range_ in ranges]
        is_known = failed.cause is not FailureCause.UNKNOWN
        cause = [failed.cause.value] if is_known else []  # earlier versions read three fields
        self._values.write(
            {
                _key(name): json.dumps([name, failed.run_id, failed.attempt, failed.error, *cause])
                for name in names
            }
        )

    def read(self, ranges: Iterable[OffsetRange]) -> dict[OffsetRange, FailedAttempt]:
        """Return the last failed attempt on each range that has a note."""
        names = {range_: self._name(range_) for range_ in ranges}
        stored = self._values.read(map(_key, names.values()))
        notes = {}
        for range_, name in names.items():
            owner, *fields = json.loads(stored.get(_key(name)) or "[null]")
            if owner == name:
                run_id, attempt, error, *cause = fields
                notes[range_] = FailedAttempt(run_id, attempt, error, *map(FailureCause, cause))
        return notes

    def _name(self, range_: OffsetRange) -> str:
        return f"{self._group_id} {format_range(range_)}"


def text_of_error(error: BaseException) -> str:
    """Return the text of an error that an asset function raised in a streaming run."""
    first, *causes = islice(_causes(error), _MAX_CAUSES)
    # The frames of an exception group are those of the library that collects its errors.
    raised = next((one for one in (first, *causes) if not _members(one)), first)
    frames = traceback.walk_tb(raised.__traceback__)
    return error_text(
        _describe(first),
        [
            Place(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in frames
            if not frame.f_code.co_filename.startswith(_PACKAGE)
        ],
        list(map(_describe, causes)),
    )


def cause_of_error(error: BaseException) -> FailureCause:
    """Return whether the records or the environment made an asset function raise."""
    return cause_of(
        ([f"{base.__module__}.{base.__name__}" for base in type(one).__mro__], _describe(one))
        for one in islice(_causes(error, implicit=True), _MAX_CAUSES)
    )


@dg.failure_hook(name="kafka_batch_failure_cause")
def record_cause(context: dg.HookContext) -> None:
    """Record the cause in the tags of a per-batch run: the failure event has no superclasses."""
    if context.op_exception is not None:
        cause = cause_of_error(context.op_exception)
        context.instance.add_run_tags(
            context.run_id, {CAUSE_TAG: f"{context.run_id} {cause.value}"}
        )


def recorded_cause(run: dg.DagsterRun) -> FailureCause | None:
    """Return the cause in the tags of a run; None without one. Retries have the parent's tags."""
    run_id, _, cause = run.tags.get(CAUSE_TAG, "").partition(" ")
    return FailureCause(cause) if run_id == run.run_id and cause in _CAUSES else None


def _causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """Yield an error, then the errors in its group or the error that it was raised from.

    With `implicit`, that may be the error that was being handled.
    """
    yield error
    cause = error.__cause__
    if implicit and cause is None and not error.__suppress_context__:
        cause = error.__context__
    for one in _members(error) or ([] if cause is None else [cause]):
        yield from _causes(one, implicit=implicit)


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors of an exception group; in Python 3.10 only backports have groups."""
    members = getattr(error, "exceptions", ())
    is_group = isinstance(members, tuple) and all(isinstance(m, BaseException) for m in members)
    return members if is_group else ()


def _describe(error: BaseException) -> str:
    """Return the type, the message, the notes and the metadata of an error.

    `str()` of a Py4J error raises once the JVM is gone.
    """
    name = type(error).__name__
    parts: list[object] = []
    try:
        parts.append(error.description if isinstance(error, dg.Failure) else str(error))
    except Exception:  # noqa: BLE001 - of any library
        return f"{name}, which has no text"
    parts += getattr(error, "__notes__", ())
    if isinstance(error, dg.Failure):
        parts += (f"{key}: {value.value}" for key, value in error.metadata.items())
    text = ", ".join(map(str, filter(None, parts)))
    return f"{name}: {text}" if text else name


def text_of_event(entry: dg.EventLogEntry | None) -> str:
    """Return the text of the error in the failure event of a run."""
    event = None if entry is None else entry.dagster_event
    if event is None:
        return ""
    error = event.job_failure_data.error if event.event_specific_data else None
    return text_of_info(error) if error else error_text(event.message or "")


def cause_of_event(entry: dg.EventLogEntry | None) -> FailureCause:
    """Return whether the records or the environment made a run fail, by its failure event."""
    event = None if entry is None else entry.dagster_event
    if event is None or not event.event_specific_data:
        return FailureCause.UNKNOWN
    chain: list[ErrorInfo] = []
    error = event.job_failure_data.error
    while error is not None and len(chain) < _MAX_CAUSES:
        chain.append(error)
        error = error.cause or error.context
    return cause_of(([_name_of(one)], one.message) for one in chain)


def _name_of(error: ErrorInfo) -> str:
    """Return the name of the class, with its module: the message begins with both."""
    name, first = error.cls_name or "", error.message.split(":", 1)[0].strip()
    return first if name and first.endswith(f".{name}") else name


def text_of_info(error: ErrorInfo) -> str:
    """Return the text of an error that Dagster has stored."""
    chain = [error]
    while len(chain) < _MAX_CAUSES and chain[-1].cause is not None:
        chain.append(chain[-1].cause)
    while len(chain) > 1 and chain[0].cls_name in _DAGSTER_WRAPPERS:
        del chain[0]
    frames = filter(None, map(_FRAME.match, chain[0].stack))
    return error_text(
        chain[0].message,
        [Place(f["file"], int(f["line"]), f["function"]) for f in frames],
        [cause.message for cause in chain[1:]],
    )


def _key(name: str) -> str:
    return slot_key("failure", name)

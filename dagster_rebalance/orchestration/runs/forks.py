"""A process that a body of a run forks does not belong to the run.

The child has the handlers of signals and the stack of the run. With Python handlers, CPython drops
a signal that arrives right after the fork, and `multiprocessing.Pool` waits forever for a worker
that was told to end. A child that leaves the body by an exception or a return would report the end
of a step that its parent works on. This module owns what a child does instead: it takes the default
handlers of signals, and ends where it leaves the body.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGUSR2: signal.SIG_DFL,
}
_OF_RUNS = frozenset({"dagster", "dagster_rebalance"})
"""The packages whose handlers speak for a run. A child keeps those of the user."""
_ENDS_OF_STEPS = frozenset(
    {
        dg.DagsterEventType.STEP_OUTPUT.value,
        dg.DagsterEventType.STEP_FAILURE.value,
        dg.DagsterEventType.STEP_UP_FOR_RETRY.value,
        dg.DagsterEventType.STEP_SUCCESS.value,
    }
)
_runs: list[dg.DagsterInstance] = []
"""The instances of the runs at work in this process."""
_masks = threading.local()
_registered = threading.Event()


@contextmanager
def apart(instance: dg.DagsterInstance) -> Iterator[None]:
    """Keep the children that a body forks apart from its run.

    Args:
        instance: Takes the reports of the run.
    """
    if not _registered.is_set():  # hooks cannot be removed, so there is one set for each process
        _registered.set()
        os.register_at_fork(before=_before, after_in_parent=_restore, after_in_child=_in_child)
    _runs.append(instance)
    try:
        yield
    finally:
        if instance in _runs:
            _runs.remove(instance)


@contextmanager
def body_of(pid: int) -> Iterator[None]:
    """End a child that leaves the body of a run by an exception.

    Args:
        pid: The process of the run.
    """
    try:
        yield
    except BaseException as problem:
        if os.getpid() != pid:
            end(problem)
        raise
    end_child_of(pid)


def end_child_of(pid: int) -> None:
    """End this process if it is a child of the process of a run."""
    if os.getpid() != pid:
        end(None)


def end(problem: BaseException | None) -> NoReturn:
    """End this process at once, as Python ends a script that leaves by a return or an exception."""
    code: object = 0
    if isinstance(problem, SystemExit):
        code = problem.code
    elif problem is not None:
        traceback.print_exception(problem)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does for `sys.exit("text")`
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code or 0)


def _before() -> None:
    if _runs:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFAULTS)


def _restore() -> None:
    before = getattr(_masks, "before", None)
    if before is not None:
        _masks.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    if not _runs:
        return
    for number, default in _DEFAULTS.items():
        if _is_of_run(signal.getsignal(number)):
            signal.signal(number, default)
    for instance in _runs:
        _keep_silent(instance)
    _runs.clear()
    _restore()  # what came since the fork is handled here, by the default handlers


def _is_of_run(handler: object) -> bool:
    function = getattr(handler, "func", handler)
    module = getattr(function, "__module__", None) or ""
    return callable(function) and module.partition(".")[0] in _OF_RUNS


def _keep_silent(instance: dg.DagsterInstance) -> None:
    """End this child where Dagster is about to report the end of the step."""
    report = instance.handle_new_event

    def handle(event: dg.EventLogEntry, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        found = event.dagster_event
        if found is not None and found.event_type_value in _ENDS_OF_STEPS:
            end(sys.exc_info()[1])
        report(event, *arguments, **options)

    vars(instance)["handle_new_event"] = handle

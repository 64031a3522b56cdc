"""Signals and forks in the process of a run.

A run must not succeed after it was asked to end, even if an asset suppresses the exception: the
client of dagster-databricks cancels its job and returns normally.

A child that an asset function forks is not the run. It inherits the stack and the handlers of the
run. With Python handlers, CPython drops a signal that arrives right after the fork, and
`multiprocessing.Pool` then waits forever for a worker that it terminated. A child that leaves the
asset function by an exception or a return would report the end of a step that its parent still
executes. So a child takes the default handlers, and exits where it leaves the asset function.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGUSR2: signal.SIG_DFL,
}
_RUN_PACKAGES = frozenset({"dagster", "dagster_rebalance"})
"""The packages whose signal handlers belong to a run. A child keeps the user's handlers."""
_STEP_ENDS = frozenset(
    {
        dg.DagsterEventType.STEP_OUTPUT.value,
        dg.DagsterEventType.STEP_FAILURE.value,
        dg.DagsterEventType.STEP_UP_FOR_RETRY.value,
        dg.DagsterEventType.STEP_SUCCESS.value,
    }
)
_INTERRUPTED = dg.DagsterExecutionInterruptedError.__name__
_instances: list[dg.DagsterInstance] = []
"""The instances of the runs in this process."""
_masks = threading.local()
_registered = threading.Event()


def has_ended_a_step(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a step of a run ended because its process was asked to end.

    If a user cancelled the run, the events are the same, and only the status of the run differs.
    """
    entries = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    errors = [e.dagster_event.step_failure_data.error for e in entries if e.dagster_event]
    return any(error is not None and error.cls_name == _INTERRUPTED for error in errors)


class Interruptions:
    """The signals that one run receives after `watch`, until its step ends."""

    def __init__(self) -> None:
        self._is_asked_to_end = False

    def watch(self) -> None:
        """Record signals of this step, and pass them to the current handlers.

        Dagster restores its handlers when the step ends. Only the main thread receives signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):  # for which Dagster raises its exception
            handler: Any = signal.getsignal(number)
            is_recorded = isinstance(handler, partial) and handler.func == self._record
            if callable(handler) and not is_recorded:
                signal.signal(number, partial(self._record, handler))

    def check(self, run_id: str) -> None:
        """Raise if a signal was recorded."""
        if self._is_asked_to_end:
            msg = (
                f"run {run_id} was asked to end while its asset waited for external work, which "
                "may have been cancelled: its output does not count"
            )
            raise dg.DagsterExecutionInterruptedError(msg)

    def _record(
        self, handler: Callable[[int, FrameType | None], None], number: int, frame: FrameType | None
    ) -> None:
        self._is_asked_to_end = True
        handler(number, frame)


@contextmanager
def isolate_forks(instance: dg.DagsterInstance) -> Iterator[None]:
    """Isolate children that an asset function forks from the run, which reports to `instance`."""
    if not _registered.is_set():  # hooks cannot be removed, so each process registers one set
        _registered.set()
        os.register_at_fork(before=_before, after_in_parent=_restore, after_in_child=_in_child)
    _instances.append(instance)
    try:
        yield
    finally:
        if instance in _instances:
            _instances.remove(instance)


@contextmanager
def exit_forks_of(pid: int) -> Iterator[None]:
    """Exit a child of this process that leaves the block, by an exception or otherwise."""
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            _exit(error)
        raise
    exit_if_fork_of(pid)


def exit_if_fork_of(pid: int) -> None:
    """Exit if this process is a child of the process of a run."""
    if os.getpid() != pid:
        _exit(None)


def _exit(error: BaseException | None) -> NoReturn:
    """Exit as Python does at the end of a script, or after an exception."""
    code: object = 0
    if isinstance(error, SystemExit):
        code = error.code
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does for `sys.exit("text")`
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code or 0)


def _before() -> None:
    if _instances:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFAULTS)


def _restore() -> None:
    before = getattr(_masks, "before", None)
    if before is not None:
        _masks.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    if not _instances:
        return
    for number, default in _DEFAULTS.items():
        if _is_of_run(signal.getsignal(number)):
            signal.signal(number, default)
    for instance in _instances:
        _exit_at_step_end(instance)
    _instances.clear()
    _restore()  # the default handlers receive signals that arrived since the fork


def _is_of_run(handler: object) -> bool:
    function = getattr(handler, "func", handler)
    module = getattr(function, "__module__", None) or ""
    return callable(function) and module.partition(".")[0] in _RUN_PACKAGES


def _exit_at_step_end(instance: dg.DagsterInstance) -> None:
    """Exit this child when Dagster is about to report the end of the step."""
    report = instance.handle_new_event

    def handle(entry: dg.EventLogEntry, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        event = entry.dagster_event
        if event is not None and event.event_type_value in _STEP_ENDS:
            _exit(sys.exc_info()[1])
        report(entry, *arguments, **options)

    vars(instance)["handle_new_event"] = handle

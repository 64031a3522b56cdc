"""The members of this process: at most one per sensor.

A member lives in a daemon thread, from the first real tick of its sensor until it leaves. The
registry is process-wide, because Dagster creates resources for every tick. No member may be added
on import or in a run: run processes import the user's code, too. After a reload, the old process
gets no ticks but lives until its runs have ended; its members drain, commit and leave.

After a SIGTERM, Dagster's code server lives until its runs have ended. It still answers ticks but
refuses to launch runs, so each run that a member requests then fails, and three failed runs stop a
partition. `atexit` runs after that (seen with Dagster 1.13.27), so members leave at
the signal. Only the main thread may set handlers, but ticks create members in other threads, so a
pending call sets the handlers in the main thread. Existing handlers are kept, and none is set where
the system's default would end the process.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import signal
import threading
import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.model.events import LeaveRequested, TickArrived
from dagster_rebalance.core.revokes.hold import HandoverBackoff
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mail, Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager
    from types import FrameType

    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies

logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_pending: list[object] = []
"""The pending calls of the main thread, which must not be garbage-collected before."""
_EXIT_MARGIN_S = 5.0
_STANDBY = (
    "another process of this code location is the member of the group, so this process does not "
    "join: run one replica of the code server, or give each replica its own code location"
)
_FIRST_TICK_S = 3.0
"""A group assigns partitions to its first member within 2 s. The wait may block the daemon's other
sensors, and the next tick follows after at least 5 s."""
_SILENCE_S = 30.0
"""If its loop makes no turn for this long, a member hangs: its ticks fail with the current step."""
_ABANDONED_AFTER_S = 120.0
"""Longer than any call that returns at all: a commit to a dead coordinator takes 46 s."""


class HostedMember:
    """A member in its own thread.

    `make_dependencies` is called in that thread, and closes them. `shutdown_timeout_s` is the time
    for draining when the process ends.
    """

    def __init__(
        self,
        name: str,
        make_dependencies: Callable[[], AbstractContextManager[MemberDependencies]],
        *,
        shutdown_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._make_dependencies = make_dependencies
        self._shutdown_timeout_s = shutdown_timeout_s
        self._mailbox = Mailbox(clock)
        self._failure: Exception | None = None
        self.has_successor = False
        self._thread = threading.Thread(
            target=self._main, name=f"dagster_rebalance member {name}", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the member has left or failed."""
        return not self._thread.is_alive()

    def tick(self, patience_s: float = 0.0) -> tuple[Mail, list[str]]:
        """Send a tick, and return the mail of the member and notes for the log; raise its failure.

        The call waits up to `patience_s` for the first mail.
        """
        self._mailbox.send(TickArrived())
        self._mailbox.wait_for_first(patience_s)
        if self._failure is not None:
            raise self._failure
        silent_s = self._mailbox.silent_s
        if silent_s > _SILENCE_S and not self.is_over:
            after = (
                "it is abandoned: it writes nothing any more, and the next tick creates a new "
                "member"
                if self.is_lost
                else f"after {_ABANDONED_AFTER_S:.0f} s a new member takes its place"
            )
            msg = (
                f"the member {self._name} hangs: no turn of its loop for {silent_s:.0f} s, while "
                f"{self._mailbox.doing}; {after}"
            )
            raise DagsterRebalanceError(msg)
        return self._mailbox.mail, self._mailbox.take_notes()

    @property
    def is_lost(self) -> bool:
        """Whether the member has hung for so long that another member must replace it."""
        return not self.is_over and self._mailbox.silent_s > _ABANDONED_AFTER_S

    def abandon(self) -> None:
        """Make the member leave without any other action if its hanging call ever returns.

        The next owners adopt its claims.
        """
        self._mailbox.is_abandoned = True

    @property
    def mail(self) -> Mail:
        """The current mail of the member, without a tick."""
        return self._mailbox.mail

    def leave(self, reason: str) -> None:
        """Ask the member to drain and leave, without waiting."""
        self._mailbox.send(LeaveRequested(reason, self._shutdown_timeout_s))

    def join(self, until: float) -> None:
        """Wait for the end of the member, until a time of the monotonic clock."""
        self._thread.join(max(0.0, until - time.monotonic()))

    @property
    def exit_limit_s(self) -> float:
        """How long the end of the process may wait for the member."""
        return self._shutdown_timeout_s + _EXIT_MARGIN_S

    def _main(self) -> None:
        try:
            with self._make_dependencies() as dependencies:
                member_loop = MemberLoop(dependencies, self._mailbox)
                member_loop.run()
                self.has_successor = member_loop.has_successor
        except Exception as error:
            logger.exception("the member %s failed", self._name)
            self._failure = error
        finally:
            self._mailbox.settle()


class Members:
    """A registry of hosted members.

    The tick that makes a member waits up to `patience_s` for its first mail, to request the first
    runs.
    """

    def __init__(
        self,
        call_on_shutdown: Callable[[Callable[[], None]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._members: dict[Hashable, HostedMember] = {}
        self._backoffs: dict[Hashable, HandoverBackoff] = {}
        self._call_on_shutdown = call_on_shutdown
        self._is_retired = False
        self._lock = threading.RLock()  # a signal may arrive while this thread holds the lock

    def get(self, key: Hashable) -> HostedMember | None:
        """Return the member of a key, if there is one, for a preview."""
        with self._lock:
            return self._members.get(key)

    def tick(
        self, key: Hashable, make: Callable[[], HostedMember], read_lease: Callable[[], str] = str
    ) -> tuple[Mail, list[str]]:
        """Exchange a tick with the member of a key, and make the member if there is none.

        `read_lease` reads the lease on the sensor, empty if it is free. If the member has failed,
        its error is raised, and the next tick makes another member.
        """
        if self._is_standby(key, read_lease):
            return Mail(summary=(_STANDBY,)), []
        patience_s = 0.0
        with self._lock:
            member = self._members.get(key)
            if member is None and self._is_retired:
                return Mail(summary=("this code server is shutting down: it joins no group",)), []
            if member is None:
                self._watch()
                member = self._members[key] = make()
                patience_s = self._patience_s
            if member.is_over or member.is_lost:
                member.abandon()
                del self._members[key]
        return member.tick(patience_s)

    def _is_standby(self, key: Hashable, read_lease: Callable[[], str]) -> bool:
        """Whether a replica of this code server runs the member.

        Each replica receives every other tick.
        """
        member = self.get(key)
        left = member is not None and member.is_over and member.has_successor
        if not left and key not in self._backoffs:
            return False
        sign, now = read_lease(), self._clock()
        with self._lock:
            backoff = self._backoffs.get(key, HandoverBackoff(sign, now)).observe(sign, now)
            if left:
                self._members.pop(key, None)
            self._backoffs[key] = backoff
            if backoff.may_join(now):
                del self._backoffs[key]
                return False
        return True

    def retire(self) -> None:
        """Ask all members to drain and leave, and create no more. Called by a signal handler."""
        with self._lock:
            self._is_retired = True
            members = list(self._members.values())
        for member in members:
            member.leave("its code server is shut down")

    def _watch(self) -> None:
        if self._call_on_shutdown is not None:
            self._call_on_shutdown(self.retire)
            self._call_on_shutdown = None

    def shut_down(self) -> None:
        """Let all members drain and leave, within their timeouts."""
        self.retire()
        with self._lock:
            members = list(self._members.values())
        until = time.monotonic() + max((member.exit_limit_s for member in members), default=0.0)
        for member in members:
            member.join(until)


def call_on_shutdown(action: Callable[[], None]) -> None:
    """Call `action` in the main thread when this process receives a signal to end.

    The call precedes the existing handlers.
    """

    def install(_: object = None) -> int:
        for number in _SIGNALS:
            _add(number, action)
        return 0

    if threading.current_thread() is threading.main_thread():
        install()
        return
    call = _PendingCall(install)
    _pending.append(call)
    if ctypes.pythonapi.Py_AddPendingCall(call, None) != 0:
        logger.warning(
            "the shutdown of this process cannot be detected: its members leave only after all "
            "runs of the code server have ended"
        )


def _add(number: signal.Signals, action: Callable[[], None]) -> None:
    before = signal.getsignal(number)
    if not callable(before):
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        action()
        before(signal_number, frame)

    signal.signal(number, handle)


MEMBERS = Members(call_on_shutdown, patience_s=_FIRST_TICK_S)
"""The members of this process."""

# The end of the process waits for the members. Daemon threads and `atexit` are the only clean-up
# that runs in every graceful end of a code server.
atexit.register(MEMBERS.shut_down)

"""The registry keeps the members of this process: at most one for each sensor.

A member lives in a daemon thread, from its first real tick to its departure. The registry is
process-wide, because Dagster builds resources anew for every tick. Nothing may fill it on import or
in a run: run processes import the user's code too. After a reload the old process gets no more
ticks, but lives until its runs have ended: its members drain, commit and leave without them.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.model.events import LeaveRequested, TickArrived
from dagster_rebalance.core.revokes.holds import HandoverBackoff
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mail, Mailbox
from dagster_rebalance.orchestration.per_batch.shutdown import call_on_shutdown

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager

    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies

logger = logging.getLogger(__name__)
_EXIT_MARGIN_S = 5.0
_STANDS_BACK = (
    "another process of this code location is the member of the group, so this one stays out of "
    "it: "
    "run one replica of the code server, or give each replica a code location of its own"
)
_FIRST_TICK_S = 3.0
"""A group gives a first member its partitions within 2 s. Dagster's daemon may evaluate no other
sensor meanwhile, and its next tick comes 5 s later or more."""
_SILENCE_S = 30.0
"""A member that has not turned for this time hangs, and its ticks fail with what it hangs in."""
_ABANDONED_AFTER_S = 120.0
"""Longer than any call that is sure to end: a commit to a dead coordinator takes 46 s."""


class HostedMember:
    """A member in a thread of its own.

    Args:
        name: For the thread and for logs.
        make_parts: Makes what the member works with, in its thread, and puts it away afterwards.
        shutdown_timeout_s: How long it may drain when the process ends.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        name: str,
        make_parts: Callable[[], AbstractContextManager[MemberDependencies]],
        *,
        shutdown_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._make_parts = make_parts
        self._shutdown_timeout_s = shutdown_timeout_s
        self._mailbox = Mailbox(clock)
        self._failure: Exception | None = None
        self.made_way = False
        self._thread = threading.Thread(
            target=self._main, name=f"dagster_rebalance member {name}", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has left or failed."""
        return not self._thread.is_alive()

    def tick(self, patience_s: float = 0.0) -> tuple[Mail, list[str]]:
        """Exchange a tick for what the member has to say: its mail, and notes for the log.

        Args:
            patience_s: How long to wait for a member that has said nothing yet.

        Raises:
            DagsterRebalanceError: The member has failed or hangs; the message says why and what to
                do.
        """
        self._mailbox.tell(TickArrived())
        self._mailbox.wait_for_first(patience_s)
        if self._failure is not None:
            raise self._failure
        silent_s = self._mailbox.silent_s
        if silent_s > _SILENCE_S and not self.is_over:
            after = (
                "it is abandoned: it writes nothing any more, and the next tick makes a new member"
                if self.is_lost
                else f"after {_ABANDONED_AFTER_S:.0f} s a new member takes its place"
            )
            msg = (
                f"the member {self._name} hangs: it has not turned for {silent_s:.0f} s, while "
                f"{self._mailbox.doing}; {after}"
            )
            raise DagsterRebalanceError(msg)
        return self._mailbox.mail, self._mailbox.take_notes()

    @property
    def is_lost(self) -> bool:
        """Whether it has hung for so long that another member has to take its place."""
        return not self.is_over and self._mailbox.silent_s > _ABANDONED_AFTER_S

    def abandon(self) -> None:
        """Let it do nothing any more but leave, should it ever wake up.

        What it had claimed is adopted through its claims.
        """
        self._mailbox.is_abandoned = True

    @property
    def mail(self) -> Mail:
        """What the member has to say, without a tick."""
        return self._mailbox.mail

    def leave(self, reason: str) -> None:
        """Ask the member to drain and leave. Does not wait."""
        self._mailbox.tell(LeaveRequested(reason, self._shutdown_timeout_s))

    def join(self, until: float) -> None:
        """Wait for the end of the member, until a time of the monotonic clock."""
        self._thread.join(max(0.0, until - time.monotonic()))

    @property
    def exit_limit_s(self) -> float:
        """How long the end of the process may wait for it."""
        return self._shutdown_timeout_s + _EXIT_MARGIN_S

    def _main(self) -> None:
        try:
            with self._make_parts() as parts:
                member_loop = MemberLoop(parts, self._mailbox)
                member_loop.run()
                self.made_way = member_loop.made_way
        except Exception as error:
            logger.exception("the member %s failed", self._name)
            self._failure = error
        finally:
            self._mailbox.settle()


class Members:
    """A registry of hosted members.

    Args:
        call_on_shutdown: Has a function called when the process is told to end.
        clock: A monotonic clock.
        patience_s: How long the tick that makes a member waits for what it takes on first, so that
            the first runs are requested by this tick.
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
        self._made_way: dict[Hashable, HandoverBackoff] = {}
        self._call_on_shutdown = call_on_shutdown
        self._is_retired = False
        self._lock = threading.RLock()  # a signal may come while this very thread has it

    def get(self, key: Hashable) -> HostedMember | None:
        """The member for a key, if there is one. A preview uses this: it starts nothing."""
        with self._lock:
            return self._members.get(key)

    def tick(
        self, key: Hashable, make: Callable[[], HostedMember], sign_of_seat: Callable[[], str] = str
    ) -> tuple[Mail, list[str]]:
        """Exchange a tick with the member for a key.

        The registry makes a member if there is none, or the last one is over.

        Args:
            key: Names the member.
            make: Makes one.
            sign_of_seat: The last sign of the process that has the seat of the sensor; empty when
                it is free.

        Raises:
            DagsterRebalanceError: The member has failed, or hangs. If that is for good, the next
                tick makes another one.
        """
        if self._stands_back(key, sign_of_seat):
            return Mail(summary=(_STANDS_BACK,)), []
        patience_s = 0.0
        with self._lock:
            member = self._members.get(key)
            if member is None and self._is_retired:
                return Mail(
                    summary=(
                        "this code server is being shut down: it takes part in no group any more",
                    )
                ), []
            if member is None:
                self._watch()
                member = self._members[key] = make()
                patience_s = self._patience_s
            if member.is_over or member.is_lost:
                member.abandon()
                del self._members[key]
        return member.tick(patience_s)

    def _stands_back(self, key: Hashable, sign_of_seat: Callable[[], str]) -> bool:
        """Tell whether another process of this code location is the member.

        That process is a replica, which gets every other tick.
        """
        member = self.get(key)
        left = member is not None and member.is_over and member.made_way
        if not left and key not in self._made_way:
            return False
        sign, now = sign_of_seat(), self._clock()
        with self._lock:
            made_way = self._made_way.get(key, HandoverBackoff(sign, now)).observe(sign, now)
            if left:
                self._members.pop(key, None)
            self._made_way[key] = made_way
            if made_way.may_join(now):
                del self._made_way[key]
                return False
        return True

    def retire(self) -> None:
        """Ask all members to drain and leave, and make no others.

        Does not wait: a handler of a signal calls this.
        """
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
        """Let all members drain and leave, within their time-outs."""
        self.retire()
        with self._lock:
            members = list(self._members.values())
        until = time.monotonic() + max((member.exit_limit_s for member in members), default=0.0)
        for member in members:
            member.join(until)


MEMBERS = Members(call_on_shutdown, patience_s=_FIRST_TICK_S)
"""The members of this process."""

# The end of the process waits for them. Daemon threads and `atexit` are the only clean-up that ran
# in every graceful end of a code server.
atexit.register(MEMBERS.shut_down)

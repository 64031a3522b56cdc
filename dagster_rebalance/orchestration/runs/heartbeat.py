"""The heartbeat of a run shows again and again that its process lives.

The process stops when it may not work any more. This module owns the run's side of the lease. A
member that saw no new sign for `heartbeat_timeout_s` requests the batch again. Before that, this
process must have ended: when it could give no sign for two thirds of that time, by its own clock,
or finds that its run has ended in Dagster or was deleted, it interrupts itself, which takes its
Spark work along, and a sixth of that time later it ends hard. The thread that watches the time
calls nothing that could hang.

A process that exists for this run alone keeps giving signs after the steps are done, until Dagster
shows the end of the run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.orchestration.runs import boot_clock, process, signals
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.range_owners import RangeOwner, RangeOwners
from dagster_rebalance.orchestration.storage.run_events import (
    RunEvent,
    record_run_event,
    run_events_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from dagster_rebalance.core.model.commands import Claimed

logger = logging.getLogger(__name__)
_WORKING = {dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING}
_BEATS_PER_TIMEOUT = 6
_LOOKS_PER_TIMEOUT = 30
_LEASE = 2 / 3
"""The part of the time-out after which a process without a sign stops itself."""
_GRACE = 1 / 6
"""The part of the time-out that it has for that, before it ends hard."""
LAST_WORD_LIMIT_S = 5.0


class Heartbeat:
    """Beats in a thread of its own while a run works, and watches the time in another.

    Args:
        instance: The instance that the run belongs to; the thread opens it anew.
        run: The run.
        timeout_s: The `heartbeat_timeout_s` of the group.
        limit_s: For how long the run may work, before it interrupts itself: a failed attempt.

    Attributes:
        says: What each sign says besides that the run lives, in one word.
        on_cancel: Hears again and again that Dagster shows the run as being cancelled. Called by
            the thread that beats.
        has_lost_its_work: Whether what the steps worked with has ended under them, at their end.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        run: dg.DagsterRun,
        *,
        timeout_s: float,
        limit_s: float = float("inf"),
    ) -> None:
        self._instance = instance
        self._run = run
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._works_since = float("inf")
        self.interval_s = timeout_s / _BEATS_PER_TIMEOUT
        self._number = 0
        self._claims: Collection[Claimed] = ()
        self._beats = count()
        self._beating = threading.Lock()
        self.says: Callable[[], str] = str
        self.on_cancel: Callable[[], None] = lambda: None
        self.has_lost_its_work: Callable[[], bool] = bool
        self._process = process.identity()
        self._beaten_at = float("-inf")
        self._reporting_since: float | None = None
        self._interrupted_at: float | None = None
        self._interrupted_because = ""
        self._is_cut_off = False
        self._is_told_to_end = False
        self._has_stopped = False
        self._has_own_process = process.is_of_one_run()
        self._finished, self._told, self._over = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._wake = threading.Event()

    def begin(self) -> None:
        """Give the first sign of life. From here on only a proof ends the run.

        It comes before the process looks whether it may work: a member that sees no mark of a run
        that has ended in Dagster knows that this process will look later, and find that end. The
        mark comes behind the sign, so that a process that can write only one of them, and fails,
        has not begun.

        Raises:
            IllegalStateError: The run is not in Dagster, or another process has begun on it.
        """
        self._number = self._check_that_it_is_there().storage_id
        if RunEvent.BEGAN in run_events_of(self._instance, self._run.run_id):
            # Without a sign of life or a word that it refuses: the run counts as dead, what that
            # process has begun elsewhere is ended, and the batch is requested again.
            msg = (
                f"run {self._run.run_id} was resumed, and its first process may have left work "
                "behind: it ends, and its batch comes again in a run of its own"
            )
            raise IllegalStateError(msg)
        process.claim_children(self._run.run_id)
        self.beat(self._instance)
        record_run_event(self._instance, self._run, RunEvent.BEGAN)

    @property
    def number(self) -> int:
        """Where the run gives its signs of life."""
        return self._number

    @property
    def interrupted_because(self) -> str:
        """Why the run must not go on; empty as long as it may."""
        return self._interrupted_because

    def why_too_late(self) -> str | None:
        """Why others may take this run for dead although it has not begun to work, or None."""
        silence = self._silence()
        return f"it {silence}, so others may do its work" if silence else None

    def note_work(self, claims: Collection[Claimed]) -> None:
        """Note what this run works on, from here on.

        The note shows its work to the members even when the run is deleted.

        Raises:
            IllegalStateError: The run was deleted before that.
        """
        RangeOwners(self._instance).write(
            RangeOwner(self._run.run_id, self._number, is_finished=False), claims
        )
        self._claims = claims
        self._check_that_it_is_there()

    def _check_that_it_is_there(self) -> dg.RunRecord:
        record = self._instance.get_run_record_by_id(self._run.run_id)
        if record is None:
            msg = f"run {self._run.run_id} is not in Dagster any more: nothing is to be done"
            raise IllegalStateError(msg)
        return record

    def __enter__(self) -> Self:
        ref = self._instance.get_ref()
        self._works_since = boot_clock.seconds()
        for name, target in (
            ("heartbeat", lambda: self._keep_beating(ref)),
            ("lease", self._keep_watch),
        ):
            threading.Thread(
                target=target, name=f"{name} of {self._run.run_id}", daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say that the steps are done.

        Raises:
            DagsterExecutionInterruptedError: Others may do the work of this run by now, so it must
                not end as a success.
        """
        self._is_told_to_end = isinstance(error, dg.DagsterExecutionInterruptedError)
        self._finished.set()
        self._see_to_lease()
        self._wake.set()
        # A storage that hangs must not keep a run from ending. Without this word a member waits for
        # the time-out.
        self._told.wait(LAST_WORD_LIMIT_S)
        if not self._has_own_process:
            process.disown_children()
            self._over.set()
            self._wake.set()
        if self._interrupted_because:
            # Dagster takes any other error of a resource that ends for a note, and the run for a
            # success.
            msg = (
                f"run {self._run.run_id} {self._interrupted_because}, so others may do its work: "
                "its output does not count"
            )
            raise dg.DagsterExecutionInterruptedError(msg)

    def _keep_beating(self, ref: dg.InstanceRef) -> None:
        while not self._over.is_set():
            with self._failures_logged(), dg.DagsterInstance.from_ref(ref) as instance:
                while not self._over.is_set():
                    self._turn(instance)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Log what the storage refuses, and pause: it may be away for a moment.

        If it stays away, the lease ends the run.
        """
        try:
            yield
        except Exception:
            logger.warning("run %s could not give a sign of life", self._run.run_id, exc_info=True)
            self._pause()

    def _turn(self, instance: dg.DagsterInstance) -> None:
        """Look at the run, beat when it is time, and say that the steps are done."""
        # First: what Dagster says of the run must not be older than that.
        is_finished = self._finished.is_set()
        run = instance.get_run_by_id(self._run.run_id)
        works = run is not None and run.status in _WORKING
        if run is not None and run.status is dg.DagsterRunStatus.CANCELING:
            self.on_cancel()
            self._stop_if_asked(instance)
        # A process that wakes up does not renew its lease: a member may have ended its run.
        if (
            not self._see_to_lease()
            and works
            and boot_clock.seconds() - self._beaten_at >= self.interval_s
        ):
            self.beat(instance)
        has_ended = run is None or run.status not in {*_WORKING, dg.DagsterRunStatus.SUCCESS}
        if has_ended and not self._told.is_set():
            self._interrupt(
                f"is {run.status.value} in Dagster" if run else "was deleted from Dagster"
            )
        if is_finished and not self._told.is_set():
            self._tell(instance, run)
        if self._told.is_set() and not works:
            self._over.set()
        self._pause()

    def _stop_if_asked(self, instance: dg.DagsterInstance) -> None:
        """Interrupt the steps, once, if a member has asked for that."""
        if (
            not self._has_stopped
            and not self._finished.is_set()
            and RunEvent.STOP in run_events_of(instance, self._run.run_id)
        ):
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _tell(self, instance: dg.DagsterInstance, run: dg.DagsterRun | None) -> None:
        if run is not None:
            if self._is_cut_off:
                record_run_event(instance, run, RunEvent.TAKEN_BACK)
            elif self._was_told_to_end(instance, run):
                record_run_event(instance, run, RunEvent.INTERRUPTED)
            record_run_event(instance, run, RunEvent.FINISHED)
        if self._claims:
            RangeOwners(instance).finish(self._run.run_id, self._number, self._claims)
        self._told.set()

    def _was_told_to_end(self, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
        """Whether a signal, or the end of their Spark, ended the steps of a run nobody cancelled.

        Dagster notes a cancellation before it sends the signal, and a process that interrupts
        itself knows why.
        """
        return (
            run.status is dg.DagsterRunStatus.STARTED
            and not self._interrupted_because
            and (
                self._is_told_to_end
                or self.has_lost_its_work()
                or signals.has_ended_a_step(instance, self._run.run_id)
            )
        )

    def beat(self, instance: dg.DagsterInstance) -> None:
        """Give a sign now. Any thread may do so."""
        with self._beating:  # an older sign must not be written over a newer one
            # A member may see the sign from here on, whenever the answer comes.
            asked_at = boot_clock.seconds()
            number = f"{next(self._beats)}/{self._timeout_s}"
            words = (number, self.says(), self._process)
            Heartbeats(instance).give(self._run, self._number, " ".join(filter(None, words)))
            self._beaten_at = asked_at

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report something to Dagster in the thread that works.

        A storage that hangs there is as good as one that takes no sign of life: that thread does
        not come back, and hears no signal, while others beat over connections of their own.
        """
        self._reporting_since = boot_clock.seconds()
        try:
            yield
        finally:
            self._reporting_since = None

    def _pause(self) -> None:
        self._wake.wait(self._timeout_s / _LOOKS_PER_TIMEOUT)
        self._wake.clear()

    def _keep_watch(self) -> None:
        while not self._over.wait(self._timeout_s / _LOOKS_PER_TIMEOUT):
            is_silent = self._see_to_lease()
            self._see_to_limit()
            if (
                self._interrupted_at is None
                or boot_clock.seconds() - self._interrupted_at < _GRACE * self._timeout_s
            ):
                continue
            if self._has_own_process and (is_silent or not self._told.is_set()):
                logger.critical(
                    "run %s was interrupted and has not ended: its process is killed",
                    self._run.run_id,
                )
                process.end_hard()

    def _see_to_lease(self) -> bool:
        """Interrupt this process if its lease is over; the answer is whether it is."""
        silence = self._silence()
        if silence and self._interrupted_at is None:
            self._is_cut_off = True
            self._interrupt(silence)
        return silence != ""

    def _see_to_limit(self) -> None:
        if self._finished.is_set() or boot_clock.seconds() - self._works_since < self._limit_s:
            return
        self._interrupt(f"was at work for more than batch_timeout_s={self._limit_s:g}")

    def _silence(self) -> str:
        """What is to be said of this run when its lease is over; empty while it is not."""
        now, since = boot_clock.seconds(), self._reporting_since
        silence_s, hangs_s = now - self._beaten_at, 0.0 if since is None else now - since
        if silence_s >= _LEASE * self._timeout_s:
            return f"could give no sign of life for {silence_s:.0f} s"
        if hangs_s >= _LEASE * self._timeout_s:
            return f"waited {hangs_s:.0f} s for Dagster's storage to take a report"
        return ""

    def _interrupt(self, why: str) -> None:
        if self._interrupted_at is None:
            self._interrupted_at, self._interrupted_because = boot_clock.seconds(), why
            logger.error(
                "run %s %s, so others may do its work: it stops now", self._run.run_id, why
            )
            if not self._finished.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

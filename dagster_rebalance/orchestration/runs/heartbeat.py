"""The heartbeat of a run, which is the run's side of its lease.

If a member reads no new heartbeat for `heartbeat_timeout_s`, it requests the batch again. The run's
process must end before that. If it could send no heartbeat for two thirds of that time, by its own
clock, or if its run has ended in Dagster or was deleted, it interrupts itself and its Spark jobs,
and exits a sixth of that time later. The thread that watches the time makes no blocking call.
`core.runs.liveness` is the member's side.
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
from dagster_rebalance.orchestration.runs import process, signals
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.range_owners import RangeOwners
from dagster_rebalance.orchestration.storage.run_tags import (
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
_CHECKS_PER_TIMEOUT = 30
_LEASE = 2 / 3
"""The part of the timeout after which a process without a heartbeat interrupts itself."""
_GRACE = 1 / 6
"""The part of the timeout between that interrupt and the exit of the process."""
LAST_EVENT_LIMIT_S = 5.0
"""How long the end of a run waits for its last event to be recorded."""


class Heartbeat:
    """Sends heartbeats in one thread while a run works, and watches the time in another thread.

    A process that executes only this run sends heartbeats after its steps, too, until Dagster shows
    the end of the run.

    Args:
        instance: The instance of the run; the thread opens its own connection.
        run: The run.
        timeout_s: The `heartbeat_timeout_s` of the group.
        limit_s: Time limit of the steps. A run that exceeds it interrupts itself: a failed attempt.

    Attributes:
        partitions: Returns the partitions for each heartbeat, as one word.
        on_cancel: Called repeatedly by the heartbeat thread while the run is CANCELING.
        has_lost_its_work: Whether Spark had died at the end of the steps.
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
        self.partitions: Callable[[], str] = str
        self.on_cancel: Callable[[], None] = lambda: None
        self.has_lost_its_work: Callable[[], bool] = bool
        self._process = process.identity()
        self._beaten_at = float("-inf")
        self._reporting_since: float | None = None
        self._interrupted_at: float | None = None
        self._interrupted_because = ""
        self._is_cut_off = False
        self._is_interrupted = False
        self._has_stopped = False
        self._has_own_process = process.is_of_one_run()
        self._finished = threading.Event()
        self._recorded = threading.Event()
        self._over = threading.Event()
        self._wake = threading.Event()

    def begin(self) -> None:
        """Send the first heartbeat. From then on the run counts as finished only with proof.

        The heartbeat precedes the start check: if a run has ended in Dagster without BEGAN, the
        start check in its process will still detect that end. BEGAN follows the heartbeat: if only
        the heartbeat can be written, the process has not begun.
        """
        self._number = self._record_in_dagster().storage_id
        if RunEvent.BEGAN in run_events_of(self._instance, self._run.run_id):
            # No heartbeat and no REFUSED: the run counts as dead, the external work of its first
            # process is stopped, and the batch is requested again.
            msg = (
                f"run {self._run.run_id} was resumed, and its first process may have left external "
                "work: this run ends, and a new run is requested for its batch"
            )
            raise IllegalStateError(msg)
        process.claim_children(self._run.run_id)
        self.beat(self._instance)
        record_run_event(self._instance, self._run, RunEvent.BEGAN)

    @property
    def number(self) -> int:
        """The storage id of the run, by which its heartbeats are stored."""
        return self._number

    @property
    def interrupted_because(self) -> str:
        """Why the run must not continue; empty while it may."""
        return self._interrupted_because

    def why_too_late(self) -> str | None:
        """Why members may consider this run dead before its work begins; None if they do not."""
        silence = self._silence()
        return f"it {silence}, so another run may take over its work" if silence else None

    def record_claims(self, claims: Collection[Claimed]) -> None:
        """Record the run as the owner of its ranges, for members to find if the run is deleted."""
        RangeOwners(self._instance).begin(self._run.run_id, self._number, claims)
        self._claims = claims
        self._record_in_dagster()

    def _record_in_dagster(self) -> dg.RunRecord:
        record = self._instance.get_run_record_by_id(self._run.run_id)
        if record is None:
            msg = f"run {self._run.run_id} no longer exists in Dagster, so it processes nothing"
            raise IllegalStateError(msg)
        return record

    def __enter__(self) -> Self:
        ref = self._instance.get_ref()
        self._works_since = process.boot_time_s()
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
        """Record that the steps are done."""
        self._is_interrupted = isinstance(error, dg.DagsterExecutionInterruptedError)
        self._finished.set()
        self._check_lease()
        self._wake.set()
        # A hanging storage must not block the end of a run. Without the event, a member waits for
        # the timeout.
        self._recorded.wait(LAST_EVENT_LIMIT_S)
        if not self._has_own_process:
            process.disown_children()
            self._over.set()
            self._wake.set()
        if self._interrupted_because:
            # With any other error in the teardown of a resource, the run succeeds in Dagster.
            msg = (
                f"run {self._run.run_id} {self._interrupted_because}, so another run "
                "may take over its work: its output does not count"
            )
            raise dg.DagsterExecutionInterruptedError(msg)

    def _keep_beating(self, ref: dg.InstanceRef) -> None:
        while not self._over.is_set():
            with self._failures_logged(), dg.DagsterInstance.from_ref(ref) as instance:
                while not self._over.is_set():
                    self._step(instance)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Log errors of the storage, and pause. During a longer outage, the lease ends the run."""
        try:
            yield
        except Exception:
            logger.warning("run %s could not send a heartbeat", self._run.run_id, exc_info=True)
            self._pause()

    def _step(self, instance: dg.DagsterInstance) -> None:
        """Read the run, send a heartbeat if it is due, and record the end of the steps."""
        # Before the run is read, which must not be older than the end of the steps.
        is_finished = self._finished.is_set()
        run = instance.get_run_by_id(self._run.run_id)
        works = run is not None and run.status in _WORKING
        if run is not None and run.status is dg.DagsterRunStatus.CANCELING:
            self.on_cancel()
            self._interrupt_if_stopped(instance)
        # A process that was suspended does not renew its lease: a member may have ended its run.
        is_due = process.boot_time_s() - self._beaten_at >= self.interval_s
        if not self._check_lease() and works and is_due:
            self.beat(instance)
        has_ended = run is None or run.status not in {*_WORKING, dg.DagsterRunStatus.SUCCESS}
        if has_ended and not self._recorded.is_set():
            self._interrupt(
                f"is {run.status.value} in Dagster" if run else "was deleted from Dagster"
            )
        if is_finished and not self._recorded.is_set():
            self._record_end(instance, run)
        if self._recorded.is_set() and not works:
            self._over.set()
        self._pause()

    def _interrupt_if_stopped(self, instance: dg.DagsterInstance) -> None:
        """Interrupt the steps, once, if a member has recorded STOP."""
        if (
            not self._has_stopped
            and not self._finished.is_set()
            and RunEvent.STOP in run_events_of(instance, self._run.run_id)
        ):
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _record_end(self, instance: dg.DagsterInstance, run: dg.DagsterRun | None) -> None:
        if run is not None:
            if self._is_cut_off:
                record_run_event(instance, run, RunEvent.TAKEN_BACK)
            elif self._was_interrupted(instance, run):
                record_run_event(instance, run, RunEvent.INTERRUPTED)
            record_run_event(instance, run, RunEvent.FINISHED)
        if self._claims:
            RangeOwners(instance).finish(self._run.run_id, self._number, self._claims)
        self._recorded.set()

    def _was_interrupted(self, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
        """Whether a signal or the end of Spark ended the steps of a run that was not cancelled.

        Dagster stores a cancellation before it sends the signal.
        """
        return (
            run.status is dg.DagsterRunStatus.STARTED
            and not self._interrupted_because
            and (
                self._is_interrupted
                or self.has_lost_its_work()
                or signals.has_ended_a_step(instance, self._run.run_id)
            )
        )

    def beat(self, instance: dg.DagsterInstance) -> None:
        """Send a heartbeat now, from any thread."""
        with self._beating:  # an older heartbeat must not replace a newer one
            sent_at = process.boot_time_s()  # from here on a member may read it
            number = f"{next(self._beats)}/{self._timeout_s}"
            parts = (number, self.partitions(), self._process)
            Heartbeats(instance).record(self._run, self._number, " ".join(filter(None, parts)))
            self._beaten_at = sent_at

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report to Dagster in the thread that works.

        A storage that hangs in a report counts as one that accepts no heartbeat: the thread is
        blocked and receives no signal, although the heartbeat thread has its own connection.
        """
        self._reporting_since = process.boot_time_s()
        try:
            yield
        finally:
            self._reporting_since = None

    def _pause(self) -> None:
        self._wake.wait(self._timeout_s / _CHECKS_PER_TIMEOUT)
        self._wake.clear()

    def _keep_watch(self) -> None:
        while not self._over.wait(self._timeout_s / _CHECKS_PER_TIMEOUT):
            is_silent = self._check_lease()
            self._check_limit()
            if (
                self._interrupted_at is None
                or process.boot_time_s() - self._interrupted_at < _GRACE * self._timeout_s
            ):
                continue
            if self._has_own_process and (is_silent or not self._recorded.is_set()):
                logger.critical(
                    "run %s was interrupted and has not ended: its process is killed",
                    self._run.run_id,
                )
                process.end_hard()

    def _check_lease(self) -> bool:
        """Interrupt this process if its lease has expired. Return whether the lease has expired."""
        silence = self._silence()
        if silence and self._interrupted_at is None:
            self._is_cut_off = True
            self._interrupt(silence)
        return silence != ""

    def _check_limit(self) -> None:
        if self._finished.is_set() or process.boot_time_s() - self._works_since < self._limit_s:
            return
        self._interrupt(f"ran for more than batch_timeout_s={self._limit_s:g}")

    def _silence(self) -> str:
        """Return why the lease has expired; empty if it has not."""
        now, since = process.boot_time_s(), self._reporting_since
        silence_s, hangs_s = now - self._beaten_at, 0.0 if since is None else now - since
        if silence_s >= _LEASE * self._timeout_s:
            return f"could send no heartbeat for {silence_s:.0f} s"
        if hangs_s >= _LEASE * self._timeout_s:
            return f"waited {hangs_s:.0f} s for Dagster's storage to accept a report"
        return ""

    def _interrupt(self, why: str) -> None:
        if self._interrupted_at is None:
            self._interrupted_at, self._interrupted_because = process.boot_time_s(), why
            logger.error(
                "run %s %s, so another run may take over its work: it stops now",
                self._run.run_id,
                why,
            )
            if not self._finished.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

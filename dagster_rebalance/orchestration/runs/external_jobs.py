"""External work of a run, such as a job on a cluster, which may outlive the run.

External work counts as finished only when each `ExternalWork` of the user confirms it. A
confirmation may take a minute, and neither a tick nor a run can wait that long. So threads call the
user's code. If the result is not there within `WAIT_S`, the caller gets an error and calls again.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.runs.canceller import RunCanceller, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource

logger = logging.getLogger(__name__)
WAIT_S = 5.0
"""The limit of one wait: a tick has a minute for all dead runs together."""
FRESH_S = 600.0
"""The age up to which a confirmation counts for a dead run, which begins no more work. Dead runs
are checked again after a quarter of their timeout, and an answer may take longer than `WAIT_S`."""


class ExternalWork(Protocol):
    """Stops the work that a run has begun outside its process, such as jobs of a Pipes client.

    Before the batch of an unsuccessful run is requested again, a process of the group (a code
    server or a streaming run) calls `stop`. Calls may be concurrent, and may be repeated for a run
    without work. `ExternalJobs` implements the waiting.
    """

    def stop(self, run_id: str) -> None:
        """Stop all external work of a run, and return once none is left.

        Args:
            run_id: The Dagster run. A streaming run also calls this for itself after a batch that
                did not succeed, so do not end the process of the run.

        Raises:
            Exception: Any error means that the work may continue. The batch waits, and the call is
                repeated.
        """


class ExternalJobs(ABC):
    """External work in jobs that can be cancelled, and listed by the id of their run.

    Example:
        ```python
        class Jobs(ExternalJobs):
            def active(self, run_id: str) -> list[Job]:
                return cluster().jobs(name=run_id, states=["queued", "running", "cancelling"])

            def cancel(self, job: Job) -> None:
                cluster().cancel(job.id)
        ```

    Attributes:
        limit_s: The timeout of one `stop`, in seconds. A failed call is repeated.
        look_s: The interval at which `stop` lists the jobs, in seconds.
    """

    limit_s: float = 100.0
    look_s: float = 2.0

    @abstractmethod
    def active(self, run_id: str) -> Iterable[Any]:
        """List all jobs of a run that may be active, including jobs that are being cancelled.

        An error means that the jobs are unknown: the caller assumes that some are active.
        """

    @abstractmethod
    def cancel(self, job: Any) -> None:  # noqa: ANN401 - whatever `active` lists
        """Request the end of a job, without waiting. Called again while the job is listed."""

    def stop(self, run_id: str) -> None:
        """Cancel all jobs of a run, and wait until none is listed.

        Raises:
            TimeoutError: Jobs are still listed after `limit_s`.
        """
        until = time.monotonic() + self.limit_s
        while jobs := list(self.active(run_id)):
            if time.monotonic() >= until:
                msg = (
                    f"{len(jobs)} external jobs of run {run_id} are still active after "
                    f"{self.limit_s:g} s"
                )
                raise TimeoutError(msg)
            for job in jobs:
                self.cancel(job)
            time.sleep(self.look_s)


class WorkStopper:
    """Stops all external work of a run."""

    def __init__(
        self,
        works: Sequence[ExternalWork],
        *,
        wait_s: float = WAIT_S,
        start: Callable[[str, Callable[[], None]], None] = in_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._works = works
        self._wait_s = wait_s
        self._clock = clock
        self._changed = threading.Condition()
        self._stopped_since: dict[str, float] = {}
        """The start of each call that succeeded."""
        self._errors: dict[str, Exception] = {}
        self._threads = RunCanceller(self, logger.warning, lambda _run_id: None, start, clock)

    def __call__(self, run_id: str, *, since: float | None = None) -> None:
        """Return once all external work of a run is stopped.

        Args:
            run_id: The run.
            since: A time of the clock. Results of calls before it are ignored, because the run has
                begun more work since then. None for a dead run, which begins no more work.
        """
        oldest = self._clock() - FRESH_S if since is None else since
        with self._changed:
            if self._is_stopped(run_id, oldest):
                return
            self._errors.pop(run_id, None)
        self._threads.end_dead({run_id: ""})
        with self._changed:
            self._changed.wait_for(
                lambda: run_id in self._stopped_since or run_id in self._errors, self._wait_s
            )
            if self._is_stopped(run_id, oldest):
                return
            error = self._errors.pop(run_id, None)
        if error is not None:
            raise error
        names = ", ".join(type(work).__name__ for work in self._works)
        msg = (
            f"the external work of run {run_id} is not stopped yet: {names} did not answer within "
            f"{self._wait_s:g} s. The call is repeated"
        )
        raise TimeoutError(msg)

    def _is_stopped(self, run_id: str, oldest: float) -> bool:
        return self._stopped_since.pop(run_id, float("-inf")) >= oldest

    # RunsToEnd, called by the threads

    def end_dead(self, run_id: str, _heartbeat: str) -> bool:
        """Stop the external work of a run."""
        begun_at = self._clock()
        try:
            for work in self._works:
                work.stop(run_id)
        except Exception as error:
            with self._changed:
                self._errors[run_id] = error
                self._changed.notify_all()
            raise
        with self._changed:
            self._stopped_since[run_id] = begun_at
            self._changed.notify_all()
        return True

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Do nothing: a run stops its external work when it is interrupted."""


def stopper_of(name: str, external_work: Sequence[ExternalWork]) -> WorkStopper | None:
    """Return the stopper of external work of the definitions `name`; None if there is none."""
    if not isinstance(external_work, Sequence):
        msg = f"external_work of {name} is a {type(external_work).__name__}: give a list of them"
        raise ConfigurationError(msg)
    for work in external_work:
        if isinstance(work, type) or not callable(getattr(work, "stop", None)):
            shown = work.__name__ if isinstance(work, type) else type(work).__name__
            msg = (
                f"external_work of {name} has {shown}, which is not an object with a method "
                "stop(run_id): see ExternalWork"
            )
            raise ConfigurationError(msg)
    return WorkStopper(tuple(external_work)) if external_work else None


def stopping(
    spark: KafkaSparkResource | None, stopper: WorkStopper | None
) -> Callable[[str], None] | None:
    """Return a function that stops all work of a run that may outlive its process, or None."""
    if spark is None or stopper is None:
        return spark.stop_abandoned_work if spark else stopper

    def stop(run_id: str) -> None:
        try:
            stopper(run_id)
        finally:  # even if the external work cannot be stopped
            spark.stop_abandoned_work(run_id)

    return stop

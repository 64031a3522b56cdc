"""Work that a run has begun elsewhere, such as a job on a cluster, and that may outlive the run.

Owns when that work counts as over: only when everything that the user names has said so. Asking for
it may take a minute, which neither a tick of a sensor nor a run may spend: so it is asked in
threads of its own, and whoever needs the answer hears after a moment that there is none yet.
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
"""How long an answer is waited for: a tick has a minute for all dead runs together."""
FRESH_S = 600.0
"""How old a question may be whose answer counts for a dead run. Such a run is looked at again after
a quarter of its time-out, and each answer may take longer than it is waited for."""


class ExternalWork(Protocol):
    """What can end the work that a run has begun elsewhere, such as jobs of a Pipes client.

    It is asked before the batch of a run that did not succeed is offered again, by any process of
    the group: by the code server, and by streaming runs. Several may ask at once, and again for a
    run that has nothing left. `ExternalJobs` has the waiting already.
    """

    def stop(self, run_id: str) -> None:
        """End all work of a run, and return only once nothing of it works any more.

        Args:
            run_id: The Dagster run. A streaming run asks for itself, too, after a batch that did
                not succeed, and goes on: so it must not end the run's own process.

        Raises:
            Exception: Any: the work may go on. The batch waits, and this is asked again.
        """


class ExternalJobs(ABC):
    """External work in jobs that can be listed and cancelled by the run that has begun them.

    Example:
        ```python
        class Jobs(ExternalJobs):
            def active(self, run_id: str) -> list[Job]:
                return cluster().jobs(name=run_id, states=["queued", "running", "cancelling"])

            def cancel(self, job: Job) -> None:
                cluster().cancel(job.id)
        ```

    Attributes:
        limit_s: For how long one `stop` waits; it is asked again after it has failed.
        look_s: How often it lists the jobs meanwhile.
    """

    limit_s: float = 100.0
    look_s: float = 2.0

    @abstractmethod
    def active(self, run_id: str) -> Iterable[Any]:
        """List all jobs of a run that may still work, those that are being cancelled included.

        Any error means that they may.
        """

    @abstractmethod
    def cancel(self, job: Any) -> None:  # noqa: ANN401 - whatever `active` lists
        """Ask for the end of a job, and need not wait. Called again while it is listed."""

    def stop(self, run_id: str) -> None:
        """Cancel all jobs of a run, and wait until none is listed any more.

        Raises:
            TimeoutError: Some still are.
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
    """Asks everything that may have work of a run.

    Args:
        works: What the user has named.
        wait_s: How long one call waits for the answer.
        start: Starts a thread.
        clock: A monotonic clock.
    """

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
        self._answered = threading.Condition()
        self._asked_at: dict[str, float] = {}
        """When those questions were asked whose answer was that the work is over."""
        self._errors: dict[str, Exception] = {}
        self._ender = RunCanceller(self, logger.warning, lambda _run_id: None, start, clock)

    def __call__(self, run_id: str, *, since: float | None = None) -> None:
        """Return once nothing of a run works any more.

        An earlier question that was answered meanwhile counts.

        Args:
            run_id: The run.
            since: By the clock: an answer to an earlier question says nothing, because the run has
                begun more since then. None for a dead run, which begins nothing.

        Raises:
            TimeoutError: There is no answer yet. Call again: the question stands.
            Exception: Whatever the user's code has raised.
        """
        least = self._clock() - FRESH_S if since is None else since
        with self._answered:
            if self._is_over(run_id, least):
                return
            self._errors.pop(run_id, None)
        self._ender.end_dead({run_id: ""})
        with self._answered:
            self._answered.wait_for(
                lambda: run_id in self._asked_at or run_id in self._errors, self._wait_s
            )
            if self._is_over(run_id, least):
                return
            error = self._errors.pop(run_id, None)
        if error is not None:
            raise error
        names = ", ".join(type(work).__name__ for work in self._works)
        msg = (
            f"the external work of run {run_id} is not over yet: {names} did not answer within "
            f"{self._wait_s:g} s. It is asked again"
        )
        raise TimeoutError(msg)

    def _is_over(self, run_id: str, least: float) -> bool:
        return self._asked_at.pop(run_id, float("-inf")) >= least

    # RunsToEnd

    def end_dead(self, run_id: str, _sign: str) -> bool:
        """Ask, and wait for the answer. Called by the threads of the run ender."""
        asked_at = self._clock()
        try:
            for work in self._works:
                work.stop(run_id)
        except Exception as error:
            with self._answered:
                self._errors[run_id] = error
                self._answered.notify_all()
            raise
        with self._answered:
            self._asked_at[run_id] = asked_at
            self._answered.notify_all()
        return True

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel nothing: a run ends its own work when it is interrupted."""


def stopper_of(name: str, external_work: Sequence[ExternalWork]) -> WorkStopper | None:
    """What asks the user's code; None where there is none.

    Raises:
        ConfigurationError: Something given has no method `stop`, which is found out only when a
            run is dead otherwise.
    """
    if not isinstance(external_work, Sequence):
        msg = f"external_work of {name} is a {type(external_work).__name__}: give a list of them"
        raise ConfigurationError(msg)
    for work in external_work:
        if isinstance(work, type) or not callable(getattr(work, "stop", None)):
            shown = work.__name__ if isinstance(work, type) else type(work).__name__
            msg = (
                f"external_work of {name} has {shown}, which is no object with a method "
                "stop(run_id): see ExternalWork"
            )
            raise ConfigurationError(msg)
    return WorkStopper(tuple(external_work)) if external_work else None


def stopping(
    spark: KafkaSparkResource | None, stopper: WorkStopper | None
) -> Callable[[str], None] | None:
    """What stops all work of a run that may outlive its process; None where there can be none."""
    if spark is None or stopper is None:
        return spark.stop_abandoned_work if spark else stopper

    def stop(run_id: str) -> None:
        try:
            stopper(run_id)
        finally:  # also while the other one cannot be reached
            spark.stop_abandoned_work(run_id)

    return stop

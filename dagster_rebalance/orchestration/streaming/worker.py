"""The worker of a streaming run, between the thread of its member and the thread that works.

Owns that the two agree on what is at work. The member begins a batch and hears how it ended; the
worker takes it, and wakes the member when it is done, so that nothing waits for a look. To the
member it is also the list of runs: it knows its own batches itself, and asks Dagster for those of
others.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.events import RunsRead
from dagster_rebalance.core.runs.failed_attempt import FailedAttempt, with_error
from dagster_rebalance.core.runs.stream_batch import Outcome, StreamBatch, is_batch_of
from dagster_rebalance.core.streaming.stream_worker import Worker, WorkerAction

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.offsets import Log, TopicPartition
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.runs.batch_request import BatchRequest
    from dagster_rebalance.core.streaming.stream_worker import BegunBatch
    from dagster_rebalance.orchestration.ports import RunsPort


_ERRORS_KEPT = 1_000
_LONG_S = 10.0
"""The age of a batch that works for longer is stored in Dagster, for commands of operators."""


class StreamWorker:
    """Plays `WorkPort` and `RunsPort` for the member of a streaming run.

    Args:
        run_id: The run.
        others: The runs of others.
        wake: Lets the member turn at once. Called by any thread.
        interrupt: Ends the batch at work before its time. Called by any thread.
        beat: Gives a sign of life, which names `may_work_on`.
        keep: Stores what a batch has failed with, before others hear that it has failed. Called by
            the worker.
        give_up: Lets the run leave and end, because a body does not end. Called by the member's
            thread.
        limit_s: For how long a batch may be at work.
        patience_s: For how long an interrupted body may take to end.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        run_id: str,
        others: RunsPort,
        *,
        wake: Callable[[], None],
        interrupt: Callable[[], None],
        beat: Callable[[], None],
        keep: Callable[[BegunBatch, FailedAttempt], None] = lambda _batch, _failed: None,
        give_up: Callable[[], None] = lambda: None,
        limit_s: float = float("inf"),
        patience_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self._others = others
        self._wake = wake
        self._interrupt = interrupt
        self._beat = beat
        self._keep = keep
        self.may_work_on: frozenset[TopicPartition] = frozenset()
        self._said: frozenset[TopicPartition] | None = None
        self._give_up = give_up
        self._limit_s = limit_s
        self._clock = clock
        self._own = Worker(run_id, limit_s=limit_s, patience_s=patience_s)
        self._aged = ""
        self._lock = threading.Lock()
        self._todo: SimpleQueue[BegunBatch | None] = SimpleQueue()
        self._news: SimpleQueue[RunsRead] = SimpleQueue()
        self._failed: dict[str, FailedAttempt] = {}

    # For the worker

    def next(self, timeout_s: float) -> BegunBatch | None:
        """Wait for the next batch; None when there is none within the time, or ever again."""
        with suppress(Empty):
            return self._todo.get(timeout=timeout_s)
        return None

    def end(self, outcome: Outcome, error: str = "") -> None:
        """Say how the batch ended, with what it failed with."""
        with self._lock:
            batch = self._own.at_work
        if batch is None:
            return
        if batch.is_late and outcome is Outcome.INTERRUPTED:
            error = f"it was interrupted after batch_timeout_s={self._limit_s:g}"
        began = StreamBatch.read(batch.batch_id)
        failed = FailedAttempt(self.run_id, began.attempt if began else 0, error)
        if error:
            self._keep(batch, failed)
        with self._lock:
            self._own.end(outcome)
            if error:
                kept = list(self._failed.items())[1 - _ERRORS_KEPT :]
                self._failed = {**dict(kept), batch.batch_id: failed}
            self._news.put(self._read_own(batch.batch_id))
        self._wake()

    @property
    def is_late(self) -> bool:
        """Whether the batch at work has taken too long, which is a failed attempt."""
        with self._lock:
            return self._own.at_work is not None and self._own.at_work.is_late

    def close(self) -> None:
        """Wake the worker: no batch follows."""
        self._todo.put(None)

    # WorkPort

    def begin(
        self,
        batch_requests: Iterable[BatchRequest],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
    ) -> RunsRead | None:
        """Begin a batch if none is at work."""
        with self._lock:
            batch = self._own.begin(batch_requests, claimed, log_of, self._clock())
            if batch is None:
                return None
            self._todo.put(batch)
            return self._read_own(batch.batch_id)

    def watch(self) -> None:
        """Interrupt a batch that takes too long, and end the run where that does not help."""
        with self._lock:
            next_action = self._own.next_action(self._clock())
        if next_action is WorkerAction.INTERRUPT:
            self._interrupt()
        elif next_action is WorkerAction.END_PROCESS:
            self._give_up()

    def stop(self, run_ids: Collection[str]) -> None:
        """Note that a person has stopped partitions that some runs work on."""
        if self.run_id in run_ids:
            with self._lock:
                self._own.stop()

    def ended(self) -> Iterator[RunsRead]:
        """Take what became of batches; each is told once."""
        while not self._news.empty():
            yield self._news.get()

    def known(self, batch_ids: Collection[str], claims: Iterable[Claimed]) -> tuple[RunSeen, ...]:
        """What the worker knows of its own batches, without Dagster."""
        with self._lock:
            return self._read(batch_ids, claims)

    def says_all_but(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether others have heard something else than on which partitions it may work."""
        return self._said != self._with_work(partitions) or self._without_age is not None

    def say(self, partitions: Collection[TopicPartition]) -> None:
        """Tell others that it may work on these partitions, and on those of the batch at work.

        They are told first how the work ended that they must know of: whoever hears that the run
        does not work on a partition any more, and finds nothing of its claims, does them again.
        """
        says = self._with_work(partitions)
        ended = self.untold  # later than `says`: what is not at work there has ended by now
        if ended:
            self.tell(ended)
            with self._lock:
                self._own.mark_reported(ended)
        self.may_work_on = says
        self._said = None  # others may have heard it although the beat fails
        self._beat()
        self._said = says
        long = self._without_age
        if long is not None:
            self._others.tell_age(self.run_id, long.batch_id, self._clock() - long.begun_at)
            self._aged = long.batch_id

    @property
    def _without_age(self) -> BegunBatch | None:
        """The batch at work, if it has been that for long, and others do not know it."""
        with self._lock:
            batch = self._own.at_work
        if batch is None or batch.batch_id == self._aged:
            return None
        return batch if self._clock() - batch.begun_at >= _LONG_S else None

    def _with_work(self, partitions: Collection[TopicPartition]) -> frozenset[TopicPartition]:
        with self._lock:
            batch = self._own.at_work
            ranges = batch.ranges if batch is not None else ()
            return frozenset(partitions).union(range_.topic_partition for range_ in ranges)

    def leave(self, claims: Iterable[Claimed]) -> None:
        """Note that others may find these claims: `say` tells how the work on them ended."""
        with self._lock:
            self._own.abandon(claims)

    @property
    def untold(self) -> Mapping[Claimed, Outcome]:
        """What others have to be told of claims that they may find."""
        with self._lock:
            return self._own.unreported

    # RunsPort

    def read(
        self, batch_ids: Iterable[str], *, live_too: bool = False, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSeen, ...]:
        """The own work from memory, and all runs from Dagster.

        A sensor that had a partition meanwhile may have requested runs for a batch of this one.
        """
        wanted, known = tuple(batch_ids), tuple(claims)
        theirs = [claim for claim in known if not is_batch_of(claim[0], self.run_id)]
        others = self._others.read(wanted, live_too=live_too, claims=theirs)
        with self._lock:
            return (*self._read(wanted, known), *others)

    def why_failed(self, run_id: str, batch_id: str) -> str:
        """What a run failed with on a batch."""
        if run_id == self.run_id:
            failed = self._failed.get(batch_id)
            return failed.error if failed else "the error is in the log of the run"
        return self._others.why_failed(run_id, batch_id)

    def tell(self, outcomes: Mapping[Claimed, Outcome]) -> None:
        """Tell whoever finds these claims how the work on them ended."""
        self._others.tell(outcomes)

    def tell_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Tell for how long a streaming run has worked on a batch."""
        self._others.tell_age(run_id, batch_id, seconds)

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel a run; of this one, the batch at work."""
        if run_id != self.run_id:
            self._others.cancel(run_id, only_unstarted=only_unstarted)
        elif not only_unstarted:
            with self._lock:
                self._own.interrupt(self._clock())
            self._interrupt()

    def end_dead(self, run_id: str, sign: str) -> bool:
        """End the run of another process."""
        return self._others.end_dead(run_id, sign)

    def _read_own(self, batch_id: str) -> RunsRead:
        return RunsRead(frozenset({batch_id}), self._read([batch_id], ()), is_own=True)

    def _read(self, batch_ids: Iterable[str], claims: Iterable[Claimed]) -> tuple[RunSeen, ...]:
        return tuple(
            seen
            for run in self._own.read(batch_ids, claims)
            for seen in with_error((run,), self._failed.get(run.batch_id))
        )

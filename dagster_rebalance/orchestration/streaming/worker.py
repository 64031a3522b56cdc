"""The worker of a streaming run, between the member's thread and the processing thread.

The member begins a batch. The processing thread takes the batch, and wakes the member when it has
ended. The worker also implements the run port of the member: it reports its own batches from
memory, and reads other runs from Dagster.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.events import RunsRead
from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.bisection import Part
from dagster_rebalance.core.runs.retry import FailedAttempt, with_error
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch, is_batch_of
from dagster_rebalance.core.streaming.batch_tracker import BatchTracker, WorkerAction

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.offsets import Log, OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot
    from dagster_rebalance.core.streaming.batch_tracker import BegunBatch
    from dagster_rebalance.orchestration.ports import RunsPort


_ERRORS_KEPT = 1_000
_LONG_S = 10.0
"""If a batch runs for longer, its age is stored in Dagster for operators' commands."""


class StreamWorker:
    """Implements `WorkPort` and `RunsPort` for the member of a streaming run.

    Any thread calls `wake` and `interrupt`. `beat` stores a heartbeat, which names
    `active_partitions`. `keep` shows and stores the error of a batch before its failure is
    reported. A part of several offsets is halved next, so `note` stores its error only if another
    member may find the part. `give_up` ends the run if an interrupted batch does not end within
    `patience_s`.
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
        note: Callable[[Sequence[OffsetRange], FailedAttempt], None] = lambda *_: None,
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
        self._note = note
        self.active_partitions: frozenset[TopicPartition] = frozenset()
        self.held: frozenset[TopicPartition] = frozenset()
        self._covered: tuple[object, object, frozenset[TopicPartition]] = (None, (), frozenset())
        self._reported: frozenset[TopicPartition] | None = None
        self._give_up = give_up
        self._limit_s = limit_s
        self._clock = clock
        self._own = BatchTracker(run_id, limit_s=limit_s, patience_s=patience_s)
        self._age_recorded = ""
        self._reports = 0
        self._lock = threading.Lock()
        self._batches: SimpleQueue[BegunBatch | None] = SimpleQueue()
        self._results: SimpleQueue[RunsRead] = SimpleQueue()
        self._failed: dict[str, FailedAttempt] = {}
        self._unnoted: dict[str, tuple[Sequence[OffsetRange], FailedAttempt]] = {}

    # For the processing thread

    def next(self, timeout_s: float) -> BegunBatch | None:
        """Wait for the next batch; None after the timeout, or when no batch follows."""
        with suppress(Empty):
            return self._batches.get(timeout=timeout_s)
        return None

    def end(
        self,
        outcome: BatchOutcome,
        error: str = "",
        cause: FailureCause = FailureCause.UNKNOWN,
    ) -> None:
        """Report the outcome of the current batch to the member, with the error if it failed."""
        with self._lock:
            batch = self._own.at_work
        if batch is None:
            return
        if batch.is_late and outcome is BatchOutcome.INTERRUPTED:
            error = f"it was interrupted after batch_timeout_s={self._limit_s:g}"
        began = StreamBatch.parse(batch.batch_id)
        failed = FailedAttempt(self.run_id, began.attempt if began else 0, error, cause)
        is_halved = cause is FailureCause.RECORDS and _is_divisible_part(batch)
        if error and not is_halved:
            self._keep(batch, failed)
        with self._lock:
            self._own.end(outcome)
            if error:
                kept = list(self._failed.items())[1 - _ERRORS_KEPT :]
                self._failed = {**dict(kept), batch.batch_id: failed}
            if is_halved:
                self._unnoted[batch.batch_id] = (batch.ranges, failed)
            self._results.put(self._read_own(batch.batch_id))
        self._wake()

    @property
    def is_late(self) -> bool:
        """Whether the current batch has exceeded its limit, which is a failed attempt."""
        with self._lock:
            return self._own.at_work is not None and self._own.at_work.is_late

    def close(self) -> None:
        """Wake the processing thread: no batch follows."""
        self._batches.put(None)

    # WorkPort

    def begin(
        self,
        batch_requests: Iterable[BatchRequest],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
    ) -> RunsRead | None:
        """Begin a batch if none is being processed."""
        with self._lock:
            batch = self._own.begin(batch_requests, claimed, log_of, self._clock())
            if batch is None:
                return None
            unnoted = self._unnoted.items()
            self._unnoted = {known: attempt for known, attempt in unnoted if known in claimed}
            self._batches.put(batch)
            return self._read_own(batch.batch_id)

    def watch(self) -> None:
        """Interrupt a batch that takes too long, and end the run if the batch does not end."""
        with self._lock:
            next_action = self._own.next_action(self._clock())
        if next_action is WorkerAction.INTERRUPT:
            self._interrupt()
        elif next_action is WorkerAction.END_PROCESS:
            self._give_up()

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        """Note the partitions that are to be released, and wake the processing thread."""
        # In each turn of the member loop, so equal sets of thousands must not be compared.
        if partitions is not self.held and partitions != self.held:
            self.held = partitions
            self._batches.put(None)

    def stop(self, run_ids: Collection[str]) -> None:
        """Record that a directive has stopped partitions of the current batch."""
        if self.run_id in run_ids:
            with self._lock:
                self._own.mark_unwanted()

    def results(self) -> Iterator[RunsRead]:
        """Take the results of batches."""
        while not self._results.empty():
            yield self._results.get()

    def known_runs(
        self, batch_ids: Collection[str], claims: Iterable[Claimed]
    ) -> tuple[RunSnapshot, ...]:
        """Return the runs of the worker's own batches, without Dagster."""
        with self._lock:
            return self._read(batch_ids, claims)

    def must_report(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether the last report differs from these partitions and the current batch."""
        wanted, reported = self._with_batch(partitions), self._reported
        is_reported = wanted is reported or wanted == reported
        return not is_reported or self._unrecorded_age is not None

    def report(self, partitions: Collection[TopicPartition]) -> None:
        """Report the outcomes of abandoned claims, and then the partitions of the worker.

        The order matters: if another member reads that this run has left a partition, and finds no
        outcome of the claims, it requests the ranges again. A report that hung never replaces a
        newer one.
        """
        with self._lock:
            self._reports += 1
            number = self._reports
        reported = self._with_batch(partitions)
        ended = self.unreported  # after `reported`: batches that are not in it have ended
        if ended:
            with self._lock:
                unnoted = [self._unnoted.get(batch_id) for batch_id, _ in ended]
            for attempt in filter(None, unnoted):
                self._note(*attempt)
            self.record_outcomes(ended)
            with self._lock:
                self._own.mark_reported(ended)
        with self._lock:
            if number != self._reports:
                return
            self.active_partitions = reported
        self._reported = None  # the heartbeat may be stored although it fails
        self._beat()
        self._reported = reported
        long = self._unrecorded_age
        if long is not None:
            self._others.record_age(self.run_id, long.batch_id, self._clock() - long.begun_at)
            self._age_recorded = long.batch_id

    @property
    def _unrecorded_age(self) -> BegunBatch | None:
        """The current batch, if it is long-running and its age is not recorded yet."""
        with self._lock:
            batch = self._own.at_work
        if batch is None or batch.batch_id == self._age_recorded:
            return None
        return batch if self._clock() - batch.begun_at >= _LONG_S else None

    def _with_batch(self, partitions: Collection[TopicPartition]) -> frozenset[TopicPartition]:
        with self._lock:
            batch = self._own.at_work
            before, assigned, found = self._covered
            if before is not batch or assigned is not partitions:
                found = frozenset(partitions)
                if batch is not None and not found.issuperset(batch.logs):
                    found = found.union(batch.logs)
                self._covered = (batch, partitions, found)
            return found

    def abandon(self, claims: Iterable[Claimed]) -> None:
        """Record that other members may find these claims: `report` reports their outcomes."""
        with self._lock:
            self._own.publish_outcomes_of(claims)

    @property
    def unreported(self) -> Mapping[Claimed, BatchOutcome]:
        """The outcomes of abandoned claims that are not reported yet."""
        with self._lock:
            return self._own.unreported

    # RunsPort

    def read(
        self, batch_ids: Iterable[str], *, with_live: bool = False, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSnapshot, ...]:
        """Return the worker's own runs from memory, and all runs from Dagster.

        A sensor's member that owned a partition in between may have requested runs for a batch of
        this run.
        """
        wanted, known = tuple(batch_ids), tuple(claims)
        theirs = [claim for claim in known if not is_batch_of(claim[0], self.run_id)]
        others = self._others.read(wanted, with_live=with_live, claims=theirs)
        with self._lock:
            return (*self._read(wanted, known), *others)

    def why_failed(self, run_id: str, batch_id: str) -> str:
        """Return the error of a run on a batch."""
        if run_id == self.run_id:
            failed = self._failed.get(batch_id)
            return failed.error if failed else "the error is in the log of the run"
        return self._others.why_failed(run_id, batch_id)

    def record_outcomes(self, outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        """Record the outcomes of abandoned claims, for the next owner."""
        self._others.record_outcomes(outcomes)

    def record_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Record for how long a streaming run has worked on a batch."""
        self._others.record_age(run_id, batch_id, seconds)

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel a run. If it is this run, interrupt only its current batch."""
        if run_id != self.run_id:
            self._others.cancel(run_id, only_unstarted=only_unstarted)
        elif not only_unstarted:
            with self._lock:
                self._own.interrupt(self._clock())
            self._interrupt()

    def end_dead(self, run_id: str, sign: str) -> bool:
        """End a run of another process."""
        return self._others.end_dead(run_id, sign)

    def _read_own(self, batch_id: str) -> RunsRead:
        return RunsRead(frozenset({batch_id}), self._read([batch_id], ()), is_from_worker=True)

    def _read(self, batch_ids: Iterable[str], claims: Iterable[Claimed]) -> tuple[RunSnapshot, ...]:
        return tuple(
            seen
            for run in self._own.read(batch_ids, claims)
            for seen in with_error((run,), self._failed.get(run.batch_id))
        )


def _is_divisible_part(batch: BegunBatch) -> bool:
    return Part.parse(batch.batch_id) is not None and any(len(one) > 1 for one in batch.ranges)

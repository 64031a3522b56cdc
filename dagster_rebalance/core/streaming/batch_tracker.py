"""Tracks the batches of a streaming run: the current one, and the outcomes of earlier ones.

Each batch of a streaming run appears as a run (`RunSnapshot`). The run answers for its own batches
from memory; the memory ends with the process. Other members read the outcomes that `report` of the
orchestration stores. The thread that owns the member begins each batch, so no batch begins on a
released partition. A claim must be passed to `publish_outcomes_of` before it leaves `claimed` of
`begin`, or its outcome would be `DROPPED`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.offsets import Log, OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest


_INTERRUPT_AGAIN_S = 1.0
_MAX_REPORTED_KEPT = 10_000
"""Each failed attempt is reported, and a run that lives for a week has many."""


@dataclass(frozen=True, slots=True)
class BegunBatch:
    """A batch that the run has begun.

    Attributes:
        logs: The log of each partition when the batch began.
        outcome: How the batch ended; None while it runs.
        is_late: Whether the batch was interrupted because it took too long.
        is_unwanted: Whether an operator has stopped one of the partitions since the batch began.
        is_repeat: Whether an earlier batch may have processed a part of the ranges.
    """

    batch_id: str
    ranges: tuple[OffsetRange, ...]
    logs: Mapping[TopicPartition, Log] = field(compare=False)
    outcome: BatchOutcome | None = None
    begun_at: float = field(default=0.0, compare=False)
    interrupted_at: float | None = field(default=None, compare=False)
    is_late: bool = field(default=False, compare=False)
    is_unwanted: bool = field(default=False, compare=False)
    is_repeat: bool = field(default=False, compare=False)

    def outcome_of(self, ended: BatchOutcome) -> BatchOutcome:
        """Return the outcome of the batch, given how its assets ended.

        A late batch that was interrupted is a failed attempt; an unwanted one is dropped.
        """
        if ended is not BatchOutcome.INTERRUPTED or not (self.is_late or self.is_unwanted):
            return ended
        return BatchOutcome.DROPPED if self.is_unwanted else BatchOutcome.FAILED


class WorkerAction(enum.Enum):
    """The next action for the current batch."""

    NOTHING = "nothing"
    INTERRUPT = "interrupt"
    """The batch takes too long, or the first interrupt had no effect: a signal that arrives right
    before the assets begin to wait is lost."""
    END_PROCESS = "end its process"
    """The batch was interrupted and does not end."""


class BatchTracker:
    """The batches of one streaming run, each with a time limit. Not thread-safe.

    `patience_s` is the time that an interrupted batch may take to end.
    """

    def __init__(
        self, run_id: str, *, limit_s: float = float("inf"), patience_s: float = float("inf")
    ) -> None:
        self._run_id = run_id
        self._limit_s = limit_s
        self._patience_s = patience_s
        # Kafka may store one claim of a batch later than the others, which is then a separate part.
        self._begun: dict[str, tuple[BegunBatch, ...]] = {}
        self._abandoned: dict[Claimed, None] = {}
        self._reported: dict[Claimed, BatchOutcome] = {}
        self._reads = 0
        self._interrupted_at = float("-inf")
        self.at_work: BegunBatch | None = None

    def begin(
        self,
        batch_requests: Iterable[BatchRequest],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
        now: float = 0.0,
    ) -> BegunBatch | None:
        """Begin the first requested batch, if no batch is running.

        Begun ranges are skipped, because a request may be older than the end of its batch. Batches
        that are not in `claimed` are dropped from memory.
        """
        if self.at_work is not None:
            return None
        kept = {*claimed, *(batch_id for batch_id, _ in self._abandoned)}
        self._begun = {known: parts for known, parts in self._begun.items() if known in kept}
        batch_request = next(
            (
                batch_request
                for batch_request in batch_requests
                if not self._has_begun(batch_request)
            ),
            None,
        )
        if batch_request is not None:
            partitions = {range_.topic_partition for range_ in batch_request.ranges}
            logs = {partition: log_of(partition) for partition in partitions}
            self.at_work = BegunBatch(
                batch_request.batch_id,
                batch_request.ranges,
                logs,
                begun_at=now,
                is_repeat=batch_request.is_repeat,
            )
            self._begun[batch_request.batch_id] = (
                *self._parts(batch_request.batch_id),
                self.at_work,
            )
        return self.at_work

    def next_action(self, now: float) -> WorkerAction:
        """Return the next action for the current batch, and record the action as done."""
        batch = self.at_work
        if batch is None:
            return WorkerAction.NOTHING
        if batch.interrupted_at is None:
            if now - batch.begun_at < self._limit_s:
                return WorkerAction.NOTHING
            self.at_work = replace(batch, interrupted_at=now, is_late=True)
        elif now - batch.interrupted_at >= self._patience_s:
            return WorkerAction.END_PROCESS
        elif now - self._interrupted_at < _INTERRUPT_AGAIN_S:
            return WorkerAction.NOTHING
        self._interrupted_at = now
        return WorkerAction.INTERRUPT

    def interrupt(self, now: float) -> None:
        """Record that the current batch is interrupted."""
        self._interrupted_at = now
        if self.at_work is not None and self.at_work.interrupted_at is None:
            self.at_work = replace(self.at_work, interrupted_at=now)

    def mark_unwanted(self) -> None:
        """Record that an operator has stopped a partition of the current batch."""
        if self.at_work is not None:
            self.at_work = replace(self.at_work, is_unwanted=True)

    def end(self, outcome: BatchOutcome) -> BegunBatch | None:
        """Record the outcome of the current batch, and return it; None if no batch is running."""
        if self.at_work is None:
            return None
        outcome = self.at_work.outcome_of(outcome)
        ended = replace(self.at_work, outcome=outcome)
        self._begun[ended.batch_id] = (*self._parts(ended.batch_id)[:-1], ended)
        self.at_work = None
        if outcome is BatchOutcome.FAILED:
            # It is published although the run keeps the claim: a group snapshot shows it.
            self.publish_outcomes_of((ended.batch_id, range_) for range_ in ended.ranges)
        return ended

    def read(self, batch_ids: Iterable[str], claims: Iterable[Claimed]) -> tuple[RunSnapshot, ...]:
        """Return the run's own batches as runs.

        `claims` are the member's current claims on them, to include ranges that were not begun.
        """
        self._reads += 1
        found: list[RunSnapshot] = []
        claimed: dict[str, list[OffsetRange]] = {}
        for batch_id, range_ in claims:
            claimed.setdefault(batch_id, []).append(range_)
        for batch_id in batch_ids:
            batch = StreamBatch.parse(batch_id)
            if batch is None or batch.run_id != self._run_id:
                continue
            # A new heartbeat at each read, so this run's own liveness check never counts it as
            # dead.
            run = RunSnapshot(self._run_id, "", (), RunState.STARTED, heartbeat=str(self._reads))
            for part in self._parts(batch_id):
                found += batch.as_runs(part.ranges, run, part.outcome)
            begun = self._begun_ranges(batch_id)
            unbegun: dict[BatchOutcome | None, list[OffsetRange]] = {}
            for range_ in claimed.get(batch_id, ()):
                if range_ not in begun:
                    outcome = self._reported.get((batch_id, range_))
                    unbegun.setdefault(outcome, []).append(range_)
            for outcome, ranges in unbegun.items():
                seen = batch.as_runs(tuple(ranges), run, outcome)
                # Without the current attempt, which has not begun.
                found += seen if outcome else seen[:-1]
        return tuple(found)

    def publish_outcomes_of(self, claims: Iterable[Claimed]) -> None:
        """Record that other members may find these claims, so their outcomes must be reported."""
        self._abandoned.update(dict.fromkeys(claims))

    @property
    def unreported(self) -> dict[Claimed, BatchOutcome]:
        """The outcomes to report to other members now."""
        batch_ids = {batch_id for batch_id, _ in self._abandoned}
        outcomes = {
            (batch_id, range_): part.outcome
            for batch_id in batch_ids
            for part in self._parts(batch_id)
            for range_ in part.ranges
        }
        ended = {claim: outcomes.get(claim, BatchOutcome.DROPPED) for claim in self._abandoned}
        return {claim: outcome for claim, outcome in ended.items() if outcome is not None}

    def mark_reported(self, claims: Iterable[Claimed]) -> None:
        """Record reported outcomes, and keep them: a partition may return with its claim."""
        ended = self.unreported
        for claim in claims:
            if claim in ended:
                self._reported.pop(claim, None)  # the newest one is the last to be dropped
                self._reported[claim] = ended[claim]
                del self._abandoned[claim]
        while len(self._reported) > _MAX_REPORTED_KEPT:
            del self._reported[next(iter(self._reported))]

    def _has_begun(self, batch_request: BatchRequest) -> bool:
        return not self._begun_ranges(batch_request.batch_id).isdisjoint(batch_request.ranges)

    def _begun_ranges(self, batch_id: str) -> set[OffsetRange]:
        return {range_ for part in self._parts(batch_id) for range_ in part.ranges}

    def _parts(self, batch_id: str) -> tuple[BegunBatch, ...]:
        return self._begun.get(batch_id, ())


class ReaderReuse:
    """Checks whether the prefetched records of a cached reader still match the log.

    A log changes if it is truncated (an unclean leader election) or its topic is recreated. The
    topic id and the leader epoch show both. Not thread-safe.
    """

    def __init__(self) -> None:
        self._logs: dict[TopicPartition, Log] = {}
        self._generation = 0

    def advance(self, logs: Mapping[TopicPartition, Log]) -> int | None:
        """Return the generation of the readers that may read these logs.

        The generation increases when one of the logs has changed. None if Kafka does not report
        topic ids and leader epochs: no reader may be reused.
        """
        if any(not log.topic_id or log.leader_epoch is None for log in logs.values()):
            return None
        if any(self._logs.get(partition, log) != log for partition, log in logs.items()):
            self._generation += 1
        self._logs.update(logs)
        return self._generation

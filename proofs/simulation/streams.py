"""Simulated streaming runs: the work, and its end.

The process of such a run is a member with the real engine and member loop (`process`). Here its
batches take their time, may fail, hang or die with the process, and their Spark work may outlive
it. A batch must be alone on its offsets, and an offset counts as done once it is committed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.retry import with_error
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch
from dagster_rebalance.orchestration.streaming.worker import StreamWorker
from proofs.simulation.clockwork import Violation
from proofs.simulation.dagster_runs import SimulatedDagster
from proofs.simulation.progress import is_foreign
from proofs.simulation.run_process import STOPPING_S, RunProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.events import RunsRead
    from dagster_rebalance.core.model.offsets import (
        Log,
        OffsetAndMetadata,
        OffsetRange,
        TopicPartition,
    )
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.runs.retry import FailedAttempt
    from dagster_rebalance.core.streaming.batch_tracker import BegunBatch
    from dagster_rebalance.orchestration.ports import RunsPort

_AGAIN_S = 0.5


class StreamingMember(Protocol):
    """Applies events of a streaming run to its member."""

    def end(self) -> None:
        """End at once."""

    def cancel(self) -> None:
        """Finish the current batch, and leave: the sensor starts another run."""

    def pause(self, seconds: float) -> None:
        """Be suspended."""

    def lose_storage(self, seconds: float) -> None:
        """Disconnect from Dagster's storage."""


class StreamingDagster(SimulatedDagster):
    """A Dagster instance with streaming runs."""

    def begin_stream(self, member: StreamingMember) -> str:
        """Start a streaming run: its process joins the group."""
        run_id = f"r{len(self.runs) + 1}"
        self.runs[run_id] = RunSnapshot(run_id, "", (), RunState.STARTED)
        self.processes[run_id] = RunProcess(has_begun=True)
        self.said[run_id] = frozenset()
        self.on_gone[run_id], self.on_cancel[run_id] = member.end, member.cancel
        self.on_freeze[run_id], self.on_cut_off[run_id] = member.pause, member.lose_storage
        return run_id

    def end_stream(self, run_id: str) -> None:
        self._gone(run_id)
        self.processes[run_id].has_finished = True
        is_cancelled = self.runs[run_id].state is RunState.CANCELING
        if self.runs[run_id].is_live:
            self._move(run_id, RunState.CANCELED if is_cancelled else RunState.SUCCEEDED)

    def begin_batch(self, run_id: str, batch: BegunBatch, ended: Callable[..., None]) -> None:
        self.at_work[run_id] = batch
        self.begun |= {(run_id, range_) for range_ in batch.ranges}
        self._must_be_alone(self._at_work(run_id))
        self._note_part(self._at_work(run_id))
        self._must_be_in_order(run_id, batch)
        self.processes[run_id].is_working = True
        self._clockwork.tell(run_id, f"works on {', '.join(map(str, batch.ranges))}")
        takes_s = self._weather.working() / 2
        self._is_lost_within(run_id, takes_s)
        self._clockwork.after(takes_s, run_id, partial(self._body_ends, run_id, batch, ended))

    def loses_request(self) -> bool:
        """Draw whether a request to the storage is lost."""
        return self._clockwork.happens(self._weather.lost_requests)

    def interrupt(self, run_id: str, ended: Callable[..., None]) -> None:
        """Interrupt the current batch."""
        batch = self.at_work.get(run_id)
        if batch is not None:
            self._clockwork.after(
                self._clockwork.within(*STOPPING_S),
                run_id,
                partial(self._tell_end, run_id, batch, BatchOutcome.INTERRUPTED, ended),
            )

    def note_claims(self, partition: TopicPartition, stored: OffsetAndMetadata) -> None:
        """Note which claims of a streaming run are stored as early."""
        state = decode(stored)
        for (range_, batch_id), claim in zip(state.ranges(partition), state.claims, strict=True):
            batch = StreamBatch.parse(batch_id)
            if batch is not None and not claim.previous_batch_id:
                (self.early if claim.is_early else self.late).add((batch.run_id, range_))

    def _must_be_in_order(self, run_id: str, batch: BegunBatch) -> None:
        """Check that all claimed ranges before those of a batch are done."""
        done = {range_ for _, range_ in self.succeeded} | self.letters.keys()
        for run in self.runs.values():
            done |= set(run.ranges) if run.state is RunState.SUCCEEDED else set()
        for range_ in batch.ranges:
            stored = self._group.stored.get(range_.topic_partition)
            if stored is None or is_foreign(stored):
                continue
            for before, _ in decode(stored).ranges(range_.topic_partition):
                if before.until <= range_.start and before not in done:
                    msg = f"{run_id} works on {range_} before {before}"
                    raise Violation(msg)

    def committed(
        self, partition: TopicPartition, before: OffsetAndMetadata, new: OffsetAndMetadata
    ) -> None:
        """Count a range as done once it is committed."""
        last = decode(new).last_commit
        for range_, batch_id in decode(before).ranges(partition):
            batch = StreamBatch.parse(batch_id)
            if (
                batch is not None
                and last is not None
                and last.run_id == batch.run_id
                and range_.until <= new.offset
                and (batch_id, range_) in self.succeeded
            ):
                # Named by the batch: that the run is deleted later takes nothing of it back.
                run = replace(self.runs[batch.run_id], run_id=batch_id, ranges=(range_,))
                self.outputs.succeed(run, self._weather.assets, self._weather.assets)

    def seen(
        self, batch_ids: Iterable[str], *, with_live: bool, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSnapshot, ...]:
        """Return the runs, and the streaming runs with claims."""
        known = tuple(claims)
        found = super().seen(batch_ids, with_live=with_live, claims=known)
        return (*self._of_claims(known), *found)

    def freeze(self, run_id: str, seconds: float) -> None:
        """Suspend the process, and its member."""
        pause = self.on_freeze.get(run_id)
        if pause is None:
            super().freeze(run_id, seconds)
        elif not self.processes[run_id].is_frozen:
            pause(seconds)

    def freeze_work(self, run_id: str, seconds: float) -> None:
        """Suspend the work of a streaming run, while its member is suspended."""
        super().freeze(run_id, seconds)

    def cut_off(self, run_id: str, seconds: float) -> None:
        """Disconnect the process, and its member, from the storage."""
        super().cut_off(run_id, seconds)
        if run_id in self.on_cut_off:
            self.on_cut_off[run_id](seconds)

    def call_over(self, run_id: str, sign: str) -> bool:
        """Mark a run as over; forget the number of a deleted streaming run."""
        is_over = super().call_over(run_id, sign)
        if is_over and run_id in self.deleted:
            self.processes[run_id].is_over = True
        return is_over

    def _of_claims(self, claims: Iterable[Claimed]) -> Iterator[RunSnapshot]:
        for claim in claims:
            batch = StreamBatch.parse(claim[0])
            if batch is not None:
                seen = batch.as_runs((claim[1],), self._stream(batch.run_id), self.left.get(claim))
                yield from with_error(seen, self.failures.get(claim[1]))

    def _stream(self, run_id: str) -> RunSnapshot:
        if run_id in self.deleted and self.processes[run_id].is_over:
            return RunSnapshot(run_id, "", (), RunState.FAILED)
        if run_id not in self.deleted:
            return self._shown(run_id)
        return replace(self._shown_deleted(run_id, {}), active_partitions=self.said[run_id])

    def _body_ends(self, run_id: str, batch: BegunBatch, ended: Callable[..., None]) -> None:
        process = self.processes[run_id]
        if process.is_gone or self.at_work.get(run_id) is not batch:
            return
        if process.is_frozen:
            self._clockwork.after(_AGAIN_S, run_id, partial(self._body_ends, run_id, batch, ended))
        elif self._clockwork.happens(self._weather.runs_die):
            self.die(run_id)
        else:
            is_bad = any(map(self._weather.bad_in, batch.ranges))
            fails = self._clockwork.happens(self._weather.runs_fail) or is_bad
            outcome = BatchOutcome.FAILED if fails else BatchOutcome.SUCCEEDED
            self._clockwork.after(
                self._weather.latency(),
                run_id,
                partial(self._tell_end, run_id, batch, outcome, ended),
            )

    def _tell_end(
        self,
        run_id: str,
        batch: BegunBatch,
        outcome: BatchOutcome,
        ended: Callable[..., None],
    ) -> None:
        """Materialize a success before its report, which waits for the storage."""
        process = self.processes[run_id]
        if process.is_gone or self.at_work.get(run_id) is not batch:
            return
        if process.is_frozen or (outcome is BatchOutcome.SUCCEEDED and not process.is_heard):
            self._clockwork.after(
                _AGAIN_S, run_id, partial(self._tell_end, run_id, batch, outcome, ended)
            )
            return
        process.is_working = False
        del self.at_work[run_id]
        if outcome is BatchOutcome.SUCCEEDED:
            self.succeeded |= {(batch.batch_id, range_) for range_ in batch.ranges}
        self._clockwork.tell(run_id, f"{outcome.value}: {', '.join(map(str, batch.ranges))}")
        if outcome is BatchOutcome.FAILED:
            ended(outcome, "it raised", self._weather.cause_of_failure(batch.ranges))
        else:
            ended(outcome)


class SimulatedWork(StreamWorker):
    """The real worker; the simulated process works on its batches.

    Args:
        run_id: The run.
        others: The runs of others.
        dagster: Dagster.
        reach: Raises if the storage cannot be reached.
        may_begin: Raises if a partition must not be started.
    """

    def __init__(
        self,
        run_id: str,
        others: RunsPort,
        dagster: StreamingDagster,
        *,
        reach: Callable[[], None],
        may_begin: Callable[[TopicPartition], None],
    ) -> None:
        super().__init__(
            run_id,
            others,
            wake=lambda: None,
            interrupt=lambda: dagster.interrupt(run_id, self.end),
            beat=self._say_there,
            keep=lambda batch, failed: self._note(batch.ranges, failed),
            note=self._note,
        )
        self._dagster = dagster
        self._reach = reach
        self._may_begin = may_begin

    def begin(
        self,
        batch_requests: Iterable[BatchRequest],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
    ) -> RunsRead | None:
        """Begin a batch, unless one is running."""
        seen = super().begin(batch_requests, claimed, log_of)
        batch = self.next(0.0) or self.next(0.0)  # the first may be the word of a hold
        if batch is not None:
            for range_ in batch.ranges:
                self._may_begin(range_.topic_partition)
            self._dagster.begin_batch(self.run_id, batch, self.end)
        return seen

    def _note(self, ranges: Iterable[OffsetRange], failed: FailedAttempt) -> None:
        """Store the error of a batch for the next owner, unless the request is lost."""
        if not self._dagster.loses_request():
            self._dagster.failures |= dict.fromkeys(ranges, failed)

    def _say_there(self) -> None:
        """Send a heartbeat, which may be lost, as may its answer."""
        self._reach()
        self._dagster.said[self.run_id] = self.active_partitions
        self._reach()

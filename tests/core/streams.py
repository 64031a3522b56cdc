"""A streaming run in the world in memory: a member that works on its batches itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.run_snapshot import FailureCause, RunSnapshot, RunState
from dagster_rebalance.core.runs.retry import FailedAttempt, with_error
from dagster_rebalance.core.runs.stream_batch import (
    BatchOutcome,
    StreamBatch,
    batch_ids,
    is_batch_of,
)
from dagster_rebalance.core.streaming.batch_tracker import BatchTracker
from tests.core.world import AT_ONCE, Member, tp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.runs.retry import RetryBackoff
    from dagster_rebalance.core.streaming.batch_tracker import BegunBatch
    from tests.core.world import World


class Stream(Member):
    """A streaming run; the test plays its body."""

    def __init__(
        self,
        world: World,
        run_id: str,
        *,
        owns: Iterable[int] = (),
        settings: EngineSettings | None = None,
        backoff: RetryBackoff = AT_ONCE,
    ) -> None:
        super().__init__(world, settings or EngineSettings())
        self.run_id = run_id
        self.work = BatchTracker(run_id)
        self.engine = Engine(
            replace((settings or EngineSettings()).of_stream(run_id), backoff=backoff),
            new_batch_id=batch_ids(run_id),
            now=world.now,
        )
        self.interrupts = 0
        self.failed: dict[str, FailedAttempt] = {}
        world.streams[run_id] = RunSnapshot(run_id, "", (), RunState.STARTED, heartbeat="1")
        if owned := tuple(tp(number) for number in owns):
            self.feed(events.PartitionsAssigned(owned))

    def turn(self, seconds: float = 0.25) -> BegunBatch | None:
        """Turn the member loop once, and return the batch that begins."""
        self.world.now += seconds
        self.pass_time()
        self._report()
        begun = self._begin()
        if begun is not None:
            self.feed(begun)
        return self.work.at_work if begun is not None else None

    def end(
        self,
        outcome: BatchOutcome = BatchOutcome.SUCCEEDED,
        *,
        begins: bool = False,
        cause: FailureCause = FailureCause.UNKNOWN,
    ) -> BegunBatch:
        """End the batch at work; `begins` begins the next one before any command follows."""
        ended = self.work.end(outcome)
        assert ended is not None, "no batch is at work"
        began = StreamBatch.parse(ended.batch_id)
        if outcome is BatchOutcome.FAILED and began is not None:
            self.failed[ended.batch_id] = FailedAttempt(
                self.run_id, began.attempt, "it raised", cause
            )
            for range_ in ended.ranges:
                self.world.failed[range_] = self.failed[ended.batch_id]
        if outcome is BatchOutcome.SUCCEEDED:
            self.world.done_by_streams |= {(ended.batch_id, range_) for range_ in ended.ranges}
            self.world.output.update(ended.ranges)
        self.feed(self._own(ended.batch_id), self._begin if begins else lambda: None)
        self._report()
        return ended

    def die(self) -> None:
        """The process is killed, and known to be gone."""
        self.world.streams[self.run_id] = replace(
            self.world.streams[self.run_id], state=RunState.FAILED
        )

    def _begin(self) -> events.RunsRead | None:
        begun = self.work.begin(self.engine.batch_requests, self.engine.claimed, self.engine.log_of)
        return None if begun is None else self._own(begun.batch_id)

    def _own(self, batch_id: str) -> events.RunsRead:
        found = self._read([batch_id], ())
        return events.RunsRead(frozenset({batch_id}), found, is_from_worker=True)

    def _read(
        self, batch_ids: Iterable[str], claims: Iterable[commands.Claimed]
    ) -> tuple[RunSnapshot, ...]:
        return tuple(
            seen
            for run in self.work.read(batch_ids, claims)
            for seen in with_error((run,), self.failed.get(run.batch_id))
        )

    def _report(self) -> None:
        outcomes = self.work.unreported
        self.world.notes |= outcomes
        self.work.mark_reported(outcomes)

    def stream_runs(
        self, batch_ids: Iterable[str], claims: Iterable[commands.Claimed]
    ) -> tuple[RunSnapshot, ...]:
        """Its own batches from memory, those of others from Dagster."""
        own = self._read(batch_ids, claims)
        others = [b for b in batch_ids if not is_batch_of(b, self.run_id)]
        return (*own, *super().stream_runs(others, claims))

    def _carry_out(self, command: commands.Command) -> events.Event | None:
        match command:
            case commands.CancelRuns(run_ids) if self.run_id in run_ids:
                self.interrupts += 1
                return None
            case commands.AbandonClaims(claims):
                self.work.publish_outcomes_of(claims)
                return None
            case _:
                return super()._carry_out(command)

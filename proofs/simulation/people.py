"""People move committed offsets and execute runs again where partitions are stopped.

They also commit again what Kafka dropped. They act a while after the harm was done, and never in
the middle of what a member does. Where records or offsets are gone, nothing may go on without their
word; the end checks that, by what has been done with the records that are there. And they pause,
stop and resume partitions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import EVERYTHING, Action, Directive, selector_of
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.model.run import LIVE
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import Exhausted
from proofs.simulation.progress import is_foreign

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition
    from proofs.simulation.world import World

_LOOK_EVERY_S = 5.0
_AGAIN_S = 2.0
_CLOCK_ERRORS_S = (0.0, 120.0, -300.0, 7200.0, -3600.0)
"""By how much the clocks of the people are wrong who order one after the other."""


class People:
    """Those who look after one group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clockwork = world.clockwork
        self._look()

    def move_behind_what_is_deleted(self, partition: TopicPartition) -> None:
        """Move the committed offset behind deleted and done records, once nothing works there."""
        group, dagster = self._world.group, self._world.dagster
        stored, start = group.stored.get(partition), group.starts[partition]
        if stored is None or stored.offset >= start:
            return
        if not self._may_move(partition):
            self._clockwork.after(
                _AGAIN_S, None, lambda: self.move_behind_what_is_deleted(partition)
            )
            return
        done = max([start, *(until for _, until, _ in dagster.outputs.done.get(partition, ()))])
        moved = min(done, group.ends[partition])
        if moved < done:  # the log was cut off as well
            self._world.forget(partition, moved)
        # What came in the place of records that a cut had taken away is deleted as well.
        first = min(stored.offset, group.cuts.get(partition, stored.offset))
        self._world.deleted.add(OffsetRange(partition.topic, partition.partition, first, moved))
        self._move(partition, moved)

    def commit_again(self, partition: TopicPartition) -> None:
        """Commit what Kafka has dropped, with the claims behind it."""
        stored = self._world.vanished.pop(partition, None)
        if stored is not None and partition not in self._world.group.stored:
            self._clockwork.tell("a person", f"commits {partition} {stored.offset} again")
            self._world.group.stored[partition] = stored

    def pause(self, partition: TopicPartition) -> None:
        """Somebody wants a partition to stand, or all of them; a while later it goes on."""
        clockwork = self._clockwork
        action = clockwork.chance.choice((Action.PAUSE, Action.STOP))
        selector = clockwork.chance.choice((selector_of(partition), EVERYTHING))
        self._order(action, selector)
        again = clockwork.chance.choice((selector, selector_of(partition)))
        clockwork.after(clockwork.within(2, 25), None, lambda: self._order(Action.RESUME, again))

    def resume_all(self) -> None:
        """Nobody wants anything to stand any more."""
        if self._world.dagster.orders:
            self._order(Action.RESUME, EVERYTHING)

    def _order(self, action: Action, partitions: str) -> None:
        dagster = self._world.dagster
        at = self._clockwork.now + _CLOCK_ERRORS_S[len(dagster.orders) % len(_CLOCK_ERRORS_S)]
        order = Directive(action, partitions, "a person", at, "it must stand")
        self._clockwork.tell("a person", f"{action.value}s {partitions}")
        dagster.give(order)

    def _look(self) -> None:
        """Somebody acts on stopped partitions once the cause is mended.

        Failed runs or lost records stop a partition.
        """
        for process in self._world.processes:
            for owned in process.engine.partitions.values():
                blocked = (
                    owned.ledger.blocked
                    if owned.ledger is not None and not process.is_gone
                    else None
                )
                if (
                    owned.phase is Phase.STOPPED
                    and blocked is not None
                    and isinstance(blocked[1], Exhausted)
                    and self._world.dagster.runs[blocked[1].run_id].ranges
                ):
                    self._execute_again(blocked[1].run_id)
        for partition, cut in tuple(self._world.group.cuts.items()):
            if self._world.group.is_lost(partition) and self._may_move(partition):
                self._move_before_what_is_lost(partition, cut)
        self._clockwork.after(_LOOK_EVERY_S, None, self._look)

    def _move_before_what_is_lost(self, partition: TopicPartition, cut: int) -> None:
        stored = self._world.group.stored.get(partition)
        if stored is not None or (
            self._world.dagster.recorded.get(partition) and partition not in self._world.vanished
        ):
            moved = min(cut, stored.offset if stored else cut)
            self._world.forget(partition, moved)
            self._move(partition, moved)

    def _may_move(self, partition: TopicPartition) -> bool:
        stored = self._world.group.stored.get(partition)
        return not (
            self._clockwork.is_nested
            or self._world.dagster.is_busy(partition)
            or is_foreign(stored)
        )

    def _move(self, partition: TopicPartition, moved: int) -> None:
        # The note of the last commit goes with it, so nobody can record late what its owner has
        # not.
        self._world.forget_unrecorded(partition)
        self._world.group.stored[partition] = OffsetAndMetadata(moved)
        self._world.group.meddled.add(partition)
        self._world.group.cuts.pop(partition, None)
        self._clockwork.tell("a person", f"moves {partition} to {moved}")

    def _execute_again(self, run_id: str) -> None:
        """Execute a run again as Dagster's page does it, with all ranges of the run.

        Some of the ranges may be done, or were skipped by moving an offset.
        """
        dagster = self._world.dagster
        run = dagster.runs[run_id]
        batch = dagster.seen([run.batch_id], live_too=False)
        if not any(other.state in LIVE or other.awaits_retry for other in batch):
            self._clockwork.tell("a person", f"executes {run_id} again")
            dagster.start(run.batch_id, run.ranges, parent_id=run.run_id)

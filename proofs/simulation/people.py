"""Operators: they move offsets, commit dropped offsets again, re-execute runs, and give directives.

They act some time after a fault, and never inside a step of a member. Lost records or offsets stop
a partition until they act, which the final check verifies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import EVERYTHING, Action, Directive, selector_of
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.model.run_snapshot import LIVE
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import Exhausted
from proofs.simulation.progress import is_foreign

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition
    from proofs.simulation.world import World

_LOOK_EVERY_S = 5.0
_AGAIN_S = 2.0
_CLOCK_ERRORS_S = (0.0, 120.0, -300.0, 7200.0, -3600.0)
"""Clock errors of operators who give directives one after the other."""


class People:
    """The operators of one group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clockwork = world.clockwork
        self._look()

    def move_behind_what_is_deleted(self, partition: TopicPartition) -> None:
        """Move the committed offset past deleted and processed records, once no run works."""
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
        # Records that replaced truncated ones are deleted as well.
        first = min(stored.offset, group.cuts.get(partition, stored.offset))
        self._world.deleted.add(OffsetRange(partition.topic, partition.partition, first, moved))
        self._move(partition, moved)

    def commit_again(self, partition: TopicPartition) -> None:
        """Commit the offset that Kafka dropped, with the claims."""
        stored = self._world.vanished.pop(partition, None)
        if stored is not None and partition not in self._world.group.stored:
            self._clockwork.tell("a person", f"commits {partition} {stored.offset} again")
            self._world.group.stored[partition] = stored

    def pause(self, partition: TopicPartition) -> None:
        """Pause one or all partitions, and resume them later."""
        clockwork = self._clockwork
        action = clockwork.chance.choice((Action.PAUSE, Action.STOP))
        selector = clockwork.chance.choice((selector_of(partition), EVERYTHING))
        self._order(action, selector)
        again = clockwork.chance.choice((selector, selector_of(partition)))
        clockwork.after(clockwork.within(2, 25), None, lambda: self._order(Action.RESUME, again))

    def resume_all(self) -> None:
        """Resume all partitions."""
        if self._world.dagster.orders:
            self._order(Action.RESUME, EVERYTHING)

    def _order(self, action: Action, partitions: str) -> None:
        dagster = self._world.dagster
        at = self._clockwork.now + _CLOCK_ERRORS_S[len(dagster.orders) % len(_CLOCK_ERRORS_S)]
        order = Directive(action, partitions, "a person", at, "it must stand")
        self._clockwork.tell("a person", f"{action.value}s {partitions}")
        dagster.give(order)

    def _look(self) -> None:
        """Repair stopped partitions after failed runs or lost records."""
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
        # The pending record of the last commit is dropped too, so no member can record a commit
        # later that its owner has not recorded.
        self._world.forget_unrecorded(partition)
        self._world.group.stored[partition] = OffsetAndMetadata(moved)
        self._world.group.meddled.add(partition)
        self._world.group.cuts.pop(partition, None)
        self._clockwork.tell("a person", f"moves {partition} to {moved}")

    def _execute_again(self, run_id: str) -> None:
        """Re-execute a run as Dagster's page does, with all ranges: some may be done or skipped."""
        dagster = self._world.dagster
        run = dagster.runs[run_id]
        batch = dagster.seen([run.batch_id], with_live=False)
        if not any(other.state in LIVE or other.awaits_retry for other in batch):
            self._clockwork.tell("a person", f"executes {run_id} again")
            dagster.start(run.batch_id, run.ranges, parent_id=run.run_id)

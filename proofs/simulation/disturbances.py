"""Disturbances: crashed and hanging processes, network failures, and interfering operators.

The weather decides how often they come. One without a target does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.model.run_snapshot import LIVE, RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from proofs.simulation.process import Process
    from proofs.simulation.world import World

_FOREIGN = "not a claim"
_PAUSES = 3
_PARTS = 20


class Disturbances:
    """Disturbs one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clockwork = world.clockwork
        self._foreign: dict[TopicPartition, OffsetAndMetadata] = {}
        self._all: tuple[Callable[[], None], ...] = (
            self._a_process_is_killed,
            self._a_process_is_paused,
            self._a_process_is_paused,
            self._the_location_is_reloaded,
            self._the_location_is_reloaded,
            self._a_side_comes_or_goes,
            self._a_side_comes_or_goes,
            self._the_topic_changes,
            self._kafka_goes_away,
            self._leaders_change,
            self._storage_goes_away,
            self._a_sensor_goes_silent,
            self._another_application_commits,
            self._retention_is_faster,
            self._an_offset_vanishes,
            self._a_log_is_cut_off,
            self._the_topic_is_made_anew,
            self._a_right_is_taken_away,
            self._a_person_cancels_a_run,
            self._a_run_is_executed_again,
            self._a_part_is_executed_again,
            self._a_run_is_force_terminated,
            self._a_run_is_taken_for_failed,
            self._a_run_is_deleted,
            self._a_run_is_killed,
            self._a_run_is_cut_off,
            self._a_run_is_frozen,
            *([self._a_recorder_is_killed] * _PAUSES if world.weather.slow_storage_s else []),
            *([self._a_person_pauses] * _PAUSES if world.has_orders else []),
            *([self._a_pump_hangs] * _PAUSES if world.has_replicas else []),
            *([self._a_part_is_executed_again] * _PARTS if world.has_parts else []),
        )
        self._later()

    def _later(self) -> None:
        self._clockwork.after(
            self._clockwork.within(0.5, 6.0) / max(self._world.weather.roughness, 0.1),
            None,
            self._disturb,
        )

    def _disturb(self) -> None:
        if self._world.is_calm:
            return
        self._later()
        if self._world.weather.roughness:
            self._clockwork.chance.choice(self._all)()

    def calm(self) -> None:
        """Undo lasting disturbances."""
        for partition in tuple(self._foreign):
            self._repair(partition)
        for process in self._world.processes:
            process.is_connected = process.has_storage = True
        self._world.group.forbidden.clear()

    def _anyone(self) -> Process | None:
        alive = [process for process in self._world.processes if not process.is_gone]
        return self._clockwork.chance.choice(alive) if alive else None

    # Processes

    def _a_process_is_killed(self) -> None:
        process = self._anyone()
        if process is not None:
            self._kill(process)

    def _a_recorder_is_killed(self) -> None:
        """A process is killed while Dagster stores one of its commits, before or after that."""
        recording = [
            process
            for process in self._world.processes
            if process.catalogue.is_recording and not process.is_gone
        ]
        if recording:
            self._kill(self._clockwork.chance.choice(recording))

    def _kill(self, process: Process) -> None:
        process.kill()
        self._clockwork.after(
            self._clockwork.within(0.5, 15), None, lambda: self._world.ensure(process.incarnation)
        )

    def _a_process_is_paused(self) -> None:
        process = self._anyone()
        if process is not None and not process.is_paused:
            process.pause(self._clockwork.chance.choice((2.0, 5.0, 12.0, 25.0)))

    def _a_pump_hangs(self) -> None:
        """A call hangs; ticks and heartbeats continue."""
        process = self._anyone()
        if process is not None and not process.stands_still:
            process.hang(self._clockwork.chance.choice((5.0, 12.0, 30.0)))

    def _the_location_is_reloaded(self) -> None:
        process = self._anyone()
        if process is not None and not process.is_retired:
            self._world.reload(process)

    def _a_side_comes_or_goes(self) -> None:
        self._world.scale()

    def _a_sensor_goes_silent(self) -> None:
        process = self._anyone()
        if process is not None and not process.is_retired:
            self._world.retire(process)
            self._clockwork.after(
                self._clockwork.within(5, 30), None, lambda: self._world.ensure(process.incarnation)
            )

    # Backends

    def _the_topic_changes(self) -> None:
        for process in self._world.processes:
            process.member.topic_changed()
        if len(self._world.group.partitions) < self._world.most_partitions:
            self._world.group.add_partition()
        else:
            self._world.group.metadata_changed()

    def _kafka_goes_away(self) -> None:
        process = self._anyone()
        if process is not None:
            process.tell("cannot reach Kafka")
            process.is_connected = False
            self._clockwork.after(
                self._clockwork.within(0.5, 15),
                None,
                lambda: setattr(process, "is_connected", True),
            )

    def _leaders_change(self) -> None:
        """A broker restarts in order: no log is truncated, but every member has to ask."""
        group = self._world.group
        self._clockwork.tell("kafka", "elects new leaders")
        for partition in group.partitions:
            group.elect(partition)

    def _storage_goes_away(self) -> None:
        for process in self._world.processes:
            process.has_storage = False
        self._clockwork.tell("dagster", "its storage is locked")

        def back() -> None:
            for process in self._world.processes:
                process.has_storage = True

        self._clockwork.after(self._clockwork.within(0.5, 8), None, back)

    # People

    def _another_application_commits(self) -> None:
        """The foreign metadata erases the claims; an operator restores them later."""
        group = self._world.group
        partition = self._clockwork.chance.choice(group.partitions)
        stored = group.stored.get(partition)
        if stored is None or partition in self._foreign or self._clockwork.is_nested:
            return
        self._clockwork.tell("another application", f"commits {partition}")
        self._foreign[partition] = stored
        group.meddled.add(partition)
        group.stored[partition] = OffsetAndMetadata(stored.offset, _FOREIGN)
        self._clockwork.after(self._clockwork.within(1, 15), None, lambda: self._repair(partition))

    def _repair(self, partition: TopicPartition) -> None:
        before = self._foreign.pop(partition, None)
        if before is not None and self._world.group.stored[partition].metadata == _FOREIGN:
            self._clockwork.tell("a person", f"puts the claims of {partition} back")
            self._world.group.stored[partition] = before

    def _retention_is_faster(self) -> None:
        """Unclaimed records are deleted; an operator moves the offset later."""
        world, group = self._world, self._world.group
        partition = self._clockwork.chance.choice(group.partitions)
        stored = group.stored.get(partition)
        if stored is None or stored.offset == group.ends[partition] or self._clockwork.is_nested:
            return
        group.starts[partition] = group.ends[partition]
        self._clockwork.tell(
            "kafka", f"retention deletes {partition} up to {group.starts[partition]}"
        )
        self._clockwork.after(
            self._clockwork.within(1, 12),
            None,
            lambda: world.people.move_behind_what_is_deleted(partition),
        )

    def _an_offset_vanishes(self) -> None:
        """Kafka drops committed offsets, as after retention; an operator commits them again."""
        group = self._world.group
        partition = self._clockwork.chance.choice(group.partitions)
        stored = group.stored.get(partition)
        is_known = bool(self._world.dagster.recorded.get(partition))
        if (
            stored is None
            or not is_known
            or partition in self._foreign
            or group.starts[partition] > stored.offset
            or self._clockwork.is_nested
        ):
            return
        self._clockwork.tell("kafka", f"drops the committed offset of {partition}")
        group.meddled.add(partition)
        del group.stored[partition]
        self._world.vanished[partition] = stored
        self._clockwork.after(
            self._clockwork.within(2, 15), None, lambda: self._world.people.commit_again(partition)
        )

    def _a_log_is_cut_off(self) -> None:
        """A replica without the last records becomes the leader; new records get their offsets.

        Not before a member has read an offset set by an operator, which has no epoch
        (docs/limits.md), nor while foreign metadata covers such an offset until it is restored.
        """
        group = self._world.group
        partition = self._clockwork.chance.choice(group.partitions)
        start, end = max(group.starts[partition], group.ends[partition] - 15), group.ends[partition]
        stored = self._foreign.get(partition, group.stored.get(partition))
        is_bare = stored is not None and not stored.metadata
        if start < end and not self._clockwork.is_nested and not is_bare:
            self._world.cut_off(partition, self._clockwork.chance.randrange(start, end))

    def _the_topic_is_made_anew(self) -> None:
        if self._clockwork.happens(0.1) and not self._foreign and not self._clockwork.is_nested:
            self._world.make_topic_anew()

    def _a_right_is_taken_away(self) -> None:
        """Kafka forbids the writes for one partition until the right is restored."""
        forbidden = self._world.group.forbidden
        partition = self._clockwork.chance.choice(self._world.group.partitions)
        self._clockwork.tell("kafka", f"takes no offset of {partition} any more")
        forbidden.add(partition)
        self._clockwork.after(
            self._clockwork.within(2, 25), None, lambda: forbidden.discard(partition)
        )

    def _a_person_cancels_a_run(self) -> None:
        run = self._any_of(run for run in self._shown() if run.state in LIVE)
        if run is not None:
            self._world.dagster.cancel(run.run_id, by_member=False)

    def _a_person_pauses(self) -> None:
        self._world.people.pause(self._clockwork.chance.choice(self._world.group.partitions))

    def _a_run_is_executed_again(self) -> None:
        """A user re-executes a run in any state, even if its batch is done."""
        ended = [run for run in self._shown() if run.state not in LIVE and run.ranges]
        run = self._any_of(ended[-5:])
        if run is not None:
            self._world.dagster.start(run.batch_id, run.ranges, parent_id=run.run_id)

    def _a_part_is_executed_again(self) -> None:
        """A user re-executes one of the assets."""
        run = self._any_of(
            [
                run
                for run in self._shown()
                if run.state in {RunState.FAILED, RunState.CANCELED} and run.ranges
            ][-3:]
        )
        if run is not None:
            asset = self._clockwork.chance.choice(self._world.weather.assets)
            self._world.dagster.start(
                run.batch_id, run.ranges, parent_id=run.run_id, assets=(asset,)
            )

    def _a_run_is_force_terminated(self) -> None:
        """Dagster shows a run as cancelled without waiting for its process."""
        run = self._any_of(run for run in self._shown() if run.state in LIVE)
        if run is not None:
            self._world.dagster.mark_ended(run.run_id, RunState.CANCELED)

    def _a_run_is_taken_for_failed(self) -> None:
        """Run monitoring marks a working run as failed."""
        run = self._any_of(self._world.dagster.working())
        if run is not None:
            self._world.dagster.mark_ended(run.run_id, RunState.FAILED)

    def _a_run_is_deleted(self) -> None:
        run = self._any_of(self._shown()[-8:])
        if run is not None:
            self._world.dagster.delete(run.run_id)

    # Processes of runs

    def _a_run_is_killed(self) -> None:
        run = self._any_of(self._world.dagster.working())
        if run is not None:
            self._world.dagster.die(run.run_id)

    def _a_run_is_cut_off(self) -> None:
        run = self._any_of(self._world.dagster.working())
        if run is not None:
            self._world.dagster.cut_off(run.run_id, self._clockwork.within(1, 40))

    def _a_run_is_frozen(self) -> None:
        run = self._any_of(self._world.dagster.working())
        if run is not None:
            self._world.dagster.freeze(run.run_id, self._clockwork.within(1, 40))

    def _shown(self) -> list[RunSnapshot]:
        dagster = self._world.dagster
        return [run for run_id, run in dagster.runs.items() if run_id not in dagster.deleted]

    def _any_of(self, runs: Iterable[RunSnapshot]) -> RunSnapshot | None:
        found = list(runs)
        return self._clockwork.chance.choice(found) if found else None

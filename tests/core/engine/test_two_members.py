"""Two members of a group against everything that can happen between them, in any order.

Graceful rebalances, crashes, fencing, supersession, requests that arrive late or twice, answers
that are lost, runs that fail, die or are started by a zombie. Nothing may be done twice at any
time; and whenever it calms down, everything must be done, committed and recorded.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dagster_rebalance.core.batches.engine_settings import (
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LossPolicy,
)
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.run_snapshot import WORKING, RunState
from dagster_rebalance.core.runs.liveness import Liveness
from tests.core.world import Member, World, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest

PARTITIONS = (tp(0), tp(1), tp(2))
NEVER_S = 1e9
EVERYDAY = (
    "turn",
    "turn",
    "turn",
    "tick",
    "start",
    "start",
    "check",
    "check",
    "succeed",
    "succeed",
    "assign",
)
REBALANCES = (*["revoke"] * 8, *["notice"] * 4, "fence", "supersede", "supersede", "kill")
FRAGILE = (
    commands.WriteOffsets,
    commands.RecordCommits,
    commands.ReadRuns,
    commands.ReadStoredOffsets,
    commands.CancelRuns,
    commands.StoreDeadLetter,
)

sides = st.integers(0, 1)
indices = st.integers(0, 1000)


class TwoMembers(RuleBasedStateMachine):
    """The group, as its coordinator sees it, and the processes of the runs."""

    everyday: tuple[str, ...] = EVERYDAY
    max_attempts = 10_000
    dead_letter_topic: str | None = None
    record_every_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.world = World(partitions=len(PARTITIONS))
        self.members = [self._join(0), self._join(1)]
        self.owner: dict[TopicPartition, Member] = {}
        self.unnoticed: list[tuple[Member, events.PartitionsLost]] = []
        self.offered: list[BatchRequest] = []
        self.unchecked: set[str] = set()
        self.working: set[str] = set()
        self.releases_seen = 0
        for which in range(len(PARTITIONS)):
            self.records_are_produced(which, 25)
        self.free_partitions_are_assigned(0)

    def _join(self, side: int) -> Member:
        return self.world.member(
            settings=EngineSettings(
                limits=BatchLimits(
                    max_records_per_range=10,
                    max_ranges_per_run=2,
                    max_runs_in_flight=2,
                    max_claims_per_partition=2,
                ),
                budget=HoldBudget(30, 5),
                on_deadline=(DeadlinePolicy.CANCEL, DeadlinePolicy.RELEASE)[side],
                on_lost=(LossPolicy.CANCEL, LossPolicy.LEAVE)[side],
                max_attempts=self.max_attempts,
                dead_letter_topic=self.dead_letter_topic,
                record_every_s=self.record_every_s,
                lease_s=NEVER_S,
                plan_patience_s=NEVER_S,
                liveness=Liveness(heartbeat_timeout_s=60),
            )
        )

    @rule(seed=st.integers(0, 2**32), moves=st.integers(10, 60))
    def work_goes_on(self, seed: int, moves: int) -> None:
        """The usual things, in any order.

        One rule plays many of them, which gives the other rules work to disturb.
        """
        chance = random.Random(seed)  # noqa: S311 - a schedule
        for _ in range(moves):
            which = chance.randrange(1000)
            side = which % 2
            match chance.choice(self.everyday):
                case "turn":
                    self.a_pump_turns(side, (0.25, 1.0, 1.0, 8.0)[which % 4])
                case "tick":
                    self.a_sensor_ticks(side, arrives=True)
                case "start":
                    self.a_run_starts(which)
                case "check":
                    self.a_run_makes_its_check(which)
                case "succeed":
                    self.a_run_ends(which, "succeeds")
                case "fail":
                    self.a_run_ends(which, "fails")
                case _:
                    self.free_partitions_are_assigned(side)
            self.no_offset_is_in_two_successful_runs()

    @rule(
        change=st.sampled_from(REBALANCES),
        side=sides,
        which=st.sets(st.sampled_from(PARTITIONS), min_size=1),
    )
    def the_group_changes(self, change: str, side: int, which: set[TopicPartition]) -> None:
        match change:
            case "revoke":
                self.a_revoke_is_requested(which)
            case "fence":
                self.a_member_is_fenced(side)
            case "supersede":
                self.a_hold_is_superseded(side)
            case "notice":
                self.a_loss_is_noticed()
            case _:
                self.a_process_is_killed(side)

    # Kafka

    @rule(which=st.integers(0, 2), records=st.integers(1, 25))
    def records_are_produced(self, which: int, records: int) -> None:
        self.world.kafka.produce(PARTITIONS[which], records)

    def free_partitions_are_assigned(self, side: int) -> None:
        member = self.members[side]
        free = tuple(
            p for p in PARTITIONS if p not in self.owner and p not in member.engine.partitions
        )
        if free and not member.is_fenced:
            self.owner.update(dict.fromkeys(free, member))
            member.feed(events.PartitionsAssigned(free))
            self._take_in_releases()

    def a_revoke_is_requested(self, which: set[TopicPartition]) -> None:
        for member in self.members:
            asked = tuple(
                sorted(
                    p
                    for p in which
                    if self.owner.get(p) is member and p in member.engine.partitions
                )
            )
            if asked and not member.engine.held and not member.is_fenced:
                member.feed(events.RevokeRequested(asked))
                self._take_in_releases()

    def a_member_is_fenced(self, side: int) -> None:
        """Free the partitions of a member at once.

        The member learns that only later, and cannot commit any more.
        """
        member = self.members[side]
        if not member.is_fenced:
            member.is_fenced = True
            self._free(member)
            self.unnoticed.append((member, events.PartitionsLost(tuple(member.engine.partitions))))

    def a_hold_is_superseded(self, side: int) -> None:
        """Free the held partitions of a member at once.

        The member learns that only later, and Kafka still takes its commits.
        """
        member = self.members[side]
        held = tuple(sorted(p for p in member.engine.held if self.owner.get(p) is member))
        if held:
            for partition in held:
                del self.owner[partition]
            self.unnoticed.append(
                (member, events.PartitionsLost(held, events.LostReason.SUPERSEDED))
            )

    def a_loss_is_noticed(self) -> None:
        if not self.unnoticed:
            return
        member, event = self.unnoticed.pop(0)
        if member in self.members:
            gone = tuple(
                p
                for p in event.partitions
                if p in member.engine.partitions and self.owner.get(p) is not member
            )
            member.feed(events.PartitionsLost(gone, event.reason))
            if event.reason is not events.LostReason.SUPERSEDED:
                member.is_fenced = False

    def a_process_is_killed(self, side: int) -> None:
        self._free(self.members[side])
        self.members[side] = self._join(side)

    def _free(self, member: Member) -> None:
        self.owner = {
            partition: owner for partition, owner in self.owner.items() if owner is not member
        }

    def _take_in_releases(self) -> None:
        for member, partitions in self.world.released_by[self.releases_seen :]:
            for partition in partitions:
                if self.owner.get(partition) is member:
                    del self.owner[partition]
        self.releases_seen = len(self.world.released_by)

    # Members

    def a_pump_turns(self, side: int, seconds: float) -> None:
        self.world.now += seconds
        for run_id in self.unchecked | self.working:
            self.world.dagster.move(
                run_id, self.world.dagster.runs[run_id].state, heartbeat=str(self.world.now)
            )
        self.members[side].pass_time()
        self._take_in_releases()

    def a_sensor_ticks(self, side: int, *, arrives: bool) -> None:
        self.members[side].feed(events.TickArrived())
        self._take_in_releases()
        for batch_request in self.members[side].engine.batch_requests:
            self.offered.append(batch_request)
            if arrives:
                self._request(batch_request, keyed=True)

    @rule(side=sides, which=indices)
    def a_tick_is_interrupted(self, side: int, which: int) -> None:
        """Deliver the requests of a tick much later, or twice.

        They come from another sensor, which makes the run key useless.
        """
        self.a_sensor_ticks(side, arrives=False)
        if self.offered:
            self._request(self.offered[which % len(self.offered)], keyed=False)

    def _request(self, batch_request: BatchRequest, *, keyed: bool) -> None:
        dagster = self.world.dagster
        run_id = (
            dagster.request(batch_request)
            if keyed
            else dagster.add(batch_request.batch_id, batch_request.ranges, RunState.WAITING)
        )
        if run_id is not None:
            self.unchecked.add(run_id)

    @rule(
        side=sides,
        kind=st.sampled_from(FRAGILE),
        how=st.sampled_from(["is back", "is back", "fails", "is not answered"]),
    )
    def a_backend_goes_away(self, side: int, kind: type[commands.Command], how: str) -> None:
        if how == "is back":
            self.the_backends_are_back(side)
        else:
            (self.members[side].fails if how == "fails" else self.members[side].unanswered).add(
                kind
            )

    def the_backends_are_back(self, side: int) -> None:
        self.members[side].fails.clear()
        self.members[side].unanswered.clear()

    # Runs

    def a_run_starts(self, which: int) -> None:
        waiting = [
            run_id
            for run_id in sorted(self.unchecked)
            if self.world.dagster.runs[run_id].state is RunState.WAITING
        ]
        if waiting:
            self.world.dagster.move(waiting[which % len(waiting)], RunState.STARTED)

    def a_run_makes_its_check(self, which: int) -> None:
        started = [
            run_id
            for run_id in sorted(self.unchecked)
            if self.world.dagster.runs[run_id].state is not RunState.WAITING
        ]
        if started:
            self._check(started[which % len(started)])

    def _check(self, run_id: str) -> None:
        self.unchecked.remove(run_id)
        if self.world.dagster.runs[run_id].state in WORKING and self.world.check(run_id) is None:
            self.working.add(run_id)

    @rule(which=indices, end=st.sampled_from(["fails", "dies"]))
    def a_run_ends(self, which: int, end: str) -> None:
        if not self.working:
            return
        run_id = sorted(self.working)[which % len(self.working)]
        self.working.remove(run_id)
        if end == "succeeds":
            self.world.succeed(run_id)
        elif end == "fails":
            self.world.dagster.move(run_id, RunState.FAILED)

    # Invariants

    @invariant()
    def no_offset_is_in_two_successful_runs(self) -> None:
        done = sorted(self.world.output.elements())
        for before, after in pairwise(done):
            assert not before.overlaps(after), f"{before} and {after} were both processed"

    @invariant()
    def only_dead_runs_are_ended(self) -> None:
        for run_id in self.working:
            assert self.world.dagster.runs[run_id].state in WORKING

    def teardown(self) -> None:
        """It calms down: then all that was produced is processed, committed and recorded."""
        while self.unnoticed:
            self.a_loss_is_noticed()
        for side in (0, 1):
            self.the_backends_are_back(side)
            self.free_partitions_are_assigned(side)
        for _ in range(60):
            for side in (0, 1):
                self.free_partitions_are_assigned(side)
                self.a_sensor_ticks(side, arrives=True)
                self.a_pump_turns(side, 4.0)
            for run_id in sorted(self.unchecked):
                if self.world.dagster.runs[run_id].state is RunState.WAITING:
                    self.world.dagster.move(run_id, RunState.STARTED)
                self._check(run_id)
            for run_id in sorted(self.working):
                self.working.remove(run_id)
                self.world.succeed(run_id)
            self.no_offset_is_in_two_successful_runs()
        for partition, bounds in self.world.kafka.bounds.items():
            stored = self.world.kafka.stored[partition]
            assert stored.offset == bounds.until, (
                f"{partition} stands still at {stored} although it ends at {bounds.until}"
            )
            self._check_records(partition)
        for member in self.members:
            assert member.engine.holds == ()

    def _check_records(self, partition: TopicPartition) -> None:
        recorded = {
            record.range
            for record in self.world.dagster.recorded
            if record.range.topic_partition == partition
        }
        committed = [0, *(offset for done, offset in self.world.kafka.commits if done == partition)]
        kept = set(self.world.output) | {letter.range for letter in self.world.kafka.letters}
        ranges = {
            replace(range_, start=start, until=until)
            for range_ in recorded
            for start, until in pairwise(committed)
        }
        assert ranges <= kept, f"{sorted(ranges - kept)} are committed and nowhere"
        bounds = [0, *(range_.until for range_ in sorted(recorded))]
        assert [(range_.start, range_.until) for range_ in sorted(recorded)] == list(
            pairwise(bounds)
        ), f"{partition}: {recorded}"
        assert set(bounds) <= set(committed), (
            f"{partition} has records that end between commits: {recorded}"
        )
        assert bounds[-1] == committed[-1], f"{partition} has commits that were not recorded"


class TwoMembersWithDeadLetters(TwoMembers):
    """The same with one attempt for each range.

    A range that fails is in the dead-letter topic, and the partitions go on.
    """

    everyday = (*EVERYDAY, *["fail"] * 6)
    max_attempts = 1
    dead_letter_topic = "dead"


class TwoMembersThatJoinRecords(TwoMembersWithDeadLetters):
    """The same with records that are joined.

    Each committed offset is in exactly one record.
    """

    record_every_s = 30.0


TwoMembers.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TwoMembersWithDeadLetters.TestCase.settings = settings(
    TwoMembers.TestCase.settings, max_examples=100
)
TwoMembersThatJoinRecords.TestCase.settings = settings(
    TwoMembers.TestCase.settings, max_examples=100
)
TestTwoMembers = TwoMembers.TestCase
TestTwoMembersWithDeadLetters = TwoMembersWithDeadLetters.TestCase
TestTwoMembersThatJoinRecords = TwoMembersThatJoinRecords.TestCase

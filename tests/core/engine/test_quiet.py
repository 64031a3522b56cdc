"""A quiet engine skips decisions: random stories have the same commands at the same times."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.claimed_work import ClaimedWork
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.revokes.hold import HeldPartitions
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, batch_ids
from tests.core.world import ENDED, Member, World, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.revokes.hold import Hold

PARTITIONS = 3
BASE = EngineSettings(
    limits=BatchLimits(
        max_records_per_range=10, max_runs_in_flight=2, min_records=5, max_wait_s=3.0
    ),
    backoff=RetryBackoff(0.5, 20.0),
    max_attempts=2,
    # Reads are rare, so none hides another time at which a decision is due.
    poll_s=7.3,
    bounds_s=4.1,
    idle_bounds_s=6.7,
    directives_s=9.1,
    retry_s=1.7,
    recheck_s=5.9,
    stalled_after_s=15.0,
)
SETTINGS = {
    "stops": BASE,
    "letters": replace(BASE, dead_letter_topic="dead", record_every_s=5.0),
    "stream": BASE.of_stream("r1"),
}


class WatchedEngine(Engine):
    """An engine that counts skipped decisions."""

    skipped = 0

    def _is_quiet(self, now: float) -> bool:
        is_quiet = super()._is_quiet(now)
        self.skipped += is_quiet
        return is_quiet


class RestlessHolds(HeldPartitions):
    """Holds that skip no step and no partition."""

    def advance(self, now: float) -> Iterable[commands.Command]:
        self._advanced = ((), 0, float("-inf"))
        return super().advance(now)

    def _unfinished(self, hold: Hold) -> list[OwnedPartition]:
        return self._partitions.known(hold.epochs)


class RestlessEngine(Engine):
    """An engine that skips no decision and no partition."""

    def __init__(
        self, settings: EngineSettings, *, new_batch_id: Callable[..., str], now: float
    ) -> None:
        super().__init__(settings, new_batch_id=new_batch_id, now=now)
        self._held = RestlessHolds(settings, self.partitions, self._streaming)

    def _is_quiet(self, _now: float) -> bool:
        return False

    def _due(self, now: float) -> list[OwnedPartition]:
        super()._due(now)
        return list(self.partitions.values())

    def _concerned(self, _batch_ids: Iterable[str], _now: float) -> list[OwnedPartition]:
        return list(self.partitions.busy)

    @property
    def _due_requests(self) -> tuple[BatchRequest, ...]:
        self._claimed_work = ClaimedWork(self.settings, self.partitions)
        return super()._due_requests


def disturb(member: Member, random: Random) -> None:
    """Change something in Kafka or Dagster, or give a directive."""
    world = member.world
    runs = [run_id for run_id, run in world.dagster.runs.items() if run.state not in ENDED]
    match random.randrange(9):
        case 0 | 1 if member.engine.settings.worker:
            end_stream_batches(world, random)
        case 0 | 1:
            member.tick()
        case 2:
            world.kafka.produce(tp(random.randrange(PARTITIONS)), random.randrange(1, 15))
        case 3 | 4 if runs:
            world.start(random.choice(runs))
        case 5 | 6 if runs:
            run_id = random.choice(runs)
            if world.dagster.runs[run_id].state is RunState.STARTED:
                ends_well = random.random() < 0.6
                if ends_well:
                    world.succeed(run_id)
                else:
                    world.dagster.move(run_id, RunState.FAILED)
        case 7:
            actions = [Action.PAUSE, Action.RESUME, Action.RETRY, Action.STOP]
            # A stop cancels the streaming run, which is not among the runs of the fake Dagster.
            action = random.choice(actions[:3] if member.engine.settings.worker else actions)
            world.orders.append(Directive(action, random.choice(["*", "orders:0"]), "a", 0.0, "b"))
        case _:
            failing: list[set[type[commands.Command]]] = [
                set(),
                {commands.WriteOffsets},
                {commands.RecordCommits},
                {commands.StoreDeadLetter},
            ]
            member.fails = random.choice(failing)


def end_stream_batches(world: World, random: Random) -> None:
    for stored in world.kafka.stored:
        start = world.kafka.stored[stored].offset
        for until, batch_id in world.kafka.claims(stored.partition)[:1]:
            outcome = random.choice([BatchOutcome.SUCCEEDED, BatchOutcome.FAILED, None])
            claim = (batch_id, OffsetRange(stored.topic, stored.partition, start, until))
            if outcome is not None and claim not in world.notes:
                world.notes[claim] = outcome
                if outcome is BatchOutcome.SUCCEEDED:
                    world.done_by_streams.add(claim)


def commands_of(seed: int, settings: EngineSettings, kind: type[Engine]) -> tuple[Engine, object]:
    """Play a story and return all commands with the times of their turns."""
    random = Random(seed)  # noqa: S311 - the same story for both engines
    world = World(records=20, partitions=PARTITIONS)
    world.streams["r1"] = RunSnapshot("r1", "", (), RunState.STARTED, heartbeat="begun")
    member = Member(world, settings)
    ids = batch_ids("r1") if settings.worker else lambda _: f"b{next(world.batch_ids)}"
    member.engine = engine = kind(settings, new_batch_id=ids, now=world.now)
    member.feed(events.TickArrived())
    member.feed(events.PartitionsAssigned(tuple(map(tp, range(PARTITIONS)))))
    given: list[object] = []
    for _ in range(40):
        disturb(member, random)
        for _ in range(random.choice([1, 5, 20, 60])):
            world.now += 0.1
            given.append((world.now, tuple(member.pass_time()), engine.batch_requests))
            given.append((world.now, engine.claimed))
    member.feed(events.RevokeRequested((tp(0),)))
    given.append((world.now, tuple(member.done)))
    for _ in range(100):
        world.now += 0.3
        given.append((world.now, tuple(member.pass_time())))
    return engine, given


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_quiet_engine_returns_the_commands_of_an_engine_that_always_decides(
    seed: int, settings: EngineSettings
) -> None:
    engine, given = commands_of(seed, settings, WatchedEngine)
    assert isinstance(engine, WatchedEngine)
    _, expected = commands_of(seed, settings, RestlessEngine)
    assert given == expected
    assert engine.skipped > 100


RARE_S = 1e4
SLOW = EngineSettings(
    limits=BatchLimits(max_records_per_range=10, min_records=5, max_wait_s=33.3),
    backoff=RetryBackoff(101.3, 101.3),
    max_attempts=1,
    lease_s=RARE_S,
    plan_patience_s=RARE_S,
    stalled_after_s=RARE_S,
    poll_s=5.0,
    bounds_s=20.0,
    idle_bounds_s=20.0,
    directives_s=RARE_S,
    retry_s=1.7,
    recheck_s=33.3,
)
"""Reads are rare, so other times are due between two of them."""
LETTERS = replace(SLOW, dead_letter_topic="dead")


class Quiet:
    """A member with one partition, and the commands and run requests of each turn."""

    def __init__(self, settings: EngineSettings, kind: type[Engine]) -> None:
        self.world = World(records=10)
        self.member = Member(self.world, settings)
        self.member.engine = kind(
            settings, new_batch_id=lambda _: f"b{next(self.world.batch_ids)}", now=self.world.now
        )
        self.given: list[tuple[float, list[commands.Command], tuple[BatchRequest, ...]]] = []
        self.member.feed(events.TickArrived())
        self.member.feed(events.PartitionsAssigned((tp(0),)))
        self.wait(25)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.world.now += 0.25
            told = self.member.pass_time()
            self.given.append((self.world.now, told, self.member.engine.batch_requests))

    def work(self) -> str:
        """Start the requested run."""
        (run_id,) = self.member.tick()
        self.world.start(run_id)
        return run_id

    def fail(self) -> None:
        self.world.dagster.move(self.work(), RunState.FAILED)


def unanswered_read(quiet: Quiet) -> None:
    quiet.member.fails.add(commands.ReadStoredOffsets)
    quiet.member.feed(events.PartitionsLost((tp(0),)))
    quiet.member.feed(events.PartitionsAssigned((tp(0),)))


def refused_commit(quiet: Quiet) -> None:
    run_id = quiet.work()
    quiet.world.kafka.forbidden[tp(0)] = "grant the ACL READ"
    quiet.world.succeed(run_id)


def deferred_record(quiet: Quiet) -> None:
    quiet.world.succeed(quiet.work())
    quiet.world.kafka.produce(tp(0), 10)
    quiet.wait(30)
    quiet.world.succeed(quiet.work())


def few_records(quiet: Quiet) -> None:
    quiet.world.succeed(quiet.work())
    quiet.wait(30)
    quiet.world.kafka.produce(tp(0), 3)


def unanswered_letter(quiet: Quiet) -> None:
    quiet.member.fails.add(commands.StoreDeadLetter)
    quiet.fail()


def failed_letter(quiet: Quiet) -> None:
    unanswered_letter(quiet)
    quiet.wait(30)
    (*_, letter) = quiet.member.given(commands.StoreDeadLetter)
    assert isinstance(letter, commands.StoreDeadLetter)
    for _ in range(4):
        quiet.member.feed(events.DeadLetterFailed(letter, "no leader"))


DUE: dict[str, tuple[Callable[[Quiet], None], EngineSettings, type[commands.Command]]] = {
    "stored offset is read again": (unanswered_read, SLOW, commands.ReadStoredOffsets),
    "refused commit is written again": (refused_commit, SLOW, commands.WriteOffsets),
    "joined commits are recorded": (
        deferred_record,
        replace(SLOW, record_every_s=77.9),
        commands.RecordCommits,
    ),
    "few records are claimed": (few_records, SLOW, commands.WriteOffsets),
    "unanswered letter is stored again": (unanswered_letter, LETTERS, commands.StoreDeadLetter),
    "failed letter is stored again": (failed_letter, LETTERS, commands.StoreDeadLetter),
    "failed range is requested after its runs are read": (Quiet.fail, SLOW, commands.ReadRuns),
}


@pytest.mark.parametrize(("story", "settings", "due"), DUE.values(), ids=DUE)
def test_quiet_engine_decides_when_only_one_time_is_due(
    story: Callable[[Quiet], None], settings: EngineSettings, due: type[commands.Command]
) -> None:
    played: list[Quiet] = []
    for kind in (WatchedEngine, RestlessEngine):
        played.append(quiet := Quiet(settings, kind))
        story(quiet)
        began_at = quiet.world.now
        quiet.wait(150)
        late = [one for at, told, _ in quiet.given if at > began_at + 30 for one in told]
        assert any(isinstance(one, due) for one in late)
    watched, restless = played
    assert watched.given == restless.given
    assert isinstance(watched.member.engine, WatchedEngine)
    assert watched.member.engine.skipped > 100

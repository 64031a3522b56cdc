"""A quiet engine skips decisions: random stories have the same commands at the same times."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, batch_ids
from tests.core.world import ENDED, Member, World, tp

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


class RestlessEngine(Engine):
    """An engine that skips no decision."""

    def _is_quiet(self, _now: float) -> bool:
        return False


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
                {commands.RecordCommit},
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

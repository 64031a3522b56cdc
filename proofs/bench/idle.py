"""`idle`: share of a core for the decisions of a member without work.

The member loop's ten turns per second run in virtual time and without Kafka, whose answers report
no change.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.events import PartitionLookup
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, TopicPartition
from dagster_rebalance.core.reporting.explain import summary
from proofs.bench.entries import Entry, Goal, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

_CASES = {1_000: 0.02, 10_000: 0.1}
"""Maximum share of a core by number of partitions."""
_TURN_S = 0.1
_TURNS_BETWEEN_SUMMARIES = 10
_NOTHING = Bounds(0, 0)


def measure(*, runs: int, turns: int, step: Callable[[str], None]) -> list[Entry]:
    """Measure members with some and with many idle partitions."""
    entries = []
    for partitions, goal in _CASES.items():
        samples = []
        for run in range(runs):
            step(f"idle, {partitions:,} partitions, run {run + 1} of {runs}")
            used_s = _turn_idle(partitions, turns)
            samples.append(Sample(used_s, None, used_s / (turns * _TURN_S)))
        unit = f"s of CPU in {turns * _TURN_S:g} s"
        entries.append(
            Entry(
                "idle", f"{partitions:,} idle partitions", "a core", unit, Goal("<=", goal), samples
            )
        )
    return entries


def _turn_idle(partitions: int, turns: int) -> float:
    """Return the CPU seconds of the turns after all partitions were assigned."""
    engine = Engine(EngineSettings(), new_batch_id=lambda _: "none", now=0.0)
    _feed(engine, events.TickArrived(), 0.0)
    _feed(
        engine,
        events.PartitionsAssigned(
            tuple(TopicPartition("orders", number) for number in range(partitions))
        ),
        0.0,
    )
    settled = [turn * _TURN_S for turn in range(1, 1 + 2 * _TURNS_BETWEEN_SUMMARIES)]
    measured = [settled[-1] + turn * _TURN_S for turn in range(1, 1 + turns)]
    for now in settled:
        _feed(engine, events.TimePassed(), now)
    if engine.partitions.busy:
        msg = (
            f"{len(engine.partitions.busy)} of {partitions} partitions are not idle "
            f"after {settled[-1]:g} s"
        )
        raise IllegalStateError(msg)
    began_at = time.process_time()
    for turn, now in enumerate(measured):
        _feed(engine, events.TimePassed(), now)
        _ = engine.held, engine.batch_requests
        if turn % _TURNS_BETWEEN_SUMMARIES == 0:
            _feed(engine, events.TickArrived(), now)
            summary(engine, now)
    return time.process_time() - began_at


def _feed(engine: Engine, event: events.Event, now: float) -> None:
    todo = [event]
    while todo:
        for command in engine.handle(todo.pop(0), now):
            match command:
                case commands.ReadStoredOffsets(epochs):
                    found = PartitionLookup(OffsetAndMetadata(0), _NOTHING, None)
                    todo.append(events.StoredOffsetsRead(epochs, dict.fromkeys(epochs, found)))
                case commands.ReadDirectives(epoch):
                    todo.append(events.DirectivesRead((), epoch))
                case commands.ReadRuns(batch_ids, with_live, look):
                    todo.append(events.RunsRead(batch_ids, (), with_live, look))
                case commands.ReadBounds(asked):
                    todo.append(events.BoundsRead(dict.fromkeys(asked, _NOTHING)))
                case commands.WriteOffsets(writes):
                    todo.append(events.OffsetsWritten(writes))
                case _:
                    pass

"""Look at a whole group as a member would that is given all of its partitions, and touch nothing.

Its own engine takes every partition in, so that what is said of it, and why it is stopped, is
what the next owner would say. It is asked for nothing but what it reads: whatever it wants written,
requested or cancelled is dropped. What only the owner knows is not seen: how long it has waited,
and that Kafka refuses its writes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus, status_of
from dagster_rebalance.kafka.log_bounds import READ_LIMIT_S, BoundsReader
from dagster_rebalance.orchestration.reporting.group_scan import look_at_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dagster_rebalance.core.batches.settings import EngineSettings
    from dagster_rebalance.core.model.events import Found
    from dagster_rebalance.core.model.offsets import Bounds, TopicPartition
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.orchestration.ports import GroupRecords, RunsPort


@dataclass(frozen=True)
class GroupSeen:
    """A whole group at one time.

    Attributes:
        found: What Kafka says of its partitions.
        statuses: One row for each, in their order.
        missing_topics: Its topics that Kafka does not have.
        notes: Leaders that did not answer.
    """

    found: Mapping[TopicPartition, Found]
    statuses: Mapping[TopicPartition, PartitionStatus]
    missing_topics: Sequence[str]
    notes: Sequence[str]


def look_on(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    runs: RunsPort,
    catalogue: GroupRecords,
    *,
    settings: EngineSettings,
    owners: Owners,
) -> GroupSeen:
    """Look at a group.

    Args:
        consumer: Asks Kafka. It does not join.
        topics: The topics of the group.
        runs: Asks Dagster for runs.
        catalogue: Asks Dagster for recorded commits and for orders.
        settings: Those of the members.
        owners: Who has which partition.

    Raises:
        BrokerError: Kafka did not answer, or refused.
        ConfigurationError: The orders of people cannot be read.
    """
    now = time.monotonic()
    notes: list[str] = []
    bounds: dict[TopicPartition, Bounds] = {}

    def read(partitions: list[TopicPartition]) -> dict[TopicPartition, Bounds]:
        reader = BoundsReader(
            consumer, time.monotonic, notes.append, bounds_patience_s=READ_LIMIT_S
        )
        bounds.update(reader.read_beyond(partitions))
        return bounds

    whole = look_at_group(consumer, sorted(set(topics)), read, settings.start_from)
    found = whole.found
    recorded = catalogue.last_recorded(found)
    found = {p: replace(one, recorded=recorded.get(p)) for p, one in found.items()}
    try:
        orders = catalogue.orders()
    except ValueError as problem:
        raise ConfigurationError(str(problem)) from problem
    # Its last tick is long ago, so that it claims nothing.
    engine = Engine(settings, new_batch_id=str, now=now - 2 * settings.plan_patience_s)
    todo: deque[events.Event] = deque([events.PartitionsAssigned(whole.partitions)])
    while todo:
        for command in engine.handle(todo.popleft(), now):
            match command:
                case commands.ReadStoredOffsets(epochs):
                    known = {p: epoch for p, epoch in epochs.items() if p in found}
                    todo.append(events.StoredOffsetsRead(known, found))
                case commands.ReadDirectives(epoch):
                    todo.append(events.DirectivesRead(orders, epoch))
                case commands.ReadRuns(batch_ids, _, look, claims):
                    live = runs.read(batch_ids, live_too=True, claims=claims)
                    theirs = tuple(_strange(run, owners) for run in live)
                    todo.append(events.RunsRead(batch_ids, theirs, with_live=True, look=look))
                case commands.ReadBounds(those):
                    todo.append(events.BoundsRead({p: bounds[p] for p in those if p in bounds}))
                case _:
                    pass
    return GroupSeen(
        found,
        {
            partition: status_of(engine.partitions[partition], found.get(partition), owners, now)
            for partition in sorted(whole.partitions)
        },
        whole.missing,
        notes,
    )


def _strange(run: RunSeen, owners: Owners) -> RunSeen:
    """A streaming run without its say on what it owns by Kafka's word: nobody waits for that."""
    if run.may_work_on is None:
        return run
    return replace(run, may_work_on=run.may_work_on - owners.owned_by(run.run_id))

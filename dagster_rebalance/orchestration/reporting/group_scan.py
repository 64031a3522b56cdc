"""A look at a whole group finds its lag and the partitions that cannot go on, whoever owns them.

Kafka, the runs, and what people have ordered show them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import StoredPartition
from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, TopicPartition
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.core.partitions.owned import Refused
from dagster_rebalance.core.partitions.recovery import judge
from dagster_rebalance.core.reporting.lag import (
    FirstSince,
    GroupLag,
    GroupState,
    LagLimit,
    Late,
    PartitionLag,
    Waiting,
    find_late,
    group_lag,
)
from dagster_rebalance.core.runs.progress import blocking, progress_of
from dagster_rebalance.core.runs.retry import why_blocked
from dagster_rebalance.kafka.log_bounds import READ_LIMIT_S, find, read_bounds
from dagster_rebalance.orchestration.ports import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dagster_rebalance.core.batches.settings import EngineSettings
    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.events import Found
    from dagster_rebalance.core.model.offsets import Bounds, OffsetRange
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.model.start_position import Start
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.orchestration.ports import GroupRecords, RunsPort

_MOST_ERRORS = 5


@dataclass(frozen=True)
class GroupScan:
    """The partitions of a whole group, as Kafka shows them.

    Attributes:
        found: What is known of each; not what Dagster has recorded.
        partitions: All of them, also those of which nothing is known.
        topics: The topics of the group that Kafka has.
        missing: Those that it does not have, in order.
    """

    found: Mapping[TopicPartition, Found]
    partitions: tuple[TopicPartition, ...]
    topics: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def without(self, partitions: Collection[TopicPartition]) -> GroupScan:
        """The same without some partitions."""
        kept = {p: found for p, found in self.found.items() if p not in partitions}
        return replace(self, found=kept)


def look_at_group(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    read: Callable[[list[TopicPartition]], dict[TopicPartition, Bounds]],
    start: Start,
    *,
    timeout_s: float = READ_LIMIT_S,
) -> GroupScan:
    """Ask Kafka about the partitions of a group.

    Args:
        consumer: Asks Kafka.
        topics: The topics of the group, and patterns.
        read: Reads the bounds of partitions; of one that it leaves out, it is not known whether
            offsets are missing.
        start: Where the group begins with what it has committed nothing for.
        timeout_s: How long Kafka may take for each other answer.

    Raises:
        BrokerError: Kafka did not answer.
    """
    wanted = Topics.of(topics)
    there = consumer.list_topics(timeout_s)
    found_topics = wanted.among(there)
    partitions = [
        TopicPartition(topic, number)
        for topic in found_topics
        for number in sorted(info.partition for info in there[topic])
    ]
    bounds = read(partitions)
    known = {partition: bounds.get(partition, ANY_BOUNDS) for partition in partitions}
    found = find(consumer, known, {}, timeout_s=timeout_s, patience_s=timeout_s, start=start)
    return GroupScan(found, tuple(partitions), found_topics, wanted.missing(there))


def late_partitions(
    consumer: RebalanceAwareConsumer,
    rows: Iterable[PartitionLag],
    limit: LagLimit,
    *,
    now_s: float,
    waiting: Waiting | None = None,
    timeout_s: float = READ_LIMIT_S,
) -> Late:
    """The partitions in which a record waits for longer than the limit.

    Args:
        consumer: Asks Kafka.
        rows: The lag of the partitions.
        limit: The limit; Kafka is asked only if it has seconds.
        now_s: The time, in seconds since 1970.
        waiting: What earlier looks have seen; None where there were none.
        timeout_s: How long Kafka may take.

    Raises:
        BrokerError: Kafka did not answer.
    """
    behind = [row for row in rows if row.lag]
    if limit.seconds is None or not behind:
        return Late()
    since_ms = max(0, int((now_s - limit.seconds) * 1000))
    wanted = {row.partition: since_ms for row in behind}
    found = consumer.cluster.offsets_for_times(wanted, timeout_s)
    first = {
        partition: None if answer is None else FirstSince(answer.offset, answer.timestamp / 1000)
        for partition, answer in found.items()
    }
    return find_late(behind, first, limit.seconds, now_s, waiting)


def lag_of(
    look: GroupScan,
    standing: GroupState,
    settings: EngineSettings,
    late: Late | None = None,
) -> GroupLag:
    """The lag of the group.

    Args:
        look: What Kafka said.
        standing: What else is known.
        settings: Where a partition begins that has no committed offset.
        late: The partitions in which a record waits for too long.
    """
    return group_lag(
        look.partitions, look.found, standing, start_from=settings.start_from, late=late
    )


def standstills(
    look: GroupScan,
    runs: RunsPort,
    catalogue: GroupRecords,
    settings: EngineSettings,
    known: Collection[TopicPartition] = (),
) -> GroupState:
    """The partitions that cannot go on, and those that people have paused or stopped, with reasons.

    The answer also has the runs that work on them.

    Args:
        look: What Kafka said.
        runs: Asks Dagster for runs.
        catalogue: Asks Dagster for recorded commits and for orders.
        settings: When a partition is stopped.
        known: Partitions whose stops and runs the caller knows better: only their orders are looked
            up.
    """
    standing = replace(
        _stopped_in(look.without(known), runs, catalogue, settings), missing=look.missing
    )
    try:
        return replace(standing, ordered=_ordered_in(look, catalogue))
    except ValueError as problem:  # Members claim nothing of what they are assigned from now on.
        everything = dict.fromkeys(look.found, str(problem))
        return replace(standing, stopped={**everything, **standing.stopped})


def look_by_hand(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    runs: RunsPort,
    catalogue: GroupRecords,
    settings: EngineSettings,
) -> tuple[GroupScan, GroupState]:
    """Look at a group, and at what stands still in it, with no member there.

    Every leader has to answer.

    Args:
        consumer: Asks Kafka.
        topics: The topics of the group.
        runs: Asks Dagster for runs.
        catalogue: Asks Dagster for recorded commits and for orders.
        settings: Those of the members.

    Raises:
        BrokerError: Kafka did not answer.
    """
    look = look_at_group(consumer, topics, partial(read_bounds, consumer), settings.start_from)
    return look, standstills(look, runs, catalogue, settings)


def _stopped_in(
    look: GroupScan, runs: RunsPort, catalogue: GroupRecords, settings: EngineSettings
) -> GroupState:
    without = [partition for partition, found in look.found.items() if found.stored is None]
    recorded = catalogue.last_recorded(without) if without else {}
    judged = {
        partition: judge(
            partition, replace(found, recorded=recorded.get(partition)), settings.foreign_metadata
        )
        for partition, found in look.found.items()
    }
    claimed = {
        partition: read.ranges(partition)
        for partition, read in judged.items()
        if isinstance(read, StoredPartition)
    }
    found = _runs(
        runs, [(batch_id, range_) for ranges in claimed.values() for range_, batch_id in ranges]
    )
    stopped, failed = {}, {}
    for partition, verdict in judged.items():
        if isinstance(verdict, Refused):
            stopped[partition] = verdict.reason
            continue
        blocked = _failed(claimed.get(partition, ()), found, settings.max_attempts)
        if blocked is not None:
            stopped[partition], failed[partition] = blocked
    working = {
        range_.topic_partition: run.run_id for run in found if run.is_live for range_ in run.ranges
    }
    return GroupState(stopped, working=working, failed=failed)


def _ordered_in(look: GroupScan, catalogue: GroupRecords) -> dict[TopicPartition, str]:
    orders = catalogue.orders()
    return {
        partition: str(order)
        for partition in look.found
        if (order := in_force(orders, partition)) is not None
    }


def _failed(
    claimed: Iterable[tuple[OffsetRange, str]], runs: tuple[RunSeen, ...], max_attempts: int
) -> tuple[str, tuple[str, str, str]] | None:
    """Why a partition is stopped by runs that failed, with the last one, its batch and error."""
    for range_, batch_id in claimed:
        progress = progress_of(range_, batch_id, runs, max_attempts=max_attempts)
        blocked = blocking(progress)
        if blocked is not None:
            return why_blocked(range_, blocked, batch_id), (
                blocked.run_id,
                batch_id,
                blocked.why,
            )
    return None


def errors_of(standing: GroupState, runs: RunsPort) -> dict[TopicPartition, RunError]:
    """What the last runs failed with on the first few stopped partitions.

    Args:
        standing: What is stopped.
        runs: Asks Dagster for the errors.
    """
    first = sorted(standing.failed.keys() & standing.stopped.keys())[:_MOST_ERRORS]
    return {
        partition: RunError(run_id, error or runs.why_failed(run_id, batch_id))
        for partition in first
        for run_id, batch_id, error in [standing.failed[partition]]
    }


def _runs(runs: RunsPort, claims: Sequence[Claimed]) -> tuple[RunSeen, ...]:
    wanted = frozenset(batch_id for batch_id, _ in claims)
    return runs.read(wanted, claims=claims) if wanted else ()

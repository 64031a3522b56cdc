"""A look at a whole group finds the partitions that cannot go on, whoever owns them.

Kafka, the runs, and what people have ordered show them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.claims import StoredPartition
from dagster_rebalance.core.control import in_force
from dagster_rebalance.core.owned_partition import Refused
from dagster_rebalance.core.partition import ANY_BOUNDS, TopicPartition
from dagster_rebalance.core.restoring import judge
from dagster_rebalance.core.runs import blocking, progress_of
from dagster_rebalance.core.setbacks import why_blocked
from dagster_rebalance.orchestration.bounds import READ_LIMIT_S, find

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
    from dagster_rebalance.core.commands import Claimed
    from dagster_rebalance.core.events import Found
    from dagster_rebalance.core.partition import Bounds, OffsetRange
    from dagster_rebalance.core.runs import RunSeen
    from dagster_rebalance.core.settings import DriverSettings
    from dagster_rebalance.orchestration.port import GroupRecords, RunsPort


@dataclass(frozen=True)
class GroupLook:
    """The partitions of a whole group, as Kafka shows them.

    Attributes:
        found: What is known of each; not what Dagster has recorded.
    """

    found: Mapping[TopicPartition, Found]

    def without(self, partitions: Collection[TopicPartition]) -> GroupLook:
        """The same without some partitions."""
        return GroupLook(
            {
                partition: found
                for partition, found in self.found.items()
                if partition not in partitions
            }
        )


def look_at_group(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    read: Callable[[list[TopicPartition]], dict[TopicPartition, Bounds]],
    *,
    timeout_s: float = READ_LIMIT_S,
) -> GroupLook:
    """Ask Kafka about the partitions of a group.

    Args:
        consumer: Asks Kafka.
        topics: The topics of the group.
        read: Reads the bounds of partitions; of one that it leaves out, it is not known whether
            offsets are missing.
        timeout_s: How long Kafka may take for each other answer.

    Raises:
        BrokerError: Kafka did not answer.
    """
    partitions = [
        TopicPartition(topic, info.partition)
        for topic in topics
        for info in consumer.partitions_for(topic, timeout_s)
    ]
    bounds = read(partitions)
    known = {partition: bounds.get(partition, ANY_BOUNDS) for partition in partitions}
    return GroupLook(find(consumer, known, {}, timeout_s=timeout_s, patience_s=timeout_s))


def standstills(
    look: GroupLook,
    runs: RunsPort,
    catalogue: GroupRecords,
    settings: DriverSettings,
    known: Collection[TopicPartition] = (),
) -> tuple[dict[TopicPartition, str], dict[TopicPartition, str]]:
    """The partitions that cannot go on, and those that people have paused or stopped, with reasons.

    Args:
        look: What Kafka said.
        runs: Asks Dagster for runs.
        catalogue: Asks Dagster for recorded commits and for orders.
        settings: When a partition is stopped.
        known: Partitions whose stops the caller knows better: only their orders are looked up.
    """
    stopped = _stopped_in(look.without(known), runs, catalogue, settings)
    try:
        return stopped, _ordered_in(look, catalogue)
    except ValueError as problem:  # Members claim nothing of what they are assigned from now on.
        return dict.fromkeys(look.found, str(problem)) | stopped, {}


def _stopped_in(
    look: GroupLook, runs: RunsPort, catalogue: GroupRecords, settings: DriverSettings
) -> dict[TopicPartition, str]:
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
    stopped = {}
    for partition, verdict in judged.items():
        reason = (
            verdict.reason
            if isinstance(verdict, Refused)
            else _failed(claimed.get(partition, ()), found, settings.max_attempts)
        )
        if reason is not None:
            stopped[partition] = reason
    return stopped


def _ordered_in(look: GroupLook, catalogue: GroupRecords) -> dict[TopicPartition, str]:
    orders = catalogue.orders()
    return {
        partition: str(order)
        for partition in look.found
        if (order := in_force(orders, partition)) is not None
    }


def _failed(
    claimed: Iterable[tuple[OffsetRange, str]], runs: tuple[RunSeen, ...], max_attempts: int
) -> str | None:
    for range_, batch_id in claimed:
        progress = progress_of(range_, batch_id, runs, max_attempts=max_attempts)
        blocked = blocking(progress)
        if blocked is not None:
            return why_blocked(range_, blocked, batch_id)
    return None


def _runs(runs: RunsPort, claims: Sequence[Claimed]) -> tuple[RunSeen, ...]:
    wanted = frozenset(batch_id for batch_id, _ in claims)
    return runs.read(wanted, claims=claims) if wanted else ()

"""The asset check that fails while a partition is stopped.

A member reports it whenever it stops a partition, lets one go on, or is assigned some: its own partitions as it knows them, those of others
as Kafka and the runs show them. Executed by hand, it looks at Kafka and the runs alone, so that it also answers while no member is there.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

import hashlib
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.claims import StoredPartition
from dagster_rebalance.core.partition import ANY_BOUNDS, Bounds, OffsetRange, TopicPartition, named
from dagster_rebalance.core.restoring import Found, Refused, judge
from dagster_rebalance.core.runs import RunSeen, blocking, progress_of
from dagster_rebalance.core.setbacks import why_blocked
from dagster_rebalance.orchestration.bounds import READ_LIMIT_S, RecordedCommits, find, read_bounds
from dagster_rebalance.orchestration.runs import RunLedger

if TYPE_CHECKING:
    from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
    from dagster_rebalance.core.settings import DriverSettings
    from dagster_rebalance.orchestration.resource import KafkaConsumerResource

STOPPED_CHECK = "no_partition_stopped"
_REASONS_SHOWN = 20
_MOST_NAMES_CHARACTERS = 2_000
"""However many partitions are stopped, an evaluation stays small: Dagster stores each one."""


def evaluation(stopped: Mapping[TopicPartition, str], asset_key: dg.AssetKey) -> dg.AssetCheckEvaluation:
    """The state of the check, as a member reports it."""
    result = _result(stopped)
    return dg.AssetCheckEvaluation(
        asset_key=asset_key,
        check_name=STOPPED_CHECK,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


def build_stopped_check(
    asset_key: dg.AssetKey, kafka_key: str, catalogue_of: Callable[[dg.DagsterInstance], RecordedCommits]
) -> dg.AssetChecksDefinition:
    """Build the check for the offsets asset of a group.

    Args:
        asset_key: The asset.
        kafka_key: The resource key of the group's `KafkaConsumerResource`.
        catalogue_of: What an instance has recorded of the group.
    """
    spec = dg.AssetCheckSpec(STOPPED_CHECK, asset=asset_key, description="Fails while a partition is stopped, and says why.")

    # `asset_check` would name its op by the key with dots and dashes taken away, so that the groups `a.b` and `a-b` could not be together.
    @dg.multi_asset_check(
        name=f"{STOPPED_CHECK}_{hashlib.sha256(json.dumps(asset_key.path).encode()).hexdigest()[:12]}",
        specs=[spec],
        required_resource_keys={kafka_key},
    )
    def no_partition_stopped(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        ledger = RunLedger(context.instance, kafka.group_id)
        with kafka.connect() as consumer:
            look = look_at_group(consumer, kafka.topics, partial(read_bounds, consumer))
        return _result(stopped_in(look, ledger, catalogue_of(context.instance), kafka.driver_settings()))

    return no_partition_stopped


@dataclass(frozen=True)
class GroupLook:
    """The partitions of a whole group, as Kafka shows them.

    Attributes:
        found: What is known of each; not what Dagster has recorded.
    """

    found: Mapping[TopicPartition, Found]

    def without(self, partitions: Collection[TopicPartition]) -> "GroupLook":
        """The same without some partitions."""
        return GroupLook({partition: found for partition, found in self.found.items() if partition not in partitions})


def look_at_group(
    consumer: "RebalanceAwareConsumer",
    topics: Iterable[str],
    read: "Callable[[list[TopicPartition]], dict[TopicPartition, Bounds]]",
    *,
    timeout_s: float = READ_LIMIT_S,
) -> GroupLook:
    """Ask Kafka about the partitions of a group.

    Args:
        consumer: Asks Kafka.
        topics: The topics of the group.
        read: Reads the bounds of partitions; of one that it leaves out, it is not known whether offsets are missing.
        timeout_s: How long Kafka may take for each other answer.

    Raises:
        BrokerError: Kafka did not answer.
    """
    partitions = [TopicPartition(topic, info.partition) for topic in topics for info in consumer.partitions_for(topic, timeout_s)]
    bounds = read(partitions)
    known = {partition: bounds.get(partition, ANY_BOUNDS) for partition in partitions}
    return GroupLook(find(consumer, known, {}, timeout_s=timeout_s, patience_s=timeout_s))


def stopped_in(look: GroupLook, ledger: RunLedger, catalogue: RecordedCommits, settings: "DriverSettings") -> dict[TopicPartition, str]:
    """The partitions that cannot go on, each with the reason, as Kafka and Dagster show them.

    Args:
        look: What Kafka said.
        ledger: Asks Dagster for runs.
        catalogue: Asks Dagster for recorded commits.
        settings: When a partition is stopped.
    """
    without = [partition for partition, found in look.found.items() if found.stored is None]
    recorded = catalogue.last_recorded(without) if without else {}
    judged = {
        partition: judge(partition, replace(found, recorded=recorded.get(partition)), settings.foreign_metadata)
        for partition, found in look.found.items()
    }
    claimed = {partition: read.ranges(partition) for partition, read in judged.items() if isinstance(read, StoredPartition)}
    runs = _runs(ledger, (batch_id for ranges in claimed.values() for _, batch_id in ranges))
    stopped = {}
    for partition, verdict in judged.items():
        reason = verdict.reason if isinstance(verdict, Refused) else _failed(claimed.get(partition, ()), runs, settings.max_attempts)
        if reason is not None:
            stopped[partition] = reason
    return stopped


def _failed(claimed: Iterable[tuple[OffsetRange, str]], runs: tuple[RunSeen, ...], max_attempts: int) -> str | None:
    for range_, batch_id in claimed:
        progress = progress_of(range_, batch_id, runs, max_attempts=max_attempts)
        blocked = blocking(progress)
        if blocked is not None:
            return why_blocked(range_, blocked)
    return None


def _runs(ledger: RunLedger, batch_ids: Iterable[str]) -> tuple[RunSeen, ...]:
    wanted = frozenset(batch_ids)
    return ledger.read(wanted) if wanted else ()


def _result(stopped: Mapping[TopicPartition, str]) -> dg.AssetCheckResult:
    shown = dict(sorted(stopped.items())[:_REASONS_SHOWN])
    more = f"; and {len(stopped) - len(shown)} more" if len(stopped) > len(shown) else ""
    return dg.AssetCheckResult(
        passed=not stopped,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(shown.values()) + more if stopped else "every partition goes on",
        metadata={
            "stopped": dg.MetadataValue.json({str(partition): reason for partition, reason in shown.items()}),
            "stopped_partitions": len(stopped),
            "partitions": dg.MetadataValue.text(textwrap.shorten(named(stopped), _MOST_NAMES_CHARACTERS, placeholder=" ...")),
        },
    )

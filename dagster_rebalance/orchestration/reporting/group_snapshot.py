"""Read-only snapshot of a whole group: its lag, and its stopped partitions with reasons.

An engine restores the partitions as the next owner would, and none of its commands is executed. So
`status`, `explain`, the asset checks and the group report of a member give the same reasons. Only
an owner detects how long it has waited, and that Kafka refuses its writes or letters: the stops
that owners have reported to the check are part of the snapshot.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, TopicPartition
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus, status_of
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
from dagster_rebalance.kafka.log_bounds import READ_LIMIT_S, BoundsReader, find, read_bounds
from dagster_rebalance.orchestration.ports import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import Bounds
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.model.topics import Start
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.orchestration.ports import GroupRecords, RunsPort

    _ReadRuns: TypeAlias = Callable[[frozenset[str], Collection[Claimed]], Iterable[RunSnapshot]]

_MOST_ERRORS = 5


@dataclass(frozen=True)
class GroupScan:
    """The partitions of a group, as Kafka shows them.

    Attributes:
        found: The state of each partition in Kafka, without the records in Dagster.
        partitions: All partitions, including those whose leaders did not answer.
        topics: The topics of the group that exist.
        missing: The topics of the group that do not exist, in order.
        is_complete: Whether all partitions were read.
    """

    found: Mapping[TopicPartition, events.PartitionLookup]
    partitions: tuple[TopicPartition, ...]
    topics: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    is_complete: bool = True


@dataclass(frozen=True)
class GroupSnapshot:
    """The partitions of a group at one time.

    Attributes:
        found: The state of each partition in Kafka.
        statuses: The status of each partition, in order.
        missing_topics: The topics of the group that do not exist.
        notes: The leaders that did not answer.
    """

    found: Mapping[TopicPartition, events.PartitionLookup]
    statuses: Mapping[TopicPartition, PartitionStatus]
    missing_topics: Sequence[str]
    notes: Sequence[str]


def scan_group(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    read: Callable[[list[TopicPartition]], dict[TopicPartition, Bounds]],
    start: Start,
) -> GroupScan:
    """Read the partitions of a group from Kafka; see `scan_parts`."""
    (scan,) = scan_parts(consumer, topics, read, start)
    return scan


def scan_parts(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    read: Callable[[list[TopicPartition]], dict[TopicPartition, Bounds]],
    start: Start,
    *,
    most: int = sys.maxsize,
    timeout_s: float = READ_LIMIT_S,
) -> Iterator[GroupScan]:
    """Read the partitions of a group from Kafka, and yield all results after each `most` of them.

    Args:
        consumer: Queries Kafka.
        topics: The topics and patterns of the group.
        read: Reads the bounds of partitions. A partition without a result has unknown bounds.
        start: The start position of partitions without a committed offset.
        most: The number of partitions between two yields.
        timeout_s: Timeout of each other request.

    Raises:
        BrokerError: Kafka did not answer.
    """
    wanted = Topics.of(topics)
    existing = consumer.list_topics(timeout_s)
    matching = wanted.among(existing)
    partitions = [
        TopicPartition(topic, number)
        for topic in matching
        for number in sorted(info.partition for info in existing[topic])
    ]
    found: dict[TopicPartition, events.PartitionLookup] = {}
    for first in range(0, max(1, len(partitions)), most):
        part = partitions[first : first + most]
        bounds = read(part)
        known = {partition: bounds.get(partition, ANY_BOUNDS) for partition in part}
        found |= find(consumer, known, {}, timeout_s=timeout_s, patience_s=timeout_s, start=start)
        is_complete = len(partitions) <= first + most
        yield GroupScan(
            found, tuple(partitions), matching, wanted.missing(existing), is_complete=is_complete
        )


def take_snapshot(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    runs: RunsPort,
    catalogue: GroupRecords,
    *,
    settings: EngineSettings,
    owners: Owners,
) -> GroupSnapshot:
    """Take a snapshot of a group for the commands of operators.

    Args:
        consumer: Queries Kafka without joining the group.
        topics: The topics of the group.
        runs: Reads runs from Dagster.
        catalogue: Reads recorded commits and directives from Dagster.
        settings: The settings of the members.
        owners: The owners of the partitions.

    Raises:
        BrokerError: Kafka did not answer, or refused.
        ConfigurationError: The directives cannot be read.
    """
    now = time.monotonic()
    notes: list[str] = []
    reader = BoundsReader(consumer, time.monotonic, notes.append, bounds_patience_s=READ_LIMIT_S)
    scan = scan_group(consumer, sorted(set(topics)), reader.read_beyond, settings.start_from)
    recorded = catalogue.last_recorded(scan.found)
    found = {p: replace(one, recorded=recorded.get(p)) for p, one in scan.found.items()}
    try:
        directives = catalogue.directives()
    except ValueError as problem:
        raise ConfigurationError(str(problem)) from problem

    def read_runs(batch_ids: frozenset[str], claims: Collection[Claimed]) -> Iterable[RunSnapshot]:
        live = runs.read(batch_ids, with_live=True, claims=claims)
        return [_without_owned(run, owners) for run in live]

    engine = _take_in(
        scan.partitions, found, settings, directives=directives, read_runs=read_runs, now=now
    )
    reported = catalogue.shown_stops().by_owners
    restored = {
        partition: engine.partitions[partition].stopped_as_reported(reported.get(partition, ""))
        if owners.owner(partition)
        else engine.partitions[partition]
        for partition in sorted(scan.partitions)
    }
    return GroupSnapshot(
        found,
        {
            partition: status_of(owned, found.get(partition), owners, now)
            for partition, owned in restored.items()
        },
        scan.missing,
        notes,
    )


def stops_of(
    scan: GroupScan,
    runs: RunsPort,
    catalogue: GroupRecords,
    settings: EngineSettings,
    known: Collection[TopicPartition] = (),
) -> GroupState:
    """Return the stopped and the paused partitions with reasons, and the runs that work on them.

    Args:
        scan: The partitions of the group.
        runs: Reads runs from Dagster.
        catalogue: Reads recorded commits and directives from Dagster.
        settings: The settings of the members.
        known: Partitions whose stops and runs the caller knows: only their directives are read.
    """
    standing = replace(
        _stopped_in(
            {p: found for p, found in scan.found.items() if p not in known},
            runs,
            catalogue,
            settings,
        ),
        missing=scan.missing,
    )
    try:
        directives = catalogue.directives()
    except ValueError as problem:  # members claim nothing of newly assigned partitions
        everything = dict.fromkeys(scan.found, str(problem))
        return replace(standing, stopped={**everything, **standing.stopped})
    paused = {
        partition: str(directive)
        for partition in scan.found
        if (directive := in_force(directives, partition)) is not None
    }
    return replace(standing, paused=paused)


def scan_with_stops(
    consumer: RebalanceAwareConsumer,
    topics: Iterable[str],
    runs: RunsPort,
    catalogue: GroupRecords,
    settings: EngineSettings,
) -> tuple[GroupScan, GroupState]:
    """Scan a group without a member. Every leader must answer.

    Args:
        consumer: Queries Kafka.
        topics: The topics of the group.
        runs: Reads runs from Dagster.
        catalogue: Reads recorded commits and directives from Dagster.
        settings: The settings of the members.

    Raises:
        BrokerError: Kafka did not answer.
    """
    scan = scan_group(consumer, topics, partial(read_bounds, consumer), settings.start_from)
    standing = stops_of(scan, runs, catalogue, settings)
    kept = {
        partition: reason
        for partition, reason in catalogue.shown_stops().by_owners.items()
        if partition in scan.found and partition not in standing.working
    }
    stopped = stops_with_reported(standing.stopped, kept, settings)
    return scan, replace(standing, stopped=stopped, reported=frozenset(kept))


def stops_with_reported(
    scanned: Mapping[TopicPartition, str],
    reported: Mapping[TopicPartition, str],
    settings: EngineSettings,
) -> dict[TopicPartition, str]:
    """Return the stops of a scan and those that owners have reported, with reasons.

    With a dead-letter topic for failed ranges, a scan shows such a range as the reason, and only
    its owner knows why the range has no letter.
    """
    by_rank = (scanned, reported) if settings.dead_letter_topic else (reported, scanned)
    return {**by_rank[0], **by_rank[1]}


def _stopped_in(
    found: Mapping[TopicPartition, events.PartitionLookup],
    runs: RunsPort,
    catalogue: GroupRecords,
    settings: EngineSettings,
) -> GroupState:
    without_offset = [partition for partition, one in found.items() if one.stored is None]
    recorded = catalogue.last_recorded(without_offset) if without_offset else {}
    found = {p: replace(one, recorded=recorded.get(p)) for p, one in found.items()}

    def read_runs(batch_ids: frozenset[str], claims: Collection[Claimed]) -> Iterable[RunSnapshot]:
        read = runs.read(batch_ids, claims=claims) if batch_ids else ()
        # A streaming run may own the partition, so its heartbeat blocks nothing.
        return [replace(run, active_partitions=None) for run in read]

    # Only the owner knows whether the dead-letter topic takes an exhausted range.
    settings = replace(settings, worker="", dead_letter_topic=None)
    engine = _take_in(tuple(found), found, settings, directives=(), read_runs=read_runs)
    stopped = {p: owned.stop_reason for p, owned in engine.partitions.items() if owned.stop_reason}
    return GroupState(
        stopped,
        working={p: min(o.live_runs) for p, o in engine.partitions.items() if o.live_runs},
        failed={p: last for p in stopped if (last := engine.partitions[p].last_failure)},
    )


def _take_in(
    partitions: tuple[TopicPartition, ...],
    found: Mapping[TopicPartition, events.PartitionLookup],
    settings: EngineSettings,
    *,
    directives: tuple[Directive, ...],
    read_runs: _ReadRuns,
    now: float = 0.0,
) -> Engine:
    """Let an engine restore partitions: answer its reads, and ignore its other commands."""
    read: dict[frozenset[str], tuple[RunSnapshot, ...]] = {}
    # Its last tick is long past, so the engine claims nothing.
    engine = Engine(settings, new_batch_id=str, now=now - 2 * settings.plan_patience_s)
    arrived = deque[events.Event]([events.PartitionsAssigned(partitions)] if partitions else [])
    while arrived:
        for command in engine.handle(arrived.popleft(), now):
            match command:
                case commands.ReadStoredOffsets(epochs):
                    known = {p: epoch for p, epoch in epochs.items() if p in found}
                    arrived.append(events.StoredOffsetsRead(known, found))
                case commands.ReadDirectives(epoch):
                    arrived.append(events.DirectivesRead(directives, epoch))
                case commands.ReadRuns(batch_ids, _, look, claims):
                    if batch_ids not in read:
                        read[batch_ids] = tuple(read_runs(batch_ids, claims))
                    arrived.append(
                        events.RunsRead(batch_ids, read[batch_ids], with_live=True, sequence=look)
                    )
                case commands.ReadBounds(wanted):
                    bounds = {p: found[p].bounds for p in wanted if p in found}
                    arrived.append(
                        events.BoundsRead({p: one for p, one in bounds.items() if one.is_known})
                    )
                case _:
                    pass
    return engine


def _without_owned(run: RunSnapshot, owners: Owners) -> RunSnapshot:
    """A streaming run without the partitions that it owns in Kafka, where it blocks no run."""
    if run.active_partitions is None:
        return run
    return replace(run, active_partitions=run.active_partitions - owners.owned_by(run.run_id))


def errors_of(standing: GroupState, runs: RunsPort) -> dict[TopicPartition, RunError]:
    """Read the errors of the last runs of the first few stopped partitions."""
    first = sorted(standing.failed.keys() & standing.stopped.keys())[:_MOST_ERRORS]
    return {
        partition: RunError(run_id, error or runs.why_failed(run_id, batch_id))
        for partition in first
        for run_id, batch_id, error in [standing.failed[partition]]
    }


def lag_of(
    scan: GroupScan,
    standing: GroupState,
    settings: EngineSettings,
    late: Late | None = None,
) -> GroupLag:
    """Return the lag of a group.

    Args:
        scan: The partitions of the group.
        standing: The stopped and paused partitions.
        settings: Settings with the start position of partitions without a committed offset.
        late: The partitions with a record that has waited too long.
    """
    return group_lag(
        scan.partitions, scan.found, standing, start_from=settings.start_from, late=late
    )


def late_partitions(
    consumer: RebalanceAwareConsumer,
    rows: Iterable[PartitionLag],
    limit: LagLimit,
    *,
    now_s: float,
    waiting: Waiting | None = None,
    timeout_s: float = READ_LIMIT_S,
) -> Late:
    """Return the partitions with a record that has waited longer than the limit.

    Args:
        consumer: Queries Kafka.
        rows: The lag of the partitions.
        limit: The limit. Without seconds, Kafka is not queried.
        now_s: The time, in seconds since 1970.
        waiting: The ends of the logs in earlier scans; None for a single scan.
        timeout_s: Timeout of the request.

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

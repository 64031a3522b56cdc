"""`dagster-rebalance reset`: move the committed offsets of a group without members.

`core.operators.reset_offsets` decides which offsets may be moved.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from dagster_rebalance.cli.target import (
    connect_group,
    login_name,
    open_target,
    select_partitions,
)
from dagster_rebalance.core.model.directives import EVERYTHING, check_lengths
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.core.operators.reset_offsets import GroupWork, plan_moves, unreadable
from dagster_rebalance.orchestration.operators.requests import time_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from dagster_rebalance.cli.target import GroupReader, Target
    from dagster_rebalance.core.model.events import PartitionLookup
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.operators.reset_offsets import Move
    from dagster_rebalance.kafka.group_ports import ClusterView


def reset(
    partitions: list[str] | None,
    *,
    to_offset: int | None,
    to_timestamp: str,
    to_earliest: bool,
    to_latest: bool,
    to_current: bool,
    everything: bool,
    dry_run: bool,
    yes: bool,
    group: str,
    reason: str,
    by: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Print the moves of committed offsets, and with `yes` perform them."""
    place = Place.of(
        offset=to_offset,
        timestamp=to_timestamp,
        earliest=to_earliest,
        latest=to_latest,
        current=to_current,
    )
    if everything == bool(partitions):
        msg = "name the partitions to reset: orders:3, a topic, a pattern, or else --all"
        raise ConfigurationError(msg)
    if yes and dry_run:
        msg = "pass either --yes or --dry-run, not both"
        raise ConfigurationError(msg)
    check_lengths(by, reason)
    with (
        open_target(group, bootstrap_server, command_config) as target,
        connect_group(target) as reader,
    ):
        selectors = [EVERYTHING] if everything else partitions
        planned, obstacles = _plan(reader, selectors, place)
        if not yes:
            if obstacles:
                typer.echo("Nothing was moved, and --yes would be refused:")
                for obstacle in obstacles:
                    typer.echo(f"- {obstacle}.")
            else:
                typer.echo("Nothing was moved: add --yes to move the offsets.")
            return
        if obstacles:
            msg = f"nothing was moved: {'; '.join(obstacles)}"
            raise ConfigurationError(msg)
        _record_commits(target, planned)
        target.kafka.group().move(
            {move.partition: move.stored for move in planned},
            shown={move.partition: move.shown for move in planned},
        )
        # Recorded before anything is printed: a closed pipe must not lose the record.
        _record(target, planned, by=by or login_name(), reason=reason)
        typer.echo(f"Moved {names_of([move.partition for move in planned])}.")


def _plan(
    reader: GroupReader, selectors: Sequence[str] | None, place: Place
) -> tuple[Sequence[Move], Sequence[str]]:
    """Plan the moves, and print them with the steps that the operator must take first.

    Returns:
        The moves, and why they cannot be made now.
    """
    kafka = reader.target.kafka
    seen, owners = reader.read()
    selected = select_partitions(selectors, seen.statuses, kafka.group_id)
    claims = [
        (batch_id, range_)
        for partition in selected
        for range_, batch_id in seen.statuses[partition].claims
    ]
    known = [partition for partition in selected if partition in seen.found]
    planned = plan_moves(
        # `plan_moves` refuses the others, whose leaders did not answer.
        dict.fromkeys(selected, 0) | place.offsets(known, seen.found, reader.consumer.cluster),
        seen.found,
        Counter(range_.topic_partition for _, range_ in claims),
    )
    for move in planned:
        typer.echo(move)
    repeated = [move.partition for move in planned if move.may_repeat]
    if repeated:
        typer.echo(
            f"Before you turn the sensors on, remove the output of {names_of(repeated)} from the "
            "new offset on: records are read again in ranges with different bounds, which do not "
            "replace it."
        )
    unreadable_metadata = unreadable({partition: seen.found[partition] for partition in known})
    if unreadable_metadata:
        typer.echo(
            f"The metadata of the offsets of {names_of(unreadable_metadata)} cannot be read, so "
            "runs that were deleted from Dagster while they worked on them are not found. Make "
            "sure that there are none."
        )
    work = GroupWork(
        owners,
        reader.runs.read({batch_id for batch_id, _ in claims}, with_live=True, claims=claims),
        reader.runs.written_off(),
        time.time(),
        kafka.heartbeat_timeout_s,
    )
    for doubt in work.doubts(selected):
        typer.echo(doubt)
    return planned, [*work.obstacles(selected)]


def _record_commits(target: Target, planned: Sequence[Move]) -> None:
    """Record the commits that only the metadata of the old offsets names."""
    unrecorded = [commit for move in planned for commit in move.unrecorded]
    try:
        target.catalogue.record_commits(unrecorded)
    except Exception as error:
        names = names_of({commit.range.topic_partition for commit in unrecorded})
        msg = f"nothing was moved: the last commits of {names} could not be recorded: {error}"
        raise DagsterRebalanceError(msg) from error


def _record(target: Target, planned: Sequence[Move], *, by: str, reason: str) -> None:
    try:
        target.catalogue.record_moves(planned, by=by, reason=reason)
    except Exception as error:
        names = names_of([move.partition for move in planned])
        msg = f"{names} moved, but Dagster's storage did not record it: {error}"
        raise DagsterRebalanceError(msg) from error


@dataclass(frozen=True)
class Place:
    """Target position of a move: after the last record, unless an attribute is set.

    Attributes:
        offset: The offset.
        at_ms: The first record at or after this time, in milliseconds since 1970.
        is_earliest: The first record.
        is_current: The committed offset.
    """

    offset: int | None
    at_ms: int | None
    is_earliest: bool
    is_current: bool

    @classmethod
    def of(
        cls, *, offset: int | None, timestamp: str, earliest: bool, latest: bool, current: bool
    ) -> Place:
        """Return the position that an option names; exactly one option must be set."""
        if sum((offset is not None, bool(timestamp), earliest, latest, current)) != 1:
            msg = (
                "pass exactly one of --to-offset, --to-timestamp, --to-earliest, --to-latest and "
                "--to-current"
            )
            raise ConfigurationError(msg)
        at_ms = _milliseconds(timestamp) if timestamp else None
        return cls(offset, at_ms, earliest, current)

    def offsets(
        self,
        partitions: Collection[TopicPartition],
        found: Mapping[TopicPartition, PartitionLookup],
        cluster: ClusterView,
    ) -> dict[TopicPartition, int]:
        """Return the new next offset of each partition."""
        if self.offset is not None:
            return dict.fromkeys(partitions, self.offset)
        if self.at_ms is not None:
            first = cluster.offsets_for_times(dict.fromkeys(partitions, self.at_ms))
            return {
                p: found[p].bounds.until if record is None else record.offset
                for p, record in first.items()
            }
        if self.is_current:
            return {p: _current(p, found[p]) for p in partitions}
        return {
            p: found[p].bounds.start if self.is_earliest else found[p].bounds.until
            for p in partitions
        }


def _current(partition: TopicPartition, found: PartitionLookup) -> int:
    if found.stored is None:
        msg = f"{partition} has no committed offset to stay at: pass an offset or a time"
        raise ConfigurationError(msg)
    return found.stored.offset


def _milliseconds(text: str) -> int:
    at_s = time_of(text)
    if at_s < 0:
        msg = f"{text!r} is before 1970, the earliest timestamp of Kafka: use --to-earliest"
        raise ConfigurationError(msg)
    return round(at_s * 1000)

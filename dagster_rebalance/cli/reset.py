"""`dagster-rebalance reset`: a person moves the committed offsets of a group that stands.

`core.operators.reset_offsets` decides which offsets may be moved.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dagster_rebalance.cli.target import (
    BootstrapServer,
    By,
    CommandConfig,
    Everything,
    Group,
    Partitions,
    Reason,
    chosen,
    login,
    looks,
    open_target,
)
from dagster_rebalance.core.model.directives import EVERYTHING, check_lengths
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.offsets import named
from dagster_rebalance.core.operators.reset_offsets import GroupWork, plan_moves, unreadable
from dagster_rebalance.orchestration.operators.reruns import time_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dagster_rebalance.cli.target import Target
    from dagster_rebalance.core.model.events import Found
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.operators.reset_offsets import Move
    from dagster_rebalance.kafka.group_ports import ClusterView

_NO_REASON = ""


def reset(
    partitions: Partitions = None,
    *,
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="The next offset to be read.", show_default=False)
    ] = None,
    to_timestamp: Annotated[
        str,
        typer.Option(
            help="The first record at or after a time: 2026-11-23T02:00 (UTC) or "
            "2026-11-23T02:00+01:00. Behind the last record where there is none.",
            show_default=False,
        ),
    ] = "",
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="The first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="Behind the last record.")] = False,
    to_current: Annotated[
        bool, typer.Option("--to-current", help="The same offset, without what stands beside it.")
    ] = False,
    everything: Everything = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show it, as without --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it.")] = False,
    group: Group = "",
    reason: Reason = _NO_REASON,
    by: By = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Move the committed offsets of partitions: read again, or skip.

    The group must have no members, and no run may be at work on what is moved. Ranges that are
    read again get other bounds than before, so they replace no output: remove the output behind
    the new offset first.

    \b
    dagster-rebalance reset orders:3 --to-offset 1200
    dagster-rebalance reset orders --to-timestamp 2026-11-23T02:00 --yes -r "the fix of 1.4"
    dagster-rebalance reset --all --to-latest --yes --group shop
    """  # noqa: D301 - click keeps the lines behind \b as they are
    place = Place.of(
        offset=to_offset,
        timestamp=to_timestamp,
        earliest=to_earliest,
        latest=to_latest,
        current=to_current,
    )
    if everything == bool(partitions):
        msg = "say which partitions to move: orders:3, a topic, a pattern, or --all and none else"
        raise ConfigurationError(msg)
    if yes and dry_run:
        msg = "give either --yes or --dry-run, not both"
        raise ConfigurationError(msg)
    check_lengths(by, reason)
    with (
        open_target(group, bootstrap_server, command_config) as target,
        looks(target) as look,
    ):
        seen, owners = look.at_group()
        selectors = [EVERYTHING] if everything else partitions
        those = chosen(selectors, seen.statuses, target.kafka.group_id)
        claims = [
            (batch_id, range_)
            for partition in those
            for range_, batch_id in seen.statuses[partition].claims
        ]
        known = [partition for partition in those if partition in seen.found]
        planned = plan_moves(
            # Of the others it is told that their leaders do not answer.
            dict.fromkeys(those, 0) | place.offsets(known, seen.found, look.consumer.cluster),
            seen.found,
            Counter(range_.topic_partition for _, range_ in claims),
        )
        for move in planned:
            typer.echo(move)
        repeated = [move.partition for move in planned if move.may_repeat]
        if repeated:
            typer.echo(
                f"Before the sensors go on, remove what the output of {named(repeated)} has from "
                "the new offset on: it is read in ranges with other bounds, which replace nothing."
            )
        doubtful = unreadable({partition: seen.found[partition] for partition in known})
        if doubtful:
            typer.echo(
                f"What stands beside the offsets of {named(doubtful)} cannot be read, so runs that "
                "were deleted from Dagster while they worked on them are not found. Make sure that "
                "there are none."
            )
        batch_ids = {batch_id for batch_id, _ in claims}
        work = GroupWork(
            owners,
            look.runs.read(batch_ids, live_too=True, claims=claims),
            look.runs.written_off(),
            time.time(),
            target.kafka.heartbeat_timeout_s,
        )
        for doubt in work.doubts(those):
            typer.echo(doubt)
        why_not = "; ".join(work.obstacles(those))
        if why_not:
            msg = f"nothing was moved: {why_not}"
            raise ConfigurationError(msg)
        if not yes:
            typer.echo("Nothing was moved: --yes does it.")
            return
        target.kafka.group().move(
            {move.partition: move.stored for move in planned},
            shown={move.partition: move.shown for move in planned},
        )
        _record(target, planned, by=by or login(), reason=reason)
        typer.echo(f"Moved {named(those)}.")


def _record(target: Target, planned: Sequence[Move], *, by: str, reason: str) -> None:
    """Record the moves, which are done: who moved what must not be lost to a closed pipe."""
    try:
        target.catalogue.record_moves(planned, by=by, reason=reason)
    except Exception as error:
        names = named([move.partition for move in planned])
        msg = f"{names} moved, but Dagster's storage did not record it: {error}"
        raise DagsterRebalanceError(msg) from error


@dataclass(frozen=True)
class Place:
    """Where partitions are moved to: behind the last record, unless an attribute says otherwise.

    Attributes:
        offset: This offset.
        at_ms: The first record at or after this time, in milliseconds since 1970.
        is_earliest: The first record.
        is_current: Where they are.
    """

    offset: int | None
    at_ms: int | None
    is_earliest: bool
    is_current: bool

    @classmethod
    def of(
        cls, *, offset: int | None, timestamp: str, earliest: bool, latest: bool, current: bool
    ) -> Place:
        """The one that a person has named.

        Raises:
            ConfigurationError: None or several are named, or it is no time.
        """
        if sum((offset is not None, bool(timestamp), earliest, latest, current)) != 1:
            msg = (
                "say where to with one of --to-offset, --to-timestamp, --to-earliest, --to-latest "
                "and --to-current"
            )
            raise ConfigurationError(msg)
        at_ms = _milliseconds(timestamp) if timestamp else None
        return cls(offset, at_ms, earliest, current)

    def offsets(
        self,
        partitions: Collection[TopicPartition],
        found: Mapping[TopicPartition, Found],
        cluster: ClusterView,
    ) -> dict[TopicPartition, int]:
        """The next offset of each partition.

        Raises:
            BrokerError: Kafka did not say where the time is.
            ConfigurationError: A partition has no committed offset to stay at.
        """
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


def _current(partition: TopicPartition, found: Found) -> int:
    if found.stored is None:
        msg = f"{partition} has no committed offset to stay at: say where to move it"
        raise ConfigurationError(msg)
    return found.stored.offset


def _milliseconds(text: str) -> int:
    at_s = time_of(text)
    if at_s < 0:
        msg = f"{text!r} is before 1970, where the times of Kafka begin: use --to-earliest"
        raise ConfigurationError(msg)
    return round(at_s * 1000)

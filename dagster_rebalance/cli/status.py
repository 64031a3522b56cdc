"""`dagster-rebalance status` and `explain`: the partitions of a group, as a table and in sentences.

Both read Kafka and Dagster's storage, never write to them, and need no running member.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.console import Group as Rows
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dagster_rebalance.cli.target import connect_group, open_target, select_partitions
from dagster_rebalance.core.model.directives import selector_of
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.reporting.explain_offset import explain_offset
from dagster_rebalance.core.reporting.group_status import explanation, why_no_member
from dagster_rebalance.core.reporting.lag import why_missing
from dagster_rebalance.kafka.log_bounds import READ_LIMIT_S, read_bounds
from dagster_rebalance.orchestration.operators.requests import partitions_of
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.offset_lookup import OffsetLookup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dagster_rebalance.cli.target import Target
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus
    from dagster_rebalance.orchestration.reporting.group_snapshot import GroupSnapshot

_WIDE = 200
"""Width of an output that is not a terminal, in columns."""
_GAP = 2
"""Character columns between two cells."""
_RUN_ID_SHOWN = 8
_COLUMNS = ("partition", "owner", "committed", "claim", "log end", "lag", "runs", "hold")
_STATE = "state"
_NUMBERS = {"committed", "log end", "lag"}
_UNBROKEN = {"partition", *_NUMBERS}
"""Cells that users copy and compare, so they are never wrapped."""
_MOST_SHOWN = 200
_NAME_THEM = "name partitions or topics, or use `status --json`"
_STATE_SHOWN = 160
_SELECTOR = "TOPIC:PARTITION"
_MOST_REMEDIES = 5
_MOST_SELECTED = 4
"""The limit of partitions in the command of a remedy."""
_STATE_COLUMNS = 60
"""In narrower terminals the state of a partition is below the table instead of in a column."""


def status(
    partitions: list[str] | None,
    *,
    group: str,
    as_json: bool,
    watch: bool,
    every_s: float,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Print the partitions of a group, once or repeatedly."""
    interval_s = every_s if watch else None
    with (
        open_target(group, bootstrap_server, command_config) as target,
        connect_group(target) as reader,
    ):
        group_id = target.kafka.group_id

        def read() -> tuple[GroupSnapshot, Owners, list[PartitionStatus]]:
            seen, owners = reader.read()
            if not partitions:
                return seen, owners, list(seen.statuses.values())
            selected = select_partitions(partitions, seen.statuses, group_id)
            return seen, owners, [seen.statuses[partition] for partition in selected]

        if as_json:
            _repeat(
                lambda: typer.echo(json.dumps(_as_json(group_id, *read()))),
                lambda text: typer.echo(text, err=True),
                interval_s=interval_s,
            )
        else:
            most = None if partitions else _MOST_SHOWN
            _show(
                lambda width: _table(group_id, *read(), width=width, most=most),
                interval_s=interval_s,
            )


def explain(
    partitions: list[str] | None,
    *,
    group: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Print the state of partitions, or of offsets, in sentences."""
    offsets = [one for one in partitions or () if "@" in one]
    if offsets:
        if len(offsets) < len(partitions or ()):
            msg = "name either partitions or offsets, such as orders:3@1207, not both"
            raise ConfigurationError(msg)
        with open_target(group, bootstrap_server, command_config) as target:
            for partition, offset in _parse_offsets(target, offsets):
                _echo(_explain_offset(target, partition, offset))
        return
    with (
        open_target(group, bootstrap_server, command_config) as target,
        connect_group(target) as reader,
    ):
        seen, owners = reader.read()
        left = 0
        if partitions:
            selected = select_partitions(partitions, seen.statuses, target.kafka.group_id)
        else:
            busy = [status for status in seen.statuses.values() if not _is_idle(status)]
            selected = [status.partition for status in _most_urgent(busy, _MOST_SHOWN)]
            left = len(busy) - len(selected)
        for partition in selected:
            _echo(explanation(seen.statuses[partition], has_members=bool(owners.members)))
        if left:
            _echo([f"and {left} more partitions: {_NAME_THEM}"])
        if selected and not owners.members:
            _echo(why_no_member(reader.sensors()))
        for note in _notes(seen):
            _echo([note])
        if not selected:
            what = "lag" if seen.statuses else "partitions"
            _echo([f"group {target.kafka.group_id} has no {what}"])


def _echo(sentences: Sequence[str]) -> None:
    """Print sentences, the first one as it begins: with the name of a partition, for example."""
    first, *others = [one if one.endswith(".") else f"{one}." for one in sentences]
    typer.echo("\n  ".join((first, *(one[:1].upper() + one[1:] for one in others))))


def _parse_offsets(target: Target, selectors: Sequence[str]) -> list[tuple[TopicPartition, int]]:
    group_id = target.kafka.group_id
    known = partitions_of(target.instance, GroupAssets.of(group_id), group_id)
    found = []
    for selector in selectors:
        name, _, offset = selector.partition("@")
        named = select_partitions([name], known, group_id)
        if len(named) != 1 or not (offset.isascii() and offset.isdecimal()):
            msg = f"{selector!r} is not the offset of one partition, such as orders:3@1207"
            raise ConfigurationError(msg)
        found.append((named[0], int(offset)))
    return found


def _explain_offset(target: Target, partition: TopicPartition, offset: int) -> list[str]:
    with target.kafka.connect() as consumer:
        stored = consumer.committed([partition], READ_LIMIT_S)[partition]
        bounds = read_bounds(consumer, [partition])[partition]
    assets = GroupAssets.of(target.kafka.group_id)
    facts = OffsetLookup(target.instance, assets, partition).facts(offset, stored, bounds)
    return explain_offset(facts)


def _is_idle(status: PartitionStatus) -> bool:
    activity = (status.hold, status.stopped, status.paused, status.claims, status.runs)
    return status.lag == 0 and not any(activity)


def _repeat(
    action: Callable[[], None], on_outage: Callable[[str], None], *, interval_s: float | None
) -> None:
    """Call `action` once or, with an interval, until Ctrl-C. A later outage does not end it."""
    try:
        action()
        while interval_s is not None:
            time.sleep(interval_s)
            try:
                action()
            except DagsterRebalanceError as error:
                on_outage(str(error))
    except KeyboardInterrupt:
        if interval_s is None:
            raise


def _show(render: Callable[[int], Rows], *, interval_s: float | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    if interval_s is None or not console.is_terminal:  # nothing can be redrawn
        _repeat(
            lambda: console.print(render(console.width)),
            lambda text: console.print(Text(text)),
            interval_s=interval_s,
        )
        return
    with Live(console=console, auto_refresh=False) as live:
        _repeat(
            lambda: live.update(render(console.width), refresh=True),
            lambda text: live.update(Text(text), refresh=True),
            interval_s=interval_s,
        )


def _table(
    group_id: str,
    seen: GroupSnapshot,
    owners: Owners,
    statuses: Sequence[PartitionStatus],
    *,
    width: int,
    most: int | None = None,
) -> Rows:
    headline, count = _headline(group_id, owners, statuses), len(statuses)
    statuses = _most_urgent(statuses, most)
    left = count - len(statuses)
    rows = [_cells(status) for status in statuses]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    has_room = width - sum(widths) - _GAP * len(widths) >= _STATE_COLUMNS
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in (*_COLUMNS, *([_STATE] if has_room else [])):
        table.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            no_wrap=column in _UNBROKEN,
            overflow="fold",
        )
    for status, cells in zip(statuses, rows, strict=True):
        # As Text: rich would read brackets in a reason as markup.
        table.add_row(*map(Text, (*cells, *([_shown(status)] if has_room else []))))
    busy = [] if has_room else [status for status in statuses if not _is_idle(status)]
    return Rows(
        Text(headline, style="bold"),
        *map(Text, _notes(seen)),
        table,
        *(Text(f"{status.partition}: {_shown(status)}") for status in busy),
        *map(Text, _remedies(statuses)),
        *([Text(f"and {left} more partitions: {_NAME_THEM}")] if left else []),
    )


def _most_urgent(
    statuses: Sequence[PartitionStatus], most: int | None
) -> Sequence[PartitionStatus]:
    """Return all partitions or, if there are more than `most`, the stopped and the largest lags."""
    if most is None or len(statuses) <= most:
        return statuses
    unknown = float("inf")
    return sorted(
        statuses,
        key=lambda one: (
            not one.stopped,
            not one.hold,
            not one.paused,
            -(unknown if one.lag is None else one.lag),
        ),
    )[:most]


def _headline(group_id: str, owners: Owners, statuses: Sequence[PartitionStatus]) -> str:
    members = len(owners.members)
    stopped = sum(bool(status.stopped) for status in statuses)
    paused = sum(bool(status.paused) for status in statuses)
    return ", ".join(
        [
            f"group {group_id}: {members or 'no'} member{'' if members == 1 else 's'}",
            f"{len(statuses)} partition{'' if len(statuses) == 1 else 's'}",
            _lag(statuses),
            *([f"{stopped} stopped"] if stopped else []),
            *([f"{paused} paused by operators"] if paused else []),
        ]
    )


def _lag(statuses: Sequence[PartitionStatus]) -> str:
    known = [status.lag for status in statuses if status.lag is not None]
    unknown = len(statuses) - len(known)
    if not unknown:
        return f"lag {sum(known)}"
    return f"lag at least {sum(known)} ({unknown} partition{'' if unknown == 1 else 's'} unknown)"


def _notes(seen: GroupSnapshot) -> list[str]:
    return [*map(why_missing, seen.missing_topics), *seen.notes]


def _cells(status: PartitionStatus) -> tuple[str, ...]:
    claims = [f"[{range_.start}, {range_.until})" for range_, _ in status.claims]
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return (
        str(status.partition),
        status.owner or "-",
        _number(status.committed),
        f"{claims[0]}{more}" if claims else "-",
        _number(status.end),
        _number(status.lag),
        ", ".join(run_id[:_RUN_ID_SHOWN] for run_id in status.runs) or "-",
        status.hold or "-",
    )


def _shown(status: PartitionStatus) -> str:
    return textwrap.shorten(_state(status), _STATE_SHOWN, placeholder=" ...")


def _state(status: PartitionStatus) -> str:
    text = Reason.of(status.stopped).problem or status.paused or status.sentence
    reason = text.removeprefix(f"{status.partition}: ")
    return f"stopped: {reason}" if status.stopped else reason


def _remedies(statuses: Sequence[PartitionStatus]) -> Iterator[str]:
    """Yield each remedy once, with the stopped partitions that it is for."""
    alike: dict[str, list[TopicPartition]] = {}
    for status in statuses:
        remedy = Reason.of(status.stopped).remedy
        if remedy:
            common = remedy.replace(selector_of(status.partition), _SELECTOR)
            alike.setdefault(common, []).append(status.partition)
    for common, stopped in [*alike.items()][:_MOST_REMEDIES]:
        is_short = len(stopped) <= _MOST_SELECTED
        named = " ".join(map(selector_of, stopped)) if is_short else _SELECTOR
        yield f"What to do for {names_of(stopped)}: {common.replace(_SELECTOR, named)}."
    if len(alike) > _MOST_REMEDIES:
        yield "`dagster-rebalance explain` has the remedies of the other stopped partitions."


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _as_json(
    group_id: str, seen: GroupSnapshot, owners: Owners, statuses: Sequence[PartitionStatus]
) -> dict[str, Any]:
    return {
        "group": group_id,
        "members": [
            {"name": owners.name(member), "member_id": member.member_id, "client": member.address}
            for member in owners.members
        ],
        "partitions": [
            {
                "topic": status.partition.topic,
                "partition": status.partition.partition,
                "owner": status.owner,
                "committed": status.committed,
                "claims": [
                    {"start": range_.start, "until": range_.until, "batch": batch_id}
                    for range_, batch_id in status.claims
                ],
                "end": status.end,
                "lag": status.lag,
                "runs": list(status.runs),
                "hold": status.hold,
                "stopped": status.stopped,
                "paused": status.paused,
                "state": _state(status),
            }
            for status in statuses
        ],
        "notes": _notes(seen),
    }

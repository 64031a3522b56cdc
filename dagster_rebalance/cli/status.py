"""`dagster-rebalance status` and `explain`: the partitions of a group, as a table and in sentences.

Both read Kafka and Dagster's storage and need no running member.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.console import Group as Rows
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dagster_rebalance.cli.target import (
    BootstrapServer,
    CommandConfig,
    Group,
    Partitions,
    connect_group,
    open_target,
    select_partitions,
)
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.reporting.group_status import explanation, why_no_member
from dagster_rebalance.core.reporting.lag import why_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus
    from dagster_rebalance.orchestration.reporting.group_snapshot import GroupSnapshot

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_WIDE = 200
"""Width of an output that is not a terminal, in columns."""
_GAP = 2
"""Columns between two cells."""
_RUN_ID_SHOWN = 8
_COLUMNS = ("partition", "owner", "committed", "claim", "end", "lag", "runs", "hold")
_STATE = "state"
_NUMBERS = {"committed", "end", "lag"}
_UNBROKEN = {"partition", *_NUMBERS}
"""Cells that users copy and compare, so they are never wrapped."""
_STATE_COLUMNS = 60
"""In narrower terminals the state of a partition is below the table instead of in a column."""


def status(
    partitions: Partitions = None,
    *,
    group: Group = "",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, help="Seconds between two refreshes.")
    ] = 2.0,
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Show each partition of a group: its owner, its progress, and why it is not processed.

    The command reads Kafka and Dagster's storage, so it needs no running member.

    \b
    dagster-rebalance status
    dagster-rebalance status --watch
    dagster-rebalance status orders:3 'pay*' --group shop
    dagster-rebalance status --json | jq '.partitions[] | select(.stopped != "")'
    dagster-rebalance status --command-config login.properties
    """  # noqa: D301 - click does not rewrap the lines after \b
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
                lambda: typer.echo(json.dumps(_as_json(group_id, *read()))), interval_s=interval_s
            )
        else:
            _show(lambda width: _table(group_id, *read(), width=width), interval_s=interval_s)


def explain(
    partitions: Partitions = None,
    *,
    group: Group = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Explain in sentences what partitions wait for, why they are stopped, and what to do.

    By default, all partitions that are not idle at their end.

    \b
    dagster-rebalance explain orders:3
    dagster-rebalance explain --group shop
    """  # noqa: D301 - click does not rewrap the lines after \b
    with (
        open_target(group, bootstrap_server, command_config) as target,
        connect_group(target) as reader,
    ):
        seen, owners = reader.read()
        if partitions:
            selected = select_partitions(partitions, seen.statuses, target.kafka.group_id)
        else:
            selected = [p for p, status in seen.statuses.items() if not _is_idle(status)]
        for partition in selected:
            sentences = explanation(seen.statuses[partition], has_members=bool(owners.members))
            typer.echo("\n  ".join(sentences))
        if selected and not owners.members:
            typer.echo("\n  ".join(why_no_member(reader.sensors())))
        for note in _notes(seen):
            typer.echo(note)
        if not selected and seen.statuses:
            typer.echo(f"every partition of group {target.kafka.group_id} is at its end")


def _is_idle(status: PartitionStatus) -> bool:
    activity = (status.hold, status.stopped, status.ordered, status.claims, status.runs)
    return status.lag == 0 and not any(activity)


def _repeat(action: Callable[[], None], *, interval_s: float | None) -> None:
    """Call `action` once, or with an interval until Ctrl-C."""
    try:
        action()
        while interval_s is not None:
            time.sleep(interval_s)
            action()
    except KeyboardInterrupt:
        if interval_s is None:
            raise


def _show(render: Callable[[int], Rows], *, interval_s: float | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    if interval_s is None:
        console.print(render(console.width))
        return

    def render_or_error() -> Rows:
        """Render the status; an outage is shown in its place and does not end the command."""
        try:
            return render(console.width)
        except DagsterRebalanceError as error:
            return Rows(Text(str(error)))

    first = render(console.width)
    if not console.is_terminal:  # nothing can be redrawn
        console.print(first)
        _repeat(lambda: console.print(render_or_error()), interval_s=interval_s)
        return
    with Live(first, console=console, auto_refresh=False) as live:
        _repeat(lambda: live.update(render_or_error(), refresh=True), interval_s=interval_s)


def _table(
    group_id: str,
    seen: GroupSnapshot,
    owners: Owners,
    statuses: Sequence[PartitionStatus],
    *,
    width: int,
) -> Rows:
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
        table.add_row(*map(Text, (*cells, *([_state(status)] if has_room else []))))
    busy = [] if has_room else [status for status in statuses if not _is_idle(status)]
    return Rows(
        Text(_headline(group_id, owners, statuses), style="bold"),
        *map(Text, _notes(seen)),
        table,
        *(Text(f"{status.partition}: {_state(status)}") for status in busy),
    )


def _headline(group_id: str, owners: Owners, statuses: Sequence[PartitionStatus]) -> str:
    members = len(owners.members)
    stopped = sum(bool(status.stopped) for status in statuses)
    ordered = sum(bool(status.ordered) for status in statuses)
    return ", ".join(
        [
            f"group {group_id}: {members or 'no'} member{'' if members == 1 else 's'}",
            f"{len(statuses)} partition{'' if len(statuses) == 1 else 's'}",
            f"lag {sum(one.lag or 0 for one in statuses)}",
            *([f"{stopped} stopped"] if stopped else []),
            *([f"{ordered} paused by operators"] if ordered else []),
        ]
    )


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


def _state(status: PartitionStatus) -> str:
    text = status.stopped or status.ordered or status.sentence
    reason = text.removeprefix(f"{status.partition}: ")
    return f"stopped: {reason}" if status.stopped else reason


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
                "ordered": status.ordered,
                "state": status.sentence,
            }
            for status in statuses
        ],
        "notes": _notes(seen),
    }

"""`dagster-rebalance status` and `explain`: the partitions of a group, as a table and in sentences.

Owns how a look at a group is shown. It needs Dagster's storage and Kafka, and no member.
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
    chosen,
    looks,
    open_target,
)
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.reporting.group_status import explanation, why_no_member
from dagster_rebalance.core.reporting.lag import why_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus
    from dagster_rebalance.orchestration.operators.group_snapshot import GroupSeen

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="For programs.")]
_WIDE = 200
"""Columns where the output is no terminal, so that nothing is cut off."""
_GAP = 2
"""Columns between two cells."""
_RUN_SHOWN = 8
_COLUMNS = ("partition", "owner", "committed", "claim", "end", "lag", "runs", "hold")
_STATE = "state"
_NUMBERS = {"committed", "end", "lag"}
_WHOLE = {"partition", *_NUMBERS}
"""What is read, copied and compared as a whole, so it is never broken."""
_STATE_COLUMNS = 60
"""Where less is left for it, the state of a partition is below the table and no column."""


def status(
    partitions: Partitions = None,
    *,
    group: Group = "",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again until Ctrl-C.")] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, help="Seconds between two looks.")
    ] = 2.0,
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Show each partition of a group: who has it, how far it is, and why it stands.

    It asks Kafka and Dagster's storage, so it also answers while no member is there.

    \b
    dagster-rebalance status
    dagster-rebalance status --watch
    dagster-rebalance status orders:3 'pay*' --group shop
    dagster-rebalance status --json | jq '.partitions[] | select(.stopped != "")'
    dagster-rebalance status --command-config login.properties
    """  # noqa: D301 - click keeps the lines behind \b as they are
    with (
        open_target(group, bootstrap_server, command_config) as target,
        looks(target) as look,
    ):
        group_id = target.kafka.group_id

        def shown() -> tuple[GroupSeen, Owners, list[PartitionStatus]]:
            seen, owners = look.at_group()
            wanted = chosen(partitions, seen.statuses, group_id) if partitions else seen.statuses
            return seen, owners, [seen.statuses[partition] for partition in wanted]

        if as_json:
            _repeat(
                lambda: typer.echo(json.dumps(_as_json(group_id, *shown()))),
                every_s=every_s if watch else None,
            )
        else:
            _show(
                lambda width: _table(group_id, *shown(), width=width),
                every_s=every_s if watch else None,
            )


def explain(
    partitions: Partitions = None,
    *,
    group: Group = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Say in sentences what partitions wait for, why they are stopped, and what to do.

    Without partitions: those that are not simply at their end.

    \b
    dagster-rebalance explain orders:3
    dagster-rebalance explain --group shop
    """  # noqa: D301 - click keeps the lines behind \b as they are
    with (
        open_target(group, bootstrap_server, command_config) as target,
        looks(target) as look,
    ):
        seen, owners = look.at_group()
        if partitions:
            wanted = chosen(partitions, seen.statuses, target.kafka.group_id)
        else:
            wanted = [p for p, one in seen.statuses.items() if not _is_at_rest(one)]
        for partition in wanted:
            sentences = explanation(seen.statuses[partition], has_members=bool(owners.members))
            typer.echo("\n  ".join(sentences))
        if wanted and not owners.members:
            typer.echo("\n  ".join(why_no_member(look.sensors())))
        for note in _notes(seen):
            typer.echo(note)
        if not wanted and seen.statuses:
            typer.echo(f"every partition of group {target.kafka.group_id} is at its end")


def _is_at_rest(status: PartitionStatus) -> bool:
    troubles = (status.hold, status.stopped, status.ordered, status.claims, status.runs)
    return status.lag == 0 and not any(troubles)


def _repeat(once: Callable[[], None], *, every_s: float | None) -> None:
    """Do something once, or until Ctrl-C, which is how people end it and no error."""
    try:
        once()
        while every_s is not None:
            time.sleep(every_s)
            once()
    except KeyboardInterrupt:
        if every_s is None:
            raise


def _show(made: Callable[[int], Rows], *, every_s: float | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    if every_s is None:
        console.print(made(console.width))
        return

    def made_again() -> Rows:
        """Make the rows, or show why not.

        Kafka or Dagster may be away for a while: whoever watches wants to see when it is back.
        """
        try:
            return made(console.width)
        except DagsterRebalanceError as error:
            return Rows(Text(str(error)))

    first = made(console.width)
    if not console.is_terminal:  # nothing can be redrawn there
        console.print(first)
        _repeat(lambda: console.print(made_again()), every_s=every_s)
        return
    with Live(first, console=console, auto_refresh=False) as live:
        _repeat(lambda: live.update(made_again(), refresh=True), every_s=every_s)


def _table(
    group_id: str,
    seen: GroupSeen,
    owners: Owners,
    statuses: Sequence[PartitionStatus],
    *,
    width: int,
) -> Rows:
    rows = [_cells(one) for one in statuses]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    has_room = width - sum(widths) - _GAP * len(widths) >= _STATE_COLUMNS
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in (*_COLUMNS, *([_STATE] if has_room else [])):
        table.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            no_wrap=column in _WHOLE,
            overflow="fold",
        )
    for one, cells in zip(statuses, rows, strict=True):
        # Text, and no string: a reason may have brackets, which rich would take for markup.
        table.add_row(*map(Text, (*cells, *([_state(one)] if has_room else []))))
    busy = [] if has_room else [one for one in statuses if not _is_at_rest(one)]
    return Rows(
        Text(_headline(group_id, owners, statuses), style="bold"),
        *map(Text, _notes(seen)),
        table,
        *(Text(f"{one.partition}: {_state(one)}") for one in busy),
    )


def _headline(group_id: str, owners: Owners, statuses: Sequence[PartitionStatus]) -> str:
    members = len(owners.members)
    stopped = sum(bool(one.stopped) for one in statuses)
    ordered = sum(bool(one.ordered) for one in statuses)
    return ", ".join(
        [
            f"group {group_id}: {members or 'no'} member{'' if members == 1 else 's'}",
            f"{len(statuses)} partition{'' if len(statuses) == 1 else 's'}",
            f"lag {sum(one.lag or 0 for one in statuses)}",
            *([f"{stopped} stopped"] if stopped else []),
            *([f"{ordered} paused by people"] if ordered else []),
        ]
    )


def _notes(seen: GroupSeen) -> list[str]:
    return [
        *map(why_missing, seen.missing_topics),
        *seen.notes,
    ]


def _cells(one: PartitionStatus) -> tuple[str, ...]:
    claims = [f"[{range_.start}, {range_.until})" for range_, _ in one.claims]
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return (
        str(one.partition),
        one.owner or "-",
        _number(one.committed),
        f"{claims[0]}{more}" if claims else "-",
        _number(one.end),
        _number(one.lag),
        ", ".join(run_id[:_RUN_SHOWN] for run_id in one.runs) or "-",
        one.hold or "-",
    )


def _state(one: PartitionStatus) -> str:
    reason = (one.stopped or one.ordered or one.sentence).removeprefix(f"{one.partition}: ")
    return f"stopped: {reason}" if one.stopped else reason


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _as_json(
    group_id: str, seen: GroupSeen, owners: Owners, statuses: Sequence[PartitionStatus]
) -> dict[str, Any]:
    return {
        "group": group_id,
        "members": [
            {"name": owners.name(member), "member_id": member.member_id, "client": member.address}
            for member in owners.members
        ],
        "partitions": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "owner": one.owner,
                "committed": one.committed,
                "claims": [
                    {"start": range_.start, "until": range_.until, "batch": batch_id}
                    for range_, batch_id in one.claims
                ],
                "end": one.end,
                "lag": one.lag,
                "runs": list(one.runs),
                "hold": one.hold,
                "stopped": one.stopped,
                "ordered": one.ordered,
                "state": one.sentence,
            }
            for one in statuses
        ],
        "notes": _notes(seen),
    }

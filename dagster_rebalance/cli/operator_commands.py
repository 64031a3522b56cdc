"""Commands of operators: `pause`, `stop`, `resume`, `retry` and `rerun`.

They need the Dagster instance of the members (`DAGSTER_HOME`). A directive needs neither Kafka nor
the code of the assets. `core.operators.rerun_selection` decides which ranges may be repeated.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagster_rebalance.cli.target import (
    login_name,
    only_group,
    open_instance,
    open_target,
)
from dagster_rebalance.core.model.directives import EVERYTHING, Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.operators.requests import (
    DirectiveRequest,
    RerunRequest,
    Reruns,
    issue_directive,
    span_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.orchestration.operators.requests import RerunPlan


_WIDE = 160
_ROWS_SHOWN = 100


def rerun(
    partitions: list[str] | None,
    *,
    from_offset: int | None,
    until_offset: int | None,
    since: str,
    until: str,
    everything: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    runs_at_once: int,
    records_per_run: int,
    cancel: str,
    group: str,
    by: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Plan, begin, cancel or list reruns."""
    span_options = (from_offset, until_offset, since or None, until or None)
    selectors = [EVERYTHING] if everything else partitions or []
    _check(
        selectors,
        is_spanned=any(option is not None for option in span_options),
        is_both=everything and bool(partitions),
        yes=yes,
        dry_run=dry_run,
        cancel=cancel,
    )
    with open_target(group, bootstrap_server, command_config) as target:
        reruns = Reruns(target.instance, target.kafka)
        if cancel:
            typer.echo(reruns.cancel(cancel))
            return
        if not selectors:
            typer.echo("\n".join(reruns.open_ones()) or "no unfinished rerun")
            return
        span = span_of(from_offset, until_offset, since, until)
        planned = reruns.plan(
            RerunRequest(selectors, span, by or login_name(), reason, records_per_run, runs_at_once)
        )
        show_plan(planned)
        typer.echo(reruns.begin(planned) if yes else "Nothing was started: add --yes to start it.")


def _check(
    selectors: list[str],
    *,
    is_spanned: bool,
    is_both: bool,
    yes: bool,
    dry_run: bool,
    cancel: str,
) -> None:
    if yes and dry_run:
        msg = "pass either --yes or --dry-run, not both"
        raise ConfigurationError(msg)
    if is_both:
        msg = "pass either partitions or --all, not both"
        raise ConfigurationError(msg)
    if cancel and (selectors or is_spanned or dry_run):
        msg = (
            "--cancel cancels a whole rerun at once: pass neither partitions nor offsets nor times "
            "nor --dry-run"
        )
        raise ConfigurationError(msg)
    if not (selectors or cancel) and (is_spanned or yes or dry_run):
        msg = "name the partitions: orders:3, a topic, a pattern, or --all"
        raise ConfigurationError(msg)


def show_plan(planned: RerunPlan) -> None:
    """Print the ranges of each run of a rerun, and the ranges that are left out."""
    widened = set(planned.selection.widened)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("partition", "from", "until", "offsets", "run", "note"):
        table.add_column(column, justify="left" if column in {"partition", "note"} else "right")
    rows = [
        (
            str(range_.topic_partition),
            str(range_.start),
            str(range_.until),
            str(len(range_)),
            str(batch.number),
            "the whole range; a part was requested" if range_ in widened else "",
        )
        for batch in planned.batches
        for range_ in batch.ranges
    ]
    for row in rows[:_ROWS_SHOWN]:
        table.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(table)
    hidden = len(rows) - _ROWS_SHOWN
    if hidden > 0:
        console.print(Text(f"and {hidden} more ranges"))
    left_out = planned.selection.left_out
    for reason in left_out[:_ROWS_SHOWN]:
        console.print(Text(f"left out: {reason}"))
    if len(left_out) > _ROWS_SHOWN:
        console.print(Text(f"left out: {len(left_out) - _ROWS_SHOWN} more"))
    offsets = sum(map(len, planned.selection.ranges))
    counts = {"range": len(rows), "offset": offsets, "run": planned.rerun.batches}
    totals = ", ".join(f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items())
    console.print(Text(totals))


def _give(
    action: Action,
    partitions: list[str] | None,
    *,
    everything: bool,
    group: str,
    by: str,
    reason: str,
) -> None:
    if everything and partitions:
        msg = "pass either partitions or --all, not both"
        raise ConfigurationError(msg)
    selectors = [EVERYTHING] if everything else partitions or []
    with open_instance() as instance:
        wanted = DirectiveRequest(action, selectors, by or login_name(), reason)
        typer.echo(issue_directive(instance, group or only_group(instance), wanted))


pause, stop, resume, retry = (
    functools.partial(_give, action)
    for action in (Action.PAUSE, Action.STOP, Action.RESUME, Action.RETRY)
)

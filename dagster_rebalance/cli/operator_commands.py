"""Commands of operators: `pause`, `stop`, `resume`, `retry` and `rerun`.

They need the Dagster instance of the members (`DAGSTER_HOME`). A directive needs neither Kafka nor
the code of the assets. `core.operators.rerun_selection` decides which ranges may be repeated.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagster_rebalance.cli.target import (
    BootstrapServer,
    By,
    CommandConfig,
    Everything,
    Group,
    Partitions,
    Reason,
    login_name,
    only_group,
    open_instance,
    open_target,
)
from dagster_rebalance.core.model.directives import EVERYTHING, Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.operators.requests import (
    RECORDS_PER_RUN,
    RUNS_AT_ONCE,
    DirectiveRequest,
    RerunRequest,
    Reruns,
    issue_directive,
    span_of,
)

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.operators.requests import RerunPlan


_NO_REASON = ""
_WIDE = 160
_ROWS_SHOWN = 100


def rerun(
    partitions: Partitions = None,
    *,
    from_offset: Annotated[
        int | None,
        typer.Option(min=0, help="The first offset, of one partition.", show_default=False),
    ] = None,
    until_offset: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The offset after the last one. By default the committed offset.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            help="Ranges committed from this time on: 2026-11-23T14:00 (UTC) or "
            "2026-11-23T14:00+01:00.",
            show_default=False,
        ),
    ] = "",
    until: Annotated[
        str, typer.Option(help="Up to this time. By default up to now.", show_default=False)
    ] = "",
    everything: Everything = False,
    reason: Reason = _NO_REASON,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan, as without --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start the rerun.")] = False,
    runs_at_once: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent runs.")
    ] = RUNS_AT_ONCE,
    records_per_run: Annotated[
        int, typer.Option(min=1, help="Number of offsets per run.")
    ] = RECORDS_PER_RUN,
    cancel: Annotated[
        str, typer.Option(help="Cancel the rerun with this id.", show_default=False)
    ] = "",
    group: Group = "",
    by: By = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Process past ranges again with the current code. Output keyed by range is replaced.

    The group keeps processing, and its committed offsets do not change. Recorded ranges are
    repeated as a whole, with the same bounds. Without arguments, the command lists unfinished
    reruns.

    \b
    dagster-rebalance rerun orders:3 --from-offset 1200 --until-offset 5000 -r "fix of 1.4"
    dagster-rebalance rerun orders --since 2026-11-23T14:00 --until 2026-11-23T16:00 -r "fix" --yes
    dagster-rebalance rerun --cancel 3f2a91c0
    """  # noqa: D301 - click does not rewrap the lines after \b
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
        _show(planned)
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


def _show(planned: RerunPlan) -> None:
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


def pause(
    partitions: Partitions = None,
    *,
    reason: Reason,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Start no new batches of some partitions; running batches finish and are committed.

    The partitions stay assigned, and the pause also applies to their next owner.

    \b
    dagster-rebalance pause orders:3 --reason "the warehouse is being moved"
    dagster-rebalance pause orders 'pay*' --group shop --reason "bad deploy upstream"
    dagster-rebalance pause --all --reason "maintenance until 14:00"
    """  # noqa: D301 - click does not rewrap the lines after \b
    _give(Action.PAUSE, partitions, everything=everything, group=group, by=by, reason=reason)


def stop(
    partitions: Partitions = None,
    *,
    reason: Reason,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Pause some partitions, and cancel their running batches.

    A cancelled batch does not count as a failed attempt: after `resume` it is processed again with
    the same bounds. A run with batches of other partitions is cancelled as a whole; those
    partitions continue at once.

    \b
    dagster-rebalance stop orders:3 --reason "it writes nonsense"
    """  # noqa: D301 - click does not rewrap the lines after \b
    _give(Action.STOP, partitions, everything=everything, group=group, by=by, reason=reason)


def resume(
    partitions: Partitions = None,
    *,
    reason: Reason = _NO_REASON,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Resume paused and stopped partitions at their committed offsets.

    \b
    dagster-rebalance resume orders:3
    dagster-rebalance resume --all --reason "the warehouse is back"
    """  # noqa: D301 - click does not rewrap the lines after \b
    _give(Action.RESUME, partitions, everything=everything, group=group, by=by, reason=reason)


def retry(
    partitions: Partitions = None,
    *,
    reason: Reason = _NO_REASON,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Retry failed and stopped batches now.

    The members skip the rest of the delay. Partitions that an operator has paused stay paused.

    \b
    dagster-rebalance retry orders:3
    dagster-rebalance retry orders 'pay*' --group shop
    dagster-rebalance retry --all --reason "the warehouse is back"
    """  # noqa: D301 - click does not rewrap the lines after \b
    _give(Action.RETRY, partitions, everything=everything, group=group, by=by, reason=reason)


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

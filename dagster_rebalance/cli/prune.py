"""`dagster-rebalance prune`: delete old runs of a group from Dagster.

`core.operators.prune_runs` decides which runs may be deleted.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

import typer

from dagster_rebalance.cli.target import open_target
from dagster_rebalance.kafka.log_bounds import READ_LIMIT_S
from dagster_rebalance.orchestration.operators.pruning import KafkaPositions, Pruning
from dagster_rebalance.orchestration.operators.requests import partitions_of
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.cli.target import Target
    from dagster_rebalance.core.operators.prune_runs import FinishedRun, PrunePlan


def prune(
    *,
    days: int,
    delete: bool,
    limit: int,
    group: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Show the old runs of a group, and delete them with `delete`."""
    with open_target(group, bootstrap_server, command_config) as target:
        group_id = target.kafka.group_id
        pruning = Pruning(target.instance, GroupAssets.of(group_id), group_id)
        plan = pruning.plan(lambda: _positions(target), days=days, most=limit)
        _show(plan, days)
        if not plan.runs:
            return
        if not delete:
            typer.echo("Nothing was deleted: add --delete to delete the runs.")
            return
        deleted = sum(1 for _ in pruning.delete(plan))
        typer.echo(f"Deleted {deleted} run{'s' * (deleted != 1)}.")


def _positions(target: Target) -> KafkaPositions:
    group_id = target.kafka.group_id
    partitions = partitions_of(target.instance, GroupAssets.of(group_id), group_id)
    with target.kafka.connect() as consumer:
        return KafkaPositions(
            consumer.committed(partitions, READ_LIMIT_S),
            consumer.beginning_offsets(partitions, READ_LIMIT_S),
        )


def _show(plan: PrunePlan, days: int) -> None:
    for kind, runs in plan.by_kind().items():
        typer.echo(
            f"{len(runs)} {kind.value.replace('run', 'runs', 1) if len(runs) > 1 else kind.value}: "
            f"ended from {_utc(runs[0])} to {_utc(runs[-1])}"
        )
    if not plan.runs:
        read = sum(plan.kept.values())
        stay = f": {read} stay{'s' * (read == 1)}" if read else ""
        typer.echo(f"No run that ended more than {days} days ago can be deleted{stay}.")
    for reason, count in sorted(plan.kept.items()):
        typer.echo(f"{count} stay{'s' * (count == 1)}: {reason}")
    if plan.is_partial:
        typer.echo("Later runs were not read: call prune again once these are deleted.")


def _utc(run: FinishedRun) -> str:
    return f"{datetime.fromtimestamp(run.ended_at, timezone.utc):%Y-%m-%d %H:%M} UTC"

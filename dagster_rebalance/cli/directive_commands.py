"""`dagster-rebalance pause`, `stop`, `resume` and `retry`: directives for all members of a group.

They need the Dagster instance of the members (`DAGSTER_HOME`), but neither Kafka nor the code of
the assets.
"""

from __future__ import annotations

import typer

from dagster_rebalance.cli.target import (
    By,
    Everything,
    Group,
    Partitions,
    Reason,
    login_name,
    only_group,
    open_instance,
)
from dagster_rebalance.core.model.directives import EVERYTHING, Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.operators.requests import DirectiveRequest, issue_directive

_NO_REASON = ""


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
    """  # noqa: D301 - click keeps the lines behind \b as they are
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
    """  # noqa: D301 - click keeps the lines behind \b as they are
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
    """  # noqa: D301 - click keeps the lines behind \b as they are
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
    """  # noqa: D301 - click keeps the lines behind \b as they are
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
        msg = "give either partitions or --all, not both"
        raise ConfigurationError(msg)
    selectors = [EVERYTHING] if everything else partitions or []
    with open_instance() as instance:
        wanted = DirectiveRequest(action, selectors, by or login_name(), reason)
        typer.echo(issue_directive(instance, group or only_group(instance), wanted))

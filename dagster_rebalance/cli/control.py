"""`dagster-rebalance pause`, `stop`, `resume` and `retry`: orders for all members of a group.

Owns what a person types, and who is meant where that is left out. It needs the Dagster instance of
the members (`DAGSTER_HOME`), and neither Kafka nor the code of the assets.
"""

from __future__ import annotations

import typer

from dagster_rebalance.cli.target import (
    By,
    Everything,
    Group,
    Partitions,
    Reason,
    login,
    only_group,
    open_instance,
)
from dagster_rebalance.core.model.directives import EVERYTHING, Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.operators.directives import Wanted, give

_NO_REASON = ""


def pause(
    partitions: Partitions = None,
    *,
    reason: Reason,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Begin nothing new of some partitions; what is at work ends and is committed.

    The partitions stay assigned, and whoever owns them next knows of it.

    \b
    dagster-rebalance pause orders:3 --reason "the warehouse is being moved"
    dagster-rebalance pause orders 'pay*' --group shop --reason "bad deploy upstream"
    dagster-rebalance pause --all --reason "maintenance until 14:00"
    """  # noqa: D301 - click keeps the lines behind \b as they are
    _order(Action.PAUSE, partitions, everything=everything, group=group, by=by, reason=reason)


def stop(
    partitions: Partitions = None,
    *,
    reason: Reason,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Pause some partitions, and cancel what is at work on them.

    That is no failed attempt: it is done again, with the same bounds, after `resume`. A run that
    works on other partitions as well is cancelled as a whole, and those go on at once.

    \b
    dagster-rebalance stop orders:3 --reason "it writes nonsense"
    """  # noqa: D301 - click keeps the lines behind \b as they are
    _order(Action.STOP, partitions, everything=everything, group=group, by=by, reason=reason)


def resume(
    partitions: Partitions = None,
    *,
    reason: Reason = _NO_REASON,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Let paused and stopped partitions go on where they stood.

    \b
    dagster-rebalance resume orders:3
    dagster-rebalance resume --all --reason "the warehouse is back"
    """  # noqa: D301 - click keeps the lines behind \b as they are
    _order(Action.RESUME, partitions, everything=everything, group=group, by=by, reason=reason)


def retry(
    partitions: Partitions = None,
    *,
    reason: Reason = _NO_REASON,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Try now what failed, is stopped, or waits for its next attempt.

    The members do not wait for the rest of the delay. What people have paused stays paused.

    \b
    dagster-rebalance retry orders:3
    dagster-rebalance retry orders 'pay*' --group shop
    dagster-rebalance retry --all --reason "the warehouse is back"
    """  # noqa: D301 - click keeps the lines behind \b as they are
    _order(Action.RETRY, partitions, everything=everything, group=group, by=by, reason=reason)


def _order(
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
        wanted = Wanted(action, selectors, by or login(), reason)
        typer.echo(give(instance, group or only_group(instance), wanted))

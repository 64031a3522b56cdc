"""People pause, stop, resume and retry partitions: what the job and the command line share.

Neither asks Kafka, so an order can be given while Kafka is away: Dagster knows the partitions that
the group has had. Members read the order book every few seconds, and before they claim anything of
a partition that was assigned to them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from dagster_rebalance.core.model.directives import (
    Action,
    Directive,
    how_to_resume,
    in_force,
    selection,
)
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import TopicPartition, named, partitions_named
from dagster_rebalance.orchestration.reporting.member_tables import History, tables_of
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)
_GROUPS_PREFIX = "kafka"
_DOES = {
    Action.PAUSE: "nothing new is begun, and what is at work ends and is committed",
    Action.STOP: "nothing new is begun, and what is at work is cancelled",
    Action.RESUME: "they go on where they stood",
    Action.RETRY: "what failed, is stopped or waits for its next attempt is tried",
}
_RETRIES_KEPT_S = 3600.0
"""Members read a retry within seconds, and one that comes later tries what failed anyway."""


class Wanted(NamedTuple):
    """What a person wants to be done.

    Attributes:
        action: What.
        partitions: Which partitions, each as `Directive.partitions`.
        by: Who wants it.
        reason: Why.
    """

    action: Action
    partitions: Sequence[str]
    by: str
    reason: str = ""


def give(instance: dg.DagsterInstance, group_id: str, wanted: Wanted) -> str:
    """Give an order to all members of a group, present and future, and show it in Dagster.

    Args:
        instance: The Dagster instance of the members.
        group_id: The consumer group.
        wanted: The order.

    Returns:
        What was done, as a sentence.

    Raises:
        ConfigurationError: The order is incomplete, matches no partition of the group, or an
            earlier one cannot be read.
    """
    assets = GroupAssets.of(group_id)
    now = time.time()

    def order(selector: str) -> Directive:
        return Directive(wanted.action, selector, wanted.by.strip(), now, wanted.reason.strip())

    typed = [order(selector).partitions for selector in wanted.partitions]
    if not typed:
        msg = f"say which partitions to {wanted.action.value}: orders:3, a topic, a pattern, or all"
        raise ConfigurationError(msg)
    known = partitions_of(instance, assets, group_id)
    chosen = dict(selection(selector, known, group_id) for selector in typed)
    orders = [order(selector) for selector in chosen]
    matched = sorted({partition for those in chosen.values() for partition in those})
    book = order_book = DirectiveStore(instance, assets.directives_name)
    if wanted.action is Action.RETRY:
        book = DirectiveStore(instance, assets.retries_name)
    try:
        before = order_book.read()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    book.add(orders)
    shown = f"{named(matched)} {orders[0]}"
    done = f"{shown}. {_consequence(wanted.action, orders, matched, before)}"
    try:
        book.tidy(before=now - _RETRIES_KEPT_S if wanted.action is Action.RETRY else 0.0)
        _show(instance, assets, orders, matched, shown)
    except Exception as error:  # of any database; the order is in force by now
        logger.warning("an order of group %s could not be shown", group_id, exc_info=True)
        return f"{done} Dagster could not show it on the asset of the group: {error}"
    return done


def _show(
    instance: dg.DagsterInstance,
    assets: GroupAssets,
    orders: Sequence[Directive],
    matched: Sequence[TopicPartition],
    shown: str,
) -> None:
    instance.report_runless_asset_event(
        dg.AssetObservation(
            asset_key=assets.group,
            description=shown,
            metadata={
                "what": shown,
                **tables_of(History(instance, assets.group).read()),
                "event": orders[0].action.value,
                "partitions": dg.MetadataValue.json([str(partition) for partition in matched]),
                "selectors": dg.MetadataValue.json([order.partitions for order in orders]),
                "by": orders[0].by,
                "reason": orders[0].reason,
                "given_at": dg.MetadataValue.timestamp(orders[0].at),
            },
        )
    )


def groups_of(instance: dg.DagsterInstance) -> list[str]:
    """The consumer groups of an instance, as their asset keys name them."""
    keys = instance.get_asset_keys(prefix=[_GROUPS_PREFIX])
    return sorted(
        {
            key.path[1]
            for key in keys
            if len(key.path) > 1 and key == GroupAssets.of(key.path[1]).group
        }
    )


def _consequence(
    action: Action,
    orders: Sequence[Directive],
    matched: Sequence[TopicPartition],
    before: Sequence[Directive],
) -> str:
    if action is Action.RETRY:
        ordered = [partition for partition in matched if in_force(before, partition) is not None]
        still = f" Still paused or stopped by people: {named(ordered)}." if ordered else ""
        return f"Within seconds {_DOES[action]}.{still}"
    if action is not Action.RESUME:
        resume = how_to_resume(*(order.partitions for order in orders))
        return f"Within seconds {_DOES[action]}. To go on: {resume}"
    waited = [partition for partition in matched if in_force(before, partition) is not None]
    others = [partition for partition in matched if partition not in waited]
    ignored = f" Not paused before: {named(others)}." if others else ""
    return f"Within seconds {_DOES[action]}.{ignored}"


def partitions_of(
    instance: dg.DagsterInstance, assets: GroupAssets, group_id: str
) -> list[TopicPartition]:
    """The partitions that a member of the group was ever assigned.

    Raises:
        ConfigurationError: There are none, so the name of the group may be wrong.
    """
    # People can add keys of their own on the page of the asset.
    keys = list(instance.get_dynamic_partitions(assets.partitions_name))
    found = list(partitions_named(keys))
    if not found:
        groups = ", ".join(groups_of(instance)) or "none"
        msg = (
            f"no member of group {group_id} has had a partition yet in this Dagster instance. "
            f"Its groups: {groups}"
        )
        raise ConfigurationError(msg)
    return sorted(found)

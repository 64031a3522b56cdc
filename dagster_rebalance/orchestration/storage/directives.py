"""The book of orders: what people have ordered for a group, in Dagster's storage.

Orders are kept as dynamic partitions of no asset: Dagster adds one without touching the others,
gives them back in the order in which they came, in one query, never deletes one by itself, and no
page of it can change them. Observations can be wiped, and values of the run storage lose what
another writer has written meanwhile.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import Action, Directive, out_of_date
from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg


class DirectiveStore:
    """The orders of one group.

    Args:
        instance: Keeps them.
        name: The name of the book.
    """

    def __init__(self, instance: dg.DagsterInstance, name: str) -> None:
        self._instance = instance
        self._name = name

    def read(self) -> tuple[Directive, ...]:
        """All orders that may count, oldest first.

        Raises:
            ValueError: Somebody else has written into the book. Nobody can know what it says.
        """
        return tuple(_read(text) for text in self._instance.get_dynamic_partitions(self._name))

    def add(self, orders: Iterable[Directive]) -> None:
        """Add orders."""
        self._instance.add_dynamic_partitions(self._name, [_written(order) for order in orders])

    def tidy(self, *, before: float = 0.0) -> None:
        """Remove orders that can never count again.

        Args:
            before: Orders that were given before this time do not count either.
        """
        texts = self._instance.get_dynamic_partitions(self._name)
        orders = [_read(text) for text in texts]
        old = {index for index, order in enumerate(orders) if order.at < before}
        for index in sorted(old.union(out_of_date(orders))):
            self._instance.delete_dynamic_partition(self._name, texts[index])


def _written(order: Directive) -> str:
    """The text of an order, which no other one has: the time in it counts nanoseconds."""
    said = [order.action.value, order.partitions, order.by, order.at, order.reason]
    return f"{time.time_ns()} {json.dumps(said, ensure_ascii=False)}"


def _read(text: str) -> Directive:
    try:
        action, partitions, by, at, reason = json.loads(text.partition(" ")[2])
        return Directive(Action(action), str(partitions), str(by), float(at), str(reason))
    except (ConfigurationError, TypeError, ValueError) as error:
        msg = (
            f"the order {text[:200]!r} cannot be read: a newer version may have written it, which "
            "then has to be used"
        )
        raise ValueError(msg) from error

"""How a client leaves its group: everything is called back first, and only then is it closed. Otherwise it can freeze the process.

`close()` ends the group's state machine and calls back what is still waiting for that. After each callback confluent-kafka asks librdkafka
for the assign or unassign, with Python's lock in hand. When two callbacks wait (an assignment that nobody has polled for, or the empty one
that follows a released hold; and the revoke that the close brings), the answer to the first one ends the state machine. What the second
one asks may then be dropped without an answer, and it waits for ever: no thread of the process runs any more, and no time-out in it ends.

Seen with confluent-kafka 2.12.0 and 2.16.1 on a mock cluster: about one close in thirty on one busy core. Known as librdkafka #4041 and
#4884. Seen on Kafka 4.1.1, classic and consumer protocol: two callbacks wait right after a release, and when the broker has forgotten the
member in a hold. Once unsubscribed and polled, none does.

Must never close a client that still has something to call back, unless it does not give its partitions up in time.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.consumer import held_revoke
from dagster_rebalance.consumer.translation import ours

if TYPE_CHECKING:
    from collections.abc import Collection

    import confluent_kafka

    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

_SLICE_S = 0.01
_LIMIT_S = 1.0
"""Only what no revoke is asked for stays assigned longer; a close gives that up without calling back."""


def leave(consumer: confluent_kafka.Consumer, held: Collection[TopicPartition] = (), *, eager: bool = False) -> None:
    """Leave the group and close the client.

    Args:
        consumer: The client. Its callbacks must not hold a revoke any more.
        held: What it holds of a revoke, which is completed: a client that has unsubscribed is granted nothing that this could give away.
        eager: Whether it has an eager strategy.

    Raises:
        RuntimeError: It is closed.
    """
    try:
        _give_everything_up(consumer, held, eager=eager)
    except KafkaException as problem:
        logger.warning("a client leaves its group without giving its partitions up first: %s", problem)
    consumer.close()


def _give_everything_up(consumer: confluent_kafka.Consumer, held: Collection[TopicPartition], *, eager: bool) -> None:
    consumer.unsubscribe()
    _call_back(consumer)
    still_held = set(held) & set(map(ours, consumer.assignment()))
    if still_held:
        # Only what is held: the client asks for the rest by itself, and refuses to give it up twice.
        held_revoke.complete(consumer, still_held, eager=eager)
    deadline = time.monotonic() + _LIMIT_S
    while consumer.assignment() and time.monotonic() < deadline:
        _call_back(consumer)
    # An assignment may be waiting while nothing is assigned.
    _call_back(consumer)


def _call_back(consumer: confluent_kafka.Consumer) -> None:
    try:
        consumer.poll(_SLICE_S)
    except Exception as problem:  # noqa: BLE001 - a callback of the user's may raise anything, and the client has to leave all the same
        logger.info("a client that leaves its group: %s", problem)

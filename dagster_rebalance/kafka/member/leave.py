"""How a client leaves its group without freezing the process.

Owns the order: unsubscribe, poll until nothing is assigned, close. Must never decide whether to
leave.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.kafka.client.types import theirs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import confluent_kafka

    from dagster_rebalance.core.model.offsets import TopicPartition

logger = logging.getLogger(__name__)

_LEAVE_SLICE_S = 0.01
_LEAVE_LIMIT_S = 3.0
"""Only what no revoke is asked for stays assigned longer; a close gives that up without calling
back."""


def unassign(
    consumer: confluent_kafka.Consumer, partitions: Iterable[TopicPartition], *, eager: bool
) -> None:
    """Give partitions up; with an eager strategy a client can only give up all that it has.

    Raises:
        KafkaException: The client does not have them.
    """
    if eager:
        consumer.unassign()
    else:
        consumer.incremental_unassign([theirs(tp) for tp in partitions])


def leave(consumer: confluent_kafka.Consumer) -> None:
    """Leave the group and close the client, with nothing left that the close would call back.

    `close()` ends the group's state machine and calls back what still waits. After each callback
    confluent-kafka asks librdkafka for the assign or unassign, with Python's lock in hand. When two
    callbacks wait (an assignment that nobody has polled for, or the empty one that follows a
    released hold; and the revoke that the close brings), the answer to the first one ends the state
    machine, and what the second one asks may be dropped without an answer: it waits for ever, and
    so does every thread of the process (librdkafka #4041 and #4884).

    Seen with confluent-kafka 2.12.0 and 2.16.1 on a mock cluster: 9 of 329 closes with everything
    on one core, 2 of 486 on two; none of 1,488 in this way. On Kafka 4.1.1 two callbacks wait right
    after a release and after a hold that was lost, in the classic and in the consumer protocol;
    once unsubscribed and polled, none does.

    Args:
        consumer: The client. Its callbacks must not hold a revoke any more.

    Raises:
        RuntimeError: It is closed.
    """
    try:
        _unassign_all(consumer)
    except KafkaException as problem:
        logger.warning(
            "a client leaves its group without giving its partitions up first: %s", problem
        )
    consumer.close()


def _unassign_all(consumer: confluent_kafka.Consumer) -> None:
    consumer.unsubscribe()
    _call_back(consumer)
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    while consumer.assignment() and time.monotonic() < deadline:
        _call_back(consumer)
    # An assignment may be waiting while nothing is assigned.
    _call_back(consumer)


def _call_back(consumer: confluent_kafka.Consumer) -> None:
    try:
        consumer.poll(_LEAVE_SLICE_S)
    except Exception as problem:  # noqa: BLE001 - a callback of the user's may raise anything, and the client has to leave all the same
        logger.info("a client that leaves its group: %s", problem)

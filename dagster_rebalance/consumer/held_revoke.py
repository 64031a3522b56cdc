"""How a revoke is held without blocking `poll`: the one trick that everything else rests on, alone in this file.

confluent-kafka unassigns the partitions of a revoke by itself after `on_revoke`, unless the callback called one of the assign functions.
`incremental_unassign` of a partition that is not assigned raises, and counts as such a call all the same. librdkafka then stays in the
join state `wait-unassign-call`: it heartbeats, commits succeed, and nobody else gets the partitions. A later `incremental_unassign` of the
held partitions, from outside the callback, completes the revoke.

Seen with confluent-kafka 2.4.0 to 2.16.1 in the classic protocol, and from 2.10.1 on in the consumer protocol (KIP-848), on Kafka 3.9.1 and
4.1.1. With an eager strategy (`range`, `roundrobin`) the same call raises for another reason and does the same; `unassign` completes that
revoke, which is of everything the member has, and no member of the group is assigned anything before (seen with 2.16.1 on 4.1.1).

Each hold writes one warning of librdkafka's to the log. `incremental_unassign([])` is no replacement: it gives the partitions away at the
rejoin. The first completion ends the hold for all partitions of the request.

Must never do more than these calls. A client that behaves otherwise is refused loudly, since it would give partitions away silently.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import confluent_kafka

from dagster_rebalance.consumer.translation import theirs
from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.partition import TopicPartition

_NOBODYS_PARTITION = confluent_kafka.TopicPartition("__no_such_topic__", 0)


def installed() -> tuple[str, str]:
    """The versions of confluent-kafka and of the librdkafka in it, which distributions combine as they like."""
    # 2.12 gives texts, 2.16 a pair of text and number for the second one.
    first, second = (re.search(r"\d+(\.\d+)+", str(version)) for version in (confluent_kafka.__version__, confluent_kafka.libversion()))
    return first[0] if first else "0.0", second[0] if second else "0.0"


def suppress_unassign(consumer: confluent_kafka.Consumer) -> None:
    """Keep the partitions of the revoke that is being called back. Only to be called inside `on_revoke`.

    Raises:
        IllegalStateError: The installed client accepted the call, so that nothing is known about what it does after the callback.
    """
    try:
        consumer.incremental_unassign([_NOBODYS_PARTITION])
    except confluent_kafka.KafkaException:
        return
    client, library = installed()
    msg = (
        f"confluent-kafka {client} with librdkafka {library} accepted the unassign of a "
        "partition that is not assigned: a revoke cannot be held with it. Install a version from 2.12 to 2.16 and report this one"
    )
    raise IllegalStateError(msg)


def complete(consumer: confluent_kafka.Consumer, held: Iterable[TopicPartition], *, eager: bool) -> None:
    """Let Kafka complete a held revoke, for all of its partitions at once.

    Raises:
        KafkaException: The client no longer holds these partitions.
    """
    if eager:
        consumer.unassign()
    else:
        consumer.incremental_unassign([theirs(tp) for tp in held])

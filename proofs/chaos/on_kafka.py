"""Faults of the brokers, of the topics and of the Spark Connect server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from proofs.chaos.exchange import FLEETING, GROUP, TOPIC
from proofs.chaos.faults import Fault, Ground, Kind, UnderWay, at_once
from proofs.chaos.fleeting import Fleeting
from proofs.chaos.parts import BROKERS

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ADDED = 6
"""Maximum number of added partitions, each with its own run now and then, on two cores."""


def kill_broker(ground: Ground) -> UnderWay | None:
    """Kill a broker."""
    if not _node_may_go(ground):
        return None
    kafka, node = ground.parts.kafka, ground.chance.choice(BROKERS)
    # All partitions: each node has a copy of the group's offsets, and a commit waits until Kafka
    # knows that one of them is gone (9 s).
    fault = Fault(Kind.BROKER_KILLED, f"node {node}")
    kafka.kill(node)
    return UnderWay(fault, ground.after(1, 8), lambda: kafka.restart(node))


def move_coordinator(ground: Ground) -> UnderWay | None:
    """Shut the group's coordinator down."""
    kafka, node = ground.parts.kafka, ground.parts.kafka.coordinator(GROUP)
    if node not in BROKERS or not _node_may_go(ground):
        return None
    fault = Fault(Kind.COORDINATOR_MOVED, f"from node {node}")
    kafka.shut_down(node)
    return UnderWay(fault, ground.after(0, 5), lambda: kafka.restart(node))


def add_partition(ground: Ground) -> UnderWay | None:
    """Add a partition to the topic."""
    parts = ground.parts
    total = len(parts.producer.ends) + 1
    if total > parts.partitions + MOST_ADDED or not _node_may_go(ground):
        return None
    parts.kafka.add_partitions(TOPIC, total)
    parts.producer.take_in(total)
    return UnderWay(
        Fault(Kind.PARTITIONS_ADDED, f"{TOPIC}-{total - 1}", partitions=frozenset({total - 1}))
    )


def delete_offsets(ground: Ground) -> UnderWay | None:
    """Delete the second group, and later set its offset."""
    return _of_fleeting(ground, Kind.OFFSETS_DELETED, Fleeting.delete_offsets)


def make_topic_anew(ground: Ground) -> UnderWay | None:
    """Recreate the topic of the second group, and later set its offset."""
    return _of_fleeting(ground, Kind.TOPIC_MADE_ANEW, Fleeting.make_topic_anew)


def _of_fleeting(ground: Ground, kind: Kind, play: Callable[[Fleeting], None]) -> UnderWay | None:
    fleeting = ground.parts.fleeting
    if fleeting is None or ground.suffers(Kind.OFFSETS_DELETED, Kind.TOPIC_MADE_ANEW):
        return None
    return UnderWay(Fault(kind, FLEETING, partitions=frozenset()), at_once, partial(play, fleeting))


def kill_spark(ground: Ground) -> UnderWay | None:
    """Kill the Spark Connect server."""
    spark = ground.parts.spark
    if spark is None or ground.suffers(Kind.SPARK_KILLED):
        return None
    fault = Fault(Kind.SPARK_KILLED, "Spark Connect", partitions=frozenset())
    spark.kill()
    return UnderWay(fault, ground.after(0, 5), spark.restart)


def _node_may_go(ground: Ground) -> bool:
    return (
        not ground.suffers(Kind.BROKER_KILLED, Kind.COORDINATOR_MOVED)
        and ground.parts.kafka.is_in_sync()
    )

"""`without_coordinator`: read retained partitions while the group's coordinator is dead.

A second member joins, the first one holds the revoke, and a second later the coordinator's node is
killed. It leads no partition of the topic, so only waits of the member itself can slow the reading.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka.admin import NewTopic

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.local.kafka_node import admin_of
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.hold import LIMIT_S, PARTITIONS, Played, follow, in_background, produce
from proofs.bench.members import Ours, client_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

    from dagster_rebalance.testing.broker import KafkaCluster

NODES = 3
_SETTLE_S, _DIES_AFTER_S = 3.0, 1.0
"""The backlog is read first, for up to 2 s: the partitions have two leaders, and a reader may need
a metadata refresh to find the second one."""


def measure(
    kafka: KafkaCluster, *, runs: int, hold_s: float, steady_s: float, step: Callable[[str], None]
) -> list[Entry]:
    """Measure with both protocols, on a Kafka of three nodes."""
    kafka.create_topic("first", 1)
    first = client_config(kafka.bootstrap_servers, "first", "classic")
    with closing(Ours(first, "first", 0)) as one:
        while not one.owned():  # the first group makes the topic of offsets
            one.poll()
    entries = []
    for protocol in ("consumer", "classic"):
        plays = []
        for run in range(runs):
            step(f"without_coordinator, {protocol}, run {run + 1} of {runs}")
            plays.append(_play(kafka, protocol, hold_s, steady_s))
        entries.append(
            Entry(
                "without_coordinator",
                f"{protocol}, the coordinator killed in the hold",
                "ours during the hold over ours before it",
                "records/s",
                Goal(">=", 0.98),
                [Sample(play.held_rate, None, play.ratio) for play in plays],
                "no other client can hold",
            )
        )
    return entries


def _play(kafka: KafkaCluster, protocol: str, hold_s: float, steady_s: float) -> Played:
    topic, group = unique_name("kept"), unique_name("group")
    coordinator = kafka.coordinator(group)
    others = [node for node in range(1, NODES + 1) if node != coordinator]
    leaders = [others[number % 2 :] + others[: number % 2] for number in range(PARTITIONS)]
    admin = admin_of(kafka.bootstrap_servers)
    new = NewTopic(topic, num_partitions=PARTITIONS, replica_assignment=leaders)
    admin.create_topics([new])[topic].result(LIMIT_S)
    config = client_config(kafka.bootstrap_servers, group, protocol)
    with in_background(partial(produce, kafka.bootstrap_servers, topic)):
        return _read(kafka, coordinator, partial(Ours, config, topic, hold_s), steady_s)


def _read(
    kafka: KafkaCluster, coordinator: int, make: Callable[[], Ours], steady_s: float
) -> Played:
    arrivals: list[tuple[float, int]] = []
    deadline, steady = time.monotonic() + LIMIT_S + steady_s, (0.0, 0.0)
    with closing(make()) as first, ExitStack() as stack:
        is_joined = is_dead = False
        while not first.hold.is_over:
            came, now = first.poll(), time.monotonic()
            arrivals.extend((now, partition) for partition in came)
            if not steady[0] and came and len(first.owned()) == PARTITIONS:
                steady = (now + _SETTLE_S, now + _SETTLE_S + steady_s)
            elif steady[0] and now > steady[1] and not is_joined:
                stack.enter_context(in_background(partial(follow, make)))
                is_joined = True
            elif first.hold.began_at and now > first.hold.began_at + _DIES_AFTER_S and not is_dead:
                stack.callback(kafka.restart, coordinator)
                stack.enter_context(in_background(partial(_kill, kafka, coordinator)))
                is_dead = True
            if now > deadline:
                msg = f"the hold of {first.hold} did not come about in {LIMIT_S:g} s"
                raise BrokerError(msg)
    return Played(arrivals, first.hold, steady)


def _kill(kafka: KafkaCluster, coordinator: int, _stop: Event) -> None:
    kafka.kill(coordinator)

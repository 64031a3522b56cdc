"""Pauses that meet what did not exist when they were made."""

from __future__ import annotations

import re
from itertools import permutations
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import Listener, consumer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer


def test_new_topic_and_partition_matching_a_paused_pattern_are_assigned_paused() -> None:
    group = FakeGroup({"orders-eu": 1})
    seen_paused: list[bool] = []
    consumer = consumer_of(group, subscribed=False)
    consumer.set_rebalance_listener(
        Listener(assigned=lambda _, view: seen_paused.append(view.assignment() == view.paused()))
    )
    consumer.subscribe(re.compile("orders-.*"))
    consumer.pause_pattern(re.compile("orders-.*"))
    consumer.poll(0.1)
    group.add_partitions("orders-us", 1)
    consumer.poll(0.1)
    group.add_partitions("orders-eu", 2)
    consumer.poll(0.1)
    assert consumer.paused() == {
        TopicPartition("orders-eu", 0),
        TopicPartition("orders-eu", 1),
        TopicPartition("orders-us", 0),
    }
    assert seen_paused == [True, True, True]


def test_pause_and_resume_of_just_lost_partitions_have_no_effect() -> None:
    group = FakeGroup({"orders": 2})
    consumer = consumer_of(group, subscribed=False)
    consumer.subscribe(["orders"])
    consumer.poll(0.1)
    group.fence(group.members[0])
    consumer.poll(0.1)
    lost = consumer.get_lost_partitions()
    assert len(lost) == 2
    consumer.pause(lost)
    consumer.poll(0.1)
    assert consumer.assignment() == consumer.paused() == lost, "the wish counts when they are back"
    consumer.resume(lost)
    consumer.resume([TopicPartition("orders", 0)])
    consumer.poll(0.1)
    assert consumer.assignment() == lost
    assert consumer.paused() == set()


def test_each_kind_of_pause_is_undone_only_by_its_own_resume() -> None:
    """Resumes come in every order: two parts of a program may pause the same partition."""
    eu = TopicPartition("orders-eu", 0)
    undo: dict[str, Callable[[RebalanceAwareConsumer], None]] = {
        "partition": lambda consumer: consumer.resume([eu]),
        "topic": lambda consumer: consumer.resume_topics(["orders-eu"]),
        "everything": lambda consumer: consumer.resume_all(),
    }
    for order in permutations(undo):
        group = FakeGroup({"orders-eu": 1})
        consumer = consumer_of(group, subscribed=False)
        consumer.subscribe(["orders-eu"])
        consumer.pause([eu])
        consumer.pause_topics(["orders-eu"])
        consumer.pause_all()
        consumer.poll(0.1)
        for kind in order:
            assert consumer.paused() == {eu}, order
            undo[kind](consumer)
        assert consumer.paused() == set(), order

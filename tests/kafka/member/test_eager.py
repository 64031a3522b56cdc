"""Holds with an eager strategy, on a real broker: they hold, and the whole group waits for them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.events import PartitionsAssigned, PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.deadline import wait_until
from tests.kafka.contract.stages import Actor, KafkaStage, pass_time, play, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker


@pytest.fixture
def stage(kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> KafkaStage:
    return KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), "range")


def test_eager_hold_covers_all_partitions_and_accepts_commits(blue: Actor, green: Actor) -> None:
    pass_time(blue, green, polls=15)
    assert blue.member.held == blue.owns == blue.everything
    assert not green.owns
    assert (
        blue.member.commit(dict.fromkeys(blue.everything, OffsetAndMetadata(7))).committed
        == blue.everything
    )
    blue.member.release()
    assert not blue.owns
    share(blue, green)
    assert {
        offset.offset for offset in green.member.committed(green.owns, 60.0).values() if offset
    } == {7}
    assert blue.partitions_of(PartitionsAssigned)[4:] == sorted(blue.owns)
    assert not blue.partitions_of(PartitionsLost)


def test_eager_hold_delays_the_whole_group(
    actor: Callable[[], Actor], blue: Actor, green: Actor
) -> None:
    share(blue, green)
    late = actor().subscribe()
    play(
        lambda: blue.member.held and green.member.held,
        blue,
        green,
        late,
        what="a revoke request to both",
    )
    green.member.release()
    pass_time(blue, green, late, polls=15)
    assert blue.owns
    assert not green.owns | late.owns
    blue.member.release()
    share(blue, green, late)


def test_delay_revoke_of_an_eager_member_returns_whether_assigned(
    stage: KafkaStage, actor: Callable[[], Actor]
) -> None:
    everything = frozenset(TopicPartition(stage.topic, number) for number in range(4))
    with closing(RebalanceAwareConsumer(stage.config, hold_limit_s=30, fetch=False)) as blue:
        blue.subscribe([stage.topic])
        wait_until(
            lambda: blue.poll(0.05) or len(blue.assignment()) == 4,
            timeout_s=120,
            what="everything to be assigned",
            interval_s=0,
        )
        green = actor().subscribe()

        def requested() -> bool:
            green.poll()
            blue.poll(0.05)
            return bool(blue.get_to_be_revoked_partitions())

        wait_until(requested, timeout_s=120, what="a revoke request", interval_s=0)
        for _ in range(5):
            assert blue.get_to_be_revoked_partitions() == everything
            assert blue.delay_revoke(everything)
            blue.poll(0.05)
            green.poll()
            assert blue.assignment() == everything
            assert not green.owns
        play(
            lambda: green.owns or blue.poll(0.05), green, what="the second member to own its share"
        )

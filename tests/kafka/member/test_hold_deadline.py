"""Members that do not release a hold in time, or stop polling during a hold, on a real broker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.events import LostReason, PartitionsLost
from tests.kafka.contract.stages import Actor, KafkaStage, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

POLL_LIMIT_S = 3.0


@pytest.fixture(params=["classic", "consumer", "range"])
def pair(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> Iterator[tuple[Actor, Actor]]:
    stage = KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), request.param)
    stage.hold_limit_s = 1.0
    stage.config["max.poll.interval.ms"] = f"{POLL_LIMIT_S * 1000:.0f}"
    if stage.protocol == "classic":
        stage.config["session.timeout.ms"] = stage.config["max.poll.interval.ms"]
    blue = Actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="the first member to own everything")
    green = Actor(stage).subscribe()
    play(lambda: blue.member.held, blue, green, what="a revoke request")
    yield blue, green
    blue.member.close(5.0)
    green.member.close(5.0)


def both_share(blue: Actor, green: Actor) -> Callable[[], bool]:

    def shared() -> bool:
        for actor in (blue, green):
            if actor.member.held:
                actor.member.release()
        return len(blue.owns) == len(green.owns) == 2 and not blue.owns & green.owns

    return shared


def test_hold_past_its_deadline_is_lost_and_reassigned(pair: tuple[Actor, Actor]) -> None:
    """In classic the broker never ends a hold; in the consumer protocol both end it."""
    blue, green = pair
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the hold to be lost")
    (loss,) = [event for event in blue.events if isinstance(event, PartitionsLost)]
    assert len(set(loss.partitions)) == len(loss.partitions) == 4
    assert loss.reason in {LostReason.EXPIRED, LostReason.FENCED}
    play(both_share(blue, green), blue, green, what="both to share the partitions")


def test_member_that_stops_polling_in_a_hold_loses_all_once(pair: tuple[Actor, Actor]) -> None:
    blue, green = pair
    resumes_at = time.monotonic() + POLL_LIMIT_S + 0.7
    while time.monotonic() < resumes_at:
        green.poll()
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be noticed")
    assert (
        len(blue.partitions_of(PartitionsLost)) == len(set(blue.partitions_of(PartitionsLost))) == 4
    )
    play(both_share(blue, green), blue, green, what="both to share the partitions")

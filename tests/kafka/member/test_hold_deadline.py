"""Members that do not release a hold in time, or stop polling during a hold, on a real broker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.events import LostReason, PartitionsLost
from tests.kafka.contract.stages import Actor, KafkaStage, play, share

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

POLL_LIMIT_S = 3.0
LOST_WITHIN_S = 30.0
"""Far above the limit, for a busy machine, and far below the limits of defaults."""


@pytest.fixture(params=["classic", "consumer", "range"])
def stage(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> KafkaStage:
    made = KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), request.param)
    made.hold_limit_s = 1.0
    made.config["max.poll.interval.ms"] = f"{POLL_LIMIT_S * 1000:.0f}"
    if made.protocol == "classic":
        made.config["session.timeout.ms"] = made.config["max.poll.interval.ms"]
    return made


def test_hold_past_its_deadline_is_lost_and_reassigned(blue: Actor, green: Actor) -> None:
    """In classic the broker never ends a hold; in the consumer protocol both end it."""
    begun_at = time.monotonic()  # the clock of the member
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the hold to be lost")
    assert time.monotonic() - begun_at < LOST_WITHIN_S
    (loss,) = [event for event in blue.events if isinstance(event, PartitionsLost)]
    assert len(set(loss.partitions)) == len(loss.partitions) == 4
    assert loss.reason in {LostReason.EXPIRED, LostReason.FENCED}
    share(blue, green)


def test_member_that_stops_polling_in_a_hold_loses_all_once(blue: Actor, green: Actor) -> None:
    resumes_at = time.monotonic() + POLL_LIMIT_S + 0.7
    while time.monotonic() < resumes_at:
        green.poll()
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be noticed")
    assert (
        len(blue.partitions_of(PartitionsLost)) == len(set(blue.partitions_of(PartitionsLost))) == 4
    )
    share(blue, green)

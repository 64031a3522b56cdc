"""A release that the real client refuses, because the partition is not in its assignment any more."""

from __future__ import annotations

import time

import confluent_kafka

from dagster_rebalance.consumer.events import LostReason
from dagster_rebalance.consumer.session import Session
from dagster_rebalance.consumer.settings import validated

GRANTED = confluent_kafka.TopicPartition("orders", 0)


def test_a_refused_release_is_told_as_a_loss_and_not_raised() -> None:
    """Another rebalance was faster. Raised, it would end the member; ignored, the member would believe that it still owns the partition."""
    session = Session(validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, hold_limit_s=10), time.monotonic)
    session._on_assign(session.consumer, [GRANTED])
    session._on_revoke(session.consumer, [GRANTED])
    session.consumer.incremental_unassign([GRANTED])
    session.release()
    assert session.ended is LostReason.SUPERSEDED
    assert session.close(5.0)

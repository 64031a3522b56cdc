"""Questions to a cluster in which a topic of somebody else cannot be described."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from dagster_rebalance.consumer.cluster import Cluster
from dagster_rebalance.consumer.port import PartitionInfo
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.core.errors import BrokerError


class FakeAdmin:
    """A client whose brokers know two topics, and cannot describe one of them."""

    def list_topics(self, timeout: float) -> SimpleNamespace:  # noqa: ARG002 - the client's signature
        """Both."""
        partition = SimpleNamespace(id=0, leader=1, replicas=[1], isrs=[1])
        topics = {
            "orders": SimpleNamespace(error=None, partitions={0: partition}),
            "broken": SimpleNamespace(error=KafkaError(KafkaError.LEADER_NOT_AVAILABLE, "no leader"), partitions={}),
        }
        return SimpleNamespace(topics=topics)

    def describe_topics(self, *_: object, **__: object) -> dict[str, object]:
        """Nothing is known about rights."""
        return {}


@pytest.fixture
def cluster() -> Cluster:
    """The cluster."""
    cluster = Cluster(validated({"bootstrap.servers": "nobody:9092", "group.id": "etl"}, hold_limit_s=1))
    vars(cluster)["_admin"] = FakeAdmin()
    return cluster


def test_a_topic_that_cannot_be_described_hides_no_other(cluster: Cluster) -> None:
    """A topic of another team is being made or deleted at any time."""
    orders = [PartitionInfo("orders", 0, 1, (1,), (1,))]
    assert cluster.list_topics() == {"orders": orders}
    assert cluster.partitions_for("orders") == orders
    cluster.check(["orders"])


def test_a_topic_that_is_asked_for_and_cannot_be_described_is_told(cluster: Cluster) -> None:
    """It exists, so it is not called missing."""
    for ask in (lambda: cluster.partitions_for("broken"), lambda: cluster.check(["orders", "broken"])):
        with pytest.raises(BrokerError, match=r"'broken'.*no leader"):
            ask()
    with pytest.raises(BrokerError, match=r"'missing'.*create the topic"):
        cluster.partitions_for("missing")

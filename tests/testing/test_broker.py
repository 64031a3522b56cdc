"""The local Kafka keeps records through crashes, elects leaders, and is removed completely."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
)
from dagster_rebalance.testing import broker
from dagster_rebalance.testing.broker import KAFKA_VERSION, VERSION_VARIABLE, KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.local import java
from dagster_rebalance.testing.local.host import accepts_connections, free_port
from tests.kafka.readers import commit_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

PARENT = """
import time
from dagster_rebalance.testing.broker import KAFKA_VERSION, VERSION_VARIABLE, KafkaCluster
kafka = KafkaCluster().start()
print(kafka.bootstrap_servers, *kafka.pids, flush=True)
time.sleep(600)
"""


def produce(kafka: KafkaCluster, topic: str, *values: str, partition: int = 0) -> None:
    """Write records, and wait until Kafka has them."""
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "acks": "all", "log_level": 0}
    )
    for value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(120) == 0


def commit(kafka: KafkaCluster, group: str, position: TopicPartition) -> None:
    """Commit an offset for a group, which needs the group's coordinator."""
    commit_by_hand({**kafka.client_config(), "group.id": group, "log_level": 0}, position)


def read_all(kafka: KafkaCluster, topic: str, count: int, partition: int = 0) -> list[str]:
    """Read a partition from its start until `count` records are there."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": unique_name("reader"),
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    values: list[str] = []

    def has_all() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            values.append((message.value() or b"").decode())
        return len(values) >= count

    wait_until(
        has_all,
        timeout_s=120,
        what=lambda: f"{count} records of {topic}; there are {values}",
        interval_s=0,
    )
    consumer.close()
    return values


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[KafkaCluster]:
    """A Kafka that can lose a node."""
    with KafkaCluster(nodes=3) as kafka:
        yield kafka


def test_kafka_stores_and_returns_records(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(partitions=2)
    produce(kafka_broker, topic, "a", "b", partition=1)
    assert read_all(kafka_broker, topic, 2, partition=1) == ["a", "b"]


def test_topic_names_are_unique(kafka_topic: TopicFactory) -> None:
    assert kafka_topic() != kafka_topic()


def test_topic_with_many_partitions_is_created_in_parts(
    kafka_broker: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "_MOST_CREATED", 2)
    topic = unique_name("orders")
    kafka_broker.create_topic(topic, 5)
    admin = AdminClient({**kafka_broker.client_config()})
    assert len(admin.list_topics(topic, timeout=120).topics[topic].partitions) == 5


def test_existing_topic_is_refused(kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic()
    with pytest.raises(BrokerError, match=f"refused to create topic {topic}: .*exists"):
        kafka_broker.create_topic(topic)


def test_topics_are_not_created_automatically(kafka_broker: KafkaCluster) -> None:
    admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    assert admin.list_topics("no-such-topic", timeout=120).topics["no-such-topic"].error is not None


def test_partitions_are_added_to_a_topic(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(partitions=2)
    kafka_broker.add_partitions(topic, 3)
    assert kafka_broker.leaders(topic) == [1, 1, 1]
    produce(kafka_broker, topic, "new", partition=2)
    assert read_all(kafka_broker, topic, 1, partition=2) == ["new"]


def test_records_survive_a_kill_and_a_restart_and_are_removed_with_kafka() -> None:
    with KafkaCluster() as kafka:
        address, folder = kafka.bootstrap_servers, kafka.logs[0].parent.parent
        kafka.create_topic("orders")
        produce(kafka, "orders", "before")
        kafka.kill()
        assert kafka.pids == []
        kafka.restart()
        produce(kafka, "orders", "between")
        kafka.restart()
        assert kafka.bootstrap_servers == address
        assert read_all(kafka, "orders", 2) == ["before", "between"]
        assert folder.is_dir()
    assert not folder.exists()


def test_suspended_node_answers_after_resume(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers, "log_level": 0})
    producer.produce(topic, "first")
    assert producer.flush(120) == 0
    kafka_broker.suspend()
    try:
        producer.produce(topic, "second")
        assert producer.flush(0.5) == 1
    finally:
        kafka_broker.resume()
    assert producer.flush(120) == 0


def test_three_nodes_elect_leader_and_coordinator_after_a_kill(
    three_nodes: KafkaCluster,
) -> None:
    three_nodes.create_topic("orders", 3)
    assert set(three_nodes.leaders("orders")) == {1, 2, 3}
    produce(three_nodes, "orders", "before")
    group = unique_name("group")
    commit(three_nodes, group, TopicPartition("orders", 0, 1))
    before = three_nodes.coordinator(group)
    three_nodes.kill(before)
    wait_until(
        lambda: before not in three_nodes.leaders("orders"),
        timeout_s=120,
        what="leaders without the killed node",
    )
    wait_until(
        lambda: three_nodes.coordinator(group) not in (before, -1),
        timeout_s=120,
        what="a coordinator on another node",
    )
    commit(three_nodes, group, TopicPartition("orders", 0, 1))
    produce(three_nodes, "orders", "after")
    assert read_all(three_nodes, "orders", 2) == ["before", "after"]
    three_nodes.restart(before)
    assert len(three_nodes.pids) == 3


def test_node_that_shuts_down_hands_leaderships_over(three_nodes: KafkaCluster) -> None:
    """The leaders move before the node goes, so no partition waits for a timeout."""
    three_nodes.create_topic("calm", 3)
    three_nodes.shut_down(2)
    leaders = three_nodes.leaders("calm")
    assert 2 not in leaders
    assert -1 not in leaders
    three_nodes.restart(2)


def test_kafka_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    address, pid = parent.stdout.readline().split()
    assert Path(f"/proc/{pid}").exists()
    parent.send_signal(signal.SIGKILL)
    parent.wait(120)
    parent.stdout.close()
    wait_until(
        lambda: not accepts_connections(int(address.split(":")[1])),
        timeout_s=120,
        what=f"the end of {address}",
    )


def test_refused_setting_is_reported_with_kafkas_message() -> None:
    with pytest.raises(DagsterRebalanceError, match=r"num\.partitions"):
        KafkaCluster(settings={"num.partitions": "many"}).start()


@pytest.mark.parametrize("nodes", [0, 2, 4])
def test_cluster_with_two_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"1 or 3 nodes, not {nodes}"):
        KafkaCluster(nodes=nodes)


@pytest.mark.parametrize("version", ["latest", "2.8.1", "4.1", "../4.1.1"])
def test_unsupported_kafka_version_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigurationError, match=re.escape(f"cannot start version '{version}' of Kafka")
    ):
        KafkaCluster(version=version)
    monkeypatch.setenv(VERSION_VARIABLE, version)
    with pytest.raises(ConfigurationError, match="give a version like 4"):
        KafkaCluster()


def test_kafka_version_comes_from_argument_variable_or_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)
    assert KafkaCluster().version == KAFKA_VERSION
    monkeypatch.setenv(VERSION_VARIABLE, "3.9.1")
    assert KafkaCluster().version == "3.9.1"
    assert KafkaCluster(version="4.0.0").version == "4.0.0"


def test_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port} is in use"):
            KafkaCluster(port=port)


def test_unknown_node_is_refused(kafka_broker: KafkaCluster) -> None:
    with pytest.raises(ConfigurationError, match=r"has no node 2; its nodes: 1\."):
        kafka_broker.kill(2)


def test_kafka_without_a_suitable_java_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(java, "INSTALLED_IN", ())
    monkeypatch.setenv(
        "PATH", os.defpath.replace("/usr/bin", str(tmp_path)).replace("/bin", str(tmp_path))
    )
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="need Java 17 to 23"):
        KafkaCluster().start()

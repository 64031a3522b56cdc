"""Errors for a missing broker, topic, right or protocol name the cause."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.local.host import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.fixtures import TopicFactory


def consumer(servers: str, topic: str, **config: str) -> RebalanceAwareConsumer:
    """A consumer without a fetcher; by default in a separate group."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": unique_name("group"),
        **{key.replace("_", "."): value for key, value in config.items()},
    }
    made = RebalanceAwareConsumer(settings, hold_limit_s=30, fetch=False)
    made.subscribe([topic])
    return made


def error_of_poll(member: RebalanceAwareConsumer) -> BrokerError:
    """The first error that polling raises."""

    def poll() -> BrokerError | None:
        try:
            member.poll(0.1)
        except BrokerError as error:
            return error
        return None

    return wait_until(poll, timeout_s=120, what="an error", interval_s=0)


def test_check_names_an_unreachable_broker() -> None:
    """`poll` raises no error, since the broker may return."""
    servers = f"127.0.0.1:{free_port()}"
    with closing(consumer(servers, "orders")) as lonely:
        with pytest.raises(BrokerError, match=f"at {servers}.*check that the brokers") as caught:
            lonely.check(1.0)
        assert caught.value.retriable
        with pytest.raises(BrokerError, match=servers):
            lonely.end_offsets([TopicPartition("orders", 0)], 0.5)
        with pytest.raises(BrokerError, match=servers):
            lonely.committed([TopicPartition("orders", 0)], 0.5)
        assert lonely.poll(0.2) == []


@pytest.mark.broker
def test_check_names_an_unknown_topic(kafka_broker: KafkaCluster) -> None:
    """The check does not create it."""
    topic = unique_name("missing")
    with closing(consumer(kafka_broker.bootstrap_servers, topic)) as puzzled:
        for _ in range(2):
            with pytest.raises(BrokerError, match=f"'{topic}'.*create the topic"):
                puzzled.check(60.0)
        with pytest.raises(BrokerError, match=topic):
            puzzled.partitions_for(topic)
        with pytest.raises(BrokerError, match=f"{topic}-0"):
            puzzled.beginning_offsets([TopicPartition(topic, 0)], 60.0)


@pytest.mark.broker
def test_classic_poll_raises_an_unknown_topic_once(kafka_broker: KafkaCluster) -> None:
    topic = unique_name("missing")
    with closing(
        consumer(kafka_broker.bootstrap_servers, topic, group_protocol="classic")
    ) as puzzled:
        assert topic in str(error_of_poll(puzzled))
        assert puzzled.poll(0.2) == []


@pytest.mark.broker
def test_check_and_poll_raise_refused_credentials(kafka_broker: KafkaCluster) -> None:
    wrong = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_username": "etl",
        "sasl_password": "wrong",
    }
    with closing(consumer(kafka_broker.bootstrap_servers, "orders", **wrong)) as stranger:
        with pytest.raises(BrokerError, match=r"sasl\.password"):
            stranger.check(4.0)
        assert "sasl.password" in str(error_of_poll(stranger))


@pytest.mark.broker
def test_poll_raises_an_incompatible_strategy_of_the_group(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic, group = kafka_topic(2), unique_name("group")
    eager = Consumer(
        {
            "bootstrap.servers": kafka_broker.bootstrap_servers,
            "group.id": group,
            "partition.assignment.strategy": "range",
        }
    )
    eager.subscribe([topic])
    wait_until(
        lambda: (eager.poll(0.1), eager.assignment())[1],
        timeout_s=120,
        what="the eager member to own the topic",
        interval_s=0,
    )
    with closing(
        consumer(kafka_broker.bootstrap_servers, topic, group_id=group, group_protocol="classic")
    ) as stranger:
        assert "the group is in use with another protocol" in str(error_of_poll(stranger))
    eager.close()


@pytest.fixture(scope="module")
def classic_broker() -> Iterator[KafkaCluster]:
    """A broker without the consumer protocol, like Kafka 3."""
    with KafkaCluster(settings={"group.coordinator.rebalance.protocols": "classic"}) as kafka:
        kafka.create_topic("orders", 2)
        yield kafka


@pytest.mark.broker
def test_poll_names_the_setting_for_a_broker_without_the_consumer_protocol(
    classic_broker: KafkaCluster,
) -> None:
    with closing(consumer(classic_broker.bootstrap_servers, "orders")) as modern:
        for _ in range(2):
            assert "group_protocol: classic" in str(error_of_poll(modern))
    with closing(
        consumer(classic_broker.bootstrap_servers, "orders", group_protocol="classic")
    ) as old:
        wait_until(
            lambda: old.poll(0.1) or old.assignment(),
            timeout_s=120,
            what="an assignment",
            interval_s=0,
        )

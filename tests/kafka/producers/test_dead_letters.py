"""The producer of dead letters.

The tests cover how it is made, when a record counts as stored, and what it says when one is not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer, Delivery
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.fake_producer import FakeProducer

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

CONFIG = {
    "bootstrap.servers": "memory:1",
    "group.id": "etl",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "u",
    "sasl.password": "p",
    "max.poll.interval.ms": "400000",
}


class Stage:
    """A producer of dead letters on clients in memory."""

    def __init__(self) -> None:
        self.clients: list[FakeProducer] = []
        self.letters = DeadLetterProducer(CONFIG, "dead", make_producer=self._make)

    def _make(self, config: dict[str, Any]) -> FakeProducer:
        self.clients.append(FakeProducer(config))
        return self.clients[-1]

    @property
    def client(self) -> FakeProducer:
        """The last client that was made."""
        return self.clients[-1]

    def problem_of(self, error: KafkaError) -> str:
        """What is said when a record fails with an error."""
        self.letters.send("k", "v")
        self.client.end(error)
        (delivery,) = self.letters.deliveries()
        assert delivery.key == "k"
        return delivery.problem


def test_every_replica_confirms_a_record_and_none_is_written_twice_by_a_retry() -> None:
    """The offset is committed on the word of this client."""
    config = Stage().client.config
    assert (config["acks"], config["enable.idempotence"]) == ("all", True)
    assert (config["bootstrap.servers"], config["sasl.password"], config["security.protocol"]) == (
        "memory:1",
        "p",
        "SASL_SSL",
    )
    assert not {"group.id", "max.poll.interval.ms"} & config.keys()


def test_the_topic_decides_how_large_a_letter_may_be() -> None:
    """A record of the size that Kafka allows, and its reason, is larger than the client's default.

    Refused by the client itself, it would stop its partition for ever.
    """
    letters = DeadLetterProducer({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, "dead")
    letters.send("k", b"v" * 5_000_000)
    assert letters.deliveries() == ()
    letters.close()


def test_a_record_is_stored_when_the_broker_said_so_and_not_before() -> None:
    """Asking does not wait."""
    stage = Stage()
    stage.letters.send("k", "v")
    assert stage.letters.deliveries() == ()
    stage.client.end()
    assert stage.letters.deliveries() == (Delivery("k"),)
    assert stage.letters.deliveries() == ()
    assert stage.client.sent == [("dead", "k", "v")]


def test_of_records_with_one_key_only_one_is_under_way() -> None:
    """The engine asks again each second, and an outage lasts longer."""
    stage = Stage()
    stage.letters.send("k", "v")
    stage.letters.send("k", "v")
    stage.letters.send("other", "w")
    assert [key for _, key, _ in stage.client.sent] == ["k", "other"]
    stage.client.end()
    assert {delivery.key for delivery in stage.letters.deliveries()} == {"k", "other"}
    stage.letters.send("k", "v")
    assert len(stage.client.sent) == 3


@pytest.mark.parametrize(
    "code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED]
)
def test_a_missing_right_is_named(code: int) -> None:
    """A member that may read need not be allowed to write.

    A principal with no right to write at all gets no id for an idempotent producer.
    """
    problem = Stage().problem_of(KafkaError(code))
    assert "grant the principal the ACLs WRITE and DESCRIBE" in problem


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC])
def test_a_missing_dead_letter_topic_is_named(code: int) -> None:
    """The topic is in a setting, and not in the subscription of the group."""
    problem = Stage().problem_of(KafkaError(code))
    assert re.search(r"create the dead-letter topic '[^']+', or set another one", problem)
    assert "subscription" not in problem


def test_a_time_out_is_explained_by_what_the_client_met_meanwhile() -> None:
    """'Message timed out' does not point to wrong credentials.

    A lost connection says even less than wrong credentials do.
    """
    stage = Stage()
    plain = stage.problem_of(KafkaError(KafkaError._MSG_TIMED_OUT))
    assert "storing the record failed" in plain
    assert "_MSG_TIMED_OUT" in plain
    stage.client.config["error_cb"](KafkaError(KafkaError._TRANSPORT))
    stage.client.config["error_cb"](KafkaError(KafkaError._AUTHENTICATION))
    stage.client.config["error_cb"](KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert "check 'security.protocol', 'sasl.mechanism'" in stage.problem_of(
        KafkaError(KafkaError._MSG_TIMED_OUT)
    )
    assert "_MSG_TIMED_OUT" in stage.problem_of(KafkaError(KafkaError._MSG_TIMED_OUT)), (
        "each trouble explains one failure"
    )


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)), "MSG_SIZE_TOO_LARGE"),
        (BufferError("Queue full"), "_QUEUE_FULL"),
    ],
)
def test_a_record_that_the_client_does_not_take_has_failed(error: Exception, name: str) -> None:
    """As one that the broker refuses: told by the next call, never raised into the member."""
    stage = Stage()
    stage.client.refuses.append(error)
    stage.letters.send("k", "v")
    (delivery,) = stage.letters.deliveries()
    assert name in delivery.problem
    stage.letters.send("k", "v")
    assert len(stage.client.sent) == 1


def test_a_client_that_broke_for_good_is_replaced() -> None:
    """A fatal error may end an idempotent producer, and must not stop the partition for ever."""
    stage = Stage()
    stage.problem_of(KafkaError(KafkaError._FATAL, "epoch lost", fatal=True))
    stage.letters.deliveries()
    stage.letters.send("k", "v")
    assert len(stage.clients) == 2
    stage.client.end()
    assert stage.letters.deliveries() == (Delivery("k"),)


def test_a_fatal_error_ends_what_is_under_way_and_is_not_raised_into_the_member() -> None:
    """The client raises it out of its poll, once, and calls nobody back."""
    stage = Stage()
    stage.letters.send("k", "v")
    stage.client.fatal = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id", fatal=True)
    (delivery,) = stage.letters.deliveries()
    assert delivery.key == "k"
    assert "ACLs WRITE and DESCRIBE" in delivery.problem
    stage.letters.send("k", "v")
    assert len(stage.clients) == 2


def test_a_fatal_error_at_the_end_is_not_raised_into_the_member() -> None:
    """It is leaving the group, and must get to that."""
    stage = Stage()
    stage.client.fatal = KafkaError(KafkaError._FATAL, "no id", fatal=True)
    stage.letters.close()
    assert stage.client.is_purged


def test_a_record_ends_once() -> None:
    """A client that was dropped may still call back."""
    stage = Stage()
    stage.letters.send("k", "v")
    stage.client.end()
    stage.client.end_again()
    assert stage.letters.deliveries() == (Delivery("k"),)


def test_closing_gives_up_what_is_under_way() -> None:
    """A leave has no time to wait for it, and nothing was committed on it."""
    stage = Stage()
    stage.letters.send("k", "v")
    stage.letters.close()
    stage.letters.close()
    assert stage.client.is_purged


def test_settings_that_the_client_refuses_are_named() -> None:
    """At the start, not with the first record that fails."""
    with pytest.raises(ConfigurationError, match=r"ssl\.nonsense"):
        DeadLetterProducer({**CONFIG, "ssl.nonsense": "x"}, "dead")


@pytest.mark.broker
def test_a_record_is_in_the_topic_when_it_is_confirmed(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    """With the real client, whose settings must fit each other."""
    topic = kafka_topic()
    letters = DeadLetterProducer(
        {"bootstrap.servers": kafka_broker.bootstrap_servers, "group.id": "etl"}, topic
    )
    letters.send("orders-0-0-10", '{"start": 0}')
    assert wait_until(letters.deliveries, timeout_s=30, what="the record to be confirmed") == (
        Delivery("orders-0-0-10"),
    )
    letters.close()
    reader = Consumer(
        {
            "bootstrap.servers": kafka_broker.bootstrap_servers,
            "group.id": unique_name("reader"),
            "auto.offset.reset": "earliest",
        }
    )
    reader.subscribe([topic])
    record = reader.poll(30)
    reader.close()
    assert record is not None
    assert (record.key(), record.value()) == (b"orders-0-0-10", b'{"start": 0}')

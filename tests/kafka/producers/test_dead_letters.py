"""The producer of dead letters: its settings, deliveries and errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.letters import LetterRecord
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
    """A producer with clients in memory."""

    def __init__(self) -> None:
        self.clients: list[FakeProducer] = []
        self.letters = DeadLetterProducer(CONFIG, "dead", make_producer=self._make)

    def _make(self, config: dict[str, Any]) -> FakeProducer:
        self.clients.append(FakeProducer(config))
        return self.clients[-1]

    @property
    def client(self) -> FakeProducer:
        return self.clients[-1]

    def problem_of(self, error: KafkaError) -> str:
        """The problem of a delivery that fails with `error`."""
        self.letters.send("k", "v")
        self.client.end(error)
        (delivery,) = self.letters.deliveries()
        assert delivery.key == "k"
        return delivery.problem


def test_client_is_idempotent_and_waits_for_all_replicas() -> None:
    config = Stage().client.config
    assert (config["acks"], config["enable.idempotence"]) == ("all", True)
    assert (config["bootstrap.servers"], config["sasl.password"], config["security.protocol"]) == (
        "memory:1",
        "p",
        "SASL_SSL",
    )
    assert not {"group.id", "max.poll.interval.ms"} & config.keys()


def test_client_does_not_limit_the_size_of_a_letter() -> None:
    """A record of the allowed size with its reason is larger than the client's default limit."""
    letters = DeadLetterProducer({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, "dead")
    letters.send("k", b"v" * 5_000_000)
    assert letters.deliveries() == ()
    letters.close()


def test_record_counts_as_stored_after_its_confirmation() -> None:
    stage = Stage()
    stage.letters.send("k", "v")
    assert stage.letters.deliveries() == ()
    stage.client.end()
    assert stage.letters.deliveries() == (Delivery("k"),)
    assert stage.letters.deliveries() == ()
    assert stage.client.sent == [("dead", "k", "v")]


def test_one_record_per_key_is_in_flight() -> None:
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
def test_missing_acl_is_named(code: int) -> None:
    """A principal without WRITE on any topic gets no id for an idempotent producer."""
    problem = Stage().problem_of(KafkaError(code))
    assert "grant the principal the ACLs WRITE and DESCRIBE" in problem


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC])
def test_missing_dead_letter_topic_is_named(code: int) -> None:
    problem = Stage().problem_of(KafkaError(code))
    assert re.search(r"create the dead-letter topic '[^']+', or set another one", problem)
    assert "subscription" not in problem


def test_time_out_is_explained_by_the_last_connection_error() -> None:
    """Refused credentials explain more than a lost connection."""
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
        "each connection error explains one failure"
    )


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)), "MSG_SIZE_TOO_LARGE"),
        (BufferError("Queue full"), "_QUEUE_FULL"),
    ],
)
def test_record_refused_by_the_client_has_failed(error: Exception, name: str) -> None:
    stage = Stage()
    stage.client.refuses.append(error)
    stage.letters.send("k", "v")
    (delivery,) = stage.letters.deliveries()
    assert name in delivery.problem
    stage.letters.send("k", "v")
    assert len(stage.client.sent) == 1


def test_client_with_a_fatal_error_is_replaced() -> None:
    stage = Stage()
    stage.problem_of(KafkaError(KafkaError._FATAL, "epoch lost", fatal=True))
    stage.letters.deliveries()
    stage.letters.send("k", "v")
    assert len(stage.clients) == 2
    stage.client.end()
    assert stage.letters.deliveries() == (Delivery("k"),)


def test_fatal_error_of_a_poll_ends_all_records_in_flight() -> None:
    """The client raises it once and does not call back."""
    stage = Stage()
    stage.letters.send("k", "v")
    stage.client.fatal = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id", fatal=True)
    (delivery,) = stage.letters.deliveries()
    assert delivery.key == "k"
    assert "ACLs WRITE and DESCRIBE" in delivery.problem
    stage.letters.send("k", "v")
    assert len(stage.clients) == 2


def test_fatal_error_of_a_delivery_ends_all_records_in_flight() -> None:
    """The client that would report the others is dropped."""
    stage = Stage()
    stage.letters.send("a", "v")
    stage.client.end(KafkaError(KafkaError._FATAL, "epoch lost", fatal=True))
    stage.letters.send("b", "v")
    assert [one.key for one in stage.letters.deliveries()] == ["a", "b"]
    stage.letters.send("b", "v")
    assert len(stage.clients) == 2


def test_refused_letter_leaves_none_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call would get its error, or would not send a change of its state."""
    stage = Stage()
    sent: list[str] = []
    errors: list[KafkaError | None] = [KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None, None]
    real = stage.client.poll

    def poll(_timeout: float) -> int:
        key = stage.client.sent[len(sent)][1]
        sent.append(key)
        stage.letters._end(key, errors.pop(0))
        return real(0)

    monkeypatch.setattr(stage.client, "poll", poll)
    with pytest.raises(BrokerError, match="letter a could not be stored"):
        stage.letters.store([LetterRecord("a", b"", []), LetterRecord("b", b"", [])])
    stage.letters.store([LetterRecord("b", b"", [])])
    assert sent == ["a", "b", "b"]


def test_fatal_error_of_close_is_not_raised() -> None:
    stage = Stage()
    stage.client.fatal = KafkaError(KafkaError._FATAL, "no id", fatal=True)
    stage.letters.close()
    assert stage.client.is_purged


def test_delivery_ends_once() -> None:
    stage = Stage()
    stage.letters.send("k", "v")
    stage.client.end()
    stage.client.end_again()
    assert stage.letters.deliveries() == (Delivery("k"),)


def test_close_drops_records_in_flight() -> None:
    stage = Stage()
    stage.letters.send("k", "v")
    stage.letters.close()
    stage.letters.close()
    assert stage.client.is_purged


def test_refused_setting_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"ssl\.nonsense"):
        DeadLetterProducer({**CONFIG, "ssl.nonsense": "x"}, "dead")


@pytest.mark.broker
def test_confirmed_record_is_in_the_topic(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    letters = DeadLetterProducer(
        {"bootstrap.servers": kafka_broker.bootstrap_servers, "group.id": "etl"}, topic
    )
    letters.send("orders-0-0-10", '{"start": 0}')
    assert wait_until(letters.deliveries, timeout_s=120, what="the record to be confirmed") == (
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

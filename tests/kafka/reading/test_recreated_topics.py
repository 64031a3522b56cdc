"""A topic that is deleted and made again under a consumer is told, and read from its new log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading import partition_watch
from dagster_rebalance.kafka.reading.partition_watch import RecreatedTopics
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import ManualClock
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.testing.broker import KafkaCluster

P0, P1, OTHER = (
    TopicPartition("orders", 0),
    TopicPartition("orders", 1),
    TopicPartition("users", 0),
)
PATIENCE_S = 60.0


class Ids:
    """The ids of topics, as a cluster answers them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.known = {"orders": "a", "users": "u"}
        self.is_silent = False
        self.asked = 0
        self.remade = RecreatedTopics(self.ask, self.clock)

    def ask(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Ask; the answer is that of the time when it is taken."""
        self.asked += 1
        return lambda: (
            None if self.is_silent else {t: i for t, i in self.known.items() if t in topics}
        )

    def look(self, *partitions: TopicPartition) -> dict[TopicPartition, bool]:
        """Ask, and take the answer."""
        self.clock.advance(10)
        self.remade.check(partitions)
        found = self.remade.check(partitions)
        assert found == self.remade.check(partitions) or not found, "an interrupted look is lost"
        if found:
            self.remade.acknowledge()
        return found


def test_an_id_that_changes_is_told_once_with_the_partitions_at_old_positions() -> None:
    """One that has begun since then is at a position in the new log. Other topics are not named."""
    ids = Ids()
    ids.remade.add_started([P0, P1, OTHER])
    assert ids.look(P0, P1, OTHER) == {}
    assert ids.look(P0, P1, OTHER) == {}
    ids.remade.add_started([P1])
    ids.known["orders"] = "b"
    assert ids.look(P0, P1, OTHER) == {P0: True, P1: False}
    assert ids.look(P0, P1, OTHER) == {}


def test_a_topic_that_is_away_in_between_is_made_again() -> None:
    """Its first id is remembered."""
    ids = Ids()
    ids.look(P0)
    ids.look(P0)
    del ids.known["orders"]
    assert ids.look(P0) == {}
    ids.known["orders"] = "b"
    assert ids.look(P0) == {P0: True}


def test_a_topic_that_is_read_no_more_hides_no_other_one() -> None:
    """Its new id is taken in, and asking goes on."""
    ids = Ids()
    ids.look(P0, OTHER)
    ids.look(P0, OTHER)
    ids.clock.advance(10)
    ids.remade.check([P0, OTHER])
    ids.known["orders"] = "b"
    assert ids.remade.check([OTHER]) == {}
    ids.known["users"] = "v"
    assert ids.look(OTHER) == {OTHER: True}


def test_a_topic_that_was_made_again_while_it_was_not_read_is_at_no_old_position() -> None:
    """Its partition begins again, and the first answer after that may lack the topic."""
    ids = Ids()
    ids.remade.add_started([P0])
    ids.look(P0, OTHER)
    ids.look(OTHER)
    ids.remade.add_started([P0])
    del ids.known["orders"]
    ids.look(P0, OTHER)
    ids.known["orders"] = "b"
    assert ids.look(P0, OTHER) == {}


def test_no_answer_is_waited_for_and_no_question_is_asked_beside_another() -> None:
    """A poll must not wait, and a broker that is away gets no crowd of them."""
    ids = Ids()
    ids.is_silent = True
    for _ in range(3):
        assert ids.look(P0) == {}
    assert ids.asked == 1
    assert ids.look() == {}


def test_a_refused_question_is_asked_again_later() -> None:
    """The ids are for a rare case: reading goes on."""
    clock, asked = ManualClock(), []

    def refuse(topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        asked.append(topics)
        message = "not now"
        raise BrokerError(message)

    remade = RecreatedTopics(refuse, clock)
    for _ in range(3):
        assert remade.check([P0]) == {}
    assert len(asked) == 1
    clock.advance(10)
    assert remade.check([P0]) == {}
    assert len(asked) == 2


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
@pytest.mark.parametrize("reset", ["earliest", "error"])
def test_no_record_of_a_topic_that_was_made_again_is_left_out_or_doubled_in_silence(
    kafka_broker: KafkaCluster, monkeypatch: pytest.MonkeyPatch, protocol: str, reset: str
) -> None:
    """The client goes on at offset 20 of the new log (classic), or begins it twice."""
    monkeypatch.setattr(partition_watch, "_TOPIC_IDS_EVERY_S", 0.5)
    topic = unique_name("orders")
    kafka_broker.create_topic(topic, 1)
    produce(kafka_broker, topic, "old", 20)
    consumer = RebalanceAwareConsumer(
        {
            **kafka_broker.client_config(),
            "group.id": unique_name("etl"),
            "group.protocol": protocol,
            "auto.offset.reset": reset,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    values: list[str] = []
    errors: list[str] = []

    def poll() -> None:
        try:
            values.extend((record.value() or b"").decode() for record in consumer.poll(0.1))
        except BrokerError as error:
            errors.append(str(error))

    def until(condition: Callable[[], object], what: str) -> None:
        def step() -> bool:
            poll()
            return bool(condition())

        wait_until(step, timeout_s=PATIENCE_S, what=what, interval_s=0)

    try:
        until(consumer.assignment, "the assignment")
        consumer.seek_to_beginning([TopicPartition(topic, 0)])
        until(lambda: len(values) == 20, "the old records")
        until(
            lambda: consumer._state.fetcher is not None and consumer._state.fetcher._recreated._ids,
            "the id",
        )
        kafka_broker.delete_topic(topic)
        kafka_broker.create_topic(topic, 1)
        produce(kafka_broker, topic, "new", 50)
        new = {f"new-{number}" for number in range(50)}
        errors.clear()
        # In the consumer protocol Kafka may assign the new partition before the ids are compared:
        # it begins anew, with an error only if there is no start to choose.
        if protocol == "classic":
            until(lambda: any("deleted and created again" in text for text in errors), "the error")
        if reset == "error":
            until(lambda: errors, "an error")
            until(consumer.assignment, "the assignment")
            consumer.seek_to_beginning([TopicPartition(topic, 0)])
        until(lambda: set(values) >= new, "the new records")
        assert errors or len([value for value in values if value in new]) == len(new)
    finally:
        consumer.close()


def produce(kafka: KafkaCluster, topic: str, name: str, count: int) -> None:
    """Append records."""
    producer = Producer(kafka.client_config())
    for number in range(count):
        producer.produce(topic, f"{name}-{number}", partition=0)
    assert producer.flush(30) == 0

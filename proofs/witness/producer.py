"""A producer of numbered records at a constant rate, which notes each confirmed record."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import KafkaError, Message
    from typing_extensions import Self

_ROUND_S = 0.1
_FLUSH_LIMIT_S = 30.0


class NumberedProducer:
    """Produces from entry until `stop`, to all partitions in turn.

    Args:
        bootstrap_servers: The Kafka.
        topic: The topic.
        partitions: Its number of partitions.
        per_second: Records per second in all partitions.
    """

    def __init__(
        self, bootstrap_servers: str, topic: str, *, partitions: int, per_second: int
    ) -> None:
        self._topic = topic
        self._per_round = per_second * _ROUND_S
        # Idempotent: a retry of the producer itself must not look like a record that was processed
        # twice.
        settings = {
            "bootstrap.servers": bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 50,
            "log_level": 0,
        }
        self._producer = Producer(settings)
        self._confirmed: dict[int, tuple[int, int | None]] = {}
        self._failure: str | None = None
        self._ends = [0] * partitions
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, name="producer", daemon=True)

    @property
    def confirmed(self) -> dict[int, tuple[int, int | None]]:
        """Return the partition and offset of each confirmed number.

        The offset is None if the first answer was lost with its broker, and Kafka only confirmed a
        duplicate.
        """
        return dict(self._confirmed)

    @property
    def ends(self) -> list[int]:
        """Return the confirmed records by partition: the ends of the initially empty topic."""
        return list(self._ends)

    def take_in(self, partitions: int) -> None:
        """Produce to more partitions of the extended topic.

        Raises:
            DagsterRebalanceError: The client's metadata does not show them in time.
        """
        wait_until(
            lambda: self._knows(partitions),
            timeout_s=_FLUSH_LIMIT_S,
            what=f"the metadata of {partitions} partitions",
        )
        self._ends += [0] * (partitions - len(self._ends))

    def _knows(self, partitions: int) -> bool:
        return (
            len(
                self._producer.list_topics(self._topic, _FLUSH_LIMIT_S)
                .topics[self._topic]
                .partitions
            )
            >= partitions
        )

    def check(self) -> None:
        """Check that the producer works.

        Raises:
            BrokerError: It has ended, or Kafka did not confirm a record.
        """
        if self._failure:
            msg = f"Kafka did not confirm every produced record: {self._failure}"
            raise BrokerError(msg)

    def stop(self) -> None:
        """Stop, and wait until Kafka has confirmed all records.

        Raises:
            BrokerError: Kafka did not confirm a record.
        """
        self._stopped.set()
        self._thread.join()
        left = self._producer.flush(_FLUSH_LIMIT_S)
        if left and not self._failure:
            self._failure = f"{left} unanswered after {_FLUSH_LIMIT_S:g} s"
        self.check()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _main(self) -> None:
        try:
            self._produce()
        except KafkaException as error:
            self._failure = error.args[0].str()

    def _produce(self) -> None:
        numbers = itertools.count()
        due, next_at = 0.0, time.monotonic()
        while not self._stopped.is_set():
            due += self._per_round
            for number in itertools.islice(numbers, int(due)):
                self._send(number)
            due %= 1
            next_at += _ROUND_S
            self._producer.poll(0)
            self._stopped.wait(next_at - time.monotonic())

    def _send(self, number: int) -> None:
        def note(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failure = f"record {number}: {error.str()}"
                return
            partition, offset = int(message.partition() or 0), int(message.offset() or 0)
            # A batch that Kafka has already is answered with the offset -1, from which librdkafka
            # counts on: its second record would be at 0. Records come in order, and each once.
            is_known = offset >= self._ends[partition]
            self._confirmed[number] = (partition, offset if is_known else None)
            self._ends[partition] += 1

        value = json.dumps({"number": number, "cents": 100 + number * 37 % 9900})
        self._producer.produce(
            self._topic, value.encode(), partition=number % len(self._ends), on_delivery=note
        )


def produced_at(
    client_config: Mapping[str, str], topic: str, ends: Mapping[int, int], *, limit_s: float
) -> dict[int, dict[int, float]]:
    """Return the timestamp of each record by partition and offset, in seconds since 1970.

    Raises:
        BrokerError: The topic could not be read to these ends.
    """
    settings = {"group.id": "reader", "enable.auto.commit": False}
    consumer = Consumer({**client_config, **settings})
    found: dict[int, dict[int, float]] = {number: {} for number in ends}
    left = sum(ends.values())
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in ends])
        while left:
            messages = consumer.consume(min(left, 10_000), limit_s)
            problem = next((error.str() for one in messages if (error := one.error())), "")
            if problem or not messages:
                msg = f"{topic} could not be read to its end: {problem or 'nothing came'}"
                raise BrokerError(msg)
            for message in messages:
                at = message.timestamp()[1] / 1000
                found[message.partition() or 0][message.offset() or 0] = at
            left = sum(ends.values()) - sum(map(len, found.values()))
    finally:
        consumer.close()
    return found

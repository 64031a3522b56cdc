"""Producer for dead letters of ranges and of records.

A record counts as stored when all in-sync replicas have confirmed it. `send` never waits: the
client sends in the background. At most one record with the same key is in flight.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.defaults import ClientKind
from dagster_rebalance.kafka.client.errors import (
    CREDENTIALS,
    UNKNOWN_TOPIC,
    Operation,
    error_text,
    is_final,
    kafka_error,
)
from dagster_rebalance.kafka.client.settings import validated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.core.model.letters import LetterRecord

_DELIVERY_SLICE_S = 0.1


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of the delivery of a record.

    `problem` is the reason why the record could not be stored, with advice; it is empty if the
    record is stored.
    """

    key: str
    problem: str = ""


class _ProducerClient(Protocol):
    """The methods of confluent-kafka's `Producer` that are called."""

    def produce(
        self,
        topic: str,
        *,
        key: str,
        value: str | bytes | None,
        headers: list[Any] | None,
        on_delivery: Callable[[KafkaError | None, Any], None],
    ) -> None: ...

    def poll(self, timeout: float, /) -> int: ...

    def purge(self) -> None: ...

    def flush(self, timeout: float, /) -> int: ...

    def set_sasl_credentials(self, username: str, password: str, /) -> None: ...


class DeadLetterProducer:
    """Sends records to one topic. Not thread-safe.

    Args:
        config: The settings of the group member, of which only connection settings are used.
        topic: The dead-letter topic.
        make_producer: Creates the client from its settings.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: str,
        *,
        make_producer: Callable[[dict[str, Any]], _ProducerClient] = Producer,
    ) -> None:
        self._settings = validated(config, hold_limit_s=1.0)
        self.topic = topic
        self._operation = Operation("storing the record", self._settings.brokers)
        self._make_producer = make_producer
        self._connection_error: KafkaError | None = None
        self._in_flight: set[str] = set()
        self._ended: list[Delivery] = []
        self._producer: _ProducerClient | None = self._new_client()

    def send(
        self,
        key: str,
        value: str | bytes | None,
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        """Start sending a record, unless a record with its key is in flight."""
        if key in self._in_flight:
            return
        self._producer = self._producer or self._new_client()
        self._login.renew()
        self._in_flight.add(key)
        try:
            self._producer.produce(
                self.topic,
                key=key,
                value=value,
                headers=headers,
                on_delivery=lambda error, _record: self._end(key, error),
            )
        except KafkaException as error:
            self._end(key, kafka_error(error))
        except BufferError as error:
            self._end(key, KafkaError(KafkaError._QUEUE_FULL, str(error)))  # noqa: SLF001 - the prefix of librdkafka's own codes

    def deliveries(self, wait_s: float = 0.0) -> tuple[Delivery, ...]:
        """Return the deliveries that ended since the last call; wait at most `wait_s` for one."""
        if self._producer is not None:
            try:
                self._producer.poll(0 if self._ended else wait_s)
            except KafkaException as error:
                self._end_all(kafka_error(error))
        ended, self._ended = tuple(self._ended), []
        return ended

    def store(self, letters: Iterable[LetterRecord]) -> None:
        """Store letters, and wait until the delivery of each has ended.

        Each delivery ends within the timeout of the client.

        Raises:
            BrokerError: A letter was not stored.
        """
        while self._in_flight:  # of a call that was interrupted
            self.deliveries(_DELIVERY_SLICE_S)
        in_flight = set()
        for letter in letters:
            self.send(*letter)
            in_flight.add(letter.key)
        failed = []
        while in_flight:
            ended = self.deliveries(_DELIVERY_SLICE_S)
            in_flight.difference_update(delivery.key for delivery in ended)
            failed += [delivery for delivery in ended if delivery.problem]
        for delivery in failed[:1]:
            msg = (
                f"the dead letter {delivery.key} could not be stored in topic {self.topic}: "
                f"{delivery.problem}. Nothing was committed"
            )
            raise BrokerError(msg)

    def close(self) -> None:
        """Drop the records in flight; the next owner of their ranges sends them again."""
        if self._producer is not None:
            self._producer.purge()
            # A fatal error is raised here too, and then no record is in flight.
            with suppress(KafkaException):
                self._producer.flush(0)
            self._producer = None

    def _end(self, key: str, error: KafkaError | None) -> None:
        if key not in self._in_flight:
            return  # from a dropped client
        ended = {key}
        if error is not None and is_final(error):
            self._producer = None  # this client never sends again; `send` creates another one
            ended |= self._in_flight
        self._in_flight -= ended
        problem = "" if error is None else self._problem(error)
        self._ended += [Delivery(one, problem) for one in sorted(ended)]

    def _end_all(self, error: KafkaError) -> None:
        """End all records in flight and drop the client after a fatal error.

        The client raises a fatal error instead of calling back, and may not call back later.
        """
        for key in sorted(self._in_flight):
            self._end(key, error)
        self._producer = None

    def _problem(self, error: KafkaError) -> str:
        # A principal without WRITE on any topic is refused the id of an idempotent producer, with
        # an error that names the cluster.
        if error.code() in {
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        }:
            return (
                f"{error_text(error)} ({error.name()}); grant the principal the ACLs WRITE and "
                "DESCRIBE on the topic"
            )
        if error.code() in UNKNOWN_TOPIC:
            return (
                f"{error_text(error)} ({error.name()}); create the dead-letter topic "
                f"'{self.topic}', or set another one"
            )
        timed_out = error.code() == KafkaError._MSG_TIMED_OUT  # noqa: SLF001
        connection_error, self._connection_error = self._connection_error, None
        return self._operation.explain(
            connection_error if timed_out and connection_error is not None else error
        )

    def _note_connection_error(self, error: KafkaError) -> None:
        """Keep the cause of timeouts; refused credentials override a lost connection."""
        if self._connection_error is None or self._connection_error.code() not in CREDENTIALS:
            self._connection_error = error

    def _new_client(self) -> _ProducerClient:
        config = {
            **self._settings.connection(ClientKind.DEAD_LETTERS),
            "error_cb": self._note_connection_error,
        }
        client = create_client(self._make_producer, config)
        self._login = Login(self._settings.credentials, client)
        return client

"""The producer stores one dead letter for each range whose attempts are exhausted.

All replicas in sync confirm the record.

Owns when a record counts as stored. Must never make its caller wait: the producer sends a record in
the background, and the caller asks for its end later. Of the records with one key, only one is
under way at a time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.defaults import ClientKind
from dagster_rebalance.kafka.client.errors import (
    CREDENTIALS,
    UNKNOWN_TOPIC,
    Attempt,
    is_final,
    kafka_error,
    said,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.settings import validated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Delivery:
    """A record has ended: it is stored, or it has a problem.

    `problem` says why the record could not be stored and what to do. It is empty when the record is
    stored.
    """

    key: str
    problem: str = ""


class Client(Protocol):
    """What is needed of confluent-kafka's `Producer`."""

    def produce(
        self,
        topic: str,
        *,
        key: str,
        value: str | bytes | None,
        headers: list[Any] | None,
        on_delivery: Callable[[KafkaError | None, Any], None],
    ) -> None:
        """Begin to send a record."""

    def poll(self, timeout: float, /) -> int:
        """Tell what has ended."""

    def purge(self) -> None:
        """Forget what is under way."""

    def flush(self, timeout: float, /) -> int:
        """Wait for what is under way."""

    def set_sasl_credentials(self, username: str, password: str, /) -> None:
        """Log in with these from the next connection on."""


class DeadLetterProducer:
    """Sends records to one topic. Not safe for several threads.

    Args:
        config: The settings of the group member; those about the connection are used.
        topic: The dead-letter topic.
        make_producer: Makes the client from its settings.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: str,
        *,
        make_producer: Callable[[dict[str, Any]], Client] = Producer,
    ) -> None:
        self._settings = validated(config, hold_limit_s=1.0)
        self.topic = topic
        self._attempt = Attempt("storing the record", self._settings.brokers)
        self._make_producer = make_producer
        self._trouble: KafkaError | None = None
        self._under_way: set[str] = set()
        self._ended: list[Delivery] = []
        self._producer: Client | None = self._made()

    def send(
        self,
        key: str,
        value: str | bytes | None,
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        """Begin to send a record, unless one with its key is under way."""
        if key in self._under_way:
            return
        self._producer = self._producer or self._made()
        self._login.renew()
        self._under_way.add(key)
        try:
            self._producer.produce(
                self.topic,
                key=key,
                value=value,
                headers=headers,
                on_delivery=lambda error, _record: self._end(key, error),
            )
        except KafkaException as problem:
            self._end(key, kafka_error(problem))
        except BufferError as problem:
            self._end(key, KafkaError(KafkaError._QUEUE_FULL, str(problem)))  # noqa: SLF001 - librdkafka's own codes begin so

    def deliveries(self, wait_s: float = 0.0) -> tuple[Delivery, ...]:
        """The records that ended since the last call. By default it does not wait for one."""
        if self._producer is not None:
            try:
                self._producer.poll(0 if self._ended else wait_s)
            except KafkaException as problem:
                self._break(kafka_error(problem))
        ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> None:
        """Drop the records that are under way.

        Nothing counts on them, and the next owner of the range sends them again.
        """
        if self._producer is not None:
            self._producer.purge()
            # A fatal error is raised here too, and nothing is under way any more.
            with suppress(KafkaException):
                self._producer.flush(0)
            self._producer = None

    def _end(self, key: str, error: KafkaError | None) -> None:
        if key not in self._under_way:
            return  # of a client that was dropped
        self._under_way.remove(key)
        self._ended.append(Delivery(key, "" if error is None else self._problem(error)))
        if error is not None and is_final(error):
            self._producer = (
                None  # this client will never send again; the next record makes another one
            )

    def _break(self, error: KafkaError) -> None:
        """End all records under way, and drop the producer, after a fatal error.

        The client raises a fatal error in place of calling back, and may leave its records without
        an end.
        """
        for key in sorted(self._under_way):
            self._end(key, error)
        self._producer = None

    def _problem(self, error: KafkaError) -> str:
        # Who may write no topic at all is refused already the id of an idempotent producer, as if
        # that took a right on the cluster.
        if error.code() in {
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        }:
            return (
                f"{said(error)} ({error.name()}); grant the principal the ACLs WRITE and DESCRIBE "
                "on the topic"
            )
        if error.code() in UNKNOWN_TOPIC:
            return (
                f"{said(error)} ({error.name()}); create the dead-letter topic "
                f"'{self.topic}', or set another one"
            )
        timed_out = error.code() == KafkaError._MSG_TIMED_OUT  # noqa: SLF001
        cause = self._trouble if timed_out and self._trouble is not None else error
        self._trouble = None
        return self._attempt.explain(cause)

    def _note_trouble(self, error: KafkaError) -> None:
        """Keep the reason why a record will time out.

        Refused credentials explain more than a lost connection.
        """
        if self._trouble is None or self._trouble.code() not in CREDENTIALS:
            self._trouble = error

    def _made(self) -> Client:
        config = {
            **self._settings.connection(ClientKind.DEAD_LETTERS),
            "error_cb": self._note_trouble,
        }
        producer = made(self._make_producer, config)
        self._login = Login(self._settings.credentials, producer)
        return producer

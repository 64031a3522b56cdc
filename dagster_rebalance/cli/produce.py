"""`dagster-rebalance produce`: records in a topic, to try things with.

Owns what these records are, and that none is counted before Kafka has it.
"""

from __future__ import annotations

import json
import random
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer
from confluent_kafka import KafkaError, KafkaException, Producer

from dagster_rebalance.cli.target import CommandConfig, client_config, told_of_logins
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.kafka.client.defaults import DELIVERY_LIMIT_S, ClientKind
from dagster_rebalance.kafka.client.errors import (
    Attempt,
    broker_error,
    kafka_error,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from dagster_rebalance.kafka.client.settings import Settings

    _OnDelivery = Callable[[KafkaError | None, Message[bytes, bytes]], None]

_NO_GROUP = "dagster-rebalance produce"


def produce(
    topic: Annotated[str, typer.Argument(help="A topic that exists.", show_default=False)],
    records: Annotated[int, typer.Argument(min=1, help="How many.")] = 1000,
    *,
    keys: Annotated[int, typer.Option(min=1, help="How many different keys they have.")] = 100,
    bootstrap_server: Annotated[
        str, typer.Option(help="Brokers as host:port.", show_default=False)
    ] = "",
    command_config: CommandConfig = None,
) -> None:
    """Fill a topic with orders as JSON, keyed by customer, to try things with.

    \b
    dagster-rebalance produce orders 1000 --bootstrap-server 127.0.0.1:9092
    """  # noqa: D301 - click keeps the lines behind \b as they are
    config = client_config(command_config)
    servers = bootstrap_server or config.get("bootstrap.servers", "")
    if not servers:
        msg = "say where Kafka is: --bootstrap-server, as the command broker tells it"
        raise ConfigurationError(msg)
    config.pop("bootstrap.servers", None)
    kafka = KafkaConsumerResource(
        bootstrap_servers=servers,
        group_id=_NO_GROUP,
        topics=[topic],
        group_protocol="classic",
        client_config=config,
    )
    settings = validated(kafka.consumer_config(), hold_limit_s=kafka.hold_limit_s)
    with told_of_logins(command_config):
        partitions = _fill(settings, topic, records, keys)
    typer.echo(f"{records} records in topic {topic}, {partitions} partitions, {keys} keys")


def _fill(settings: Settings, topic: str, records: int, keys: int) -> int:
    """Store records; the answer is how many partitions the topic has.

    Raises:
        BrokerError: They were not all stored.
        ConfigurationError: The client refuses a setting.
    """
    partitions = len(Cluster(settings).partitions_for(topic))
    attempt = Attempt(f"storing records in topic '{topic}'", settings.brokers)
    failures: list[KafkaError] = []

    def note(error: KafkaError | None, _record: Message[bytes, bytes]) -> None:
        if error is not None:
            failures.append(error)

    producer = made(
        Producer,
        settings.connection(ClientKind.RECORDS),
    )
    try:
        for number in range(records):
            key, value = record(number, keys)
            while not _try_produce(producer, topic, key, value, note):
                producer.poll(1.0)
            producer.poll(0)
        left = producer.flush(DELIVERY_LIMIT_S)
    except KafkaException as problem:
        raise broker_error(kafka_error(problem), attempt) from problem
    if failures:
        raise _refused(failures[0], attempt)
    if left:
        msg = f"{left} of {records} records were not stored within {DELIVERY_LIMIT_S:.0f} s"
        raise BrokerError(msg, retriable=True)
    return partitions


def _refused(error: KafkaError, attempt: Attempt) -> BrokerError:
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        msg = (
            f"{attempt.doing} failed: {error.str()} ({error.name()}); grant the principal the ACL "
            "WRITE on the topic"
        )
        return BrokerError(msg)
    return broker_error(error, attempt)


def _try_produce(
    producer: Producer, topic: str, key: str, value: str, on_delivery: _OnDelivery
) -> bool:
    """Give a record to the client; False if its queue is full."""
    try:
        producer.produce(topic, key=key, value=value, on_delivery=on_delivery)
    except BufferError:
        return False
    return True


def record(number: int, keys: int) -> tuple[str, str]:
    """The key and the value of a record."""
    customer = f"customer-{random.randrange(keys)}"  # noqa: S311 - nothing secret
    order = {
        "order_id": number,
        "customer": customer,
        "amount": round(random.uniform(1, 500), 2),  # noqa: S311 - likewise
        "at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
    }
    return customer, json.dumps(order)

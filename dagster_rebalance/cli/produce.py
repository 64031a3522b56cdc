"""`dagster-rebalance produce`: fill a topic with sample records, for experiments."""

from __future__ import annotations

import json
import random
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import typer
from confluent_kafka import KafkaError, KafkaException, Producer

from dagster_rebalance.cli.target import login_hint, read_client_config
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.defaults import DELIVERY_LIMIT_S, ClientKind
from dagster_rebalance.kafka.client.errors import (
    Operation,
    broker_error,
    kafka_error,
)
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from confluent_kafka import Message

    from dagster_rebalance.kafka.client.settings import Settings

    _OnDelivery = Callable[[KafkaError | None, Message[bytes, bytes]], None]

_NO_GROUP = "dagster-rebalance produce"


def produce(
    topic: str, records: int, *, keys: int, bootstrap_server: str, command_config: Path | None
) -> None:
    """Produce orders as JSON."""
    config = read_client_config(command_config)
    servers = bootstrap_server or config.get("bootstrap.servers", "")
    if not servers:
        msg = "pass --bootstrap-server; `dagster-rebalance broker` prints its address"
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
    with login_hint(command_config):
        partitions = _fill(settings, topic, records, keys)
    typer.echo(f"{records} records in topic {topic}, {partitions} partitions, {keys} keys")


def _fill(settings: Settings, topic: str, records: int, keys: int) -> int:
    """Produce the records, wait for their delivery, and return the topic's number of partitions."""
    partitions = len(Cluster(settings).partitions_for(topic))
    operation = Operation(f"storing records in topic '{topic}'", settings.brokers)
    failures: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, _record: Message[bytes, bytes]) -> None:
        if error is not None:
            failures.append(error)

    producer = create_client(Producer, settings.connection(ClientKind.RECORDS))
    try:
        for number in range(records):
            key, value = record(number, keys)
            while not _try_produce(producer, topic, key, value, on_delivery):
                producer.poll(1.0)
            producer.poll(0)
        undelivered = producer.flush(DELIVERY_LIMIT_S)
    except KafkaException as problem:
        raise broker_error(kafka_error(problem), operation) from problem
    if failures:
        raise _delivery_error(failures[0], operation)
    if undelivered:
        msg = f"{undelivered} of {records} records were not stored within {DELIVERY_LIMIT_S:.0f} s"
        raise BrokerError(msg, retriable=True)
    return partitions


def _delivery_error(error: KafkaError, operation: Operation) -> BrokerError:
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        msg = (
            f"{operation.name} failed: {error.str()} ({error.name()}); grant the principal the ACL "
            "WRITE on the topic"
        )
        return BrokerError(msg)
    return broker_error(error, operation)


def _try_produce(
    producer: Producer, topic: str, key: str, value: str, on_delivery: _OnDelivery
) -> bool:
    """Queue a record; return False if the client's queue is full."""
    try:
        producer.produce(topic, key=key, value=value, on_delivery=on_delivery)
    except BufferError:
        return False
    return True


def record(number: int, keys: int) -> tuple[str, str]:
    """Return the key and the value of one order."""
    customer = f"customer-{random.randrange(keys)}"  # noqa: S311 - nothing secret
    order = {
        "order_id": number,
        "customer": customer,
        "amount": round(random.uniform(1, 500), 2),  # noqa: S311 - nothing secret
        "at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
    }
    return customer, json.dumps(order)

"""Pytest fixtures with a real Kafka, a real Spark and a real Postgres.

A project that wants them says so in its top `conftest.py`:

```python
pytest_plugins = ["dagster_rebalance.testing.fixtures"]
```

and its tests take what they need; each part starts with the first test that asks, and is gone when
pytest is, however pytest ends:

```python
def test_orders_arrive(kafka_broker, kafka_topic):
    orders = kafka_topic(partitions=4)
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})
```

`kafka_broker` (session): a `KafkaCluster` of one node, or the Kafka that KAFKA_BROKERS names, which
is neither started nor ended: tests write to it, so unset the variable where it names the brokers of
an application. `kafka_topic`: makes topics whose names no other test has.
`secured_kafka` (session): a `SecuredKafka` of one node, with TLS, passwords and ACLs.
`spark_connect_server` (session): a `SparkConnectServer`. `postgres` (session): a `Postgres`, for
Dagster's storage. All but Postgres need Java 17 to 23. The first use ever fetches the jars, about
60 MB, into the user's cache folder (DAGSTER_REBALANCE_CACHE moves it). The Spark Connect server
needs the extra `spark`, too.
DAGSTER_REBALANCE_KAFKA_VERSION=3.9.1 plays the tests on another Kafka than 4.1.1.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Protocol

import pytest

from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.existing_kafka import BROKERS_VARIABLE, ExistingKafka
from dagster_rebalance.testing.local.jars import tell_on_stderr
from dagster_rebalance.testing.postgres import Postgres
from dagster_rebalance.testing.secured import SecuredKafka
from dagster_rebalance.testing.spark_connect import SparkConnectServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class TopicFactory(Protocol):
    """Makes a topic with a unique name, and returns the name."""

    def __call__(
        self, partitions: int = 1, *, prefix: str = "topic", config: Mapping[str, str] | None = None
    ) -> str:
        """Make one."""


def unique_name(prefix: str) -> str:
    """A name for a topic or a group that no other test has."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def _teller(config: pytest.Config) -> Callable[[str], None]:
    """Tells past pytest's capture: a first fetch takes a minute, and must not look like a hang."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def tell(sentence: str) -> None:
        if capture is None:
            tell_on_stderr(sentence)
            return
        with capture.global_and_fixture_disabled():
            tell_on_stderr(sentence)

    return tell


@pytest.fixture(scope="session")
def kafka_broker(pytestconfig: pytest.Config) -> Iterator[KafkaCluster]:
    """A real Kafka for the whole session: that of KAFKA_BROKERS, or one with one node."""
    brokers = os.environ.get(BROKERS_VARIABLE)
    with (
        ExistingKafka(brokers=brokers)
        if brokers
        else KafkaCluster(tell=_teller(pytestconfig)) as kafka
    ):
        yield kafka


@pytest.fixture
def kafka_topic(kafka_broker: KafkaCluster) -> Iterator[TopicFactory]:
    """Makes a topic in `kafka_broker` with a unique name, and returns the name.

    Of a Kafka that goes on after the tests, its topics are deleted when the test has ended.
    """
    created: list[str] = []

    def create(
        partitions: int = 1, *, prefix: str = "topic", config: Mapping[str, str] | None = None
    ) -> str:
        name = unique_name(prefix)
        kafka_broker.create_topic(name, partitions, config)
        created.append(name)
        return name

    yield create
    if isinstance(kafka_broker, ExistingKafka):
        for name in created:
            kafka_broker.delete_topic(name)


@pytest.fixture(scope="session")
def secured_kafka(pytestconfig: pytest.Config) -> Iterator[SecuredKafka]:
    """A real Kafka with one node that asks for TLS, a password and ACLs, for the whole session."""
    with SecuredKafka(tell=_teller(pytestconfig)) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def spark_connect_server(pytestconfig: pytest.Config) -> Iterator[SparkConnectServer]:
    """A Spark Connect server with the Kafka connector, for the whole session."""
    with SparkConnectServer(tell=_teller(pytestconfig)) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real Postgres, for the whole session."""
    with Postgres() as server:
        yield server

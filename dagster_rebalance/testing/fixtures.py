"""Pytest fixtures with a real Kafka, Spark and Postgres.

Enable them in the top `conftest.py`:

```python
pytest_plugins = ["dagster_rebalance.testing.fixtures"]
```

Each server starts with the first test that uses it, and ends with pytest:

```python
def test_orders_arrive(kafka_broker, kafka_topic):
    orders = kafka_topic(partitions=4)
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})
```

If KAFKA_BROKERS is set, `kafka_broker` is that Kafka instead of a new one. Tests write to it, so
unset the variable if it names the brokers of an application. All servers but Postgres need Java 17
to 23. The first use downloads the jars, about 60 MB, into the user's cache folder
(DAGSTER_REBALANCE_CACHE moves it). The Spark Connect server also needs the extra `spark`.
DAGSTER_REBALANCE_KAFKA_VERSION=3.9.1 runs the tests on another Kafka than 4.1.1.
"""

from __future__ import annotations

import os
import uuid
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import pytest

from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.existing_kafka import BROKERS_VARIABLE, ExistingKafka
from dagster_rebalance.testing.local.jars import print_on_stderr
from dagster_rebalance.testing.postgres import Postgres
from dagster_rebalance.testing.secured import SecuredKafka
from dagster_rebalance.testing.spark_connect import SparkConnectServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class TopicFactory(Protocol):
    """Creates a topic with a unique name, and returns the name."""

    def __call__(
        self, partitions: int = 1, *, prefix: str = "topic", config: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic."""


def unique_name(prefix: str) -> str:
    """Return a unique name for a topic or a group."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def _progress_printer(config: pytest.Config) -> Callable[[str], None]:
    """Print past pytest's capture: the first download of the jars takes a minute."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def print_progress(sentence: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            print_on_stderr(sentence)

    return print_progress


@pytest.fixture(scope="session")
def kafka_broker(pytestconfig: pytest.Config) -> Iterator[KafkaCluster]:
    """A `KafkaCluster` of one node, or the Kafka of KAFKA_BROKERS, for the whole session."""
    brokers = os.environ.get(BROKERS_VARIABLE)
    with (
        ExistingKafka(brokers=brokers)
        if brokers
        else KafkaCluster(tell=_progress_printer(pytestconfig)) as kafka
    ):
        yield kafka


@pytest.fixture
def kafka_topic(kafka_broker: KafkaCluster) -> Iterator[TopicFactory]:
    """Creates topics with unique names in `kafka_broker`, and returns the names.

    In a Kafka that keeps running, the topics are deleted after the test.
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
    """A `SecuredKafka` of one node, with TLS, passwords and ACLs, for the whole session."""
    with SecuredKafka(tell=_progress_printer(pytestconfig)) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def spark_connect_server(pytestconfig: pytest.Config) -> Iterator[SparkConnectServer]:
    """A `SparkConnectServer` with the Kafka connector, for the whole session."""
    with SparkConnectServer(tell=_progress_printer(pytestconfig)) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A `Postgres` for Dagster's storage, for the whole session."""
    with Postgres() as server:
        yield server

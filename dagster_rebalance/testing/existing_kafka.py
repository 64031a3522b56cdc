"""A Kafka that runs independently of the tests, for example in a container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.testing.broker import REQUEST_LIMIT_S, SIZES, KafkaCluster

if TYPE_CHECKING:
    from typing_extensions import Self

BROKERS_VARIABLE = "KAFKA_BROKERS"


@dataclass
class ExistingKafka(KafkaCluster):
    """A running Kafka without authentication. Its nodes cannot be killed or suspended.

    Example:
        ```python
        with ExistingKafka(brokers="127.0.0.1:9092") as kafka:
            kafka.create_topic("orders", partitions=8)
        ```

    Attributes:
        brokers: The addresses of brokers, as `host:port,host:port`.
    """

    brokers: str = ""

    @property
    def bootstrap_servers(self) -> str:
        """The value for a client's `bootstrap.servers`."""
        return self.brokers

    def start(self) -> Self:
        """Check that Kafka answers.

        Raises:
            BrokerError: Kafka does not answer.
        """
        self._admin = self._new_admin()
        try:
            nodes = len(self._admin.list_topics(timeout=REQUEST_LIMIT_S).brokers)
        except KafkaException as error:
            msg = (
                f"no Kafka answers at {self.brokers}: {error.args[0].str()}. Start it, or unset "
                f"{BROKERS_VARIABLE} to let the tests start one"
            )
            raise BrokerError(msg) from error
        self.nodes = max(size for size in SIZES if size <= max(nodes, 1))
        return self

    def topics(self) -> set[str]:
        """Return the names of all topics."""
        return set(self._admin.list_topics(timeout=REQUEST_LIMIT_S).topics)

    def stop(self) -> None:
        """Leave Kafka running."""

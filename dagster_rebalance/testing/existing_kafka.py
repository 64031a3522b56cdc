"""A Kafka that was there before the tests, in a container or of a team.

Owns no process: it neither starts nor ends a node. Of what is stored there it deletes only what a
test has made.
"""

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
    """A Kafka that runs already and asks nobody for a login. It has no nodes to kill or suspend.

    Example:
        ```python
        with ExistingKafka(brokers="127.0.0.1:9092") as kafka:
            kafka.create_topic("orders", partitions=8)
        ```

    Attributes:
        brokers: Where it is, as `host:port,host:port`.
    """

    brokers: str = ""

    @property
    def bootstrap_servers(self) -> str:
        """What a client's `bootstrap.servers` takes."""
        return self.brokers

    def start(self) -> Self:
        """Look whether it answers.

        Raises:
            BrokerError: It does not.
        """
        self._admin = self._new_admin()
        try:
            found = len(self._admin.list_topics(timeout=REQUEST_LIMIT_S).brokers)
        except KafkaException as error:
            msg = (
                f"no Kafka answers at {self.brokers}: {error.args[0].str()}. Start it, or unset "
                f"{BROKERS_VARIABLE} for one that the tests start themselves"
            )
            raise BrokerError(msg) from error
        self.nodes = max(size for size in SIZES if size <= max(found, 1))
        return self

    def topics(self) -> set[str]:
        """The names of all topics."""
        return set(self._admin.list_topics(timeout=REQUEST_LIMIT_S).topics)

    def stop(self) -> None:
        """Leave it as it is."""

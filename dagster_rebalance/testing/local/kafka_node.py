"""One Kafka process: a KRaft node that is broker and controller.

Its settings shorten rebalances for tests without a change of their semantics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

QUICK_REBALANCES: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "6000",
    "group.consumer.heartbeat.interval.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.min.session.timeout.ms": "2000",
    "group.consumer.session.timeout.ms": "10000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.io.threads": "2",
    "num.network.threads": "2",
    "log.retention.ms": "-1",  # tests produce records with old timestamps
    "offsets.topic.num.partitions": "6",
    "transaction.state.log.num.partitions": "3",
}

START_LIMIT_S = 240.0


def admin_of(servers: str, login: Mapping[str, str] = MappingProxyType({})) -> AdminClient:
    """Return an admin client that does not log errors of nodes that a test has ended."""
    return AdminClient({**login, "bootstrap.servers": servers, "log_level": 0})


@dataclass(frozen=True, slots=True)
class Access:
    """Access control of a node; by default plaintext without authentication.

    Attributes:
        protocol: Security protocol of the client listener.
        settings: Broker settings.
        format_options: Options for formatting the data folder.
        login: Client settings of a user with all rights.
    """

    protocol: str = "PLAINTEXT"
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    format_options: Sequence[str] = field(default=(), repr=False)
    login: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass
class KafkaNode:
    """One node. Its ports and data survive restarts of its process.

    Attributes:
        node_id: From 1.
        port: Port for clients.
        controller_port: Port for the other nodes' controllers.
        folder: Folder for data and log, created by `format`.
        java: Command that runs a class of Kafka.
        access: Access control.
    """

    node_id: int
    port: int
    controller_port: int
    folder: Path
    java: Sequence[str | Path]
    access: Access = field(default_factory=Access)
    _process: ChildProcess | None = field(init=False, default=None)

    @property
    def name(self) -> str:
        """The name for messages."""
        return f"Kafka node {self.node_id}"

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def voter(self) -> str:
        """The entry in `controller.quorum.voters`."""
        return f"{self.node_id}@127.0.0.1:{self.controller_port}"

    @property
    def log(self) -> Path:
        """The log file."""
        return self.folder / "node.log"

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.is_running

    @property
    def process(self) -> ChildProcess:
        """The node's process.

        Raises:
            BrokerError: The node was never started.
        """
        if self._process is None:
            msg = f"{self.name} was never started"
            raise BrokerError(msg)
        return self._process

    def format(
        self, cluster_id: str, nodes: Iterable[KafkaNode], settings: Mapping[str, str]
    ) -> ChildProcess:
        """Write the settings and start to format the data folder."""
        self.folder.mkdir()
        everything = {
            **QUICK_REBALANCES,
            **self._own_settings(list(nodes)),
            **self.access.settings,
            **settings,
        }
        self._settings_file.write_text(
            "".join(f"{key}={value}\n" for key, value in everything.items())
        )
        # With `=`, an id that begins with a dash is not read as an option.
        tool: list[str | Path] = [
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={cluster_id}",
            "-c",
            self._settings_file,
        ]
        return ChildProcess(
            f"the formatting of {self.name}",
            [*self.java, *tool, *self.access.format_options],
            log=self.log,
        )

    @property
    def _settings_file(self) -> Path:
        return self.folder / "server.properties"

    def _own_settings(self, nodes: Sequence[KafkaNode]) -> dict[str, str]:
        copies, majority = str(len(nodes)), str(len(nodes) // 2 + 1)
        protocol = self.access.protocol
        return {
            "process.roles": "broker,controller",
            "node.id": str(self.node_id),
            "controller.quorum.voters": ",".join(node.voter for node in nodes),
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{protocol}://{self.address},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"{protocol}://{self.address}",
            "listener.security.protocol.map": f"{protocol}:{protocol},CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.folder / "data"),
            "default.replication.factor": copies,
            "min.insync.replicas": majority,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": majority,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": majority,
        }

    def launch(self, *flags: str) -> None:
        """Start the process, with additional flags for Java."""
        self._process = ChildProcess(
            self.name, [*self.java, *flags, "kafka.Kafka", self._settings_file], log=self.log
        )

    def wait_until_up(self, nodes: int) -> None:
        """Wait until the node answers and has `nodes` nodes in its metadata, itself included.

        Raises:
            DagsterRebalanceError: The node ended, or the timeout expired; the message includes the
                end of its log.
        """
        # Only the first answer of a new client is certainly from this node.
        admin = admin_of(self.address, self.access.login)

        def answers() -> bool:
            try:
                brokers = admin.list_topics(timeout=2).brokers
            except KafkaException:
                return False
            return self.node_id in brokers and len(brokers) >= nodes

        self.process.wait_until_ready(answers, timeout_s=START_LIMIT_S)

    def stop(self) -> None:
        """Shut the node down; it hands its leaderships over first."""
        if self._process is not None:
            self._process.stop(timeout_s=60)

    def stop_at_once(self) -> None:
        """Kill the node."""
        if self._process is not None:
            self._process.stop_at_once()

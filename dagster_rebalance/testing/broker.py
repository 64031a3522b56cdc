"""A real Kafka for tests and demos: one or three KRaft nodes on free ports of 127.0.0.1.

The nodes and their data are removed when the process that started them ends.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic, OffsetSpec

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.local.host import free_port, is_free, private_folder
from dagster_rebalance.testing.local.jars import Coordinates, JarSet, fetch, print_on_stderr
from dagster_rebalance.testing.local.java import SHORT_LIVED, ClassArchive, find_java
from dagster_rebalance.testing.local.kafka_node import START_LIMIT_S, Access, KafkaNode, admin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from confluent_kafka.admin import AdminClient
    from typing_extensions import Self

KAFKA_VERSION = "4.1.1"

VERSION_VARIABLE = "DAGSTER_REBALANCE_KAFKA_VERSION"
"""The variable with the default version of Kafka, also for the fixtures."""

JAVA_FLAGS = (
    *SHORT_LIVED,
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.state.change.logger=warn",
)

SIZES = (1, 3)
REQUEST_LIMIT_S = 30.0
_LEADERS_PER_S = 15
_MOST_CREATED = 5_000
"""Kafka refuses a request that would create 10,000 partitions."""
"""Partitions for which a node on a busy machine elects a leader in a second, at least."""


def kafka_jars(version: str) -> JarSet:
    """Return the jars of a version of Kafka."""
    # Kafka's own dependencies write no log: slf4j-simple writes to the node's log file.
    artifacts = (
        Coordinates("org.apache.kafka", "kafka_2.13", version),
        Coordinates("org.slf4j", "slf4j-simple", "1.7.36"),
    )
    return JarSet(f"kafka-{version}", artifacts)


@dataclass
class KafkaCluster:
    """A Kafka cluster of one or three nodes, as a context manager. Its data is removed on exit.

    Example:
        ```python
        with KafkaCluster() as kafka:
            kafka.create_topic("orders", partitions=8)
            consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "g"})
        ```

    Attributes:
        nodes: Number of nodes; they are numbered from 1.
        port: The first node's port; a free one by default.
        settings: Broker settings; they override those of this kit, which shorten rebalances.
        version: Version of Kafka; by default DAGSTER_REBALANCE_KAFKA_VERSION, or 4.1.1. Before 4.0
            only the classic protocol is enabled.
        heap: Memory of each node, in the format of Java's -Xmx.
        tell: Receives progress messages while the jars are downloaded for the first time.
    """

    nodes: int = 1
    port: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    version: str = field(default_factory=lambda: os.environ.get(VERSION_VARIABLE) or KAFKA_VERSION)
    heap: str = "384m"
    tell: Callable[[str], None] = print_on_stderr
    _folder: Path | None = field(init=False, default=None)
    _nodes: dict[int, KafkaNode] = field(init=False, default_factory=dict)
    _access: Access = field(init=False, default_factory=Access)
    _archive: ClassArchive | None = field(init=False, default=None)
    _admin: AdminClient = field(init=False)

    def __post_init__(self) -> None:
        if self.nodes not in SIZES:
            msg = f"A local Kafka has 1 or 3 nodes, not {self.nodes}."
            raise ConfigurationError(msg)
        if not re.fullmatch(r"[34]\.\d+\.\d+", self.version):
            msg = (
                f"This kit cannot start version '{self.version}' of Kafka: give a version like "
                f"{KAFKA_VERSION} or 3.9.1."
            )
            raise ConfigurationError(msg)
        if self.port is not None and not is_free(self.port):
            msg = (
                f"Port {self.port} is in use on this machine. Choose another port, or none to get "
                "a free one."
            )
            raise ConfigurationError(msg)

    @property
    def bootstrap_servers(self) -> str:
        """The value for a client's `bootstrap.servers`."""
        return ",".join(node.address for node in self._nodes.values())

    def client_config(self) -> dict[str, str]:
        """Return the librdkafka settings of a client."""
        return {"bootstrap.servers": self.bootstrap_servers}

    @property
    def logs(self) -> list[Path]:
        """The nodes' log files."""
        return [node.log for node in self._nodes.values()]

    @property
    def pids(self) -> list[int]:
        """The pids of the running nodes."""
        return [node.process.pid for node in self._nodes.values() if node.is_running]

    def tail(self) -> str:
        """Return the end of each node's log."""
        return "\n".join(f"{node.name}:\n{node.process.tail()}" for node in self._nodes.values())

    def start(self) -> Self:
        """Download the jars if necessary, start the nodes, and wait until they form a cluster.

        Raises:
            DagsterRebalanceError: A node did not start; the message includes the end of its log.
        """
        jar_set, installed_java = kafka_jars(self.version), find_java()
        jars = fetch(jar_set, tell=self.tell)
        self._archive = archive = ClassArchive.of(jar_set.name, installed_java, jars, JAVA_FLAGS)
        java: list[str | Path] = [
            installed_java.path,
            f"-Xmx{self.heap}",
            *JAVA_FLAGS,
            *archive.using,
            "-cp",
            ":".join(map(str, jars)),
        ]
        self._folder = private_folder("kafka")
        try:
            self._access = self._make_access(self._folder)
            for number in range(1, self.nodes + 1):
                port = self.port if self.port is not None and number == 1 else free_port()
                self._nodes[number] = KafkaNode(
                    number, port, free_port(), self._folder / f"node-{number}", java, self._access
                )
            self._format()
            for node in self._nodes.values():
                node.launch(*(archive.making() if node.node_id == 1 else ()))
            for node in self._nodes.values():
                node.wait_until_up(self.nodes)
        except BaseException:
            self.stop()
            raise
        self._admin = self._new_admin()
        return self

    def _make_access(self, folder: Path) -> Access:  # noqa: ARG002 - for subclasses with files
        return Access()

    def _new_admin(self) -> AdminClient:
        return admin_of(self.bootstrap_servers, self._access.login)

    def _format(self) -> None:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        protocols = "classic" if self.version.startswith("3.") else "classic,consumer"
        settings = {"group.coordinator.rebalance.protocols": protocols, **self.settings}
        formats = [
            node.format(cluster_id, self._nodes.values(), settings) for node in self._nodes.values()
        ]
        for process in formats:
            with process:
                if process.wait(START_LIMIT_S) != 0:
                    msg = f"{process.name} failed; {process.log} ends with:\n{process.tail()}"
                    raise BrokerError(msg)

    def stop(self) -> None:
        """Kill all nodes and remove their data."""
        archive, writer = self._archive, self._nodes.get(1)
        if archive and archive.is_being_made and writer and writer.is_running:
            writer.stop()
            archive.keep()
        for node in self._nodes.values():
            node.stop_at_once()
        self._nodes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _node(self, number: int) -> KafkaNode:
        if number not in self._nodes:
            msg = (
                f"This Kafka has no node {number}; its nodes: "
                f"{', '.join(map(str, self._nodes)) or 'none, it is not started'}."
            )
            raise ConfigurationError(msg)
        return self._nodes[number]

    def kill(self, node: int = 1) -> None:
        """Kill a node, as a crash would. Its data stays."""
        self._node(node).process.kill()

    def shut_down(self, node: int = 1) -> None:
        """Shut a node down, as in a rolling restart: it hands its leaderships over first."""
        self._node(node).stop()

    def restart(self, node: int = 1) -> None:
        """Restart a node on the same port and with its data, and wait until it answers."""
        self._node(node).stop()
        self._node(node).launch()
        self._node(node).wait_until_up(len(self.pids))

    def suspend(self, node: int = 1) -> None:
        """Suspend a node: its connections stay open, but it does not answer."""
        self._node(node).process.suspend()

    def resume(self, node: int = 1) -> None:
        """Resume a suspended node."""
        self._node(node).process.resume()

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic with a replica on each node, and wait until all partitions have leaders.

        Raises:
            BrokerError: Kafka refused, for example because the topic exists.
        """
        topic = NewTopic(
            name,
            num_partitions=min(partitions, _MOST_CREATED),
            replication_factor=self.nodes,
            config=dict(config or {}),
        )
        settle(
            self._admin.create_topics([topic], operation_timeout=REQUEST_LIMIT_S)[name],
            f"create topic {name}",
        )
        for total in range(2 * _MOST_CREATED, partitions + _MOST_CREATED, _MOST_CREATED):
            self.add_partitions(name, min(total, partitions))
        self._wait_for_leaders(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        """Increase the partitions of a topic to `total`, and wait until all have leaders.

        Raises:
            BrokerError: Kafka refused, for example because the topic has that many already.
        """
        more = NewPartitions(name, new_total_count=total)
        settle(
            self._admin.create_partitions([more], operation_timeout=REQUEST_LIMIT_S)[name],
            f"add partitions to {name}",
        )
        self._wait_for_leaders(name, total)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records, and wait until it is gone.

        Raises:
            BrokerError: Kafka refused, for example because there is no such topic.
        """
        settle(
            self._admin.delete_topics([name], operation_timeout=REQUEST_LIMIT_S)[name],
            f"delete topic {name}",
        )
        wait_until(
            lambda: name not in self._new_admin().list_topics(timeout=REQUEST_LIMIT_S).topics,
            timeout_s=REQUEST_LIMIT_S,
            what=f"topic {name} to be gone",
        )

    def _wait_for_leaders(self, topic: str, partitions: int) -> None:
        # Right after the creation, list_offsets may fail with NOT_LEADER_FOR_PARTITION, return
        # offset -1001, or find no such partition (_NOENT) with a client's older metadata: each
        # attempt uses a new client.
        request = {
            TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(partitions)
        }

        def have_leaders() -> bool:
            admin = self._new_admin()
            answers = admin.list_offsets(request, request_timeout=REQUEST_LIMIT_S).values()
            return all(
                answer.exception(REQUEST_LIMIT_S) is None and answer.result().offset >= 0
                for answer in answers
            )

        wait_until(
            have_leaders,
            timeout_s=max(REQUEST_LIMIT_S, partitions / _LEADERS_PER_S),
            what=f"a leader for each of the {partitions} partitions of {topic}",
        )

    def leaders(self, topic: str) -> list[int]:
        """Return the leader of each partition of a topic; -1 if it has none."""
        partitions = (
            self._admin.list_topics(topic, timeout=REQUEST_LIMIT_S).topics[topic].partitions
        )
        return [partitions[number].leader for number in sorted(partitions)]

    def is_in_sync(self) -> bool:
        """Return whether every node has an in-sync replica of every partition."""
        topics = self._admin.list_topics(timeout=REQUEST_LIMIT_S).topics.values()
        return all(
            len(partition.isrs) == self.nodes
            for topic in topics
            for partition in topic.partitions.values()
        )

    def coordinator(self, group: str) -> int:
        """Return the node that coordinates a consumer group, or -1 while there is none.

        The topic `__consumer_offsets` must exist already.
        """
        # Not describe_consumer_groups: librdkafka 2.16 aborts the process if the coordinator goes
        # away during the request ("eonce->refcnt > 0" in rd_kafka_enq_once_del_source_return).
        # Kafka maps a group to a partition by Java's String.hashCode.
        leaders = self.leaders("__consumer_offsets")
        code = 0
        for character in group:
            code = (31 * code + ord(character)) & 0xFFFFFFFF
        return leaders[(code & 0x7FFFFFFF) % len(leaders)]


def settle(future: Future[None], what: str) -> None:
    """Wait for the result of an admin request.

    Raises:
        BrokerError: Kafka refused, or did not answer.
    """
    try:
        future.result(REQUEST_LIMIT_S)
    except KafkaException as error:
        msg = f"Kafka refused to {what}: {error.args[0].str()}"
        raise BrokerError(msg, retriable=error.args[0].retriable()) from error

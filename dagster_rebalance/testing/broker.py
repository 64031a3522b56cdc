"""A real Kafka for tests and demos runs one or three KRaft nodes on free ports of 127.0.0.1.

The nodes have a folder of their own. This module owns the life of the cluster and of its nodes:
start, kill, restart, suspend. Nothing outlives the process that started it, and nothing listens on
another address than 127.0.0.1.
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
from dagster_rebalance.testing.local.class_archive import ClassArchive
from dagster_rebalance.testing.local.jars import Coordinates, JarSet, fetch, tell_on_stderr
from dagster_rebalance.testing.local.java import SHORT_LIVED, find_java
from dagster_rebalance.testing.local.kafka_node import START_LIMIT_S, Access, KafkaNode, admin_of
from dagster_rebalance.testing.local.ports import free_port, is_free
from dagster_rebalance.testing.local.scratch import private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    from confluent_kafka.admin import AdminClient
    from typing_extensions import Self

KAFKA_VERSION = "4.1.1"

VERSION_VARIABLE = "DAGSTER_REBALANCE_KAFKA_VERSION"
"""Names the version of Kafka for clusters that are given none, those of the fixtures too."""

JAVA_FLAGS = (
    *SHORT_LIVED,
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.state.change.logger=warn",
)

SIZES = (1, 3)
REQUEST_LIMIT_S = 30.0


def kafka_jars(version: str) -> JarSet:
    """Kafka of a version, with all that it needs."""
    # Kafka's own dependencies write no log at all: slf4j-simple writes it to the node's log file.
    artifacts = (
        Coordinates("org.apache.kafka", "kafka_2.13", version),
        Coordinates("org.slf4j", "slf4j-simple", "1.7.36"),
    )
    return JarSet(f"kafka-{version}", artifacts)


@dataclass
class KafkaCluster:
    """A Kafka of one or three nodes. It starts when entered, and is gone with its data when left.

    Example:
        ```python
        with KafkaCluster() as kafka:
            kafka.create_topic("orders", partitions=8)
            consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "g"})
        ```

    Attributes:
        nodes: How many; the nodes are numbered from 1.
        port: The first node's port; a free one by default.
        settings: Broker settings; they win over those of this kit, which make rebalances quick.
        version: Kafka's; what DAGSTER_REBALANCE_KAFKA_VERSION names, or 4.1.1. Before 4.0 there is
            the classic protocol only: the consumer protocol was not for production yet, and is off.
        heap: The memory of each node, as Java's -Xmx takes it.
        tell: Gets a sentence at each step of a first fetch of the jars.
    """

    nodes: int = 1
    port: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    version: str = field(default_factory=lambda: os.environ.get(VERSION_VARIABLE) or KAFKA_VERSION)
    heap: str = "384m"
    tell: Callable[[str], None] = tell_on_stderr
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
                f"'{self.version}' is no version of Kafka that this kit can start: it must look "
                f"like {KAFKA_VERSION} or 3.9.1."
            )
            raise ConfigurationError(msg)
        if self.port is not None and not is_free(self.port):
            msg = (
                f"Port {self.port} is in use on this machine. Choose another, or none to get a "
                "free one."
            )
            raise ConfigurationError(msg)

    @property
    def bootstrap_servers(self) -> str:
        """What a client's `bootstrap.servers` takes."""
        return ",".join(node.address for node in self._nodes.values())

    def client_config(self) -> dict[str, str]:
        """The librdkafka settings with which a client reaches this Kafka."""
        return {"bootstrap.servers": self.bootstrap_servers}

    @property
    def logs(self) -> list[Path]:
        """The nodes' log files."""
        return [node.log for node in self._nodes.values()]

    @property
    def pids(self) -> list[int]:
        """The processes of the nodes that run."""
        return [node.process.pid for node in self._nodes.values() if node.is_running]

    def tail(self) -> str:
        """The end of each node's log."""
        return "\n".join(f"{node.name}:\n{node.process.tail()}" for node in self._nodes.values())

    def start(self) -> Self:
        """Fetch the jars if need be, start the nodes, and wait until they form a cluster.

        Raises:
            DagsterRebalanceError: A node did not start; the message holds the end of its log.
        """
        wanted, found = kafka_jars(self.version), find_java()
        jars = fetch(wanted, tell=self.tell)
        self._archive = archive = ClassArchive.of(wanted.name, found, jars, JAVA_FLAGS)
        java: list[str | Path] = [
            found.path,
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

    def _make_access(self, folder: Path) -> Access:  # noqa: ARG002 - for those who keep files of it there
        """Who may talk to the nodes."""
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
        """End all nodes and remove their data."""
        archive, maker = self._archive, self._nodes.get(1)
        if archive and archive.is_being_made and maker and maker.is_running:
            maker.stop()
            archive.keep()
        for node in self._nodes.values():
            node.stop_at_once()
        self._nodes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _node(self, number: int) -> KafkaNode:
        if number not in self._nodes:
            msg = (
                f"There is no node {number} in this Kafka; there are: "
                f"{', '.join(map(str, self._nodes)) or 'none, it is not started'}."
            )
            raise ConfigurationError(msg)
        return self._nodes[number]

    def kill(self, node: int = 1) -> None:
        """End a node at once, as a crash would. Its data stays."""
        self._node(node).process.kill()

    def shut_down(self, node: int = 1) -> None:
        """End a node in good order, as a rolling restart would.

        The node hands its leaderships over first.
        """
        self._node(node).stop()

    def restart(self, node: int = 1) -> None:
        """Start a node again, on the same port and with its data; one that runs is shut down first.

        Returns when it answers.
        """
        self._node(node).stop()
        self._node(node).launch()
        self._node(node).wait_until_up(len(self.pids))

    def suspend(self, node: int = 1) -> None:
        """Freeze a node: connections stay open, and nothing answers."""
        self._node(node).process.suspend()

    def resume(self, node: int = 1) -> None:
        """Let a suspended node go on."""
        self._node(node).process.resume()

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic, with a copy on each node, and wait until every partition has a leader.

        Raises:
            BrokerError: Kafka refused, for example because the topic exists.
        """
        topic = NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=self.nodes,
            config=dict(config or {}),
        )
        settle(
            self._admin.create_topics([topic], operation_timeout=REQUEST_LIMIT_S)[name],
            f"create topic {name}",
        )
        self._wait_for_leaders(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        """Let a topic have `total` partitions, and wait until every one has a leader.

        Raises:
            BrokerError: Kafka refused, for example because the topic has as many.
        """
        more = NewPartitions(name, new_total_count=total)
        settle(
            self._admin.create_partitions([more], operation_timeout=REQUEST_LIMIT_S)[name],
            f"add partitions to {name}",
        )
        self._wait_for_leaders(name, total)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all of its records, and wait until no node knows it any more.

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
        # Right after a creation a node may lead a partition and not know it yet: list_offsets then
        # fails with NOT_LEADER_FOR_PARTITION. Of a leader that does not answer it says -1001. It
        # finds none (_NOENT) for partitions that are newer than the client's metadata, and another
        # node may be late to tell of them: so each time with a client of its own.
        asked = {
            TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(partitions)
        }

        def all_answer() -> bool:
            admin = self._new_admin()
            answers = admin.list_offsets(asked, request_timeout=REQUEST_LIMIT_S).values()
            return all(
                answer.exception(REQUEST_LIMIT_S) is None and answer.result().offset >= 0
                for answer in answers
            )

        wait_until(
            all_answer,
            timeout_s=REQUEST_LIMIT_S,
            what=f"a leader for each of the {partitions} partitions of {topic}",
        )

    def leaders(self, topic: str) -> list[int]:
        """The node that leads each partition of a topic; -1 where there is none."""
        found = self._admin.list_topics(topic, timeout=REQUEST_LIMIT_S).topics[topic].partitions
        return [found[partition].leader for partition in sorted(found)]

    def is_in_sync(self) -> bool:
        """Tell whether every node runs and has an up-to-date copy of every partition.

        Then one of them may go without harm.
        """
        topics = self._admin.list_topics(timeout=REQUEST_LIMIT_S).topics.values()
        return all(
            len(one.isrs) == self.nodes for topic in topics for one in topic.partitions.values()
        )

    def coordinator(self, group: str) -> int:
        """The node that coordinates a consumer group, -1 while there is none.

        Some group must have been used before.
        """
        # Not describe_consumer_groups: librdkafka 2.16 aborts the process when the coordinator goes
        # during that request ("eonce->refcnt > 0" in rd_kafka_enq_once_del_source_return). Kafka
        # maps a group to a partition by Java's String.hashCode.
        leaders = self.leaders("__consumer_offsets")
        code = 0
        for character in group:
            code = (31 * code + ord(character)) & 0xFFFFFFFF
        return leaders[(code & 0x7FFFFFFF) % len(leaders)]


def settle(future: Future[None], what: str) -> None:
    """Wait for what Kafka answers to an admin client.

    Raises:
        BrokerError: It refused, or did not answer.
    """
    try:
        future.result(REQUEST_LIMIT_S)
    except KafkaException as error:
        msg = f"Kafka would not {what}: {error.args[0].str()}"
        raise BrokerError(msg, retriable=error.args[0].retriable()) from error

"""Ticks of a sensor with bad input on a real broker, until they report the problem."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import BrokerError, DagsterRebalanceError
from dagster_rebalance.core.model.offsets import TopicPartition as OurPartition
from dagster_rebalance.orchestration.definitions import build_kafka_batch_defs
from dagster_rebalance.orchestration.per_batch import batch_sensor as sensor_module
from dagster_rebalance.orchestration.per_batch.hosted_members import Members
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.readers import commit_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker
PATIENCE_S = 120.0


@dg.asset(required_resource_keys={"kafka_batch"})
def work() -> None:
    """Never executed: no test here starts a run."""


class Location:
    """A code location whose sensor is on."""

    def __init__(self, instance: dg.DagsterInstance, members: Members, **settings: Any) -> None:  # noqa: ANN401 - settings of all kinds
        self.instance = instance
        self.members = members
        self.kafka = KafkaConsumerResource(shutdown_timeout_s=10.0, **settings)
        self.defs = build_kafka_batch_defs(kafka=self.kafka, assets=[work], name="orders")
        self.sensor = self.defs.resolve_sensor_def("orders_sensor")

    def tick(self) -> str:
        resources = {"kafka": self.kafka}
        context = dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            resources=resources,
            sensor_name="orders_sensor",
        )
        with context:
            return self.sensor.evaluate_tick(context).skip_message or ""

    def failure(self) -> DagsterRebalanceError:
        found: list[DagsterRebalanceError] = []

        def fails() -> bool:
            try:
                self.tick()
            except DagsterRebalanceError as error:
                found.append(error)
            return bool(found)

        wait_until(fails, timeout_s=PATIENCE_S, what="the tick to fail")
        return found[0]

    def stopped(self) -> tuple[str, str]:
        """Wait for the check, and return the reason of the stop and what to do."""
        last: list[str] = []

        def shown() -> dg.AssetCheckEvaluation | None:
            last[:] = [self.tick()]
            key = dg.AssetCheckKey(GroupAssets.of(self.kafka.group_id).offsets, STOPPED_CHECK)
            record = self.instance.event_log_storage.get_latest_asset_check_execution_by_key(
                [key]
            ).get(key)
            return record.evaluation if record else None

        check = wait_until(
            shown,
            timeout_s=PATIENCE_S,
            what=lambda: f"the check to be reported; the last tick said {last}",
        )
        reason = check.description or ""
        assert not check.passed
        table = check.metadata["stopped"]
        assert isinstance(table, dg.TableMetadataValue)
        wait_until(
            lambda: reason.split(": ", 1)[1][:20] in self.tick(),
            timeout_s=PATIENCE_S,
            what="the tick to say it, too",
        )
        return reason, str(table.records[0].data["what_to_do"])


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    made = Members()
    monkeypatch.setattr(sensor_module, "MEMBERS", made)
    monkeypatch.setattr(sensor_module, "is_real_tick", lambda _context: True)
    yield made
    made.shut_down()


def commit(kafka: KafkaCluster, group_id: str, topic: str, offset: int, metadata: str = "") -> None:
    partition = TopicPartition(topic, 0, offset, metadata=metadata)
    commit_by_hand({**kafka.client_config(), "group.id": group_id}, partition)


def produce(kafka: KafkaCluster, topic: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(records):
        producer.produce(topic, str(number).encode(), partition=0)
    assert producer.flush(120) == 0


def test_unreachable_broker_fails_tick_with_its_address(
    instance: dg.DagsterInstance, members: Members
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        location = Location(
            instance,
            members,
            bootstrap_servers=address,
            group_id=unique_name("g"),
            topics=["orders"],
        )
        error = location.failure()
    assert isinstance(error, BrokerError)
    assert address in str(error)


def test_missing_topic_fails_tick_with_its_name(
    instance: dg.DagsterInstance, members: Members, kafka_broker: KafkaCluster
) -> None:
    missing = unique_name("missing")
    location = Location(
        instance,
        members,
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id=unique_name("g"),
        topics=[missing],
    )
    assert missing in str(location.failure())


def test_group_in_use_with_another_protocol_fails_tick(
    instance: dg.DagsterInstance,
    members: Members,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
) -> None:
    """The other member is an eager consumer."""
    topic, group_id = kafka_topic(), unique_name("g")
    eager = Consumer(
        {
            "bootstrap.servers": kafka_broker.bootstrap_servers,
            "group.id": group_id,
            "partition.assignment.strategy": "range",
        }
    )
    try:
        eager.subscribe([topic])
        wait_until(
            lambda: eager.poll(0.1) or eager.assignment(),
            timeout_s=PATIENCE_S,
            what="the other application to join",
        )
        location = Location(
            instance,
            members,
            bootstrap_servers=kafka_broker.bootstrap_servers,
            group_id=group_id,
            topics=[topic],
            group_protocol="classic",
        )
        polls_until = time.monotonic() + PATIENCE_S
        found: str | None = None
        while found is None and time.monotonic() < polls_until:
            eager.poll(0.1)
            try:
                location.tick()
            except DagsterRebalanceError as error:
                found = str(error)
    finally:
        eager.close()
    assert found is not None
    assert "the group is in use with another protocol or assignment strategy" in found
    assert group_id in found


def test_foreign_metadata_stops_partition_with_reason(
    instance: dg.DagsterInstance,
    members: Members,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
) -> None:
    topic, group_id = kafka_topic(), unique_name("g")
    produce(kafka_broker, topic, 5)
    commit(kafka_broker, group_id, topic, 2, "checkpoint of another client")
    location = Location(
        instance,
        members,
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id=group_id,
        topics=[topic],
    )
    reason, remedy = location.stopped()
    assert reason.startswith(
        f"{topic}-0: the metadata 'checkpoint of another client' was not written by "
        "dagster_rebalance"
    )
    assert f"dagster-rebalance reset {topic}:0 --to-current --yes" in remedy
    with location.kafka.connect() as reader:
        (stored,) = reader.committed([OurPartition(topic, 0)]).values()
    assert stored is not None
    assert (stored.offset, stored.metadata) == (2, "checkpoint of another client")


def test_offset_deleted_by_retention_stops_partition_with_reason(
    instance: dg.DagsterInstance,
    members: Members,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
) -> None:
    topic, group_id = kafka_topic(), unique_name("g")
    produce(kafka_broker, topic, 10)
    commit(kafka_broker, group_id, topic, 2)
    admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, 6)]).values():
        future.result(120)
    location = Location(
        instance,
        members,
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id=group_id,
        topics=[topic],
    )
    reason, _ = location.stopped()
    assert reason.startswith(
        f"{topic}-0: Kafka's retention deleted records from offset 2 on before they were processed"
    )

"""The right to read one of two topics is withdrawn: the other one goes on.

On a real Kafka with ACLs, in both protocols and both forms of runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Literal

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance import build_kafka_stream_defs
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import events
from dagster_rebalance.orchestration.member import group_report
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mailbox
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import make_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.runs.batch_request import BatchRequest
    from dagster_rebalance.orchestration.batch.resource import KafkaBatch
    from dagster_rebalance.testing.secured import SecuredKafka

pytestmark = pytest.mark.broker
PASSWORD = "DAGSTER_REBALANCE_TEST_PASSWORD"  # noqa: S105 - the name of a variable


class Shop:
    """A group of two topics; the right to read the first one is withdrawn.

    Args:
        kafka: A Kafka with ACLs.
        protocol: The protocol of the group.
        sees: Whether the principal may still see the topic that it may not read.
    """

    def __init__(
        self, kafka: SecuredKafka, protocol: Literal["consumer", "classic"], *, sees: bool
    ) -> None:
        self.kafka = kafka
        self.name = unique_name("shop")
        self.closed, self.open = f"{self.name}-a", f"{self.name}-b"
        kafka.add_user(self.name, "a-password-of-a-test")
        for topic in (self.closed, self.open):
            kafka.create_topic(topic, 1)
            kafka.allow(self.name, "READ", *(["DESCRIBE"] if sees else []), topic=topic)
        kafka.allow(self.name, "READ", group=self.name)
        access = kafka.client_config(self.name)
        self.resource = KafkaConsumerResource(
            bootstrap_servers=access["bootstrap.servers"],
            group_id=self.name,
            topics=[self.closed, self.open],
            group_protocol=protocol,
            security_protocol="SASL_SSL",
            ssl_ca_location=access["ssl.ca.location"],
            sasl_mechanism="SCRAM-SHA-512",
            sasl_username=self.name,
            sasl_password=dg.EnvVar(PASSWORD),
        )
        self.assets = GroupAssets.of(self.name)
        self._producer = Producer(kafka.client_config())

    def produce(self, *topics: str) -> None:
        for topic in topics:
            self._producer.produce(topic, b"1")
        self._producer.flush(10)

    def close(self) -> None:
        self.kafka.forbid(self.name, "READ", topic=self.closed)

    def told(self, instance: dg.DagsterInstance) -> str:
        found = instance.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(self.assets.offsets, STOPPED_CHECK), limit=1
        )
        evaluation = found[0].evaluation if found else None
        return "" if evaluation is None or evaluation.passed else str(evaluation.description)

    def is_told(self, instance: dg.DagsterInstance) -> bool:
        said = self.told(instance)
        return self.closed in said and self.open not in said


@pytest.fixture(params=[True, False], ids=["seen", "hidden"])
def sees(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["consumer", "classic"])
def shop(
    request: pytest.FixtureRequest,
    secured_kafka: SecuredKafka,
    monkeypatch: pytest.MonkeyPatch,
    *,
    sees: bool,
) -> Iterator[Shop]:
    monkeypatch.setattr(group_report, "_LOOK_FOR_TOPICS_S", 1.0)
    monkeypatch.setenv(PASSWORD, "a-password-of-a-test")
    shop = Shop(secured_kafka, request.param, sees=sees)
    yield shop
    for topic in (shop.open, shop.closed):
        secured_kafka.delete_topic(topic)


def test_streaming_runs_go_on_without_a_topic_that_may_not_be_read(
    shop: Shop, instance: dg.DagsterInstance
) -> None:
    """So does a run that joins later."""
    batches: list[set[str]] = []
    until = time.monotonic() + 90

    @dg.asset
    def orders(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
        work(kafka_batch)

    def work(batch: KafkaBatch) -> None:
        batches.append({range_.topic for range_ in batch.offset_ranges})
        if shop.closed in batches[-1]:
            shop.close()
            shop.produce(shop.closed)
        if shop.is_told(instance) or time.monotonic() > until:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            shop.produce(shop.open)
            time.sleep(0.2)

    job = build_kafka_stream_defs(
        kafka=shop.resource, assets=[orders], name="stream"
    ).resolve_job_def("stream")
    shop.produce(shop.open, shop.closed)
    assert job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:sensor"}).success
    assert shop.is_told(instance), shop.told(instance)
    assert any(shop.closed in topics for topics in batches)
    before = len(batches)
    shop.produce(shop.open)
    assert job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:sensor"}).success
    assert batches[before:], "a run that joins later works, too"
    assert shop.is_told(instance), shop.told(instance)


def test_runs_for_batches_go_on_without_a_topic_that_may_not_be_read(
    shop: Shop, instance: dg.DagsterInstance
) -> None:
    """When the right is granted again, the member goes on with the topic by itself."""
    host = MemberIdentity("blue", "sensor", "process-1")
    ids = count(1)
    engine = Engine(
        shop.resource.engine_settings(),
        new_batch_id=lambda _: unique_name(f"b{next(ids)}"),
        now=time.monotonic(),
    )
    mailbox = Mailbox()
    ledger = RunLedger(instance, shop.name)

    def be_member() -> None:
        with shop.resource.process_config_and_initialize().connect() as consumer:
            catalogue = Catalogue(instance, shop.assets, host)
            MemberLoop(
                MemberDependencies(consumer, engine, ledger, catalogue, shop.resource.topics),
                mailbox,
            ).run()

    def offered(topic: str) -> BatchRequest | None:
        mailbox.send(events.TickArrived())
        batch_requests = mailbox.mail.batch_requests
        return next((o for o in batch_requests if topic in {r.topic for r in o.ranges}), None)

    def done(topic: str) -> None:
        batch_request = wait_until(
            lambda: offered(topic),
            timeout_s=60,
            what=lambda: f"an offer of {topic}: {mailbox.mail.summary}",
        )
        run = make_run(instance, batch_request, dg.DagsterRunStatus.STARTED, group_id=shop.name)
        event = dg.DagsterEvent(
            event_type_value=dg.DagsterEventType.RUN_SUCCESS.value, job_name=run.job_name
        )
        instance.report_dagster_event(event, run.run_id)

    thread = threading.Thread(target=be_member, daemon=True)
    thread.start()
    try:
        shop.produce(shop.open, shop.closed)
        done(shop.closed)
        shop.close()
        shop.produce(shop.open, shop.closed)
        wait_until(lambda: shop.is_told(instance), timeout_s=60, what="the closed topic told")
        done(shop.open)
        shop.kafka.allow(shop.name, "READ", topic=shop.closed)
        done(shop.closed)
        wait_until(lambda: not shop.told(instance), timeout_s=60, what="the check to pass")
    finally:
        mailbox.send(events.LeaveRequested("the test is over", limit_s=5.0))
        thread.join(60)
    assert not thread.is_alive()

"""A group loses one of its two topics: it continues with the other one and reports the loss.

On a real Kafka, in both protocols and both forms of run. A topic is lost if it is deleted, or if
the right to read it is withdrawn from a principal that may still see it, or may not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance import build_kafka_stream_defs
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import events
from dagster_rebalance.core.reporting.lag import LagLimit
from dagster_rebalance.orchestration.member import group_report
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mailbox
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import LAG_CHECK, STOPPED_CHECK
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

    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.orchestration.batch.resource import KafkaBatch
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.secured import SecuredKafka

pytestmark = pytest.mark.broker
PASSWORD = "DAGSTER_REBALANCE_TEST_PASSWORD"  # noqa: S105 - the name of a variable
MISSING = "does not exist, or the principal may not see it"
LIMIT_S = 240.0


class Shop:
    """A group of two topics; the first one is deleted."""

    def __init__(self, kafka: KafkaCluster, instance: dg.DagsterInstance, protocol: str) -> None:
        self.kafka = kafka
        self.instance = instance
        self.name = unique_name("shop")
        self.lost, self.kept = f"{self.name}-a", f"{self.name}-b"
        for topic in (self.lost, self.kept):
            kafka.create_topic(topic, 1)
        access: dict[str, Any] = self.access()
        self.resource = KafkaConsumerResource(
            group_id=self.name,
            topics=[self.lost, self.kept],
            group_protocol=protocol,  # type: ignore[arg-type] # a literal
            lag_every_s=10.0,
            **access,
        )
        self.assets = GroupAssets.of(self.name)
        # Members see all of these records at once.
        self._producer = Producer({**kafka.client_config(), "linger.ms": 1_000})

    def access(self) -> dict[str, Any]:
        """Return the settings of the connection."""
        return {"bootstrap_servers": self.kafka.bootstrap_servers}

    def produce(self, *topics: str) -> None:
        for topic in topics:
            self._producer.produce(topic, b"1")
        self._producer.flush(120)

    def lose(self) -> None:
        self.kafka.delete_topic(self.lost)

    def problem(self) -> str:
        """Return the description of the failed check of stopped partitions; empty if it passes."""
        found = self.instance.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(self.assets.offsets, STOPPED_CHECK), limit=1
        )
        evaluation = found[0].evaluation if found else None
        return "" if evaluation is None or evaluation.passed else str(evaluation.description)

    def is_reported(self) -> bool:
        """Whether the loss is reported, and the lag of the other topic."""
        found = self.instance.fetch_observations(self.assets.lag, limit=1).records
        lag = str(found[0].asset_observation.description) if found else ""  # type: ignore[union-attr]
        is_stopped = f"topic {self.lost} {MISSING}" in self.problem()
        return is_stopped and "in 1 partition" in lag and MISSING in lag

    @contextmanager
    def member(self) -> Iterator[Mailbox]:
        """A member of the group as a per-batch sensor has it."""
        ids = count(1)
        engine = Engine(
            self.resource.engine_settings(),
            new_batch_id=lambda _: unique_name(f"b{next(ids)}"),
            now=time.monotonic(),
        )
        mailbox = Mailbox()
        catalogue = Catalogue(
            self.instance, self.assets, MemberIdentity("blue", "sensor", "process-1")
        )
        ledger = RunLedger(self.instance, self.name)

        def be_member() -> None:
            with self.resource.process_config_and_initialize().connect() as consumer:
                dependencies = MemberDependencies(
                    consumer,
                    engine,
                    ledger,
                    catalogue,
                    self.resource.topics,
                    lag_limit=LagLimit(9),
                )
                MemberLoop(dependencies, mailbox).run()

        thread = threading.Thread(target=be_member, daemon=True)
        thread.start()
        try:
            yield mailbox
        finally:
            mailbox.send(events.LeaveRequested("the test is over", limit_s=5.0))
            thread.join(120)
        assert not thread.is_alive()

    def succeed(self, mailbox: Mailbox, topic: str) -> None:
        """Wait for the request of a run on the topic, and report its success."""

        def requested() -> BatchRequest | None:
            mailbox.send(events.TickArrived())
            requests = mailbox.mail.batch_requests
            return next((o for o in requests if topic in {r.topic for r in o.ranges}), None)

        request = wait_until(
            requested,
            timeout_s=LIMIT_S,
            what=lambda: f"a run request for {topic}: {mailbox.mail.summary}",
        )
        run = make_run(self.instance, request, dg.DagsterRunStatus.STARTED, group_id=self.name)
        success = dg.DagsterEventType.RUN_SUCCESS.value
        event = dg.DagsterEvent(event_type_value=success, job_name=run.job_name)
        self.instance.report_dagster_event(event, run.run_id)


class ShopWithLogin(Shop):
    """A group of two topics; the right to read the first one is withdrawn from its principal."""

    kafka: SecuredKafka
    sees = True

    def access(self) -> dict[str, Any]:
        self.kafka.add_user(self.name, "a-password-of-a-test")
        for topic in (self.lost, self.kept):
            self.kafka.allow(self.name, "READ", *["DESCRIBE"][: self.sees], topic=topic)
        self.kafka.allow(self.name, "READ", group=self.name)
        access = self.kafka.client_config(self.name)
        return {
            "bootstrap_servers": access["bootstrap.servers"],
            "security_protocol": "SASL_SSL",
            "ssl_ca_location": access["ssl.ca.location"],
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_username": self.name,
            "sasl_password": dg.EnvVar(PASSWORD),
        }

    def lose(self) -> None:
        self.kafka.forbid(self.name, "READ", topic=self.lost)
        self.produce(self.lost)

    def is_reported(self) -> bool:
        problem = self.problem()
        return self.lost in problem and self.kept not in problem


class ShopOfTheBlind(ShopWithLogin):
    """The principal may no longer see the topic either."""

    sees = False


DELETED = [(Shop, "consumer"), (Shop, "classic")]
FORBIDDEN = [
    (ShopWithLogin, "consumer"),
    (ShopOfTheBlind, "classic"),
    (ShopOfTheBlind, "consumer"),
    (ShopWithLogin, "classic"),
]


@pytest.fixture
def shop(
    request: pytest.FixtureRequest, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    monkeypatch.setattr(group_report, "_LOOK_FOR_TOPICS_S", 1.0)
    monkeypatch.setattr(group_report, "_SCAN_STOPS_S", 1.0)
    monkeypatch.setenv(PASSWORD, "a-password-of-a-test")
    kind, protocol = request.param
    broker = "secured_kafka" if issubclass(kind, ShopWithLogin) else "kafka_broker"
    shop = kind(request.getfixturevalue(broker), instance, protocol)
    yield shop
    shop.kafka.delete_topic(shop.kept)
    if isinstance(shop, ShopWithLogin):
        shop.kafka.delete_topic(shop.lost)


@pytest.mark.parametrize("shop", [*DELETED, *FORBIDDEN[:2]], indirect=True)
def test_streaming_runs_continue_without_a_lost_topic(
    shop: Shop, instance: dg.DagsterInstance
) -> None:
    """So does a run that joins later. The checks that a user executes report the loss, too."""
    batches: list[set[str]] = []
    until = time.monotonic() + LIMIT_S

    @dg.asset
    def orders(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
        work(kafka_batch)

    def work(batch: KafkaBatch) -> None:
        batches.append({range_.topic for range_ in batch.offset_ranges})
        if shop.lost in batches[-1]:
            shop.lose()
        if shop.is_reported() or time.monotonic() > until:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            shop.produce(shop.kept)
            time.sleep(0.2)

    defs = build_kafka_stream_defs(
        kafka=shop.resource, assets=[orders], name="stream", lag_within_records=1000
    )
    job, tags = defs.resolve_job_def("stream"), {STREAM_TAG: "here:sensor"}
    shop.produce(shop.kept, shop.lost)
    assert job.execute_in_process(instance=instance, tags=tags).success
    assert shop.is_reported(), shop.problem()
    assert any(shop.lost in topics for topics in batches)
    before = len(batches)
    shop.produce(shop.kept)
    assert job.execute_in_process(instance=instance, tags=tags).success
    assert batches[before:], "a member that joins later works, too"
    assert shop.is_reported(), shop.problem()
    if isinstance(shop, ShopWithLogin):
        return
    checks = dg.Definitions(
        asset_checks=list(defs.asset_checks or ()), resources={"kafka": shop.resource}
    )
    result = checks.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    executed = {one.check_name: one for one in result.get_asset_check_evaluations()}
    for check in (STOPPED_CHECK, LAG_CHECK):
        assert not executed[check].passed
        assert MISSING in str(executed[check].description)


@pytest.mark.parametrize("shop", DELETED, indirect=True)
def test_per_batch_runs_continue_without_a_deleted_topic(shop: Shop) -> None:
    """The tick names the missing topic, and requests runs on the other one."""
    with shop.member() as mailbox:
        shop.produce(shop.kept, shop.lost)
        shop.succeed(mailbox, shop.lost)
        shop.lose()
        wait_until(
            lambda: any(MISSING in line for line in mailbox.mail.summary),
            timeout_s=LIMIT_S,
            what=lambda: f"the missing topic in {mailbox.mail.summary}",
        )
        shop.produce(shop.kept)
        shop.succeed(mailbox, shop.kept)
        wait_until(shop.is_reported, timeout_s=LIMIT_S, what="the report of the missing topic")


@pytest.mark.parametrize("shop", FORBIDDEN, indirect=True)
def test_per_batch_runs_continue_without_a_forbidden_topic(shop: ShopWithLogin) -> None:
    """When the right is granted again, the member continues with the topic."""
    with shop.member() as mailbox:
        shop.produce(shop.kept, shop.lost)
        shop.succeed(mailbox, shop.lost)
        shop.lose()
        shop.produce(shop.kept)
        wait_until(shop.is_reported, timeout_s=LIMIT_S, what="the report of the forbidden topic")
        shop.succeed(mailbox, shop.kept)
        shop.kafka.allow(shop.name, "READ", topic=shop.lost)
        shop.succeed(mailbox, shop.lost)
        wait_until(lambda: not shop.problem(), timeout_s=LIMIT_S, what="the check to pass")

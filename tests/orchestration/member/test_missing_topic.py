"""One of several topics is deleted: the others go on, and people hear what to do.

On a real Kafka, in both protocols and both forms of runs.
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

    from dagster_rebalance.core.runs.batch_request import BatchRequest
    from dagster_rebalance.orchestration.batch.resource import KafkaBatch
    from dagster_rebalance.testing.broker import KafkaCluster

pytestmark = pytest.mark.broker
SAYS = "does not exist, or the principal may not see it"


class Shop:
    """A group of two topics; the one that is deleted is the first of the group."""

    def __init__(self, kafka: KafkaCluster, protocol: Literal["consumer", "classic"]) -> None:
        self.kafka = kafka
        name = unique_name("shop")
        self.gone, self.kept = f"{name}-a", f"{name}-b"
        for topic in (self.gone, self.kept):
            kafka.create_topic(topic, 1)
        self.resource = KafkaConsumerResource(
            bootstrap_servers=kafka.bootstrap_servers,
            group_id=name,
            topics=[self.gone, self.kept],
            group_protocol=protocol,
            lag_every_s=10.0,
        )
        self.assets = GroupAssets.of(name)
        self._producer = Producer(kafka.client_config())

    def produce(self, *topics: str) -> None:
        for topic in topics:
            self._producer.produce(topic, b"1")
        self._producer.flush(10)

    def lag_told(self, instance: dg.DagsterInstance) -> str:
        found = instance.fetch_observations(self.assets.lag, limit=1).records
        return str(found[0].asset_observation.description) if found else ""  # type: ignore[union-attr]

    def checked(
        self, instance: dg.DagsterInstance, check: str, asset: dg.AssetKey
    ) -> dg.AssetCheckEvaluation | None:
        found = instance.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(asset, check), limit=1
        )
        return found[0].evaluation if found else None

    def is_told(self, instance: dg.DagsterInstance) -> bool:
        """Whether people hear of the missing topic, and of the lag of the other one."""
        stopped = self.checked(instance, STOPPED_CHECK, self.assets.offsets)
        return (
            stopped is not None
            and f"topic {self.gone} {SAYS}" in str(stopped.description)
            and not stopped.passed
            and "in 1 partition" in self.lag_told(instance)
            and SAYS in self.lag_told(instance)
        )


@pytest.fixture(params=["consumer", "classic"])
def shop(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    monkeypatch.setattr(group_report, "_LOOK_FOR_TOPICS_S", 1.0)
    shop = Shop(kafka_broker, request.param)
    yield shop
    kafka_broker.delete_topic(shop.kept)


def test_streaming_runs_go_on_without_a_deleted_topic(
    shop: Shop, instance: dg.DagsterInstance
) -> None:
    """So does one that joins later, and the checks that a person executes."""
    batches: list[set[str]] = []
    until = time.monotonic() + 150

    @dg.asset
    def orders(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
        work(kafka_batch)

    def work(batch: KafkaBatch) -> None:
        batches.append({range_.topic for range_ in batch.offset_ranges})
        if shop.gone in batches[-1]:
            shop.kafka.delete_topic(shop.gone)
        if shop.is_told(instance) or time.monotonic() > until:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            shop.produce(shop.kept)
            time.sleep(0.2)

    defs = build_kafka_stream_defs(
        kafka=shop.resource, assets=[orders], name="stream", lag_within_records=1000
    )
    shop.produce(shop.kept, shop.gone)
    defs.resolve_job_def("stream").execute_in_process(
        instance=instance, tags={STREAM_TAG: "here:sensor"}
    )
    assert shop.is_told(instance), shop.lag_told(instance)
    assert any(shop.gone in topics for topics in batches)
    before = len(batches)
    shop.produce(shop.kept)
    defs.resolve_job_def("stream").execute_in_process(
        instance=instance, tags={STREAM_TAG: "here:sensor"}
    )
    assert batches[before:], "a member that joins later works, too"
    checks = dg.Definitions(
        asset_checks=list(defs.asset_checks or ()), resources={"kafka": shop.resource}
    )
    result = checks.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    said = {one.check_name: one for one in result.get_asset_check_evaluations()}
    for check in (STOPPED_CHECK, LAG_CHECK):
        assert not said[check].passed
        assert SAYS in str(said[check].description)


def test_runs_for_batches_go_on_without_a_deleted_topic(
    shop: Shop, instance: dg.DagsterInstance
) -> None:
    """The tick says what is missing, and asks for runs on the other topic."""
    host = MemberIdentity("blue", "sensor", "process-1")
    ids = count(1)
    engine = Engine(
        shop.resource.engine_settings(),
        new_batch_id=lambda _: unique_name(f"b{next(ids)}"),
        now=time.monotonic(),
    )
    mailbox = Mailbox()
    ledger = RunLedger(instance, shop.resource.group_id)

    def be_member() -> None:
        with shop.resource.connect() as consumer:
            catalogue = Catalogue(instance, shop.assets, host)
            topics = shop.resource.topics
            MemberLoop(
                MemberDependencies(
                    consumer, engine, ledger, catalogue, topics, lag_limit=LagLimit(9)
                ),
                mailbox,
            ).run()

    def offered(topic: str) -> BatchRequest | None:
        mailbox.send(events.TickArrived())
        batch_requests = mailbox.mail.batch_requests
        return next((o for o in batch_requests if topic in {r.topic for r in o.ranges}), None)

    def done(topic: str) -> None:
        batch_request = wait_until(
            lambda: offered(topic), timeout_s=90, what=f"an offer of {topic}"
        )
        run = make_run(
            instance, batch_request, dg.DagsterRunStatus.STARTED, group_id=shop.resource.group_id
        )
        event = dg.DagsterEvent(
            event_type_value=dg.DagsterEventType.RUN_SUCCESS.value, job_name=run.job_name
        )
        instance.report_dagster_event(event, run.run_id)

    thread = threading.Thread(target=be_member, daemon=True)
    thread.start()
    try:
        shop.produce(shop.kept, shop.gone)
        done(shop.gone)
        shop.kafka.delete_topic(shop.gone)
        wait_until(
            lambda: any(SAYS in line for line in mailbox.mail.summary),
            timeout_s=90,
            what=lambda: f"the missing topic in {mailbox.mail.summary}",
        )
        shop.produce(shop.kept)
        done(shop.kept)
        wait_until(lambda: shop.is_told(instance), timeout_s=90, what="the missing topic told")
    finally:
        mailbox.send(events.LeaveRequested("the test is over", limit_s=5.0))
        thread.join(60)
    assert not thread.is_alive()

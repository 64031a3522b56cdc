"""The metrics of a real member on a real Kafka, read as Prometheus reads them: over HTTP."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

import os
import signal
import urllib.request

import dagster as dg
import pytest
from confluent_kafka import Producer
from prometheus_client import start_http_server

from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs
from dagster_rebalance.orchestration.member import opentelemetry
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import TopicFactory
from tests.orchestration.scrape import Scrape, everything, series, value

pytestmark = pytest.mark.broker


def test_streaming_run_is_scraped_while_it_works(
    instance: dg.DagsterInstance,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The counters equal its commits, and the metric names are those of the documentation."""
    topic = kafka_topic(2)
    prometheus = Scrape()
    monkeypatch.setattr(opentelemetry, "METERS", prometheus.meters)
    server, thread = start_http_server(0, "127.0.0.1", prometheus.registry)
    # All records that are flushed together are one fetch, and so one batch, of the run.
    producer = Producer(kafka_broker.client_config() | {"linger.ms": 10_000})
    texts: list[str] = []

    def scraped() -> str:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=120) as answer:
            text: str = answer.read().decode()
        return text

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        if texts:
            return
        if kafka_batch.offset_ranges[0].start == 0:
            for _ in range(7):
                producer.produce(topic, b"x", partition=kafka_batch.offset_ranges[0].partition)
            producer.flush(120)
            return

        def is_told() -> str | None:
            text = scraped()
            in_flight = value(text, "dagster_rebalance_offsets_in_flight")
            lag = value(text, "dagster_rebalance_partition_lag")
            return text if in_flight == lag == 7 else None

        texts.append(wait_until(is_told, timeout_s=120, what="the metrics of the batch at work"))
        os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(5):
        producer.produce(topic, b"x", partition=0)
    producer.flush(120)
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers, group_id=topic, topics=[topic]
    )
    job = build_kafka_stream_defs(kafka=kafka, assets=[orders], name="metered")
    job.resolve_job_def("metered").execute_in_process(
        instance=instance, tags={STREAM_TAG: "metered"}
    )
    (text,) = texts
    mine = {"messaging_consumer_group_name": topic, "dagster_rebalance_member": "metered"}
    assert value(text, "dagster_rebalance_offsets_committed_total", **mine) == 5
    assert value(text, "dagster_rebalance_claim_to_commit_duration_seconds_count", **mine) == 1
    assert value(text, "dagster_rebalance_partitions", **mine) == 2
    assert value(text, "dagster_rebalance_batches_claimed_total", **mine) == 2
    assert value(text, "dagster_rebalance_members", **mine) == 1
    after = scraped()
    assert value(after, "dagster_rebalance_offsets_committed_total", **mine) == 12
    holds = "dagster_rebalance_hold_duration_seconds_count"
    assert value(after, holds, dagster_rebalance_cause="leave", **mine) == 1
    assert value(after, "dagster_rebalance_members") == 0, "its gauges have ended"
    server.shutdown()
    thread.join(120)
    server.server_close()
    assert series(after).keys() <= series(everything()).keys()

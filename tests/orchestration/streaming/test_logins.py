"""A streaming run logs in with what functions say, also when that changes while it lives."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

import os
import signal
import time
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance.kafka.client import credentials
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.secured import SecuredKafka
from tests.issuer import KafkaWithTokens
from tests.orchestration import vault

pytestmark = pytest.mark.broker

PASSWORD = "swordfish"  # noqa: S105 - of a Kafka that is soon gone


def produce(kafka: SecuredKafka, topic: str, value: str) -> None:
    producer = Producer(kafka.client_config())
    producer.produce(topic, value)
    assert producer.flush(120) == 0


def resource(
    kafka: SecuredKafka,
    name: str,
    **settings: Any,  # noqa: ANN401 - of all kinds
) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=kafka.bootstrap_servers,
        group_id=name,
        topics=[name],
        security_protocol="SASL_SSL",
        ssl_ca_location=str(kafka.certificate),
        **settings,
    )


def test_streaming_run_continues_with_a_new_password(
    instance: dg.DagsterInstance, secured_kafka: SecuredKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka takes the old one no more, and a restart has ended all connections."""
    monkeypatch.setattr(credentials, "ASK_EVERY_S", 0.0)
    name = unique_name("rotated")
    secured_kafka.create_topic(name)
    secured_kafka.add_user(name, PASSWORD)
    secured_kafka.allow(name, "READ", topic=name, group=name)
    monkeypatch.setattr(vault, "login", (name, PASSWORD))
    produce(secured_kafka, name, "before")
    values: list[bytes | None] = []

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        values.extend(message.value() for message in kafka_batch.messages())
        if len(values) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        secured_kafka.add_user(name, f"{PASSWORD} anew")
        monkeypatch.setattr(vault, "login", (name, f"{PASSWORD} anew"))
        asked = vault.asked
        wait_until(lambda: vault.asked > asked + 5, timeout_s=120, what="the function to be asked")
        secured_kafka.restart()
        produce(secured_kafka, name, "after")

    group = resource(
        secured_kafka,
        name,
        sasl_mechanism="SCRAM-SHA-512",
        client_config={"credentials_cb": "tests.orchestration.vault:credentials"},
    )
    job = build_kafka_stream_defs(kafka=group, assets=[orders], name="rotated").resolve_job_def(
        "rotated"
    )
    job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:sensor"})
    assert values == [b"before", b"after"]


def test_streaming_run_logs_in_with_the_tokens_of_a_function(
    instance: dg.DagsterInstance,
    secured_kafka: KafkaWithTokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the function's name alone, which is all that YAML and another process have."""
    name = unique_name("bearer")
    secured_kafka.create_topic(name)
    secured_kafka.allow(name, "READ", topic=name, group=name)
    produce(secured_kafka, name, "a")
    issuer = secured_kafka.issuer
    given: list[str] = []

    def issue(config: str) -> tuple[str, float]:
        given.append(config)
        return issuer.token(name), time.time() + issuer.lifetime_s

    monkeypatch.setattr(vault, "issue", issue)
    values: list[bytes | None] = []

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        values.extend(message.value() for message in kafka_batch.messages())
        os.kill(os.getpid(), signal.SIGTERM)

    group = resource(
        secured_kafka,
        name,
        sasl_mechanism="OAUTHBEARER",
        client_config={
            "oauth_cb": "tests.orchestration.vault:token",
            "sasl.oauthbearer.config": "region=here",
        },
    )
    job = build_kafka_stream_defs(kafka=group, assets=[orders], name="bearer").resolve_job_def(
        "bearer"
    )
    job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:sensor"})
    assert values == [b"a"]
    assert set(given) == {"region=here"}

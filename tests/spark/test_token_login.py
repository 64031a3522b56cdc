"""Spark logs in to Kafka by tokens of an issuer, as the member does, and shows no secret."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.reading.ranges import read_ranges
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.issuer import KafkaWithTokens

pytestmark = [pytest.mark.spark, pytest.mark.broker]

SECRET = 'swordfish "of the" issuer'  # noqa: S105 - what must not be shown


@pytest.mark.parametrize("session", ["connect"], indirect=True)
def test_range_is_read_with_an_oidc_token(
    session: SparkSession, kafka_with_tokens: KafkaWithTokens
) -> None:
    kafka, name = kafka_with_tokens, unique_name("bearer")
    kafka.create_topic(name)
    producer = Producer(kafka.client_config())
    for number in range(5):
        producer.produce(name, str(number))
    assert producer.flush(30) == 0
    kafka.allow(name, "READ", topic=name)
    kafka.issuer.clients[name] = SECRET
    member = {
        **kafka.bearer_config(),
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": name,
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.token.endpoint.url": kafka.issuer.url,
        "https.ca.location": str(kafka.certificate),
    }
    frame = read_ranges(session, [OffsetRange(name, 0, 1, 4)], member)
    assert sorted(int(row["value"]) for row in frame.select("value").collect()) == [1, 2, 3]
    assert kafka.issuer.issued[-1] == name
    assert "swordfish" not in frame._explain_string(extended=True)  # type: ignore[operator]  # what `explain` prints

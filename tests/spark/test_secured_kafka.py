"""Reads of a Kafka with TLS, logins and ACLs: the rights they need, and the hidden secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import read_ranges
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.client.test_security import KEY_PASSWORD, pem_settings
from tests.spark.lakes import connected
from tests.spark.producing import produce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from dagster_rebalance.testing.secured import SecuredKafka
    from dagster_rebalance.testing.spark_connect import SparkConnectServer
    from tests.issuer import KafkaWithTokens

pytestmark = [pytest.mark.spark, pytest.mark.broker]

SECRET = "swordfish-of-the-spark-user"  # noqa: S105 - of the test
PASSWORD = f'{SECRET} "quoted" \\ and; ,{{0}} %s'


@pytest.fixture
def session(spark_connect_server: SparkConnectServer) -> Iterator[SparkSession]:
    """Return a session on a server whose log can be read."""
    with connected(spark_connect_server) as on_server:
        yield on_server


def test_read_needs_only_the_read_right_on_the_topic(
    session: SparkSession,
    spark_connect_server: SparkConnectServer,
    secured_kafka: SecuredKafka,
    tmp_path: Path,
) -> None:
    topic, user = unique_name("..secured"), unique_name("spark")
    secured_kafka.create_topic(topic)
    produce(secured_kafka.client_config(), topic, map(str, range(10)))
    secured_kafka.add_user(user, PASSWORD)
    secured_kafka.allow(user, "READ", topic=topic)
    config, range_ = secured_kafka.client_config(user), OffsetRange(topic, 0, 2, 7)
    kept = read_ranges(session, [range_], config, clients="a group without any right")
    assert kept.count() == 5
    frame = read_ranges(session, [range_], config)
    assert sorted(int(row["value"]) for row in frame.select("value").collect()) == [2, 3, 4, 5, 6]
    output = tmp_path / "a" / "out"
    write_parquet_by_range(frame, str(output))
    (written,) = output.glob("topic_partition=*/2-7.parquet")
    assert written.parent.name == f"topic_partition={topic}-p0"
    plan = frame._explain_string(extended=True)  # type: ignore[operator]  # what `explain` prints
    assert "kafka" in plan.lower()
    assert SECRET not in plan
    assert SECRET not in spark_connect_server.process.log.read_text()


def test_read_with_a_certificate_and_an_encrypted_key(
    session: SparkSession,
    spark_connect_server: SparkConnectServer,
    secured_kafka: SecuredKafka,
    tmp_path: Path,
) -> None:
    topic, user = unique_name("certified"), unique_name("spark")
    secured_kafka.create_topic(topic)
    produce(secured_kafka.client_config(), topic, ["a value"])
    secured_kafka.add_certificate(user)
    secured_kafka.allow(user, "READ", topic=topic)
    settings = pem_settings(secured_kafka.client_config(user), tmp_path)
    frame = read_ranges(session, [OffsetRange(topic, 0, 0, 1)], settings)
    for name in ("ssl.certificate.location", "ssl.key.location"):
        Path(settings[name]).unlink()
    assert [row["value"] for row in frame.select("value").collect()] == [b"a value"]
    shown = frame._explain_string(extended=True) + spark_connect_server.process.log.read_text()  # type: ignore[operator]  # what `explain` prints
    assert KEY_PASSWORD not in shown
    assert "PRIVATE KEY" not in shown


def test_refused_password_is_not_shown(
    session: SparkSession, spark_connect_server: SparkConnectServer, secured_kafka: SecuredKafka
) -> None:
    wrong = {**secured_kafka.client_config(), "sasl.password": PASSWORD}
    frame = read_ranges(session, [OffsetRange("orders", 0, 0, 5)], wrong)
    with pytest.raises(Exception, match=re.compile("authentication", re.IGNORECASE)) as refused:
        frame.collect()
    assert SECRET not in f"{refused.getrepr()}"
    assert SECRET not in spark_connect_server.process.log.read_text()


def test_range_is_read_with_an_oidc_token(
    session: SparkSession, secured_kafka: KafkaWithTokens
) -> None:
    kafka, name = secured_kafka, unique_name("bearer")
    secret = 'swordfish "of the" issuer'  # noqa: S105 - of the test
    kafka.create_topic(name)
    produce(kafka.client_config(), name, map(str, range(5)))
    kafka.allow(name, "READ", topic=name)
    kafka.issuer.clients[name] = secret
    member = {
        **kafka.bearer_config(),
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": name,
        "sasl.oauthbearer.client.secret": secret,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.token.endpoint.url": kafka.issuer.url,
        "https.ca.location": str(kafka.certificate),
    }
    frame = read_ranges(session, [OffsetRange(name, 0, 1, 4)], member)
    assert sorted(int(row["value"]) for row in frame.select("value").collect()) == [1, 2, 3]
    assert kafka.issuer.issued[-1] == name
    assert "swordfish" not in frame._explain_string(extended=True)  # type: ignore[operator]  # what `explain` prints

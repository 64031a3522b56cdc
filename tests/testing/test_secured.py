"""The secured Kafka enforces passwords and ACLs."""

from __future__ import annotations

import re
import stat
from contextlib import nullcontext
from textwrap import dedent
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from dagster_rebalance.testing import fixtures
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.secured import SecuredKafka
from tests.docs.blocks import run_block

pytestmark = pytest.mark.broker

plain_kafka = fixtures.secured_kafka
"""The fixture that users have; tests/conftest.py replaces its name with a subclass."""


def test_user_reads_only_allowed_topics(plain_kafka: SecuredKafka) -> None:
    allowed, hidden, user = unique_name("allowed"), unique_name("hidden"), unique_name("user")
    for topic in (allowed, hidden):
        plain_kafka.create_topic(topic)
    producer = Producer(plain_kafka.client_config())
    producer.produce(allowed, b"value")
    assert producer.flush(120) == 0
    plain_kafka.add_user(user, 'quotes " and \\ and a comma,')
    plain_kafka.allow(user, "READ", topic=allowed, group=user)

    consumer = Consumer({**plain_kafka.client_config(user), "group.id": user, "log_level": 0})
    assert set(consumer.list_topics(timeout=120).topics) == {allowed}
    consumer.assign([TopicPartition(allowed, 0, 0)])
    message = consumer.poll(30)
    assert message is not None
    assert message.value() == b"value"
    with pytest.raises(KafkaException) as refused:
        consumer.commit(offsets=[TopicPartition(hidden, 0, 1)], asynchronous=False)
    assert refused.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer.close()


def test_secured_kafka_has_no_passwords_in_repr_and_logs(plain_kafka: SecuredKafka) -> None:
    plain_kafka.add_user(unique_name("user"), "a-password-of-a-test")
    shown = repr(plain_kafka) + "".join(log.read_text() for log in plain_kafka.logs)
    for password in (plain_kafka.client_config()["sasl.password"], "a-password-of-a-test"):
        assert password not in shown


def test_secured_kafka_has_private_files(plain_kafka: SecuredKafka) -> None:
    assert stat.S_IMODE(plain_kafka.certificate.parent.stat().st_mode) == stat.S_IRWXU


def test_the_example_of_the_docstring_works(plain_kafka: SecuredKafka) -> None:
    """The example uses the Kafka of these tests, whose nodes must restart with their own key."""
    assert type(plain_kafka) is SecuredKafka
    store = plain_kafka.certificate.with_name("keystore.p12")
    before = store.read_bytes()
    names: dict[str, Any] = {"SecuredKafka": lambda: nullcontext(plain_kafka)}
    (block,) = re.findall(r"```python\n(.*?)\n +```", str(SecuredKafka.__doc__), re.DOTALL)
    run_block("dagster_rebalance/testing/secured.py", dedent(block), names)
    for config in ("client_config", "mutual_tls"):
        consumer = Consumer({**names[config], "log_level": 0})
        assert set(consumer.list_topics(timeout=120).topics) == {"orders"}
        consumer.close()
    assert store.read_bytes() == before

"""Logins by tokens (OAUTHBEARER) on a real Kafka: from an issuer (OIDC), or a user's function."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.issuer import KafkaWithTokens

pytestmark = pytest.mark.broker

RECORDS = 5
SECRET = "swordfish-of-the-issuer"  # noqa: S105 - a secret of the test
NOT_RENEWED = {
    "no token": "Failed to acquire SASL OAUTHBEARER token: no answer",
    # Kafka takes no second login of a connection within a second, and a token that is about to
    # expire is good for less.
    "too soon": (
        "SASL OAUTHBEARER mechanism handshake failed: Broker: Request not valid in current SASL "
        "state: broker's supported mechanisms: "
    ),
    # The request that waits for that connection.
    "too soon, for a request": "FindCoordinator response error: Local: Authentication failure",
}


@dataclass(frozen=True)
class Login:
    """A user with the rights of a member, and a topic of the same name as the group."""

    kafka: KafkaWithTokens
    name: str

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.name, 0)

    def config(self, how: str) -> dict[str, Any]:
        if how == "function":
            return {"oauth_cb": self.token}
        return {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": self.name,
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.token.endpoint.url": self.kafka.issuer.url,
            "https.ca.location": str(self.kafka.certificate),
        }

    def token(self, _config: str) -> tuple[str, float]:
        return self.kafka.issuer.token(self.name), time.time() + self.kafka.issuer.lifetime_s

    def consumer(self, config: Mapping[str, Any], *, fetch: bool = True) -> RebalanceAwareConsumer:
        base = {"group.id": self.name, "auto.offset.reset": "earliest", "log_level": 0}
        return RebalanceAwareConsumer({**self.kafka.bearer_config(), **base, **config}, fetch=fetch)


@pytest.fixture
def login(secured_kafka: KafkaWithTokens) -> Login:
    made = Login(secured_kafka, unique_name("bearer"))
    made.kafka.create_topic(made.name)
    producer = Producer(made.kafka.client_config())
    for number in range(RECORDS):
        producer.produce(made.name, str(number))
    assert producer.flush(120) == 0
    made.kafka.allow(made.name, "READ", topic=made.name, group=made.name)
    made.kafka.issuer.clients[made.name] = SECRET
    return made


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
@pytest.mark.parametrize("how", ["issuer", "function"])
def test_consumer_logs_in_with_a_token(login: Login, how: str, protocol: str) -> None:
    with login.consumer({**login.config(how), "group.protocol": protocol}) as consumer:
        consumer.subscribe([login.name])
        consumer.check()
        read = 0

        def has_all() -> bool:
            nonlocal read
            read += len(consumer.poll(0.1))
            return read == RECORDS

        wait_until(has_all, timeout_s=120, what="all records", interval_s=0)
        consumer.commit_sync({login.partition: OffsetAndMetadata(RECORDS)})
        assert consumer.committed([login.partition])[login.partition] == OffsetAndMetadata(RECORDS)


def test_check_with_a_wrong_secret_reports_the_issuers_error(login: Login) -> None:
    login.kafka.issuer.clients[login.name] = "another one"
    with login.consumer(login.config("issuer"), fetch=False) as consumer:
        consumer.subscribe([login.name])
        with pytest.raises(BrokerError, match=r"invalid_client.*the source of the token") as told:
            consumer.check()
    assert not told.value.retriable
    assert SECRET not in str(told.value)


def test_consumer_whose_function_fails_raises_at_creation(login: Login) -> None:
    """With an `error_cb`, the client's own error cannot even be caught."""

    def token(_config: str) -> tuple[str, float]:
        msg = "no role to assume"
        raise PermissionError(msg)

    with pytest.raises(BrokerError, match=r"'oauth_cb' raised PermissionError: no role"):
        login.consumer({"oauth_cb": token})


def test_member_survives_an_unavailable_issuer(login: Login) -> None:
    failed = 0
    is_away = False

    def token(config: str) -> tuple[str, float]:
        nonlocal failed
        if is_away:
            failed += 1
            msg = "the issuer is away"
            raise TimeoutError(msg)
        return login.token(config)[0], time.time() + 20

    before = login.kafka.issuer.lifetime_s
    login.kafka.issuer.lifetime_s = 21  # the client must not hold an expired one for valid
    try:
        with login.consumer({"oauth_cb": token}, fetch=False) as consumer:
            consumer.subscribe([login.name])
            wait_until(
                lambda: [consumer.poll(0.1), consumer.assignment()][1],
                timeout_s=120,
                what="the partition",
                interval_s=0,
            )
            member_id, is_away = consumer.member_id, True
            wait_until(
                lambda: [consumer.poll(0.1), failed][1],
                timeout_s=120,
                what="a token that is not given",
                interval_s=0,
            )
            is_away, issued = False, len(login.kafka.issuer.issued)
            wait_until(
                lambda: [consumer.poll(0.1), len(login.kafka.issuer.issued) > issued][1],
                timeout_s=120,
                what="a token that is given again",
                interval_s=0,
            )
            consumer.commit_sync({login.partition: OffsetAndMetadata(1)})
            assert consumer.member_id == member_id
            assert consumer.get_lost_partitions() == frozenset()
    finally:
        login.kafka.issuer.lifetime_s = before


@pytest.mark.parametrize("words", NOT_RENEWED.values(), ids=NOT_RENEWED)
def test_member_survives_a_failed_renewal_of_its_login(login: Login, words: str) -> None:
    not_renewed = KafkaError(KafkaError._AUTHENTICATION, words)
    with login.consumer(login.config("issuer"), fetch=False) as consumer:
        session = consumer._state.member._session  # type: ignore[attr-defined]
        session._on_error(not_renewed)
        with pytest.raises(BrokerError, match=words[:30]):
            consumer.poll(0)
        consumer.subscribe([login.name])
        wait_until(
            lambda: [consumer.poll(0.1), consumer.assignment()][1],
            timeout_s=120,
            what="the partition",
            interval_s=0,
        )
        session._on_error(not_renewed)
        consumer.poll(0)

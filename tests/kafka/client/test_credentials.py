"""User and password from a function: when it is called, and how a client gets a new login."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.kafka.client import credentials as under_test
from dagster_rebalance.kafka.client.credentials import ASK_EVERY_S, Credentials, Login
from dagster_rebalance.kafka.client.settings import validated, with_login
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.testing.secured import SecuredKafka

BASE = {
    "bootstrap.servers": "kafka:9092",
    "group.id": "etl",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
}
SECRET = "swordfish"  # noqa: S105 - a secret of the test


class Vault:
    """The source of the user's function, and a client that records its logins."""

    def __init__(self) -> None:
        self.now = 0.0
        self.login: Any = ("etl", f"{SECRET} 1")
        self.asked = 0
        self.heard: list[tuple[str, str]] = []
        self.later: list[Callable[[], None]] = []
        self.credentials = Credentials(self.ask, lambda: self.now, self.later.append)

    def ask(self) -> tuple[str, str]:
        self.asked += 1
        if isinstance(self.login, Exception):
            raise self.login
        found: tuple[str, str] = self.login
        return found

    def set_sasl_credentials(self, username: str, password: str, /) -> None:
        self.heard.append((username, password))


@pytest.fixture
def vault() -> Vault:
    return Vault()


def test_login_passes_a_new_password_to_its_client_once(vault: Vault) -> None:
    """The function runs in the background, so a slow one delays no client."""
    login = Login(vault.credentials, vault)
    login.renew()
    vault.login = ("etl", f"{SECRET} 2")
    vault.now = ASK_EVERY_S
    login.renew()
    login.renew()
    assert [len(vault.heard), len(vault.later), vault.asked] == [1, 1, 1]
    vault.later.pop()()
    login.renew()
    login.renew()
    assert vault.heard == [("etl", f"{SECRET} 1"), ("etl", f"{SECRET} 2")]


def test_credentials_wait_for_a_silent_function_and_warn(
    vault: Vault, caplog: pytest.LogCaptureFixture
) -> None:
    login = Login(vault.credentials, vault)
    login.renew()
    for number in range(1, 5):
        vault.now = number * ASK_EVERY_S
        login.renew()
    assert len(vault.later) == 1
    assert caplog.text.count("has not answered") == 3
    vault.later.pop()()
    vault.now += ASK_EVERY_S
    login.renew()
    assert len(vault.later) == 1, "it has answered, and is called again"


def test_login_without_a_function_leaves_the_client_unchanged(vault: Vault) -> None:
    Login(None, vault).renew()
    assert vault.heard == []


def test_credentials_keep_the_last_login_if_the_function_fails(
    vault: Vault, caplog: pytest.LogCaptureFixture
) -> None:
    vault.credentials.current()
    for broken in (FileNotFoundError("/etc/kafka/password"), (SECRET,)):
        vault.login, vault.now = broken, vault.now + ASK_EVERY_S
        with caplog.at_level(logging.WARNING):
            vault.credentials.current()
            vault.later.pop()()
        assert vault.credentials.current() == ("etl", f"{SECRET} 1")
        assert "the last user and password stay in use" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("login", "error", "says"),
    [
        (PermissionError("no right"), BrokerError, "'credentials_cb' raised PermissionError: no"),
        (SECRET, ConfigurationError, "must return a user and a password, as two texts"),
        (("etl", None), ConfigurationError, "must return a user and a password"),
        (("etl", ""), ConfigurationError, "must return a user and a password"),
    ],
)
def test_credentials_report_a_wrong_result_without_the_secret(
    vault: Vault, login: object, error: type[Exception], says: str
) -> None:
    vault.login = login
    with pytest.raises(error, match=re.escape(says)) as told:
        vault.credentials.current()
    assert SECRET not in str(told.value)


def test_settings_give_each_client_the_login_and_not_the_function(vault: Vault) -> None:
    settings = validated({**BASE, "credentials_cb": vault.ask}, hold_limit_s=10)
    for config in (settings.member(), settings.fetcher(), settings.connection()):
        assert (config["sasl.username"], config["sasl.password"]) == ("etl", f"{SECRET} 1")
        assert "credentials_cb" not in config
    assert SECRET not in repr(settings)
    assert with_login({**BASE, "credentials_cb": vault.ask})["sasl.password"] == f"{SECRET} 1"
    assert with_login(BASE) == BASE


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sasl.password": SECRET}, "'sasl.password' is also set: remove one"),
        ({"sasl.username": "etl"}, "'sasl.username' is also set: remove one"),
        ({"security.protocol": "SSL"}, "'security.protocol' is SSL, which has no login"),
        ({"credentials_cb": "etl"}, "'credentials_cb' must be a function"),
    ],
)
def test_settings_refuse_a_second_login_beside_the_function(
    vault: Vault, more: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)) as told:
        validated({**BASE, "credentials_cb": vault.ask, **more}, hold_limit_s=10)
    assert SECRET not in str(told.value)


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_member_logs_in_with_a_new_password_after_a_broker_restart(
    secured_kafka: SecuredKafka, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "ASK_EVERY_S", 0.0)
    name, vault = unique_name("rotated"), Vault()
    secured_kafka.create_topic(name)
    producer = Producer(secured_kafka.client_config())
    producer.produce(name, "before")
    assert producer.flush(120) == 0
    secured_kafka.add_user(name, SECRET)
    secured_kafka.allow(name, "READ", topic=name, group=name)
    vault.login = (name, SECRET)
    login = ("sasl.username", "sasl.password")
    config: dict[str, Any] = {
        **{
            key: text for key, text in secured_kafka.client_config(name).items() if key not in login
        },
        "group.id": name,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "credentials_cb": vault.ask,
        "log_level": 0,
    }
    if protocol == "classic":
        config["session.timeout.ms"] = 60000
    reader = RangeReader(validated(config, hold_limit_s=10))
    with RebalanceAwareConsumer(config) as consumer:
        consumer.subscribe([name])

        def reads() -> list[Any]:
            try:
                return consumer.poll(0.1)
            except BrokerError as error:
                if not error.retriable:
                    raise
                return []

        wait_until(reads, timeout_s=120, what="the first record", interval_s=0)
        assert len(list(reader.read([OffsetRange(name, 0, 0, 1)]))) == 1
        member_id = consumer.member_id
        secured_kafka.add_user(name, f"{SECRET} anew")
        vault.login, asked = (name, f"{SECRET} anew"), vault.asked
        wait_until(
            lambda: [reads(), vault.asked > asked + 5][1],
            timeout_s=120,
            what="the function to be asked again",
            interval_s=0,
        )
        secured_kafka.restart()
        producer = Producer(secured_kafka.client_config())
        producer.produce(name, "after")
        assert producer.flush(120) == 0
        wait_until(reads, timeout_s=120, what="the record after the change", interval_s=0)
        partition = TopicPartition(name, 0)
        consumer.commit_sync({partition: OffsetAndMetadata(2)})
        assert consumer.end_offsets([partition]) == {partition: 2}
        assert len(list(reader.read([OffsetRange(name, 0, 0, 2)]))) == 2
        assert consumer.member_id == member_id
        assert consumer.get_lost_partitions() == frozenset()
    reader.close()

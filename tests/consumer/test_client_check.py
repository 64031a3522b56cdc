"""A client that a revoke cannot be held with is refused before the member joins; no broker is needed to know."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import confluent_kafka
import pytest

from dagster_rebalance.consumer import held_revoke
from dagster_rebalance.consumer.client_check import NEWEST_TRIED, OLDEST, check_client, holds_on_the_mock
from dagster_rebalance.consumer.membership import Member
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.core.errors import ConfigurationError
from tests.consumer.test_held_revoke import CarelessConsumer

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, hold_limit_s=10)


class ForgetfulConsumer(confluent_kafka.Consumer):
    """A client for which a refused unassign does not count as one: it unassigns by itself after the callback."""

    def incremental_unassign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:  # noqa: ARG002 - the form of the client's
        """Refuse without telling the client underneath."""
        raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._INVALID_ARG))


class MuteConsumer(confluent_kafka.Consumer):
    """A client whose mock cluster assigns nothing."""

    def subscribe(self, topics: list[str], **callbacks: object) -> None:  # type: ignore[override]
        """Join nothing."""

    def poll(self, timeout: float = -1) -> None:
        """Nothing happens, at once."""


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """The answer is kept for the process."""
    check_client.cache_clear()
    yield
    check_client.cache_clear()


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The installed client calls itself newer than what was tried."""
    monkeypatch.setattr(confluent_kafka, "__version__", "2.99.1")
    return monkeypatch


def test_the_installed_client_holds_a_revoke_on_the_mock() -> None:
    """The whole mechanism in this process: hold, partitions kept, late unassign."""
    assert holds_on_the_mock() is True


def test_the_installed_client_is_one_that_was_tried() -> None:
    """So a lock that brings a newer one asks for `make compat` and for a new bound."""
    for version in held_revoke.installed():
        assert OLDEST <= tuple(map(int, version.split(".")[:2])) <= NEWEST_TRIED


def test_an_older_client_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency can be overridden; the message says what is there and what is needed."""
    monkeypatch.setattr(confluent_kafka, "__version__", "2.9.0")
    with pytest.raises(ConfigurationError, match=r"confluent-kafka 2\.9\.0 with librdkafka .* too old.* 2\.12 or newer"):
        Member(SETTINGS)


def test_an_older_librdkafka_under_a_newer_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client built from source takes the librdkafka of the system."""
    monkeypatch.setattr(confluent_kafka, "libversion", lambda: ("2.8.0", 0x020800FF))
    with pytest.raises(ConfigurationError, match=r"librdkafka 2\.8\.0 is too old"):
        Member(SETTINGS)


@pytest.mark.parametrize("client", [CarelessConsumer, ForgetfulConsumer])
def test_a_newer_client_that_gives_partitions_away_is_refused_at_the_start(
    newer: pytest.MonkeyPatch, client: type[confluent_kafka.Consumer]
) -> None:
    """At the first revoke it would be too late: it would give them away in the middle of a drain."""
    newer.setattr(confluent_kafka, "Consumer", client)
    with pytest.raises(ConfigurationError, match=r"2\.99\.1 .* does not hold a revoke.*from 2\.12 to 2\.16"):
        Member(SETTINGS)


@pytest.mark.usefixtures("newer")
def test_a_newer_client_that_holds_is_let_in_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Once in a process: members come and go."""
    with caplog.at_level(logging.INFO, "dagster_rebalance.consumer.client_check"):
        check_client()
        check_client()
    (told,) = caplog.messages
    assert "confluent-kafka 2.99.1" in told
    assert "holds a revoke" in told


def test_a_newer_client_that_cannot_be_tried_is_let_in_with_a_warning(newer: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is refused for what was not seen."""
    newer.setattr(confluent_kafka, "Consumer", MuteConsumer)
    check_client()
    assert "could not be tried" in caplog.text

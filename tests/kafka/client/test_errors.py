"""Errors of the client as errors of this package, with advice."""

from __future__ import annotations

import math
import re
import traceback

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.errors import (
    Operation,
    broker_error,
    commit_error,
    configuration_error,
    is_final,
    kafka_error,
    root_cause,
    with_timeout,
)

P0 = TopicPartition("orders", 0)
COMMIT = Operation("commit in group 'etl'", "kafka:9092")


def code(name: str) -> int:
    return int(getattr(KafkaError, name))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("_TRANSPORT", "bootstrap.servers"),
        ("_ALL_BROKERS_DOWN", "bootstrap.servers"),
        ("_RESOLVE", "bootstrap.servers"),
        ("UNKNOWN_TOPIC_OR_PART", "create the topic"),
        ("_AUTHENTICATION", "sasl.password"),
        ("SASL_AUTHENTICATION_FAILED", "sasl.password"),
        ("_SSL", "ssl.ca.location"),
        ("TOPIC_AUTHORIZATION_FAILED", "ACL READ, which includes DESCRIBE, on the topic"),
        ("GROUP_AUTHORIZATION_FAILED", "ACL READ, which includes DESCRIBE, on the group"),
        ("_NOENT", "READ or DESCRIBE on the topic"),
        ("INCONSISTENT_GROUP_PROTOCOL", "another 'group.id'"),
        ("UNSUPPORTED_VERSION", "group_protocol: classic"),
        ("_UNSUPPORTED_FEATURE", "group_protocol: classic"),
        ("OFFSET_OUT_OF_RANGE", "deleted by retention"),
        ("_AUTO_OFFSET_RESET", "seek to an offset that exists"),
        ("OFFSET_METADATA_TOO_LARGE", "4,095 characters"),
        ("_MAX_POLL_EXCEEDED", "raise the hold limit"),
    ],
)
def test_broker_error_ends_with_advice(name: str, advice: str) -> None:
    error = broker_error(KafkaError(code(name), "no such thing"), COMMIT, [P0])
    assert type(error) is BrokerError
    with pytest.raises(
        BrokerError, match=f"commit in group 'etl' failed for orders-0.*no such thing.*{advice}"
    ):
        raise error
    assert error.partitions == {P0: "no such thing"}


@pytest.mark.parametrize(
    "name",
    [
        "_TIMED_OUT_QUEUE",
        "_TIMED_OUT",
        "_TRANSPORT",
        "_WAIT_CACHE",
        "NOT_COORDINATOR",
        "FENCED_LEADER_EPOCH",
        "UNKNOWN_LEADER_EPOCH",
        "REPLICA_NOT_AVAILABLE",
        "KAFKA_STORAGE_ERROR",
        "BROKER_NOT_AVAILABLE",
        "NOT_ENOUGH_REPLICAS",
        "UNSTABLE_OFFSET_COMMIT",
        "THROTTLING_QUOTA_EXCEEDED",
        "UNKNOWN_TOPIC_ID",
        "INCONSISTENT_TOPIC_ID",
    ],
)
def test_broker_error_is_retriable_for_errors_of_a_broker_restart(name: str) -> None:
    """An error that is not retriable makes a member leave its group."""
    assert broker_error(KafkaError(code(name)), COMMIT, [P0]).retriable


@pytest.mark.parametrize(
    ("name", "retriable"),
    [("UNKNOWN_TOPIC_OR_PART", True), ("TOPIC_AUTHORIZATION_FAILED", False), ("_NOENT", False)],
)
def test_broker_error_names_the_topics_that_are_refused(name: str, *, retriable: bool) -> None:
    """A member stops their partitions only, and a reader does not wait for its timeout."""
    error = broker_error(KafkaError(code(name)), COMMIT, [P0])
    assert (set(error.topics), error.retriable) == ({"orders"}, retriable)


def test_broker_error_names_the_brokers_only_if_unreachable() -> None:
    assert "at kafka:9092" in str(broker_error(KafkaError(code("_TRANSPORT")), COMMIT))
    assert "kafka:9092" not in str(
        broker_error(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), COMMIT)
    )


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("API version not supported", "group_protocol: classic"),
        ("Group authorization failed", "ACL READ, which includes DESCRIBE, on the group"),
        ("Topic authorization failed", "ACL READ, which includes DESCRIBE, on the topic"),
    ],
)
def test_broker_error_of_a_fatal_heartbeat_has_the_advice_of_its_text(
    text: str, advice: str
) -> None:
    """Seen with Kafka 4.1, without the protocol and without READ."""
    words = f"Fatal error: Broker: {text}: ConsumerGroupHeartbeat fatal error: Broker: {text}"
    error = KafkaError(code("_FATAL"), words)
    assert is_final(error)
    assert advice in str(broker_error(error, COMMIT))


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ("GROUP_MAX_SIZE_REACHED", "the group is full"),
        ("GROUP_ID_NOT_FOUND", r"use another .group\.id"),
        ("INVALID_REQUEST", "its log has the reason"),
        ("UNSUPPORTED_ASSIGNOR", r"set 'group\.remote\.assignor'"),
        ("UNSUPPORTED_VERSION", "group_protocol: classic"),
    ],
)
def test_broker_error_of_a_fatal_heartbeat_has_the_advice_of_its_reason(
    refusal: str, advice: str
) -> None:
    """The error callback has the code of the reason, a poll only its text."""
    words = f"ConsumerGroupHeartbeat fatal error: {KafkaError(code(refusal)).str()}"
    for error in (KafkaError(code("_FATAL"), words), KafkaError(code(refusal), words, fatal=True)):
        assert is_final(error)
        assert re.search(advice, str(broker_error(error, COMMIT)))


def test_root_cause_of_a_timeout_prefers_refusals_to_failed_connections() -> None:
    refused, cut = (
        KafkaError(code("_AUTHENTICATION"), "wrong password"),
        KafkaError(code("_TRANSPORT"), "connection refused"),
    )
    down, over = KafkaError(code("_ALL_BROKERS_DOWN")), KafkaError(code("_TIMED_OUT"))
    assert root_cause([refused, cut, down], over) is refused
    assert root_cause([cut, down], over) is cut
    assert root_cause([down], over) is over
    unknown = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert root_cause([refused], unknown) is unknown


@pytest.mark.parametrize(
    ("error", "cause", "limits"),
    [
        ("_TIMED_OUT", "_AUTHENTICATION", [1.0]),
        ("_TIMED_OUT", "_TIMED_OUT", [1.0, 9.0]),
        ("_TRANSPORT", "GROUP_AUTHORIZATION_FAILED", [1.0]),
        ("TOPIC_AUTHORIZATION_FAILED", "_TIMED_OUT", [1.0]),
    ],
)
def test_with_timeout_stops_early_if_the_client_is_refused(
    error: str, cause: str, limits: list[float]
) -> None:
    asked: list[float] = []

    def ask(limit_s: float) -> None:
        asked.append(limit_s)
        raise KafkaException(KafkaError(code(error)))

    with pytest.raises(KafkaException):
        with_timeout(ask, 10.0, lambda _: KafkaError(code(cause)))
    assert asked == limits


def test_with_timeout_keeps_a_short_limit() -> None:
    assert with_timeout(lambda limit_s: limit_s, 0.5, lambda error: error) == 0.5


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10])
def test_with_timeout_caps_limits_beyond_the_client(timeout_s: float) -> None:
    """The client ignores timeouts beyond 32 bits of milliseconds, and Python's own wait raises."""

    def ask(limit_s: float) -> float:
        if limit_s == 1.0:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return limit_s

    assert 1e6 < with_timeout(ask, timeout_s, lambda error: error) < 2**31 / 1000


@pytest.mark.parametrize("name", ["UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH", "FENCED_INSTANCE_ID"])
@pytest.mark.parametrize("holding", [True, False])
def test_commit_error_of_an_unknown_member_is_a_loss(name: str, holding: bool) -> None:  # noqa: FBT001
    assert isinstance(
        commit_error(KafkaError(code(name)), COMMIT, [P0], holding=holding), PartitionLostError
    )


@pytest.mark.parametrize("name", ["ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH"])
def test_commit_error_of_a_stale_generation_is_a_loss_only_in_a_hold(name: str) -> None:
    """Outside a hold the client may not have received the new generation yet."""
    assert isinstance(
        commit_error(KafkaError(code(name)), COMMIT, [P0], holding=True), PartitionLostError
    )
    passing = commit_error(KafkaError(code(name)), COMMIT, [P0], holding=False)
    assert isinstance(passing, RebalanceInProgressError)
    assert "commit again" in str(passing)


def test_commit_error_of_a_rebalance_in_progress_is_retriable() -> None:
    error = commit_error(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), COMMIT, [P0], holding=False)
    assert isinstance(error, RebalanceInProgressError)
    assert error.retriable
    assert "still yours" in str(error)


@pytest.mark.parametrize(
    ("name", "retriable"),
    [
        ("_TIMED_OUT", True),
        ("NOT_COORDINATOR", True),
        ("OFFSET_METADATA_TOO_LARGE", False),
        ("GROUP_AUTHORIZATION_FAILED", False),
    ],
)
def test_commit_error_is_retriable_only_for_transient_errors(name: str, retriable: bool) -> None:  # noqa: FBT001
    error = commit_error(KafkaError(code(name)), COMMIT, [P0], holding=True)
    assert type(error) is BrokerError
    assert error.retriable is retriable


def test_configuration_error_keeps_the_text_of_the_client() -> None:
    error = configuration_error(
        KafkaException(KafkaError(code("_INVALID_ARG"), 'No such configuration property: "nope"'))
    )
    assert isinstance(error, ConfigurationError)
    assert '"nope"' in str(error)
    assert "group.id must be set" in str(configuration_error(ValueError("group.id must be set")))


@pytest.mark.parametrize(
    "setting",
    [
        {"group.protocol": "hunter2"},
        {"isolation.level": "hunter2"},
        {"debug": 'a "hunter2" for configuration property'},
        {"session.timeout.ms": "1000000007"},
        {"sasl.mechanism": "hunter2", "security.protocol": "SASL_SSL"},
    ],
)
def test_configuration_error_hides_the_value_of_the_setting(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="refuses its settings") as refused:
        create_client(Consumer, {"bootstrap.servers": "a:1", "group.id": "g", **setting})
    (value, *_) = setting.values()
    shown = "".join(traceback.format_exception(refused.value))
    assert value not in shown
    assert "hunter2" not in shown


def test_kafka_error_keeps_the_text_of_an_exception_without_an_error() -> None:
    assert kafka_error(KafkaException("something")).str() == "something"


def test_errors_escape_control_characters_of_a_broker() -> None:
    error = KafkaError(KafkaError.UNKNOWN, "\x1b[2Jgone")
    operation = Operation("reading", "broker:9092")
    assert r"\x1b[2Jgone" in operation.explain(error)
    found = broker_error(error, operation, [TopicPartition("orders", 0)])
    assert list(found.partitions.values()) == [r"\x1b[2Jgone"]

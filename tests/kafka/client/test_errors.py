"""What a person is told to do about each error of the client.

The class of each error says what has become of the ownership.
"""

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
    """A code of the client's by its name."""
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
def test_a_message_says_what_to_do(name: str, advice: str) -> None:
    """The reader has the message only."""
    error = broker_error(KafkaError(code(name), "what happened"), COMMIT, [P0])
    assert type(error) is BrokerError
    with pytest.raises(
        BrokerError, match=f"commit in group 'etl' failed for orders-0.*what happened.*{advice}"
    ):
        raise error
    assert error.partitions == {P0: "what happened"}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "_TIMED_OUT_QUEUE",
            "_TIMED_OUT",
            "_TRANSPORT",
            "_WAIT_CACHE",
            "NOT_COORDINATOR",
            "FENCED_LEADER_EPOCH",
            "UNKNOWN_LEADER_EPOCH",
        ),
        *(
            "REPLICA_NOT_AVAILABLE",
            "KAFKA_STORAGE_ERROR",
            "BROKER_NOT_AVAILABLE",
            "NOT_ENOUGH_REPLICAS",
            "UNSTABLE_OFFSET_COMMIT",
        ),
        *("THROTTLING_QUOTA_EXCEEDED", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID"),
    ],
)
def test_what_passes_by_itself_ends_no_member(name: str) -> None:
    """They come while brokers are restarted.

    One that is not retriable makes a member leave its group.
    """
    assert broker_error(KafkaError(code(name)), COMMIT, [P0]).retriable


def test_the_brokers_are_named_when_they_cannot_be_reached() -> None:
    """The address is the first thing to look at, and of no interest otherwise."""
    assert "at kafka:9092" in str(broker_error(KafkaError(code("_TRANSPORT")), COMMIT))
    assert "kafka:9092" not in str(
        broker_error(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), COMMIT)
    )


def test_a_fatal_heartbeat_of_an_old_broker_names_the_setting() -> None:
    """Under the code of fatal errors, librdkafka tells the reason in the text only.

    This was seen with Kafka 4.1 without the protocol.
    """
    text = (
        "Fatal error: Broker: API version not supported: "
        "ConsumerGroupHeartbeat fatal error: Broker: API version not supported"
    )
    error = KafkaError(code("_FATAL"), text)
    assert is_final(error)
    assert "group_protocol: classic" in str(broker_error(error, COMMIT))


@pytest.mark.parametrize("resource", ["group", "topic"])
def test_a_fatal_heartbeat_without_a_right_names_the_acl(resource: str) -> None:
    """Likewise (seen with Kafka 4.1 where the principal may describe the group and not read it)."""
    text = (
        f"Fatal error: Broker: {resource.title()} authorization failed: "
        "ConsumerGroupHeartbeat fatal error: Broker: ..."
    )
    assert f"ACL READ, which includes DESCRIBE, on the {resource}" in str(
        broker_error(KafkaError(code("_FATAL"), text), COMMIT)
    )


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ("GROUP_MAX_SIZE_REACHED", "the group is full"),
        ("GROUP_ID_NOT_FOUND", r"use another .group\.id"),
        ("INVALID_REQUEST", "its log says why"),
        ("UNSUPPORTED_ASSIGNOR", r"set 'group\.remote\.assignor'"),
        ("UNSUPPORTED_VERSION", "group_protocol: classic"),
    ],
)
def test_a_fatal_heartbeat_says_what_to_do(refusal: str, advice: str) -> None:
    """In the callback of errors it has the code of the reason, in a poll only its words."""
    words = f"ConsumerGroupHeartbeat fatal error: {KafkaError(code(refusal)).str()}"
    for error in (KafkaError(code("_FATAL"), words), KafkaError(code(refusal), words, fatal=True)):
        assert is_final(error)
        assert re.search(advice, str(broker_error(error, COMMIT)))


def test_the_cause_of_a_time_out_is_what_the_client_was_refused() -> None:
    """It tells so through callbacks only, and the request itself just ends without an answer."""
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
def test_a_refused_client_is_not_waited_for_to_the_end(
    error: str, cause: str, limits: list[float]
) -> None:
    """A wrong password does not get better within the limit, a slow broker may."""
    asked: list[float] = []

    def ask(limit_s: float) -> None:
        asked.append(limit_s)
        raise KafkaException(KafkaError(code(error)))

    with pytest.raises(KafkaException):
        with_timeout(ask, 10.0, lambda _: KafkaError(code(cause)))
    assert asked == limits


def test_a_short_limit_is_not_made_longer() -> None:
    """A poll has given it."""
    assert with_timeout(lambda limit_s: limit_s, 0.5, lambda error: error) == 0.5


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10])
def test_a_limit_that_the_client_cannot_count_is_made_shorter(timeout_s: float) -> None:
    """Beyond 32 bits of milliseconds it gives up at once, and Python's own wait raises."""

    def ask(limit_s: float) -> float:
        if limit_s == 1.0:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return limit_s

    assert 1e6 < with_timeout(ask, timeout_s, lambda error: error) < 2**31 / 1000


@pytest.mark.parametrize("name", ["UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH", "FENCED_INSTANCE_ID"])
@pytest.mark.parametrize("holding", [True, False])
def test_an_unknown_member_has_lost_its_partitions(name: str, holding: bool) -> None:  # noqa: FBT001
    """The broker has given them away, or will."""
    assert isinstance(
        commit_error(KafkaError(code(name)), COMMIT, [P0], holding=holding), PartitionLostError
    )


@pytest.mark.parametrize("name", ["ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH"])
def test_a_stale_generation_is_final_in_a_hold_and_passing_at_other_times(name: str) -> None:
    """Outside a hold, the client may not yet have heard of the new generation.

    In a hold, the client is told of no new generation.
    """
    assert isinstance(
        commit_error(KafkaError(code(name)), COMMIT, [P0], holding=True), PartitionLostError
    )
    passing = commit_error(KafkaError(code(name)), COMMIT, [P0], holding=False)
    assert isinstance(passing, RebalanceInProgressError)
    assert "commit again" in str(passing)


def test_a_rebalance_in_progress_means_still_yours() -> None:
    """KIP-429: poll, then commit again."""
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
def test_a_failed_commit_says_whether_to_try_again(name: str, retriable: bool) -> None:  # noqa: FBT001
    """Without a word about who owns the partition."""
    error = commit_error(KafkaError(code(name)), COMMIT, [P0], holding=True)
    assert type(error) is BrokerError
    assert error.retriable is retriable


def test_refused_settings_keep_the_words_of_the_client() -> None:
    """They name the setting."""
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
def test_the_value_of_a_setting_that_the_client_refuses_is_not_shown(
    setting: dict[str, str],
) -> None:
    """It may be a password that stands in the wrong place."""
    with pytest.raises(ConfigurationError, match="refuses its settings") as refused:
        create_client(Consumer, {"bootstrap.servers": "a:1", "group.id": "g", **setting})
    (value, *_) = setting.values()
    shown = "".join(traceback.format_exception(refused.value))
    assert value not in shown
    assert "hunter2" not in shown


def test_an_exception_without_an_error_is_kept_too() -> None:
    """The client raises such ones here and there."""
    assert kafka_error(KafkaException("something")).str() == "something"


def test_no_text_of_a_broker_reaches_a_terminal_as_it_is() -> None:
    """A broker, or whoever answers in its place, may send escape sequences."""
    error = KafkaError(KafkaError.UNKNOWN, "\x1b[2Jgone")
    operation = Operation("reading", "broker:9092")
    assert r"\x1b[2Jgone" in operation.explain(error)
    found = broker_error(error, operation, [TopicPartition("orders", 0)])
    assert list(found.partitions.values()) == [r"\x1b[2Jgone"]

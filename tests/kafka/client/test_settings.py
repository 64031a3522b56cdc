"""The settings of each client, derived from one config, and the refused settings."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.defaults import TABLE, ClientKind, client_config
from dagster_rebalance.kafka.client.settings import HOLD_MARGIN_S, Settings, validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Mapping

GOOD = {"bootstrap.servers": "broker:9092", "group.id": "etl"}


CLASSIC = {"group.protocol": "classic"}
ON = ("true", "t", "1")
STRATEGY = r"'partition\.assignment\.strategy'"
MORE = r".*docs/upgrading\.md"
INSECURE = r"'security\.protocol' is PLAINTEXT"


def settings(*, hold_limit_s: float = 300.0, **config: object) -> Settings:
    return validated(
        {**GOOD, **{name.replace("_", "."): value for name, value in config.items()}},
        hold_limit_s=hold_limit_s,
    )


REFUSED: list[tuple[Mapping[str, object], str]] = [
    *[({"enable.auto.commit": on}, r"enable\.auto\.commit") for on in (True, *ON, "True", "T", 1)],
    *[({"enable.partition.eof": on}, r"partition\.eof' is on.*current_lag") for on in (True, *ON)],
    ({"auto.offset.reset": "sometimes"}, r"auto\.offset\.reset"),
    ({"max.poll.interval.ms": 300_000}, r"hold_limit_s=300 .*'max\.poll\.interval\.ms'=300000"),
    ({"max.poll.interval.ms": "five minutes"}, r"'max\.poll\.interval\.ms' must be a whole number"),
    *[
        ({name: "6000"}, r"decided by the broker .*'group\.protocol' to 'classic'")
        for name in ("session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy")
    ],
    *[
        ({"partition.assignment.strategy": mixed, **CLASSIC}, f"{STRATEGY} mixes .* bounces {MORE}")
        for mixed in ("range,cooperative-sticky", "cooperative-sticky, range")
    ],
    *[
        ({"partition.assignment.strategy": f"range,{unknown}", **CLASSIC}, f"not have: use{MORE}")
        for unknown in ("sticky", "org.apache.kafka.clients.consumer.RangeAssignor")
    ],
    ({"group.protocol": "share"}, r"'group\.protocol' must be 'consumer' or 'classic'"),
    ({"group.instance.id": "blue"}, r"group\.instance\.id"),
    (
        {"topic.metadata.refresh.interval.ms": "5000", **CLASSIC},
        r"'topic\.metadata\.refresh\.interval\.ms' is set: .*Remove it",
    ),
    ({"ssl.ca.location": "/ca.pem"}, INSECURE),
    ({"sasl.username": "etl", "sasl.password": "x"}, INSECURE),
    (
        {"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"},
        r"certificate\.verification' is off",
    ),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused_by_name(
    more: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        validated({**GOOD, **more}, hold_limit_s=300)


def test_auto_commit_is_off_in_every_client() -> None:
    assert settings().member()["enable.auto.commit"] is False
    assert settings(enable_auto_commit="false").fetcher()["enable.auto.commit"] is False


@pytest.mark.parametrize(
    "name",
    [
        *(
            "https.ca.location",
            "https.ca.pem",
            "enable.sasl.oauthbearer.unsecure.jwt",
            "enable.ssl.certificate.verification",
        ),
        *("sasl.oauthbearer.token.endpoint.url", "ssl.ca.location"),
    ],
)
def test_each_client_gets_the_settings_of_a_login(name: str) -> None:
    given = validated({**GOOD, "security.protocol": "SASL_SSL", name: "as given"}, hold_limit_s=300)
    for each in (given.member(), given.fetcher(), given.connection()):
        assert (each[name], each["security.protocol"]) == ("as given", "SASL_SSL")


def test_each_client_reconnects_within_a_second_by_default() -> None:
    default = settings()
    assert [
        each["reconnect.backoff.max.ms"]
        for each in (default.member(), default.fetcher(), default.connection())
    ] == [1000] * 3
    chosen = settings(reconnect_backoff_ms=5000)
    assert "reconnect.backoff.max.ms" not in chosen.member()
    assert chosen.connection()["reconnect.backoff.ms"] == 5000


def test_readers_check_crcs_by_default() -> None:
    default, chosen = settings(), settings(check_crcs="false")
    for config in (default.fetcher(), default.range_reader()):
        assert config["check.crcs"] is True
    for config in (chosen.fetcher(), chosen.range_reader()):
        assert config["check.crcs"] == "false"


def test_readers_report_the_end_of_a_partition() -> None:
    given = settings(enable_partition_eof="false")
    assert given.fetcher()["enable.partition.eof"] is True
    assert given.range_reader()["enable.partition.eof"] is True


@pytest.mark.parametrize("kind", [ClientKind.LOG_CHECK, ClientKind.OFFSET_READER])
def test_each_consumer_gets_the_users_fetch_sizes(kind: ClientKind) -> None:
    sizes = {
        "receive.message.max.bytes": 10_000,
        "fetch.max.bytes": 4_000,
        "message.max.bytes": 2_000,
    }
    given = validated({**GOOD, **sizes, "log_level": 0}, hold_limit_s=10)
    config = given.connection(kind)
    assert {name: config[name] for name in sizes} == sizes
    create_client(confluent_kafka.Consumer, config).close()


@pytest.mark.parametrize("level", ["READ_COMMITTED", "Read_Committed", "read_committed"])
def test_isolation_level_ignores_case(level: str) -> None:
    assert settings(isolation_level=level).reads_committed
    assert not settings(isolation_level="READ_UNCOMMITTED").reads_committed


@pytest.mark.parametrize("kind", ClientKind)
def test_each_client_gets_exactly_the_defaults_of_the_table(kind: ClientKind) -> None:
    given = settings(group_protocol="classic")
    config = {
        ClientKind.MEMBER: given.member,
        ClientKind.FETCHER: given.fetcher,
        ClientKind.RANGE_READER: given.range_reader,
    }.get(kind, partial(given.connection, kind))()
    rows = {row.name for row in TABLE if kind in row.clients}
    assert config.keys() - {"logger", "bootstrap.servers", "group.id"} == rows - {"group.id"}
    assert ("group.id" in rows) <= (config.get("group.id") == "etl")


@pytest.mark.parametrize("name", ["fetch.min.bytes", "group.id"])
def test_derived_setting_outside_the_table_is_refused(name: str) -> None:
    """Also one that the table derives for other clients only."""
    with pytest.raises(LookupError, match=rf"{name}.*admin client"):
        client_config(ClientKind.ADMIN, {}, {name: 1})


@pytest.mark.parametrize("missing", ["bootstrap.servers", "group.id"])
def test_missing_required_setting_is_named(missing: str) -> None:
    with pytest.raises(ConfigurationError, match=missing.replace(".", r"\.")):
        validated({name: value for name, value in GOOD.items() if name != missing}, hold_limit_s=1)


@pytest.mark.parametrize("fetch", [True, False])
def test_unknown_setting_is_named(fetch: bool) -> None:  # noqa: FBT001
    with pytest.raises(ConfigurationError, match=r"fetch\.min\.bites"):
        RebalanceAwareConsumer({**GOOD, "fetch.min.bites": 1}, fetch=fetch)


@pytest.mark.parametrize("reason", ["pause_marks", "the fetcher's client"])
def test_failed_creation_of_a_consumer_leaves_no_member(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    group_id = unique_name("group")
    make = confluent_kafka.Consumer

    def only_for_the_member(config: dict[str, Any]) -> confluent_kafka.Consumer:
        if str(config.get("client.id")).endswith("-fetch"):
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))
        return make(config)

    if reason != "pause_marks":
        monkeypatch.setattr(confluent_kafka, "Consumer", only_for_the_member)
    with pytest.raises(ConfigurationError, match=reason):
        RebalanceAwareConsumer(
            {**GOOD, "bootstrap.servers": "127.0.0.1:1", "group.id": group_id, "log_level": 0},
            pause_marks="kept" if reason == "pause_marks" else "keep",  # type: ignore[arg-type]
        )
    wait_until(
        lambda: not [thread for thread in threading.enumerate() if group_id in thread.name],
        timeout_s=120,
        what="the end of the member's thread",
    )


def test_poll_interval_is_derived_from_the_hold_limit() -> None:
    assert settings(hold_limit_s=100).member()["max.poll.interval.ms"] == round(
        (100 + HOLD_MARGIN_S) * 1000
    )


def test_classic_poll_interval_is_not_below_the_session_timeout() -> None:
    assert (
        settings(hold_limit_s=5, group_protocol="classic").member()["max.poll.interval.ms"]
        == 45_000
    )
    assert (
        settings(hold_limit_s=5, group_protocol="classic", session_timeout_ms=6000).member()[
            "max.poll.interval.ms"
        ]
        == 20_000
    )


def test_poll_interval_above_the_hold_limit_is_kept() -> None:
    assert settings(hold_limit_s=299, max_poll_interval_ms="300000").max_poll_interval_s == 300


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_hold_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(ConfigurationError, match="hold_limit_s"):
        settings(hold_limit_s=limit)


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "range, roundrobin"])
def test_classic_accepts_eager_strategies(strategy: str) -> None:
    chosen = settings(group_protocol="classic", partition_assignment_strategy=strategy)
    assert chosen.is_eager
    assert chosen.member()["partition.assignment.strategy"] == strategy.replace(" ", "")
    assert not settings(group_protocol="classic").is_eager
    assert not settings().is_eager


def test_classic_member_does_not_refresh_metadata() -> None:
    assert settings(group_protocol="classic").member()["topic.metadata.refresh.interval.ms"] == -1
    assert (
        settings(topic_metadata_refresh_interval_ms="5000").member()[
            "topic.metadata.refresh.interval.ms"
        ]
        == "5000"
    )


@pytest.mark.parametrize("chosen", ["earliest", "latest", "error"])
def test_no_client_chooses_where_reading_starts(chosen: str) -> None:
    made = settings(auto_offset_reset=chosen)
    assert made.member()["auto.offset.reset"] == "latest"
    assert made.fetcher()["auto.offset.reset"] == "error"
    assert made.offset_reset == chosen


def test_fetcher_gets_no_group_settings() -> None:
    config = settings(group_protocol="classic", session_timeout_ms=6000, client_id="blue").fetcher()
    assert not {"group.protocol", "session.timeout.ms", "partition.assignment.strategy"} & set(
        config
    )
    assert config["client.id"] == "blue-fetch"


def test_connection_has_only_connection_settings() -> None:
    config = settings(
        security_protocol="SASL_SSL",
        sasl_username="u",
        fetch_min_bytes=1,
        auto_offset_reset="earliest",
    ).connection()
    assert set(config) == {
        "bootstrap.servers",
        "security.protocol",
        "sasl.username",
        "reconnect.backoff.max.ms",
        "socket.keepalive.enable",
        "logger",
    }


def test_settings_hide_their_values() -> None:
    secret = "hunter2"  # noqa: S105 - a secret of the test
    shown = repr(settings(security_protocol="sasl_ssl", sasl_password=secret, ssl_key_pem=secret))
    assert secret not in shown

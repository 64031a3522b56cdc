"""One config mapping in; what cannot work is refused with the name of the setting."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.defaults import TABLE, ClientKind, client_config
from dagster_rebalance.kafka.client.settings import HOLD_MARGIN_S, Settings, validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.member.member import Member
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

GOOD = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}


def settings(*, hold_limit_s: float = 300.0, **config: object) -> Settings:
    return validated(
        {**GOOD, **{name.replace("_", "."): value for name, value in config.items()}},
        hold_limit_s=hold_limit_s,
    )


@pytest.mark.parametrize("value", [True, "true", "True", "t", "T", "1", 1])
def test_auto_commit_is_refused(value: object) -> None:
    """It would commit offsets of work that has not succeeded."""
    with pytest.raises(ConfigurationError, match=r"enable\.auto\.commit"):
        settings(enable_auto_commit=value)


@pytest.mark.parametrize("value", [True, "true", "t", "1"])
def test_news_of_an_end_among_the_records_is_refused(value: object) -> None:
    """Whoever looks at the topic and the offset of each record would take it for one."""
    with pytest.raises(ConfigurationError, match=r"'enable\.partition\.eof' is on.*current_lag"):
        settings(enable_partition_eof=value)


def test_auto_commit_is_off_in_every_client() -> None:
    """Also in the one that reads records."""
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
def test_each_client_is_given_what_a_login_takes(name: str) -> None:
    """`check` and `end_offsets` use a client of their own, which must log in as the others do."""
    given = validated({**GOOD, "security.protocol": "SASL_SSL", name: "as given"}, hold_limit_s=300)
    for each in (given.member(), given.fetcher(), given.connection()):
        assert (each[name], each["security.protocol"]) == ("as given", "SASL_SSL")


def test_a_broker_that_is_back_is_found_within_a_second() -> None:
    """By each client: its partitions stand still until then. Who has chosen otherwise knows why."""
    default = settings()
    assert [
        each["reconnect.backoff.max.ms"]
        for each in (default.member(), default.fetcher(), default.connection())
    ] == [1000] * 3
    chosen = settings(reconnect_backoff_ms=5000)
    assert "reconnect.backoff.max.ms" not in chosen.member()
    assert chosen.connection()["reconnect.backoff.ms"] == 5000


def test_damaged_batches_are_refused_unless_the_user_reads_them() -> None:
    """By default librdkafka checks no CRC."""
    default, chosen = settings(), settings(check_crcs="false")
    for config in (default.fetcher(), default.range_reader()):
        assert config["check.crcs"] is True
    for config in (chosen.fetcher(), chosen.range_reader()):
        assert config["check.crcs"] == "false"


def test_the_end_of_a_partition_is_known_to_each_client_that_reads() -> None:
    """Also where the user has set librdkafka's default."""
    given = settings(enable_partition_eof="false")
    assert given.fetcher()["enable.partition.eof"] is True
    assert given.range_reader()["enable.partition.eof"] is True


@pytest.mark.parametrize("kind", [ClientKind.LOG_CHECK, ClientKind.OFFSET_READER])
def test_each_consumer_takes_responses_of_the_size_that_the_user_allows(kind: ClientKind) -> None:
    """A batch above librdkafka's 100 MB may stand at the offset that is asked for.

    librdkafka refuses a `receive.message.max.bytes` below `fetch.max.bytes`.
    """
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
def test_the_case_of_an_isolation_level_has_no_meaning(level: str) -> None:
    """The client ignores it: the ends of the log must be those of what its client reads."""
    assert settings(isolation_level=level).reads_committed
    assert not settings(isolation_level="READ_UNCOMMITTED").reads_committed


@pytest.mark.parametrize("kind", ClientKind)
def test_each_client_gets_the_defaults_of_the_table_and_no_others(kind: ClientKind) -> None:
    """`docs/settings.md` shows the table."""
    given = settings(group_protocol="classic")
    config = {
        ClientKind.MEMBER: given.member,
        ClientKind.FETCHER: given.fetcher,
        ClientKind.RANGE_READER: given.range_reader,
    }.get(kind, partial(given.connection, kind))()
    rows = {row.name for row in TABLE if kind in row.clients}
    assert config.keys() - {"logger", "bootstrap.servers", "group.id"} == rows - {"group.id"}
    assert ("group.id" in rows) <= (config.get("group.id") == "etl")


def test_a_derived_setting_that_the_table_does_not_have_is_refused() -> None:
    """The documentation would not show it."""
    with pytest.raises(LookupError, match=r"fetch\.min\.bytes.*admin client"):
        client_config(ClientKind.ADMIN, {}, {"fetch.min.bytes": 1})


@pytest.mark.parametrize("missing", ["bootstrap.servers", "group.id"])
def test_what_is_needed_is_named_when_it_is_missing(missing: str) -> None:
    """The two settings without which there is no group."""
    with pytest.raises(ConfigurationError, match=missing.replace(".", r"\.")):
        validated({name: value for name, value in GOOD.items() if name != missing}, hold_limit_s=1)


@pytest.mark.parametrize("fetch", [True, False])
def test_an_unknown_setting_is_named(fetch: bool) -> None:  # noqa: FBT001
    """A misspelt setting must not be ignored."""
    with pytest.raises(ConfigurationError, match=r"fetch\.min\.bites"):
        RebalanceAwareConsumer({**GOOD, "fetch.min.bites": 1}, fetch=fetch)


@pytest.mark.parametrize("reason", ["pause_marks", "the fetcher's client"])
def test_a_consumer_that_cannot_be_made_leaves_no_member_behind(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Its client and its thread would never end, and who tries again would collect them."""
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
        timeout_s=12,
        what="the end of the member's thread",
    )


def test_a_bad_value_is_named() -> None:
    """With the client's own words about it."""
    with pytest.raises(ConfigurationError, match=r"auto\.offset\.reset"):
        Member(settings(auto_offset_reset="sometimes"))


def test_the_poll_interval_is_derived_from_the_hold_limit() -> None:
    """The broker ends a hold after it, so it must be longer than any hold is meant to be."""
    assert settings(hold_limit_s=100).member()["max.poll.interval.ms"] == round(
        (100 + HOLD_MARGIN_S) * 1000
    )


def test_in_classic_the_poll_interval_is_not_below_the_session_timeout() -> None:
    """The client refuses it, and the user did not choose it."""
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


def test_a_hold_limit_that_does_not_fit_is_refused_and_both_settings_are_named() -> None:
    """The broker would fence the member in the middle of a drain."""
    with pytest.raises(
        ConfigurationError, match=r"hold_limit_s=300 .*'max\.poll\.interval\.ms'=300000"
    ):
        settings(hold_limit_s=300, max_poll_interval_ms=300_000)
    assert settings(hold_limit_s=299, max_poll_interval_ms="300000").max_poll_interval_s == 300


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_hold_limit_must_be_positive(limit: float) -> None:
    """A limit of zero would mean no hold at all, which is how other consumers behave by default."""
    with pytest.raises(ConfigurationError, match="hold_limit_s"):
        settings(hold_limit_s=limit)


@pytest.mark.parametrize(
    "name", ["session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"]
)
def test_what_the_broker_decides_in_the_consumer_protocol_is_refused(name: str) -> None:
    """Both ways out are in the message."""
    with pytest.raises(
        ConfigurationError, match=r"decided by the broker .*'group\.protocol' to 'classic'"
    ):
        validated({**GOOD, name: "6000"}, hold_limit_s=1)


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "range, roundrobin"])
def test_an_eager_strategy_is_taken_in_classic(strategy: str) -> None:
    """Groups that are not upgraded yet have one."""
    chosen = settings(group_protocol="classic", partition_assignment_strategy=strategy)
    assert chosen.is_eager
    assert chosen.member()["partition.assignment.strategy"] == strategy.replace(" ", "")
    assert not settings(group_protocol="classic").is_eager
    assert not settings().is_eager


@pytest.mark.parametrize("mixture", ["range,cooperative-sticky", "cooperative-sticky, range"])
def test_a_mixed_list_of_strategies_is_refused_with_the_way_out(mixture: str) -> None:
    """Java upgrades with such a list, but this client cannot have one.

    The client's own message names no way out.
    """
    with pytest.raises(
        ConfigurationError,
        match=(
            r"'partition\.assignment\.strategy' mixes .* two rolling bounces "
            r".*docs/upgrading\.md"
        ),
    ):
        settings(group_protocol="classic", partition_assignment_strategy=mixture)


def test_a_strategy_that_the_client_does_not_have_is_refused() -> None:
    """Java's class names, and its eager sticky one."""
    for unknown in ("sticky", "org.apache.kafka.clients.consumer.RangeAssignor"):
        with pytest.raises(ConfigurationError, match=r"does not have: use.*docs/upgrading\.md"):
            settings(group_protocol="classic", partition_assignment_strategy=f"range,{unknown}")


def test_an_unknown_protocol_is_refused() -> None:
    """Share groups and the like cannot hold a revoke."""
    with pytest.raises(
        ConfigurationError, match=r"'group\.protocol' must be 'consumer' or 'classic'"
    ):
        settings(group_protocol="share")


def test_a_static_member_is_refused() -> None:
    """A static member would not hand over when it leaves.

    A reload would also fence the process that still drains.
    """
    with pytest.raises(ConfigurationError, match=r"group\.instance\.id"):
        settings(group_instance_id="blue")


def test_in_classic_the_client_does_not_refresh_metadata() -> None:
    """A metadata change during a hold supersedes it without a callback."""
    assert settings(group_protocol="classic").member()["topic.metadata.refresh.interval.ms"] == -1
    with pytest.raises(
        ConfigurationError, match=r"'topic\.metadata\.refresh\.interval\.ms' is set: .*Remove it"
    ):
        settings(group_protocol="classic", topic_metadata_refresh_interval_ms="5000")
    assert (
        settings(topic_metadata_refresh_interval_ms="5000").member()[
            "topic.metadata.refresh.interval.ms"
        ]
        == "5000"
    )


@pytest.mark.parametrize("chosen", ["earliest", "latest", "error"])
def test_where_reading_starts_is_left_to_no_client(chosen: str) -> None:
    """The member reads nothing; with `error` its client would report that offset 0 is gone.

    The fetcher's is told where to begin.
    """
    made = settings(auto_offset_reset=chosen)
    assert made.member()["auto.offset.reset"] == "latest"
    assert made.fetcher()["auto.offset.reset"] == "error"
    assert made.offset_reset == chosen


def test_a_setting_that_is_no_number_is_named() -> None:
    """Before it is compared with anything."""
    with pytest.raises(
        ConfigurationError, match=r"'max\.poll\.interval\.ms' must be a whole number"
    ):
        settings(max_poll_interval_ms="five minutes")


def test_the_fetcher_is_no_member_of_the_group() -> None:
    """It has none of the group's settings, and may rest for as long as its user likes."""
    config = settings(group_protocol="classic", session_timeout_ms=6000, client_id="blue").fetcher()
    assert not {"group.protocol", "session.timeout.ms", "partition.assignment.strategy"} & set(
        config
    )
    assert config["client.id"] == "blue-fetch"


def test_questions_to_the_cluster_use_the_connection_only() -> None:
    """With its credentials, and without settings that only a consumer knows."""
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


def test_settings_do_not_show_what_is_in_them() -> None:
    """A failed assertion, a debugger or an error tracker prints whatever it finds."""
    secret = "hunter2"  # noqa: S105 - what must not be seen
    shown = repr(settings(security_protocol="sasl_ssl", sasl_password=secret, ssl_key_pem=secret))
    assert secret not in shown


@pytest.mark.parametrize(
    "accident",
    [
        {"ssl.ca.location": "/ca.pem"},
        {"sasl.username": "etl", "sasl.password": "x"},
        {"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"},
    ],
)
def test_settings_that_would_connect_less_securely_than_they_say_are_refused(
    accident: dict[str, object],
) -> None:
    """The client itself connects in the clear, or to anybody, without a word."""
    with pytest.raises(
        ConfigurationError,
        match=r"'security\.protocol' is PLAINTEXT|certificate\.verification' is off",
    ):
        validated(
            {"bootstrap.servers": "kafka:9092", "group.id": "g", **accident}, hold_limit_s=30.0
        )

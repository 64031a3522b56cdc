"""librdkafka's settings, translated for Spark's connector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.reading.decoded_frame import write_letters
from dagster_rebalance.spark.reading.options import spark_kafka_options

if TYPE_CHECKING:
    from pathlib import Path

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
BROKERS = {"bootstrap.servers": "a:9092,b:9092"}
SECURED = {**BROKERS, "security.protocol": "SASL_SSL"}


def test_settings_of_the_member_alone_are_left_out() -> None:
    """Spark's executors are no group members.

    A group id or a poll interval means nothing to them.
    """
    member = {
        **BROKERS,
        "group.id": "g",
        "max.poll.interval.ms": 300000,
        "enable.auto.commit": False,
        "on_commit": print,
    }
    assert spark_kafka_options(member) == {
        "kafka.bootstrap.servers": "a:9092,b:9092",
        "kafka.isolation.level": "read_committed",
    }


def test_the_isolation_level_is_librdkafkas_default_not_javas() -> None:
    """Java's default would make Spark read records of aborted transactions.

    The member's offsets step over those records.
    """
    assert spark_kafka_options(BROKERS)["kafka.isolation.level"] == "read_committed"
    assert (
        spark_kafka_options({**BROKERS, "isolation.level": "read_uncommitted"})[
            "kafka.isolation.level"
        ]
        == "read_uncommitted"
    )


def test_an_isolation_level_in_capitals_is_one_that_java_takes() -> None:
    """The Kafka client ignores the case, so `client_config` may have either."""
    options = spark_kafka_options({**BROKERS, "isolation.level": "READ_UNCOMMITTED"})
    assert options["kafka.isolation.level"] == "read_uncommitted"


def test_a_password_with_quotes_and_backslashes_survives_in_the_login() -> None:
    """The login is a small language of its own; an unescaped quote would end the password early."""
    options = spark_kafka_options(
        {
            **BROKERS,
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "me",
            "sasl.password": 'p"w\\d',
        }
    )
    assert options["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.plain.PlainLoginModule required username="me" '
        'password="p\\"w\\\\d";'
    )
    assert options["kafka.security.protocol"] == "SASL_SSL"
    assert options["kafka.sasl.mechanism"] == "PLAIN"


def test_a_line_end_in_a_password_does_not_end_the_login() -> None:
    """A secret that was read from a file often has one."""
    options = spark_kafka_options(
        {**SECURED, "sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": "a\r\nb"}
    )
    assert options["kafka.sasl.jaas.config"].endswith('password="a\\r\\nb";')


def test_scram_uses_its_own_login_module_under_either_name_of_the_setting() -> None:
    """The client knows sasl.mechanism and sasl.mechanisms."""
    options = spark_kafka_options(
        {**SECURED, "sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "me", "sasl.password": "x"}
    )
    assert "ScramLoginModule" in options["kafka.sasl.jaas.config"]
    assert options["kafka.sasl.mechanism"] == "SCRAM-SHA-512"


def test_certificates_travel_as_text_so_that_executors_need_no_files(tmp_path: Path) -> None:
    """A path is good on this machine only; executors and Connect servers run elsewhere."""
    for name, text in (("ca.pem", CERTIFICATE), ("client.pem", CERTIFICATE), ("key.pem", KEY)):
        (tmp_path / name).write_text(text)
    options = spark_kafka_options(
        {
            **BROKERS,
            "security.protocol": "ssl",
            "ssl.ca.location": str(tmp_path / "ca.pem"),
            "ssl.certificate.location": str(tmp_path / "client.pem"),
            "ssl.key.location": str(tmp_path / "key.pem"),
            "ssl.key.password": "hidden",
            "ssl.endpoint.identification.algorithm": "none",
        }
    )
    assert options["kafka.ssl.truststore.type"] == options["kafka.ssl.keystore.type"] == "PEM"
    assert (
        options["kafka.ssl.truststore.certificates"]
        == options["kafka.ssl.keystore.certificate.chain"]
        == CERTIFICATE
    )
    assert options["kafka.ssl.keystore.key"] == KEY
    assert options["kafka.ssl.endpoint.identification.algorithm"] == ""
    assert "hidden" not in f"{options!r}{options}"
    assert "MIIE" not in f"{options!r}{options}"


def test_no_secret_is_shown() -> None:
    """Options end up in logs and tracebacks."""
    options = spark_kafka_options(
        {
            **SECURED,
            "sasl.mechanism": "PLAIN",
            "sasl.username": "me",
            "sasl.password": "hidden",
            "ssl.keystore.location": "/k.p12",
            "ssl.keystore.password": "hidden",
        }
    )
    assert "hidden" in options["kafka.sasl.jaas.config"]
    for copied in (
        options,
        {**options},
        options.copy(),
        options | {},
        list(options.values()),
        *options.items(),
    ):
        assert "hidden" not in f"{copied!r}{copied}"


def test_sparks_own_options_pass_through_and_win() -> None:
    """The way out for everything that cannot be translated; translating twice changes nothing."""
    mine = {
        **SECURED,
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "kafka.sasl.jaas.config": "Own required;",
        "kafka.client.id": "x",
    }
    options = spark_kafka_options(mine)
    assert options["kafka.sasl.jaas.config"] == "Own required;"
    assert options["kafka.client.id"] == "x"
    assert spark_kafka_options(options) == options


def test_a_login_of_sparks_own_replaces_the_whole_login() -> None:
    """Then no part of it is in the options, and what has no counterpart in Java needs none."""
    member = {
        **SECURED,
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "hidden",
    }
    options = spark_kafka_options(
        {**member, "sasl.oauthbearer.method": "oidc", "kafka.sasl.jaas.config": "${env:LOGIN}"}
    )
    assert options["kafka.sasl.mechanism"] == "SCRAM-SHA-512"
    assert options["kafka.sasl.jaas.config"] == "${env:LOGIN}"
    assert "hidden" not in " ".join(options.values())


@pytest.mark.parametrize("own", ["kafka.ssl.keystore.key", "kafka.ssl.keystore.location"])
def test_a_key_of_sparks_own_replaces_the_whole_key(own: str) -> None:
    """The key of the member need not be readable for Java, and does not travel."""
    member = {
        **BROKERS,
        "security.protocol": "SSL",
        "ssl.key.location": "/no/such/key",
        "ssl.certificate.location": "/no/such/chain",
    }
    options = spark_kafka_options({**member, "ssl.key.password": "hidden", own: "its own"})
    assert options[own] == "its own"
    assert "hidden" not in " ".join(options.values())


def test_options_that_would_connect_in_the_clear_are_refused() -> None:
    """Spark would be handed the login and the truststore, and ignore both."""
    with pytest.raises(ConfigurationError, match=r"'security\.protocol' is PLAINTEXT"):
        spark_kafka_options({**BROKERS, "kafka.sasl.jaas.config": "${env:LOGIN}"})


def test_a_login_by_an_issuer_of_tokens_is_translated(tmp_path: Path) -> None:
    """Java asks the issuer itself: tokens would be too old for a long read."""
    (tmp_path / "ca.pem").write_text(CERTIFICATE)
    options = spark_kafka_options(
        {
            **SECURED,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "OIDC",
            "sasl.oauthbearer.client.id": "etl",
            "sasl.oauthbearer.client.secret": 'a "secret"',
            "sasl.oauthbearer.scope": "kafka read",
            "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-2",
            "sasl.oauthbearer.token.endpoint.url": "https://issuer/token",
            "https.ca.location": str(tmp_path / "ca.pem"),
        }
    )
    bearer = "org.apache.kafka.common.security.oauthbearer"
    authority = CERTIFICATE.replace("\n", "\\n")
    assert options["kafka.sasl.jaas.config"] == (
        f'{bearer}.OAuthBearerLoginModule required clientId="etl" clientSecret="a \\"secret\\"" '
        'scope="kafka read" extension_logicalCluster="lkc-1" extension_identityPoolId="pool-2" '
        f'ssl.truststore.type="PEM" ssl.truststore.certificates="{authority}";'
    )
    assert options["kafka.sasl.login.callback.handler.class"] == (
        f"{bearer}.OAuthBearerLoginCallbackHandler"
    )
    assert options["kafka.sasl.oauthbearer.token.endpoint.url"] == "https://issuer/token"
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            {"enable.ssl.certificate.verification": False},
            "enable.ssl.certificate.verification.*ssl.ca.location",
        ),
        ({"sasl.kerberos.keytab": "/k"}, "sasl.kerberos.keytab.*kafka.sasl.jaas.config"),
        (
            {"sasl.oauthbearer.grant.type": "jwt-bearer", "sasl.oauthbearer.method": "oidc"},
            "sasl.oauthbearer.grant.type.*kafka.sasl.oauthbearer.grant.type",
        ),
        ({"sasl.oauthbearer.method": "default"}, "only oidc can.*kafka.sasl.jaas.config"),
        ({"sasl.oauthbearer.client.id": "etl"}, "client.id.*no effect without.*method.*oidc"),
        ({"sasl.oauthbearer.scope": "kafka"}, "scope.*no effect without.*method.*oidc"),
        ({"https.ca.pem": CERTIFICATE}, "https.ca.pem.*no effect without.*method.*oidc"),
        ({"oauth_cb": print}, "oauth_cb.*Java cannot call it.*callback.handler.class"),
        ({"sasl.username": "me", "sasl.mechanism": "GSSAPI"}, "GSSAPI.*SCRAM-SHA-256"),
        ({"ssl.ca.location": "/no/such/file"}, "ssl.ca.location.*/no/such/file"),
        ({"ssl.key.pem": KEY}, "ssl.certificate.location"),
        (
            {"ssl.key.pem": "-----BEGIN RSA PRIVATE KEY-----", "ssl.certificate.pem": CERTIFICATE},
            "openssl pkcs8",
        ),
    ],
)
def test_what_cannot_be_translated_says_which_setting_and_what_to_set_instead(
    setting: dict[str, object], says: str
) -> None:
    """If the setting were dropped, Spark would connect less safely than the member.

    Or it would not connect at all, with a message that explains nothing.
    """
    with pytest.raises(ConfigurationError, match=says):
        spark_kafka_options({**SECURED, **setting})


@pytest.mark.parametrize(
    "setting",
    [
        {"enable.ssl.certificate.verification": True},
        {"enable.ssl.certificate.verification": "true"},
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.grant.type": "client_credentials",
        },
    ],
)
def test_what_java_does_without_being_told_needs_no_option(setting: dict[str, object]) -> None:
    """It is written out by people who want to be sure."""
    options = spark_kafka_options({**SECURED, **setting})
    assert not [name for name in options if "verification" in name or "grant" in name]


def test_a_ca_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    """Java would say that the trust store is empty, an hour of searching later."""
    (tmp_path / "ca.der").write_text("not pem")
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location.*has no certificate"):
        spark_kafka_options({**SECURED, "ssl.ca.location": str(tmp_path / "ca.der")})


def test_brokers_are_needed() -> None:
    """Spark's own message for it is a stack trace."""
    with pytest.raises(ConfigurationError, match=r"bootstrap\.servers"):
        spark_kafka_options({})


class Writes:
    """A frame and its writer, which keep the options."""

    def __init__(self) -> None:
        self.options_given: dict[str, str] = {}
        self.sparkSession = SimpleNamespace(
            conf=SimpleNamespace(get=lambda _: None, set=lambda *_: None)
        )
        self.write = self

    def mapInArrow(self, *_: object) -> Writes:  # noqa: N802 - Spark's name
        """The letters."""
        return self

    def format(self, _: str) -> Writes:
        """That of the connector."""
        return self

    def options(self, **given: str) -> Writes:
        """Keep them."""
        self.options_given |= given
        return self

    def option(self, *_: str) -> Writes:
        """The topic."""
        return self

    def save(self) -> None:
        """Store nothing."""


@pytest.mark.parametrize(
    ("own", "found"),
    [({}, str(2**31 - 1)), ({"kafka.max.request.size": "5"}, "5")],
)
def test_the_topic_decides_how_large_a_letter_of_spark_may_be(
    own: dict[str, str], found: str
) -> None:
    """A letter is larger than its record, and a client that refuses it stops the partition."""
    frame: Any = Writes()
    write_letters(frame, [], "dead", {**BROKERS, **own})
    assert frame.options_given["kafka.max.request.size"] == found
    assert frame.options_given["kafka.acks"] == "all"

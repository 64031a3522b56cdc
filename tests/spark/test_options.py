"""librdkafka's settings, translated for Spark's connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.kafka_options import spark_kafka_options

if TYPE_CHECKING:
    from pathlib import Path

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
BROKERS = {"bootstrap.servers": "a:9092,b:9092"}
SECURED = {**BROKERS, "security.protocol": "SASL_SSL"}


PLAIN = {**SECURED, "sasl.mechanism": "PLAIN", "sasl.username": "me"}
SCRAM = {**SECURED, "sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "me"}
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"isolation.level": "read_committed"}),  # Java's default is another one
        ({"isolation.level": "READ_UNCOMMITTED"}, {"isolation.level": "read_uncommitted"}),
        (
            {**PLAIN, "security.protocol": "sasl_ssl", "sasl.password": 'p"w\\d'},
            {
                "sasl.jaas.config": f'{PLAIN_MODULE} required username="me" password="p\\"w\\\\d";',
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "PLAIN",
            },
        ),
        (
            {**PLAIN, "sasl.password": "a\r\nb"},
            {"sasl.jaas.config": f'{PLAIN_MODULE} required username="me" password="a\\r\\nb";'},
        ),
        (
            {**SCRAM, "sasl.password": "x"},
            {
                "sasl.jaas.config": f'{SCRAM_MODULE} required username="me" password="x";',
                "sasl.mechanism": "SCRAM-SHA-512",
            },
        ),
        (
            {**PLAIN, "kafka.sasl.jaas.config": "Own required;", "kafka.client.id": "x"},
            {"sasl.jaas.config": "Own required;", "client.id": "x"},
        ),
        (
            {
                **SCRAM,
                "sasl.password": "hidden",
                "sasl.oauthbearer.method": "oidc",
                "kafka.sasl.jaas.config": "${env:LOGIN}",
            },
            {"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": "${env:LOGIN}"},
        ),
        *(
            (
                {
                    "security.protocol": "SSL",
                    "ssl.key.location": "/no/such/key",
                    "ssl.certificate.location": "/no/such/chain",
                    "ssl.key.password": "hidden",
                    f"kafka.{own}": "its own",
                },
                {own: "its own", "security.protocol": "SSL", "ssl.key.password": None},
            )
            for own in ("ssl.keystore.key", "ssl.keystore.location")
        ),
    ],
    ids=[
        *("isolation level", "capitals", "quotes", "line end", "scram"),
        *("options of Spark", "login of Spark", "key of Spark", "keystore of Spark"),
    ],
)
def test_settings_are_translated(settings: dict[str, str], expected: dict[str, str | None]) -> None:
    options = spark_kafka_options({**BROKERS, **settings})
    assert {name: options.get(f"kafka.{name}") for name in expected} == expected
    assert "hidden" not in " ".join(options.values())
    assert spark_kafka_options(options) == options


def test_settings_of_the_member_are_omitted() -> None:
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


def test_certificates_become_text_in_the_options(tmp_path: Path) -> None:
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


def test_secrets_are_hidden_in_copies_of_the_options() -> None:
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


def test_login_without_a_security_protocol_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'security\.protocol' is PLAINTEXT"):
        spark_kafka_options({**BROKERS, "kafka.sasl.jaas.config": "${env:LOGIN}"})


def test_oidc_login_is_translated(tmp_path: Path) -> None:
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
def test_untranslatable_setting_names_the_alternative(
    setting: dict[str, object], says: str
) -> None:
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
def test_defaults_of_java_become_no_option(setting: dict[str, object]) -> None:
    options = spark_kafka_options({**SECURED, **setting})
    assert not [name for name in options if "verification" in name or "grant" in name]


def test_ca_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.der").write_text("not pem")
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location.*has no certificate"):
        spark_kafka_options({**SECURED, "ssl.ca.location": str(tmp_path / "ca.der")})


def test_missing_brokers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bootstrap\.servers"):
        spark_kafka_options({})

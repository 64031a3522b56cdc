"""Settings that promise more security than the client would have."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.transport_security import insecurity


@pytest.mark.parametrize(
    "protocol", [{}, {"security.protocol": "PLAINTEXT"}, {"security.protocol": "sasl_plaintext"}]
)
def test_a_setting_of_tls_needs_a_protocol_with_tls(protocol: dict[str, object]) -> None:
    """The client ignores it, and connects in the clear without a word."""
    problem = insecurity({"ssl.ca.location": "/ca.pem", **protocol})
    assert problem is not None
    assert problem.startswith("'ssl.ca.location' is set, but 'security.protocol' is ")
    assert "set it to SASL_SSL" in problem


@pytest.mark.parametrize(
    "protocol", [{}, {"security.protocol": "plaintext"}, {"security.protocol": "SSL"}]
)
def test_a_login_needs_a_protocol_with_a_login(protocol: dict[str, object]) -> None:
    """Whoever gives a password expects not to be let in without one; its value is not shown."""
    problem = insecurity({"sasl.username": "hidden", "sasl.password": "hidden", **protocol})
    assert problem is not None
    assert problem.startswith("'sasl.password' is set, but 'security.protocol' is ")
    assert "hidden" not in problem


@pytest.mark.parametrize("name", ["bootstrap.servers", "metadata.broker.list"])
def test_a_login_among_the_brokers_is_refused_without_being_shown(name: str) -> None:
    """Brokers are named in each error."""
    problem = insecurity({name: "kafka:9092,me:hunter2@kafka:9092"})
    assert problem is not None
    assert problem.startswith(f"'{name}' has an @ in it: write each broker as host:port")
    assert "hunter2" not in problem


def test_a_protocol_that_kafka_does_not_have_is_refused_without_being_shown() -> None:
    """It may be a password that stands in the wrong place."""
    problem = insecurity({"security.protocol": "hunter2", "sasl.username": "me"})
    assert problem == (
        "'security.protocol' must be one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"
    )


def test_a_function_that_gives_tokens_is_a_login_too() -> None:
    """Without a protocol that asks it, the client connects in the clear."""
    assert "'oauth_cb' is set" in str(insecurity({"oauth_cb": print}))


@pytest.mark.parametrize("value", [False, "false", "False", "f", "0", "no"])
def test_verification_must_not_be_off(value: object) -> None:
    """An encrypted connection to anybody is a login given to anybody."""
    problem = insecurity(
        {"security.protocol": "SASL_SSL", "enable.ssl.certificate.verification": value}
    )
    assert problem is not None
    assert "'ssl.ca.location'" in problem


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"security.protocol": None},
        {
            "security.protocol": "SSL",
            "ssl.ca.location": "/ca.pem",
            "enable.ssl.certificate.verification": True,
        },
        {"security.protocol": "sasl_ssl", "ssl.ca.location": "/ca.pem", "sasl.mechanism": "PLAIN"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-512"},
    ],
)
def test_settings_that_fit_their_protocol_are_fine(config: dict[str, object]) -> None:
    """Plain text that was asked for is no accident."""
    assert insecurity(config) is None

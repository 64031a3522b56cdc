"""Settings that promise more security than the client would have."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.transport_security import insecurity


@pytest.mark.parametrize(
    "protocol", [{}, {"security.protocol": "PLAINTEXT"}, {"security.protocol": "sasl_plaintext"}]
)
def test_tls_setting_without_a_tls_protocol_is_refused(protocol: dict[str, object]) -> None:
    """The client ignores the setting and connects in plain text without a warning."""
    problem = insecurity({"ssl.ca.location": "/ca.pem", **protocol})
    assert problem is not None
    assert problem.startswith("'ssl.ca.location' is set, but 'security.protocol' is ")
    assert "set it to SASL_SSL" in problem


@pytest.mark.parametrize(
    "protocol", [{}, {"security.protocol": "plaintext"}, {"security.protocol": "SSL"}]
)
def test_login_without_a_sasl_protocol_is_refused(protocol: dict[str, object]) -> None:
    """Otherwise the client would connect without the password. Its value is not shown."""
    problem = insecurity({"sasl.username": "hidden", "sasl.password": "hidden", **protocol})
    assert problem is not None
    assert problem.startswith("'sasl.password' is set, but 'security.protocol' is ")
    assert "hidden" not in problem


@pytest.mark.parametrize("name", ["bootstrap.servers", "metadata.broker.list"])
def test_login_in_the_broker_list_is_refused_without_being_shown(name: str) -> None:
    """Error messages contain the broker list."""
    problem = insecurity({name: "kafka:9092,me:hunter2@kafka:9092"})
    assert problem is not None
    assert problem.startswith(f"'{name}' contains an @: write each broker as host:port")
    assert "hunter2" not in problem


def test_unknown_protocol_is_refused_without_being_shown() -> None:
    """The value may be a misplaced password."""
    problem = insecurity({"security.protocol": "hunter2", "sasl.username": "me"})
    assert problem == (
        "'security.protocol' must be one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"
    )


def test_token_function_without_a_protocol_with_a_login_is_refused() -> None:
    """With a protocol that never calls it, the client connects in plain text."""
    assert "'oauth_cb' is set" in str(insecurity({"oauth_cb": print}))


@pytest.mark.parametrize("value", [False, "false", "False", "f", "0", "no"])
def test_disabled_verification_is_refused(value: object) -> None:
    """Without verification, any server can receive the login."""
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
def test_settings_that_match_their_protocol_are_accepted(config: dict[str, object]) -> None:
    """Plain text that was asked for is no accident."""
    assert insecurity(config) is None

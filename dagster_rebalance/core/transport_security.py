"""Detection of Kafka client settings that are less secure than they seem.

A client ignores TLS and SASL settings that its protocol does not use, and connects unencrypted.
Messages never contain a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_BROKERS = ("bootstrap.servers", "metadata.broker.list")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_WITH_TLS = frozenset({"SSL", "SASL_SSL"})
_WITH_LOGIN = frozenset({"SASL_PLAINTEXT", "SASL_SSL"})
_VERIFICATION = "enable.ssl.certificate.verification"
_OFF = frozenset({"false", "f", "0", "no", "off"})


def insecurity(config: Mapping[str, object]) -> str | None:
    """Return why a client is less secure than its settings suggest, and what to change, or None.

    Args:
        config: Settings by librdkafka or Java client name.
    """
    for name in _BROKERS:
        servers = config.get(name)
        if isinstance(servers, str) and "@" in servers:
            return (
                f"'{name}' contains an @: write each broker as host:port, and give user and "
                "password with 'sasl.username' and 'sasl.password'"
            )
    protocol = str(config.get("security.protocol") or "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        return f"'security.protocol' must be one of {', '.join(_PROTOCOLS)}"
    tls, login = (
        sorted(name for name in config if name.startswith(prefixes))
        for prefixes in (("ssl.",), ("sasl.", "oauth_cb"))
    )
    if tls and protocol not in _WITH_TLS:
        return (
            f"'{tls[0]}' is set, but 'security.protocol' is {protocol}, which has no TLS: set it "
            f"to SASL_SSL or SSL, or remove '{tls[0]}'"
        )
    if login and protocol not in _WITH_LOGIN:
        return (
            f"'{login[0]}' is set, but 'security.protocol' is {protocol}, which has no login: set "
            f"it to SASL_SSL, or remove '{login[0]}'"
        )
    if str(config.get(_VERIFICATION, "true")).lower() in _OFF:
        return (
            f"'{_VERIFICATION}' is off, so the client would trust any server: remove it, and name "
            "the authority with 'ssl.ca.location'"
        )
    return None

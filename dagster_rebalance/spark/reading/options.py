"""librdkafka's settings in the words of Spark's Kafka connector, which is a Java client.

Owns the translation of how to reach a cluster and how to log in to it, so that one configuration
serves the group member and Spark. Settings that only concern the member (group, polling, batching)
are left out. What decides about security and has no counterpart is an error: it is never dropped in
silence. Never shows a secret: the values of such options hide themselves in `repr`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.transport_security import insecurity
from dagster_rebalance.spark.reading import pem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REDACTION = (
    r'(?i)key: "kafka\.[^"]*(?:jaas|password|passphrase|secret|token|keystore\.key)[^"]*"'
    r'\s+value: "(?:[^"\\]++|\\.)*+"'
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*+(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
"""A `spark.redaction.string.regex`, in Java's language, that masks names and values of secret
options where a Spark Connect server logs the requests of its clients, and private keys anywhere,
as in the plans of writes. Possessive, so that a long key neither backtracks nor overflows the
stack."""
OPTIONS_REDACTION = r"(?i:keystore\.key|jaas)"
"""What a `spark.sql.redaction.options.regex` lacks: Spark 4.0 shows the options of some plans, and
masks by it and by names such as `password` only."""

_SECRETS = ("password", "passphrase", "secret", "token", "jaas", "keystore.key")
_OWN = "kafka."
_OWN_LOGIN = "kafka.sasl.jaas.config"
_OWN_KEYS = ("kafka.ssl.keystore.key", "kafka.ssl.keystore.location")
_SAME_IN_JAVA = {
    "bootstrap.servers": "bootstrap.servers",
    "metadata.broker.list": "bootstrap.servers",
    "client.id": "client.id",
    "client.rack": "client.rack",
    "sasl.mechanism": "sasl.mechanism",
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.jaas.config": "sasl.jaas.config",
    "sasl.kerberos.service.name": "sasl.kerberos.service.name",
    "ssl.key.password": "ssl.key.password",
    "ssl.keystore.password": "ssl.keystore.password",
    "ssl.truststore.location": "ssl.truststore.location",
    "ssl.truststore.password": "ssl.truststore.password",
    "ssl.truststore.type": "ssl.truststore.type",
}
_OIDC = "sasl.oauthbearer."
# Used while another setting is translated, or true of every Java client.
_HANDLED_TOGETHER = frozenset(
    {
        *("sasl.username", "sasl.password", "ssl.certificate.location", "ssl.certificate.pem"),
        *(f"{_OIDC}{name}" for name in ("client.id", "client.secret", "scope", "extensions")),
        *("https.ca.location", "https.ca.pem"),
    }
)
_SECURITY_PREFIXES = (
    "sasl.",
    "ssl.",
    "ssl_",
    "security.",
    "enable.ssl.",
    "enable.sasl.",
    "https.",
    "oauth",
)
_OF_OIDC = (_OIDC, "https.ca.")
_AS_IN_JAVA = {
    "enable.ssl.certificate.verification": frozenset({"true", "t", "1", "yes", "on"}),
    f"{_OIDC}grant.type": frozenset({"client_credentials"}),
}
"""What a Java client does without being told."""
_INSTEAD = {
    "enable.ssl.certificate.verification": (
        "leave certificates verified and name the authority with ssl.ca.location"
    ),
    "sasl.kerberos.keytab": "give kafka.sasl.jaas.config with a Krb5LoginModule",
    "sasl.kerberos.principal": "give kafka.sasl.jaas.config with a Krb5LoginModule",
    "oauth_cb": (
        "Java cannot call it, so give Spark a login of its own: kafka.sasl.jaas.config and "
        "kafka.sasl.login.callback.handler.class (docs/security.md)"
    ),
    "ssl.cipher.suites": "give kafka.ssl.cipher.suites with Java's names of the suites",
    "ssl.crl.location": "leave it out: Java checks revocation by the JVM's own properties",
}
_WHERE = (
    "Options that start with `kafka.` belong into `client_config` of KafkaConsumerResource, into "
    "`kafka_options` of KafkaSparkResource, or into what `read_ranges` is given."
)
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


_BEARER = "org.apache.kafka.common.security.oauthbearer"


class Secret(str):
    """A secret is the value of an option that no log and no traceback shows.

    It stays hidden wherever the options are copied to.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def hidden(options: Mapping[str, str]) -> dict[str, str]:
    """Options whose secrets do not show themselves."""
    return {key: Secret(value) if is_secret(key) else value for key, value in options.items()}


def spark_kafka_options(librdkafka_config: Mapping[str, object]) -> dict[str, str]:
    """Translate a librdkafka configuration for Spark's Kafka connector.

    Certificates and keys are read here and travel inside the options, so that no file has to exist
    on the executors or on a Spark Connect server. A Connect server writes options into its event
    log and its pages: mask them there with the regular expression `REDACTION`, or let its clients
    name the secrets by a config provider of Kafka's (docs/security.md has both).

    Args:
        librdkafka_config: The member's configuration. Keys that start with `kafka.` are Spark's own
            and win: with `kafka.sasl.jaas.config` nothing of the login is translated, with
            `kafka.ssl.keystore.key` or `kafka.ssl.keystore.location` nothing of the client's key.

    Returns:
        The options, each with the prefix `kafka.`.

    Raises:
        ConfigurationError: A setting about the connection has no counterpart, contradicts another
            one, is of no effect with the security protocol, or names a file that cannot be read.
    """
    own = {key: _text(value) for key, value in librdkafka_config.items() if key.startswith(_OWN)}
    # librdkafka's default; Java's is read_uncommitted, which would read aborted records.
    java = {"isolation.level": "read_committed"}
    for key, value in librdkafka_config.items():
        if not key.startswith(_OWN) and not _is_replaced(key, own):
            java.update(_translated(key, _text(value), librdkafka_config))
    options = {**{f"{_OWN}{key}": value for key, value in java.items()}, **own}
    if "kafka.bootstrap.servers" not in options:
        msg = (
            "the Kafka configuration has no `bootstrap.servers`: name at least one broker, as "
            "host:port."
        )
        raise ConfigurationError(msg)
    problem = insecurity({key.removeprefix(_OWN): value for key, value in options.items()})
    if problem is not None:
        raise ConfigurationError(problem)
    return hidden(options)


def is_secret(key: str) -> bool:
    """Whether the value of an option must not be shown."""
    return any(word in key.lower() for word in _SECRETS)


def _is_replaced(key: str, own: Mapping[str, str]) -> bool:
    """Tell whether options of Spark's own take the place of a setting.

    Such a setting needs no counterpart.
    """
    if key.startswith(("sasl.", "oauth", "https.", "enable.sasl.")) and not key.startswith(
        "sasl.mechanism"
    ):
        return _OWN_LOGIN in own or f"{_OWN}{key}" in own
    if key.startswith(("ssl.key", "ssl.certificate.")):
        return any(name in own for name in _OWN_KEYS)
    return f"{_OWN}{key}" in own


def _translated(key: str, value: str, config: Mapping[str, object]) -> dict[str, str]:
    """Return the Java settings for a setting of librdkafka.

    The result is empty for a setting that a read of exact offsets has no use for.
    """
    if key.startswith(_OF_OIDC) and f"{_OIDC}method" not in config:
        msg = (
            f"the Kafka setting `{key}` has no effect without `{_OIDC}method`: set that to oidc, "
            f"or remove `{key}`"
        )
        raise ConfigurationError(msg)
    if value.lower() in _AS_IN_JAVA.get(key, ()):
        return {}
    if key in _SAME_IN_JAVA:
        return {_SAME_IN_JAVA[key]: value}
    if key in _TRANSLATIONS:
        return _TRANSLATIONS[key](value, config)
    if key not in _HANDLED_TOGETHER and key.startswith(_SECURITY_PREFIXES):
        instead = _INSTEAD.get(
            key,
            f"give what the Java client needs as `kafka.{key}`, by the names of the Java client's "
            "documentation",
        )
        msg = (
            f"the Kafka setting `{key}` cannot be translated for Spark's Kafka connector: "
            f"{instead}. {_WHERE}"
        )
        raise ConfigurationError(msg)
    return _sasl_login(config) if key == "sasl.username" else {}


def _sasl_login(config: Mapping[str, object]) -> dict[str, str]:
    if "sasl.jaas.config" in config:
        return {}
    mechanism = _text(config.get("sasl.mechanism", config.get("sasl.mechanisms", "")))
    module = _LOGIN_MODULES.get(mechanism.upper())
    if module is None:
        msg = (
            "`sasl.username` cannot be translated for Spark's Kafka connector with the SASL "
            f"mechanism {mechanism or '(none)'}: set "
            f"`sasl.mechanism` to one of {', '.join(_LOGIN_MODULES)}, or give "
            f"`kafka.sasl.jaas.config`. {_WHERE}"
        )
        raise ConfigurationError(msg)
    user, password = (
        _jaas_quoted(_text(config.get(key, ""))) for key in ("sasl.username", "sasl.password")
    )
    return {"sasl.jaas.config": f"{module} required username={user} password={password};"}


def _oidc_login(method: str, config: Mapping[str, object]) -> dict[str, str]:
    """The login with which Java asks an issuer for tokens, as librdkafka does."""
    if method.lower() != "oidc":
        msg = (
            f"`sasl.oauthbearer.method` {method} cannot be translated for Spark's Kafka connector: "
            f"only oidc can. {_INSTEAD['oauth_cb']}. {_WHERE}"
        )
        raise ConfigurationError(msg)
    given = {key.removeprefix(_OIDC): _text(value) for key, value in config.items()}
    options = {
        "clientId": given.get("client.id"),
        "clientSecret": given.get("client.secret"),
        "scope": given.get("scope"),
    }
    for pair in filter(None, given.get("extensions", "").split(",")):
        name, _, value = pair.partition("=")
        options[f"extension_{name.strip()}"] = value.strip()
    authority = given.get("https.ca.pem")
    if "https.ca.location" in given:
        authority = pem.certificates("https.ca.location", given["https.ca.location"])
    if authority is not None:
        options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
    written = "".join(
        f" {name}={_jaas_quoted(value)}" for name, value in options.items() if value is not None
    )
    return {
        "sasl.jaas.config": f"{_BEARER}.OAuthBearerLoginModule required{written};",
        "sasl.login.callback.handler.class": f"{_BEARER}.OAuthBearerLoginCallbackHandler",
    }


def _jaas_quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    # Java's tokenizer ends a quoted word at the end of a line.
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'


def _truststore(value: str, _config: Mapping[str, object]) -> dict[str, str]:
    return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": value}


def _private_key(value: str, config: Mapping[str, object]) -> dict[str, str]:
    if "ssl.certificate.pem" in config:
        chain = _text(config["ssl.certificate.pem"])
    elif "ssl.certificate.location" in config:
        chain = pem.certificates(
            "ssl.certificate.location", _text(config["ssl.certificate.location"])
        )
    else:
        msg = (
            "a private key is set for Kafka but no certificate: set `ssl.certificate.location` "
            "(or `ssl.certificate.pem`) too."
        )
        raise ConfigurationError(msg)
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": pem.private_key(value),
        "ssl.keystore.certificate.chain": chain,
    }


_TRANSLATIONS: dict[str, Callable[[str, Mapping[str, object]], dict[str, str]]] = {
    # librdkafka ignores the case, Java does not.
    "isolation.level": lambda value, _: {"isolation.level": value.lower()},
    f"{_OIDC}method": _oidc_login,
    f"{_OIDC}token.endpoint.url": lambda value, _: {f"{_OIDC}token.endpoint.url": value},
    "security.protocol": lambda value, _: {"security.protocol": value.upper()},
    "ssl.endpoint.identification.algorithm": lambda value, _: {
        "ssl.endpoint.identification.algorithm": "" if value == "none" else value
    },
    "ssl.ca.location": lambda value, config: _truststore(
        pem.certificates("ssl.ca.location", value), config
    ),
    "ssl.ca.pem": _truststore,
    "ssl.key.location": lambda value, config: _private_key(
        pem.text("ssl.key.location", value), config
    ),
    "ssl.key.pem": _private_key,
    "ssl.keystore.location": lambda value, _: {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": value,
    },
}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

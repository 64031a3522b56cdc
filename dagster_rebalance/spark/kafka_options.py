"""Translation of librdkafka's settings into options of Spark's Kafka connector, a Java client.

One configuration thereby serves the group member and Spark. Settings of the member alone (group,
polling, batching) are left out. A security setting without a counterpart is an error, and is never
dropped. Secrets are hidden in the `repr` of the options and never appear in a message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.transport_security import insecurity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Config = Mapping[str, object]

REDACTION = (
    r'(?i)key: "kafka\.[^"]*(?:jaas|password|passphrase|secret|token|keystore\.key)[^"]*"'
    r'\s+value: "(?:[^"\\]++|\\.)*+"'
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*+(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
"""A Java regular expression for `spark.redaction.string.regex`. It masks names and values of secret
options where a Spark Connect server logs the requests of its clients, and private keys anywhere,
such as in the plans of writes. Its quantifiers are possessive, because a long key would otherwise
overflow the stack."""
_SECRETS = ("password", "passphrase", "secret", "token", "jaas", "keystore.key")
_SPARK_PREFIX = "kafka."
_SPARK_LOGIN = "kafka.sasl.jaas.config"
_SPARK_KEYS = ("kafka.ssl.keystore.key", "kafka.ssl.keystore.location")
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
# Used in the translation of another setting, or true of every Java client.
_TRANSLATED_TOGETHER = frozenset(
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
_OIDC_PREFIXES = (_OIDC, "https.ca.")
_DEFAULT_IN_JAVA = {
    "enable.ssl.certificate.verification": frozenset({"true", "t", "1", "yes", "on"}),
    f"{_OIDC}grant.type": frozenset({"client_credentials"}),
}
_ALTERNATIVES = {
    "enable.ssl.certificate.verification": (
        "keep the verification of certificates, and name the authority with ssl.ca.location"
    ),
    "sasl.kerberos.keytab": "give kafka.sasl.jaas.config with a Krb5LoginModule",
    "sasl.kerberos.principal": "give kafka.sasl.jaas.config with a Krb5LoginModule",
    "oauth_cb": (
        "Java cannot call it, so give Spark a separate login: kafka.sasl.jaas.config and "
        "kafka.sasl.login.callback.handler.class (docs/logins.md)"
    ),
    "ssl.cipher.suites": "give kafka.ssl.cipher.suites with Java's names of the suites",
    "ssl.crl.location": "remove it: Java checks revocation by the JVM's own properties",
}
_WHERE = (
    "Give options that start with `kafka.` in `client_config` of KafkaConsumerResource, in "
    "`kafka_options` of KafkaSparkResource, or to `read_ranges`."
)
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_BEARER = "org.apache.kafka.common.security.oauthbearer"


class Secret(str):
    """The value of a secret option. `repr` hides the value, also in copies of the options."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def hide_secrets(options: Mapping[str, str]) -> dict[str, str]:
    """Return options whose secrets are hidden in `repr`."""
    return {key: Secret(value) if is_secret(key) else value for key, value in options.items()}


def is_secret(key: str) -> bool:
    """Return whether the value of an option is a secret."""
    return any(word in key.lower() for word in _SECRETS)


def spark_kafka_options(librdkafka_config: Config) -> dict[str, str]:
    """Translate a librdkafka configuration for Spark's Kafka connector.

    Certificates and keys are read here and become part of the options, so executors and Spark
    Connect servers need no files. A Connect server writes options into its event log and its pages:
    mask them there with the regular expression `REDACTION`, or let clients name the secrets by a
    config provider of Kafka (docs/security.md has both).

    Keys that start with `kafka.` are options of Spark, and take precedence: with
    `kafka.sasl.jaas.config` no part of the login is translated, with `kafka.ssl.keystore.key` or
    `kafka.ssl.keystore.location` no part of the client's key.
    """
    own = {
        key: _text(value)
        for key, value in librdkafka_config.items()
        if key.startswith(_SPARK_PREFIX)
    }
    # librdkafka's default; Java's is read_uncommitted, which would read aborted records.
    java = {"isolation.level": "read_committed"}
    for key, value in librdkafka_config.items():
        if not key.startswith(_SPARK_PREFIX) and not _is_replaced(key, own):
            java.update(_translate(key, _text(value), librdkafka_config))
    options = {**{f"{_SPARK_PREFIX}{key}": value for key, value in java.items()}, **own}
    if "kafka.bootstrap.servers" not in options:
        msg = (
            "the Kafka configuration has no `bootstrap.servers`: name at least one broker, as "
            "host:port."
        )
        raise ConfigurationError(msg)
    problem = insecurity({key.removeprefix(_SPARK_PREFIX): value for key, value in options.items()})
    if problem is not None:
        raise ConfigurationError(problem)
    return hide_secrets(options)


def _is_replaced(key: str, own: Mapping[str, str]) -> bool:
    """Return whether options of Spark replace a setting, which then needs no counterpart."""
    if key.startswith(("sasl.", "oauth", "https.", "enable.sasl.")) and not key.startswith(
        "sasl.mechanism"
    ):
        return _SPARK_LOGIN in own or f"{_SPARK_PREFIX}{key}" in own
    if key.startswith(("ssl.key", "ssl.certificate.")):
        return any(name in own for name in _SPARK_KEYS)
    return f"{_SPARK_PREFIX}{key}" in own


def _translate(key: str, value: str, config: Config) -> dict[str, str]:
    """Return the Java settings for a setting; none if a read of exact offsets does not need it."""
    if key.startswith(_OIDC_PREFIXES) and f"{_OIDC}method" not in config:
        msg = (
            f"the Kafka setting `{key}` has no effect without `{_OIDC}method`: set that to oidc, "
            f"or remove `{key}`"
        )
        raise ConfigurationError(msg)
    if value.lower() in _DEFAULT_IN_JAVA.get(key, ()):
        return {}
    if key in _SAME_IN_JAVA:
        return {_SAME_IN_JAVA[key]: value}
    if key in _TRANSLATIONS:
        return _TRANSLATIONS[key](value, config)
    if key not in _TRANSLATED_TOGETHER and key.startswith(_SECURITY_PREFIXES):
        alternative = _ALTERNATIVES.get(
            key, f"give the Java client's own setting as `kafka.{key}`, by its name in Java"
        )
        msg = (
            f"the Kafka setting `{key}` cannot be translated for Spark's Kafka connector: "
            f"{alternative}. {_WHERE}"
        )
        raise ConfigurationError(msg)
    return _sasl_login(config) if key == "sasl.username" else {}


def _sasl_login(config: Config) -> dict[str, str]:
    if "sasl.jaas.config" in config:
        return {}
    mechanism = _text(config.get("sasl.mechanism", config.get("sasl.mechanisms", "")))
    module = _LOGIN_MODULES.get(mechanism.upper())
    if module is None:
        msg = (
            "`sasl.username` cannot be translated for Spark's Kafka connector with the SASL "
            f"mechanism {mechanism or '(none)'}: set `sasl.mechanism` to one of "
            f"{', '.join(_LOGIN_MODULES)}, or give `kafka.sasl.jaas.config`. {_WHERE}"
        )
        raise ConfigurationError(msg)
    user, password = (
        _jaas_quoted(_text(config.get(key, ""))) for key in ("sasl.username", "sasl.password")
    )
    return {"sasl.jaas.config": f"{module} required username={user} password={password};"}


def _oidc_login(method: str, config: Config) -> dict[str, str]:
    """Return the login with which Java requests tokens from an issuer, as librdkafka does."""
    if method.lower() != "oidc":
        msg = (
            f"`sasl.oauthbearer.method` {method} cannot be translated for Spark's Kafka connector: "
            f"only oidc can. {_ALTERNATIVES['oauth_cb']}. {_WHERE}"
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
        authority = _read_certificates("https.ca.location", given["https.ca.location"])
    if authority is not None:
        options |= _truststore(authority, config)
    joined = "".join(
        f" {name}={_jaas_quoted(value)}" for name, value in options.items() if value is not None
    )
    return {
        "sasl.jaas.config": f"{_BEARER}.OAuthBearerLoginModule required{joined};",
        "sasl.login.callback.handler.class": f"{_BEARER}.OAuthBearerLoginCallbackHandler",
    }


def _jaas_quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    # Java's tokenizer ends a quoted word at the end of a line.
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'


def _truststore(value: str, _config: Config) -> dict[str, str]:
    return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": value}


def _keystore(key: str, config: Config) -> dict[str, str]:
    if "ssl.certificate.pem" in config:
        chain = _text(config["ssl.certificate.pem"])
    elif "ssl.certificate.location" in config:
        location = _text(config["ssl.certificate.location"])
        chain = _read_certificates("ssl.certificate.location", location)
    else:
        msg = (
            "a private key is set for Kafka but no certificate: set `ssl.certificate.location` "
            "(or `ssl.certificate.pem`) too."
        )
        raise ConfigurationError(msg)
    if "-----BEGIN PRIVATE KEY-----" not in key and "-----BEGIN ENCRYPTED PRIVATE KEY" not in key:
        msg = (
            "the private key for Kafka is not in PKCS#8 form, the only one that Spark's Kafka "
            "connector reads: convert it with `openssl pkcs8 -topk8 -in key.pem -out "
            "key.pkcs8.pem`."
        )
        raise ConfigurationError(msg)
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": key,
        "ssl.keystore.certificate.chain": chain,
    }


def _read_pem(setting: str, location: str) -> str:
    try:
        return Path(location).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = (
            f"`{setting}` names {location}, which cannot be read as a PEM file ({reason}): name "
            "one file in PEM format."
        )
        raise ConfigurationError(msg) from error


def _read_certificates(setting: str, location: str) -> str:
    text = _read_pem(setting, location)
    if "-----BEGIN CERTIFICATE-----" not in text:
        msg = (
            f"`{setting}` names {location}, which has no certificate in PEM format: convert it "
            "with `openssl x509 -outform PEM`."
        )
        raise ConfigurationError(msg)
    return text


_TRANSLATIONS: dict[str, Callable[[str, Config], dict[str, str]]] = {
    # librdkafka ignores the case, Java does not.
    "isolation.level": lambda value, _: {"isolation.level": value.lower()},
    f"{_OIDC}method": _oidc_login,
    f"{_OIDC}token.endpoint.url": lambda value, _: {f"{_OIDC}token.endpoint.url": value},
    "security.protocol": lambda value, _: {"security.protocol": value.upper()},
    "ssl.endpoint.identification.algorithm": lambda value, _: {
        "ssl.endpoint.identification.algorithm": "" if value == "none" else value
    },
    "ssl.ca.location": lambda value, config: _truststore(
        _read_certificates("ssl.ca.location", value), config
    ),
    "ssl.ca.pem": _truststore,
    "ssl.key.location": lambda value, config: _keystore(
        _read_pem("ssl.key.location", value), config
    ),
    "ssl.key.pem": _keystore,
    "ssl.keystore.location": lambda value, _: {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": value,
    },
}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

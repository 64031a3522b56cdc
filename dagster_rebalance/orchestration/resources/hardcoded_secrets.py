"""Secrets in code, logs and Dagster Pipes.

The name of a setting decides whether its value is a secret. If the name looks secret but the value
is not, the value must still be an `EnvVar`. No result or message shows a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
    from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
    from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource

_SECRET_NAME = re.compile(
    r"password|passphrase|secret|token|jaas|access[._-]?key|account\.key|private\.key|ssl\.key\.pem|keystore\.key|\.sas\.",
    re.IGNORECASE,
)
_NO_SECRET_NAME = re.compile(
    r"(file|path|location|provider|provider\.type|class|url|uri|enabled|name|regex)$", re.IGNORECASE
)
_SECRET_TEXT = re.compile(r"://[^/\s:@]+:[^/\s@]+@|(password|secret|token)[^\s=]*=", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
_BY_REFERENCE = re.compile(r"\$\{\w+:[^}]*\}")
"""A secret that a config provider of Kafka resolves."""
_LOGIN_WITHOUT_OPTIONS = re.compile(r"[\w.$]+\s+required\s*;")
"""A JAAS text without a login, such as for the identity of the machine."""
_SHORTEST_SECRET = 4
"""A shorter secret would also occur in many other texts."""
_HARMLESS_PARAMETERS = frozenset(
    {"use_ssl", "user_id", "user_agent", "session_id", "grpc_max_message_size"}
)


def hardcoded_secrets(
    kafka: KafkaConsumerResource, spark: KafkaSparkResource | None
) -> Iterator[str]:
    """Yield the settings whose secrets are hardcoded, in place of an `EnvVar`."""
    if _is_hardcoded(kafka.sasl_password):
        yield "sasl_password"
    yield from _named("client_config", kafka.client_config)
    if spark is not None:
        yield from _named("spark_config", spark.spark_config)
        yield from _named("kafka_options", spark.kafka_options)
        if spark.remote is not None and _is_hardcoded(spark.remote):
            yield from _in_remote(spark.remote)


def hardcoded_registry_secrets(key: str, registry: SchemaRegistryResource) -> Iterator[str]:
    """Yield the hardcoded secrets of the schema registry with this resource key."""
    for name in ("password", "token"):
        if _is_hardcoded(getattr(registry, name)):
            yield f"{name} of {key}"
    if _is_hardcoded(registry.url) and _SECRET_TEXT.search(registry.url):
        yield f"the login in url of {key}"
    if _is_hardcoded(registry.client_config.get("basic.auth.user.info")):
        yield f"client_config['basic.auth.user.info'] of {key}"
    yield from _named(f"client_config of {key}", registry.client_config)


def hidden_settings(resource: dg.ConfigurableResource[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield `(field, name, value)` of the settings with `repr=False`, as input of a digest.

    For an `EnvVar`, the value is the name of the variable. For a secret it is empty, because a
    short secret could be guessed from the digest.
    """
    for field, info in type(resource).model_fields.items():
        if info.repr:
            continue
        content = getattr(resource, field)
        settings = content if isinstance(content, Mapping) else {field: content}
        for name, value in sorted(settings.items()):
            if isinstance(value, dg.EnvVar):
                yield field, name, value.env_var_name
            elif _is_secret_name(name) or _SECRET_TEXT.search(str(value)):
                yield field, name, ""
            else:
                yield field, name, str(value)


def without_secrets(text: str, kafka: KafkaConsumerResource) -> str:
    """Return a text, such as an error, with the secrets of a group's login replaced by `***`."""
    settings = {**kafka.client_config, **kafka.consumer_config()}
    for secret in sorted(_secrets_in(settings), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _LOGIN.sub("://***@", text)


def check_no_secrets(
    extras: Mapping[str, Any], settings: Mapping[str, Any], *, taken: Mapping[str, Any]
) -> None:
    """Check the extras that a user sends with a batch through Dagster Pipes."""
    secrets = _secrets_in(settings)
    for path, name, value in _values_in(extras):
        if path in taken:
            problem = "has a name that the batch uses: rename it"
        elif value and (_is_secret_name(name) or any(one in str(value) for one in secrets)):
            problem = (
                "is a secret, and the context of Dagster Pipes may be readable by others: pass it "
                "to the external job by a secret scope or an environment variable"
            )
        else:
            continue
        msg = f"{path!r} among the extras for Dagster Pipes {problem}"
        raise ConfigurationError(msg)


def _secrets_in(settings: Mapping[str, Any]) -> list[str]:
    return [
        str(value)
        for name, value in settings.items()
        if _is_secret_name(name) and isinstance(value, str) and len(value) >= _SHORTEST_SECRET
    ]


def _values_in(extras: object, path: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield `(path, name, value)` of all entries; the value of a container is None."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(extras, Mapping):
        parts = extras.items()
    elif isinstance(extras, (list, tuple)):
        parts = enumerate(extras)
    for name, value in parts:
        inner = f"{path}.{name}" if path else str(name)
        yield inner, str(name), None if isinstance(value, (Mapping, list, tuple)) else value
        yield from _values_in(value, inner)


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def _named(field: str, settings: Mapping[str, str]) -> Iterator[str]:
    for name, value in settings.items():
        is_secret = (
            _is_secret_name(name)
            and not _BY_REFERENCE.search(value)
            and not _LOGIN_WITHOUT_OPTIONS.fullmatch(value)
        )
        if _is_hardcoded(value) and (
            is_secret or (_SECRET_TEXT.search(value) and not _BY_REFERENCE.search(value))
        ):
            yield f"{field}['{name}']"


def _in_remote(remote: str) -> Iterator[str]:
    address, _, parameters = remote.partition(";")
    if "@" in address or "=" in address:
        yield "the login in remote"
    for parameter in filter(None, parameters.split(";")):
        name, has_value, _ = parameter.partition("=")
        if not has_value:
            yield "a parameter without a name in remote"
        elif name not in _HARMLESS_PARAMETERS:
            yield f"the {name} in remote"


def _is_hardcoded(value: str | None) -> bool:
    return bool(value) and not isinstance(value, dg.EnvVar)

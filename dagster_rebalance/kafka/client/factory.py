"""Makes the clients of confluent-kafka, and says why one cannot be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaException

from dagster_rebalance.kafka.client.errors import configuration_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Client = TypeVar("_Client")


def made(make: Callable[[dict[str, Any]], _Client], config: Mapping[str, Any]) -> _Client:
    """A client.

    Raises:
        BrokerError: The user's function gives no token to log in with.
        ConfigurationError: The client refuses a setting; the message names it.
    """
    tokens = config.get("oauth_cb")
    if tokens is not None:
        tokens(config.get("sasl.oauthbearer.config", ""))
    try:
        return make(dict(config))
    except (KafkaException, ValueError, TypeError) as problem:
        raise configuration_error(problem) from None

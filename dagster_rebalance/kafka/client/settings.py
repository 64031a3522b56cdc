"""Derive the settings of the member, the fetcher and the other clients from one user config.

Decides which settings are refused, and derives others from the hold limit. Never connects: only the
creation of a client shows whether the client accepts the settings.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.transport_security import insecurity
from dagster_rebalance.kafka.client.credentials import Credentials
from dagster_rebalance.kafka.client.defaults import ClientKind, client_config
from dagster_rebalance.kafka.client.oauth import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

_client_logger = logging.getLogger("dagster_rebalance.librdkafka")

HOLD_MARGIN_S = 15.0
"""The time from the end of the hold limit until the broker fences the member: enough for the last
commit and the release."""

_DEFAULT_SESSION_TIMEOUT_MS = 45_000
_CONNECTION = re.compile(
    r"(bootstrap\.servers|metadata\.broker\.list|security\.|sasl\.|ssl\.|https\.|socket\.|client\."
    r"|broker\.|reconnect\.|enable\.ssl\.|enable\.sasl\.)"
    r"|(oauth_cb|log_level|logger|debug|api\.version\.request|receive\.message\.max\.bytes)$"
)
_FETCH_SIZES = frozenset({"fetch.max.bytes", "message.max.bytes"})
"""In each consumer, `receive.message.max.bytes` must fit these settings."""
_GROUP_ONLY = frozenset(
    [
        "group.protocol",
        "group.remote.assignor",
        "partition.assignment.strategy",
        "session.timeout.ms",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "stats_cb",
        "on_commit",
    ]
)
CREDENTIALS = "credentials_cb"
"""A setting of this package: a function that returns user and password."""
CALLBACKS = frozenset({"error_cb", "stats_cb", "throttle_cb", "on_commit", "oauth_cb", CREDENTIALS})
"""The settings that are functions."""
_LONGEST_S = sys.float_info.max
_LONGEST_HOLD_S = 86_400 - HOLD_MARGIN_S
_BROKER_DECIDES = ("session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy")
_COOPERATIVE = "cooperative-sticky"
_STRATEGIES = frozenset({_COOPERATIVE, "range", "roundrobin"})
_EARLIEST = frozenset({"earliest", "smallest", "beginning"})
_LATEST = frozenset({"latest", "largest", "end"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings; `user` is the user's mapping, secrets included.

    `strategy` is the assignment strategy of a classic group: `cooperative-sticky`, or eager
    strategies, separated by commas. `hold_limit_s` is the intended limit of a hold, but the broker
    ends a hold only at `max_poll_interval_s`.
    """

    user: Mapping[str, Any] = field(repr=False)
    group_id: str
    group_protocol: str
    strategy: str
    hold_limit_s: float
    max_poll_interval_s: float
    credentials: Credentials | None = field(default=None, repr=False)

    @property
    def is_classic(self) -> bool:
        """Whether the classic protocol is used."""
        return self.group_protocol == "classic"

    @property
    def is_eager(self) -> bool:
        """Whether every rebalance revokes all partitions of all members."""
        return self.is_classic and self.strategy != _COOPERATIVE

    @property
    def brokers(self) -> str:
        """The configured addresses, for messages."""
        return str(
            self.user.get("bootstrap.servers")
            or self.user.get("metadata.broker.list")
            or "the mock cluster"
        )

    @property
    def offset_reset(self) -> Literal["earliest", "latest", "error"]:
        """Where reading starts without a committed offset: `earliest`, `latest` or `error`."""
        value = str(self.user.get("auto.offset.reset", "latest"))
        return "earliest" if value in _EARLIEST else "latest" if value in _LATEST else "error"

    @property
    def reads_committed(self) -> bool:
        """Whether records of open and aborted transactions are hidden (librdkafka's default)."""
        return isolation_level(self.user) == "read_committed"

    def member(self) -> dict[str, Any]:
        """Return the settings of the group member."""
        derived: dict[str, object] = {
            "group.protocol": self.group_protocol,
            "max.poll.interval.ms": round(self.max_poll_interval_s * 1000),
        }
        if self.is_classic:
            derived["partition.assignment.strategy"] = self.strategy
            derived["topic.metadata.refresh.interval.ms"] = -1
        return _with_logger(client_config(ClientKind.MEMBER, self._with_login(), derived))

    def fetcher(self) -> dict[str, Any]:
        """Return the settings of the consumer outside the group that reads records for `poll`."""
        return self._reading(ClientKind.FETCHER)

    def range_reader(self) -> dict[str, Any]:
        """Return the settings of the consumers outside the group that read exact ranges."""
        return self._reading(ClientKind.RANGE_READER)

    def connection(self, client: ClientKind = ClientKind.ADMIN) -> dict[str, Any]:
        """Return the settings of a client that needs only the user's connection settings."""
        is_consumer = client in {ClientKind.LOG_CHECK, ClientKind.OFFSET_READER}
        given = {
            key: value
            for key, value in self._with_login().items()
            if _CONNECTION.match(key) or (is_consumer and key in _FETCH_SIZES)
        }
        derived = {"group.id": self.group_id} if is_consumer else {}
        return _with_logger(client_config(client, given, derived))

    def _reading(self, client: ClientKind) -> dict[str, Any]:
        given = {key: value for key, value in self._with_login().items() if key not in _GROUP_ONLY}
        client_id = f"{self.user.get('client.id', 'rdkafka')}-fetch"
        return _with_logger(client_config(client, given, {"client.id": client_id}))

    def _with_login(self) -> dict[str, Any]:
        return with_login(self.user, self.credentials)


def with_login(config: Mapping[str, Any], credentials: Credentials | None = None) -> dict[str, Any]:
    """Return the settings with user and password instead of `credentials_cb`."""
    plain = {name: value for name, value in config.items() if name != CREDENTIALS}
    if CREDENTIALS not in config:
        return plain
    user, password = (credentials or Credentials(config[CREDENTIALS])).current()
    return {**plain, "sasl.username": user, "sasl.password": password}


def isolation_level(config: Mapping[str, Any]) -> str:
    """Return the isolation level of a config in lower case: librdkafka ignores case."""
    return str(config.get("isolation.level", "read_committed")).lower()


def validated(config: Mapping[str, Any], *, hold_limit_s: float) -> Settings:
    """Validate a config mapping; raise `ConfigurationError` for an invalid setting."""
    _refuse(_type_problems(config))
    user: dict[str, Any] = {**(config.get("default.topic.config") or {}), **config}
    user.pop("default.topic.config", None)
    _refuse(_problems(user))
    checked_seconds("hold_limit_s", hold_limit_s)
    protocol = str(user.get("group.protocol", "consumer"))
    strategy = _strategy(user)
    _refuse(_group_problems(user, protocol, strategy, hold_limit_s))
    if "oauth_cb" in user and not isinstance(user["oauth_cb"], Tokens):
        user["oauth_cb"] = Tokens(user["oauth_cb"])
    return Settings(
        user=user,
        group_id=str(user["group.id"]),
        group_protocol=protocol,
        strategy=",".join(strategy),
        hold_limit_s=hold_limit_s,
        max_poll_interval_s=_max_poll_interval_s(user, protocol, hold_limit_s),
        credentials=Credentials(user[CREDENTIALS]) if CREDENTIALS in user else None,
    )


def checked_seconds(name: str, value: object) -> None:
    """Raise `ConfigurationError` unless a value is a non-negative number of seconds."""
    is_seconds = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (0 <= value <= _LONGEST_S or value == math.inf)
    )
    if not is_seconds:
        msg = f"{name} must be a number of seconds, not {value!r}"
        raise ConfigurationError(msg)


def _refuse(problems: Iterator[str]) -> None:
    first = next(problems, None)
    if first is not None:
        raise ConfigurationError(first)


def _type_problems(config: object) -> Iterator[str]:
    if not isinstance(config, Mapping):
        kind = type(config).__name__
        yield f"the settings must be a mapping of librdkafka's names to values, not a {kind}"
        return
    nested = config.get("default.topic.config") or {}
    if not isinstance(nested, Mapping):
        yield f"'default.topic.config' must be a mapping, not a {type(nested).__name__}"
        return
    for name in (*config, *nested):
        if not isinstance(name, str):
            yield f"the name of each setting must be a text, not {name!r}"
    for name in CALLBACKS & config.keys():
        if not callable(config[name]):
            kind = type(config[name]).__name__
            yield f"'{name}' must be a function, not a {kind}; leave it out to have none"


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    if not config.get("group.id"):
        yield "the setting 'group.id' is missing"
    has_brokers = "metadata.broker.list" in config or "test.mock.num.brokers" in config
    if not config.get("bootstrap.servers") and not has_brokers:
        yield "the setting 'bootstrap.servers' is missing"
    yield from _credentials_problems(config)
    insecure = insecurity(config)
    if insecure is not None:
        yield insecure
    if _is_on(config.get("enable.auto.commit", False)):
        yield (
            "'enable.auto.commit' is on: it would commit offsets of work that has not succeeded. "
            "Remove it and commit finished work"
        )
    if config.get("group.instance.id"):
        yield (
            "'group.instance.id' is set: a static member does not hand its partitions over when it "
            "leaves, and a second process with the same id (a reload, a deploy) would fence the "
            "first one. Remove it"
        )
    if _is_on(config.get("enable.partition.eof", False)):
        yield (
            "'enable.partition.eof' is on: a poll returns only records, not ends of partitions. "
            "Remove it, and call current_lag, or compare position with end_offsets"
        )


def _credentials_problems(config: Mapping[str, Any]) -> Iterator[str]:
    if CREDENTIALS not in config:
        return
    for name in ("sasl.username", "sasl.password"):
        if config.get(name):
            yield (
                f"'{CREDENTIALS}' provides user and password, and '{name}' is also set: remove one"
            )
    protocol = str(config.get("security.protocol") or "PLAINTEXT").upper()
    if not protocol.startswith("SASL_"):
        yield (
            f"'{CREDENTIALS}' is set, but 'security.protocol' is {protocol}, which has no "
            f"login: set it to SASL_SSL, or remove '{CREDENTIALS}'"
        )


def _group_problems(
    config: Mapping[str, Any], protocol: str, strategy: list[str], hold_limit_s: float
) -> Iterator[str]:
    if not 0 < hold_limit_s <= _LONGEST_HOLD_S:
        yield (
            f"hold_limit_s must be above 0 and at most {_LONGEST_HOLD_S:g}, "
            f"which is the client's limit, not {hold_limit_s}"
        )
    reset = str(config.get("auto.offset.reset", "latest"))
    if reset not in _EARLIEST | _LATEST | {"error"}:
        yield "'auto.offset.reset' must be 'earliest', 'latest' or 'error'"
    if protocol not in {"consumer", "classic"}:
        yield "'group.protocol' must be 'consumer' or 'classic'"
    if protocol == "consumer":
        for name in _BROKER_DECIDES:
            if name in config:
                yield (
                    f"'{name}' is decided by the broker in the consumer protocol: "
                    "remove it, or set 'group.protocol' to 'classic'"
                )
    elif _int(config, "topic.metadata.refresh.interval.ms", -1) >= 0:
        yield (
            "'topic.metadata.refresh.interval.ms' is set: in the classic protocol a change that "
            "the client finds during a hold would supersede the hold without an error. Remove it: "
            "new partitions are discovered between holds, every discovery_interval_s"
        )
    if not _STRATEGIES.issuperset(strategy):
        yield (
            "'partition.assignment.strategy' names a strategy that this client does not have: use "
            "'cooperative-sticky', or 'range' or 'roundrobin' (eager). docs/upgrading.md describes "
            "how a group moves from one to another"
        )
    if _COOPERATIVE in strategy and len(set(strategy)) > 1:
        yield (
            "'partition.assignment.strategy' mixes eager and cooperative strategies. This client "
            "cannot be a member of both kinds. Keep one kind; a group moves to "
            "'cooperative-sticky' in two rolling bounces by way of 'group.protocol'='consumer' "
            "(Kafka 4), as docs/upgrading.md describes"
        )


def _strategy(config: Mapping[str, Any]) -> list[str]:
    chosen = str(config.get("partition.assignment.strategy") or _COOPERATIVE)
    return [name.strip() for name in chosen.split(",")]


def _max_poll_interval_s(config: Mapping[str, Any], protocol: str, hold_limit_s: float) -> float:
    if "max.poll.interval.ms" in config:
        chosen = _int(config, "max.poll.interval.ms", 0) / 1000
        if chosen <= hold_limit_s:
            msg = (
                f"hold_limit_s={hold_limit_s:g} does not fit into "
                f"'max.poll.interval.ms'={chosen * 1000:.0f}: the broker would fence "
                "the member before the hold ends. Lower the first, raise the second, or omit "
                "'max.poll.interval.ms' to have it derived"
            )
            raise ConfigurationError(msg)
        return chosen
    derived = hold_limit_s + HOLD_MARGIN_S
    if protocol == "classic":
        # librdkafka refuses a poll interval below the session timeout.
        timeout_ms = _int(config, "session.timeout.ms", _DEFAULT_SESSION_TIMEOUT_MS)
        derived = max(derived, timeout_ms / 1000)
    return derived


def _with_logger(config: dict[str, Any]) -> dict[str, Any]:
    return {"logger": _client_logger, **config}


def _is_on(value: object) -> bool:
    """Return whether librdkafka parses a value as true; it accepts only forms of true and false."""
    return str(value).lower() in {"true", "t", "1"}


def _int(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        msg = f"'{name}' must be a whole number of milliseconds"
        raise ConfigurationError(msg) from None

"""One user config becomes the settings of the member, the fetcher and the read-only requests.

Owns which settings are refused, and what is derived from the hold limit. Must never connect: that
the client itself accepts the settings shows when it is made.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.transport_security import insecurity
from dagster_rebalance.kafka.client.credentials import Credentials
from dagster_rebalance.kafka.client.defaults import ClientKind, configured
from dagster_rebalance.kafka.client.oauth import Tokens

_client_logger = logging.getLogger("dagster_rebalance.librdkafka")

HOLD_MARGIN_S = 15.0
"""From the end of the hold limit to the moment when the broker fences the member: the last commit
and the release fit in."""

_DEFAULT_SESSION_TIMEOUT_MS = 45_000
_CONNECTION = (
    *(
        "bootstrap.servers",
        "metadata.broker.list",
        "security.",
        "sasl.",
        "ssl.",
        "https.",
        "socket.",
        "client.",
    ),
    *("broker.", "reconnect.", "enable.ssl.", "enable.sasl."),
)
_CONNECTION_EXACT = frozenset(
    {
        *("oauth_cb", "log_level", "logger", "debug", "api.version.request"),
        "receive.message.max.bytes",
    }
)
_SIZES_OF_A_FETCH = frozenset({"fetch.max.bytes", "message.max.bytes"})
"""`receive.message.max.bytes` must fit to them in each consumer."""
_GROUP_ONLY = frozenset(
    {
        "group.protocol",
        "group.remote.assignor",
        "partition.assignment.strategy",
        "session.timeout.ms",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "stats_cb",
        "on_commit",
    }
)
CREDENTIALS = "credentials_cb"
"""A setting of this package: a function that returns user and password."""
CALLBACKS = frozenset({"error_cb", "stats_cb", "throttle_cb", "on_commit", "oauth_cb", CREDENTIALS})
"""The settings that are functions."""
_LONGEST_S = sys.float_info.max
_LONGEST_HOLD_S = 86_400 - HOLD_MARGIN_S
_BROKER_DECIDES = ("session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy")
_EAGER = frozenset({"range", "roundrobin"})
_COOPERATIVE = "cooperative-sticky"
_EARLIEST = frozenset({"earliest", "smallest", "beginning"})
_LATEST = frozenset({"latest", "largest", "end"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings.

    Attributes:
        user: The mapping as it was given, secrets included.
        group_id: The consumer group.
        group_protocol: `consumer` (KIP-848) or `classic`.
        strategy: How a classic group shares partitions out: `cooperative-sticky`, or eager ones,
            separated by commas.
        hold_limit_s: How long a revoke may be held by intention.
        max_poll_interval_s: When the broker ends a hold.
        credentials: User and password, where a function gives them.
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
        """Whether every rebalance takes all partitions from all members."""
        return self.is_classic and self.strategy != _COOPERATIVE

    @property
    def brokers(self) -> str:
        """The addresses that were configured, for messages."""
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
        """The settings of the group member."""
        derived: dict[str, object] = {
            "group.protocol": self.group_protocol,
            "max.poll.interval.ms": round(self.max_poll_interval_s * 1000),
        }
        if self.is_classic:
            derived["partition.assignment.strategy"] = self.strategy
            derived["topic.metadata.refresh.interval.ms"] = -1
        return _logging(configured(ClientKind.MEMBER, self._with_login(), derived))

    def fetcher(self) -> dict[str, Any]:
        """The settings of the group-less consumer that reads records for `poll`."""
        return self._reading(ClientKind.FETCHER)

    def range_reader(self) -> dict[str, Any]:
        """The settings of the group-less consumers that read exact ranges."""
        return self._reading(ClientKind.RANGE_READER)

    def connection(self, client: ClientKind = ClientKind.ADMIN) -> dict[str, Any]:
        """The settings of a client that gets only those of the user that concern the connection."""
        is_consumer = client in {ClientKind.LOG_CHECK, ClientKind.OFFSET_READER}
        exact = _CONNECTION_EXACT | (_SIZES_OF_A_FETCH if is_consumer else frozenset())
        given = {
            key: value
            for key, value in self._with_login().items()
            if key.startswith(_CONNECTION) or key in exact
        }
        derived = {"group.id": self.group_id} if is_consumer else {}
        return _logging(configured(client, given, derived))

    def _reading(self, client: ClientKind) -> dict[str, Any]:
        given = {key: value for key, value in self._with_login().items() if key not in _GROUP_ONLY}
        client_id = f"{self.user.get('client.id', 'rdkafka')}-fetch"
        return _logging(configured(client, given, {"client.id": client_id}))

    def _with_login(self) -> dict[str, Any]:
        return with_login(self.user, self.credentials)


def with_login(config: Mapping[str, Any], credentials: Credentials | None = None) -> dict[str, Any]:
    """The settings with the user and password that a function gives, in place of the function.

    Raises:
        BrokerError: It failed.
        ConfigurationError: It returned something else.
    """
    plain = {name: value for name, value in config.items() if name != CREDENTIALS}
    if CREDENTIALS not in config:
        return plain
    user, password = (credentials or Credentials(config[CREDENTIALS])).current()
    return {**plain, "sasl.username": user, "sasl.password": password}


def isolation_level(config: Mapping[str, Any]) -> str:
    """The isolation level of a config; librdkafka ignores case."""
    return str(config.get("isolation.level", "read_committed")).lower()


def _logging(config: dict[str, Any]) -> dict[str, Any]:
    return {"logger": _client_logger, **config}


def validated(config: Mapping[str, Any], *, hold_limit_s: float) -> Settings:
    """Check a config mapping.

    Raises:
        ConfigurationError: A setting cannot work; the message names it and what to change.
    """
    config = _flat(config)
    for needed in ("group.id", "bootstrap.servers"):
        if not config.get(needed) and not (
            needed == "bootstrap.servers"
            and ("metadata.broker.list" in config or "test.mock.num.brokers" in config)
        ):
            msg = f"the setting '{needed}' is missing"
            raise ConfigurationError(msg)
    _check_credentials(config)
    problem = insecurity(config)
    if problem is not None:
        raise ConfigurationError(problem)
    if _is_on(config.get("enable.auto.commit", False)):
        msg = (
            "'enable.auto.commit' is on: it would commit offsets of work that has not succeeded. "
            "Remove it and commit what is done"
        )
        raise ConfigurationError(msg)
    if config.get("group.instance.id"):
        msg = (
            "'group.instance.id' is set: a static member does not hand its partitions over when it "
            "leaves, and a second process with "
            "the same id (a reload, a deploy) would fence the first one. Remove it"
        )
        raise ConfigurationError(msg)
    if _is_on(config.get("enable.partition.eof", False)):
        msg = (
            "'enable.partition.eof' is on: a poll returns records, and news of an end is none. "
            "Remove it, and ask current_lag, or compare position with end_offsets"
        )
        raise ConfigurationError(msg)
    checked_seconds("hold_limit_s", hold_limit_s)
    if not 0 < hold_limit_s <= _LONGEST_HOLD_S:
        msg = (
            f"hold_limit_s must be above 0 and at most {_LONGEST_HOLD_S:g}, "
            f"which is what the client allows, not {hold_limit_s}"
        )
        raise ConfigurationError(msg)
    reset = str(config.get("auto.offset.reset", "latest"))
    if reset not in _EARLIEST | _LATEST | {"error"}:
        msg = "'auto.offset.reset' must be 'earliest', 'latest' or 'error'"
        raise ConfigurationError(msg)
    protocol = str(config.get("group.protocol", "consumer"))
    _check_protocol(config, protocol)
    if "oauth_cb" in config and not isinstance(config["oauth_cb"], Tokens):
        config["oauth_cb"] = Tokens(config["oauth_cb"])
    return Settings(
        user=config,
        group_id=str(config["group.id"]),
        group_protocol=protocol,
        strategy=_strategy(config),
        hold_limit_s=hold_limit_s,
        max_poll_interval_s=_max_poll_interval_s(config, protocol, hold_limit_s),
        credentials=Credentials(config[CREDENTIALS]) if CREDENTIALS in config else None,
    )


def checked_seconds(name: str, value: object) -> None:
    """Refuse what is no time span.

    Raises:
        ConfigurationError: It is no number, or below 0.
    """
    if isinstance(value, bool) or not (isinstance(value, int | float) and _is_span(value)):
        msg = f"{name} must be a number of seconds, not {value!r}"
        raise ConfigurationError(msg)


def _is_span(value: float) -> bool:
    return value >= 0 and (value <= _LONGEST_S or value == math.inf)


def _flat(config: object) -> dict[str, Any]:
    """The settings with those of `default.topic.config` among them, as the client takes them."""
    if not isinstance(config, Mapping):
        kind = type(config).__name__
        msg = f"the settings must be a mapping of librdkafka's names to values, not a {kind}"
        raise ConfigurationError(msg)
    nested = config.get("default.topic.config") or {}
    if not isinstance(nested, Mapping):
        msg = f"'default.topic.config' must be a mapping, not a {type(nested).__name__}"
        raise ConfigurationError(msg)
    for name in (*config, *nested):
        if not isinstance(name, str):
            msg = f"the name of each setting must be a text, not {name!r}"
            raise ConfigurationError(msg)
    for name in CALLBACKS & config.keys():
        if not callable(config[name]):
            kind = type(config[name]).__name__
            msg = f"'{name}' must be a function, not a {kind}; leave it out to have none"
            raise ConfigurationError(msg)
    return {
        **nested,
        **{name: value for name, value in config.items() if name != "default.topic.config"},
    }


def _check_credentials(config: Mapping[str, Any]) -> None:
    if CREDENTIALS not in config:
        return
    for name in ("sasl.username", "sasl.password"):
        if config.get(name):
            msg = f"'{CREDENTIALS}' gives user and password, and '{name}' is set, too: remove one"
            raise ConfigurationError(msg)
    protocol = str(config.get("security.protocol") or "PLAINTEXT").upper()
    if not protocol.startswith("SASL_"):
        msg = (
            f"'{CREDENTIALS}' is set, but 'security.protocol' is {protocol}, which has no login: "
            f"set it to SASL_SSL, or remove '{CREDENTIALS}'"
        )
        raise ConfigurationError(msg)


def _check_protocol(config: Mapping[str, Any], protocol: str) -> None:
    if protocol not in {"consumer", "classic"}:
        msg = "'group.protocol' must be 'consumer' or 'classic'"
        raise ConfigurationError(msg)
    if protocol == "consumer":
        for name in _BROKER_DECIDES:
            if name in config:
                msg = (
                    f"'{name}' is decided by the broker in the consumer protocol: "
                    "remove it, or set 'group.protocol' to 'classic'"
                )
                raise ConfigurationError(msg)
        return
    if _int(config, "topic.metadata.refresh.interval.ms", -1) >= 0:
        msg = (
            "'topic.metadata.refresh.interval.ms' is set: in the classic protocol what the client "
            "finds during a hold would overtake "
            "the hold without a word. Remove it: new partitions are looked for between holds, "
            "every discovery_interval_s"
        )
        raise ConfigurationError(msg)


def _strategy(config: Mapping[str, Any]) -> str:
    chosen = [
        name.strip()
        for name in str(config.get("partition.assignment.strategy") or _COOPERATIVE).split(",")
    ]
    unknown = [name for name in chosen if name != _COOPERATIVE and name not in _EAGER]
    if unknown:
        msg = (
            "'partition.assignment.strategy' names a strategy that this client does not have: use "
            "'cooperative-sticky', or 'range' or 'roundrobin' (eager). docs/upgrading.md says how "
            "a group moves from one to another"
        )
        raise ConfigurationError(msg)
    if _COOPERATIVE in chosen and len(set(chosen)) > 1:
        msg = (
            "'partition.assignment.strategy' mixes eager and cooperative strategies. This client "
            "cannot be a member of both kinds. Leave one kind; a group moves to "
            "'cooperative-sticky' in two rolling bounces by way of 'group.protocol'='consumer' "
            "(Kafka 4), as docs/upgrading.md describes"
        )
        raise ConfigurationError(msg)
    return ",".join(chosen)


def _max_poll_interval_s(config: Mapping[str, Any], protocol: str, hold_limit_s: float) -> float:
    if "max.poll.interval.ms" in config:
        chosen = _int(config, "max.poll.interval.ms", 0) / 1000
        if chosen <= hold_limit_s:
            msg = (
                f"hold_limit_s={hold_limit_s:g} does not fit into "
                f"'max.poll.interval.ms'={chosen * 1000:.0f}: the broker would fence "
                "the member before the hold ends. Lower the one, raise the other, or leave "
                "'max.poll.interval.ms' out to have it derived"
            )
            raise ConfigurationError(msg)
        return chosen
    derived = hold_limit_s + HOLD_MARGIN_S
    if protocol == "classic":
        # librdkafka refuses a poll interval below the session time-out.
        derived = max(
            derived, _int(config, "session.timeout.ms", _DEFAULT_SESSION_TIMEOUT_MS) / 1000
        )
    return derived


def _is_on(value: object) -> bool:
    """Whether librdkafka takes a value for true; it refuses what is neither true nor false."""
    return str(value).lower() in {"true", "t", "1"}


def _int(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        msg = f"'{name}' must be a whole number of milliseconds"
        raise ConfigurationError(msg) from None

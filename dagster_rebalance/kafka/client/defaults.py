"""The librdkafka settings that the package sets for its clients, each with its reason.

`docs/client-settings.md` shows the table. `settings` decides which of the user's settings reach a
client.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class ClientKind(Enum):
    """The Kafka clients that the package creates."""

    MEMBER = "member"
    FETCHER = "fetcher"
    RANGE_READER = "range reader"
    LOG_CHECK = "log check"
    OFFSET_READER = "offset reader"
    ADMIN = "admin client"
    DEAD_LETTERS = "dead-letter producer"
    RECORDS = "`produce` command"


DELIVERY_LIMIT_S = 30.0
"""After this time a producer reports a record that could not be stored."""


_CONSUMERS = (
    ClientKind.MEMBER,
    ClientKind.FETCHER,
    ClientKind.RANGE_READER,
    ClientKind.LOG_CHECK,
    ClientKind.OFFSET_READER,
)
_READERS = (ClientKind.FETCHER, ClientKind.RANGE_READER)
_PRODUCERS = (ClientKind.DEAD_LETTERS, ClientKind.RECORDS)


@dataclass(frozen=True, slots=True)
class ClientDefault:
    """One setting of some clients.

    Attributes:
        name: The name of the setting in librdkafka.
        clients: The clients that receive it.
        reason: Why librdkafka's default does not fit.
        value: The value of the setting, unless it is derived.
        derived: The documented value of a setting whose value the caller of `client_config` passes.
        is_fixed: Whether the value overrides the value that the user sets.
        unless: A prefix: if the user sets a name that begins with it, the default is left out.
    """

    name: str
    clients: tuple[ClientKind, ...]
    reason: str
    value: object = None
    derived: str = ""
    is_fixed: bool = False
    unless: str = ""

    def __str__(self) -> str:
        value = self.derived or f"`{str(self.value).lower()}`"
        clients = (
            "all" if self.clients == tuple(ClientKind) else ", ".join(c.value for c in self.clients)
        )
        return (
            f"| `{self.name}` | {value} | {clients} | {'no' if self.is_fixed else 'yes'} "
            f"| {self.reason} |"
        )


TABLE: tuple[ClientDefault, ...] = (
    ClientDefault(
        "reconnect.backoff.max.ms",
        tuple(ClientKind),
        "As in Apache's client. librdkafka's 10 s delay reading from a restarted broker.",
        value=1000,
        unless="reconnect.",
    ),
    ClientDefault(
        "socket.keepalive.enable",
        tuple(ClientKind),
        "As in Apache's client. Detects a firewall that drops idle connections.",
        value=True,
    ),
    ClientDefault(
        "check.crcs",
        _READERS,
        "As in Apache's client: refuses damaged batches, for up to 10 % of the CPU of reading.",
        value=True,
    ),
    ClientDefault(
        "fetch.queue.backoff.ms",
        (ClientKind.FETCHER,),
        "The wait after a full buffer. With 1,000 ms, `poll` reads a quarter of the records.",
        value=5,
    ),
    ClientDefault(
        "fetch.queue.backoff.ms",
        (ClientKind.RANGE_READER,),
        "The buffer of a range reader is small, and full often.",
        value=1,
    ),
    ClientDefault(
        "queued.max.messages.kbytes",
        (ClientKind.RANGE_READER,),
        "Limits the memory of prefetched records, which are dropped at the end of a range.",
        value=16_384,
    ),
    ClientDefault(
        "queued.min.messages",
        (ClientKind.RANGE_READER,),
        "Limits the memory of prefetched records, which are dropped at the end of a range.",
        value=20_000,
    ),
    ClientDefault(
        "fetch.wait.max.ms",
        (ClientKind.RANGE_READER,),
        "The wait at the end of the log. A range that ends there without a record ends with it.",
        value=2,
    ),
    ClientDefault(
        "fetch.wait.max.ms",
        (ClientKind.LOG_CHECK,),
        "The wait at the end of the log.",
        value=10,
        is_fixed=True,
    ),
    ClientDefault(
        "max.partition.fetch.bytes",
        (ClientKind.LOG_CHECK,),
        "One record per partition is enough. Larger batches are answered one partition at a time.",
        value=16_384,
        is_fixed=True,
    ),
    ClientDefault(
        "isolation.level",
        (ClientKind.LOG_CHECK,),
        "An open transaction must not delay the answer.",
        value="read_uncommitted",
        is_fixed=True,
    ),
    ClientDefault(
        "enable.auto.commit",
        _CONSUMERS,
        "Offsets are committed after the work on their records has succeeded.",
        value=False,
        is_fixed=True,
    ),
    ClientDefault(
        "auto.offset.reset",
        (ClientKind.FETCHER, ClientKind.RANGE_READER, ClientKind.LOG_CHECK),
        "The client must not choose an offset: your `auto.offset.reset` applies.",
        value="error",
        is_fixed=True,
    ),
    ClientDefault(
        "auto.offset.reset",
        (ClientKind.MEMBER,),
        "The member reads no records. Its start, offset 0, may be deleted by retention.",
        value="latest",
        is_fixed=True,
    ),
    ClientDefault(
        "enable.partition.eof",
        (ClientKind.FETCHER, ClientKind.RANGE_READER, ClientKind.LOG_CHECK),
        "Detects the end of a log whose last offsets hold no records.",
        value=True,
        is_fixed=True,
    ),
    ClientDefault(
        "group.id",
        (ClientKind.LOG_CHECK, ClientKind.OFFSET_READER),
        "librdkafka requires it. These clients do not join the group.",
        derived="the group",
        is_fixed=True,
    ),
    ClientDefault(
        "client.id",
        _READERS,
        "Separates the clients in the broker's logs and quotas.",
        derived="yours with `-fetch`",
        is_fixed=True,
    ),
    ClientDefault(
        "group.protocol",
        (ClientKind.MEMBER,),
        "KIP-848. librdkafka's default is `classic`.",
        derived="`consumer`",
    ),
    ClientDefault(
        "partition.assignment.strategy",
        (ClientKind.MEMBER,),
        "Classic only. librdkafka's `range,roundrobin` stops the whole group in each rebalance.",
        derived="`cooperative-sticky`",
    ),
    ClientDefault(
        "topic.metadata.refresh.interval.ms",
        (ClientKind.MEMBER,),
        "Classic only. After a refresh in a hold, librdkafka rejoins without held partitions.",
        derived="`-1`",
        is_fixed=True,
    ),
    ClientDefault(
        "max.poll.interval.ms",
        (ClientKind.MEMBER,),
        "The broker must not end a hold before its limit.",
        derived="`hold_limit_s` plus 15 s",
    ),
    ClientDefault(
        "max.poll.interval.ms",
        _READERS,
        "In no group: the client may rest between two polls.",
        value=86_400_000,
        is_fixed=True,
    ),
    ClientDefault(
        "enable.idempotence",
        (ClientKind.DEAD_LETTERS,),
        "As in Apache's client: a retry stores no record twice.",
        value=True,
        is_fixed=True,
    ),
    ClientDefault(
        "acks",
        _PRODUCERS,
        "librdkafka's default, fixed: all in-sync replicas have the record.",
        value="all",
        is_fixed=True,
    ),
    ClientDefault(
        "partitioner",
        _PRODUCERS,
        "As in Apache's client. librdkafka's default puts the same key into another partition.",
        value="murmur2_random",
        is_fixed=True,
    ),
    ClientDefault(
        "delivery.timeout.ms",
        _PRODUCERS,
        "A record that cannot be stored is reported after this time.",
        value=round(DELIVERY_LIMIT_S * 1000),
        is_fixed=True,
    ),
    ClientDefault(
        "message.max.bytes",
        (ClientKind.DEAD_LETTERS,),
        "The broker decides how large a record may be.",
        value=1_000_000_000,
        is_fixed=True,
    ),
)


def client_config(
    client: ClientKind, given: Mapping[str, Any], derived: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the settings of a client: the defaults of the table, and those `given` by the user."""
    unknown = (derived or {}).keys() - {
        row.name for row in TABLE if row.derived and client in row.clients
    }
    if unknown:
        msg = f"the table of defaults derives no {sorted(unknown)} for the {client.value}"
        raise LookupError(msg)
    rows = [row for row in TABLE if client in row.clients and not row.derived]
    return {
        **{row.name: row.value for row in rows if not row.is_fixed and _applies(row, given)},
        **given,
        **{row.name: row.value for row in rows if row.is_fixed},
        **(derived or {}),
    }


def _applies(row: ClientDefault, given: Mapping[str, Any]) -> bool:
    return not row.unless or not any(name.startswith(row.unless) for name in given)

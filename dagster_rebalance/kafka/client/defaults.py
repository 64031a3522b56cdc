"""The librdkafka settings that the package sets for its clients, each with its reason.

Owns every setting that differs from librdkafka's default. `docs/settings.md` shows the table.
Which of the user's settings reach a client is decided in `settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class ClientKind(Enum):
    """A client of Kafka that the package makes."""

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


class _Derived(Enum):
    VALUE = "derived"


_DERIVED = _Derived.VALUE
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
        clients: The clients that get it.
        value: Its value.
        reason: Why librdkafka's default does not fit.
        shown: The value for the documentation, where it is derived.
        is_fixed: Whether the value replaces one of the user's.
        unless: A prefix: if the user sets a name that begins with it, the default is left out.
    """

    name: str
    clients: tuple[ClientKind, ...]
    value: object
    reason: str
    shown: str = ""
    is_fixed: bool = False
    unless: str = ""

    def __str__(self) -> str:
        value = self.shown or f"`{str(self.value).lower()}`"
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
        value=1000,
        reason=(
            "As in Apache's client. With librdkafka's 10 s, the partitions of a broker that is "
            "back stand still for up to 10 s more."
        ),
        unless="reconnect.",
    ),
    ClientDefault(
        "socket.keepalive.enable",
        tuple(ClientKind),
        value=True,
        reason="As in Apache's client. A firewall that drops an idle connection is noticed.",
    ),
    ClientDefault(
        "check.crcs",
        _READERS,
        value=True,
        reason=(
            "As in Apache's client. A damaged batch is refused instead of read. Costs up to 10 % "
            "of the CPU time of reading."
        ),
    ),
    ClientDefault(
        "fetch.queue.backoff.ms",
        (ClientKind.FETCHER,),
        value=5,
        reason=(
            "After librdkafka's buffer was full, its next fetch waits for this time. With 1,000 "
            "ms, `poll` reads a quarter of the records per second."
        ),
    ),
    ClientDefault(
        "fetch.queue.backoff.ms",
        (ClientKind.RANGE_READER,),
        value=1,
        reason="The buffer of a range reader is small, and full often.",
    ),
    ClientDefault(
        "queued.max.messages.kbytes",
        (ClientKind.RANGE_READER,),
        value=16_384,
        reason=(
            "Records that are fetched ahead stay in memory, and are dropped at the end of a range."
        ),
    ),
    ClientDefault(
        "queued.min.messages",
        (ClientKind.RANGE_READER,),
        value=20_000,
        reason=(
            "Records that are fetched ahead stay in memory, and are dropped at the end of a range."
        ),
    ),
    ClientDefault(
        "fetch.wait.max.ms",
        (ClientKind.RANGE_READER,),
        value=2,
        reason=(
            "At the end of the log, the leader waits for this time before it answers. A range "
            "that ends there without a record ends with this answer."
        ),
    ),
    ClientDefault(
        "fetch.wait.max.ms",
        (ClientKind.LOG_CHECK,),
        value=10,
        reason="At the end of the log, the leader waits for this time before it answers.",
        is_fixed=True,
    ),
    ClientDefault(
        "max.partition.fetch.bytes",
        (ClientKind.LOG_CHECK,),
        value=16_384,
        reason=(
            "One record per partition is enough. A broker answers a fetch with larger batches one "
            "partition at a time."
        ),
        is_fixed=True,
    ),
    ClientDefault(
        "isolation.level",
        (ClientKind.LOG_CHECK,),
        value="read_uncommitted",
        reason="An open transaction must not delay the answer.",
        is_fixed=True,
    ),
    ClientDefault(
        "enable.auto.commit",
        _CONSUMERS,
        value=False,
        reason="Offsets are committed after the work on their records has succeeded.",
        is_fixed=True,
    ),
    ClientDefault(
        "auto.offset.reset",
        (ClientKind.FETCHER, ClientKind.RANGE_READER, ClientKind.LOG_CHECK),
        value="error",
        reason=(
            "The client must not choose an offset. The consumer looks it up, and follows the "
            "user's `auto.offset.reset`."
        ),
        is_fixed=True,
    ),
    ClientDefault(
        "auto.offset.reset",
        (ClientKind.MEMBER,),
        value="latest",
        reason=(
            "The member reads no records. Each partition is assigned at offset 0, which retention "
            "may have deleted, and is paused."
        ),
        is_fixed=True,
    ),
    ClientDefault(
        "enable.partition.eof",
        (ClientKind.FETCHER, ClientKind.RANGE_READER, ClientKind.LOG_CHECK),
        value=True,
        reason=(
            "The end of a partition shows that no more records are due, also where its last "
            "offsets hold none. `poll` does not return it."
        ),
        is_fixed=True,
    ),
    ClientDefault(
        "group.id",
        (ClientKind.LOG_CHECK, ClientKind.OFFSET_READER),
        value=_DERIVED,
        reason="librdkafka needs it for each consumer. These consumers do not join the group.",
        shown="the group",
        is_fixed=True,
    ),
    ClientDefault(
        "client.id",
        _READERS,
        value=_DERIVED,
        reason="Tells the two clients of a consumer apart in the broker's logs and quotas.",
        shown="yours with `-fetch`",
        is_fixed=True,
    ),
    ClientDefault(
        "group.protocol",
        (ClientKind.MEMBER,),
        value=_DERIVED,
        reason=(
            "The consumer protocol (KIP-848) is the default here. librdkafka's default is "
            "`classic`."
        ),
        shown="`consumer`",
    ),
    ClientDefault(
        "partition.assignment.strategy",
        (ClientKind.MEMBER,),
        value=_DERIVED,
        reason=(
            "Classic protocol only. librdkafka's default (`range,roundrobin`) stops the whole "
            "group in each rebalance."
        ),
        shown="`cooperative-sticky`",
    ),
    ClientDefault(
        "topic.metadata.refresh.interval.ms",
        (ClientKind.MEMBER,),
        value=_DERIVED,
        reason=(
            "Classic protocol only. A change of the metadata during a hold would make librdkafka "
            "rejoin without the held partitions. The member looks for new partitions between "
            "holds."
        ),
        shown="`-1`",
        is_fixed=True,
    ),
    ClientDefault(
        "max.poll.interval.ms",
        (ClientKind.MEMBER,),
        value=_DERIVED,
        reason="The broker must not end a hold before its limit.",
        shown="`hold_limit_s` plus 15 s",
    ),
    ClientDefault(
        "max.poll.interval.ms",
        _READERS,
        value=86_400_000,
        reason="These clients are in no group, and may rest between two polls.",
        is_fixed=True,
    ),
    ClientDefault(
        "enable.idempotence",
        (ClientKind.DEAD_LETTERS,),
        value=True,
        reason="As in Apache's client. A retry stores no record twice.",
        is_fixed=True,
    ),
    ClientDefault(
        "acks",
        _PRODUCERS,
        value="all",
        reason=(
            "librdkafka's default, which must not change: a record counts when all in-sync "
            "replicas have it."
        ),
        is_fixed=True,
    ),
    ClientDefault(
        "partitioner",
        _PRODUCERS,
        value="murmur2_random",
        reason=(
            "As in Apache's client. librdkafka's default puts the same key into another partition."
        ),
        is_fixed=True,
    ),
    ClientDefault(
        "delivery.timeout.ms",
        _PRODUCERS,
        value=round(DELIVERY_LIMIT_S * 1000),
        reason="A record that cannot be stored is reported after this time.",
        is_fixed=True,
    ),
    ClientDefault(
        "message.max.bytes",
        (ClientKind.DEAD_LETTERS,),
        value=1_000_000_000,
        reason="The broker decides how large a record may be.",
        is_fixed=True,
    ),
)
"""Each setting of each client stands here once."""


def configured(
    client: ClientKind, given: Mapping[str, Any], derived: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The settings of a client.

    Args:
        client: The client.
        given: The settings of the user that reach the client.
        derived: The values of settings that the table leaves to its caller.

    Raises:
        LookupError: The table does not leave such a setting to its caller.
    """
    rows = [row for row in TABLE if client in row.clients]
    known = {row.name for row in rows if row.value is _DERIVED}
    own = dict(derived or {})
    if not own.keys() <= known:
        msg = (
            f"the table of defaults derives no {sorted(own.keys() - known)} for the {client.value}"
        )
        raise LookupError(msg)
    plain = [row for row in rows if row.value is not _DERIVED]
    return {
        **{row.name: row.value for row in plain if not row.is_fixed and _applies(row, given)},
        **given,
        **{row.name: row.value for row in plain if row.is_fixed},
        **own,
    }


def _applies(row: ClientDefault, given: Mapping[str, Any]) -> bool:
    return not row.unless or not any(name.startswith(row.unless) for name in given)

"""Control: what people order of the partitions of a group, and which order is in force.

An order names partitions, who gave it, when, and why. It is kept until a newer one takes its place,
so it outlives every member. The newest order that covers a partition counts: a group can be paused
but for one partition, and partitions that are created later are covered as well.
"""

from __future__ import annotations

import enum
import re
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import named
from dagster_rebalance.core.model.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import TopicPartition

MOST_REASON_CHARACTERS = 300
"""An order is kept as a key of a database, which must not be longer than some 2,000 bytes."""
MOST_NAME_CHARACTERS = 60
EVERYTHING = "*"
_SELECTOR = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,249}(:[0-9*?\[\]!-]{1,20})?")


class Action(enum.Enum):
    """What a person orders."""

    PAUSE = "pause"
    """Nothing new is claimed or begun. What is at work ends, and is committed."""
    STOP = "stop"
    """The same, and what is at work is cancelled, which is no failed attempt."""
    RESUME = "resume"
    """The partition goes on where it stood."""
    RETRY = "retry"
    """What has failed or waits for its next attempt is tried now, once. The other orders stand."""


_DONE = {
    Action.PAUSE: "paused",
    Action.STOP: "stopped",
    Action.RESUME: "resumed",
    Action.RETRY: "retried",
}
_WITHOUT_REASON = {Action.RESUME, Action.RETRY}


@dataclass(frozen=True, slots=True)
class Directive:
    """What a person has ordered.

    Attributes:
        action: What is to be done.
        partitions: Which partitions it covers: `orders:3`, a topic, or a pattern of either with
            `*`, `?` and `[...]`. `*` is all of the group.
        by: Who gave it.
        at: When, in seconds since 1970.
        reason: Why. Only a resume and a retry may go without one.

    Raises:
        ConfigurationError: A part is missing, too long, or cannot name partitions.
    """

    action: Action
    partitions: str
    by: str
    at: float
    reason: str = ""

    def __post_init__(self) -> None:
        if _SELECTOR.fullmatch(self.partitions) is None:
            msg = (
                f"{self.partitions[:300]!r} cannot name partitions: write orders:3 for a "
                "partition, orders for a topic, or a pattern such as ord* or '*'"
            )
            raise ConfigurationError(msg)
        if not self.by.strip():
            msg = f"{self.action.value} {self.partitions}: say who you are, for those who find it"
            raise ConfigurationError(msg)
        if self.action not in _WITHOUT_REASON and not self.reason.strip():
            msg = f"{self.action.value} {self.partitions}: give a reason, for those who find it"
            raise ConfigurationError(msg)
        check_lengths(self.by, self.reason)

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.at, timezone.utc)
        why = f": {one_line(self.reason)}" if self.reason else ""
        when = "at" if self.action is Action.RETRY else "since"
        done = f"{_DONE[self.action]} by {one_line(self.by)}"
        return f"{done} {when} {at:%Y-%m-%d %H:%M:%S} UTC{why}"

    def covers(self, partition: TopicPartition) -> bool:
        """Whether the order is about a partition."""
        return covers(self.partitions, partition)


def check_lengths(by: str, reason: str) -> None:
    """Refuse what is too long to be kept and shown.

    Raises:
        ConfigurationError: The name or the reason of a person is.
    """
    for what, text, most in (
        ("reason", reason, MOST_REASON_CHARACTERS),
        ("name", by, MOST_NAME_CHARACTERS),
    ):
        if len(text) > most:
            msg = f"a {what} may have {most} characters, and this one has {len(text)}"
            raise ConfigurationError(msg)


def covers(selector: str, partition: TopicPartition) -> bool:
    """Whether a person means a partition with `orders:3`, a topic, or a pattern of either."""
    topic, _, number = selector.partition(":")
    return fnmatchcase(partition.topic, topic) and fnmatchcase(
        str(partition.partition), number or "*"
    )


class Selection(NamedTuple):
    """The partitions that a person means.

    Attributes:
        selector: How an order names them.
        partitions: Those that there are, in order.
    """

    selector: str
    partitions: tuple[TopicPartition, ...]


def selection(typed: str, partitions: Iterable[TopicPartition], group_id: str) -> Selection:
    """Find what a person means, who may also name a partition as tables show it: `orders-3`.

    Args:
        typed: What the person has typed.
        partitions: Those of the group.
        group_id: The group.

    Raises:
        ConfigurationError: It matches nothing, or a topic and a partition of another one.
    """
    known = sorted(partitions)
    covered = tuple(partition for partition in known if covers(typed, partition))
    shown = tuple(partition for partition in known if str(partition) == typed)
    if covered and shown:
        msg = (
            f"{typed} is a topic, and a partition of another one: write {typed}:* for the topic, "
            f"or {selector_of(shown[0])} for the partition"
        )
        raise ConfigurationError(msg)
    if shown:
        return Selection(selector_of(shown[0]), shown)
    if not covered:
        msg = (
            f"{typed} matches no partition of group {group_id}, which has {named(known)}. Write "
            f"topic:number for a partition, a topic, a pattern such as 'ord*', or '{EVERYTHING}'"
        )
        raise ConfigurationError(msg)
    return Selection(typed, covered)


def in_force(orders: Sequence[Directive], partition: TopicPartition) -> Directive | None:
    """The order that keeps a partition from being worked on; None when there is none.

    Args:
        orders: All orders, oldest first.
        partition: The partition.
    """
    newest = next(
        (
            order
            for order in reversed(orders)
            if order.action is not Action.RETRY and order.covers(partition)
        ),
        None,
    )
    return None if newest is None or newest.action is Action.RESUME else newest


def out_of_date(orders: Sequence[Directive]) -> Iterator[int]:
    """The indices of orders that can never count again: a newer one covers all that they cover.

    A retry takes the place of retries only.
    """
    later: set[tuple[bool, str]] = set()
    for index in range(len(orders) - 1, -1, -1):
        is_retry, selector = orders[index].action is Action.RETRY, orders[index].partitions
        if later & {(is_retry, selector), (is_retry, EVERYTHING)}:
            yield index
        later.add((is_retry, selector))


def selector_of(partition: TopicPartition) -> str:
    """How a person names one partition."""
    return f"{partition.topic}:{partition.partition}"


def new_retries(before: Sequence[Directive], orders: Iterable[Directive]) -> list[Directive]:
    """The retries among orders that were not among those before."""
    return [order for order in orders if order.action is Action.RETRY and order not in before]


def how_to_retry(partition: TopicPartition) -> str:
    """The command that tries now what waits on a partition."""
    return f"dagster-rebalance retry {selector_of(partition)}"


def how_to_resume(*partitions: str) -> str:
    """The command that lets partitions go on, each named as in an order."""
    return f"dagster-rebalance resume {shlex.join(partitions)}"

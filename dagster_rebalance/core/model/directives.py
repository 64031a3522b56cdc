"""Directives: requests of operators to pause, stop, resume or retry partitions.

A directive is stored until a newer one replaces it, so it outlives every member. The newest
directive that covers a partition applies: a group can be paused except for one partition, and
partitions created later are covered too.
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
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.core.model.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import TopicPartition

MOST_REASON_CHARACTERS = 300
"""A directive is stored as a database key, which is limited to about 2,000 bytes."""
MOST_NAME_CHARACTERS = 60
EVERYTHING = "*"
_SELECTOR = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,249}(:[0-9*?\[\]!-]{1,20})?")


class Action(enum.Enum):
    """What a directive requests."""

    PAUSE = "pause"
    """No new batch is claimed or started. Running batches end and are committed."""
    STOP = "stop"
    """As `PAUSE`, but running batches are cancelled, which is not a failed attempt."""
    RESUME = "resume"
    """The partition continues from its committed offset."""
    RETRY = "retry"
    """Failed and delayed ranges are tried once, now. Other directives still apply."""


_DONE = {
    Action.PAUSE: "paused",
    Action.STOP: "stopped",
    Action.RESUME: "resumed",
    Action.RETRY: "retried",
}
_WITHOUT_REASON = {Action.RESUME, Action.RETRY}


@dataclass(frozen=True, slots=True)
class Directive:
    """Request of an operator.

    Attributes:
        partitions: `orders:3`, a topic, or a pattern of either with `*`, `?` and `[...]`. `*`
            covers the whole group.
        at: Seconds since 1970.
        reason: Optional for a resume and a retry only.

    Raises:
        ConfigurationError: A field is missing, too long, or selects no partitions.
    """

    action: Action
    partitions: str
    by: str
    at: float
    reason: str = ""

    def __post_init__(self) -> None:
        check_selector(self.partitions)
        if not self.by.strip():
            msg = (
                f"{self.action.value} {self.partitions}: give your name, which other operators see"
            )
            raise ConfigurationError(msg)
        if self.action not in _WITHOUT_REASON and not self.reason.strip():
            msg = f"{self.action.value} {self.partitions}: give a reason, which other operators see"
            raise ConfigurationError(msg)
        check_lengths(self.by, self.reason)

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.at, timezone.utc)
        why = f": {one_line(self.reason)}" if self.reason else ""
        when = "at" if self.action is Action.RETRY else "since"
        done = f"{_DONE[self.action]} by {one_line(self.by)}"
        return f"{done} {when} {at:%Y-%m-%d %H:%M:%S} UTC{why}"

    def covers(self, partition: TopicPartition) -> bool:
        """Return whether the directive applies to a partition."""
        return covers(self.partitions, partition)


def check_selector(selector: str) -> None:
    """Check that a text can name partitions.

    Raises:
        ConfigurationError: No partition can match.
    """
    if _SELECTOR.fullmatch(selector) is None:
        msg = (
            f"{selector[:300]!r} cannot name partitions: write orders:3 for a partition, orders "
            "for a topic, or a pattern such as ord* or '*'"
        )
        raise ConfigurationError(msg)


def check_lengths(by: str, reason: str) -> None:
    """Check that the name and the reason can be stored and shown.

    Raises:
        ConfigurationError: The name or the reason is too long.
    """
    for what, text, most in (
        ("reason", reason, MOST_REASON_CHARACTERS),
        ("name", by, MOST_NAME_CHARACTERS),
    ):
        if len(text) > most:
            msg = f"a {what} may have at most {most} characters, and this one has {len(text)}"
            raise ConfigurationError(msg)


def covers(selector: str, partition: TopicPartition) -> bool:
    """Return whether a selector (`orders:3`, a topic, or a pattern) matches a partition."""
    topic, _, number = selector.partition(":")
    return fnmatchcase(partition.topic, topic) and fnmatchcase(
        str(partition.partition), number or "*"
    )


class Selection(NamedTuple):
    """A selector and the existing partitions that it matches, in order."""

    selector: str
    partitions: tuple[TopicPartition, ...]


def resolve_selector(typed: str, partitions: Iterable[TopicPartition], group_id: str) -> Selection:
    """Resolve a selector that an operator typed. `orders-3`, the name in tables, is accepted, too.

    Raises:
        ConfigurationError: The selector matches nothing, or both a topic and a partition of another
            topic.
    """
    existing = sorted(partitions)
    covered = tuple(partition for partition in existing if covers(typed, partition))
    shown = tuple(partition for partition in existing if str(partition) == typed)
    if covered and shown:
        msg = (
            f"{typed} is both a topic and a partition of another topic: write {typed}:* for the "
            f"topic, or {selector_of(shown[0])} for the partition"
        )
        raise ConfigurationError(msg)
    if shown:
        return Selection(selector_of(shown[0]), shown)
    if not covered:
        msg = (
            f"{typed} matches no partition of group {group_id}, which has {names_of(existing)}. "
            "Write topic:number for a partition, a topic, a pattern such as 'ord*', or "
            f"'{EVERYTHING}'"
        )
        raise ConfigurationError(msg)
    return Selection(typed, covered)


def in_force(orders: Sequence[Directive], partition: TopicPartition) -> Directive | None:
    """Return the pause or stop that applies to a partition, or None. `orders` is oldest first."""
    newest = next(
        (
            order
            for order in reversed(orders)
            if order.action is not Action.RETRY and order.covers(partition)
        ),
        None,
    )
    return None if newest is None or newest.action is Action.RESUME else newest


def superseded(orders: Sequence[Directive]) -> Iterator[int]:
    """Yield the indices of directives that newer ones replace. A retry replaces only retries."""
    later: set[tuple[bool, str]] = set()
    for index in range(len(orders) - 1, -1, -1):
        is_retry, selector = orders[index].action is Action.RETRY, orders[index].partitions
        if later & {(is_retry, selector), (is_retry, EVERYTHING)}:
            yield index
        later.add((is_retry, selector))


def selector_of(partition: TopicPartition) -> str:
    """Return the selector of one partition."""
    return f"{partition.topic}:{partition.partition}"


def new_retries(before: Sequence[Directive], orders: Iterable[Directive]) -> list[Directive]:
    """Return the retries in `orders` that are not in `before`."""
    return [order for order in orders if order.action is Action.RETRY and order not in before]


def retry_command(partition: TopicPartition) -> str:
    """Return the command that retries a partition now."""
    return f"dagster-rebalance retry {selector_of(partition)}"


def resume_command(*partitions: str) -> str:
    """Return the command that resumes the selected partitions."""
    return f"dagster-rebalance resume {shlex.join(partitions)}"

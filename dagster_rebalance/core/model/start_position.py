"""Where a group begins with a partition for which it has committed nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import Bounds

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class StartFrom(enum.Enum):
    """An end of the log."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class StartTime:
    """A time: the first record that is not older, or the end where there is none.

    Attributes:
        at_ms: Milliseconds since 1970, as Kafka has the times of records.
    """

    at_ms: int


Start: TypeAlias = "StartFrom | StartTime"


def start_of(text: str) -> Start:
    """What a setting says.

    Args:
        text: `earliest`, `latest`, or a time in the words of ISO 8601, with its zone.

    Raises:
        ConfigurationError: It is none of them.
    """
    if text in {each.value for each in StartFrom}:
        return StartFrom(text)
    said = f"start_from={text!r}"
    example = "such as 2026-11-23T08:00:00Z or 2026-11-23T08:00:00+01:00"
    try:
        # Python 3.10 reads no Z.
        at = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in {"Z", "z"} else text)
    except ValueError as error:
        msg = f"{said} must be earliest, latest, or a time with its zone, {example}"
        raise ConfigurationError(msg) from error
    if at.tzinfo is None:
        msg = f"{said} has no time zone: give the time with one, {example}"
        raise ConfigurationError(msg)
    if at < _EPOCH:
        msg = f"{said} is before 1970, where the times of Kafka begin: write earliest"
        raise ConfigurationError(msg)
    return StartTime((at - _EPOCH) // timedelta(milliseconds=1))


def first_offset(start: Start, bounds: Bounds, not_older: int | None) -> int:
    """The offset at which the group begins.

    Args:
        start: What the setting says.
        bounds: Of the partition.
        not_older: The first record that is not older than the time of the setting, if there is one.
    """
    if isinstance(start, StartTime):
        # The answers of a leader are of different moments.
        return bounds.until if not_older is None else max(bounds.start, not_older)
    return bounds.start if start is StartFrom.EARLIEST else bounds.until

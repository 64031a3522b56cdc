"""Where a group starts in a partition without a committed offset."""

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
    """Start at the first record with this time or a later one, or at the end of the log.

    Attributes:
        at_ms: Milliseconds since 1970, as in record timestamps.
    """

    at_ms: int


Start: TypeAlias = "StartFrom | StartTime"


def parse_start(text: str) -> Start:
    """Parse `earliest`, `latest`, or an ISO 8601 time with its zone.

    Raises:
        ConfigurationError: The text is none of them.
    """
    if text in {each.value for each in StartFrom}:
        return StartFrom(text)
    setting = f"start_from={text!r}"
    example = "such as 2026-11-23T08:00:00Z or 2026-11-23T08:00:00+01:00"
    try:
        # Python 3.10 does not parse Z.
        at = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in {"Z", "z"} else text)
    except ValueError as error:
        msg = f"{setting} must be earliest, latest, or a time with its zone, {example}"
        raise ConfigurationError(msg) from error
    if at.tzinfo is None:
        msg = f"{setting} has no time zone: give the time with one, {example}"
        raise ConfigurationError(msg)
    if at < _EPOCH:
        msg = f"{setting} is before 1970, where the times of Kafka begin: write earliest"
        raise ConfigurationError(msg)
    return StartTime((at - _EPOCH) // timedelta(milliseconds=1))


def first_offset(start: Start, bounds: Bounds, offset_at_start_time: int | None) -> int:
    """Return where the group starts; `offset_at_start_time` belongs to a start time."""
    if isinstance(start, StartTime):
        # The leader answered both at different times.
        return (
            bounds.until
            if offset_at_start_time is None
            else max(bounds.start, offset_at_start_time)
        )
    return bounds.start if start is StartFrom.EARLIEST else bounds.until

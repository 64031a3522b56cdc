"""Topics of a group: names and patterns, and the start position without a committed offset.

As in librdkafka, text that begins with `^` is a pattern for the beginning of a name; `$` ends it.
Patterns do not match internal topics (`__...`).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import is_topic_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dagster_rebalance.core.model.offsets import Bounds


_PATTERN_SIGN = "^"
_INTERNAL = "__"
_LONGEST_NAME = 249


def is_internal(topic: str) -> bool:
    """Return whether a topic belongs to Kafka itself, such as `__consumer_offsets`."""
    return topic.startswith(_INTERNAL)


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics that a group subscribes to."""

    names: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Topics:
        """Parse names and patterns.

        Raises:
            ConfigurationError: `texts` is empty, or a name or pattern is invalid.
        """
        names: list[str] = []
        patterns: list[re.Pattern[str]] = []
        for text in dict.fromkeys(texts):
            if text.startswith(_PATTERN_SIGN):
                patterns.append(_pattern(text))
            elif is_topic_name(text):
                names.append(text)
            else:
                msg = (
                    f"{text[:_LONGEST_NAME]!r} in topics cannot be the name of a topic: "
                    f"Kafka allows up to {_LONGEST_NAME} letters, digits, dots, dashes and "
                    "underscores. A pattern begins with ^"
                )
                raise ConfigurationError(msg)
        if not names and not patterns:
            msg = "topics is empty: name at least one topic"
            raise ConfigurationError(msg)
        topics = cls(tuple(names), tuple(patterns))
        try:
            _ = topics.subscription
        except re.error as error:
            msg = f"the patterns in topics cannot be combined into one: {error}"
            raise ConfigurationError(msg) from error
        return topics

    @property
    def subscription(self) -> Sequence[str] | re.Pattern[str]:
        """The subscription of a consumer: the names, or one pattern that matches whole names."""
        if not self.patterns:
            return self.names
        parts = [*map(re.escape, self.names), *(f"(?:{one.pattern}).*" for one in self.patterns)]
        return re.compile("|".join(parts))

    def have(self, topic: str) -> bool:
        """Return whether a topic belongs to the group."""
        return topic in self.names or (
            not is_internal(topic) and any(pattern.match(topic) for pattern in self.patterns)
        )

    def among(self, there: Collection[str]) -> tuple[str, ...]:
        """Return the topics of the group that exist: by name in order, then by pattern, sorted."""
        fitting = (topic for topic in sorted(there) if self.have(topic))
        named = (topic for topic in self.names if topic in there)
        return tuple(dict.fromkeys((*named, *fitting)))

    def missing(self, there: Collection[str]) -> tuple[str, ...]:
        """Return the named topics that do not exist, sorted."""
        return tuple(sorted(topic for topic in self.names if topic not in there))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        msg = f"the pattern {text!r} in topics is invalid: {error}"
        raise ConfigurationError(msg) from error


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class StartFrom(enum.Enum):
    """Start at the beginning or at the end of the log."""

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
        ConfigurationError: The text is none of these.
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
        msg = f"{setting} is before 1970, and Kafka's timestamps begin in 1970: write earliest"
        raise ConfigurationError(msg)
    return StartTime((at - _EPOCH) // timedelta(milliseconds=1))


def first_offset(start: Start, bounds: Bounds, offset_at_start_time: int | None) -> int:
    """Return the offset where the group starts; `offset_at_start_time` is for a start time only."""
    if isinstance(start, StartTime):
        # The leader answered both at different times.
        return (
            bounds.until
            if offset_at_start_time is None
            else max(bounds.start, offset_at_start_time)
        )
    return bounds.start if start is StartFrom.EARLIEST else bounds.until

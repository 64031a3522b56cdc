"""Topics of a group: names and patterns.

As in librdkafka, text that begins with `^` is a pattern for the beginning of a name; `$` ends it.
Patterns do not match internal topics (`__...`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import is_topic_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_PATTERN_SIGN = "^"
_INTERNAL = "__"
_LONGEST_NAME = 249


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics that a group subscribes to."""

    names: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Topics:
        """Parse names and patterns.

        Raises:
            ConfigurationError: There are none, or one is invalid.
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
                    f"topics has {text[:_LONGEST_NAME]!r}, which cannot be the name of a topic: "
                    f"Kafka takes up to {_LONGEST_NAME} letters, digits, dots, dashes and "
                    "underscores. A pattern begins with ^"
                )
                raise ConfigurationError(msg)
        if not names and not patterns:
            msg = "there are no topics: name at least one in topics"
            raise ConfigurationError(msg)
        topics = cls(tuple(names), tuple(patterns))
        try:
            _ = topics.subscription
        except re.error as error:
            msg = f"the patterns in topics cannot be used together: {error}"
            raise ConfigurationError(msg) from error
        return topics

    @property
    def subscription(self) -> Sequence[str] | re.Pattern[str]:
        """What a consumer subscribes to: the names, or one pattern for whole names."""
        if not self.patterns:
            return self.names
        parts = [*map(re.escape, self.names), *(f"(?:{one.pattern}).*" for one in self.patterns)]
        return re.compile("|".join(parts))

    def have(self, topic: str) -> bool:
        """Return whether a topic belongs to the group."""
        is_internal = topic.startswith(_INTERNAL)
        return topic in self.names or (
            not is_internal and any(pattern.match(topic) for pattern in self.patterns)
        )

    def among(self, there: Collection[str]) -> tuple[str, ...]:
        """Return the existing topics of the group: named ones in order, then others by name."""
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
        msg = f"topics has the pattern {text!r}, which cannot be read: {error}"
        raise ConfigurationError(msg) from error

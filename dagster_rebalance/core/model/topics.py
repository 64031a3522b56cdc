"""Which topics a group reads: names, and patterns for names.

Owns how a list of topics reads. As for Kafka's C client, a text that begins with `^` is a pattern,
which fits a name that begins so; `$` ends it. Internal topics (`__...`) fit no pattern.
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
    """The topics of a group.

    Attributes:
        names: Those that are named, in their order.
        patterns: What the names of others fit.
    """

    names: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Topics:
        """Read a list of names and patterns.

        Raises:
            ConfigurationError: It is empty, or one of them is neither.
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
        """What a consumer subscribes to: one pattern, for whole names, if there is any."""
        if not self.patterns:
            return self.names
        parts = [*map(re.escape, self.names), *(f"(?:{one.pattern}).*" for one in self.patterns)]
        return re.compile("|".join(parts))

    def have(self, topic: str) -> bool:
        """Whether a topic is one of the group's."""
        is_internal = topic.startswith(_INTERNAL)
        return topic in self.names or (
            not is_internal and any(pattern.match(topic) for pattern in self.patterns)
        )

    def among(self, there: Collection[str]) -> tuple[str, ...]:
        """Those of the group that Kafka has: as they are named, then by their names."""
        fitting = (topic for topic in sorted(there) if self.have(topic))
        named = (topic for topic in self.names if topic in there)
        return tuple(dict.fromkeys((*named, *fitting)))

    def missing(self, there: Collection[str]) -> tuple[str, ...]:
        """The named ones that Kafka does not have, in order."""
        return tuple(sorted(topic for topic in self.names if topic not in there))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        msg = f"topics has the pattern {text!r}, which cannot be read: {error}"
        raise ConfigurationError(msg) from error

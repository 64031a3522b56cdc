"""The open dead letters of a group: their number by partition and reason, and when it is shown.

A reason often names its record, so letters are counted by the text of their reason without numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.letters import Letter, LetterFold, LetterKind, LetterState
from dagster_rebalance.core.model.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.letters import Malformed, Place, StateChange
    from dagster_rebalance.core.model.offsets import TopicPartition

_NUMBER = re.compile(r"\d+")
_REASON_COMPARED = 160
_ROWS_SHOWN = 20
READ_EVERY_S = 30.0
_SHOWN_EVERY_S = 300.0
"""Dagster keeps each observation. A first open letter, and the last closed one, is shown at once.
"""


class LetterCount(NamedTuple):
    """The number of letters of a partition with alike reasons."""

    partition: TopicPartition
    kind: LetterKind
    reason: str
    letters: int


def count_letters(letters: Iterable[Letter]) -> list[LetterCount]:
    """Count letters by partition, kind and reason, the largest number first."""
    counts = Counter(
        (letter.range.topic_partition, letter.kind, alike_reason(letter.reason))
        for letter in letters
    )
    return sorted(
        (LetterCount(*key, number) for key, number in counts.items()),
        key=lambda one: (-one.letters, one.partition, one.kind.value, one.reason),
    )


def alike_reason(reason: str) -> str:
    """Return the reason in one line, with # for each number."""
    return _NUMBER.sub("#", one_line(reason[:_REASON_COMPARED]))


@dataclass(frozen=True, slots=True)
class OpenLetters:
    """The open dead letters of a group at one time.

    Attributes:
        topic: The dead-letter topic.
        letters: The number of open letters.
        closed: The number of letters that were replayed or discarded.
        malformed: The number of records of the topic that are no letters.
        rows: The open letters by partition and reason, at most 20 rows.
        more: The number of further rows.
    """

    topic: str
    letters: int
    closed: int
    malformed: int
    rows: tuple[LetterCount, ...] = ()
    more: int = 0

    def __str__(self) -> str:
        if not self.letters:
            return "no open dead letter"
        first = self.rows[0]
        count = f"{self.letters:,} open dead letter{'s' * (self.letters != 1)}"
        return f"{count}, {first.letters:,} of {first.partition}: {first.reason}"


class OpenLetterFold:
    """Keeps the open letters of a topic without their records, so memory follows their number.

    If the topic got more partitions, a letter and a change of its state may be in different ones,
    and are read in any order. Such closed letters are kept until the end of the read.
    """

    def __init__(self, topic: str, group_id: str) -> None:
        self._topic = topic
        self._fold = LetterFold(group_id, keeps_values=False)
        self._closed: set[str] = set()

    def add(self, place: Place, found: Letter | StateChange | Malformed) -> None:
        """Apply a record, as `LetterFold.add`."""
        if isinstance(found, Letter):
            found = replace(found, reason=alike_reason(found.reason))
        self._fold.add(place, found)
        letter_id = getattr(found, "id", "")
        entry = self._fold.entries.get(letter_id)
        if entry is None or entry.state is LetterState.OPEN:
            return
        if entry.letter is not None and entry.place.partition == entry.newest.partition:
            del self._fold.entries[letter_id]
        else:
            self._closed.add(letter_id)

    def open_letters(self) -> OpenLetters:
        """Return the open letters. Call this method when all records have been read."""
        counts, entries = self._fold.counts, self._fold.entries
        for letter_id in self._closed:
            entry = entries.get(letter_id)
            if entry is not None and entry.state is not LetterState.OPEN:
                del entries[letter_id]
        self._closed.clear()
        rows = count_letters(one.letter for one in entries.values() if one.letter is not None)
        return OpenLetters(
            self._topic,
            counts[LetterState.OPEN],
            counts[LetterState.REPLAYED] + counts[LetterState.DISCARDED],
            self._fold.malformed,
            tuple(rows[:_ROWS_SHOWN]),
            max(0, len(rows) - _ROWS_SHOWN),
        )


@dataclass(frozen=True, slots=True)
class LetterPace:
    """When the letters are read and shown."""

    read_at: float = float("-inf")
    shown: OpenLetters | None = None
    shown_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether to read the letters again."""
        return now - self.read_at >= READ_EVERY_S

    def is_news(self, found: OpenLetters, now: float) -> bool:
        """Whether to show the letters."""
        if self.shown is None or bool(self.shown.letters) is not bool(found.letters):
            return True
        return found != self.shown and now - self.shown_at >= _SHOWN_EVERY_S

"""Selection of dead letters: which letters an operator names."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import check_selector, covers
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.letters import LetterKind, LetterState, letter_id
from dagster_rebalance.core.model.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dagster_rebalance.core.model.letters import LetterEntry
    from dagster_rebalance.core.model.offsets import TopicPartition

_MOST_NAMED = 5
ALL_STATES = frozenset(LetterState)


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """The letters that an operator wants to see.

    Attributes:
        partitions: Selectors of the partitions of the records: `orders:3`, `orders-3`, a topic or a
            pattern; empty for all.
        containing: A text in the reason, in any case.
        since_ms: The earliest time at which the letter was stored.
        states: The states of the letters.

    Raises:
        ConfigurationError: A selector can match no partition.
    """

    partitions: Sequence[str] = ()
    containing: str = ""
    since_ms: int | None = None
    states: frozenset[LetterState] = ALL_STATES

    def __post_init__(self) -> None:
        for selector in self.partitions:
            check_selector(selector)

    def takes(self, entry: LetterEntry) -> bool:
        """Whether a letter is wanted."""
        letter = entry.letter
        if letter is None or entry.state not in self.states:
            return False
        partition = letter.range.topic_partition
        return (
            self.containing.casefold() in letter.reason.casefold()
            and (self.since_ms is None or (letter.time_ms or 0) >= self.since_ms)
            and (not self.partitions or any(_selects(one, partition) for one in self.partitions))
        )

    def unmatched(self, entries: Iterable[LetterEntry]) -> tuple[str, ...]:
        """Return the selectors whose partitions have no letter in any state."""
        found = {one.letter.range.topic_partition for one in entries if one.letter is not None}
        return tuple(
            one for one in self.partitions if not any(_selects(one, each) for each in found)
        )


def _selects(selector: str, partition: TopicPartition) -> bool:
    return selector == str(partition) or covers(selector, partition)


def newest_first(entries: Iterable[LetterEntry]) -> list[LetterEntry]:
    """Return letters by the time at which they were stored, newest first."""
    times = [
        (entry.letter.time_ms or 0, entry.place, entry)
        for entry in entries
        if entry.letter is not None
    ]
    return [entry for *_, entry in sorted(times, key=lambda one: one[:2], reverse=True)]


def named_letters(
    entries: Mapping[str, LetterEntry], keys: Iterable[str], *, topic: str, group_id: str
) -> list[LetterEntry]:
    """Return the letters of a topic with the keys, or the ids, that an operator typed.

    Raises:
        ConfigurationError: There is no letter with a key, or there are two.
    """
    found: dict[str, LetterEntry] = {}
    missing = []
    for key in dict.fromkeys(keys):
        ids = (key, *(letter_id(kind, key) for kind in LetterKind))
        named = [one for one in ids if (entry := entries.get(one)) and entry.letter]
        if len(named) > 1:
            msg = f"two letters have the key {key}: name {' or '.join(named)}"
            raise ConfigurationError(msg)
        if named:
            found[named[0]] = entries[named[0]]
        else:
            missing.append(key)
    if missing:
        more = len(missing) - _MOST_NAMED
        msg = (
            f"topic {topic} has no letter {', '.join(missing[:_MOST_NAMED])}"
            + (f" and {more} more" if more > 0 else "")
            + f": `dagster-rebalance letters list --state all --group {quote(group_id)} --topic "
            f"{topic}` shows the keys"
        )
        raise ConfigurationError(msg)
    return [*found.values()]


def chosen_letters(
    entries: Mapping[str, LetterEntry],
    keys: Sequence[str],
    *,
    everything: bool,
    containing: str,
    topic: str,
    group_id: str,
) -> list[LetterEntry]:
    """Return the open letters that an operator names: by their keys, or all of them.

    Raises:
        ConfigurationError: None or both are given, or a letter does not exist or is not open.
    """
    if everything is bool(keys):
        msg = "name either the keys of letters, or --all for all open ones"
        raise ConfigurationError(msg)
    if containing and keys:
        msg = "--containing selects among all open letters: pass it with --all, without keys"
        raise ConfigurationError(msg)
    if everything:
        wanted = LetterFilter(containing=containing, states=frozenset({LetterState.OPEN}))
        keys = [key for key, entry in sorted(entries.items()) if wanted.takes(entry)]
        if not keys:
            msg = "no open letter matches"
            raise ConfigurationError(msg)
    found = named_letters(entries, keys, topic=topic, group_id=group_id)
    for entry in found:
        if entry.change is not None:
            msg = (
                f"letter {entry.change.key} is already {entry.state.value} by "
                f"{one_line(entry.change.by)}: name open letters"
            )
            raise ConfigurationError(msg)
    return found

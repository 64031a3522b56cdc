"""Text from outside, as a terminal, a log, Dagster and a Kafka header can bear it.

Owns which characters are shown as they are. Records, schemas, brokers, other clients of a group and
users' exceptions may have any: escape sequences that change a terminal, directions that change how
a line reads, and halves of surrogate pairs, which cannot be stored.
"""

from __future__ import annotations

_LAYOUT = frozenset("\n\t")


def shown(text: str) -> str:
    r"""A text with escapes in place of unprintable characters, such as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _LAYOUT else _escaped(one) for one in text)


def one_line(text: str) -> str:
    """A text that a person has written, in one line."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()

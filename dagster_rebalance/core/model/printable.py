"""Escaping of foreign text for terminals, logs, Dagster and Kafka headers.

Records, schemas, brokers and exceptions may contain terminal escape sequences, text directions that
reorder a line, and surrogate halves that cannot be stored.
"""

from __future__ import annotations

_LAYOUT = frozenset("\n\t")


def escaped(text: str) -> str:
    r"""Replace unprintable characters with escapes such as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _LAYOUT else _escaped(one) for one in text)


def one_line(text: str) -> str:
    """Join the lines of a text, without unprintable characters."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()

"""Texts for operators: a problem with its remedy, and the escaping of foreign text.

Records, schemas, brokers and exceptions may contain terminal escape sequences, text directions that
reorder a line, and surrogate halves that cannot be stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_LAYOUT = frozenset("\n\t")


class Reason(str):
    """A problem and its remedy, as one text: `<problem>. <remedy>`.

    Attributes:
        problem: The problem, without a full stop.
        remedy: What to do; empty if the text has no remedy.
    """

    __slots__ = ("problem", "remedy")
    problem: str
    remedy: str

    def __new__(cls, problem: str, remedy: str = "") -> Self:
        """Join a problem and its remedy."""
        reason = super().__new__(cls, f"{problem}. {remedy}" if remedy else problem)
        reason.problem, reason.remedy = problem, remedy
        return reason

    @classmethod
    def of(cls, text: str) -> Reason:
        """Return a text as a reason; a plain text has no remedy."""
        return text if isinstance(text, Reason) else Reason(text)


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

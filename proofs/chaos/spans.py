"""Differences of half-open time spans, in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Span(NamedTuple):
    """From `begin` up to `end`."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def without(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """Return the parts of the disjoint `spans` outside of all `holes`, which may overlap."""
    left = sorted(spans)
    for hole in holes:
        left = [piece for span in left for piece in _cut(span, hole) if piece.seconds > 0]
    return left


def _cut(span: Span, hole: Span) -> tuple[Span, ...]:
    if hole.end <= span.begin or span.end <= hole.begin:
        return (span,)
    return Span(span.begin, hole.begin), Span(hole.end, span.end)


def total_s(spans: Iterable[Span]) -> float:
    """Return their total length."""
    return sum(span.seconds for span in spans)

"""SVG plot of the distance of each figure from its goal, on a log scale."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proofs.bench.entries import Entry

_ROW, _LABEL, _WIDTH, _MARGIN = 22, 560, 360, 16
_DECADES_BELOW, _DECADES_ABOVE = 0.7, 2.0
_GOOD, _BAD, _LINE = "#2f7d4f", "#b3362b", "#444"
_FONT = "font-family='sans-serif' font-size='11'"


def margin(entry: Entry) -> float:
    """Return how many times better than its goal a figure is."""
    ratio, bound = entry.ratio, entry.goal.bound
    better, worse = (ratio, bound) if entry.goal.sign == ">=" else (bound, ratio)
    return better / worse if worse else math.inf


def write_svg(entries: Sequence[Entry], path: Path) -> None:
    height = _ROW * (len(entries) + 2) + 2 * _MARGIN
    width = _LABEL + _WIDTH + 2 * _MARGIN
    goal_x = _x(1.0)
    parts = [
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' role='img'>"
        ),
        f"<rect width='{width}' height='{height}' fill='white'/>",
    ]
    for factor in (0.25, 0.5, 1, 2, 5, 10, 100):
        x = _x(factor)
        color = _LINE if factor == 1 else "#ddd"
        top, bottom = _MARGIN + _ROW, height - _MARGIN
        parts.append(f"<line x1='{x}' y1='{top}' x2='{x}' y2='{bottom}' stroke='{color}'/>")
        label = "goal" if factor == 1 else f"{factor:g}x"
        parts.append(f"<text x='{x}' y='{top - 6}' text-anchor='middle' {_FONT}>{label}</text>")
    for row, entry in enumerate(entries):
        y = _MARGIN + _ROW * (row + 1) + 8
        x = _x(margin(entry))
        left, right = sorted((x, goal_x))
        color = _GOOD if entry.met else _BAD
        text = escape(f"{entry.name}: {entry.case}"[:92])
        value = escape(f"{entry.ratio:.3g} (goal {entry.goal})")
        parts += [
            f"<text x='{_MARGIN}' y='{y + 11}' {_FONT}>{text}</text>",
            (
                f"<rect x='{left}' y='{y}' width='{max(2, right - left):.1f}' height='14' "
                f"fill='{color}'/>"
            ),
            f"<text x='{right + 4}' y='{y + 11}' {_FONT}>{value}</text>",
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _x(factor: float) -> float:
    shown = min(_DECADES_ABOVE, max(-_DECADES_BELOW, math.log10(factor) if factor > 0 else -9))
    scale = (_WIDTH - 100) / (_DECADES_ABOVE + _DECADES_BELOW)
    return round(_LABEL + (shown + _DECADES_BELOW) * scale, 1)

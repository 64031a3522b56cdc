"""Fenced blocks of the project's Markdown files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(file: str, language: str) -> list[str]:
    """The blocks of one language in a file, without their fences."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE
    )


def block_with(file: str, language: str, text: str) -> str:
    """The one block that contains a text."""
    (found,) = [block for block in blocks(file, language) if text in block]
    return found

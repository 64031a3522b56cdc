"""Fenced blocks of the project's Markdown files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

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


def run_block(page: str, source: str, names: dict[str, object]) -> None:
    """Run a block of a page, as its reader would, with these names and for them."""
    # Without this file's own __future__, which changes what annotations are.
    code = compile(source, page, "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102 - the project's own documentation


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The file, from the root of the project.
        line: Line of the opening fence.
        language: Language after the fence.
        text: Content without fences and indentation.
        file: File name in the preceding sentence, or "".
    """

    page: str
    line: int
    language: str
    text: str
    file: str

    def __str__(self) -> str:
        """Where it is found."""
        return f"{self.page}:{self.line}"


_FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"`([\w./-]+\.\w+)`:\s*\Z")


def all_blocks(page: str) -> list[Block]:
    """All blocks of a page, in their order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            dedent(found["text"]),
            file[1] if (file := _FILE.search(text, 0, found.start())) else "",
        )
        for found in _FENCED.finditer(text)
    ]

"""Check that the text of the project is written as its field writes.

`python -m tools.prose` counts constructions that the Kafka Javadoc and the Dagster docs do not use,
per 1,000 words of each kind of text, and fails above a limit. `--all` lists each place. A count
shows which sentences to rewrite: replacing the counted words alone does not make them better.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRUCTIONS = {
    "clause in place of a noun ('what is assigned')": (
        r"\b[Ww]hat (?:is|was|are|were|has|have|had|it|they|a|an|the|must|may|can|cannot|could|no"
        r"|needs?|follows)\b"
    ),
    "indefinite person": r"\b(?:[Nn]o|[Ss]ome|[Ee]very|[Aa]ny)body\b",
    "'who' as a subject": r"\b[Ww]ho(?:ever)?\b",
    "component that is told or says": r"\b(?:is|are|was|were|be|been) told\b|\b(?:says?|said) so\b",
    "filler of time": r"\bby (?:then|now|itself|themselves)\b|\bmeanwhile\b|\ball the same\b",
    "'of its own'": r"\bof (?:its|their|one's|your) own\b",
    "connective": r"\bso that\b|\blikewise\b|\ball of (?:that|it|this)\b",
    "'a ... for each'": r"\b(?:a|one) (?:run|record|commit|file|job|row|member|client) for each\b",
}
LIMITS = {"pages": 0.5, "package": 0.5, "tests and proofs": 0.5}
"""Occurrences of one construction per 1,000 words, by kind of text."""


def prose_of(path: Path) -> str:
    """Return the comments and strings of a Python file, or the whole text of another one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(token.string for token in tokens if token.type in kinds)


def texts_of(kind: str) -> dict[str, str]:
    """Return the texts of one kind by path."""
    if kind == "pages":
        paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    else:
        folders = {"package": ("dagster_rebalance",), "tests and proofs": ("tests", "proofs")}[kind]
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): prose_of(path) for path in sorted(paths)}


def occurrences(texts: dict[str, str], pattern: str) -> list[str]:
    """Return each match of a pattern with its path and the text around it."""
    return [
        f"{path}: ...{' '.join(text[max(match.start() - 40, 0) : match.end() + 40].split())}..."
        for path, text in texts.items()
        for match in re.finditer(pattern, text)
    ]


def problems(texts: dict[str, str], limit: float) -> list[str]:
    """Describe each construction that occurs more often than the limit."""
    words = max(sum(len(text.split()) for text in texts.values()), 1)
    found = {name: occurrences(texts, pattern) for name, pattern in CONSTRUCTIONS.items()}
    return [
        "\n    ".join([f"{name}: {1000 * len(places) / words:.2f} per 1,000 words", *places])
        for name, places in found.items()
        if 1000 * len(places) > limit * words
    ]


def main() -> int:
    """Print the problems. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="list each place")
    list_all = parser.parse_args().all
    exit_code = 0
    for kind, limit in LIMITS.items():
        for problem in problems(texts_of(kind), 0.0 if list_all else limit):
            print(f"{kind} (limit {limit}): {problem}")
            exit_code = 0 if list_all else 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

"""The check of the prose counts constructions per 1,000 words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.prose import problems, prose_of, texts_of

if TYPE_CHECKING:
    from pathlib import Path

WORDS = "The member commits the offset. " * 200
"""1,000 words."""


def test_text_above_the_limit_is_reported_with_its_place() -> None:
    texts = {"docs/a.md": f"{WORDS} Nobody commits. Somebody commits."}
    (problem,) = problems(texts, 1.0)
    assert problem.startswith("indefinite person: 1.99 per 1,000 words")
    assert "docs/a.md: ...offset. The member commits the offset. Nobody commits." in problem


def test_text_at_the_limit_passes() -> None:
    assert problems({"docs/a.md": f"{WORDS} Nobody commits."}, 1.0) == []


def test_only_comments_and_strings_of_python_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('nobody = 1  # a comment\n"a string"\n')
    assert prose_of(file) == '# a comment\n"a string"'


def test_each_kind_of_text_has_files() -> None:
    assert "README.md" in texts_of("pages")
    assert "dagster_rebalance/__init__.py" in texts_of("package")
    assert "tests/tools/test_prose.py" in texts_of("tests and proofs")

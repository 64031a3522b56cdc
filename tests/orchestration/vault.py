"""The functions that the settings of a test name, and where they look."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

login = ("", "")
asked = 0
issue: Callable[[str], tuple[str, float]] | None = None


def credentials() -> tuple[str, str]:
    global asked  # noqa: PLW0603 - a setting names a function of a module
    asked += 1
    return login


def token(config: str) -> tuple[str, float]:
    assert issue is not None
    return issue(config)

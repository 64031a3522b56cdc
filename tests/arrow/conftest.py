"""Places for outputs from Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.arrow.sinks import place_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def place_for(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that returns the place of an empty output of some kind."""
    return lambda kind: place_of(kind, tmp_path, lambda: request.getfixturevalue("postgres"))

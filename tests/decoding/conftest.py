"""A registry for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.decoding.http_registry import HttpRegistry, http_registry

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def registry() -> Iterator[HttpRegistry]:
    with http_registry() as running:
        yield running

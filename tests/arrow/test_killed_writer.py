"""A writer that is killed with SIGKILL in the middle leaves no part of its records."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.arrow.given import expected, records, span
from tests.arrow.sinks import KINDS, WRITERS, rows

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("kind", KINDS)
def test_killed_writer_leaves_no_partial_write(kind: str, place_for: Callable[[str], str]) -> None:
    place, write = place_for(kind), WRITERS[kind]
    write(records(span(0, 100), "a"), place, [span(0, 100)])
    command = [sys.executable, "-m", "tests.arrow.killed_writer", kind, place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "half is read\n"
        finally:
            writer.kill()
    assert rows(kind, place) == expected((0, 100, "a"))
    write(records(span(0, 100), "c"), place, [span(0, 100)])
    assert rows(kind, place) == expected((0, 100, "c"))

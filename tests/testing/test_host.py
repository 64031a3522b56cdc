"""Temporary folders of the kit do not pile up when it is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.local.host import free_port, private_folder

if TYPE_CHECKING:
    from pathlib import Path

MAKER = """
import signal
from dagster_rebalance.testing.local.host import private_folder
print(private_folder("kafka"), flush=True)
signal.pause()
"""

HOLDER = """
import signal
from dagster_rebalance.testing.local.host import free_port
print(free_port(), flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _folders_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of other kits on this machine are none of these tests' business."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """Folders of live processes, and other files, stay."""
    foreign = tmp_path / "dagster-rebalance-notes"
    foreign.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, env=environment
    ) as maker:
        assert maker.stdout is not None
        theirs = tmp_path / maker.stdout.readline().strip()
        (theirs / "data").write_text("of a broker")
        mine = private_folder("kafka")
        assert theirs.exists()
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    another = private_folder("spark")
    assert not theirs.exists()
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, another.name, foreign.name}


def test_private_folder_is_readable_only_by_its_owner() -> None:
    assert private_folder("kafka").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sockets without a file")
def test_port_of_another_process_is_not_returned_while_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server may not listen yet."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        theirs, real = int(holder.stdout.readline()), random.randint
        drawn = iter([theirs])
        with monkeypatch.context() as patched:
            patched.setattr(random, "randint", lambda *wanted: next(drawn, 0) or real(*wanted))
            found = free_port()
        holder.kill()
        holder.wait()
    assert found != theirs
    monkeypatch.setattr(random, "randint", lambda *_: theirs)
    assert free_port() == theirs

"""The project of `make chaos` is one that Dagster loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs.chaos.bad import Bad
from proofs.chaos.exchange import (
    BAD_VARIABLE,
    BROKERS_VARIABLE,
    FLEETING,
    FOLDER_VARIABLE,
    PROTOCOL_VARIABLE,
    ROLE_VARIABLE,
    STREAMING,
)

MODULE = "proofs.chaos.project"


@pytest.mark.parametrize(
    ("role", "bad"),
    [("", Bad.BISECT), (STREAMING, Bad.SET_ASIDE), (FLEETING, None)],
    ids=["main", "streaming", "fleeting"],
)
def test_project_loads_in_each_role(role: str, bad: Bad | None, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    given = {
        BROKERS_VARIABLE: "nowhere:9092",
        FOLDER_VARIABLE: str(tmp_path),
        PROTOCOL_VARIABLE: "consumer",
        ROLE_VARIABLE: role,
        **({BAD_VARIABLE: bad.value} if bad else {}),
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("dagster"), "definitions", "validate", "-m", MODULE],
        env={
            **os.environ,
            **given,
            "DAGSTER_HOME": str(tmp_path / "home"),
            "DAGSTER_DISABLE_TELEMETRY": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

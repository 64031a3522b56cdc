"""Ten faults on real parts: nothing is lost, nothing is doubled, and nothing stands still without a reason."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.broker]

COMMAND = [sys.executable, "-m", "dagster_rebalance.cli", "chaos"]
LIMIT_S = 900


@pytest.mark.timeout(LIMIT_S + 60)
def test_ten_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    """The long version is `make chaos FAULTS=200`."""
    command = [*COMMAND, "--faults", "10", "--seed", "2", "--output", str(tmp_path / "chaos.json")]
    with ChildProcess("chaos", command, log=tmp_path / "log", env={"TMPDIR": str(tmp_path)}) as chaos:
        code = chaos.wait(LIMIT_S)
        assert code == 0, chaos.tail(80)
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert [report[count] for count in ("lost", "doubled", "unowned_commits", "stalls_over_2s")] == [0, 0, 0, 0]
    assert sum(report["faults"].values()) == 10
    assert len(report["faults"]) >= 8, "of many kinds"
    assert report["records"] > 1000
    assert report["watched_partition_seconds"] > 60, "a stall would have been seen"

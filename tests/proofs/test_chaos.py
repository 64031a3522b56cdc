"""Three faults on real parts: nothing is lost, and nothing is doubled."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.broker]

COMMAND = [sys.executable, "-m", "proofs", "chaos"]
LIMIT_S = 900


@pytest.mark.parametrize("options", [[], ["--streaming"]], ids=["batches", "streaming"])
@pytest.mark.timeout(LIMIT_S + 60)
def test_three_faults_lose_and_double_nothing(options: list[str], tmp_path: Path) -> None:
    """`make chaos FAULTS=200` also judges stalls; on a test machine those are the machine's."""
    chosen = ["--faults", "3", "--seed", "2", *options]
    command = [*COMMAND, *chosen, "--output", str(tmp_path / "chaos.json")]
    with ChildProcess(
        "chaos", command, log=tmp_path / "log", env={"TMPDIR": str(tmp_path)}
    ) as chaos:
        chaos.wait(LIMIT_S)
        assert (tmp_path / "chaos.json").exists(), chaos.tail(80)
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert [problem for problem in report["problems"] if "stood still" not in problem] == []
    assert [report[count] for count in ("lost", "doubled", "unowned_commits")] == [0, 0, 0]
    assert sum(report["faults"].values()) == 3
    assert len(report["faults"]) == 3, "of as many kinds"
    assert report["records"] > 500
    assert report["watched_partition_seconds"] > 30, "a stall would have been seen"

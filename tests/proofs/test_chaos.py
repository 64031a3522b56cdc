"""Two faults on real parts in each form of run: no record is lost or doubled.

`make chaos` is the gate with many faults. A play here runs the command, its processes and its
report once. The seeds draw faults that the end-to-end tests do not have.
"""

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


# Seed 25: a member is killed, and the coordinator moves. Seed 38: it moves, and a broker is killed.
@pytest.mark.parametrize(
    "options", [["--seed", "25"], ["--seed", "38", "--streaming"]], ids=["batches", "streaming"]
)
@pytest.mark.timeout(LIMIT_S + 60)
def test_chaos_with_two_faults_loses_and_doubles_no_record(
    options: list[str], tmp_path: Path
) -> None:
    """`make chaos FAULTS=200` also judges stalls, which a busy test machine causes itself."""
    command = [*COMMAND, "--faults", "2", *options, "--output", str(tmp_path / "chaos.json")]
    with ChildProcess(
        "chaos", command, log=tmp_path / "log", env={"TMPDIR": str(tmp_path)}
    ) as chaos:
        chaos.wait(LIMIT_S)
        assert (tmp_path / "chaos.json").exists(), chaos.tail(80)
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert [problem for problem in report["problems"] if "stood still" not in problem] == []
    assert [report[count] for count in ("lost", "doubled", "unowned_commits")] == [0, 0, 0]
    assert sum(report["faults"].values()) == 2
    assert len(report["faults"]) == 2, "of as many kinds"
    assert report["records"] > 500
    assert report["watched_partition_seconds"] > 30, "the play is too short to detect a stall"

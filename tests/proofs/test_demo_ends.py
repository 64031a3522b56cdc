"""No process outlives the demo, however it ends."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.broker, pytest.mark.spark]

COMMAND = [sys.executable, "-m", "proofs", "demo"]
START_LIMIT_S = 240.0


def _started(folder: Path, sign: str, *options: str) -> ChildProcess:
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [*COMMAND, "--output", str(folder / "demo.json"), *options]
    demo = ChildProcess(
        "the demo", command, log=folder / "log", env={"TMPDIR": str(temporary)}, cwd=folder
    )
    demo.wait_until_ready(lambda: sign in demo.tail(100), timeout_s=START_LIMIT_S)
    return demo


@pytest.mark.parametrize(
    ("sign", "options"),
    [
        ("starting Kafka, Dagster", []),
        ("run 1 is assigned", []),
        ("starting a Spark Connect server", ["--per-batch"]),
    ],
    ids=["while it starts", "while it plays", "while the other story starts"],
)
def test_demo_ends_all_its_processes_after_ctrl_c(
    tmp_path: Path, sign: str, options: list[str]
) -> None:
    with _started(tmp_path, sign, *options) as demo:
        demo.send(signal.SIGINT)
        assert demo.wait(120) == 130
        assert "Traceback" not in demo.tail(200)
        assert (
            demo.tail(1)
            .rstrip()
            .endswith("everything that was started is gone, stopped before its end")
        )
        wait_until(
            lambda: demo.is_gone, timeout_s=10, what="the demo's children to be gone with it"
        )
    assert not list((tmp_path / "tmp").glob("dagster-rebalance-*")), "its folders are gone too"


def test_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    with _started(tmp_path, "run 1 is assigned") as demo:
        demo.kill()
        wait_until(lambda: demo.is_gone, timeout_s=120, what="the demo's children to end")

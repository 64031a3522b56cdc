"""The workers of the simulator: same results with any number, and their end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.processes import ChildProcess
from proofs.simulation.proof import Proof, prove
from tests.proofs.simulation.mutants import commit_out_of_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proofs.simulation.schedule import Played

WORKERS = 2
PROVE = f"""
from proofs.simulation.proof import prove
prove(100_000, 1, told=lambda played: print(f"played {{played.seed}}", flush=True), \
workers={WORKERS})
"""


def proved(schedules: int, seed: int, workers: int) -> tuple[Proof, list[Played]]:
    """Return the proof and the reported schedules."""
    told: list[Played] = []
    return prove(schedules, seed, told=told.append, workers=workers), told


def test_results_with_two_workers_are_those_with_one() -> None:
    proof, told = proved(30, 6_000, 2)
    assert (proof, told) == proved(30, 6_000, 1)
    assert [played.seed for played in told] == list(range(6_000, 6_030))
    assert proof.rebalances == sum(played.rebalances for played in told)


def test_violations_of_all_chunks_are_returned_with_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit_out_of_order(monkeypatch)
    proof, told = proved(45, 1, 1)
    assert [played for played in told if played.violation] == list(proof.violations)
    assert {played.seed > 40 for played in proof.violations} == {True, False}
    assert all(("VIOLATION" in "".join(played.trace)) == bool(played.violation) for played in told)


@pytest.fixture
def proving(tmp_path: Path) -> Iterator[ChildProcess]:
    """A process that has just started its two workers."""
    with ChildProcess("prove", [sys.executable, "-c", PROVE], log=tmp_path / "prove.log") as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        child.wait_until_ready(
            lambda: children.read_text(encoding="ascii").count(" ") > WORKERS, timeout_s=120
        )
        yield child


def play_on(proving: ChildProcess) -> None:
    """Wait until the workers play."""
    proving.wait_until_ready(lambda: "played 20" in proving.tail(), timeout_s=120)


@pytest.mark.parametrize("until", [lambda _: None, play_on], ids=["they-start", "they-play"])
def test_workers_end_without_tracebacks_after_ctrl_c(
    proving: ChildProcess, until: Callable[[ChildProcess], None]
) -> None:
    until(proving)
    os.killpg(proving.pid, signal.SIGINT)
    wait_until(lambda: proving.is_gone, timeout_s=120, what="the workers to end")
    assert proving.tail(1000).count("Traceback") == 1, proving.tail(1000)


def test_workers_end_with_their_killed_parent(proving: ChildProcess) -> None:
    play_on(proving)
    proving.kill()
    wait_until(lambda: proving.is_gone, timeout_s=120, what="the workers to end")

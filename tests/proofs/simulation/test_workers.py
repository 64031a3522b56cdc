"""Any number of processes plays schedules with the same result, and the processes end."""

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
    """What is shown, and what is told on the way."""
    told: list[Played] = []
    return prove(schedules, seed, told=told.append, workers=workers), told


def test_the_figures_and_what_is_told_do_not_depend_on_the_number_of_workers() -> None:
    proof, told = proved(45, 6_000, 2)
    assert (proof, told) == proved(45, 6_000, 1)
    assert [played.seed for played in told] == list(range(6_000, 6_045))
    assert proof.rebalances == sum(played.rebalances for played in told)


def test_violations_are_collected_from_all_chunks_with_their_traces(
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
    """Let the workers get to work."""
    proving.wait_until_ready(lambda: "played 20" in proving.tail(), timeout_s=120)


@pytest.mark.parametrize("until", [lambda _: None, play_on], ids=["they-start", "they-play"])
def test_ctrl_c_ends_the_workers_without_a_word_from_them_while(
    proving: ChildProcess, until: Callable[[ChildProcess], None]
) -> None:
    until(proving)
    os.killpg(proving.pid, signal.SIGINT)
    wait_until(lambda: proving.is_gone, timeout_s=60, what="the workers to end")
    assert proving.tail(1000).count("Traceback") == 1, proving.tail(1000)


def test_workers_end_with_the_process_that_started_them(proving: ChildProcess) -> None:
    play_on(proving)
    proving.kill()
    wait_until(lambda: proving.is_gone, timeout_s=60, what="the workers to end")

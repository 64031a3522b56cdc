"""Dead runs that a sensor ends in a tick, which has 60 s in all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.orchestration.runs import boot_clock
from dagster_rebalance.orchestration.runs.reaper import end_dead_runs

if TYPE_CHECKING:
    import pytest

DEAD = [
    RunSeen(f"r{number}", "b", (), RunState.STARTED, heartbeat="1", is_gone=True)
    for number in range(6)
]


class Ledger:
    """Takes 10 s for each run, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[str] = []

    def end_dead(self, run_id: str, _sign: str) -> bool:
        """End a run."""
        self.now_s += 10.0
        self.asked.append(run_id)
        return True


def test_a_platform_that_does_not_answer_keeps_no_tick_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its requests would be thrown away, in each tick. All of them have their turn."""
    ledger = Ledger()
    monkeypatch.setattr(boot_clock, "seconds", lambda: ledger.now_s)
    ended: set[str] = set()
    for second in range(6):
        monkeypatch.setattr(time, "time", lambda second=second: 1_000.0 + second)
        with dg.build_sensor_context() as context:
            found = end_dead_runs(context, ledger, DEAD, Liveness())  # type: ignore[arg-type]
        assert len(found.ended) == 2
        ended |= found.ended
    assert len(ended) == len(DEAD)


def test_what_could_not_be_ended_is_told_until_it_gives_a_sign() -> None:
    """Its partitions stand, and no member may be there to say so."""
    away, alive = DEAD[:2]

    class Away:
        """Cannot end the first, and finds that the second one lives."""

        def end_dead(self, run_id: str, _sign: str) -> bool:
            """End a run."""
            if run_id == away.run_id:
                msg = "Spark does not answer"
                raise OSError(msg)
            return False

    with dg.build_sensor_context() as context:
        for _ in range(2):  # the pulse does not name it in each tick
            found = end_dead_runs(context, Away(), (away, alive), Liveness())  # type: ignore[arg-type]
            assert away.run_id in found.left
            assert "gave no sign of life and could not be ended" in found.notes[0]
        signs = [replace(away, heartbeat="2", is_gone=False)]
        assert not end_dead_runs(context, Away(), signs, Liveness()).left  # type: ignore[arg-type]

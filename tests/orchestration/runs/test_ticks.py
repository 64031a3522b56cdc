"""A tick ends dead runs within its 60 s."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.runs.ticks import end_dead_runs, open_instance

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

DEAD = [
    RunSnapshot(f"r{number}", "b", (), RunState.STARTED, heartbeat="1", is_gone=True)
    for number in range(6)
]


class Ledger:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[str] = []

    def end_dead(self, run_id: str, _sign: str) -> bool:
        self.now_s += 10.0
        self.asked.append(run_id)
        return True


def test_hanging_platform_does_not_time_out_the_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = Ledger()
    monkeypatch.setattr(process, "boot_time_s", lambda: ledger.now_s)
    ended: set[str] = set()
    for second in range(6):
        monkeypatch.setattr(time, "time", lambda second=second: 1_000.0 + second)
        instance = dg.DagsterInstance.ephemeral()  # without the heartbeats of earlier ticks
        with dg.build_sensor_context(instance, sensor_name="stream") as context:
            found = end_dead_runs(context, ledger, DEAD, Liveness())  # type: ignore[arg-type]
        assert len(found.ended) == 2
        ended |= found.ended
    assert len(ended) == len(DEAD)


def test_run_that_cannot_be_ended_is_noted_until_its_next_heartbeat() -> None:
    away, alive = DEAD[:2]

    class Away:
        def end_dead(self, run_id: str, _sign: str) -> bool:
            if run_id == away.run_id:
                msg = "Spark does not answer"
                raise OSError(msg)
            return False

    with (
        dg.instance_for_test() as instance,
        dg.build_sensor_context(instance, sensor_name="stream") as context,
    ):
        for _ in range(2):  # a dead run is not reported in each tick
            found = end_dead_runs(context, Away(), (away, alive), Liveness())  # type: ignore[arg-type]
            assert away.run_id in found.left
            assert "sent no heartbeat and could not be ended" in found.notes[0]
        signs = [replace(away, heartbeat="2", is_gone=False)]
        assert not end_dead_runs(context, Away(), signs, Liveness()).left  # type: ignore[arg-type]


def test_ticks_read_events_through_one_open_instance(tmp_path: Path) -> None:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        instance.add_dynamic_partitions("partitions", ["orders-0"])
        first = open_instance(instance)
        assert first is not instance
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        assert open_instance(instance) is first
        assert first.get_dynamic_partitions("partitions") == ["orders-0"]


def test_instance_in_memory_is_not_opened_again() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert open_instance(instance) is instance

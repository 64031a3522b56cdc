"""The simulator: no violations in the package, reports, and reproducible seeds."""

from __future__ import annotations

import gc
import json
import types
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from dagster_rebalance.cli.app import build_app
from dagster_rebalance.core.partitions.state_machine import TRANSITIONS
from proofs.__main__ import COMMANDS
from proofs.simulation.proof import fresh_seed, prove
from proofs.simulation.schedule import has_crowd, play, play_all_of
from proofs.simulation.weather import PROTOCOLS
from proofs.simulation.world import World
from tests.proofs.simulation.mutants import keep_every_hold, no_start_check

if TYPE_CHECKING:
    from pathlib import Path

    from proofs.simulation.schedule import Played

SCHEDULES = 150
FRESH = 50


def test_random_schedules_break_no_promise() -> None:
    proof = prove(SCHEDULES, 9_900)
    assert [(played.seed, played.violation) for played in proof.violations] == []
    assert proof.commits > 10 * SCHEDULES
    assert proof.rebalances > 5 * SCHEDULES
    assert set(proof.not_taken) <= {
        "restoring, supersession noticed",
        "stopped, supersession noticed",
        "stopped, loss noticed",
    }


def test_new_schedules_break_no_promise() -> None:
    first = fresh_seed()
    played = [play_all_of(seed) for seed in range(first, first + FRESH)]
    assert [(one.seed, one.violation) for one in played if one.violation] == [], (
        "for the whole trace: python -m proofs life --seed"
    )


def test_schedules_with_bad_records_break_no_promise() -> None:
    """Each of them has one letter, and the attempts on its range stay within their bound."""
    played = [play(seed, bad=True, streams=seed % 2 == 0, ahead=True) for seed in range(30)]
    assert [(one.seed, one.violation) for one in played if one.violation] == []


def test_new_seed_is_shown(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        build_app(COMMANDS, ["simulate"]),
        ["simulate", "--schedules", "1", "--output", str(tmp_path / "sim.json")],
    )
    assert (
        f"from seed {json.loads((tmp_path / 'sim.json').read_text(encoding='utf-8'))['seed']}: "
        in result.output
    )


def test_seed_gives_the_same_trace_again() -> None:
    assert play(9) == play(9)


def test_schedule_does_not_depend_on_the_stack_depth_of_its_caller() -> None:
    def below(frames: int) -> Played:
        return below(frames - 1) if frames else play_all_of(17)

    assert below(900) == below(0)


def test_schedules_cover_all_protocols() -> None:
    assert {World(seed).weather.protocol for seed in range(20)} == set(PROTOCOLS)


def test_some_schedules_have_hundreds_of_partitions() -> None:
    crowded = [seed for seed in range(1_000) if has_crowd(seed)]
    assert 20 <= len(crowded) <= 30
    assert {World(seed, crowd=True).weather.partitions >= 200 for seed in crowded} == {True}
    assert {World(seed).weather.partitions <= 4 for seed in crowded} == {True}


def test_crowded_schedule_breaks_no_promise() -> None:
    played = play(2, crowd=True)
    assert played.violation == ""
    assert played.commits > 200


def test_simulate_writes_its_figures(tmp_path: Path) -> None:
    output = tmp_path / "build" / "sim.json"
    result = CliRunner().invoke(
        build_app(COMMANDS, ["simulate"]),
        ["simulate", "--schedules", "3", "--seed", "11", "--output", str(output)],
    )
    figures = json.loads(output.read_text(encoding="utf-8"))
    assert result.exit_code == 0, result.output
    assert (figures["schedules"], figures["violations"], figures["seed"]) == (3, 0, 11)
    assert len(figures["transitions"]) == len(TRANSITIONS)
    assert figures["transitions"]["owned, give-up requested"] > 0


def test_violation_is_reported_with_its_seed_and_repeated_with_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_start_check(monkeypatch)
    options = [
        "simulate",
        "--schedules",
        "1",
        "--seed",
        "45",
        "--output",
        str(tmp_path / "sim.json"),
    ]
    found = CliRunner().invoke(build_app(COMMANDS, ["simulate"]), options)
    assert found.exit_code == 1
    assert "life --seed 45" in found.output
    assert "works on what" in found.output
    again = CliRunner().invoke(build_app(COMMANDS, ["life"]), ["life", "--seed", "45"])
    assert again.exit_code == 1
    assert "VIOLATION" in again.output
    assert "member a.1: starts" in again.output


@pytest.mark.parametrize(("protocol", "seed"), [("consumer", 18), ("cooperative", 8), ("eager", 9)])
def test_memory_after_400_rebalances_is_as_after_100(protocol: str, seed: int) -> None:
    assert World(seed).weather.protocol == protocol
    early, late = _sizes_after(seed, 100, 400)
    assert late <= early * 1.05


def test_memory_that_grows_with_rebalances_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_every_hold(monkeypatch)
    early, late = _sizes_after(6, 100, 400)
    assert late > early * 1.05


def _sizes_after(seed: int, *rebalances: int) -> list[int]:
    """Return the size of an idle member after each number of rebalances."""
    world = World(seed)
    world.clockwork.run(20)
    world.calm()
    member = next(
        process
        for process in world.processes
        if process.incarnation.startswith("a") and not process.is_retired
    )
    sizes = []
    for wanted in rebalances:
        while world.group.rebalances < wanted:
            world.group.ends[world.group.partitions[0]] += 5
            world.start("b")
            world.clockwork.run(4)
            for process in world.processes:
                if process.incarnation.startswith("b"):
                    process.leave()
            world.clockwork.run(4)
        while not world.is_settled():
            world.clockwork.run(1)
        world.clockwork.run(10)
        member.mailbox.take_notes()
        sizes.append(_size(member.member_loop))
    assert not member.is_gone
    assert member.catalogue.receipts > rebalances[-1] / 10, (
        "without holds there would be little to forget"
    )
    return sizes


def _size(root: object) -> int:
    """Return the number of objects that the real parts of a member refer to."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(
            item, type | types.ModuleType | types.FunctionType | types.MethodType
        ):
            continue
        if type(item).__module__.startswith("proofs.") and item is not root:
            continue
        seen.add(id(item))
        todo += gc.get_referents(item)
    return len(seen)

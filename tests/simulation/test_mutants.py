"""The simulator can see: each deliberately broken variant of the package is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.simulation.schedule import play
from tests.simulation.mutants import MUTANTS

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SCHEDULES = 2_000


@pytest.mark.parametrize(("mutant", "first"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_simulator_finds_each_mutant_within_2000_schedules(
    mutant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation that finds nothing shows nothing, unless it is known to find what is there."""
    mutant(monkeypatch)
    seeds = [first, *(seed for seed in range(1, MOST_SCHEDULES) if seed != first)]
    assert any(play(seed).violation for seed in seeds)


@pytest.mark.parametrize("seed", sorted(set(MUTANTS.values())))
def test_the_schedules_that_find_mutants_find_nothing_in_the_package(seed: int) -> None:
    """It is the mutants that they find."""
    assert play(seed).violation == ""

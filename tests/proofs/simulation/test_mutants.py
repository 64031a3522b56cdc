"""The simulator can see: each deliberately broken variant of the package is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proofs.simulation.schedule import play
from tests.proofs.simulation.mutants import MUTANTS, where

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SCHEDULES = 4_000


@pytest.mark.parametrize(
    ("mutant", "seed", "what"),
    [(mutant, *found) for mutant, found in MUTANTS.items()],
    ids=[m.__name__ for m in MUTANTS],
)
def test_simulator_finds_each_mutant_within_4000_schedules(
    mutant: Callable[[pytest.MonkeyPatch], None],
    seed: int,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    violation = play(seed, **where(mutant)).violation
    if not violation:
        others = range(1, MOST_SCHEDULES)
        other = next((other for other in others if play(other, **where(mutant)).violation), None)
        pytest.fail(
            "nothing finds it any more"
            if other is None
            else f"seed {seed} does not find it any more, but {other} does: list it"
        )
    assert what in violation


@pytest.mark.parametrize(
    ("seed", "played"),
    sorted({(seed, tuple(where(mutant).items())) for mutant, (seed, _) in MUTANTS.items()}),
)
def test_schedules_that_find_mutants_find_nothing_in_the_package(
    seed: int, played: tuple[tuple[str, bool], ...]
) -> None:
    assert play(seed, **dict(played)).violation == ""

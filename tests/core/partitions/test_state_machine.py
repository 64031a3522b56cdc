"""The table of ownership, pair by pair."""

from __future__ import annotations

import itertools

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import (
    TRANSITIONS,
    Change,
    Phase,
    after,
    diagram,
)
from tests.core.world import tp

LEGAL = {
    (Phase.RESTORING, Change.RESTORED): Phase.OWNED,
    (Phase.RESTORING, Change.STOP_CAUSED): Phase.STOPPED,
    (Phase.RESTORING, Change.GIVE_UP_REQUESTED): Phase.DRAINED,
    (Phase.RESTORING, Change.LOOK_UP_DROPPED): Phase.DRAINING,
    (Phase.RESTORING, Change.LOSS_NOTICED): Phase.LOST,
    (Phase.RESTORING, Change.SUPERSESSION_NOTICED): Phase.SUPERSEDED,
    (Phase.OWNED, Change.STOP_CAUSED): Phase.STOPPED,
    (Phase.OWNED, Change.DISTRUSTED): Phase.RESTORING,
    (Phase.OWNED, Change.GIVE_UP_REQUESTED): Phase.DRAINING,
    (Phase.OWNED, Change.LOSS_NOTICED): Phase.LOST,
    (Phase.OWNED, Change.SUPERSESSION_NOTICED): Phase.SUPERSEDED,
    (Phase.STOPPED, Change.STOP_CLEARED): Phase.OWNED,
    (Phase.STOPPED, Change.DISTRUSTED): Phase.RESTORING,
    (Phase.STOPPED, Change.GIVE_UP_REQUESTED): Phase.DRAINING,
    (Phase.STOPPED, Change.LOSS_NOTICED): Phase.LOST,
    (Phase.STOPPED, Change.SUPERSESSION_NOTICED): Phase.SUPERSEDED,
    (Phase.DRAINING, Change.GIVE_UP_REQUESTED): Phase.DRAINING,
    (Phase.DRAINING, Change.DISTRUSTED): Phase.DRAINED,
    (Phase.DRAINING, Change.DRAIN_FINISHED): Phase.DRAINED,
    (Phase.DRAINING, Change.DEADLINE_PASSED): Phase.DRAINED,
    (Phase.DRAINING, Change.LOSS_NOTICED): Phase.LOST,
    (Phase.DRAINING, Change.SUPERSESSION_NOTICED): Phase.SUPERSEDED,
    (Phase.DRAINED, Change.GIVE_UP_REQUESTED): Phase.DRAINED,
    (Phase.DRAINED, Change.RELEASE_COMPLETED): Phase.RELEASED,
    (Phase.DRAINED, Change.LOSS_NOTICED): Phase.LOST,
    (Phase.DRAINED, Change.SUPERSESSION_NOTICED): Phase.SUPERSEDED,
}
ILLEGAL = [pair for pair in itertools.product(Phase, Change) if pair not in LEGAL]


@pytest.mark.parametrize(("pair", "following"), LEGAL.items(), ids=str)
def test_legal_change_leads_to_phase(pair: tuple[Phase, Change], following: Phase) -> None:
    assert after(*pair) is following


@pytest.mark.parametrize("pair", ILLEGAL, ids=str)
def test_illegal_change_raises_and_changes_nothing(
    pair: tuple[Phase, Change],
) -> None:
    phase, change = pair
    owned = OwnedPartition(tp(0), epoch=1, phase=phase)
    with pytest.raises(
        IllegalStateError,
        match=f"'{change.value}' cannot happen to a partition that is {phase.value}",
    ):
        owned.changed(change)
    assert owned == OwnedPartition(tp(0), epoch=1, phase=phase)


def test_every_transition_is_tested() -> None:
    """The table is written twice on purpose."""
    assert TRANSITIONS == LEGAL


@pytest.mark.parametrize("phase", Phase)
def test_phases_allow_planning_and_commits(phase: Phase) -> None:
    assert phase.may_plan == (phase is Phase.OWNED)
    assert phase.may_commit == (phase in {Phase.OWNED, Phase.STOPPED, Phase.DRAINING})
    assert phase.is_final == (phase in {Phase.RELEASED, Phase.LOST, Phase.SUPERSEDED})


def test_final_phases_have_no_transition() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0].is_final]


def test_diagram_shows_every_phase_change() -> None:
    lines = diagram().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> RESTORING"]
    assert "    DRAINING --> DRAINED: distrusted, drain finished, deadline passed" in lines
    assert "    LOST --> [*]" in lines
    shown = {
        (line.split()[0], line.split()[2].rstrip(":")) for line in lines[2:] if "[*]" not in line
    }
    assert shown == {
        (before.name, then.name) for (before, _), then in TRANSITIONS.items() if before is not then
    }

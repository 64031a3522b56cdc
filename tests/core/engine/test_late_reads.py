"""Answers that were on their way when something happened that requires a new read of the runs."""

from __future__ import annotations

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.partitions.state_machine import Phase
from tests.core.world import World, tp


def test_runs_read_before_a_revoke_was_asked_for_do_not_finish_its_drain() -> None:
    """A tick may have started a run between that look and the request.

    The partition would go while the run works.
    """
    world = World(records=10)
    member = world.member(owns=1)
    member.fails = {commands.ReadRuns}
    world.wait(2, member)
    early = member.given(commands.ReadRuns)[-1]
    assert isinstance(early, commands.ReadRuns)
    member.feed(events.RevokeRequested((tp(0),)))
    member.feed(events.RunsRead(early.batch_ids, (), early.live_too, early.look))
    assert member.engine.partitions[tp(0)].phase is Phase.DRAINING
    late = member.given(commands.ReadRuns)[-1]
    assert isinstance(late, commands.ReadRuns)
    member.feed(events.RunsRead(late.batch_ids, (), late.live_too, late.look))
    assert tp(0) not in member.engine.partitions, (
        "the look that was made for the revoke finishes it"
    )

"""The worker of a streaming run tells others what they have to know, in an order they rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from dagster_rebalance.core.offers import Offer
from dagster_rebalance.core.partition import Log
from dagster_rebalance.core.stream_batches import Outcome
from dagster_rebalance.orchestration.stream_work import StreamWork
from tests.core.world import span, tp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.commands import Claimed
    from dagster_rebalance.orchestration.port import RunsPort

CLAIM = ("s.r1.1.1", span(0, 0, 5))


class Others:
    """What others were told, in order: how work ended, and on what the run may work."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.is_away = False
        self.work = StreamWork(
            "r1",
            cast("RunsPort", self),
            wake=lambda: None,
            interrupt=lambda: None,
            beat=lambda: self.heard.append(self.work.may_work_on),
        )

    def tell(self, outcomes: Mapping[Claimed, Outcome]) -> None:
        """Note it, unless the storage is away."""
        if self.is_away:
            message = "database is locked"
            raise OSError(message)
        self.heard.append(dict(outcomes))


@pytest.fixture
def others() -> Others:
    """A run whose batch has succeeded while its partition was given up."""
    others = Others()
    others.work.begin([Offer(CLAIM[0], 1, (CLAIM[1],))], {CLAIM[0]}, lambda _: Log("an id", 1))
    others.work.say([tp(0)])
    others.work.leave([CLAIM])
    others.work.end(Outcome.SUCCEEDED)
    return others


def test_how_work_ended_is_told_before_the_partition_is_let_go(others: Others) -> None:
    """Whoever hears the second and not the first does the work again."""
    others.work.say([tp(1)])
    assert others.heard == [{tp(0)}, {CLAIM: Outcome.SUCCEEDED}, {tp(1)}]
    others.work.say([tp(1)])
    assert others.heard[3:] == [{tp(1)}]


def test_a_partition_is_not_let_go_while_that_cannot_be_told(others: Others) -> None:
    """The storage is away; it is told again."""
    others.is_away = True
    with pytest.raises(OSError, match="locked"):
        others.work.say([])
    assert others.heard == [{tp(0)}]
    assert others.work.untold == {CLAIM: Outcome.SUCCEEDED}

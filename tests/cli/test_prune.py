"""What `dagster-rebalance prune` prints of a plan."""

from __future__ import annotations

import pytest

from dagster_rebalance.cli.prune import _show
from dagster_rebalance.core.operators.prune_runs import FinishedRun, PrunePlan

RUN = FinishedRun("r-1", 0.0, stream="shop:stream/0")


@pytest.mark.parametrize(
    ("plan", "lines"),
    [
        (PrunePlan((), {}), ["No run that ended more than 30 days ago can be deleted."]),
        (
            PrunePlan((), {"named in Kafka": 1}),
            [
                "No run that ended more than 30 days ago can be deleted: 1 stays.",
                "1 stays: named in Kafka",
            ],
        ),
        (
            PrunePlan((), {"named in Kafka": 2, "has no batch": 510}),
            [
                "No run that ended more than 30 days ago can be deleted: 512 stay.",
                "510 stay: has no batch",
                "2 stay: named in Kafka",
            ],
        ),
        (
            PrunePlan((RUN,), {}, is_partial=True),
            [
                "1 streaming run: ended from 1970-01-01 00:00 UTC to 1970-01-01 00:00 UTC",
                "Later runs were not read: call prune again once these are deleted.",
            ],
        ),
    ],
)
def test_plan_is_shown_with_each_reason_and_how_to_go_on(
    plan: PrunePlan, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _show(plan, 30)
    assert capsys.readouterr().out.splitlines() == lines

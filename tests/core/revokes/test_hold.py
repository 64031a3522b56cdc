"""The budget, outcome and receipt of a hold, its forecast, and the hand-over back-off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import HoldBudget
from dagster_rebalance.core.model.commands import Cause, HoldOutcome
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.revokes.hold import SUCCESSOR_TIMEOUT_S, Forecast, HandoverBackoff, Hold
from tests.core.world import tp

HOLD = Hold(Cause.REVOKE, {tp(5): 2, tp(4): 1}, requested_at=100.0, budget=HoldBudget(300, 10))


@pytest.mark.parametrize(("limit_s", "slice_s"), [(10, 10), (10, 11), (10, 0), (0, 0)])
def test_budget_without_time_to_drain_raises(limit_s: float, slice_s: float) -> None:
    with pytest.raises(
        ConfigurationError, match=f"hold_commit_slice_s={slice_s:g} .* hold_limit_s={limit_s:g}"
    ):
        HoldBudget(limit_s, slice_s)


def test_deadline_leaves_a_slice_for_the_last_commit() -> None:
    assert (HOLD.deadline_at, HOLD.limit_at) == (390.0, 400.0)


@pytest.mark.parametrize(
    ("hold", "outcome"),
    [
        (HOLD, HoldOutcome.NOTHING_TO_DO),
        (replace(HOLD, run_ids=frozenset({"r"})), HoldOutcome.DRAINED),
        (replace(HOLD, committed={tp(4): 10}), HoldOutcome.DRAINED),
        (replace(HOLD, run_ids=frozenset({"r"}), is_past_deadline=True), HoldOutcome.DEADLINE),
    ],
)
def test_outcome_of_a_hold(hold: Hold, outcome: HoldOutcome) -> None:
    assert hold.outcome is outcome
    assert hold.receipt((), now=101.0).outcome is outcome


@pytest.mark.parametrize(
    ("hold", "outcome", "sentence"),
    [
        (HOLD, None, "released orders-4, orders-5 after 2.5 s"),
        (
            replace(HOLD, run_ids=frozenset({"r"})),
            None,
            "drained and released orders-4, orders-5 after 2.5 s, 1 run waited for",
        ),
        (
            replace(
                HOLD,
                cause=Cause.LEAVE,
                run_ids=frozenset({"r", "s"}),
                cancelled=frozenset({"s"}),
                is_past_deadline=True,
            ),
            None,
            (
                "gave orders-4, orders-5 up after 2.5 s, before the work had ended, 2 runs waited "
                "for, 1 cancelled"
            ),
        ),
        (HOLD, HoldOutcome.SUPERSEDED, "lost orders-4, orders-5 to another member after 2.5 s"),
        (HOLD, HoldOutcome.LOST, "lost orders-4, orders-5 after 2.5 s"),
    ],
)
def test_receipt_as_text(hold: Hold, outcome: HoldOutcome | None, sentence: str) -> None:
    assert str(hold.receipt((), 102.5, outcome)) == sentence


def test_receipt_names_claims_left_to_the_next_owner() -> None:
    claimed = OwnedPartition(tp(5), 2, ledger=OffsetLedger(tp(5), 2, 0).with_claim("b", 10))
    receipt = HOLD.receipt((claimed,), 102.5)
    assert str(receipt).endswith("; unfinished claim on orders-5 goes to the next owner")
    both = replace(receipt, handed_over=(tp(4), tp(5)), seconds=0.0, cause=Cause.LEAVE)
    assert str(both) == (
        "left orders-4, orders-5 at once; unfinished claims on orders-4, orders-5 go to the next "
        "owner"
    )
    assert receipt.partitions == (tp(4), tp(5))


def test_no_partitions_have_a_name() -> None:
    assert names_of([]) == "no partitions"


def test_outcome_handed_over_counts_as_drained() -> None:
    undrained = {outcome for outcome in HoldOutcome if not outcome.is_drained}
    assert undrained == {HoldOutcome.DEADLINE, HoldOutcome.SUPERSEDED, HoldOutcome.LOST}


@pytest.mark.parametrize(
    ("took_s", "claimed_at", "said"),
    [
        ((), [90.0], ""),
        ((30.0, 30.0), [90.0], ""),
        ((30.0, 40.0, 20.0), [], ""),
        ((30.0, 40.0, 20.0), [90.0], "likely for 20 s more (batches took 30 s)"),
        ((30.0, 40.0, 20.0), [75.0, 90.0], "likely for 20 s more (batches took 30 s)"),
        ((30.0, 40.0, 20.0), [70.0], "already longer than usual (batches took 30 s)"),
        ((0.1, 0.2, 0.9), [90.0], ""),
    ],
)
def test_forecast_uses_the_median_duration(
    took_s: tuple[float, ...], claimed_at: list[float], said: str
) -> None:
    assert Forecast(took_s).remaining(claimed_at, 100.0) == said


def test_forecast_keeps_the_last_durations() -> None:
    forecast = Forecast()
    for took_s in [*range(100, 200), *([5] * 10)]:
        forecast = forecast.with_duration(took_s)
    assert forecast.durations_s == (5,) * 10


def test_backoff_lasts_while_the_heartbeat_changes() -> None:
    backoff = HandoverBackoff("b 1", 100.0)
    for beat in range(2, 20):
        now = 100.0 + 15 * beat
        backoff = backoff.observe(f"b {beat}", now)
        assert not backoff.may_join(now)


def test_backoff_ends_when_the_successor_has_left() -> None:
    assert HandoverBackoff("b 1", 100.0).observe("", 101.0).may_join(101.0)


def test_backoff_ends_without_a_new_heartbeat() -> None:
    backoff = HandoverBackoff("b 1", 100.0).observe("b 1", 100.0 + SUCCESSOR_TIMEOUT_S - 1)
    assert not backoff.may_join(100.0 + SUCCESSOR_TIMEOUT_S - 1)
    assert backoff.may_join(100.0 + SUCCESSOR_TIMEOUT_S)

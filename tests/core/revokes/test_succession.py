"""When a process that made way for another one may join again."""

from __future__ import annotations

from dagster_rebalance.core.revokes.holds import SUCCESSOR_TIMEOUT_S, HandoverBackoff


def test_backoff_lasts_while_the_heartbeat_changes() -> None:
    made_way = HandoverBackoff("b 1", 100.0)
    for beat in range(2, 20):
        now = 100.0 + 15 * beat
        made_way = made_way.observe(f"b {beat}", now)
        assert not made_way.may_join(now)


def test_backoff_ends_when_the_successor_has_left() -> None:
    assert HandoverBackoff("b 1", 100.0).observe("", 101.0).may_join(101.0)


def test_backoff_ends_without_a_new_heartbeat() -> None:
    made_way = HandoverBackoff("b 1", 100.0).observe("b 1", 100.0 + SUCCESSOR_TIMEOUT_S - 1)
    assert not made_way.may_join(100.0 + SUCCESSOR_TIMEOUT_S - 1)
    assert made_way.may_join(100.0 + SUCCESSOR_TIMEOUT_S)

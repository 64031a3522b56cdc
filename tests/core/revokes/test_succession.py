"""When a process that made way for another one may join again."""

from __future__ import annotations

from dagster_rebalance.core.revokes.holds import SUCCESSOR_TIMEOUT_S, HandoverBackoff


def test_nobody_joins_while_the_successor_shows_that_it_lives() -> None:
    """Two replicas that both get ticks would hand partitions to each other for ever."""
    made_way = HandoverBackoff("b 1", 100.0)
    for beat in range(2, 20):
        now = 100.0 + 15 * beat
        made_way = made_way.observe(f"b {beat}", now)
        assert not made_way.may_join(now)


def test_a_seat_that_was_given_up_is_free_at_once() -> None:
    """The other replica was shut down in order."""
    assert HandoverBackoff("b 1", 100.0).observe("", 101.0).may_join(101.0)


def test_a_seat_without_a_new_sign_is_free_after_a_while() -> None:
    """The other replica was killed."""
    made_way = HandoverBackoff("b 1", 100.0).observe("b 1", 100.0 + SUCCESSOR_TIMEOUT_S - 1)
    assert not made_way.may_join(100.0 + SUCCESSOR_TIMEOUT_S - 1)
    assert made_way.may_join(100.0 + SUCCESSOR_TIMEOUT_S)

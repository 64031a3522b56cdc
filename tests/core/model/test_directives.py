"""Directives: which one is in force, and which are superseded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dagster_rebalance.core.model.directives import (
    EVERYTHING,
    MOST_NAME_CHARACTERS,
    MOST_REASON_CHARACTERS,
    Action,
    Directive,
    in_force,
    new_retries,
    resolve_selector,
    resume_command,
    retry_command,
    selector_of,
    superseded,
)
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import TopicPartition

PARTITIONS = [TopicPartition(topic, number) for topic in ("orders", "pay") for number in (0, 1, 11)]
SELECTORS = ("*", "orders", "orders:1", "pay:0", "o*", "*:1", "orders:1*")


def order(action: Action, partitions: str = EVERYTHING) -> Directive:
    """Return a directive of the operator Ada."""
    return Directive(action, partitions, "ada", 1_700_000_000.0, "the warehouse is away")


def test_directive_text_has_no_escape_sequences() -> None:
    evil = "a\x1b]52;c;aGk=\x07\nCRITICAL\u202e x"
    said = str(Directive(Action.PAUSE, "orders", evil, 0.0, evil))
    assert said == (
        "paused by a ]52;c;aGk= CRITICAL x since 1970-01-01 00:00:00 UTC: a ]52;c;aGk= CRITICAL x"
    )


@pytest.mark.parametrize(
    ("selector", "covered"),
    [
        ("*", PARTITIONS),
        ("orders", PARTITIONS[:3]),
        ("orders:1", PARTITIONS[1:2]),
        ("orders:1*", PARTITIONS[1:3]),
        ("ord*", PARTITIONS[:3]),
        ("p?y:[01]", PARTITIONS[3:5]),
        ("*:11", [PARTITIONS[2], PARTITIONS[5]]),
        ("order", []),
        ("Orders", []),
        ("orders:2", []),
    ],
)
def test_selector_matches_partition_topic_or_pattern(
    selector: str, covered: list[TopicPartition]
) -> None:
    said = order(Action.PAUSE, selector)
    assert [partition for partition in PARTITIONS if said.covers(partition)] == covered


def test_newest_covering_directive_is_in_force() -> None:
    paused, but_one = order(Action.PAUSE), order(Action.RESUME, "orders:1")
    assert in_force((), PARTITIONS[1]) is None
    assert in_force((paused, but_one), PARTITIONS[0]) == paused
    assert in_force((paused, but_one), PARTITIONS[1]) is None
    stopped = order(Action.STOP, "orders")
    assert in_force((paused, but_one, stopped), PARTITIONS[1]) == stopped
    assert in_force((paused, stopped, order(Action.RESUME)), PARTITIONS[1]) is None


def test_retry_keeps_directive_in_force() -> None:
    paused, retried = order(Action.PAUSE), order(Action.RETRY, "orders:1")
    assert in_force((paused, retried), PARTITIONS[1]) == paused
    assert new_retries((paused,), (paused, retried)) == [retried]
    assert new_retries((paused, retried), (paused, retried)) == []
    assert retry_command(PARTITIONS[1]) == "dagster-rebalance retry orders:1"
    assert Directive(Action.RETRY, "orders", "ada", 0.0).reason == ""


@given(some.lists(some.builds(order, some.sampled_from(Action), some.sampled_from(SELECTORS))))
def test_dropping_superseded_directives_keeps_those_in_force(orders: list[Directive]) -> None:
    gone = set(superseded(orders))
    kept = [said for index, said in enumerate(orders) if index not in gone]
    for is_retry in (False, True):
        kind = [said for said in kept if (said.action is Action.RETRY) is is_retry]
        assert len(kind) <= len(SELECTORS)
    for partition in PARTITIONS:
        assert in_force(kept, partition) == in_force(orders, partition)


@pytest.mark.parametrize(
    ("partitions", "by", "reason", "problem"),
    [
        ("", "ada", "why", "'' cannot name partitions: write orders:3"),
        ("orders:", "ada", "why", "'orders:' cannot name partitions"),
        ("orders:three", "ada", "why", "'orders:three' cannot name partitions"),
        ("orders 3", "ada", "why", "'orders 3' cannot name partitions"),
        ("orders:3", " ", "why", "pause orders:3: give your name"),
        ("orders:3", "ada", " \n", "pause orders:3: give a reason"),
        (
            "*",
            "ada",
            "w" * (MOST_REASON_CHARACTERS + 1),
            "a reason may have at most 300 characters",
        ),
        ("*", "a" * (MOST_NAME_CHARACTERS + 1), "why", "a name may have at most 60 characters"),
    ],
)
def test_incomplete_directive_is_refused(
    partitions: str, by: str, reason: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match="^" + problem.replace("*", r"\*")):
        Directive(Action.PAUSE, partitions, by, 0.0, reason)


def test_directive_text_names_author_time_and_reason() -> None:
    said = Directive(Action.STOP, "orders:3", "ada", 1_700_000_000.0, "bad\ndeploy ")
    assert str(said) == "stopped by ada since 2023-11-14 22:13:20 UTC: bad deploy"
    assert str(Directive(Action.RESUME, "*", "bob", 1_700_000_000.0)) == (
        "resumed by bob since 2023-11-14 22:13:20 UTC"
    )


def test_resume_command_is_shell_quoted() -> None:
    assert resume_command(selector_of(PARTITIONS[1])) == "dagster-rebalance resume orders:1"
    assert resume_command("*") == "dagster-rebalance resume '*'"


def test_selector_without_match_lists_partitions() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^order matches no partition of group shop, which has orders-0, orders-1, "
        r"orders-11, pay-0, pay-1, pay-11\. Write topic:number for a partition",
    ):
        resolve_selector("order", PARTITIONS, "shop")


def test_selector_accepts_partition_names_of_tables() -> None:
    assert resolve_selector("orders-1", PARTITIONS, "shop") == ("orders:1", (PARTITIONS[1],))
    assert resolve_selector("ord*:1", PARTITIONS, "shop") == ("ord*:1", (PARTITIONS[1],))
    both = [TopicPartition("orders", 3), TopicPartition("orders-3", 0)]
    with pytest.raises(
        ConfigurationError,
        match=r"orders-3 is both a topic and .*write orders-3:\* for the topic, or orders:3",
    ):
        resolve_selector("orders-3", both, "shop")

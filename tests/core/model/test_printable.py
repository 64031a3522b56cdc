"""Text from outside."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.errors import BrokerError, ClaimError, ConfigurationError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.core.model.printable import Reason, escaped, one_line

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("größer 東京 🙂", "größer 東京 🙂"),
        ("two\n\tlines", "two\n\tlines"),
        (ESCAPE, r"\x1b]0;owned\x07\x1b[2J"),
        ("over\rwritten\x00\x9b31m", r"over\rwritten\x00\x9b31m"),
        ("\u202etxt.exe", r"\u202etxt.exe"),
        ("\ud83d", r"\ud83d"),
    ],
)
def test_unprintable_characters_are_escaped(given: str, found: str) -> None:
    assert escaped(given) == found
    assert escaped(given).encode()


def test_one_line_removes_line_breaks_and_controls() -> None:
    assert one_line(" a\n\x1b b\tc ") == "a b c"


def test_error_message_has_no_escape_sequence() -> None:
    assert str(ConfigurationError(f"refused: {ESCAPE}")) == f"refused: {escaped(ESCAPE)}"
    assert ClaimError().args == ()
    reasons = {TopicPartition("orders", 0): ESCAPE}
    error = BrokerError(ESCAPE, partitions=reasons)
    assert (str(error), list(error.partitions.values())) == (escaped(ESCAPE), [escaped(ESCAPE)])


def test_reason_is_one_text_that_keeps_problem_and_remedy() -> None:
    reason = Reason("orders-3: 3 attempts failed", "Fix the cause")
    assert reason == "orders-3: 3 attempts failed. Fix the cause"
    assert (reason.problem, reason.remedy) == ("orders-3: 3 attempts failed", "Fix the cause")
    assert Reason.of(reason) is reason


def test_reason_of_a_plain_text_has_no_remedy() -> None:
    reason = Reason.of("the directives cannot be read. Odd")
    assert (reason, reason.problem, reason.remedy) == (reason.problem, reason.problem, "")

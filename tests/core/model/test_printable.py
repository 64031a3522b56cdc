"""Text from outside."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.errors import BrokerError, ClaimError, ConfigurationError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.core.model.printable import one_line, shown

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
def test_unprintable_characters_are_shown_as_escapes(given: str, found: str) -> None:
    """A terminal obeys them, and a database refuses some."""
    assert shown(given) == found
    assert shown(given).encode()


def test_a_text_of_a_person_is_one_line() -> None:
    """Its line breaks would look like lines of the program."""
    assert one_line(" a\n\x1b b\tc ") == "a b c"


def test_an_error_shows_no_escape_sequence() -> None:
    """Its message may cite a broker, a schema or a record."""
    assert str(ConfigurationError(f"refused: {ESCAPE}")) == f"refused: {shown(ESCAPE)}"
    assert ClaimError().args == ()
    reasons = {TopicPartition("orders", 0): ESCAPE}
    error = BrokerError(ESCAPE, partitions=reasons)
    assert (str(error), list(error.partitions.values())) == (shown(ESCAPE), [shown(ESCAPE)])

"""Where a group begins: an end of the log, or a time."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import Bounds
from dagster_rebalance.core.model.start_position import (
    Start,
    StartFrom,
    StartTime,
    first_offset,
    start_of,
)

BOUNDS = Bounds(30, 500)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", StartFrom.EARLIEST),
        ("latest", StartFrom.LATEST),
        ("1970-01-01T00:00:01.500+00:00", StartTime(1500)),
        ("1970-01-01T01:00:00+01:00", StartTime(0)),
        ("2026-11-23T08:00:00Z", StartTime(1_795_420_800_000)),
        ("2026-11-23 08:00:00.001900z", StartTime(1_795_420_800_001)),
    ],
)
def test_a_text_says_an_end_or_a_time(text: str, start: Start) -> None:
    """Kafka has the times of records in milliseconds; a zone makes it one moment everywhere."""
    assert start_of(text) == start


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("yesterday", "must be earliest, latest, or a time with its zone, such as 2026"),
        ("", "must be earliest, latest"),
        ("Z", "must be earliest, latest"),
        ("1795420800000", "must be earliest, latest"),
        ("2026-11-23T08:00:00", "has no time zone"),
        ("2026-11-23", "has no time zone"),
        ("1969-12-31T23:59:59Z", "is before 1970"),
    ],
)
def test_what_is_no_time_is_refused_with_an_example(text: str, says: str) -> None:
    """Below 0 Kafka's client takes a time for an end of the log."""
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        start_of(text)


@pytest.mark.parametrize(
    ("start", "not_older", "offset"),
    [
        (StartFrom.EARLIEST, None, 30),
        (StartFrom.LATEST, None, 500),
        (StartTime(1), 77, 77),
        (StartTime(1), None, 500),
        (StartTime(1), 20, 30),
    ],
)
def test_a_time_begins_with_the_first_record_that_is_not_older(
    start: Start, not_older: int | None, offset: int
) -> None:
    """Without one, at the end; never with what retention has deleted meanwhile."""
    assert first_offset(start, BOUNDS, not_older) == offset

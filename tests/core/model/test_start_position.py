"""Where a group begins: an end of the log, or a time."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import Bounds
from dagster_rebalance.core.model.topics import (
    Start,
    StartFrom,
    StartTime,
    first_offset,
    parse_start,
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
def test_parse_start_reads_ends_and_times(text: str, start: Start) -> None:
    assert parse_start(text) == start


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
def test_invalid_start_is_refused_with_example(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        parse_start(text)


@pytest.mark.parametrize(
    ("start", "offset_at_start_time", "offset"),
    [
        (StartFrom.EARLIEST, None, 30),
        (StartFrom.LATEST, None, 500),
        (StartTime(1), 77, 77),
        (StartTime(1), None, 500),
        (StartTime(1), 20, 30),
    ],
)
def test_first_offset_follows_setting_within_bounds(
    start: Start, offset_at_start_time: int | None, offset: int
) -> None:
    assert first_offset(start, BOUNDS, offset_at_start_time) == offset

"""Two writers of one range leave each record once, whatever they do to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.two_writers import play

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_two_writers_of_one_range_leave_each_record_once_at_any_interleaving(
    session: SparkSession,
) -> None:
    """Spark's own overwrite deletes and then renames.

    Two such overwrites doubled a range or made everything unreadable.
    """
    tally = play(session, rounds=25, seed=1, whole=False)
    assert tally.wrong == []
    assert tally.overtaken, "the writers only took turns"
    assert tally.killed, "nobody was killed"


def test_two_whole_writes_of_one_range_leave_each_record_once(session: SparkSession) -> None:
    """From each writer's own read to its end, with the calls that the rounds above leave out."""
    assert play(session, rounds=2, seed=5, whole=True).wrong == []

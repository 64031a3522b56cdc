"""Two concurrent writers of one range leave each record once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.two_writers import play

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_two_writers_at_any_interleaving_leave_each_record_once(session: SparkSession) -> None:
    tally = play(session, rounds=25, seed=1, whole=False)
    assert tally.wrong == []
    assert tally.overtaken, "the writers only took turns"
    assert tally.killed, "no writer was killed"


def test_two_concurrent_writes_leave_each_record_once(session: SparkSession) -> None:
    assert play(session, rounds=2, seed=5, whole=True).wrong == []

"""Clients that are kept read only the log that they have read before."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.offsets import Log
from dagster_rebalance.core.streaming.stream_worker import ReaderReuse
from tests.core.world import tp

ORDERS = Log("an id", 3)


def test_reader_is_reused_while_each_log_is_the_same() -> None:
    known = ReaderReuse()
    assert known.generation({tp(0): ORDERS}) == 0
    assert known.generation({tp(1): Log("an id", 7)}) == 0
    assert known.generation({tp(0): ORDERS, tp(1): Log("an id", 7)}) == 0


@pytest.mark.parametrize("other", [Log("an id", 4), Log("another id", 3)])
def test_reader_is_replaced_after_an_election_or_recreation(other: Log) -> None:
    known = ReaderReuse()
    known.generation({tp(0): ORDERS, tp(1): ORDERS})
    assert known.generation({tp(1): other}) == 1
    assert known.generation({tp(0): ORDERS, tp(1): other}) == 1
    assert known.generation({tp(0): other}) == 2, "its log was another one when they read it"


@pytest.mark.parametrize("unknown", [Log("an id", None), Log("", 3)])
def test_reader_is_never_reused_without_topic_ids(unknown: Log) -> None:
    known = ReaderReuse()
    assert known.generation({tp(0): unknown, tp(1): ORDERS}) is None
    assert known.generation({tp(1): ORDERS}) == 0

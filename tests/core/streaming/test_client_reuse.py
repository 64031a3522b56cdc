"""Clients that are kept read only the log that they have read before."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.offsets import Log
from dagster_rebalance.core.streaming.stream_worker import ReaderReuse
from tests.core.world import tp

ORDERS = Log("an id", 3)


def test_clients_are_used_again_while_each_partition_has_the_same_log() -> None:
    """Also where a batch has other partitions than the one before."""
    known = ReaderReuse()
    assert known.generation({tp(0): ORDERS}) == 0
    assert known.generation({tp(1): Log("an id", 7)}) == 0
    assert known.generation({tp(0): ORDERS, tp(1): Log("an id", 7)}) == 0


@pytest.mark.parametrize("other", [Log("an id", 4), Log("another id", 3)])
def test_a_new_leader_and_a_new_topic_get_new_clients(other: Log) -> None:
    """Either may have other records at offsets that a client has fetched already."""
    known = ReaderReuse()
    known.generation({tp(0): ORDERS, tp(1): ORDERS})
    assert known.generation({tp(1): other}) == 1
    assert known.generation({tp(0): ORDERS, tp(1): other}) == 1
    assert known.generation({tp(0): other}) == 2, "its log was another one when they read it"


@pytest.mark.parametrize("unknown", [Log("an id", None), Log("", 3)])
def test_a_log_that_cannot_be_told_from_another_one_is_read_with_new_clients(unknown: Log) -> None:
    """A broker may not say which leader epoch it has."""
    known = ReaderReuse()
    assert known.generation({tp(0): unknown, tp(1): ORDERS}) is None
    assert known.generation({tp(1): ORDERS}) == 0

"""What fits a commit request, and which partitions count as gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model import commit_requests
from dagster_rebalance.core.model.commit_requests import (
    UnknownPartitions,
    oversized,
    split_requests,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    import pytest

P0, P1, P2 = (TopicPartition("orders", number) for number in range(3))


def test_offsets_within_limit_are_one_request() -> None:
    offsets = {tp: OffsetAndMetadata(1) for tp in (P0, P1)}
    assert list(split_requests(offsets, "etl")) == [offsets]
    assert list(split_requests({}, "etl")) == []


def test_requests_stay_within_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 400)
    large, small = OffsetAndMetadata(1, "ü" * 200), OffsetAndMetadata(1)
    offsets = {P0: small, P1: small, TopicPartition("orders", 9): large, P2: small}
    assert [len(request) for request in split_requests(offsets, "etl")] == [2, 1, 1]


def test_long_metadata_of_400_partitions_needs_four_requests() -> None:
    offsets = {
        TopicPartition("orders", number): OffsetAndMetadata(1, "x" * 4_000) for number in range(400)
    }
    assert [len(request) for request in split_requests(offsets, "etl")] == [122, 122, 122, 34]
    assert {len(request) for request in split_requests(offsets, "etl", 4)} == {30, 10}


def test_metadata_size_is_measured_in_bytes() -> None:
    offsets = {P0: OffsetAndMetadata(1, "ü" * 16_383), P1: OffsetAndMetadata(1, "ü" * 16_384)}
    refused = oversized(offsets)
    assert refused.keys() == {P1}
    assert "32,768 bytes" in str(refused[P1])


def test_unknown_partition_is_lost_after_delay() -> None:
    """A broker may not have received the metadata of a new topic yet."""
    unknown = UnknownPartitions()
    assert unknown.gone(P0, 0.0) is None
    unknown.refused([P0], 0.0)
    unknown.refused([P0], 4.9)
    assert unknown.gone(P0, 4.9) is None
    gone = unknown.gone(P0, 5.0)
    assert gone is not None
    assert "deleted" in str(gone)
    unknown.forget([P0, P1])
    assert unknown.gone(P0, 9.0) is None

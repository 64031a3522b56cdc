"""Size limits of commit requests, and detection of deleted partitions.

The offset of a partition and its metadata are always in the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition

MAX_METADATA_BYTES = 4_095
"""The broker's default `offset.metadata.max.bytes`, minus the NUL that confluent-kafka appends. The
broker counts characters."""
MAX_CARRIED_BYTES = 32_766
"""For longer metadata the broker closes the connection, for all partitions of the request."""
MAX_REQUEST_BYTES = 500_000
"""The broker stores a request as one batch of `__consumer_offsets`, 1 MB by default."""
_BYTES_BESIDE_TEXTS = 80
GONE_AFTER_S = 5.0
"""Brokers also refuse partitions as unknown until they receive the metadata of a new topic."""


def split_requests(
    offsets: Mapping[TopicPartition, OffsetAndMetadata], group_id: str, share: int = 1
) -> Iterator[dict[TopicPartition, OffsetAndMetadata]]:
    """Split offsets into requests that the broker can store, in order.

    `share` divides the size limit, for brokers with a smaller one.
    """
    most = MAX_REQUEST_BYTES // share
    request: dict[TopicPartition, OffsetAndMetadata] = {}
    total = 0
    for tp, offset in offsets.items():
        size = len(group_id) + len(tp.topic) + _size(offset) + _BYTES_BESIDE_TEXTS
        if request and total + size > most:
            yield request
            request, total = {}, 0
        request[tp] = offset
        total += size
    if request:
        yield request


def oversized(
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
) -> dict[TopicPartition, BrokerError]:
    """Return errors for the partitions whose metadata fits no request."""
    sizes = {tp: _size(offset) for tp, offset in offsets.items()}
    return {
        tp: BrokerError(
            f"commit for {tp} refused: its metadata has {size:,} bytes, and a request can carry "
            f"{MAX_CARRIED_BYTES:,}, of which a broker with default settings stores "
            f"{MAX_METADATA_BYTES:,}: shorten it",
            partitions={tp: "its metadata is too long"},
        )
        for tp, size in sizes.items()
        if size > MAX_CARRIED_BYTES
    }


def _size(offset: OffsetAndMetadata) -> int:
    return len(offset.metadata.encode(errors="surrogatepass"))


class UnknownPartitions:
    """Partitions that the broker has refused as unknown."""

    def __init__(self) -> None:
        self._since: dict[TopicPartition, float] = {}

    def refused(self, partitions: Collection[TopicPartition], now: float) -> None:
        """Record that the broker refused a commit because it does not know the partitions."""
        for tp in partitions:
            self._since.setdefault(tp, now)

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Drop partitions that the broker knows or that are no longer assigned."""
        for tp in partitions if self._since else ():
            self._since.pop(tp, None)

    def gone(self, partition: TopicPartition, now: float) -> PartitionLostError | None:
        """Return the error for a partition that has been unknown for `GONE_AFTER_S`, or None."""
        since = self._since.get(partition)
        if since is None or now - since < GONE_AFTER_S:
            return None
        return PartitionLostError(
            f"commit for {partition} refused: its topic was deleted, or recreated with fewer "
            "partitions; stop the work on it",
            partitions={partition: "its topic was deleted"},
            topics=[partition.topic],
        )

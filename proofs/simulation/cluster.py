from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import LogPosition
from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp, PartitionInfo
from proofs.simulation.coordinator import TOPIC

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from proofs.simulation.coordinator import Coordinator
    from proofs.simulation.process import Process


class SimulatedCluster:
    """The view of the cluster (`ClusterView`) through the network of one process."""

    def __init__(self, process: Process, group: Coordinator) -> None:
        self._process = process
        self._group = group

    def beginning_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        self._process.must_reach("kafka")
        return {partition: self._group.starts[partition] for partition in partitions}

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        self._process.must_reach("kafka")
        return {partition: self._group.ends[partition] for partition in partitions}

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        ends = self.end_offsets(partitions, timeout_s)
        return {
            partition: LogPosition(end, self._group.leader_epochs[partition])
            for partition, end in ends.items()
        }

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the end offsets: there are no transactions."""
        return self.end_offsets(partitions, timeout_s)

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        self._process.must_reach("kafka")
        return {
            partition: self._group.has_lost(partition, position)
            for partition, position in positions.items()
        }

    def topic_ids(self, topics: Collection[str], timeout_s: float = 10.0) -> dict[str, str]:
        self._process.must_reach("kafka")
        return dict.fromkeys(topics, self._group.topic_id)

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Return the result of `topic_ids`: the member loop reads no records."""
        return lambda: self.topic_ids(topics)

    def offsets_for_times(
        self,
        timestamps: Mapping[TopicPartition, int],
        timeout_s: float = 10.0,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return no offsets: simulated records have no timestamps."""
        self._process.must_reach("kafka")
        return dict.fromkeys(timestamps)

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        return {
            TOPIC: [
                PartitionInfo(TOPIC, partition.partition, 1, (1,), (1,))
                for partition in self._group.partitions
            ]
        }

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        return self.list_topics(timeout_s)[topic]

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        """All is well."""

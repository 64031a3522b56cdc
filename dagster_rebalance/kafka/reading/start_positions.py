"""Look up where reading of a partition starts: at the committed offset, or at an end of the log.

The client must not do this. A response that arrives after the partition was unassigned starts a
timer of 0.5 s, which moves the partition to an end of the log regardless of its next assignment
(`rd_kafka_toppar_handle_Offset`, "outdated offset response"; seen with 2.16.0): records would be
read again or skipped. By its source, the same happens with an open transaction: the answer counts
as "nothing is committed" if another assignment occurs in between.

Must never choose an offset if `auto.offset.reset` forbids it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.client.errors import without_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.group_ports import ClusterView, GroupMember

_Answer = TypeVar("_Answer")
End: TypeAlias = Literal["earliest", "latest"]
Start: TypeAlias = Literal["committed"] | End | int
"""Where reading starts. `committed` falls back on `auto.offset.reset`."""


class StartPositions:
    """Looks up where reading starts.

    Args:
        offset_reset: The end to start at without a committed offset, or `error`.
    """

    def __init__(
        self, member: GroupMember, cluster: ClusterView, offset_reset: End | Literal["error"]
    ) -> None:
        self._member = member
        self._cluster = cluster
        self._offset_reset = offset_reset

    def find(
        self, wanted: Mapping[TopicPartition, Start], timeout_s: float
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], BrokerError | None]:
        """Return the start offsets that were found, and the error of the other partitions.

        Sends one request of each kind.
        """
        found = {
            tp: OffsetAndMetadata(start) for tp, start in wanted.items() if isinstance(start, int)
        }
        ends: dict[End, set[TopicPartition]] = {
            "earliest": {tp for tp, start in wanted.items() if start == "earliest"},
            "latest": {tp for tp, start in wanted.items() if start == "latest"},
        }
        committed = {tp for tp, start in wanted.items() if start == "committed"}
        problem: BrokerError | None = None
        if committed:
            stored, problem = _answered(self._member.committed, committed, timeout_s)
            found.update(
                {
                    tp: OffsetAndMetadata(at.offset, leader_epoch=at.leader_epoch)
                    for tp, at in stored.items()
                    if at is not None
                }
            )
            nothing = stored.keys() - found.keys()
            if self._offset_reset == "error":
                problem = _forbidden(nothing) if nothing else problem
            else:
                ends[self._offset_reset] |= nothing
        for query, partitions in (
            (self._cluster.beginning_offsets, ends["earliest"]),
            (self._cluster.end_offsets, ends["latest"]),
        ):
            offsets, end_problem = _answered(query, partitions, timeout_s)
            found.update({tp: OffsetAndMetadata(offset) for tp, offset in offsets.items()})
            problem = end_problem or problem
        return found, problem

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Request topic ids; the returned function returns them, or None before the response."""
        return self._cluster.begin_topic_ids(topics)

    def ends(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, int]:
        """Return the log ends of the partitions whose leaders answer."""
        return _answered(self._cluster.end_offsets, set(partitions), timeout_s)[0]


def _answered(
    query: Callable[[Collection[TopicPartition], float], dict[TopicPartition, _Answer]],
    partitions: set[TopicPartition],
    timeout_s: float,
) -> tuple[dict[TopicPartition, _Answer], BrokerError | None]:
    """Return the results of the partitions that Kafka answers for, and the error of the others."""
    if not partitions:
        return {}, None
    try:
        return query(partitions, timeout_s), None
    except BrokerError as problem:
        error = without_frames(problem)
    others = partitions - error.partitions.keys()
    if len(others) in {0, len(partitions)}:
        return {}, error
    return _answered(query, others, timeout_s)[0], error


def _forbidden(partitions: Collection[TopicPartition]) -> BrokerError:
    names = ", ".join(map(str, sorted(partitions)[:5]))
    why = "no committed offset"
    msg = (
        f"{names} has {why} and 'auto.offset.reset' forbids choosing one: seek, or commit an offset"
    )
    return BrokerError(msg, partitions=dict.fromkeys(partitions, why))

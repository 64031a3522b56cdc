"""Reading of a partition begins at the group's committed offset, or at an end of the log.

Owns the look-up. The client could look offsets up by itself, and must not. An answer that comes
after its partition was given up starts a timer of 0.5 s, which moves the partition to an end of the
log, whatever it is assigned for by then (`rd_kafka_toppar_handle_Offset`, "outdated offset
response"). Seen with librdkafka 2.16.0: a partition without a commit goes, and comes back within a
second with the offset that its owner in between has committed; then all that was read is read again
or, with `auto.offset.reset` `latest`, what is left is skipped. So it is in its source with a
transaction that is open: the answer counts as "nothing is committed" when another assignment comes
meanwhile.

Must never choose an offset where `auto.offset.reset` forbids it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.group_ports import ClusterView, GroupMember

_Answer = TypeVar("_Answer")
End: TypeAlias = Literal["earliest", "latest"]
Start: TypeAlias = Literal["committed"] | End | int
"""Where reading begins. `committed` falls back on `auto.offset.reset`."""


class StartPositions:
    """Looks up where reading begins.

    Args:
        member: Knows what the group has committed.
        cluster: Knows the ends of the log.
        offset_reset: What counts where nothing is committed: an end, or `error`.
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
        """Return the offsets that could be found, and why others could not.

        The look-up makes one request of each kind.
        """
        found = {
            tp: OffsetAndMetadata(start) for tp, start in wanted.items() if isinstance(start, int)
        }
        ends: dict[End, set[TopicPartition]] = {
            "earliest": {tp for tp, start in wanted.items() if start == "earliest"},
            "latest": {tp for tp, start in wanted.items() if start == "latest"},
        }
        asked = {tp for tp, start in wanted.items() if start == "committed"}
        problem: BrokerError | None = None
        if asked:
            stored, problem = _answered(self._member.committed, asked, timeout_s)
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
        for ask, partitions in (
            (self._cluster.beginning_offsets, ends["earliest"]),
            (self._cluster.end_offsets, ends["latest"]),
        ):
            offsets, unanswered_end = _answered(ask, partitions, timeout_s)
            found.update({tp: OffsetAndMetadata(offset) for tp, offset in offsets.items()})
            problem = unanswered_end or problem
        return found, problem

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Ask for the ids of topics; the function that is returned has them, or None before."""
        return self._cluster.begin_topic_ids(topics)

    def ends(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, int]:
        """The ends of logs; of those whose leaders answer."""
        return _answered(self._cluster.end_offsets, set(partitions), timeout_s)[0]


def _answered(
    ask: Callable[[Collection[TopicPartition], float], dict[TopicPartition, _Answer]],
    partitions: set[TopicPartition],
    timeout_s: float,
) -> tuple[dict[TopicPartition, _Answer], BrokerError | None]:
    """Those that Kafka answers for, and the problem of the others."""
    if not partitions:
        return {}, None
    try:
        return ask(partitions, timeout_s), None
    except BrokerError as problem:
        others = partitions - problem.partitions.keys()
        if len(others) in {0, len(partitions)}:
            return {}, problem
        return _answered(ask, others, timeout_s)[0], problem


def _forbidden(partitions: Collection[TopicPartition]) -> BrokerError:
    named = ", ".join(map(str, sorted(partitions)[:5]))
    why = "no committed offset"
    msg = (
        f"{named} has {why} and 'auto.offset.reset' forbids to choose one: "
        "seek, or commit an offset"
    )
    return BrokerError(msg, partitions=dict.fromkeys(partitions, why))

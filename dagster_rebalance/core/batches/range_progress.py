"""Progress of a reader through exact ranges, and detection of offsets that no longer exist.

The last offsets of a range may be transaction markers, aborted records or compacted, so no reader
may wait for a record at the last offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import Bounds, OffsetRange, TopicPartition

# Consecutive ranges of one partition without a gap, which are read as one.
Span = tuple["OffsetRange", ...]


def read_rounds(ranges: Iterable[OffsetRange]) -> list[list[Span]]:
    """Group ranges into rounds: reads with at most one gapless span of each partition.

    A reader has one start and one end per partition.

    Raises:
        IllegalStateError: There are no ranges, or they overlap.
    """
    in_order = sorted(ranges)
    if not in_order:
        msg = "a batch without ranges cannot be read: give at least one range."
        raise IllegalStateError(msg)
    rounds: list[list[Span]] = []
    spans_of: dict[TopicPartition, int] = {}
    for span in _spans(in_order):
        position = spans_of.get(span[0].topic_partition, 0)
        spans_of[span[0].topic_partition] = position + 1
        if position == len(rounds):
            rounds.append([])
        rounds[position].append(span)
    return rounds


def _spans(in_order: Sequence[OffsetRange]) -> Iterator[Span]:
    span: list[OffsetRange] = []
    for following in in_order:
        if span and following.overlaps(span[-1]):
            msg = (
                f"the ranges {span[-1]} and {following} overlap: reading them together would read "
                "records twice. Plan them without overlap."
            )
            raise IllegalStateError(msg)
        if span and (
            following.topic_partition != span[-1].topic_partition
            or following.start != span[-1].until
        ):
            yield tuple(span)
            span = []
        span.append(following)
    yield tuple(span)


class UnreadOffsets:
    """The unread offsets of the spans of one round.

    Attributes:
        positions: The next offset of each unfinished partition.
        ends: The end of the span of each partition.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.positions: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        for span in spans:
            self.positions[span[0].topic_partition] = span[0].start
            self.ends[span[0].topic_partition] = span[-1].until

    def advance(self, partition: TopicPartition, offset: int) -> bool:
        """Advance a partition, possibly beyond its end; return whether the offset is higher."""
        if self.positions.get(partition, offset) >= offset:
            return False
        if offset >= self.ends[partition]:
            del self.positions[partition], self.ends[partition]
        else:
            self.positions[partition] = offset
        return True

    def why_gone(self, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, str]:
        """Return why partitions can no longer be read to the end of their span, by partition.

        In `bounds`, `until` is the high watermark.
        """
        reasons = {}
        for partition, position in self.positions.items():
            log, end = bounds.get(partition), self.ends[partition]
            if log is None:
                continue
            if log.start > position:
                reasons[partition] = (
                    f"the log of {partition} begins at {log.start}: the offsets [{position}, "
                    f"{min(log.start, end)}) were deleted (by retention or an operator) before "
                    "they were processed. Nothing was committed. To continue without them, set the "
                    "group's committed offset of this partition to the beginning of the log "
                    "(dagster-rebalance reset). If retention deleted them, set retention.ms "
                    "above the longest backlog"
                )
            elif log.until < end:
                reasons[partition] = (
                    f"the log of {partition} ends at {log.until}, before {end}: it was truncated "
                    "(unclean leader election), or the topic was recreated. Nothing was committed. "
                    "New records will take these offsets: to continue, set the group's committed "
                    f"offset of this partition to {log.until} or, if the topic is new, to its "
                    "beginning (dagster-rebalance reset)"
                )
        return reasons

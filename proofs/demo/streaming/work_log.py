"""The history of each partition from the group's records in Kafka: claims and commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from proofs.witness.offsets_topic import StoredOffset
from proofs.witness.owners import Owners

if TYPE_CHECKING:
    from proofs.witness.offsets_topic import GroupRecord


@dataclass(frozen=True, slots=True)
class InHand:
    """A claimed and uncommitted range, with the time of its first claim in seconds since 1970."""

    range: OffsetRange
    run_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Done:
    """A commit.

    Attributes:
        range: The committed range.
        at: Its time.
        claimed_at: Time of the claim.
        run_id: The run of the claim.
    """

    range: OffsetRange
    at: float
    claimed_at: float
    run_id: str


@dataclass
class WorkLog:
    """Applies Kafka's records in order.

    Attributes:
        owners: Member ids of the owners.
        in_hand: Claimed ranges by partition.
        done: All commits, oldest first.
        again: Claimed ranges that another run took over, with the former run.
    """

    owners: Owners = field(default_factory=Owners)
    in_hand: dict[int, InHand] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    again: list[InHand] = field(default_factory=list)
    _committed: dict[int, int] = field(default_factory=dict)

    def take(self, record: GroupRecord) -> None:
        """Apply the next record."""
        if not isinstance(record, StoredOffset):
            self.owners.take(record)
            return
        number, reached = record.partition, self.committed(record.partition)
        before = self.in_hand.pop(number, None)
        if record.offset > reached:
            range_ = OffsetRange(record.topic, number, reached, record.offset)
            claimed_at = before.at if before else record.at
            self.done.append(Done(range_, record.at, claimed_at, before.run_id if before else ""))
            self._committed[number] = record.offset
            before = None
        claims = decode(OffsetAndMetadata(record.offset, record.metadata)).claims
        has_begun = bool(claims) and not claims[0].is_early
        batch = StreamBatch.parse(claims[0].batch_id) if has_begun else None
        if batch is None:
            return
        range_ = OffsetRange(record.topic, number, record.offset, claims[0].until)
        if before and before.run_id != batch.run_id:
            self.again.append(before)
        self.in_hand[number] = InHand(range_, batch.run_id, before.at if before else record.at)

    def committed(self, number: int) -> int:
        return self._committed.get(number, 0)

    def last(self, number: int) -> Done | None:
        return next((one for one in reversed(self.done) if one.range.partition == number), None)

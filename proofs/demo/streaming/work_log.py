"""What happened to each partition, told by what Kafka stored of the group: claims and commits.

Owns the reading of claims: which batch of which run has a range in hand, and since when. Must not
ask a member.
"""

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
    """A range that is claimed and not committed. Times are in seconds since 1970.

    Attributes:
        range: The range.
        run_id: The run that works on it.
        at: When a run first claimed it.
    """

    range: OffsetRange
    run_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Done:
    """A commit.

    Attributes:
        range: What was committed.
        at: When.
        claimed_at: When it was claimed.
        run_id: The run that had it in hand.
    """

    range: OffsetRange
    at: float
    claimed_at: float
    run_id: str


@dataclass
class WorkLog:
    """Takes in what Kafka stored, in its order.

    Attributes:
        owners: Who has each partition, by the ids that Kafka gives to members.
        in_hand: What is at work, by partition.
        done: All commits, oldest first.
        again: What a run had in hand when another one took it over, with the run that lost it.
    """

    owners: Owners = field(default_factory=Owners)
    in_hand: dict[int, InHand] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    again: list[InHand] = field(default_factory=list)
    _committed: dict[int, int] = field(default_factory=dict)

    def take(self, record: GroupRecord) -> None:
        """Take the next record in."""
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
        batch = StreamBatch.read(claims[0].batch_id) if claims else None
        if batch is None:
            return
        range_ = OffsetRange(record.topic, number, record.offset, claims[0].until)
        if before and before.run_id != batch.run_id:
            self.again.append(before)
        self.in_hand[number] = InHand(range_, batch.run_id, before.at if before else record.at)

    def committed(self, number: int) -> int:
        """The committed offset of a partition."""
        return self._committed.get(number, 0)

    def last(self, number: int) -> Done | None:
        """The last commit of a partition."""
        return next((one for one in reversed(self.done) if one.range.partition == number), None)

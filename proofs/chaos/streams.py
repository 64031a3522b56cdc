"""What streaming runs did, by their own journals and by Kafka's log.

Owns when a batch counts as at work: from its first line in the journal to its last one, but not
while its process was frozen, and no longer than its process lived. Owns the violations: two
batches at work on one offset at the same time, a claim by a run that did not have the partition,
and an offset that was processed twice without a fault of its first run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby, islice, product
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.runs.bisection import Part, PartKind
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from proofs.chaos.exchange import HEARTBEAT_TIMEOUT_S
from proofs.chaos.faults import Fault, Kind
from proofs.chaos.journal import read_journals
from proofs.chaos.parts import member_of
from proofs.chaos.spans import Span, without
from proofs.chaos.stalls import RunSeen
from proofs.witness.offsets_topic import StoredOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from proofs.chaos.journal import BodySeen
    from proofs.chaos.stalls import History

FREEZES = {Kind.RUN_FROZEN, Kind.RUN_FROZEN_LONG}
_ENDS_PROCESS = {Kind.RUN_WORKER_KILLED, Kind.CODE_SERVER_KILLED}
TAKING_RUNS = {
    Kind.RUN_WORKER_KILLED,
    Kind.RUN_FROZEN_LONG,
    Kind.RUN_DELETED,
    Kind.RUN_FORCE_TERMINATED,
    Kind.RUN_CANCELLED,
    Kind.LAUNCH_REFUSED,
}
"""Faults that permanently take a run away from its partitions."""
_OF_ALL = {
    Kind.CODE_SERVER_KILLED,
    Kind.BROKER_KILLED,
    Kind.COORDINATOR_MOVED,
    Kind.STORAGE_LOCKED,
    Kind.STORAGE_HANGS,
}
_ENDS_ALL = {
    Kind.CODE_SERVER_KILLED,
    Kind.STORAGE_HANGS,
    *FREEZES,
}
"""A process that is suspended inside a write blocks SQLite for all others, which stop themselves
after a while."""
WAKING_S = 2.0
"""A resumed process needs a moment to detect that its lease has expired."""
COMMIT_S = 30.0
"""Time after the work in which a fault may still have prevented its commit."""


def range_of(key: str) -> OffsetRange:
    """Parse a key such as `numbers-3-120-240`."""
    topic, *numbers = key.rsplit("-", 3)
    partition, start, until = map(int, numbers)
    return OffsetRange(topic, partition, start, until)


class Worked:
    """A batch with its working time.

    Args:
        body: The batch in its journal.
        gone_at: The latest end of its process.
        faults: The injected faults.
    """

    def __init__(self, body: BodySeen, gone_at: float, faults: Iterable[Fault]) -> None:
        self.body = body
        self.member = member_of(body.run_id)
        self.ranges = tuple(map(range_of, body.keys))
        mine = [fault for fault in faults if self._is_hit_by(fault)]
        killed_at = [
            fault.began_at
            for fault in mine
            if fault.kind in _ENDS_PROCESS and fault.began_at >= body.began_at
        ]
        self.ended_at = min([*killed_at, gone_at]) if body.ended_at is None else body.ended_at
        self.thawed_at = [fault.end(gone_at) for fault in mine if fault.kind in FREEZES]
        frozen = [
            Span(fault.began_at, fault.end(gone_at)) for fault in mine if fault.kind in FREEZES
        ]
        self.spans = without([Span(body.began_at, max(self.ended_at, body.began_at))], frozen)

    def _is_hit_by(self, fault: Fault) -> bool:
        return fault.target == self.member or fault.kind is Kind.CODE_SERVER_KILLED

    def was_disturbed_by(self, fault: Fault) -> bool:
        """Return whether a fault may have prevented its commit."""
        return (
            (fault.target == self.member or fault.kind in _OF_ALL)
            and fault.began_at <= self.ended_at + COMMIT_S
            and (fault.mended_at is None or fault.mended_at >= self.body.began_at - COMMIT_S)
        )


def runs_of(batches: Iterable[Worked], partition: int) -> list[RunSeen]:
    """Return the batches of a partition, oldest first."""
    found = []
    for batch in batches:
        if any(range_.partition == partition for range_ in batch.ranges):
            for index, span in enumerate(batch.spans, 1):
                is_end = index == len(batch.spans)
                found.append(
                    RunSeen(
                        span.begin,
                        span.end,
                        succeeded=batch.body.is_done and is_end,
                        by=batch.member,
                    )
                )
    return sorted(found, key=lambda run: run.created_at)


def turns_of(
    batches: Iterable[Worked],
    partition: int,
    owners: Iterable[tuple[Span, str | None]],
) -> list[Span]:
    """Return the work of the owners of a partition on other partitions."""
    found = []
    others = [
        batch
        for batch in batches
        if not any(range_.partition == partition for range_ in batch.ranges)
    ]
    for span, owner in owners:
        for batch in others:
            if batch.member == owner:
                found += [
                    Span(max(span.begin, one.begin), min(span.end, one.end))
                    for one in batch.spans
                    if one.begin < span.end and one.end > span.begin
                ]
    return found


def at_once(batches: Sequence[Worked]) -> list[str]:
    """Return a sentence for each pair of batches that overlapped in offsets and time."""
    found = []
    for range_, first, second in _meetings(batches):
        for one, other in product(first.spans, second.spans):
            both_s = min(one.end, other.end) - max(one.begin, other.begin)
            has_woken = both_s <= WAKING_S and (
                one.begin in first.thawed_at or other.begin in second.thawed_at
            )
            if both_s > 0 and not has_woken:
                found.append(
                    f"{first.member} and {second.member} worked on {range_} at once "
                    f"for {both_s:.1f} s"
                )
    return found


def _meetings(batches: Iterable[Worked]) -> Iterator[tuple[OffsetRange, Worked, Worked]]:
    """Return the pairs of batches with common offsets, with a range of the first one."""
    everything = sorted(
        ((range_, batch) for batch in batches for range_ in batch.ranges),
        key=lambda one: (one[0].topic_partition, one[0].start),
    )
    for number, (range_, batch) in enumerate(everything, 1):
        for other, another in islice(everything, number, None):
            if other.topic_partition != range_.topic_partition or other.start >= range_.until:
                break
            yield range_, batch, another


def done_again(batches: Iterable[Worked]) -> Iterator[tuple[OffsetRange, list[Worked]]]:
    """Return the ranges that were processed more than once with their runs, oldest first."""
    done = sorted(
        ((range_, batch) for batch in batches if batch.body.is_done for range_ in batch.ranges),
        key=lambda one: (one[0].topic_partition, one[0].start, one[0].until, one[1].ended_at),
    )
    for range_, those in groupby(done, key=lambda one: one[0]):
        by = [batch for _, batch in those]
        if len(by) > 1:
            yield range_, by


def without_a_fault(
    again: Iterable[tuple[OffsetRange, list[Worked]]], faults: Sequence[Fault]
) -> list[str]:
    """Return a sentence for each range that was processed again without an explaining fault."""
    return [
        f"{range_} was done by {', '.join(batch.member for batch in by)}, and no fault explains it"
        for range_, by in again
        if not all(any(batch.was_disturbed_by(one) for one in faults) for batch in by[:-1])
    ]


def claimed_by(log: Iterable[object]) -> dict[StoredOffset, str]:
    """Return the run whose batch first claims a range with this offset."""
    known: set[tuple[int, str]] = set()
    found = {}
    for record in log:
        if not isinstance(record, StoredOffset):
            continue
        for claim in decode(OffsetAndMetadata(record.offset, record.metadata)).claims:
            batch, part = StreamBatch.parse(claim.batch_id), Part.parse(claim.batch_id)
            # A part that is not attempted yet names the run that failed on the whole range.
            if part is not None and part.kind is not PartKind.TRIED:
                continue
            name = (record.partition, claim.batch_id)
            if batch is not None and name not in known:
                known.add(name)
                found[record] = member_of(batch.run_id)
    return found


def taken_over_after_s(
    faults: Iterable[Fault], batches: Sequence[Worked]
) -> dict[str, list[float]]:
    """Return how long partitions of hit runs waited for another run, by kind, shortest first."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for fault in faults:
        for number in fault.partitions or () if fault.kind in TAKING_RUNS else ():
            following = [
                run.created_at - fault.began_at
                for run in runs_of(batches, number)
                if run.by != fault.target and run.created_at > fault.began_at
            ]
            found[fault.kind.name.lower()] += following[:1]
    return {kind: sorted(round(one, 1) for one in those) for kind, those in found.items()}


def failed_without_a_fault(records: Iterable[dg.RunRecord], faults: Sequence[Fault]) -> list[str]:
    """Return a sentence for each streaming run that failed without a fault."""
    found = []
    for record in records:
        run, began_at = record.dagster_run, record.start_time
        if run.status is not dg.DagsterRunStatus.FAILURE or began_at is None:
            continue
        member, ended_at = member_of(run.run_id), record.end_time or began_at
        if not any(
            fault.target == member
            or (fault.kind in _ENDS_ALL and began_at <= fault.began_at <= ended_at)
            for fault in faults
        ):
            found.append(f"{member} failed, and no fault explains it")
    return found


@dataclass(frozen=True)
class Streams:
    """The work of the streaming runs.

    Attributes:
        batches: Their batches.
        faults: The injected faults.
        failed: A sentence for each unexplained failure.
    """

    batches: Sequence[Worked]
    faults: Sequence[Fault]
    failed: Sequence[str]

    @classmethod
    def of(
        cls,
        journals: Path,
        faults: Sequence[Fault],
        records: Sequence[dg.RunRecord],
        until: float,
    ) -> Streams:
        """Read the journals.

        Args:
            journals: Their folder.
            faults: The injected faults.
            records: The runs in Dagster.
            until: End of the judged time.
        """
        gone_at = {
            member_of(record.dagster_run.run_id): record.end_time
            for record in records
            if record.end_time is not None
        }
        for fault in faults:
            if fault.kind is Kind.RUN_DELETED:
                gone_at[fault.target] = fault.began_at + HEARTBEAT_TIMEOUT_S
        bodies = read_journals(journals)
        batches = [
            Worked(body, gone_at.get(member_of(body.run_id), until), faults) for body in bodies
        ]
        return cls(batches, faults, failed_without_a_fault(records, faults))

    def history(self, history: History, names: Mapping[str, str], until: float) -> History:
        """Return the history of a partition with its batches.

        Args:
            history: The history without them.
            names: Name of each member by its id in Kafka.
            until: End of the judged time.
        """
        number = int(history.name.rpartition("-")[2])
        owned = ((span, names.get(owner or "")) for span, owner in history.owned(until))
        return replace(
            history,
            runs=runs_of(self.batches, number),
            turns=turns_of(self.batches, number, owned),
        )

    @property
    def problems(self) -> list[str]:
        """Return the violations, as sentences."""
        again = without_a_fault(done_again(self.batches), self.faults)
        return [*at_once(self.batches), *again, *self.failed]

    @property
    def figures(self) -> dict[str, object]:
        """Return the figures for the report."""
        return {
            "batches": len(self.batches),
            "worked_on_at_once": len(at_once(self.batches)),
            "runs_failed_alone": len(self.failed),
            "ranges_done_again": sum(len(by) - 1 for _, by in done_again(self.batches)),
            "taken_over_after_s": taken_over_after_s(self.faults, self.batches),
        }

"""The work of a streaming run: which batch it works on, and how the last ones ended.

A streaming run is its own list of runs: what other members ask Dagster, it knows. It works on one
batch at a time. Owns that a batch is begun only when it is the member's at that moment: the thread
that owns the member begins it. The list is in memory and goes with the run; what others must know
of a claim that outlives it is in `untold` until it is told.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.core.runs.stream_batch import Outcome, StreamBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.offsets import Log, OffsetRange, TopicPartition
    from dagster_rebalance.core.runs.offer import Offer


_AGAIN_S = 1.0
_TOLD_KEPT = 10_000
"""Each failed attempt is told, and a run that lives for a week has many."""


@dataclass(frozen=True, slots=True)
class BegunBatch:
    """A batch that the run has begun.

    Attributes:
        batch_id: The batch.
        ranges: What it works on.
        logs: Which log each of its partitions had then.
        outcome: How that ended; None while it is at work.
        begun_at: When it was begun, on the caller's clock.
        interrupted_at: When it was interrupted; None while it was not.
        is_late: Whether it was interrupted because it took too long.
        is_unwanted: Whether a person has stopped one of its partitions since it was begun.
    """

    batch_id: str
    ranges: tuple[OffsetRange, ...]
    logs: Mapping[TopicPartition, Log] = field(compare=False)
    outcome: Outcome | None = None
    begun_at: float = field(default=0.0, compare=False)
    interrupted_at: float | None = field(default=None, compare=False)
    is_late: bool = field(default=False, compare=False)
    is_unwanted: bool = field(default=False, compare=False)

    def outcome_of(self, ended: Outcome) -> Outcome:
        """The outcome of the batch if its body has ended in this way.

        An interruption of a batch that took too long is a failed attempt. One that a person wanted
        says nothing about the batch.
        """
        if ended is not Outcome.INTERRUPTED or not (self.is_late or self.is_unwanted):
            return ended
        return Outcome.DROPPED if self.is_unwanted else Outcome.FAILED


class Urge(enum.Enum):
    """What is to be done about the batch at work."""

    NOTHING = "nothing"
    INTERRUPT = "interrupt"
    """It takes too long, or was interrupted a while ago: a signal can come right before a body
    begins to wait, and does not end that."""
    END_PROCESS = "end its process"
    """It was interrupted, and the body does not end."""


class Worker:
    """The batches of one streaming run. Not safe for several threads.

    Args:
        run_id: The run.
        limit_s: For how long a batch may be at work.
        patience_s: For how long an interrupted body may take to end.
    """

    def __init__(
        self, run_id: str, *, limit_s: float = float("inf"), patience_s: float = float("inf")
    ) -> None:
        self._run_id = run_id
        self._limit_s = limit_s
        self._patience_s = patience_s
        # By id. Kafka may store one claim of a batch long after the others: a part of its own.
        self._begun: dict[str, tuple[BegunBatch, ...]] = {}
        self._left: dict[Claimed, None] = {}
        self._told: dict[Claimed, Outcome] = {}
        self._looks = 0
        self._urged_at = float("-inf")
        self.at_work: BegunBatch | None = None

    def begin(
        self,
        offers: Iterable[Offer],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
        now: float = 0.0,
    ) -> BegunBatch | None:
        """Begin the first batch that is offered, if none is at work.

        A batch whose ranges were begun already is passed over, whatever the member has heard last:
        an answer that was asked for before the batch began may come after its end.

        Args:
            offers: What the member offers.
            claimed: All batches that the member has claimed. What is known of others is forgotten.
            log_of: Which log a partition has.
            now: On the caller's clock.
        """
        if self.at_work is not None:
            return None
        kept = {*claimed, *(batch_id for batch_id, _ in self._left)}
        self._begun = {known: parts for known, parts in self._begun.items() if known in kept}
        offer = next((offer for offer in offers if not self._has_begun(offer)), None)
        if offer is not None:
            partitions = {range_.topic_partition for range_ in offer.ranges}
            logs = {partition: log_of(partition) for partition in partitions}
            self.at_work = BegunBatch(offer.batch_id, offer.ranges, logs, begun_at=now)
            self._begun[offer.batch_id] = (*self._parts(offer.batch_id), self.at_work)
        return self.at_work

    def urge(self, now: float) -> Urge:
        """Say what is to be done about the batch at work, and note that it is done."""
        batch = self.at_work
        if batch is None:
            return Urge.NOTHING
        if batch.interrupted_at is None:
            if now - batch.begun_at < self._limit_s:
                return Urge.NOTHING
            self.at_work = replace(batch, interrupted_at=now, is_late=True)
        elif now - batch.interrupted_at >= self._patience_s:
            return Urge.END_PROCESS
        elif now - self._urged_at < _AGAIN_S:
            return Urge.NOTHING
        self._urged_at = now
        return Urge.INTERRUPT

    def interrupt(self, now: float) -> None:
        """Note that the batch at work is interrupted."""
        self._urged_at = now
        if self.at_work is not None and self.at_work.interrupted_at is None:
            self.at_work = replace(self.at_work, interrupted_at=now)

    def stop(self) -> None:
        """Note that a person has stopped a partition of the batch at work."""
        if self.at_work is not None:
            self.at_work = replace(self.at_work, is_unwanted=True)

    def end(self, outcome: Outcome) -> BegunBatch | None:
        """Note how the body of the batch at work ended; None when there was none."""
        if self.at_work is None:
            return None
        outcome = self.at_work.outcome_of(outcome)
        ended = replace(self.at_work, outcome=outcome)
        self._begun[ended.batch_id] = (*self._parts(ended.batch_id)[:-1], ended)
        self.at_work = None
        if outcome is Outcome.FAILED:
            # Whoever shows what is stopped in the whole group must see it, too.
            self.leave((ended.batch_id, range_) for range_ in ended.ranges)
        return ended

    def read(self, batch_ids: Iterable[str], claims: Iterable[Claimed]) -> tuple[RunSeen, ...]:
        """What is known of the run's own batches, in the words that are used for runs.

        Args:
            batch_ids: Batches; those of others are passed over.
            claims: What the member has claimed for them.
        """
        self._looks += 1
        found: list[RunSeen] = []
        known = tuple(claims)
        for batch_id in batch_ids:
            batch = StreamBatch.read(batch_id)
            if batch is None or batch.run_id != self._run_id:
                continue
            # Whoever looks whether a run lives looks whether its sign changes.
            me = RunSeen(self._run_id, "", (), RunState.STARTED, heartbeat=str(self._looks))
            parts = self._parts(batch_id)
            for part in parts:
                found += batch.seen(part.ranges, me, part.outcome)
            for claim in known:
                if claim[0] == batch_id and not any(claim[1] in part.ranges for part in parts):
                    told = self._told.get(claim)
                    seen = batch.seen((claim[1],), me, told)
                    found += seen if told else seen[:-1]
        return tuple(found)

    def leave(self, claims: Iterable[Claimed]) -> None:
        """Note that others may find these claims: `untold` is how the work on them ended."""
        self._left.update(dict.fromkeys(claims))

    @property
    def untold(self) -> dict[Claimed, Outcome]:
        """What others have to be told by now."""
        ended: dict[Claimed, Outcome] = {}
        for claim in self._left:
            batch_id, range_ = claim
            begun = next((part for part in self._parts(batch_id) if range_ in part.ranges), None)
            if begun is None:
                ended[claim] = Outcome.DROPPED
            elif begun.outcome is not None:
                ended[claim] = begun.outcome
        return ended

    def _has_begun(self, offer: Offer) -> bool:
        begun = {range_ for part in self._parts(offer.batch_id) for range_ in part.ranges}
        return not begun.isdisjoint(offer.ranges)

    def _parts(self, batch_id: str) -> tuple[BegunBatch, ...]:
        """What was begun of a batch."""
        return self._begun.get(batch_id, ())

    def told(self, claims: Iterable[Claimed]) -> None:
        """Others know. The run remembers it: the partition may come back with the claim."""
        ended = self.untold
        for claim in claims:
            if claim in ended:
                self._told.pop(claim, None)  # the oldest ones are forgotten first
                self._told[claim] = ended[claim]
                del self._left[claim]
        while len(self._told) > _TOLD_KEPT:
            del self._told[next(iter(self._told))]

"""Batches of streaming runs: a batch id names the run, the attempt and its interruptions.

A streaming run is a member of the group and processes its own batches in one Dagster run. The batch
id is stored in Kafka as the claim of the ranges, before the work begins. So the next owner finds
the run of the claim, and a record that kills the run's process is not retried forever. The run
stores a `BatchOutcome` only for claims that outlive its work.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run_snapshot import FailureCause, RunSnapshot, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.model.run_snapshot import BatchRequest

_ID = re.compile(
    r"s\.(?P<run>[A-Za-z0-9-]{1,40})\.(?P<number>[0-9]{1,12})\.(?P<attempt>[0-9]{1,6})"
    r"(?P<part>\.[ntsr][0-9a-f]+-[0-9a-f]+)?"
)
_ONE_INTERRUPTION = 1_000_000_000
"""Earlier versions, which count no interruptions, read the sum as one number."""
_MOST_INTERRUPTIONS = 999
_ATTEMPTS_SHOWN = 1_000
"""Limit that protects against forged batch ids."""


class BatchOutcome(enum.Enum):
    """How the work of a streaming run on a batch ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The asset function raised: an attempt."""
    INTERRUPTED = "dropped"
    """The asset function was interrupted, because the run had to leave or lost the partition: not
    an attempt. Earlier versions store the same text."""
    DROPPED = "not begun"
    """The batch was not started, or a directive stopped its partition. Never stored: a claim
    without an outcome means the same once its run does not work on the partition."""


_STATES = {
    BatchOutcome.SUCCEEDED: RunState.SUCCEEDED,
    BatchOutcome.FAILED: RunState.FAILED,
    BatchOutcome.INTERRUPTED: RunState.CANCELED,
    BatchOutcome.DROPPED: RunState.CANCELED,
}


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """The parts of a batch id.

    Attributes:
        number: Distinguishes the batches of a run.
        attempt: One more than the number of failed attempts on the ranges.
        interruptions: Number of interrupted batches on the ranges since the last failed attempt.
        part: The part of a bisected range, as `core.runs.bisection` describes it; empty for none.
    """

    run_id: str
    number: int
    attempt: int = 1
    interruptions: int = 0
    part: str = ""

    def __str__(self) -> str:
        number = _counted(self.interruptions) * _ONE_INTERRUPTION + self.number
        return f"s.{self.run_id}.{number}.{self.attempt}{self.part}"

    @classmethod
    def parse(cls, batch_id: str) -> StreamBatch | None:
        """Parse a batch id; None if it does not belong to a streaming run."""
        match = _ID.fullmatch(batch_id)
        if match is None:
            return None
        interruptions, number = divmod(int(match["number"]), _ONE_INTERRUPTION)
        return cls(match["run"], number, int(match["attempt"]), interruptions, match["part"] or "")

    @property
    def is_unbegun(self) -> bool:
        """Whether it is a part of a bisected range that no streaming run has begun."""
        return self.part != "" and not self.part.startswith(".t")

    def as_runs(
        self, ranges: tuple[OffsetRange, ...], run: RunSnapshot, outcome: BatchOutcome | None
    ) -> tuple[RunSnapshot, ...]:
        """Return the batch as runs: earlier failed attempts, interruptions, then its own run.

        If no outcome is stored, the batch of a live run is in progress while the run is allowed to
        process the partition, and dropped otherwise. The batch of an ended run is dropped if the
        run ended normally, interrupted if the process exited because the asset function ignored its
        interruption, and failed if the process died.
        """
        own = replace(
            run,
            batch_id=str(self),
            ranges=ranges,
            attempt=self.attempt,
            parent_id="",
            has_started=True,
        )
        if self.is_unbegun:
            return (self._ended(own, BatchOutcome.DROPPED),)
        if outcome is not None:
            own = self._ended(own, outcome)
        elif not run.is_live:
            outcome = _without_note(run)
            own = replace(
                self._ended(own, outcome),
                has_died=outcome is BatchOutcome.FAILED,
                error=run.error if outcome is BatchOutcome.FAILED else "",
            )
        elif run.active_partitions is not None and not any(
            range_.topic_partition in run.active_partitions for range_ in ranges
        ):
            own = self._ended(own, BatchOutcome.DROPPED)
        before = (
            replace(self._ended(own, BatchOutcome.FAILED), attempt=attempt)
            for attempt in range(max(1, self.attempt - _ATTEMPTS_SHOWN), self.attempt)
        )
        interrupted = replace(self._ended(own, BatchOutcome.INTERRUPTED), attempt=self.attempt - 1)
        return (*before, *(interrupted,) * self.interruptions, own)

    @staticmethod
    def _ended(run: RunSnapshot, outcome: BatchOutcome) -> RunSnapshot:
        return replace(
            run,
            state=_STATES[outcome],
            is_over=True,
            is_written_off=False,
            awaits_retry=False,
            is_refused=False,
            is_interrupted=outcome is BatchOutcome.INTERRUPTED,
            error="",  # the error of the run is not that of the batch
            cause=FailureCause.UNKNOWN,
            is_cancelled_by_member=outcome is BatchOutcome.DROPPED,
        )


def _without_note(run: RunSnapshot) -> BatchOutcome:
    if run.is_cancelled_by_member:
        return BatchOutcome.INTERRUPTED
    return BatchOutcome.FAILED if run.state is RunState.FAILED else BatchOutcome.DROPPED


def batch_ids(run_id: str) -> Callable[..., str]:
    """Return a function that numbers the batches of a streaming run."""
    numbers = count(1)
    return lambda attempt, interruptions=0: str(
        StreamBatch(run_id, next(numbers), attempt, interruptions)
    )


def number_of(batch_id: str) -> int:
    """Return the number of a batch in its streaming run; 0 for other batches."""
    batch = StreamBatch.parse(batch_id)
    return 0 if batch is None else batch.number


def is_batch_of(batch_id: str, run_id: str) -> bool:
    """Return whether a batch belongs to a streaming run."""
    batch = StreamBatch.parse(batch_id)
    return batch is not None and batch.run_id == run_id


def is_claimed_by(request: BatchRequest, run_id: str) -> bool:
    """Return whether a streaming run has claimed a batch for this attempt, and may start it."""
    batch = StreamBatch.parse(request.batch_id)
    return (
        batch is not None
        and request.is_own
        and batch.run_id == run_id
        and not batch.is_unbegun
        and batch.attempt == request.attempt  # no batch id is started twice
        and batch.interruptions == _counted(request.interruptions)
    )


def _counted(interruptions: int) -> int:
    return min(interruptions, _MOST_INTERRUPTIONS)

"""A batch of a streaming run: its id says whose work it is, and which attempt.

A streaming run is a member of the group and works on its own batches, one after the other, without
a Dagster run for each. So there is no run to look at for a batch. The id of the batch, which is
stored in Kafka as the claim of each of its ranges, names the run that works on it, and the attempt:
one above the attempts that have failed on the range. Where batches were interrupted since the last
failed attempt, their count is part of the number. The run writes it before it begins, so that
whoever finds the claim knows whom to ask, and a record that kills each process that reads it is not
tried for ever.

Owns the form of the id, and what it means for a range together with the state of that run. The run
leaves a note of the outcome only where a claim outlives its work (`Outcome`): others find it when
the partition has moved.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run import RunSeen, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.runs.batch_request import BatchRequest

_ID = re.compile(
    r"s\.(?P<run>[A-Za-z0-9-]{1,40})\.(?P<number>[0-9]{1,12})\.(?P<attempt>[0-9]{1,6})"
)
_ONE_INTERRUPTION = 1_000_000_000
"""Members of versions that count no interruptions must read the id: to them it is one number."""
_MOST_INTERRUPTIONS = 999
_ATTEMPTS_SHOWN = 1_000
"""Whoever may commit for the group could ask for a million of them in each claim."""


class Outcome(enum.Enum):
    """How the work of a streaming run on a batch ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The body raised: an attempt."""
    INTERRUPTED = "dropped"
    """The body was interrupted, because its run had to leave or lost the partition: no attempt.
    The stored text is the one of earlier versions."""
    DROPPED = "not begun"
    """The batch was not begun, or a person stopped its partition. Never stored: a claim without an
    outcome, of a run that does not work on its partition, means the same."""


_STATES = {
    Outcome.SUCCEEDED: RunState.SUCCEEDED,
    Outcome.FAILED: RunState.FAILED,
    Outcome.INTERRUPTED: RunState.CANCELED,
    Outcome.DROPPED: RunState.CANCELED,
}


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """What the id of a batch says.

    Attributes:
        run_id: The streaming run that works on it.
        number: Tells it from the other batches of that run.
        attempt: One above the attempts that had failed on its ranges when it was begun.
        interruptions: The batches that were interrupted on its ranges since the last failed
            attempt.
    """

    run_id: str
    number: int
    attempt: int = 1
    interruptions: int = 0

    def __str__(self) -> str:
        number = _counted(self.interruptions) * _ONE_INTERRUPTION + self.number
        return f"s.{self.run_id}.{number}.{self.attempt}"

    @classmethod
    def read(cls, batch_id: str) -> StreamBatch | None:
        """Read the id of a batch; None when it is not one of a streaming run."""
        found = _ID.fullmatch(batch_id)
        if found is None:
            return None
        interruptions, number = divmod(int(found["number"]), _ONE_INTERRUPTION)
        return cls(found["run"], number, int(found["attempt"]), interruptions)

    def seen(
        self, ranges: tuple[OffsetRange, ...], run: RunSeen, outcome: Outcome | None
    ) -> tuple[RunSeen, ...]:
        """Tell what is known of the batch in the words that are used for runs.

        The attempts that failed before come first, the last ones of very many, and then the
        interruptions. Then comes the run itself: as its note says; at work, as long as it may work
        on the partition; dropped, where it does not any more, or has ended in order; interrupted,
        where its process ended itself because the body ignored its interruption; or failed, since
        its process died with the batch in hand.

        Args:
            ranges: What the batch has claimed.
            run: The streaming run as Dagster shows it.
            outcome: What the run itself has said of the batch.
        """
        mine = replace(
            run,
            batch_id=str(self),
            ranges=ranges,
            attempt=self.attempt,
            parent_id="",
            has_started=True,
        )
        if outcome is not None:
            mine = self._ended(mine, outcome)
        elif not run.is_live:
            outcome = _without_note(run)
            mine = replace(
                self._ended(mine, outcome),
                has_died=outcome is Outcome.FAILED,
                error=run.error if outcome is Outcome.FAILED else "",
            )
        elif run.may_work_on is not None and not any(
            range_.topic_partition in run.may_work_on for range_ in ranges
        ):
            mine = self._ended(mine, Outcome.DROPPED)
        before = (
            replace(self._ended(mine, Outcome.FAILED), attempt=attempt)
            for attempt in range(max(1, self.attempt - _ATTEMPTS_SHOWN), self.attempt)
        )
        interrupted = replace(self._ended(mine, Outcome.INTERRUPTED), attempt=self.attempt - 1)
        return (*before, *(interrupted,) * self.interruptions, mine)

    @staticmethod
    def _ended(run: RunSeen, outcome: Outcome) -> RunSeen:
        return replace(
            run,
            state=_STATES[outcome],
            is_over=True,
            is_written_off=False,
            awaits_retry=False,
            is_refused=False,
            is_interrupted=outcome is Outcome.INTERRUPTED,
            error="",  # that of the run is none of the batch
            is_taken_back=outcome is Outcome.DROPPED,
        )


def _without_note(run: RunSeen) -> Outcome:
    """The outcome of the batch of a run that has ended, where the run left no note of it."""
    if run.is_taken_back:
        return Outcome.INTERRUPTED
    return Outcome.FAILED if run.state is RunState.FAILED else Outcome.DROPPED


def batch_ids(run_id: str) -> Callable[..., str]:
    """Name the batches of a streaming run, given the attempt of each, and its interruptions."""
    numbers = count(1)
    return lambda attempt, interruptions=0: str(
        StreamBatch(run_id, next(numbers), attempt, interruptions)
    )


def is_batch_of(batch_id: str, run_id: str) -> bool:
    """Whether a batch is one of this streaming run."""
    batch = StreamBatch.read(batch_id)
    return batch is not None and batch.run_id == run_id


def is_claimed_by(batch_request: BatchRequest, run_id: str) -> bool:
    """Whether a streaming run has claimed a batch for this very attempt, and may begin it."""
    batch = StreamBatch.read(batch_request.batch_id)
    return (
        batch is not None
        and batch_request.is_own
        and batch.run_id == run_id
        and batch.attempt == batch_request.attempt  # no id is begun twice
        and batch.interruptions == _counted(batch_request.interruptions)
    )


def _counted(interruptions: int) -> int:
    """The count of interruptions as an id can have it."""
    return min(interruptions, _MOST_INTERRUPTIONS)

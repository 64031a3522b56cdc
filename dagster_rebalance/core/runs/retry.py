"""A setback makes a range wait before its next run.

This module owns the delays between runs on one range, and from when on it tells a person why the
range does not get on. The delays begin when this member first sees a run ended, on its own clock: a
new owner begins them anew. The module never decides what counts as an attempt: `progress` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import how_to_retry
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.runs.progress import Exhausted, Progress, Setback, ToRequest, Trouble
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition

_GROWTH = 6.0
_MOST_STEPS = 20
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class RetryPace:
    """The retry pace says how long a range waits before its next run.

    By default the wait is 5 s, 30 s, 3 min, 15 min, and from then on 15 min each time.

    Attributes:
        first_s: After the first setback.
        limit_s: The longest wait.
        retry_stopped: Whether a range that has failed too often is tried again, too.

    Raises:
        ConfigurationError: A wait is negative, or the first one is longer than the longest.
    """

    first_s: float = 5.0
    limit_s: float = 900.0
    retry_stopped: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.limit_s:
            msg = (
                f"retry_delay_s={self.first_s:g} must be at least 0 and at most "
                f"retry_delay_limit_s={self.limit_s:g}"
            )
            raise ConfigurationError(msg)

    def wait_s(self, progress: Progress, *, has_dead_letters: bool) -> float:
        """How long after it was first seen nothing is requested.

        What a person has cancelled too often waits for a person.
        """
        match progress:
            case ToRequest(trouble=trouble) if trouble is not None:
                return self.after_s(trouble.count)
            case Exhausted(is_cancelled=False) if self.retry_stopped and not has_dead_letters:
                return self.after_s(progress.attempts)
            case Exhausted():
                return NEVER
            case _:
                return 0.0

    def after_s(self, setbacks: int) -> float:
        """How long to wait after this many setbacks in a row."""
        return min(self.limit_s, self.first_s * _GROWTH ** min(setbacks - 1, _MOST_STEPS))


def failures(exhausted: Exhausted, what: object) -> str:
    """Which runs have failed on a range, as a part of a sentence."""
    why = f": {exhausted.why}" if exhausted.why else ""
    if exhausted.failed_runs == 1:
        return f"run {exhausted.run_id} failed on {what}{why}"
    number = exhausted.failed_runs
    return f"{number} runs failed on {what}, the last one is {exhausted.run_id}{why}"


def why_blocked(range_: OffsetRange, blocked: Exhausted | Trouble, batch_id: str) -> str:
    """Why the partition of a range is stopped, and what to do."""
    partition = range_.topic_partition
    again = f"It is tried again; `{how_to_retry(partition)}` tries it now"
    is_stream = StreamBatch.read(batch_id) is not None
    if isinstance(blocked, Exhausted) and is_stream:
        why = f": {blocked.why}" if blocked.why else ", whose log has the error"
        return (
            f"{partition}: {blocked.attempts} attempts on {range_} failed, the last one in "
            f"streaming run {blocked.run_id}{why}. Fix the cause. {again}"
        )
    if isinstance(blocked, Exhausted):
        text = f"{partition}: {failures(blocked, range_)}. "
        if blocked.left_out:
            text += f"A run has succeeded since, but left out {', '.join(blocked.left_out)}. "
        if blocked.is_cancelled:
            text += "One of them was cancelled by a person, so no retry is automatic. "
        return text + (
            f"Fix the cause, then re-execute that run in Dagster, or `{how_to_retry(partition)}`: "
            "when it succeeds, the partition goes on"
        )
    if blocked.kind is Setback.NOT_STARTED:
        return (
            f"{partition}: the runs for {range_} do not start, the last one is {blocked.run_id}; "
            f"{blocked.why or 'its page in Dagster says why'}. They count as no attempt. Fix the "
            f"cause (launcher, image, quota, start_timeout_s). {again}"
        )
    if blocked.kind is Setback.INTERRUPTED and is_stream:
        return (
            f"{partition}: {blocked.count} batches in a row on {range_} were interrupted before "
            f"they ended, the last one by streaming run {blocked.run_id}. The run had to leave the "
            "group or give the partition up, and the batch was still running at the deadline. That "
            "is no failed attempt. Find out what the asset waits for, or raise hold_limit_s; with "
            f"batch_timeout_s, a batch that takes too long is a failed attempt. {again}"
        )
    if blocked.kind is Setback.INTERRUPTED:
        return (
            f"{partition}: the processes of {blocked.count} runs for {range_} in a row were told "
            f"to end, and no person had cancelled them; the last one is {blocked.run_id}. They "
            "count as no attempt. Look at what ends them: nodes that are drained or short of "
            f"memory, the platform's time limit, a service that is restarted. {again}"
        )
    return (
        f"{partition}: the runs for {range_} refuse themselves, the last one is {blocked.run_id}: "
        f"{blocked.why or 'it does not say why'}. They count as no attempt. Fix the cause. {again}"
    )


def not_ended(partition: TopicPartition, run_id: str, after_s: float) -> str:
    """Why a partition waits for a dead run, and what to do."""
    return (
        f"{partition}: run {run_id} gives no sign of life, and could not be ended for more than "
        f"{after_s:.0f} s, so what it has begun elsewhere (on Spark, jobs, pods) may be at work. "
        "The notes of the sensor's ticks, or of the streaming run, say what failed. End that work, "
        "or mend what keeps it from being ended: it is tried again every few seconds"
    )


def unanswered(range_: OffsetRange, run_key: str, after_s: float) -> str:
    """Why a range that is requested again and again does not get on."""
    return (
        f"{range_.topic_partition}: a run for {range_} is requested for more than {after_s:.0f} s, "
        "and Dagster starts none. "
        "Its daemon may be behind: look at the sensor's ticks. Or there is a run with the tag "
        f"dagster/run_key={run_key} that is not seen, because its other tags or its config were "
        "changed: delete it"
    )

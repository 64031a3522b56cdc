"""Delays between runs on one range, and messages about failed attempts and stopped ranges.

Delays start when this member first observes that a run has ended; a new owner starts them again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import retry_command
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.printable import Reason, escaped, one_line
from dagster_rebalance.core.model.run_snapshot import FailureCause, RunState
from dagster_rebalance.core.runs.progress import (
    Exhausted,
    FailureKind,
    FailureStreak,
    Progress,
    ToRequest,
)
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot


_GROWTH = 6.0
_MOST_STEPS = 20
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class RetryBackoff:
    """Exponential backoff between runs on a range: by default 5 s, 30 s, 3 min, then 15 min.

    Attributes:
        first_s: The delay after the first failure.
        limit_s: The maximum delay.
        retry_stopped: Whether to retry a range whose attempts are exhausted.

    Raises:
        ConfigurationError: A delay is negative, or the first delay exceeds the maximum.
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

    def wait_s(self, progress: Progress, *, is_settled: bool) -> float:
        """Return the delay before the next run, from the first observation of this progress.

        A range with too many cancelled runs waits for an operator. `is_settled`: an exhausted range
        gets no further run.
        """
        match progress:
            case ToRequest(streak=streak) if streak is not None:
                return self.delay_s(streak.count)
            case Exhausted(is_cancelled=False) if self.retry_stopped and not is_settled:
                return self.delay_s(progress.attempts)
            case Exhausted():
                return NEVER
            case _:
                return 0.0

    def delay_s(self, failures: int) -> float:
        """Return the delay after this many consecutive failures."""
        return min(self.limit_s, self.first_s * _GROWTH ** min(failures - 1, _MOST_STEPS))


def describe_failures(exhausted: Exhausted, what: object) -> str:
    """Describe the failed runs on a range, as part of a sentence."""
    why = f": {exhausted.reason}" if exhausted.reason else ""
    if exhausted.failed_runs == 1:
        return f"run {exhausted.run_id} failed on {what}{why}"
    number = exhausted.failed_runs
    return f"{number} runs failed on {what}, the last one is {exhausted.run_id}{why}"


def why_blocked(
    range_: OffsetRange, blocked: Exhausted | FailureStreak, batch_id: str, backoff: RetryBackoff
) -> Reason:
    """Return why the partition of a range is stopped, and what to do."""
    partition = range_.topic_partition
    tries = blocked.attempts if isinstance(blocked, Exhausted) else blocked.count
    again = (
        f"It is retried {backoff.delay_s(tries):.0f} s after the last try; "
        f"`{retry_command(partition)}` retries it now"
    )
    is_stream = StreamBatch.parse(batch_id) is not None
    if isinstance(blocked, Exhausted) and is_stream:
        why = f": {blocked.reason}" if blocked.reason else ", whose log has the error"
        tried = "1 attempt" if tries == 1 else f"{tries} attempts"
        last = "in" if tries == 1 else "the last one in"
        return Reason(
            f"{partition}: {tried} on {range_} failed, {last} streaming run {blocked.run_id}{why}",
            f"Fix the cause. {again}",
        )
    if isinstance(blocked, Exhausted):
        more = ""
        if blocked.left_out:
            more = f"A run has succeeded since, but left out {', '.join(blocked.left_out)}. "
        if blocked.is_cancelled:
            more += "A user cancelled one of them, so it is not retried automatically. "
        return Reason(
            f"{partition}: {describe_failures(blocked, range_)}",
            f"{more}Fix the cause, then re-execute that run in Dagster, or "
            f"`{retry_command(partition)}`: when it succeeds, the partition continues",
        )
    if blocked.kind is FailureKind.NOT_STARTED:
        return Reason(
            f"{partition}: the runs for {range_} do not start, the last one is {blocked.run_id}; "
            f"{blocked.reason or 'its page in Dagster says why'}",
            "They are not attempts. Fix the cause (launcher, image, quota, start_timeout_s). "
            f"{again}",
        )
    if blocked.kind is FailureKind.INTERRUPTED and is_stream:
        return Reason(
            f"{partition}: {blocked.count} batches in a row on {range_} were interrupted before "
            f"they ended, the last one by streaming run {blocked.run_id}",
            "The run had to leave the group or release the partition, and the batch was still "
            "running at the deadline. That is not a failed attempt. Find out what the asset waits "
            "for, or raise hold_limit_s; with batch_timeout_s, a batch that takes too long is a "
            f"failed attempt. {again}",
        )
    if blocked.kind is FailureKind.INTERRUPTED:
        return Reason(
            f"{partition}: the processes of {blocked.count} consecutive runs for {range_} were "
            f"ended by a signal without a cancellation, the last one is {blocked.run_id}",
            "They are not attempts. Check for drained nodes, memory limits, time limits of the "
            f"platform and restarted services. {again}",
        )
    return Reason(
        f"{partition}: the start check refuses the runs for {range_}, the last one is "
        f"{blocked.run_id}: {blocked.reason or 'no reason given'}",
        f"They are not attempts. Fix the cause. {again}",
    )


def why_not_ended(partition: TopicPartition, run_id: str, after_s: float) -> Reason:
    """Return why a partition waits for a dead run, and what to do."""
    return Reason(
        f"{partition}: run {run_id} sends no heartbeat, and could not be ended for more than "
        f"{after_s:.0f} s, so its external work (Spark, jobs, pods) may still be running",
        "The notes of the sensor's ticks, or of the streaming run, say what failed. End that work, "
        "or fix what prevents it from being ended: it is retried every few seconds",
    )


def why_not_started(range_: OffsetRange, run_key: str, after_s: float) -> Reason:
    """Return why Dagster does not start a requested run, and what to do."""
    return Reason(
        f"{range_.topic_partition}: Dagster has not started the requested run for {range_} for "
        f"more than {after_s:.0f} s",
        "Its daemon may be behind: check the sensor's ticks. If the config or other tags of a run "
        f"with the tag dagster/run_key={run_key} were changed, delete that run",
    )


_MOST_CHARACTERS = 400
_FRAMES = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t]+.*\n)*")
"""The frames of a traceback in a message of Spark. The errors follow them."""
_MOST_CAUSES = 2
_MOST_PLACES = 3
_MOST_PLACE_CHARACTERS = 80


class Place(NamedTuple):
    """Frame of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file.replace("\\", "/").rpartition("/")[2]
        return one_line(escaped(f"{file}:{self.line} in {self.function}"))[:_MOST_PLACE_CHARACTERS]


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """The last failed attempt on a range.

    Attributes:
        run_id: The streaming run of the attempt.
        error: The error of the attempt, as from `error_text`.
        cause: The cause of the failure.
    """

    run_id: str
    attempt: int
    error: str
    cause: FailureCause = FailureCause.UNKNOWN


def error_text(error: str, places: Iterable[Place] = (), causes: Sequence[str] = ()) -> str:
    """Format an error in one line: type and message, frames (outermost first), and causes.

    Example:
        `ValueError: order 17 has no price (assets.py:41 in clean, assets.py:30 in orders)`
    """
    parts = [error, *causes[-_MOST_CAUSES:]]
    most = _MOST_CHARACTERS // len(parts)
    text = "; caused by ".join(_shortened(part, most) for part in parts)
    innermost = [*places][: -_MOST_PLACES - 1 : -1]
    return f"{text} ({', '.join(map(str, innermost))})" if innermost else text


def _shortened(error: str, most: int) -> str:
    text = one_line(escaped(_FRAMES.sub("", error)))
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def with_error(
    runs: Iterable[RunSnapshot], failed: FailedAttempt | None
) -> tuple[RunSnapshot, ...]:
    """Set the run and the error of the last failed attempt in the runs of a claimed range.

    A batch id has the number of earlier attempts, but not their runs. An attempt whose process died
    has no error.
    """
    return tuple(
        replace(run, run_id=failed.run_id, error=failed.error, cause=failed.cause)
        if failed is not None
        and run.state is RunState.FAILED
        and run.attempt == failed.attempt
        and not (run.has_died or run.is_live)
        else run
        for run in runs
    )

"""Settings of the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.topics import Start, StartFrom
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.core.runs.retry import RetryBackoff


class ForeignMetadata(enum.Enum):
    """What to do with a committed offset whose metadata this package did not write."""

    REFUSE = "refuse"
    OVERWRITE = "overwrite"


_SHORTEST_LEAVE_S = 0.01
"""Even a leave without a time limit completes work that has already ended."""
_MOST_RANGES_OF_STREAM = 10_000
"""A batch of a streaming run covers all of its partitions."""


@dataclass(frozen=True, slots=True)
class HoldBudget:
    """Time limits of a hold.

    Attributes:
        limit_s: Maximum seconds from the request to the release; must be below Kafka's
            `max.poll.interval.ms`.
        commit_slice_s: The last part of the limit, for cancelling runs and the final commit.

    Raises:
        ConfigurationError: The slice leaves no time to drain.
    """

    limit_s: float = 300.0
    commit_slice_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.commit_slice_s < self.limit_s:
            msg = (
                f"hold_commit_slice_s={self.commit_slice_s:g} must be above 0 and below "
                f"hold_limit_s={self.limit_s:g}: "
                "it is the last part of the hold, kept for the final commit"
            )
            raise ConfigurationError(msg)

    def within(self, limit_s: float) -> HoldBudget:
        """Return the budget reduced to a limit."""
        if limit_s >= self.limit_s:
            return self
        shortest_s = max(limit_s, _SHORTEST_LEAVE_S)
        return HoldBudget(shortest_s, min(self.commit_slice_s, shortest_s / 2))


class DeadlinePolicy(enum.Enum):
    """What happens to live runs at the deadline of a hold."""

    CANCEL = "cancel"
    """They are cancelled. The release waits, within the limit, until Dagster shows them ended."""
    RELEASE = "release"
    """They continue, and the next owner adopts them through their claims."""


class LeavePolicy(enum.Enum):
    """How a member leaves for its successor: a newer process of its code location."""

    RELEASE = "release"
    """It commits finished work and leaves at once; the successor adopts the live runs."""
    DRAIN = "drain"
    """It waits for its live runs, as for a revoke."""


class LossPolicy(enum.Enum):
    """What happens to live runs of lost partitions."""

    LEAVE = "leave"
    """They continue, and the next owner adopts them through their claims."""
    CANCEL = "cancel"
    """They are cancelled, and the next owner requests their batches again."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a member.

    Attributes:
        max_attempts: Runs that may fail on a range. Dagster's own retries are not counted.
        dead_letter_topic: Where exhausted ranges are stored, after which the partition continues.
            None stops the partition instead.
        start_from: Where a group without a committed offset starts.
        lease_s: The member drains and leaves after this time without a tick.
        plan_patience_s: No batch is claimed after this time without a tick.
        poll_s: Interval of reading runs; half of it while more can be claimed, a quarter during a
            hold.
        bounds_s: Interval of reading end offsets.
        idle_bounds_s: The same interval after some time without new records.
        directives_s: Interval of reading directives.
        retry_s: Delay before an unanswered command is repeated.
        recheck_s: Interval of checking a stopped partition.
        backoff: Backoff between runs on a range.
        record_every_s: Commits of a partition within this time share one record in Dagster.
        lag_every_s: Interval of observing the lag of the group; 0 for never.
        stalled_after_s: Delay before a requested run that does not start, or a dead run that cannot
            be ended, is reported.
        worker: The streaming run of the member; empty for per-batch runs.
        code_version: The code version of the streaming run, if known.
    """

    limits: BatchLimits = field(default_factory=BatchLimits)
    budget: HoldBudget = field(default_factory=HoldBudget)
    on_deadline: DeadlinePolicy = DeadlinePolicy.CANCEL
    on_leave: LeavePolicy = LeavePolicy.RELEASE
    on_lost: LossPolicy = LossPolicy.LEAVE
    max_attempts: int = 3
    dead_letter_topic: str | None = None
    start_from: Start = StartFrom.EARLIEST
    foreign_metadata: ForeignMetadata = ForeignMetadata.REFUSE
    lease_s: float = 60.0
    plan_patience_s: float = 15.0
    poll_s: float = 1.0
    bounds_s: float = 1.0
    idle_bounds_s: float = 1.0
    directives_s: float = 3.0
    retry_s: float = 1.0
    recheck_s: float = 10.0
    liveness: Liveness = field(default_factory=Liveness)
    backoff: RetryBackoff = field(default_factory=RetryBackoff)
    record_every_s: float = 0.0
    lag_every_s: float = 60.0
    stalled_after_s: float = 600.0
    worker: str = ""
    code_version: str = ""

    def of_stream(self, run_id: str) -> EngineSettings:
        """Return the settings of a streaming run, which processes one batch at a time."""
        limits = replace(
            self.limits,
            max_runs_in_flight=1,
            max_claims_per_partition=1,
            max_ranges_per_run=_MOST_RANGES_OF_STREAM,
        )
        # These batches cannot be re-executed in Dagster, so stopped ranges are always retried.
        backoff = replace(self.backoff, retry_stopped=True)
        return replace(self, worker=run_id, limits=limits, backoff=backoff)

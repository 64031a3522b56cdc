"""The settings of a member, as the engine knows them.

Where they come from (a Dagster resource, a test) is not its business.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.start_position import Start, StartFrom
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.core.runs.retry import RetryPace


class ForeignMetadata(enum.Enum):
    """What to do with a committed offset whose metadata is not ours."""

    REFUSE = "refuse"
    OVERWRITE = "overwrite"


_SHORTEST_LEAVE_S = 0.01
"""A leave without any time still takes what is over at once to the end."""
_MOST_RANGES_OF_STREAM = 10_000
"""A streaming run takes what is there of all its partitions into one batch."""


@dataclass(frozen=True, slots=True)
class HoldBudget:
    """The time that a hold may take.

    Attributes:
        limit_s: Seconds from the request to the release, at most. Kafka's limit
            (`max.poll.interval.ms`) must be longer.
        commit_slice_s: The part of it, at its end, that is kept for cancelling runs and for the
            last commit.

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
        """The budget of a hold that may take no longer than this either."""
        if limit_s >= self.limit_s:
            return self
        shortest_s = max(limit_s, _SHORTEST_LEAVE_S)
        return HoldBudget(shortest_s, min(self.commit_slice_s, shortest_s / 2))


class DeadlinePolicy(enum.Enum):
    """What happens to runs that are still live at the deadline of a hold."""

    CANCEL = "cancel"
    """They are cancelled; the release waits, within the limit, until Dagster shows them ended."""
    RELEASE = "release"
    """They go on, and the next owner adopts them through their claims."""


class LeavePolicy(enum.Enum):
    """The leave policy says how a member leaves for its successor.

    The successor is a newer process of its code location, found through the same Dagster instance.
    """

    RELEASE = "release"
    """It commits what is done and leaves at once; the successor adopts the live runs."""
    DRAIN = "drain"
    """It waits for its live runs, as for a revoke."""


class LossPolicy(enum.Enum):
    """What happens to the runs of partitions that were lost."""

    LEAVE = "leave"
    """They go on; the next owner adopts them through their claims."""
    CANCEL = "cancel"
    """They are cancelled; the next owner asks for their batches again."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a member works.

    Attributes:
        limits: How large batches get.
        budget: How long a hold may take.
        on_deadline: What happens to live runs at the deadline of a hold.
        on_leave: Whether a member that leaves for its successor waits for live runs.
        on_lost: What happens to live runs of partitions that were lost.
        max_attempts: Attempts of a range: runs that may fail on it. Dagster's own retries are not
            counted.
        dead_letter_topic: Where a range whose attempts are exhausted is recorded, so that its
            partition goes on; without it, the partition is stopped.
        start_from: Where a group without a committed offset begins.
        foreign_metadata: What to do with offsets that another application committed.
        lease_s: After this time without a tick the member drains and leaves.
        plan_patience_s: After this time without a tick nothing new is claimed, because nobody
            would start its run.
        poll_s: How often runs are read: twice as often while more is there to be claimed, and four
            times as often during a hold.
        look_s: How often end offsets are read.
        idle_look_s: The same while nothing was there to be read for a while.
        orders_s: How often the orders of people are read.
        retry_s: When a command that was not answered is given again.
        recheck_s: How often a stopped partition is looked at again.
        pulse: After how long a run without a sign of life is dead.
        pace: How long a range waits before it is tried again.
        record_every_s: The commits of a partition within this time are joined into one record.
        lag_every_s: How often the lag of the whole group is observed; 0 for never.
        unanswered_s: When a person is told of a run that Dagster is asked for and does not start,
            and of a dead one that cannot be ended.
        worker: The streaming run that the member lives in, and that works on its batches; empty for
            a member that requests a run for each batch.
        code_version: The version of the code of that streaming run; empty where it is not known.
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
    look_s: float = 1.0
    idle_look_s: float = 1.0
    orders_s: float = 3.0
    retry_s: float = 1.0
    recheck_s: float = 10.0
    pulse: Liveness = field(default_factory=Liveness)
    pace: RetryPace = field(default_factory=RetryPace)
    record_every_s: float = 0.0
    lag_every_s: float = 60.0
    unanswered_s: float = 600.0
    worker: str = ""
    code_version: str = ""

    def of_stream(self, run_id: str) -> EngineSettings:
        """The settings of a member in a streaming run, which works on one batch after the other."""
        limits = replace(
            self.limits,
            max_runs_in_flight=1,
            max_claims_per_partition=1,
            max_ranges_per_run=_MOST_RANGES_OF_STREAM,
        )
        # Nobody can execute a batch again: a stopped range is tried again by itself.
        pace = replace(self.pace, retry_stopped=True)
        return replace(self, worker=run_id, limits=limits, pace=pace)

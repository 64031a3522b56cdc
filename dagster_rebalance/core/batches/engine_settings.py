"""Settings of the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.model.topics import Start, StartFrom
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.core.runs.retry import RetryBackoff

if TYPE_CHECKING:
    from dagster_rebalance.core.runs.progress import Exhausted


class ForeignMetadata(enum.Enum):
    """The treatment of a committed offset whose metadata this package did not write."""

    REFUSE = "refuse"
    OVERWRITE = "overwrite"


ROUNDING_S = 1e-6
"""Some decisions compare `now - since` with a limit, which rounds differently: a time is due this
much earlier, and stays due until it has certainly passed."""
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
    """The treatment of live runs at the deadline of a hold."""

    CANCEL = "cancel"
    """The runs are cancelled. Within the limit, the release waits until they end in Dagster."""
    RELEASE = "release"
    """They continue, and the next owner adopts them through their claims."""


class LeavePolicy(enum.Enum):
    """How a member leaves when a successor, a newer process of its code location, has joined."""

    RELEASE = "release"
    """The member commits finished work and leaves at once; the successor adopts the live runs."""
    DRAIN = "drain"
    """The member waits for its live runs, as for a revoke."""


class LossPolicy(enum.Enum):
    """The treatment of live runs of lost partitions."""

    LEAVE = "leave"
    """They continue, and the next owner adopts them through their claims."""
    CANCEL = "cancel"
    """The runs are cancelled, and the next owner requests their batches again."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a member.

    Attributes:
        max_attempts: Number of runs that may fail on a range, without Dagster's own retries.
        dead_letter_topic: The topic for exhausted ranges, after which their partition continues.
            None: the partition stops.
        bisects: Whether exhausted ranges are bisected, and only records become dead letters.
        start_from: The start position of a group without a committed offset.
        lease_s: After this time without a tick, the member drains and leaves.
        plan_patience_s: After this time without a tick, no batch is claimed.
        poll_s: Interval between reads of runs; half of it while more can be claimed without a
            `worker`, a quarter during a hold.
        bounds_s: Interval between reads of end offsets.
        idle_bounds_s: `bounds_s` after some time without new records.
        directives_s: Interval between reads of directives.
        retry_s: Delay before an unanswered command is repeated.
        recheck_s: Interval between checks of a stopped partition.
        backoff: Delays between runs on a range.
        record_every_s: Commits of a partition within this time share one materialization.
        records_per_minute: Materializations of commits for the whole group; infinite for no limit.
        lag_every_s: Interval between observations of the group's lag; 0 for never.
        stalled_after_s: Delay before a requested run that does not start, or a dead run that cannot
            be ended, is reported.
        worker: The streaming run of the member; empty for per-batch runs.
        claims_ahead: Whether the worker's next batch is claimed while one is at work.
        has_filter: Whether the group processes only some records. The member scans ranges before it
            claims them; the worker of a streaming run scans them itself.
        code_version: The code version of the streaming run, if known.
    """

    limits: BatchLimits = field(default_factory=BatchLimits)
    budget: HoldBudget = field(default_factory=HoldBudget)
    on_deadline: DeadlinePolicy = DeadlinePolicy.CANCEL
    on_leave: LeavePolicy = LeavePolicy.RELEASE
    on_lost: LossPolicy = LossPolicy.LEAVE
    max_attempts: int = 3
    dead_letter_topic: str | None = None
    bisects: bool = False
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
    records_per_minute: float = float("inf")
    lag_every_s: float = 60.0
    stalled_after_s: float = 600.0
    worker: str = ""
    claims_ahead: bool = False
    has_filter: bool = False
    code_version: str = ""

    def continues_after(self, exhausted: Exhausted) -> bool:
        """Whether an exhausted range is bisected or becomes a dead letter.

        Otherwise the partition stops, and a run is requested again. The last run decides whether
        the range is bisected: if an operator cancelled it, its cause is unknown.
        """
        if self.dead_letter_topic is None:
            return False
        if self.bisects:
            return exhausted.cause is FailureCause.RECORDS
        return not exhausted.is_cancelled

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

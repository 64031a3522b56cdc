"""Runs as Dagster shows them, and requests for runs."""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition


class RunState(enum.Enum):
    """State of a run."""

    CREATED = "created"
    """Created and in no queue. Dagster submits the run when it is requested again."""
    WAITING = "waiting"
    """Queued: the run has not started, and can be cancelled without loss of work."""
    STARTING = "starting"
    """Launching: the run has not checked its claim. Some launchers can already cancel it."""
    STARTED = "started"
    """Working, or about to check its claim."""
    CANCELING = "canceling"
    """Asked to stop; may still work."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    DELETED = "deleted"
    """Deleted from Dagster, while its process may still work."""


class FailureCause(enum.Enum):
    """The cause of a failed attempt."""

    UNKNOWN = "unknown"
    RECORDS = "records"
    """The asset function raised an error that its records explain."""
    ENVIRONMENT = "environment"
    """Storage, network, Kafka, Dagster, a signal, memory or the JVM."""


LIVE = frozenset(
    {RunState.CREATED, RunState.WAITING, RunState.STARTING, RunState.STARTED, RunState.CANCELING}
)


WORKING = frozenset({RunState.STARTED, RunState.CANCELING})


NOT_BEGUN = frozenset({RunState.CREATED, RunState.WAITING})


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run as Dagster shows it.

    Attributes:
        attempt: The number of the attempt for which it was requested; 0 if unknown.
        parent_id: The run that it re-executes; empty for a first run. Only first runs count as
            attempts.
        is_automatic: Whether it is a re-execution that Dagster's own run retries created.
        has_started: Whether its process reached its start check. If not, it has written nothing.
        awaits_retry: Whether it failed and Dagster will retry it.
        is_refused: Whether its start check refused it. It processes nothing, and is not an attempt.
        is_cancelled_by_member: Whether a member cancelled it for a hold or lost partitions. Such a
            run is not an attempt, and may produce output until it has ended.
        is_interrupted: Whether a signal ended its process without a cancellation; not an attempt.
        heartbeat: The last heartbeat; empty before the process begins to work.
        heartbeat_timeout_s: The heartbeat timeout that it was started with; 0 if unknown.
        is_gone: Whether its process reported its end or no longer exists. Its external work may
            continue.
        is_over: Whether all of its work has ended. An end status in Dagster alone is no proof.
        is_written_off: Whether a member ended it as dead. A later success does not count, because
            another run may already work on the range.
        refusal: Why the start check refused it.
        left_out: The assets (or steps) of its job that were not selected for it.
        done: The selected assets that succeeded. Like `undone`, known only if a run of the batch
            left something out.
        undone: The selected assets that it began and that did not succeed.
        active_partitions: The partitions that a streaming run may process; None if unknown (any).
        ended_at: Seconds since 1970; None if it has not ended or the time is unknown.
        working_s: Working time on the batch; None if unknown.
        has_died: Whether the process of a streaming run ended while it worked on the batch.
        code_version: The code version of a streaming run.
        error: Its error in one line; empty if unknown.
        cause: The cause of its failure.
    """

    run_id: str
    batch_id: str
    ranges: tuple[OffsetRange, ...]
    state: RunState
    attempt: int = 0
    parent_id: str = ""
    is_automatic: bool = False
    has_started: bool = True
    awaits_retry: bool = False
    is_refused: bool = False
    is_cancelled_by_member: bool = False
    is_interrupted: bool = False
    heartbeat: str = ""
    heartbeat_timeout_s: float = 0.0
    is_gone: bool = False
    is_over: bool = True
    is_written_off: bool = False
    refusal: str = ""
    left_out: tuple[str, ...] = ()
    done: frozenset[str] = frozenset()
    undone: frozenset[str] = frozenset()
    active_partitions: frozenset[TopicPartition] | None = None
    ended_at: float | None = None
    working_s: float | None = None
    has_died: bool = False
    code_version: str = ""
    error: str = field(default="", compare=False)
    cause: FailureCause = field(default=FailureCause.UNKNOWN, compare=False)

    @property
    def is_retry(self) -> bool:
        """Whether it re-executes another run."""
        return bool(self.parent_id)

    @property
    def is_requested(self) -> bool:
        """Whether the sensor requested it, and requests it again until it is submitted."""
        return not self.is_retry and self.attempt > 0

    @property
    def is_live(self) -> bool:
        """Whether it, or its retry, may still produce output."""
        return self.state in LIVE or self.awaits_retry or not self.is_over

    @property
    def has_succeeded(self) -> bool:
        """Whether its output counts."""
        return self.state is RunState.SUCCEEDED and not self.is_written_off

    @property
    def has_begun(self) -> bool:
        """Whether its process has sent a heartbeat, which precedes the start check."""
        return self.heartbeat != ""

    @property
    def may_work(self) -> bool:
        """Whether its process may be working."""
        return not self.is_refused and (self.state in WORKING or not self.is_over)


def format_runs(run_ids: Collection[str]) -> str:
    """Format run ids as Dagster's pages show them: `run ab12cd34`."""
    return f"run{'s' * (len(run_ids) != 1)} {', '.join(run_id[:8] for run_id in run_ids)}"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A run to start.

    Attributes:
        attempt: The number of this request, starting at 1.
        ranges: The ranges to process. After a rebalance, they may be a part of the batch.
        failures: The number of failed attempts on the ranges.
        interruptions: The number of consecutive interrupted runs since the last failed attempt.
        unsubmitted: The run that Dagster has created but not submitted; empty for none.
        is_own: Whether this member has written the claims.
        is_part: Whether the range is a part of a bisected range.
        is_repeat: Whether an earlier batch may have processed a part of the ranges.
    """

    batch_id: str
    attempt: int
    ranges: tuple[OffsetRange, ...]
    failures: int = field(default=0, compare=False)
    interruptions: int = field(default=0, compare=False)
    unsubmitted: str = field(default="", compare=False)
    is_own: bool = field(default=False, compare=False)
    is_part: bool = field(default=False, compare=False)
    is_repeat: bool = field(default=False, compare=False)

    @property
    def run_key(self) -> str:
        """The key for which Dagster starts at most one run."""
        digest = zlib.crc32(" ".join(map(str, self.ranges)).encode())
        return f"{self.batch_id}.{digest:08x}.{self.attempt}"

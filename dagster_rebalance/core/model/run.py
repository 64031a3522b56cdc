"""A run as Dagster shows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition


class RunState(enum.Enum):
    """Where a run is in its life, in the words that matter here."""

    CREATED = "created"
    """Created and not submitted, so it is in no queue: Dagster submits it when it is requested
    again."""
    WAITING = "waiting"
    """In the queue: it has not started and can be cancelled at no cost."""
    STARTING = "starting"
    """Being launched. It has not looked at its claim. Some launchers can cancel it already."""
    STARTED = "started"
    """Works, or is about to look at its claim."""
    CANCELING = "canceling"
    """Asked to stop, may still work."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    DELETED = "deleted"
    """Not in Dagster any more, while its process may work."""


LIVE = frozenset(
    {RunState.CREATED, RunState.WAITING, RunState.STARTING, RunState.STARTED, RunState.CANCELING}
)


WORKING = frozenset({RunState.STARTED, RunState.CANCELING})


NOT_BEGUN = frozenset({RunState.CREATED, RunState.WAITING})


@dataclass(frozen=True, slots=True)
class RunSeen:
    """One run as Dagster shows it.

    Attributes:
        run_id: Dagster's id of the run.
        batch_id: The batch that it was requested for.
        ranges: The ranges that it was given.
        state: Where it is in its life.
        attempt: Which attempt it was requested as; 0 where Dagster does not say.
        parent_id: The run that Dagster or a person executed again with it; empty for a first run.
            Only first runs count as attempts.
        is_automatic: Whether Dagster executed that run again by itself, by its own settings for
            retries.
        has_started: Whether its process ever came so far as to look whether it may work. One that
            did not has touched nothing.
        awaits_retry: It failed, and Dagster is about to start it again.
        is_refused: It refused itself, so it does not work although it may not have ended yet; not
            an attempt.
        is_taken_back: A member cancelled it, for a hold or a loss; not an attempt, but it may still
            work until it ended.
        is_interrupted: Its process was told to end by a signal, and nobody had cancelled it; not an
            attempt.
        heartbeat: The last sign of life of its process; changes while it lives. Empty before the
            process has begun its work.
        heartbeat_timeout_s: How long it may give no sign, as it was told when it began; 0 where it
            does not say.
        is_gone: Its process has said that it is finished, or is known not to exist any more; its
            Spark work may go on.
        is_over: Whether nothing of it works any more, once it has ended in Dagster's eyes.
            Dagster's word alone does not show it.
        is_written_off: A member has ended it, because its process was gone or silent. A success
            that it reports later, when it wakes up, does not count: another run may be at work by
            then.
        refusal: Why it refused itself.
        left_out: The assets of its job (steps, where a job has none) that it was not asked for. The
            next two are known only where a run of the batch left something out.
        done: The assets that it was asked for and that succeeded in it.
        undone: The assets that it began and that did not succeed in it.
        may_work_on: The partitions on which a streaming run may work, as it says itself; None where
            it does not say, so that it may be any.
        ended_at: When it ended in Dagster's eyes, in seconds since 1970; None where it has not, or
            where Dagster does not say.
        works_for_s: For how long it has worked on the batch; None where that is not known.
        has_died: Whether the process of a streaming run ended while it worked on the batch.
        code_version: The version of the code of a streaming run.
        error: What it failed with, in one line; empty where that is not known.
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
    is_taken_back: bool = False
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
    may_work_on: frozenset[TopicPartition] | None = None
    ended_at: float | None = None
    works_for_s: float | None = None
    has_died: bool = False
    code_version: str = ""
    error: str = field(default="", compare=False)

    @property
    def is_retry(self) -> bool:
        """Whether it executes another run again."""
        return bool(self.parent_id)

    @property
    def is_requested(self) -> bool:
        """Tell whether the sensor has requested the run.

        The sensor will request it again if Dagster has created it and not submitted it.
        """
        return not self.is_retry and self.attempt > 0

    @property
    def is_live(self) -> bool:
        """Whether it may still produce output, itself or through its retry."""
        return self.state in LIVE or self.awaits_retry or not self.is_over

    @property
    def has_succeeded(self) -> bool:
        """Whether its output counts."""
        return self.state is RunState.SUCCEEDED and not self.is_written_off

    @property
    def has_begun(self) -> bool:
        """Tell whether the process of the run has given a sign of life.

        It gives the first sign before it looks whether it may work.
        """
        return self.heartbeat != ""

    @property
    def may_work(self) -> bool:
        """Whether its process may be at work now."""
        return not self.is_refused and (self.state in WORKING or not self.is_over)


def named_runs(run_ids: Collection[str]) -> str:
    """Name runs as a person finds them in Dagster: `run ab12cd34`.

    Dagster's pages show eight characters of an id.
    """
    return f"run{'s' * (len(run_ids) != 1)} {', '.join(run_id[:8] for run_id in run_ids)}"

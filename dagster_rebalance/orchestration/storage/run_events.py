"""A mark is what the process of a run, or a member, says about this one run.

Marks are events in the run's own log. Tags would not do: Dagster rewrites all tags of a run to add
one, so that two writers lose what the other one wrote, and it copies them to retries. Dagster
appends an event, which belongs to its run and goes with it. A mark never says what a run did to the
records.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = re.compile(r"dagster_rebalance \[([a-z ]+)\]")


class RunEvent(enum.Enum):
    """A mark, by the word that stands in the event."""

    BEGAN = "began"
    """By the process, before it looks whether it may work: from here on only a proof ends the
    run."""
    REFUSED = "refused"
    """By the process: it has found that it must not work, and has not."""
    FINISHED = "finished"
    """By the process: the steps are done with the batch."""
    TAKEN_BACK = "taken back"
    """By a member before it cancels the run, or by a process that stops itself: not a failed
    attempt."""
    STOP = "stop"
    """By a member, to a run that is being cancelled: its process is to interrupt itself."""
    INTERRUPTED = "interrupted"
    """By the process: a signal told it to end, or the JVM of its Spark has died, and nobody had
    cancelled the run: not a failed attempt."""
    OVER = "over"
    """By a member: the process is gone and its Spark work was stopped."""
    READY = "ready"
    """By a streaming run: its member may be given partitions."""
    JOINED = "joined"
    """By a streaming run: Kafka has assigned partitions to it."""
    LEAVE = "leave"
    """By a sensor, to a streaming run that has to make way; with the reason."""


_SENTENCES = {
    RunEvent.BEGAN: "the process of this run has begun",
    RunEvent.REFUSED: "this run must not work on its batch",
    RunEvent.FINISHED: "the process of this run does no more work on its batch",
    RunEvent.TAKEN_BACK: (
        "this run is stopped for a reason that is not its own, and does not count as an attempt"
    ),
    RunEvent.STOP: "the process of this run is to interrupt itself",
    RunEvent.INTERRUPTED: (
        "a signal told the process of this run to end, or its Spark has died, and nobody had "
        "cancelled the run: it does not count as an attempt"
    ),
    RunEvent.OVER: "the process of this run is gone, and its work elsewhere is stopped",
    RunEvent.READY: "the member of this run waits for partitions",
    RunEvent.JOINED: "this run has partitions of its group",
    RunEvent.LEAVE: "this run is asked to finish its batch and to leave its group",
}


def record_run_event(
    instance: dg.DagsterInstance, run: dg.DagsterRun, mark: RunEvent, why: str = ""
) -> None:
    """Add a mark to a run, perhaps with a reason. Adding one twice is the same as once."""
    sentence = f"{_SENTENCES[mark]}: {why}" if why else _SENTENCES[mark]
    instance.report_engine_event(f"dagster_rebalance [{mark.value}]: {sentence}", run)


def run_events_of(instance: dg.DagsterInstance, run_id: str) -> frozenset[RunEvent]:
    """The marks of a run; none of one that was deleted."""
    return frozenset(mark for mark, _ in _marks(instance, run_id))


def times_of(instance: dg.DagsterInstance, run_id: str) -> dict[RunEvent, float]:
    """The marks of a run, each with when it was set first, in seconds since 1970."""
    times: dict[RunEvent, float] = {}
    for mark, at in _marks(instance, run_id):
        times.setdefault(mark, at)
    return times


def _marks(instance: dg.DagsterInstance, run_id: str) -> Iterator[tuple[RunEvent, float]]:
    words = {mark.value: mark for mark in RunEvent}
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        found = _MARK.match(event.message or "") if event else None
        if found and found[1] in words:
            yield words[found[1]], entry.timestamp

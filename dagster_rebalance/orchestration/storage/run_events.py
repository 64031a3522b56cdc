"""Events about one run, which its process or a member records in the log of the run.

Tags would not do: Dagster rewrites all tags of a run to add one, so one of two concurrent writers
loses its tag, and retries copy tags. An event is appended, belongs to its run, and is deleted with
it. No run event describes the output of a run.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVENT = re.compile(r"dagster_rebalance \[([a-z ]+)\]")


class RunEvent(enum.Enum):
    """A run event. The value is the stored text."""

    BEGAN = "began"
    """By the process, before it checks whether it may work: the run ends only with proof."""
    REFUSED = "refused"
    """By the process: it must not work, and has not."""
    FINISHED = "finished"
    """By the process: its steps are done with the batch."""
    TAKEN_BACK = "taken back"
    """By a member before it cancels the run, or by a process that stops itself: no failed attempt.
    """
    STOP = "stop"
    """By a member, for a run that is being cancelled: its process must interrupt itself."""
    INTERRUPTED = "interrupted"
    """By the process: it received a signal, or the JVM of its Spark died, and the run was not
    cancelled: no failed attempt."""
    OVER = "over"
    """By a member: the process is gone and its Spark jobs are stopped."""
    READY = "ready"
    """By a streaming run: its member may be assigned partitions."""
    JOINED = "joined"
    """By a streaming run: Kafka has assigned partitions to it."""
    LEAVE = "leave"
    """By a sensor, for a streaming run that must leave the group; with the reason."""


_SENTENCES = {
    RunEvent.BEGAN: "the process of this run has begun",
    RunEvent.REFUSED: "this run must not process its batch",
    RunEvent.FINISHED: "the process of this run is done with its batch",
    RunEvent.TAKEN_BACK: (
        "this run is stopped for an external reason, and does not count as an attempt"
    ),
    RunEvent.STOP: "the process of this run must interrupt itself",
    RunEvent.INTERRUPTED: (
        "the process of this run received a signal to end, or its Spark has died, and the run was "
        "not cancelled: it does not count as an attempt"
    ),
    RunEvent.OVER: "the process of this run is gone, and its external work is stopped",
    RunEvent.READY: "the member of this run waits for partitions",
    RunEvent.JOINED: "this run has partitions of its group",
    RunEvent.LEAVE: "this run must finish its batch and leave its group",
}


def record_run_event(
    instance: dg.DagsterInstance, run: dg.DagsterRun, event: RunEvent, reason: str = ""
) -> None:
    """Record an event of a run. Recording it twice has no further effect."""
    sentence = f"{_SENTENCES[event]}: {reason}" if reason else _SENTENCES[event]
    instance.report_engine_event(f"dagster_rebalance [{event.value}]: {sentence}", run)


def run_events_of(instance: dg.DagsterInstance, run_id: str) -> frozenset[RunEvent]:
    """Return the events of a run; none if it was deleted."""
    return frozenset(event for event, _ in _events(instance, run_id))


def run_event_times(instance: dg.DagsterInstance, run_id: str) -> dict[RunEvent, float]:
    """Return the first time of each event of a run, in seconds since 1970."""
    times: dict[RunEvent, float] = {}
    for event, at in _events(instance, run_id):
        times.setdefault(event, at)
    return times


def _events(instance: dg.DagsterInstance, run_id: str) -> Iterator[tuple[RunEvent, float]]:
    events = {event.value: event for event in RunEvent}
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        match = _EVENT.match(event.message or "") if event else None
        if match and match[1] in events:
            yield events[match[1]], entry.timestamp

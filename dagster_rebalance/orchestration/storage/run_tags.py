"""Tags and events of runs, and the format of a batch in the config of a run.

Retries and re-executions copy tags. So a tag about one run only (refused, taken back) has the id of
that run as its value. Tags cannot store events: Dagster rewrites all tags of a run to add a tag, so
one of two concurrent writers loses its tag. An event is appended to the log of its run, and is
deleted with the run. No run event describes the output of a run.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.offsets import OffsetRange, in_short
from dagster_rebalance.core.runs.bisection import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.runs.rerun_batch import Rerun


BATCH_TAG = "dagster_rebalance/batch"
"""The batch id, by which per-batch runs are queried."""
GROUP_TAG = "dagster_rebalance/group"
ATTEMPT_TAG = "dagster_rebalance/attempt"
STREAM_TAG = "dagster_rebalance/stream"
"""The sensor of a streaming run, by which streaming runs are queried."""
SLOT_TAG = "dagster_rebalance/slot"
"""The replica number of a streaming run."""
VERSION_TAG = "dagster_rebalance/version"
"""The code version for which a streaming run was requested."""
USER_TAG = "user"
"""The user who launched a run; set by Dagster+ only."""
RERUN_TAG = "dagster_rebalance/rerun"
"""The rerun that a run belongs to, for users; the batch id also contains it."""
RERUN_BY_TAG = "dagster_rebalance/rerun_by"
RERUN_REASON_TAG = "dagster_rebalance/rerun_reason"
RANGES_TAG = "dagster_rebalance/ranges"
"""The ranges in short, for users; the run config has them in full."""
REFUSED_TAG = "dagster_rebalance/refused"
"""The id of the run that its start check refused."""
REFUSAL_TAG = "dagster_rebalance/refusal"
"""Why the start check refused the run; the member shows the reason after repeated refusals."""
SET_ASIDE_TAG = "dagster_rebalance/set_aside"
"""The id of a rerun's run that sets records aside, followed by the keys of their letters if these
are few. These letters stay open; without keys, all letters of the run do."""
CAUSE_TAG = "dagster_rebalance/failure_cause"
"""The id of a failed run, and the cause of its failure, by which a bisected range is judged."""
BISECTED_TAG = "dagster_rebalance/bisected"
"""The failed range of which a run attempts a part, for users."""
OLD_HEARTBEAT_TAG = "dagster_rebalance/heartbeat"
"""The time of the last heartbeat of a run of 0.1.0; retries have a copy of it."""
OLD_TAKEN_BACK_TAG = "dagster_rebalance/taken_back"
"""The id of a run that a member of 0.1.0 cancelled."""

MAX_REFUSAL_CHARACTERS = 400
_LISTED_RANGES = 100
"""Above this number, the run config has one text for each topic: Dagster validates each text."""


def run_tags(batch_request: BatchRequest, group_id: str) -> dict[str, str]:
    """Return the tags of a run that processes a batch."""
    tags = {
        BATCH_TAG: batch_request.batch_id,
        GROUP_TAG: group_id,
        ATTEMPT_TAG: str(batch_request.attempt),
        RANGES_TAG: in_short(batch_request.ranges),
    }
    part = Part.parse(batch_request.batch_id)
    if part is not None:
        tags[BISECTED_TAG] = str(part.bisected(batch_request.ranges[0]))
    return tags


def attempt_of(run: dg.DagsterRun) -> int:
    """Return the number of the attempt of a run that processes a batch, from 1."""
    text = run.tags.get(ATTEMPT_TAG, "")
    return int(text) if text.isascii() and text.isdecimal() else 1


def set_aside_of(run: dg.DagsterRun, *, is_partial: bool) -> frozenset[str] | None:
    """Return the keys of the letters that a rerun's run leaves open; None for all of them.

    Args:
        run: The run. A re-execution has the tags of its parent.
        is_partial: Whether the run skips steps. They may have set aside what its parent has.
    """
    owner, *keys = run.tags.get(SET_ASIDE_TAG, "").split() or [""]
    if not owner or (owner != run.run_id and not is_partial):
        return frozenset()
    return frozenset(keys) if keys else None


def rerun_tags(rerun: Rerun) -> dict[str, str]:
    """Return the additional tags of a run that belongs to a rerun."""
    return {RERUN_TAG: rerun.rerun_id, RERUN_BY_TAG: rerun.by, RERUN_REASON_TAG: rerun.reason}


def run_config(batch_request: BatchRequest, batch_key: str) -> dict[str, Any]:
    """Return the run config that gives a batch to the resource `batch_key`."""
    config = {
        "batch_id": batch_request.batch_id,
        "ranges": format_ranges(batch_request.ranges),
    }
    return {"resources": {batch_key: {"config": config}}}


def ranges_in(config: Mapping[str, Any], batch_id: str) -> tuple[OffsetRange, ...]:
    """Return the ranges of a batch in the config of a run.

    The result is empty if the run has another batch or no batch, or if its ranges cannot be parsed:
    one such run must not break the query of all batches.
    """
    resources = config.get("resources")
    for resource in resources.values() if isinstance(resources, Mapping) else ():
        found = resource.get("config") if isinstance(resource, Mapping) else None
        if isinstance(found, Mapping) and found.get("batch_id") == batch_id:
            ranges = found.get("ranges")
            try:
                return tuple(parse_ranges(ranges)) if isinstance(ranges, Sequence) else ()
            except ValueError:
                return ()
    return ()


def format_range(range_: OffsetRange) -> str:
    """Return a range as it appears in the config of a run: `orders:3:120:240`."""
    return f"{range_.topic}:{range_.partition}:{range_.start}:{range_.until}"


def format_ranges(ranges: Sequence[OffsetRange]) -> list[str]:
    """Return ranges as they appear in the config of a run.

    Many ranges are joined by topic: `orders:3:120:240,4:80:95`.
    """
    if len(ranges) <= _LISTED_RANGES:
        return list(map(format_range, ranges))
    return [
        f"{topic}:" + ",".join(f"{one.partition}:{one.start}:{one.until}" for one in of_topic)
        for topic, of_topic in groupby(ranges, attrgetter("topic"))
    ]


def parse_ranges(texts: Iterable[object]) -> Iterator[OffsetRange]:
    """Yield the ranges in the result of `format_ranges`, in order.

    Raises:
        ValueError: A text is invalid.
    """
    return chain.from_iterable(_parsed(str(text)) for text in texts)


def _parsed(text: str) -> Iterator[OffsetRange]:
    topic, _, joined = text.partition(":")
    for part in joined.split(","):
        numbers = part.split(":")
        if len(numbers) != len(("partition", "start", "until")) or not all(
            number.isdecimal() for number in numbers
        ):
            shown = f"{topic}:{part}" if joined else text
            msg = (
                f"{shown!r} is not a range: expected topic:partition:start:until, and further "
                "ranges of the topic as ,partition:start:until"
            )
            raise ValueError(msg)
        yield OffsetRange(topic, *map(int, numbers))


_EVENT = re.compile(r"dagster_rebalance \[([a-z ]+)\]")


class RunEvent(enum.Enum):
    """A run event. The value is the stored text."""

    BEGAN = "began"
    """By the process, before its start check: from then on, the run ends only with proof."""
    REFUSED = "refused"
    """By the process: its start check refused it, so it has processed nothing."""
    FINISHED = "finished"
    """By the process: its steps have ended."""
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
    """By a streaming run: partitions may be assigned to its member."""
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

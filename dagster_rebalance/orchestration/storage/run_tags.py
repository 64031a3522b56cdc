"""Names that are stored in Dagster: run tags, and where a batch is found in a run's config.

Tags are copied to retries and re-executions. What is true of one run only (refused, taken back)
therefore names that run as its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.offsets import OffsetRange

if TYPE_CHECKING:
    from dagster_rebalance.core.runs.batch_request import BatchRequest
    from dagster_rebalance.core.runs.rerun_batch import Rerun

BATCH_TAG = "dagster_rebalance/batch"
"""The batch id: the one tag by which runs are looked up."""
GROUP_TAG = "dagster_rebalance/group"
ATTEMPT_TAG = "dagster_rebalance/attempt"
STREAM_TAG = "dagster_rebalance/stream"
"""The sensor that a streaming run belongs to: the one tag by which these are looked up."""
SLOT_TAG = "dagster_rebalance/slot"
"""Which of the wanted streaming runs it is."""
VERSION_TAG = "dagster_rebalance/version"
"""The version of the code that wanted a streaming run."""
USER_TAG = "user"
"""Dagster+ adds who launched a run. Elsewhere nobody knows."""
RERUN_TAG = "dagster_rebalance/rerun"
"""For people: the rerun that a run belongs to. Its batch id has it, too."""
RERUN_BY_TAG = "dagster_rebalance/rerun_by"
RERUN_REASON_TAG = "dagster_rebalance/rerun_reason"
RANGES_TAG = "dagster_rebalance/ranges"
"""For people: the ranges in short. The run config has them in full."""
REFUSED_TAG = "dagster_rebalance/refused"
"""The id of the run that refused itself."""
REFUSAL_TAG = "dagster_rebalance/refusal"
"""Why the run refused itself, for people and for the member, which shows it when it happens again
and again."""
OLD_HEARTBEAT_TAG = "dagster_rebalance/heartbeat"
"""The time of the last sign of life of a run of 0.1.0; now `Heartbeats` has it. Retries have a
copy of it."""
OLD_TAKEN_BACK_TAG = "dagster_rebalance/taken_back"
"""The id of a run that a member of 0.1.0 cancelled; now it is a `RunEvent`."""

_RANGES_SHOWN = 4
MOST_REFUSAL_CHARACTERS = 400


def run_tags(batch_request: BatchRequest, group_id: str) -> dict[str, str]:
    """The tags of a run that works on a batch."""
    shown = [str(range_) for range_ in batch_request.ranges[:_RANGES_SHOWN]]
    if len(batch_request.ranges) > _RANGES_SHOWN:
        shown.append(f"and {len(batch_request.ranges) - _RANGES_SHOWN} more")
    return {
        BATCH_TAG: batch_request.batch_id,
        GROUP_TAG: group_id,
        ATTEMPT_TAG: str(batch_request.attempt),
        RANGES_TAG: ", ".join(shown),
    }


def rerun_tags(rerun: Rerun) -> dict[str, str]:
    """What the tags of a run say beside `run_tags` when it belongs to a rerun."""
    return {
        RERUN_TAG: rerun.rerun_id,
        RERUN_BY_TAG: rerun.by,
        RERUN_REASON_TAG: rerun.reason,
    }


def run_config(batch_request: BatchRequest, batch_key: str) -> dict[str, Any]:
    """The run config that gives a batch to the resource `batch_key`."""
    config = {
        "batch_id": batch_request.batch_id,
        "ranges": [spelled(range_) for range_ in batch_request.ranges],
    }
    return {"resources": {batch_key: {"config": config}}}


def ranges_in(config: Mapping[str, Any], batch_id: str) -> tuple[OffsetRange, ...]:
    """Return the ranges of a batch in the config of a run.

    The result is empty when the run has another batch or none, or a person has spoilt its ranges.
    """
    resources = config.get("resources")
    for resource in resources.values() if isinstance(resources, Mapping) else ():
        given = resource.get("config") if isinstance(resource, Mapping) else None
        if isinstance(given, Mapping) and given.get("batch_id") == batch_id:
            ranges = given.get("ranges")
            try:
                return (
                    tuple(read_range(str(text)) for text in ranges)
                    if isinstance(ranges, Sequence)
                    else ()
                )
            except ValueError:
                # One such run must not keep its batch, and all that are read with it, from being
                # looked up.
                return ()
    return ()


def spelled(range_: OffsetRange) -> str:
    """A range as it stands in a run's config: `orders:3:120:240`."""
    return f"{range_.topic}:{range_.partition}:{range_.start}:{range_.until}"


def read_range(text: str) -> OffsetRange:
    """Read what `spelled` wrote.

    Raises:
        ValueError: The text is not a range.
    """
    parts = text.split(":")
    if len(parts) != len(("topic", "partition", "start", "until")) or not all(
        part.isdecimal() for part in parts[1:]
    ):
        msg = f"{text!r} is not a range: expected topic:partition:start:until"
        raise ValueError(msg)
    return OffsetRange(parts[0], int(parts[1]), int(parts[2]), int(parts[3]))

"""The tags of runs, and the form of a batch in the config of a run.

Retries and re-executions copy tags. So a tag about one run only (refused, taken back) has the id of
that run as its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.offsets import OffsetRange

if TYPE_CHECKING:
    from dagster_rebalance.core.runs.batch_request import BatchRequest
    from dagster_rebalance.core.runs.rerun_batch import Rerun

BATCH_TAG = "dagster_rebalance/batch"
"""The batch id, by which per-batch runs are queried."""
GROUP_TAG = "dagster_rebalance/group"
ATTEMPT_TAG = "dagster_rebalance/attempt"
STREAM_TAG = "dagster_rebalance/stream"
"""The sensor of a streaming run, by which streaming runs are queried."""
SLOT_TAG = "dagster_rebalance/slot"
"""The number of the replica that a streaming run is."""
VERSION_TAG = "dagster_rebalance/version"
"""The code version for which a streaming run was requested."""
USER_TAG = "user"
"""The user that launched a run; set by Dagster+ only."""
RERUN_TAG = "dagster_rebalance/rerun"
"""The rerun that a run belongs to, for people; the batch id has it, too."""
RERUN_BY_TAG = "dagster_rebalance/rerun_by"
RERUN_REASON_TAG = "dagster_rebalance/rerun_reason"
RANGES_TAG = "dagster_rebalance/ranges"
"""The ranges in short, for people; the run config has them in full."""
REFUSED_TAG = "dagster_rebalance/refused"
"""The id of the run that refused itself."""
REFUSAL_TAG = "dagster_rebalance/refusal"
"""Why the run refused itself; the member shows it when that is repeated."""
OLD_HEARTBEAT_TAG = "dagster_rebalance/heartbeat"
"""The time of the last heartbeat of a run of 0.1.0; retries have a copy of it."""
OLD_TAKEN_BACK_TAG = "dagster_rebalance/taken_back"
"""The id of a run that a member of 0.1.0 cancelled."""

_RANGES_SHOWN = 4
MAX_REFUSAL_CHARACTERS = 400


def run_tags(batch_request: BatchRequest, group_id: str) -> dict[str, str]:
    """Return the tags of a run that processes a batch."""
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
    """Return the further tags of a run that belongs to a rerun."""
    return {RERUN_TAG: rerun.rerun_id, RERUN_BY_TAG: rerun.by, RERUN_REASON_TAG: rerun.reason}


def run_config(batch_request: BatchRequest, batch_key: str) -> dict[str, Any]:
    """Return the run config that gives a batch to the resource `batch_key`."""
    config = {
        "batch_id": batch_request.batch_id,
        "ranges": list(map(format_range, batch_request.ranges)),
    }
    return {"resources": {batch_key: {"config": config}}}


def ranges_in(config: Mapping[str, Any], batch_id: str) -> tuple[OffsetRange, ...]:
    """Return the ranges of a batch in the config of a run.

    The result is empty if the run has another batch or none, or if its ranges cannot be read: one
    such run must not break the query of its batch and of all others.
    """
    resources = config.get("resources")
    for resource in resources.values() if isinstance(resources, Mapping) else ():
        found = resource.get("config") if isinstance(resource, Mapping) else None
        if isinstance(found, Mapping) and found.get("batch_id") == batch_id:
            ranges = found.get("ranges")
            try:
                return (
                    tuple(parse_range(str(text)) for text in ranges)
                    if isinstance(ranges, Sequence)
                    else ()
                )
            except ValueError:
                return ()
    return ()


def format_range(range_: OffsetRange) -> str:
    """Return a range as it appears in the config of a run: `orders:3:120:240`."""
    return f"{range_.topic}:{range_.partition}:{range_.start}:{range_.until}"


def parse_range(text: str) -> OffsetRange:
    """Parse the result of `format_range`."""
    topic, *numbers = text.split(":")
    if len(numbers) != len(("partition", "start", "until")) or not all(
        number.isdecimal() for number in numbers
    ):
        msg = f"{text!r} is not a range: expected topic:partition:start:until"
        raise ValueError(msg)
    return OffsetRange(topic, *map(int, numbers))

"""Start check: whether a run may process its batch.

The start and the first heartbeat of the run are visible to other runs before the check. The run may
work only if its batch claims all of its ranges, no other run of the batch has succeeded on them,
and no other run of the group may be working on them. *Any* such run causes a refusal, whichever
started first: a tie-break by age or clock could let both work. If two runs refuse each other, the
owner of the partition requests the batch again. The ranges of a rerun have no claim; they must be
committed and planned.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.offsets import in_short
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.bisection import whole_batch
from dagster_rebalance.core.runs.progress import missing_assets
from dagster_rebalance.core.runs.run_index import RunIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch


def refusal(
    me: RunSnapshot,
    others: Iterable[RunSnapshot],
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
) -> str | None:
    """Return why the run `me` must not work, or None.

    Args:
        me: The run.
        others: All runs of the batch, and all live runs of the group; may include `me`.
        committed: The committed offsets of the partitions of the batch.
    """
    if me.state is not RunState.STARTED:
        return _not_started(me)
    problems = {
        range_: _claim_problem(range_, me.batch_id, committed.get(range_.topic_partition))
        for range_ in me.ranges
    }
    problem = next(filter(None, problems.values()), None)
    if problem is not None:
        rest = in_short([range_ for range_ in me.ranges if problems[range_] is None])
        return (
            f"{problem}. The rest of the batch, {rest}, is requested again by its owner"
            if rest
            else problem
        )
    return _company(me, tuple(others))


def rerun_refusal(
    me: RunSnapshot,
    others: Iterable[RunSnapshot],
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
    planned: RerunBatch | None,
) -> str | None:
    """Return why the run `me` of a rerun must not work, or None; `planned` is its stored batch."""
    if me.state is not RunState.STARTED:
        return _not_started(me)
    if planned is None or planned.ranges != me.ranges:
        return (
            "no rerun includes these ranges: it has finished or was cancelled. Request another one "
            "with dagster-rebalance rerun"
        )
    for range_ in me.ranges:
        stored = committed.get(range_.topic_partition)
        if stored is None or stored.offset < range_.until:
            at = "has no committed offset" if stored is None else f"is at offset {stored.offset}"
            return f"the group {at}, so it will process {range_} itself"
    return _company(me, tuple(others))


def _not_started(me: RunSnapshot) -> str:
    return (
        f"run {me.run_id} is {me.state.value} in Dagster, so another run could not see that it "
        "works"
    )


def _company(me: RunSnapshot, runs: tuple[RunSnapshot, ...]) -> str | None:
    mine: defaultdict[TopicPartition, list[OffsetRange]] = defaultdict(list)
    for range_ in me.ranges:
        mine[range_.topic_partition].append(range_)
    for other in (run for run in runs if run.run_id != me.run_id):
        shared = sorted(
            range_
            for other_range in other.ranges
            for range_ in mine.get(other_range.topic_partition, ())
            if range_.overlaps(other_range)
        )
        if shared:
            problem = _rival(other, me.batch_id, shared, runs)
            if problem:
                return f"{problem} on {shared[0]}"
    return None


def _rival(
    other: RunSnapshot, batch_id: str, shared: Iterable[OffsetRange], runs: tuple[RunSnapshot, ...]
) -> str:
    """Why another run excludes this run; empty if it does not."""
    is_own = other.batch_id in {batch_id, whole_batch(batch_id)}
    whose = "the same batch" if is_own else f"batch {other.batch_id}"
    if not other.is_over and other.may_work:
        ended = (
            "was deleted from" if other.state is RunState.DELETED else f"has {other.state.value} in"
        )
        return (
            f"run {other.run_id} of {whose} {ended} Dagster, and its process may still be working"
        )
    is_done = other.has_succeeded and is_own and _is_done(other, shared, runs)
    return (
        f"run {other.run_id} of {whose} has {other.state.value}"
        if is_done or other.may_work
        else ""
    )


def _is_done(
    other: RunSnapshot, shared: Iterable[OffsetRange], runs: tuple[RunSnapshot, ...]
) -> bool:
    """Whether the run succeeded on a range and later runs made all assets that it left out."""
    index = RunIndex(runs)
    return any(
        not missing_assets(other, index.of(other.batch_id, range_))
        for range_ in other.ranges
        if any(range_.overlaps(mine) for mine in shared)
    )


def _claim_problem(
    range_: OffsetRange, batch_id: str, committed: OffsetAndMetadata | None
) -> str | None:
    if committed is None:
        return (
            f"{range_} is not claimed: the group has no committed offset for "
            f"{range_.topic_partition}"
        )
    try:
        claimed = decode(committed).ranges(range_.topic_partition)
    except ClaimError as error:
        return f"{range_} is not claimed: {error}"
    if (range_, batch_id) in claimed:
        return None
    if committed.offset >= range_.until:
        return f"{range_} is already committed (the group is at {committed.offset})"
    return f"{range_} is no longer claimed by batch {batch_id} (the group is at {committed.offset})"

"""The check that a run makes before it works on its batch.

By the time it looks, its own start and its first sign of life are visible to all others. It may
work only if every one of its ranges is still claimed by its batch, no other run of the batch has
succeeded on them, and no other run of the group may be at work on any part of them. *Any* such run
makes it refuse itself, whichever came first: with a tie-break by age or by clocks both could work.
If two runs refuse each other, the owner of the partition asks for the batch again.

A run of a rerun has no claim. Its ranges must be committed, so that the group is done with them,
and must be those that a person has asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.core.runs.progress import lacking

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch


def refusal(
    me: RunSeen,
    others: Iterable[RunSeen],
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
) -> str | None:
    """Why the run `me` must not work, as a sentence; None when it may.

    Args:
        me: The run that asks.
        others: All runs of the same batch, and all live runs of the group; `me` may be among them.
        committed: What Kafka stores for the partitions of the run now.
    """
    if me.state is not RunState.STARTED:
        return _not_started(me)
    problems = {
        range_: _claim_problem(range_, me.batch_id, committed.get(range_.topic_partition))
        for range_ in me.ranges
    }
    problem = next(filter(None, problems.values()), None)
    if problem is not None:
        rest = ", ".join(str(range_) for range_ in me.ranges if problems[range_] is None)
        return (
            f"{problem}. The rest of the batch, {rest}, is requested again by its owner"
            if rest
            else problem
        )
    return _company(me, tuple(others))


def rerun_refusal(
    me: RunSeen,
    others: Iterable[RunSeen],
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
    planned: RerunBatch | None,
) -> str | None:
    """Why the run `me` of a rerun must not work, as a sentence; None when it may.

    Args:
        me: The run that asks.
        others: All runs of the same batch, and all live runs of the group; `me` may be among them.
        committed: What Kafka stores for the partitions of the run now.
        planned: Its batch, as the book of reruns has it; None where it has none.
    """
    if me.state is not RunState.STARTED:
        return _not_started(me)
    if planned is None or planned.ranges != me.ranges:
        return (
            "no rerun is to process these ranges: it is finished, or was cancelled. Ask for "
            "another one with dagster-rebalance rerun"
        )
    for range_ in me.ranges:
        stored = committed.get(range_.topic_partition)
        if stored is None or stored.offset < range_.until:
            at = "has no committed offset" if stored is None else f"is at offset {stored.offset}"
            return f"the group {at}, so it will process {range_} itself"
    return _company(me, tuple(others))


def _not_started(me: RunSeen) -> str:
    return (
        f"run {me.run_id} is {me.state.value} in Dagster, so another run could not see that it "
        "works"
    )


def _company(me: RunSeen, known: tuple[RunSeen, ...]) -> str | None:
    """What another run does that shares a range with `me`; None when nobody is in the way."""
    for other in known:
        shared = [
            range_
            for range_ in me.ranges
            if any(range_.overlaps(theirs) for theirs in other.ranges)
        ]
        if other.run_id != me.run_id and shared:
            problem = _rival(other, me.batch_id, shared, known)
            if problem:
                return f"{problem} on {shared[0]}"
    return None


def _rival(
    other: RunSeen, batch_id: str, shared: Iterable[OffsetRange], known: tuple[RunSeen, ...]
) -> str:
    """What a run does that shares a range and must be alone with it; empty when it does nothing."""
    whose = "the same batch" if other.batch_id == batch_id else f"batch {other.batch_id}"
    if not other.is_over and other.may_work:
        ended = (
            "was deleted from" if other.state is RunState.DELETED else f"has {other.state.value} in"
        )
        return (
            f"run {other.run_id} of {whose} {ended} Dagster, and it is not known that its process "
            "does no more work"
        )
    is_done = other.has_succeeded and other.batch_id == batch_id and _is_done(other, shared, known)
    return (
        f"run {other.run_id} of {whose} has {other.state.value}"
        if is_done or other.may_work
        else ""
    )


def _is_done(other: RunSeen, shared: Iterable[OffsetRange], known: tuple[RunSeen, ...]) -> bool:
    """Tell whether a run has succeeded on a range with nothing left out.

    A later run may make up for missing assets.
    """
    return any(
        not lacking(other, [run for run in known if range_ in run.ranges]) for range_ in shared
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
        return f"{range_} is committed already (the group is at {committed.offset})"
    return (
        f"{range_} is not claimed by batch {batch_id} any more (the group is at {committed.offset})"
    )

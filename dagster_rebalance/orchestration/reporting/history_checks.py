"""Checks of what is recorded of a group: commits that join, and holds that drained.

A member reports them when something happens that they are about. Executed by hand they read the
same records, so that they also answer while no member is there.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

import time
from collections.abc import Iterable

import dagster as dg

from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition, partitions_named
from dagster_rebalance.core.model.receipt import Outcome
from dagster_rebalance.core.reporting.gaps import Recorded, gaps
from dagster_rebalance.core.reporting.members import Kind, MemberRecord
from dagster_rebalance.orchestration.reporting.check_helpers import group_check
from dagster_rebalance.orchestration.reporting.member_tables import said_since, skips_of, utc
from dagster_rebalance.orchestration.reporting.run_links import run_links

GAP_CHECK = "no_offset_gap"
DRAINED_CHECK = "drained_before_release"
_COMMITS_READ = 500
_ITS_COMMITS_READ = 10
_EVENTS_READ = 10_000
"""Each dead letter is an event of the group, too: this many take a few seconds to read."""
_SHOWN = 5
_DAY_S = 86_400.0
_UNDRAINED = {outcome.value for outcome in Outcome if not outcome.is_drained}


def gap_result(
    instance: dg.DagsterInstance,
    offsets: dg.AssetKey,
    group: dg.AssetKey,
    of: TopicPartition | None = None,
) -> dg.AssetCheckResult:
    """Whether the newest recorded commits of each partition join.

    Args:
        instance: Where they are recorded.
        offsets: The offsets asset of the group.
        group: The asset of its members, where it is recorded what people have skipped.
        of: A partition whose own last commits are looked at as well: it may have stood still while
            the others filled what is read of the group.
    """
    newest = [*instance.fetch_materializations(offsets, limit=_COMMITS_READ).records]
    if of is not None:
        its_own = dg.AssetRecordsFilter(offsets, asset_partitions=[str(of)])
        newest += instance.fetch_materializations(its_own, limit=_ITS_COMMITS_READ).records
    records = sorted({one.storage_id: one for one in newest}.values(), key=lambda r: r.storage_id)
    commits = [found for record in records if (found := _recorded(record)) is not None]
    missing = gaps(commits)
    if missing:  # what people have skipped lies between commits, and is seldom asked for
        missing = gaps(commits, skips_of(instance, group, min(r.timestamp for r in records)))
    texts = [str(gap) for gap in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        texts.append(f"and {len(missing) - _SHOWN} more")
    advice = (
        ". The committed offset was moved forward, or offsets were deleted before they were "
        "processed: docs/operating.md says how to process them"
    )
    return dg.AssetCheckResult(
        passed=not missing,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(texts) + advice
        if missing
        else f"no gap; recorded commits looked at: {len(commits)}",
        metadata={
            "gaps": len(missing),
            "missing_offsets": sum(len(gap.range) for gap in missing),
            "commits": len(commits),
            **run_links(run for gap in missing for run in (gap.before.run_id, gap.after.run_id)),
        },
    )


def drained_by_now(instance: dg.DagsterInstance, group: dg.AssetKey) -> dg.AssetCheckResult:
    """Whether each hold of the last day drained its partitions before they were released.

    Args:
        instance: Where the holds are recorded.
        group: The asset of the members and holds.
    """
    now = time.time()
    history, since = said_since(instance, group, now - _DAY_S, _EVENTS_READ)
    return drained_result(history, now, since)


def drained_result(
    history: Iterable[MemberRecord], now: float, since: float = 0.0
) -> dg.AssetCheckResult:
    """Whether each hold of the last day drained, as the members have said.

    Args:
        history: What they have said.
        now: The time, in seconds since 1970.
        since: The time from which all that they have said is there.
    """
    holds = [said for said in history if said.kind is Kind.HOLD and now - said.at <= _DAY_S]
    bad = [said for said in holds if said.outcome in _UNDRAINED]
    texts = [f"{said.name}: {said.text}" for said in reversed(bad[-_SHOWN:])]
    if len(bad) > _SHOWN:
        texts.append(f"and {len(bad) - _SHOWN} more")
    when = "of the last day" if now - since >= _DAY_S else f"since {utc(since)}"
    return dg.AssetCheckResult(
        passed=not bad,
        # Nothing is lost: claims say what is left, and the next owner works on it.
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(texts) or f"holds {when}: {len(holds)}, all drained",
        metadata={
            "holds": len(holds),
            "not_drained": len(bad),
            **run_links(run_id for said in reversed(bad) for run_id in said.run_ids),
        },
    )


def build_history_checks(
    offsets: dg.AssetKey, group: dg.AssetKey, kafka_key: str
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of what is recorded of a group.

    Args:
        offsets: The offsets asset of the group.
        group: The asset of its members and holds.
        kafka_key: The resource key of the group's `KafkaConsumerResource`.
    """

    def no_offset_gap(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return gap_result(context.instance, offsets, group)

    def drained_before_release(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return drained_by_now(context.instance, group)

    return [
        group_check(
            GAP_CHECK,
            offsets,
            kafka_key,
            "Fails when offsets lie between recorded commits that none of them covers.",
            no_offset_gap,
        ),
        group_check(
            DRAINED_CHECK,
            group,
            kafka_key,
            "Warns when partitions were released, in the last day, before their runs had ended.",
            drained_before_release,
        ),
    ]


def _recorded(record: dg.EventLogRecord) -> Recorded | None:
    """A commit, as the catalogue records it; None for what somebody else has reported."""
    event = record.asset_materialization
    if event is None or event.partition is None:
        return None
    partition = next(iter(partitions_named([event.partition])), None)
    start, until, run_id = (
        None if (value := event.metadata.get(name)) is None else value.value
        for name in ("start", "until", "run")
    )
    if partition is None or not (isinstance(start, int) and isinstance(until, int)):
        return None
    try:
        range_ = OffsetRange(partition.topic, partition.partition, start, until)
        return Recorded(range_, str(run_id))
    except ValueError:  # people report what they like
        return None

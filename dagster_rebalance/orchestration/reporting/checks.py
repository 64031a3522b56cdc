"""The asset checks of a group: stopped partitions, lag, gaps between commits, undrained holds.

Members report the checks when something changes. If you execute a check manually, it reads Kafka
and Dagster, so it needs no running member. In a member's report of stopped partitions, the state of
its own partitions comes from the engine. Reasons that only another owner can detect are kept as
that owner reported them.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

import hashlib
import json
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.commands import HoldOutcome
from dagster_rebalance.core.model.directives import resume_command, selector_of
from dagster_rebalance.core.model.offsets import (
    OffsetRange,
    TopicPartition,
    names_of,
    parse_partitions,
)
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.reporting.gaps import Recorded, gaps
from dagster_rebalance.core.reporting.group_status import Kind, MemberRecord
from dagster_rebalance.core.reporting.lag import (
    GroupLag,
    GroupState,
    LagLimit,
    PartitionLag,
    why_missing,
)
from dagster_rebalance.orchestration.ports import GroupRecords, RunError, ShownStops
from dagster_rebalance.orchestration.reporting.group_snapshot import (
    errors_of,
    lag_of,
    late_partitions,
    scan_with_stops,
)
from dagster_rebalance.orchestration.reporting.member_tables import (
    records_since,
    run_links,
    skips_of,
    utc,
)
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

STOPPED_CHECK = "no_partition_stopped"
LAG_CHECK = "lag_within"
GAP_CHECK = "no_offset_gap"
DRAINED_CHECK = "drained_before_release"
_OWNER, _SCAN = "its owner", "a scan of the group"
_FORMER_OWNER = "owner"
"""The owner in the column `said_by` of earlier versions."""
_REASON, _TO_DO, _FOUND_BY = "reason", "what_to_do", "found_by"
_COLUMNS = {
    _REASON: "The error is cut; `error of <partition>` and the run have more.",
    _TO_DO: "How to continue.",
    "run": "The last failed run.",
    _FOUND_BY: "The member that owns the partition, or a scan by another process.",
}
_LAG_TABLE = dg.TableSchema(
    columns=[
        dg.TableColumn("partition", "string"),
        dg.TableColumn("lag", "int", description="Empty if unknown."),
        dg.TableColumn("state", "string", description="Why the partition is stopped or paused."),
        dg.TableColumn("run", "string", description="The run in progress, or the failed run."),
        dg.TableColumn("committed", "int", description="The next offset to be read."),
        dg.TableColumn("end", "int", description="The end of the log, or an open transaction."),
    ]
)
_MOST_PLANNED = 20
# Dagster stores each evaluation and each observation, so they stay small in large groups.
_ROWS_SHOWN = 20
_GAPS_SHOWN = 5
_STATE_SHOWN = 100
_DESCRIBED = 3
_REASON_SHOWN = 500
_REASONS_PER_TICK = 3
_MOST_ERROR_CHARACTERS = 500
_MOST_NAMES_CHARACTERS = 2_000
_COMMITS_READ = 500
_COMMITS_READ_OF_PARTITION = 10
_EVENTS_READ = 10_000
"""A dead letter is an event of the group, too: this many take a few seconds to read."""
_DAY_S = 86_400.0
_UNDRAINED = {outcome.value for outcome in HoldOutcome if not outcome.is_drained}


def group_check(
    name: str,
    asset_key: dg.AssetKey,
    kafka_key: str,
    description: str,
    execute: Callable[[dg.AssetCheckExecutionContext], dg.AssetCheckResult],
) -> dg.AssetChecksDefinition:
    """Build a check of an asset of a group; `kafka_key` is the key of its resource."""
    spec = dg.AssetCheckSpec(name, asset=asset_key, description=description)

    # `asset_check` would remove dots and dashes of the key from the name of its op, so the groups
    # `a.b` and `a-b` could not be in one code location.
    @dg.multi_asset_check(
        name=f"{name}_{hashlib.sha256(json.dumps(asset_key.path).encode()).hexdigest()[:12]}",
        specs=[spec],
        required_resource_keys={kafka_key},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return execute(context)

    return check


def last_evaluation(
    instance: dg.DagsterInstance, name: str, asset_key: dg.AssetKey
) -> dg.AssetCheckEvaluation | None:
    """Return the newest finished evaluation of a check, or None."""
    key = dg.AssetCheckKey(asset_key, name)
    last = instance.get_latest_asset_check_evaluation_record(key)
    if last is None or isinstance(last.evaluation, dg.AssetCheckEvaluation):
        return None if last is None else last.evaluation
    # A user evaluates the check, and the newest record is the plan of that run.
    storage = instance.event_log_storage
    records = storage.get_asset_check_execution_history(key, limit=_MOST_PLANNED)
    evaluations = (record.evaluation for record in records)
    return next((one for one in evaluations if isinstance(one, dg.AssetCheckEvaluation)), None)


def as_evaluation(
    result: dg.AssetCheckResult, name: str, asset_key: dg.AssetKey
) -> dg.AssetCheckEvaluation:
    """Return a result as the evaluation that a member reports."""
    return dg.AssetCheckEvaluation(
        asset_key=asset_key,
        check_name=name,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


# Stopped partitions


def shown_stops(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> ShownStops:
    """Return the stops that the check shows, evaluated by a member or manually."""
    last = last_evaluation(instance, STOPPED_CHECK, asset_key)
    metadata = {} if last is None else last.metadata
    table, count = metadata.get("stopped"), metadata.get("stopped_partitions")
    records = table.records if isinstance(table, dg.TableMetadataValue) else []
    rows = {
        partition: record.data
        for record in records
        for partition in parse_partitions([record.data.get("partition")])
    }
    partitions = count.value if isinstance(count, dg.IntMetadataValue) else None
    return ShownStops(
        {
            partition: Reason(str(row.get(_REASON)), str(row.get(_TO_DO, "")))
            for partition, row in rows.items()
        },
        partitions or 0,
        frozenset(
            partition
            for partition, row in rows.items()
            if row.get(_FOUND_BY) == _OWNER or row.get("said_by") == _FORMER_OWNER
        ),
    )


def stop_notes(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> tuple[str, ...]:
    """Return the first stops that the check shows, for a tick."""
    shown = shown_stops(instance, asset_key)
    reasons = [reason for _, reason in sorted(shown.reasons.items())[:_REASONS_PER_TICK]]
    more = shown.partitions - len(reasons)
    return (*reasons, f"{more} more stopped") if more > 0 else (*reasons,)


def build_stopped_check(
    asset_key: dg.AssetKey,
    kafka_key: str,
    catalogue_of: Callable[[dg.DagsterInstance], GroupRecords],
) -> dg.AssetChecksDefinition:
    """Build the check that fails while a partition is stopped, and warns while one is paused."""

    def no_partition_stopped(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        ledger = RunLedger(context.instance, kafka.group_id)
        with kafka.connect() as consumer:
            _, standing = scan_with_stops(
                consumer,
                kafka.topics,
                ledger,
                catalogue_of(context.instance),
                kafka.engine_settings(),
            )
        return stopped_result(standing, errors_of(standing, ledger))

    return group_check(
        STOPPED_CHECK,
        asset_key,
        kafka_key,
        "Fails while a partition is stopped or a topic is missing, and warns while a partition is "
        "paused. The tables stopped, paused and missing show the reasons and what to do.",
        no_partition_stopped,
    )


def stopped_result(
    standing: GroupState, errors: Mapping[TopicPartition, RunError]
) -> dg.AssetCheckResult:
    """Return the result of the check. Paused partitions only warn: a pause sends no alert."""
    stopped, paused, missing = standing.stopped, standing.paused, standing.missing
    reasons = {
        partition: Reason.of(reason) for partition, reason in sorted(stopped.items())[:_ROWS_SHOWN]
    }
    return dg.AssetCheckResult(
        passed=not (stopped or missing or paused),
        severity=(
            dg.AssetCheckSeverity.ERROR if stopped or missing else dg.AssetCheckSeverity.WARN
        ),
        description=_described(standing),
        metadata={
            "stopped": _table(
                ("partition", _REASON, _TO_DO, "run", _FOUND_BY),
                (
                    (
                        str(partition),
                        reason.problem,
                        reason.remedy,
                        standing.failed.get(partition, ("",))[0][:8],
                        _OWNER if partition in standing.reported else _SCAN,
                    )
                    for partition, reason in reasons.items()
                ),
            ),
            "paused": _table(
                ("partition", _REASON, _TO_DO),
                (
                    (str(partition), why, resume_command(selector_of(partition)))
                    for partition, why in sorted(paused.items())[:_ROWS_SHOWN]
                ),
            ),
            "missing": _table(
                ("topic", _REASON, _TO_DO),
                (
                    (topic, why.problem, why.remedy)
                    for topic, why in ((one, why_missing(one)) for one in missing[:_ROWS_SHOWN])
                ),
            ),
            "stopped_partitions": len(stopped),
            "partitions": dg.MetadataValue.text(_names(stopped)),
            "paused_partitions": len(paused),
            "missing_topics": len(missing),
            **{
                f"error of {partition}": _shortened(failed.error, _MOST_ERROR_CHARACTERS)
                for partition, failed in errors.items()
            },
            **run_links(failed.run_id for failed in errors.values()),
        },
    )


def _described(standing: GroupState) -> str:
    """Return the first problems in a few words; the tables have the others, and what to do."""
    problems = [why_missing(topic).problem for topic in standing.missing]
    problems += [Reason.of(reason).problem for _, reason in sorted(standing.stopped.items())]
    alike: dict[str, list[TopicPartition]] = {}
    for partition, why in standing.paused.items():
        alike.setdefault(why, []).append(partition)
    problems += [f"{_names(partitions)}: {why}" for why, partitions in alike.items()]
    texts = [_shortened(problem, _REASON_SHOWN) for problem in problems[:_DESCRIBED]]
    if len(problems) > len(texts):
        texts.append(f"and {len(problems) - len(texts)} more")
    return "; ".join(texts) or "no partition is stopped or paused"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> dg.TableMetadataValue:
    schema = dg.TableSchema([dg.TableColumn(one, "string", _COLUMNS.get(one)) for one in columns])
    records = [dg.TableRecord(dict(zip(columns, row, strict=True))) for row in rows]
    return dg.MetadataValue.table(records, schema)


def _names(partitions: Iterable[TopicPartition]) -> str:
    return _shortened(names_of(partitions), _MOST_NAMES_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    return textwrap.shorten(text, most, placeholder=" ...")


# Lag


def lag_observation(lag: GroupLag, asset_key: dg.AssetKey) -> dg.AssetObservation:
    """Return the observation of the lag that a member reports."""
    return dg.AssetObservation(asset_key, description=str(lag), metadata=_lag_metadata(lag))


def build_lag_check(
    asset_key: dg.AssetKey,
    kafka_key: str,
    limit: LagLimit,
    catalogue_of: Callable[[dg.DagsterInstance], GroupRecords],
) -> dg.AssetChecksDefinition:
    """Build the check that fails while the lag of a group exceeds the limit."""

    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        settings = kafka.engine_settings()
        ledger = RunLedger(context.instance, kafka.group_id)
        with kafka.connect() as consumer:
            scan, standing = scan_with_stops(
                consumer, kafka.topics, ledger, catalogue_of(context.instance), settings
            )
            rows = lag_of(scan, standing, settings).partitions
            late = late_partitions(consumer, rows, limit, now_s=time.time())
        return lag_result(lag_of(scan, standing, settings, late), limit)

    return group_check(
        LAG_CHECK,
        asset_key,
        kafka_key,
        "Fails while the lag is above lag_within_records or lag_within_s, or is not known.",
        check,
    )


def lag_result(lag: GroupLag, limit: LagLimit) -> dg.AssetCheckResult:
    """Return the result of the check for a lag."""
    problems = limit.exceeded(lag)
    return dg.AssetCheckResult(
        passed=not problems,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join((*problems, str(lag))),
        metadata=_lag_metadata(lag),
    )


def _lag_metadata(lag: GroupLag) -> Mapping[str, Any]:
    """Return the lag as metadata. Dagster plots each number over time."""
    rows = lag.partitions[:_ROWS_SHOWN]
    metadata: dict[str, Any] = {
        "lag": lag.total,
        "lag_max": lag.most,
        "partitions": len(lag.partitions),
        "stopped_partitions": lag.stopped,
        "paused_partitions": lag.paused,
        "unknown_partitions": len(lag.unknown),
        "missing_topics": len(lag.missing),
        "largest": dg.MetadataValue.table([_lag_row(row) for row in rows], _LAG_TABLE),
    }
    if len(lag.partitions) > len(rows):
        metadata["not_in_table"] = f"{len(lag.partitions) - len(rows)} partitions with less lag"
    return {**metadata, **run_links(run_id for row in rows if (run_id := _run_of(row)))}


def _lag_row(row: PartitionLag) -> dg.TableRecord:
    return dg.TableRecord(
        {
            "partition": str(row.partition),
            "lag": _cell(row.lag),
            "state": _shortened(row.state, _STATE_SHOWN),
            "run": _run_of(row)[:8],
            "committed": _cell(row.committed),
            "end": _cell(row.end),
        }
    )


def _run_of(row: PartitionLag) -> str:
    return row.run_id or row.failed_run


def _cell(value: int | None) -> int | str:
    return "" if value is None else value


# Gaps and holds


def build_history_checks(
    offsets: dg.AssetKey, group: dg.AssetKey, kafka_key: str
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of the recorded commits and holds of a group."""

    def no_offset_gap(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return gap_result(context.instance, offsets, group)

    def drained_before_release(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return drained_today(context.instance, group)

    return [
        group_check(
            GAP_CHECK,
            offsets,
            kafka_key,
            "Fails if no commit covers some offsets between two recorded commits: they may not "
            "have been processed.",
            no_offset_gap,
        ),
        group_check(
            DRAINED_CHECK,
            group,
            kafka_key,
            "Warns if, in the last day, a partition was released before its runs had ended. The "
            "next owner continues their work.",
            drained_before_release,
        ),
    ]


def gap_result(
    instance: dg.DagsterInstance,
    offsets: dg.AssetKey,
    group: dg.AssetKey,
    of: TopicPartition | None = None,
) -> dg.AssetCheckResult:
    """Return whether the newest recorded commits of each partition are contiguous.

    Args:
        instance: The instance with the records.
        offsets: The offsets asset of the group.
        group: The group asset, which records the offsets that operators have skipped.
        of: A partition whose own last commits are read as well: it may have been idle while the
            newest commits of the group were all of other partitions.
    """
    newest = [*instance.fetch_materializations(offsets, limit=_COMMITS_READ).records]
    if of is not None:
        its_own = dg.AssetRecordsFilter(offsets, asset_partitions=[str(of)])
        newest += instance.fetch_materializations(its_own, limit=_COMMITS_READ_OF_PARTITION).records
    records = sorted({one.storage_id: one for one in newest}.values(), key=lambda r: r.storage_id)
    commits = [commit for record in records if (commit := _recorded(record)) is not None]
    missing = gaps(commits)
    if missing:  # skipped offsets lie between commits, and are read only when needed
        missing = gaps(commits, skips_of(instance, group, min(r.timestamp for r in records)))
    texts = [str(gap) for gap in missing[:_GAPS_SHOWN]]
    if len(missing) > _GAPS_SHOWN:
        texts.append(f"and {len(missing) - _GAPS_SHOWN} more")
    advice = (
        ". The committed offset was moved forward, or offsets were deleted before they were "
        "processed: docs/operating.md describes how to process them"
    )
    return dg.AssetCheckResult(
        passed=not missing,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(texts) + advice
        if missing
        else f"no gap; recorded commits compared: {len(commits)}",
        metadata={
            "gaps": len(missing),
            "missing_offsets": sum(len(gap.range) for gap in missing),
            "commits": len(commits),
            **run_links(run for gap in missing for run in (gap.before.run_id, gap.after.run_id)),
        },
    )


def _recorded(record: dg.EventLogRecord) -> Recorded | None:
    """Return the commit in a materialization; None if the catalogue did not report it."""
    event = record.asset_materialization
    if event is None or event.partition is None:
        return None
    partition = next(iter(parse_partitions([event.partition])), None)
    start, until, run_id = (
        None if (value := event.metadata.get(name)) is None else value.value
        for name in ("start", "until", "run")
    )
    if partition is None or not (isinstance(start, int) and isinstance(until, int)):
        return None
    try:
        range_ = OffsetRange(partition.topic, partition.partition, start, until)
        return Recorded(range_, str(run_id))
    except ValueError:  # anyone may report to the asset
        return None


def drained_today(instance: dg.DagsterInstance, group: dg.AssetKey) -> dg.AssetCheckResult:
    """Return whether the holds of the last day drained, from the records of a group asset."""
    now = time.time()
    history, since = records_since(instance, group, now - _DAY_S, _EVENTS_READ)
    return drained_result(history, now, since)


def drained_result(
    history: Iterable[MemberRecord], now: float, since: float = 0.0
) -> dg.AssetCheckResult:
    """Return whether each hold of the last day drained before its partitions were released.

    Args:
        history: The recorded events of the members.
        now: The time, in seconds since 1970.
        since: The time from which the history is complete.
    """
    holds = [hold for hold in history if hold.kind is Kind.HOLD and now - hold.at <= _DAY_S]
    bad = [hold for hold in holds if hold.outcome in _UNDRAINED]
    texts = [f"{hold.name}: {hold.text}" for hold in reversed(bad[-_GAPS_SHOWN:])]
    if len(bad) > _GAPS_SHOWN:
        texts.append(f"and {len(bad) - _GAPS_SHOWN} more")
    when = "of the last day" if now - since >= _DAY_S else f"since {utc(since)}"
    return dg.AssetCheckResult(
        passed=not bad,
        # Nothing is lost: the next owner works on the remaining claims.
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(texts) or f"holds {when}: {len(holds)}, all drained",
        metadata={
            "holds": len(holds),
            "not_drained": len(bad),
            **run_links(run_id for hold in reversed(bad) for run_id in hold.run_ids),
        },
    )

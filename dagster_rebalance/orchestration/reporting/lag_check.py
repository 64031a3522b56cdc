"""The lag of a group in Dagster: observations of an asset without partitions, and a check of it.

A member reports both (`group_report`). Executed by hand, the check looks at Kafka itself, so that
it also answers while no member is there.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

import textwrap
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.reporting.lag import GroupLag, LagLimit, PartitionLag
from dagster_rebalance.orchestration.ports import GroupRecords
from dagster_rebalance.orchestration.reporting.check_helpers import as_evaluation, group_check
from dagster_rebalance.orchestration.reporting.group_scan import (
    lag_of,
    late_partitions,
    look_by_hand,
)
from dagster_rebalance.orchestration.reporting.run_links import run_links
from dagster_rebalance.orchestration.runs.queries import RunLedger

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

LAG_CHECK = "lag_within"
_ROWS_SHOWN = 20
"""An observation stays small, however many partitions the group has: Dagster stores each one."""
_STATE_SHOWN = 100
_TABLE = dg.TableSchema(
    columns=[
        dg.TableColumn("partition", "string"),
        dg.TableColumn("lag", "int", description="Empty when it is not known."),
        dg.TableColumn("state", "string", description="Why it stands still."),
        dg.TableColumn("run", "string", description="What works on it, or has failed on it."),
        dg.TableColumn("committed", "int", description="The next offset to be read."),
        dg.TableColumn("end", "int", description="Of the log, or where a transaction is open."),
    ]
)


def observation(lag: GroupLag, asset_key: dg.AssetKey) -> dg.AssetObservation:
    """The lag, as a member reports it."""
    return dg.AssetObservation(asset_key, description=str(lag), metadata=_metadata(lag))


def evaluation(lag: GroupLag, limit: LagLimit, asset_key: dg.AssetKey) -> dg.AssetCheckEvaluation:
    """The state of the check, as a member reports it."""
    return as_evaluation(_result(lag, limit), LAG_CHECK, asset_key)


def build_lag_check(
    asset_key: dg.AssetKey,
    kafka_key: str,
    limit: LagLimit,
    catalogue_of: Callable[[dg.DagsterInstance], GroupRecords],
) -> dg.AssetChecksDefinition:
    """Build the check for the lag asset of a group.

    Args:
        asset_key: The asset.
        kafka_key: The resource key of the group's `KafkaConsumerResource`.
        limit: When it fails.
        catalogue_of: What an instance has recorded of the group.
    """

    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        settings = kafka.engine_settings()
        ledger = RunLedger(context.instance, kafka.group_id)
        with kafka.connect() as consumer:
            look, standing = look_by_hand(
                consumer, kafka.topics, ledger, catalogue_of(context.instance), settings
            )
            rows = lag_of(look, standing, settings).partitions
            late = late_partitions(consumer, rows, limit, now_s=time.time())
        return _result(lag_of(look, standing, settings, late), limit)

    return group_check(
        LAG_CHECK, asset_key, kafka_key, "Fails while more waits than is allowed.", check
    )


def _result(lag: GroupLag, limit: LagLimit) -> dg.AssetCheckResult:
    problems = limit.exceeded(lag)
    return dg.AssetCheckResult(
        passed=not problems,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join((*problems, str(lag))),
        metadata=_metadata(lag),
    )


def _metadata(lag: GroupLag) -> Mapping[str, Any]:
    """Numbers are what Dagster plots over time, so there are none that do not belong there."""
    shown = lag.partitions[:_ROWS_SHOWN]
    metadata: dict[str, Any] = {
        "lag": lag.total,
        "lag_max": lag.most,
        "partitions": len(lag.partitions),
        "stopped_partitions": lag.stopped,
        "paused_partitions": lag.paused,
        "unknown_partitions": len(lag.unknown),
        "missing_topics": len(lag.missing),
        "largest": dg.MetadataValue.table([_record(row) for row in shown], _TABLE),
    }
    if len(lag.partitions) > len(shown):
        metadata["not_in_table"] = f"{len(lag.partitions) - len(shown)} partitions with less lag"
    return {**metadata, **run_links(run_id for row in shown if (run_id := _run(row)))}


def _record(row: PartitionLag) -> dg.TableRecord:
    return dg.TableRecord(
        {
            "partition": str(row.partition),
            "lag": _cell(row.lag),
            "state": textwrap.shorten(row.state, _STATE_SHOWN, placeholder=" ..."),
            "run": _run(row)[:8],
            "committed": _cell(row.committed),
            "end": _cell(row.end),
        }
    )


def _run(row: PartitionLag) -> str:
    return row.run_id or row.failed_run


def _cell(value: int | None) -> int | str:
    return "" if value is None else value

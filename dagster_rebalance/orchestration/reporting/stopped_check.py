"""The asset check that fails while a partition is stopped, and warns while people pause one.

A member reports it whenever it stops a partition, lets one go on, or is assigned some: its own
partitions as it knows them, those of others as Kafka and the runs show them, or as the check had
them before: some reasons only the owner of a partition knows. Executed by hand, it looks at Kafka
and the runs alone, so that it also answers while no member is there.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.directives import how_to_resume, selector_of
from dagster_rebalance.core.model.offsets import TopicPartition, named, partitions_named
from dagster_rebalance.core.reporting.lag import GroupState, why_missing
from dagster_rebalance.orchestration.ports import GroupRecords, RunError, ShownStops
from dagster_rebalance.orchestration.reporting.check_helpers import (
    as_evaluation,
    group_check,
    last_evaluation,
)
from dagster_rebalance.orchestration.reporting.group_scan import errors_of, look_by_hand
from dagster_rebalance.orchestration.reporting.run_links import run_links
from dagster_rebalance.orchestration.runs.queries import RunLedger

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

STOPPED_CHECK = "no_partition_stopped"
_TABLE = dg.TableSchema(
    columns=[
        dg.TableColumn("partition", "string"),
        dg.TableColumn("reason", "string", description="Why it is stopped, and what to do."),
        dg.TableColumn(
            "said_by",
            "string",
            description="Its owner, or a look of another member, or of a person, at the group.",
        ),
    ]
)
_OWNER, _LOOK = "owner", "look"
_REASONS_SHOWN = 20
_REASONS_TOLD = 3
"""Each tick is stored, and has the reasons again."""
_COMMANDED = 4
"""A command with more partitions is no help."""
_MOST_ERROR_CHARACTERS = 500
_MOST_NAMES_CHARACTERS = 2_000
"""However many partitions are stopped, an evaluation stays small: Dagster stores each one."""


def evaluation(
    standing: GroupState, errors: Mapping[TopicPartition, RunError], asset_key: dg.AssetKey
) -> dg.AssetCheckEvaluation:
    """The state of the check, as a member reports it."""
    return as_evaluation(_result(standing, errors), STOPPED_CHECK, asset_key)


def shown_in(said: Mapping[str, dg.MetadataValue]) -> ShownStops:
    """What an evaluation of the check shows as stopped, by its metadata."""
    table, count = said.get("stopped"), said.get("stopped_partitions")
    records = table.records if isinstance(table, dg.TableMetadataValue) else []
    rows = {
        partition: record.data
        for record in records
        for partition in partitions_named([record.data.get("partition")])
    }
    partitions = count.value if isinstance(count, dg.IntMetadataValue) else None
    return ShownStops(
        {partition: str(row.get("reason")) for partition, row in rows.items()},
        partitions or 0,
        frozenset(partition for partition, row in rows.items() if row.get("said_by") == _OWNER),
    )


def shown_stops(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> ShownStops:
    """What the check shows as stopped now, whoever has shown it."""
    last = last_evaluation(instance, STOPPED_CHECK, asset_key)
    return shown_in({} if last is None else last.metadata)


def notes_on_stops(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> tuple[str, ...]:
    """What a tick says of the partitions that the check shows as stopped."""
    shown = shown_stops(instance, asset_key)
    reasons = [reason for _, reason in sorted(shown.reasons.items())[:_REASONS_TOLD]]
    more = shown.partitions - len(reasons)
    return (*reasons, f"and {more} more partitions are stopped") if more > 0 else (*reasons,)


def build_stopped_check(
    asset_key: dg.AssetKey,
    kafka_key: str,
    catalogue_of: Callable[[dg.DagsterInstance], GroupRecords],
) -> dg.AssetChecksDefinition:
    """Build the check for the offsets asset of a group.

    Args:
        asset_key: The asset.
        kafka_key: The resource key of the group's `KafkaConsumerResource`.
        catalogue_of: What an instance has recorded of the group.
    """

    def no_partition_stopped(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        ledger = RunLedger(context.instance, kafka.group_id)
        with kafka.connect() as consumer:
            _, standing = look_by_hand(
                consumer,
                kafka.topics,
                ledger,
                catalogue_of(context.instance),
                kafka.engine_settings(),
            )
        return _result(standing, errors_of(standing, ledger))

    return group_check(
        STOPPED_CHECK,
        asset_key,
        kafka_key,
        "Fails while a partition is stopped, and warns while a person has paused one. It says why.",
        no_partition_stopped,
    )


def _result(standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> dg.AssetCheckResult:
    """Return the result of the check, which only warns of partitions that people have paused.

    Whoever pauses knows of it, so it must page nobody.
    """
    stopped, ordered, missing = standing.stopped, standing.ordered, standing.missing
    reasons = dict(sorted(stopped.items())[:_REASONS_SHOWN])
    shown = [*map(why_missing, missing[:_REASONS_SHOWN]), *reasons.values()]
    if len(stopped) > len(reasons):
        shown.append(f"and {len(stopped) - len(reasons)} more")
    for why in list(dict.fromkeys(ordered.values()))[:_REASONS_SHOWN]:
        those = [partition for partition, said in ordered.items() if said == why]
        shown.append(f"{_names(those)}: {why}; {_to_go_on(those)}")
    return dg.AssetCheckResult(
        passed=not (stopped or missing or ordered),
        severity=(
            dg.AssetCheckSeverity.ERROR if stopped or missing else dg.AssetCheckSeverity.WARN
        ),
        description="; ".join(shown) or "every partition goes on",
        metadata={
            "stopped": dg.MetadataValue.table(
                [
                    dg.TableRecord(
                        {
                            "partition": str(partition),
                            "reason": reason,
                            "said_by": _OWNER if partition in standing.reported else _LOOK,
                        }
                    )
                    for partition, reason in reasons.items()
                ],
                _TABLE,
            ),
            "stopped_partitions": len(stopped),
            "partitions": dg.MetadataValue.text(_names(stopped)),
            "paused_partitions": len(ordered),
            "missing_topics": len(missing),
            **{f"error of {p}": _error(found.error) for p, found in errors.items()},
            **run_links(found.run_id for found in errors.values()),
        },
    )


def _to_go_on(paused: Collection[TopicPartition]) -> str:
    if len(paused) > _COMMANDED:
        return "to go on, name them to `dagster-rebalance resume`"
    return f"to go on: `{how_to_resume(*map(selector_of, sorted(paused)))}`"


def _error(text: str) -> str:
    return textwrap.shorten(text, _MOST_ERROR_CHARACTERS, placeholder=" ...")


def _names(partitions: Iterable[TopicPartition]) -> str:
    return textwrap.shorten(named(partitions), _MOST_NAMES_CHARACTERS, placeholder=" ...")

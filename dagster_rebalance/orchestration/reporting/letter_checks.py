"""The open dead letters of a group in Dagster: the observations of an asset, and its check.

A member reports both (`orchestration.member.letter_report`). If you execute the check manually, it
reads the whole topic, and needs no running member.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.reporting.open_letters import OpenLetters
from dagster_rebalance.orchestration.reporting.checks import group_check
from dagster_rebalance.orchestration.resources.letter_topic import NewLetters

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

LETTERS_CHECK = "no_open_letters"
_TABLE = dg.TableSchema(
    columns=[
        dg.TableColumn("partition", "string"),
        dg.TableColumn("kind", "string", description="record or range."),
        dg.TableColumn("letters", "int"),
        dg.TableColumn("reason", "string", description="With # for each number."),
    ]
)
_ADVICE = (
    "`dagster-rebalance letters list` shows them; replay them after a fix, or discard them with a "
    "reason"
)


def letters_observation(letters: OpenLetters, asset_key: dg.AssetKey) -> dg.AssetObservation:
    """Return the observation that a member reports."""
    return dg.AssetObservation(asset_key, description=str(letters), metadata=_metadata(letters))


def letters_result(letters: OpenLetters) -> dg.AssetCheckResult:
    """Return the result of the check."""
    return dg.AssetCheckResult(
        passed=not letters.letters,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{letters}. {_ADVICE}" if letters.letters else str(letters),
        metadata=_metadata(letters),
    )


def build_letters_check(asset_key: dg.AssetKey, kafka_key: str) -> dg.AssetChecksDefinition:
    """Build the check that fails while a dead letter is open."""

    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        with NewLetters(kafka) as letters:
            return letters_result(letters.read())

    return group_check(
        LETTERS_CHECK,
        asset_key,
        kafka_key,
        "Fails while a dead letter is neither replayed nor discarded.",
        check,
    )


def _metadata(letters: OpenLetters) -> dict[str, Any]:
    records = [
        dg.TableRecord(
            {
                "partition": str(row.partition),
                "kind": row.kind.value,
                "letters": row.letters,
                "reason": row.reason,
            }
        )
        for row in letters.rows
    ]
    return {
        "open_letters": letters.letters,
        "closed_letters": letters.closed,
        "topic": letters.topic,
        "largest": dg.MetadataValue.table(records, _TABLE),
        "more_rows": letters.more,
        "other_records": letters.malformed,
    }

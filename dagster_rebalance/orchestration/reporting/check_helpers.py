"""How the checks of a group are built: a person can execute each one while no member is there."""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a check.

import hashlib
import json
from collections.abc import Callable

import dagster as dg


def group_check(
    name: str,
    asset_key: dg.AssetKey,
    kafka_key: str,
    description: str,
    execute: Callable[[dg.AssetCheckExecutionContext], dg.AssetCheckResult],
) -> dg.AssetChecksDefinition:
    """Build a check of an asset of a group.

    Args:
        name: The name of the check.
        asset_key: The asset.
        kafka_key: The resource key of the group's `KafkaConsumerResource`.
        description: What it checks.
        execute: The check.
    """
    spec = dg.AssetCheckSpec(name, asset=asset_key, description=description)

    # `asset_check` would name its op by the key with dots and dashes taken away, so that the groups
    # `a.b` and `a-b` could not be together.
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
    """The newest evaluation of a check, whoever has made it; None when there is none."""
    key = dg.AssetCheckKey(asset_key, name)
    record = instance.get_latest_asset_check_evaluation_record(key)
    return None if record is None else record.evaluation


def as_evaluation(
    result: dg.AssetCheckResult, name: str, asset_key: dg.AssetKey
) -> dg.AssetCheckEvaluation:
    """The state of a check, as a member reports it."""
    return dg.AssetCheckEvaluation(
        asset_key=asset_key,
        check_name=name,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )

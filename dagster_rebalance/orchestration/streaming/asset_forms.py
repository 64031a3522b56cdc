"""The forms of assets that the definitions accept, and the reasons to refuse others.

Each refusal names the asset and an alternative. `test_asset_table.py` covers every form that
Dagster documents, and generates the table in docs/assets.md.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CONCURRENCY_TAG = "dagster/concurrency_key"
"""The op tag by which Dagster assigned pools before it had the argument `pool`."""
_IO_MANAGER_KEY = dg.Out().io_manager_key
_CONTAINERS = (list, tuple, Union)


def check_makes_assets(name: str, assets: Iterable[object]) -> None:
    """Check that each definition materializes its own assets, in either form of run.

    Raises:
        ConfigurationError: A definition is no asset, is a check, is never materialized, or repeats
            the asset of another one.
    """
    made: dict[str, dg.AssetKey] = {}
    for asset in assets:
        if isinstance(asset, dg.AssetChecksDefinition):
            checks = ", ".join(sorted(spec.name for spec in asset.check_specs))
            msg = (
                f"assets of {name} has the asset check {checks}, which takes no batch: declare it "
                "in check_specs of its asset, or give it to dg.Definitions(asset_checks=[...]) "
                "with a job for dg.AssetSelection.checks(...)"
            )
            raise ConfigurationError(msg)
        if isinstance(asset, dg.AssetSpec | dg.SourceAsset):
            raise _not_materialized(name, asset.key.to_user_string())
        if not isinstance(asset, dg.AssetsDefinition):
            msg = (
                f"assets of {name} has {asset!r}, which is no asset that processes a batch: give "
                "what @dg.asset or another decorator of assets makes of a function"
            )
            raise ConfigurationError(msg)
        if not asset.is_materializable:
            raise _not_materialized(name, name_of(asset))
        for key in asset.keys:
            _check_is_new(name, key, made)


def _check_is_new(name: str, key: dg.AssetKey, made: dict[str, dg.AssetKey]) -> None:
    """Check that no earlier definition has this key, or a key with the same op name."""
    identifier = key.to_python_identifier()
    other = made.get(identifier)
    made[identifier] = key
    if other is not None:
        shown = " and ".join(dict.fromkeys(one.to_user_string() for one in (other, key)))
        msg = (
            f"assets of {name} has two definitions of {shown}: Dagster needs one for each asset, "
            "and makes one name of a key with / and of one with __. Remove one, or give it "
            "another key"
        )
        raise ConfigurationError(msg)


def _not_materialized(name: str, shown: str) -> ConfigurationError:
    return ConfigurationError(
        f"assets of {name} has the external asset {shown}, which no batch materializes: give it to "
        "dg.Definitions(assets=[...]) beside these definitions, and name it in the deps of the "
        "asset that reads it"
    )


def name_of(asset: dg.AssetsDefinition) -> str:
    """Return the keys of an asset as a text."""
    return ", ".join(sorted(key.to_user_string() for key in asset.keys))


def check_streamed(asset: dg.AssetsDefinition, batch_key: str) -> Callable[..., Any]:
    """Return the function of an asset if it can be called for each batch of a run.

    Raises:
        ConfigurationError: It cannot be called.
    """
    function = _function_of(asset)
    if function is None:
        raise refused(
            asset,
            "is not made by one decorated function (@dg.asset, @dg.multi_asset): call the "
            "functions of its ops in one asset, or use build_kafka_batch_defs",
        )
    for why in _whys(asset):
        raise refused(asset, why)
    if batch_key not in {*parameters_of(asset), *asset.op.required_resource_keys}:
        raise refused(
            asset, f"does not take the batch: give it a parameter `{batch_key}: KafkaBatch`"
        )
    for parameter in parameters_of(asset):
        if parameter != batch_key and parameter not in resource_parameters(asset):
            raise refused(
                asset,
                f"takes {parameter!r}, which is neither a resource nor the batch: read what "
                "another asset has written from where it is stored, and name that asset in deps",
            )
    return function


def has_context(asset: dg.AssetsDefinition) -> bool:
    """Whether the function takes the context as its first argument."""
    return bool(_compute(asset).has_context_arg())


def takes_op_context(asset: dg.AssetsDefinition) -> bool:
    """Whether the function takes an `OpExecutionContext`."""
    return has_context(asset) and _compute(asset).get_context_arg().annotation in {
        dg.OpExecutionContext,
        dg.OpExecutionContext.__name__,
        f"dg.{dg.OpExecutionContext.__name__}",
    }


def parameters_of(asset: dg.AssetsDefinition) -> list[str]:
    """Return the parameters of the function, without the context."""
    named = list(inspect.signature(_compute(asset).decorated_fn).parameters)
    return named[int(has_context(asset)) :]


def resource_parameters(asset: dg.AssetsDefinition) -> frozenset[str]:
    """Return the parameters that are resources."""
    return frozenset(parameter.name for parameter in _compute(asset).get_resource_args())


def refused(asset: dg.AssetsDefinition, why: str) -> ConfigurationError:
    """Return the refusal of an asset in streaming runs."""
    return ConfigurationError(
        f"asset {name_of(asset)} {why}. A streaming run calls the function of each asset once for "
        "each batch"
    )


def _function_of(asset: dg.AssetsDefinition) -> Callable[..., Any] | None:
    op = asset.node_def
    compute = _compute(asset) if isinstance(op, dg.OpDefinition) else None
    return getattr(compute, "decorated_fn", None)


def _compute(asset: dg.AssetsDefinition) -> Any:  # noqa: ANN401 - dagster exports no name for it
    return asset.op.compute_fn


def _whys(asset: dg.AssetsDefinition) -> Iterator[str]:
    if asset.op.pool or _CONCURRENCY_TAG in asset.op.tags:
        yield (
            "has a pool, which does not apply to batches: remove it, and limit the concurrency "
            "with the argument `runs`, such as runs=1"
        )
    if asset.op.retry_policy is not None:
        yield (
            "has a retry_policy, which does not apply to batches: remove it, and set "
            "`max_attempts` and `retry_delay_s` of the group"
        )
    if asset.hook_defs:
        yield (
            "has hooks, which no batch calls: remove them, and report failures in the body, or "
            "with an alert on the check `no_partition_stopped`"
        )
    if _takes_config(asset):
        yield (
            "takes run config, which no batch has: remove it, and give the asset a resource with "
            "these values"
        )
    yield from _stored_values(asset)


def _takes_config(asset: dg.AssetsDefinition) -> bool:
    field = asset.op.config_field
    if field is None:
        return False
    has_fields = bool(getattr(field.config_type, "fields", None))
    return field.is_required or has_fields or bool(_compute(asset).has_config_arg())


def _stored_values(asset: dg.AssetsDefinition) -> Iterator[str]:
    for output in asset.op.output_defs:
        kind = output.dagster_type
        if output.io_manager_key != _IO_MANAGER_KEY:
            yield (
                f"has the IO manager {output.io_manager_key!r}, which would get no value: write "
                "the output in the function and return dg.MaterializeResult, or use "
                "build_kafka_batch_defs"
            )
        if not kind.is_nothing and kind is not dg.Any and _holds_value(kind.typing_type):
            yield (
                f"returns a value ({kind.display_name}) for an IO manager, which would store one "
                "value for all batches of the run: write the output in the function and return "
                "dg.MaterializeResult, or use build_kafka_batch_defs"
            )


def _holds_value(annotation: object) -> bool:
    """Whether an annotation includes anything besides results, which Dagster shows as Any."""
    if annotation in {Any, object, type(None)}:
        return False
    origin = get_origin(annotation)
    return origin not in _CONTAINERS or any(map(_holds_value, get_args(annotation)))

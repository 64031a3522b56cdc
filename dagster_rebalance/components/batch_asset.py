"""The assets of a component: functions by their Python path, and attributes for them.

Owns what can be an asset. Attributes that cannot work on the asset of a batch (partitions,
automation) do not exist here.
"""

from types import FunctionType
from typing import Annotated, Any, Optional, TypeAlias

import dagster as dg
from pydantic import ConfigDict

from dagster_rebalance.components.python_path import found_at
from dagster_rebalance.components.settings import setting
from dagster_rebalance.core.model.errors import ConfigurationError

_MERGED = frozenset({"deps", "metadata", "owners", "tags", "kinds"})
"""Attributes that are added to those in the code; others take their place."""
_ADDED = "As of dg.AssetSpec; added to those in the code."
_IN_PLACE = "As of dg.AssetSpec, in place of that in the code."


def _code(context: dg.ResolutionContext, reference: str) -> object:
    """The function or asset that a Python path leads to.

    Raises:
        ConfigurationError: It leads to none.
    """
    found = found_at(context, reference)
    if not isinstance(found, dg.AssetsDefinition | FunctionType):
        msg = f"{reference} is a {type(found).__name__}: give a function or an @dg.asset"
        raise ConfigurationError(msg)
    return found


class BatchAsset(dg.Resolvable, dg.Model):
    """An asset of the component: its code, and attributes for it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    function: Annotated[
        Any,
        dg.Resolver(
            _code,
            model_field_type=str,
            description=(
                "The Python path of an @dg.asset, or of a function that could be one. With a dot "
                "before it, from the folder of this file: .module.function"
            ),
        ),
    ]
    key: Annotated[
        dg.ResolvedAssetKey | None,
        dg.Resolver.default(
            description="Of a plain function only. By default the name of the function."
        ),
    ] = None
    description: Annotated[str | None, setting(str | None, _IN_PLACE)] = None
    group_name: Annotated[str | None, setting(str | None, _IN_PLACE)] = None
    code_version: Annotated[str | None, setting(str | None, _IN_PLACE)] = None
    freshness_policy: Annotated[
        dg.FreshnessPolicy | None,
        dg.Resolver.default(
            model_field_type=Optional[str],  # noqa: UP045 - Dagster adds `| str`
            description="A template: {{ dg.FreshnessPolicy.cron(...) }}, for example.",
        ),
    ] = None
    deps: Annotated[list[dg.ResolvedAssetKey] | None, dg.Resolver.default(description=_ADDED)] = (
        None
    )
    metadata: Annotated[dict[str, Any] | None, dg.Resolver.default(description=_ADDED)] = None
    owners: Annotated[list[str] | None, setting(list[str] | None, _ADDED)] = None
    tags: Annotated[dict[str, str] | None, setting(dict[str, str] | None, _ADDED)] = None
    kinds: Annotated[list[str] | None, setting(list[str] | None, _ADDED)] = None

    def definition(self) -> dg.AssetsDefinition:
        """The asset.

        Raises:
            ConfigurationError: The key is given twice.
        """
        attributes = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in {"function", "key"} and getattr(self, name) is not None
        }
        if isinstance(self.function, dg.AssetsDefinition):
            if self.key is not None:
                msg = (
                    f"the key {self.key.to_user_string()} is given for what is an asset in the "
                    "code: give the key there"
                )
                raise ConfigurationError(msg)
            return _with(self.function, attributes)
        return _with(dg.asset(key=self.key)(self.function), attributes)


def _with(asset: dg.AssetsDefinition, attributes: dict[str, Any]) -> dg.AssetsDefinition:
    if not attributes:
        return asset
    merged = {name: value for name, value in attributes.items() if name in _MERGED}
    replaced = {name: value for name, value in attributes.items() if name not in _MERGED}
    return asset.map_asset_specs(
        lambda spec: spec.merge_attributes(**merged).replace_attributes(**replaced)
    )


def _batch_asset(context: dg.ResolutionContext, model: Any) -> dg.AssetsDefinition:
    if isinstance(model, str):
        model = BatchAsset.model()(function=model)
    asset: BatchAsset = BatchAsset.resolve_from_model(context, model)
    return asset.definition()


ResolvedBatchAsset: TypeAlias = Annotated[
    dg.AssetsDefinition,
    dg.Resolver(_batch_asset, model_field_type=str | BatchAsset.model()),
]
"""In YAML a path, or a path with attributes."""

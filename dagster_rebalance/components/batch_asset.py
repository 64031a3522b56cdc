"""The assets of a component: functions by their Python path, with asset attributes.

Attributes that an asset of a batch cannot have (partitions, automation) do not exist here.
"""

from importlib import import_module
from types import FunctionType
from typing import Annotated, Any, Optional, TypeAlias

import dagster as dg
from pydantic import ConfigDict

from dagster_rebalance.components.yaml_settings import setting
from dagster_rebalance.core.model.errors import ConfigurationError

_MERGED = frozenset({"deps", "metadata", "owners", "tags", "kinds"})
"""Attributes that are added to those in the code; the others replace them."""
_ADDED = "As in dg.AssetSpec; added to those in the code."
_REPLACED = "As in dg.AssetSpec; replaces that in the code."


def import_object(context: dg.ResolutionContext, path: str) -> object:
    """Import package.module.name, or .module.name relative to the folder of the file.

    Raises:
        ConfigurationError: The path is invalid, or the module has no such name.
    """
    module, _, name = path.rpartition(".")
    if not module.strip(".") or not name.isidentifier():
        msg = (
            f"{path!r} is not the path of a function: write package.module.function, or "
            ".module.function for a module in the folder of this file"
        )
        raise ConfigurationError(msg)
    if module.startswith("."):
        load = dg.ComponentLoadContext.from_resolution_context(context)
        module = load.defs_relative_module_name(load.path) + module
    value = getattr(import_module(module), name, None)
    if value is None:
        msg = f"the module {module} has no {name!r}"
        raise ConfigurationError(msg)
    return value


def _import_asset(context: dg.ResolutionContext, path: str) -> object:
    value = import_object(context, path)
    if not isinstance(value, dg.AssetsDefinition | FunctionType):
        msg = f"{path} is a {type(value).__name__}: give a function or an @dg.asset"
        raise ConfigurationError(msg)
    return value


class BatchAsset(dg.Resolvable, dg.Model):
    """An asset of the component: its code and its attributes."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    function: Annotated[
        Any,
        dg.Resolver(
            _import_asset,
            model_field_type=str,
            description=(
                "The Python path of an @dg.asset, or of a function to make one of. A leading dot "
                "makes it relative to the folder of this file: .module.function"
            ),
        ),
    ]
    key: Annotated[
        dg.ResolvedAssetKey | None,
        dg.Resolver.default(
            description="For a plain function only. By default the function's name."
        ),
    ] = None
    description: Annotated[str | None, setting(str | None, _REPLACED)] = None
    group_name: Annotated[str | None, setting(str | None, _REPLACED)] = None
    code_version: Annotated[str | None, setting(str | None, _REPLACED)] = None
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
        """Return the asset.

        Raises:
            ConfigurationError: The key is also set in the code.
        """
        attributes = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in {"function", "key"} and getattr(self, name) is not None
        }
        if isinstance(self.function, dg.AssetsDefinition):
            if self.key is not None:
                msg = (
                    f"the key {self.key.to_user_string()} is given for an @dg.asset: set the key "
                    "in the code"
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
"""In YAML, a path or a block with attributes."""

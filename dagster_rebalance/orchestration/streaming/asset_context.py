"""The contexts that the functions of assets receive in a streaming run.

All assets of the run are one step of Dagster. These contexts describe one asset, and keep what it
adds for one batch; run, log, instance, resources and event loop are those of the step. Dagster's
direct invocation does not fit: its context has no run, logs to the console, and refuses
`add_asset_metadata`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet


class Resources:
    """The resources of the run, with those of the batch in place of some."""

    def __init__(self, of_run: Any, given: Mapping[str, object]) -> None:  # noqa: ANN401 - Dagster makes a class for each step
        self._of_run = of_run
        self._given = given

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any kind
        return self._given[name] if name in self._given else getattr(self._of_run, name)

    @property
    def original_resource_dict(self) -> Mapping[str, object]:
        """The resources themselves, where the context holds another object."""
        return {**self._of_run.original_resource_dict, **self._given}


class OpContextOfAsset(dg.OpExecutionContext):
    """The context of an asset whose function takes an `OpExecutionContext`."""

    def __init__(
        self,
        step: dg.OpExecutionContext,
        asset: dg.AssetsDefinition,
        given: Mapping[str, object],
    ) -> None:
        super().__init__(step.get_step_execution_context())
        self._asset = asset
        self._resources = Resources(step.resources, given)
        self._added: dict[dg.AssetKey, dict[str, Any]] = {}
        self._versions: dict[dg.AssetKey, dg.DataVersion] = {}
        self._needs_results = False
        self._missing_results: str | None = None

    # Additions of the asset

    def metadata_of(self, key: dg.AssetKey) -> Mapping[str, Any]:
        """Return the metadata that was added to one asset."""
        return self._added.get(key, {})

    def data_version_of(self, key: dg.AssetKey) -> dg.DataVersion | None:
        """Return the data version that was set for one asset."""
        return self._versions.get(key)

    def add_to_asset(self, key: dg.AssetKey | None, metadata: Mapping[str, Any]) -> None:
        """Add metadata to an asset. `key` is optional if there is only one."""
        if key is None and len(self._asset.keys) > 1:
            msg = f"{self._shown()} makes several assets: name the one that the metadata is for"
            raise ConfigurationError(msg)
        known = key or self._asset.key
        if known not in self._asset.keys:
            msg = f"{self._shown()} does not make the asset {known.to_user_string()}"
            raise ConfigurationError(msg)
        self._added.setdefault(known, {}).update(metadata)

    def add_output_metadata(
        self,
        metadata: Mapping[str, Any],
        output_name: str | None = None,
        mapping_key: str | None = None,  # noqa: ARG002 - an asset has no dynamic output
    ) -> None:
        """Add metadata to the materialization of an output."""
        key = None if output_name is None else self.asset_key_for_output(output_name)
        self.add_to_asset(key, metadata)

    def get_output_metadata(
        self,
        output_name: str,
        mapping_key: str | None = None,  # noqa: ARG002 - as above
    ) -> Mapping[str, Any] | None:
        """Return the metadata that was added to an output."""
        return self.metadata_of(self.asset_key_for_output(output_name)) or None

    def set_data_version(self, asset_key: dg.AssetKey, data_version: dg.DataVersion) -> None:
        """Set the data version of the materialization."""
        self._versions[asset_key] = data_version

    @property
    def requires_typed_event_stream(self) -> bool:
        """Whether the function must return or yield a result for each asset."""
        return self._needs_results

    @property
    def typed_event_stream_error_message(self) -> str | None:
        """The advice for a missing result."""
        return self._missing_results

    def set_requires_typed_event_stream(self, *, error_message: str | None = None) -> None:
        """Require a result for each asset, as a Pipes session does."""
        self._needs_results, self._missing_results = True, error_message

    # The asset

    @property
    def resources(self) -> Resources:
        """The resources of the run, and the batch."""
        return self._resources

    @property
    def op_def(self) -> dg.OpDefinition:
        """The op of the asset."""
        return self._asset.op

    @property
    def op_config(self) -> None:
        """None: a batch has no run config."""
        return

    @property
    def has_assets_def(self) -> bool:
        """True for an asset."""
        return True

    @property
    def assets_def(self) -> dg.AssetsDefinition:
        """The definition of the asset."""
        return self._asset

    @property
    def selected_output_names(self) -> AbstractSet[str]:
        """All outputs: a batch is always processed by whole assets."""
        return {output.name for output in self._asset.op.output_defs}

    def asset_key_for_output(self, output_name: str = "result") -> dg.AssetKey:
        """Return the asset of an output."""
        found = self._asset.keys_by_output_name.get(output_name)
        if found is None:
            names = ", ".join(self._asset.keys_by_output_name)
            msg = f"{self._shown()} has no output {output_name!r}: its outputs are {names}"
            raise ConfigurationError(msg)
        return found

    def output_for_asset_key(self, asset_key: dg.AssetKey) -> str:
        """Return the output of an asset."""
        return self._asset.get_output_name_for_asset_key(asset_key)

    def asset_key_for_input(self, input_name: str) -> dg.AssetKey:
        """Return the asset of an input."""
        return self._asset.keys_by_input_name[input_name]

    def _shown(self) -> str:
        return ", ".join(sorted(key.to_user_string() for key in self._asset.keys))


class ContextOfAsset(dg.AssetExecutionContext):
    """The context of an asset."""

    def __init__(self, op_context: OpContextOfAsset) -> None:
        super().__init__(op_context)
        self._of_asset = op_context

    def add_asset_metadata(
        self,
        metadata: Mapping[str, Any],
        asset_key: dg.AssetKey | str | list[str] | tuple[str, ...] | None = None,  # type: ignore[override] # Dagster exports no name for what can be a key
        partition_key: str | None = None,
    ) -> None:
        """Add metadata to the materialization of an asset."""
        if partition_key is not None:
            msg = "an asset of a streaming run has no partitions: leave partition_key out"
            raise ConfigurationError(msg)
        key = None if asset_key is None else dg.AssetKey.from_coercible(asset_key)
        self._of_asset.add_to_asset(key, metadata)

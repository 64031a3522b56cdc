"""The code and the inputs of the materializations of a streaming run, as Dagster's tags.

Dagster writes these tags when a step stores an output, which a streaming run does once in its life.
It shows an asset as unsynced by them, and `AutomationCondition.data_version_changed()` fires.
"""

from __future__ import annotations

import time
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg

_CODE_VERSION = "dagster/code_version"
_DATA_VERSION = "dagster/data_version"
_IS_OF_USER = "dagster/data_version_is_user_provided"
_INPUT_VERSION = "dagster/input_data_version"
_INPUT_EVENT = "dagster/input_event_pointer"
_NEVER_RECORDED = ("INITIAL", "NULL")
"""Dagster's data version and event of an input without a record."""
_LOOK_S = 1.0
"""Maximum age of input versions. With many batches a second, reading them would cost more than a
batch. An outdated version shows the asset as unsynced until the next batch."""


class Provenance:
    """The tags of the materializations of one run.

    Args:
        instance: The instance with the records of the inputs.
        run_id: The run: the code version of assets without one, as in Dagster.
        specs: All assets of the run.
    """

    def __init__(
        self, instance: dg.DagsterInstance, run_id: str, specs: Iterable[dg.AssetSpec]
    ) -> None:
        self._instance = instance
        self._run_id = run_id
        self._specs = {spec.key: spec for spec in specs}
        self._inputs: dict[dg.AssetKey, tuple[str, str]] = {}
        self._looked_at = 0.0
        self._made: dict[dg.AssetKey, tuple[str, str]] = {}

    def look(self) -> None:
        """Read the versions of the inputs of a batch, before its assets are called."""
        if self._inputs and time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        outside = {
            dep.asset_key
            for spec in self._specs.values()
            for dep in spec.deps
            if dep.asset_key not in self._made
        }
        self._inputs = {key: self._recorded(key) for key in outside}

    def tags(
        self, key: dg.AssetKey, version: dg.DataVersion | None, batch_id: str
    ) -> dict[str, str]:
        """Return the tags of a materialization.

        Args:
            key: The asset.
            version: The data version from its function.
            batch_id: The batch. No asset represents its records, so the id is part of the version.
        """
        spec = self._specs[key]
        code = spec.code_version or self._run_id
        inputs = {dep.asset_key: self._input(dep.asset_key) for dep in spec.deps}
        texts = [code, batch_id, *(inputs[one][0] for one in sorted(inputs))]
        made = version.value if version else sha256("".join(texts).encode()).hexdigest()
        self._made[key] = (made, _NEVER_RECORDED[1])
        return {
            _CODE_VERSION: code,
            _DATA_VERSION: made,
            **({_IS_OF_USER: "true"} if version else {}),
            **{f"{_INPUT_VERSION}/{one.to_user_string()}": inputs[one][0] for one in inputs},
            **{f"{_INPUT_EVENT}/{one.to_user_string()}": inputs[one][1] for one in inputs},
        }

    def _input(self, key: dg.AssetKey) -> tuple[str, str]:
        return self._made.get(key) or self._inputs.get(key, _NEVER_RECORDED)

    def _recorded(self, key: dg.AssetKey) -> tuple[str, str]:
        record = self._instance.get_latest_data_version_record(key)
        if record is None:
            return _NEVER_RECORDED
        tags = record.event_log_entry.tags or {}
        return tags.get(_DATA_VERSION, _NEVER_RECORDED[0]), str(record.storage_id)

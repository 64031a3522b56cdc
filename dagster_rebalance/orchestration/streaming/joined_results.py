"""The results of several batches for one asset, as one materialization.

Metadata that the asset declares as sums is added up, and so are the offsets; without a declaration,
Dagster's row count is. Everything else, the data version included, is that of the newest batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.reporting.joined_ranges import JoinedRanges
from dagster_rebalance.core.runs.stream_batch import number_of
from dagster_rebalance.orchestration.batch.validation import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dagster_rebalance.orchestration.batch.resource import KafkaBatch

SUMS_KEY = "dagster_rebalance/sums"
_ROW_COUNT = "dagster/row_count"
_PREFIX = "dagster_rebalance/"
_TEXTS = {"batch", "batches", "joined", "ranges"}
"""Metadata of a materialization that `explain` and reruns read."""
Number = int | float


def check_sums(asset: dg.AssetsDefinition) -> None:
    """Check the declared sums of an asset.

    Raises:
        ConfigurationError: They are no list of names, or the package uses one of the names.
    """
    for spec in asset.specs:
        names = _declared(spec)
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise refused(
                asset,
                f"has {SUMS_KEY} = {names!r} in its metadata: list the names of the numbers to "
                'add up, such as ["rows"]',
            )
        for name in names:
            if name in _TEXTS or name.startswith(_PREFIX):
                raise refused(
                    asset,
                    f"declares the sum {name!r}, which is the name of metadata that describes its "
                    "batches: give the number another name",
                )


def _declared(spec: dg.AssetSpec) -> object:
    found = spec.metadata.get(SUMS_KEY, [_ROW_COUNT])
    names: object = found.value if isinstance(found, dg.MetadataValue) else found
    return list(names) if isinstance(names, tuple) else names


class Result:
    """The result of an asset for one batch.

    Args:
        spec: The asset.
        batch: The batch.
        metadata: The metadata from the asset.
        tags: The tags of the materialization.

    Raises:
        ConfigurationError: Metadata that the asset declares as a sum is no number.
    """

    def __init__(
        self,
        spec: dg.AssetSpec,
        batch: KafkaBatch,
        metadata: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        own = batch.metadata()
        self.spec = spec
        self.batch = batch
        self.event = dg.AssetMaterialization(spec.key, metadata={**own, **metadata}, tags=tags)
        """The materialization of this batch alone."""
        of_batch = dg.AssetMaterialization(spec.key, metadata=own).metadata
        self.metadata = {
            name: value
            for name, value in self.event.metadata.items()
            if value != of_batch.get(name)
        }
        """The metadata from the asset, without the one that the batch has."""
        # A number of the asset may have the name and by chance the value of one of the batch.
        self.sums = dict(self._sums({name: self.event.metadata[name] for name in metadata}))

    def _sums(self, returned: Mapping[str, dg.MetadataValue]) -> Iterable[tuple[str, Number]]:
        names = _declared(self.spec)
        for name in names if isinstance(names, list) else []:
            found = returned.get(name)
            if found is None:
                continue
            if SUMS_KEY not in self.spec.metadata and not isinstance(found, dg.IntMetadataValue):
                continue
            if not isinstance(found, dg.IntMetadataValue | dg.FloatMetadataValue):
                msg = (
                    f"asset {self.spec.key.to_user_string()}: its metadata {name!r} is declared in "
                    f"{SUMS_KEY}, and is no number in this batch ({type(found).__name__}): return "
                    f"a number, or remove it from {SUMS_KEY}"
                )
                raise ConfigurationError(msg)
            yield name, found.value or 0


class JoinedResults:
    """The results of the batches that one materialization will show."""

    def __init__(self, first: Result) -> None:
        self._newest = first
        self._batches = 0
        self._set_aside = self._left_out = 0
        self._sums: dict[str, Number] = {}
        self.ranges = JoinedRanges()
        self.add(first)

    def add(self, result: Result) -> None:
        """Add the result of the next batch."""
        self._newest = result
        self._batches += 1
        self._set_aside += result.batch.set_aside_records
        self._left_out += result.batch.left_out_records
        self.ranges.add(result.batch.offset_ranges, number_of(result.batch.batch_id))
        for name, value in result.sums.items():
            self._sums[name] = self._sums.get(name, 0) + value

    @property
    def event(self) -> dg.AssetMaterialization:
        """The materialization."""
        newest = self._newest
        if self._batches == 1:
            return newest.event
        own: dict[str, Any] = {
            "batch": newest.batch.batch_id,
            "batches": self._batches,
            "ranges": dg.MetadataValue.md(str(self.ranges)),
            "joined": dg.MetadataValue.json({"ranges": self.ranges.packed()}),
            "offsets": self.ranges.offsets,
        }
        if self._set_aside:
            own["set_aside"] = self._set_aside
        if self._left_out:
            own["left_out"] = self._left_out
        return dg.AssetMaterialization(
            newest.spec.key,
            metadata={**own, **newest.metadata, **self._sums},
            tags=newest.event.tags,
        )

"""The results of an asset's function for one batch.

They are assigned to assets and checks by Dagster's rules, as far as these need no IO manager:
Dagster applies its own rules only within a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.streaming.asset_forms import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.orchestration.streaming.asset_context import OpContextOfAsset

Event = dg.AssetMaterialization | dg.AssetObservation | dg.ExpectationResult
Made = dg.MaterializeResult[Any] | dg.AssetCheckResult | Event

NO_VALUE = dg.MaterializeResult[Any]().value
"""The value of a result without a value. None is a value for the IO manager."""

_NO_NAME = dg.Output[None](None).output_name


def each_of(returned: object) -> Iterator[object]:
    """Yield the results in the return value of a function that is no generator."""
    is_named_tuple = hasattr(returned, "_fields")
    if isinstance(returned, list | tuple | Iterator) and not is_named_tuple:
        yield from returned
    elif returned is not None:
        yield returned


class Results:
    """The results of one function for one batch."""

    def __init__(self, asset: dg.AssetsDefinition, context: OpContextOfAsset) -> None:
        self._asset = asset
        self._context = context
        self._made: dict[dg.AssetKey, dg.MaterializeResult[Any]] = {}
        self._checks: list[dg.AssetCheckResult] = []
        self._events: list[Event] = []

    def take(self, said: Iterable[object]) -> Iterator[Made]:
        """Yield the results in the order of the assets, each with its checks.

        Raises:
            ConfigurationError: A result cannot be kept, is missing, or belongs to no asset or
                check.
        """
        for one in said:
            self._add(one)
        self._check_checks()
        yield from self._events
        for spec in self._asset.specs:
            result = self._made.get(spec.key) or self._implied(spec)
            if result is not None:
                yield self._complete(result, spec.key)
        yield from self._checks

    def _check_checks(self) -> None:
        """Require one result of each check: otherwise its last result would stay on show."""
        given = [*self._checks, *chain(*(one.check_results or () for one in self._made.values()))]
        times = Counter((check.asset_key, check.check_name) for check in given)
        optional = {out.name for out in self._asset.op.output_defs if not out.is_required}
        for spec in self._asset.check_specs:
            found = times[spec.asset_key, spec.name]
            if found == 1 or (not found and spec.get_python_identifier() in optional):
                continue
            msg = (
                f"{name_of(self._asset)} returned {found or 'no'} results of the check {spec.name} "
                f"of {spec.asset_key.to_user_string()}: return one dg.AssetCheckResult for each "
                "of its check_specs with each batch"
            )
            raise ConfigurationError(msg)

    def _add(self, one: object) -> None:
        if isinstance(one, Event):
            self._events.append(one)
        elif isinstance(one, dg.AssetCheckResult):
            self._checks.append(self._named(one, None))
        elif isinstance(one, dg.MaterializeResult):
            self._add_result(one)
        elif isinstance(one, dg.ObserveResult):
            self._add_result(
                dg.MaterializeResult(
                    asset_key=one.asset_key,
                    metadata=one.metadata,
                    data_version=one.data_version,
                    check_results=one.check_results,
                    tags=one.tags,
                )
            )
        elif isinstance(one, dg.Output):
            self._add_result(self._result_of(one))
        elif one is None:
            self._add_result(dg.MaterializeResult(asset_key=self._next_key()))
        else:
            self._refuse(f"a {type(one).__name__}")

    def _add_result(self, result: dg.MaterializeResult[Any]) -> None:
        if result.value is not NO_VALUE:
            self._refuse(f"a dg.{type(result).__name__} with a value")
        if result.asset_key is None and len(self._asset.keys) > 1:
            self._refuse("a result without asset_key, although it makes several assets")
        key = result.asset_key or self._asset.key
        if key not in self._asset.keys:
            self._refuse(f"a result for {key.to_user_string()}, which it does not make")
        if key in self._made:
            self._refuse(f"a second result for {key.to_user_string()}")
        checks = [self._named(check, key) for check in result.check_results or ()]
        self._made[key] = result._replace(asset_key=key, check_results=checks)

    def _result_of(self, output: dg.Output[Any]) -> dg.MaterializeResult[Any]:
        if output.value is not None:
            self._refuse("a dg.Output with a value")
        named = self._asset.keys_by_output_name.get(output.output_name)
        if named is None and output.output_name != _NO_NAME:
            self._refuse(f"the output {output.output_name}, which it does not have")
        return dg.MaterializeResult(
            asset_key=named or self._next_key(),
            metadata=output.metadata,
            data_version=output.data_version,
            tags=output.tags,
        )

    def _next_key(self) -> dg.AssetKey:
        """Return the asset of an unnamed result: tuples follow the order of the assets."""
        keys = list(self._asset.keys_by_output_name.values())
        if len(self._made) >= len(keys):
            self._refuse("more results than it has assets")
        return keys[len(self._made)]

    def _implied(self, spec: dg.AssetSpec) -> dg.MaterializeResult[Any] | None:
        """Return the result of an asset without a returned one."""
        if spec.skippable:
            return None
        if self._context.requires_typed_event_stream:
            hint = self._context.typed_event_stream_error_message or ""
            msg = f"{name_of(self._asset)} has no result for {spec.key.to_user_string()}. {hint}"
            raise ConfigurationError(msg.strip())
        return dg.MaterializeResult(asset_key=spec.key)

    def _complete(
        self, result: dg.MaterializeResult[Any], key: dg.AssetKey
    ) -> dg.MaterializeResult[Any]:
        """Add metadata and data version of the context, and the separate checks of the asset."""
        apart = [check for check in self._checks if check.asset_key == key]
        self._checks = [check for check in self._checks if check.asset_key != key]
        return result._replace(
            metadata={**(result.metadata or {}), **self._context.metadata_of(key)},
            data_version=result.data_version or self._context.data_version_of(key),
            check_results=[*(result.check_results or ()), *apart],
        )

    def _named(self, check: dg.AssetCheckResult, key: dg.AssetKey | None) -> dg.AssetCheckResult:
        """Complete the result of a check from check_specs, as Dagster does."""
        fitting = [
            spec
            for spec in self._asset.check_specs
            if check.asset_key in {None, spec.asset_key} and check.check_name in {None, spec.name}
        ]
        found = [spec for spec in fitting if spec.asset_key == key] or fitting
        if len(found) != 1:
            self._refuse_check(check)
        return check._replace(asset_key=found[0].asset_key, check_name=found[0].name)

    def _refuse_check(self, check: dg.AssetCheckResult) -> NoReturn:
        known = ", ".join(sorted(spec.name for spec in self._asset.check_specs)) or "none"
        msg = (
            f"{name_of(self._asset)} returned a result of a check "
            f"{check.check_name or 'without a name'}, which must be one of its check_specs "
            f"({known}): declare the check there, and name it in the result by check_name (and "
            "asset_key, where two assets have a check of that name)"
        )
        raise ConfigurationError(msg)

    def _refuse(self, what: str) -> NoReturn:
        msg = (
            f"{name_of(self._asset)} returned {what}: an asset of a streaming run writes its "
            "output itself, and returns nothing or one dg.MaterializeResult without a value for "
            "each of its assets"
        )
        raise ConfigurationError(msg)

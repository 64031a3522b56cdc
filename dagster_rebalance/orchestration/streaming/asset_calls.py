"""Calls of the assets in a streaming run: each function is called once per batch.

A function receives the batch, its resources and a context as in its own run. Async functions run in
the event loop of the run, as async resources do, so a client of such a resource lives for all
batches.

All assets of the run are one step of Dagster. The context of a function describes its asset, and
keeps the metadata that it adds for one batch; run, log, instance, resources and event loop are
those of the step. Dagster's direct invocation is no alternative: its context has no run, logs to
the console, and refuses `add_asset_metadata`. Results are assigned to assets and checks by the same
rules as in Dagster, unless a rule needs an IO manager: Dagster applies its rules only in a step.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.batch.validation import (
    check_streamed,
    has_context,
    name_of,
    parameters_of,
    takes_op_context,
)
from dagster_rebalance.orchestration.streaming.joined_results import check_sums

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dagster_rebalance.orchestration.batch.resource import KafkaBatch

Event = dg.AssetMaterialization | dg.AssetObservation | dg.ExpectationResult
Made = dg.MaterializeResult[Any] | dg.AssetCheckResult | Event

NO_VALUE = dg.MaterializeResult[Any]().value
"""The value of a result without a value. None is a value for the IO manager."""

_NO_NAME = dg.Output[None](None).output_name


@dataclass(frozen=True)
class AssetCall:
    """The call of one asset function, which materializes one or several assets.

    `taken_keys` are the parameters, including the batch; `required_keys` are all resources,
    including those that the function gets from the context.
    """

    asset: dg.AssetsDefinition
    function: Callable[..., Any]
    taken_keys: tuple[str, ...]
    required_keys: frozenset[str]
    batch_key: str

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, batch_key: str) -> AssetCall:
        """Return the call of an asset."""
        function = check_streamed(asset, batch_key)
        check_sums(asset)
        stored = {output.io_manager_key for output in asset.op.output_defs}
        required = frozenset(asset.required_resource_keys) - {batch_key} - stored
        return cls(asset, function, tuple(parameters_of(asset)), required, batch_key)

    @property
    def specs(self) -> Iterator[dg.AssetSpec]:
        """The asset specs, without the dep that Dagster derives from the parameter of the batch."""
        batch = self.asset.keys_by_input_name.get(self.batch_key)
        for spec in self.asset.specs:
            deps = [dep for dep in spec.deps if dep.asset_key != batch]
            yield spec if batch is None else spec.replace_attributes(deps=deps)

    def __call__(self, step: dg.AssetExecutionContext, batch: KafkaBatch) -> Iterator[Made]:
        """Process a batch, and yield the results of each asset once."""
        context = OpContextOfAsset(step.op_execution_context, self.asset, {self.batch_key: batch})
        returned = list(self._returned(context))
        yield from Results(self.asset, context).take(returned)

    def _returned(self, context: OpContextOfAsset) -> Iterator[object]:
        loop = context.get_step_execution_context().event_loop
        # The resource itself: the context may hold a client that it makes.
        resources = context.resources.original_resource_dict
        given = {key: resources[key] for key in self.taken_keys}
        shown = context if takes_op_context(self.asset) else ContextOfAsset(context)
        first = [shown] if has_context(self.asset) else []
        returned = self.function(*first, **given)
        if inspect.isasyncgen(returned):
            yield from _drained(loop, returned)
            return
        if inspect.iscoroutine(returned):
            returned = _finished(loop, returned)
        yield from each_of(returned)


def sorted_calls(calls: Sequence[AssetCall]) -> tuple[AssetCall, ...]:
    """Return the calls in the order of their dependencies."""
    made = {key: call for call in calls for key in call.asset.keys}
    found: dict[int, AssetCall] = {}

    def add(call: AssetCall, behind: tuple[AssetCall, ...]) -> None:
        if id(call) in found:
            return
        if any(call is one for one in behind):
            msg = (
                f"assets {name_of(behind[-1].asset)} and {name_of(call.asset)} depend on each "
                "other, and a streaming run calls each function once per batch: combine them in "
                "one dg.multi_asset, or split the one that makes several assets"
            )
            raise ConfigurationError(msg)
        for spec in call.asset.specs:
            for dep in spec.deps:
                upstream = made.get(dep.asset_key)
                if upstream is not None and upstream is not call:
                    add(upstream, (*behind, call))
        found[id(call)] = call

    for call in calls:
        add(call, ())
    return tuple(found.values())


def _finished(loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]) -> Any:  # noqa: ANN401 - what the user returns
    """Run an awaitable to its end. An interruption cancels it before the next batch begins."""
    whole = _awaited(awaitable)
    try:
        return loop.run_until_complete(whole)
    finally:
        # An interruption may arrive before a name is bound to the task.
        for task in asyncio.all_tasks(loop):
            if task.get_coro() is whole:
                task.cancel()
                with suppress(Exception, asyncio.CancelledError):
                    loop.run_until_complete(task)


async def _awaited(awaitable: Awaitable[Any]) -> Any:  # noqa: ANN401 - as above
    return await awaitable


def _drained(
    loop: asyncio.AbstractEventLoop, generator: AsyncGenerator[object, Any]
) -> Iterator[object]:
    try:
        while True:
            yield _finished(loop, anext(generator))
    except StopAsyncIteration:
        return
    finally:
        _finished(loop, generator.aclose())


class Resources:
    """The resources of the run, in which the resources of the batch replace some."""

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
            msg = "an asset of a streaming run has no partitions: omit partition_key"
            raise ConfigurationError(msg)
        key = None if asset_key is None else dg.AssetKey.from_coercible(asset_key)
        self._of_asset.add_to_asset(key, metadata)


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
        """Yield the results in the order of the assets, each with the results of its checks."""
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
        """Require one result of each check: otherwise Dagster would show an earlier result."""
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
                "of its check_specs in every batch"
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
        """Return the result of an asset for which the function returned none."""
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
        """Add the metadata and data version from the context, and separate check results."""
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

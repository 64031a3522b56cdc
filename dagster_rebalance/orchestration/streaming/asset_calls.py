"""Calls of the assets in a streaming run: each function is called once per batch.

A function receives the batch, its resources and a context as in its own run, and its results become
materializations. Async functions run in the event loop of the run, as async resources do, so a
client of such a resource lives for all batches. `asset_forms` refuses assets that cannot process
many batches in one run.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.streaming.asset_context import ContextOfAsset, OpContextOfAsset
from dagster_rebalance.orchestration.streaming.asset_forms import (
    check_streamed,
    has_context,
    name_of,
    parameters_of,
    takes_op_context,
)
from dagster_rebalance.orchestration.streaming.asset_results import Results, each_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    import dagster as dg

    from dagster_rebalance.orchestration.batch.resource import KafkaBatch
    from dagster_rebalance.orchestration.streaming.asset_results import Made


@dataclass(frozen=True)
class AssetCall:
    """The call of one asset, or of several that one function makes.

    Attributes:
        asset: The definition.
        function: The function of the user.
        taken_keys: The resources that are parameters, and the batch.
        required_keys: All required resources, including those from the context.
        batch_key: The name of the batch.
    """

    asset: dg.AssetsDefinition
    function: Callable[..., Any]
    taken_keys: tuple[str, ...]
    required_keys: frozenset[str]
    batch_key: str

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, batch_key: str) -> AssetCall:
        """Return the call of an asset.

        Raises:
            ConfigurationError: The asset cannot be called for each batch.
        """
        function = check_streamed(asset, batch_key)
        stored = {output.io_manager_key for output in asset.op.output_defs}
        required = frozenset(asset.required_resource_keys) - {batch_key} - stored
        return cls(asset, function, tuple(parameters_of(asset)), required, batch_key)

    @property
    def specs(self) -> Iterator[dg.AssetSpec]:
        """The assets, without the batch upstream: an unannotated parameter counts as an asset."""
        batch = self.asset.keys_by_input_name.get(self.batch_key)
        for spec in self.asset.specs:
            deps = [dep for dep in spec.deps if dep.asset_key != batch]
            yield spec if batch is None else spec.replace_attributes(deps=deps)

    def __call__(self, step: dg.AssetExecutionContext, batch: KafkaBatch) -> Iterator[Made]:
        """Process a batch, and yield the results of each asset once.

        Raises:
            ConfigurationError: A result cannot be kept in a streaming run, or belongs to no check.
        """
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
    """Return the calls in the order of their dependencies.

    Raises:
        ConfigurationError: Two assets depend on each other.
    """
    made = {key: call for call in calls for key in call.asset.keys}
    found: dict[int, AssetCall] = {}

    def add(call: AssetCall, behind: tuple[AssetCall, ...]) -> None:
        if id(call) in found:
            return
        if any(call is one for one in behind):
            msg = (
                f"assets {name_of(behind[-1].asset)} and {name_of(call.asset)} depend on each "
                "other, and a streaming run calls each function once for each batch: make "
                "them one dg.multi_asset, or split the one that makes several assets"
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
    """Run an awaitable to its end. An interruption cancels it, so the next batch is clean."""
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

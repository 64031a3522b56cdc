"""The bodies of a streaming run: the user's assets, called once for each batch.

Owns that an asset needs nothing new to be streamed: its function gets the batch, its resources and
a context as in a run of its own, and what it returns becomes a materialisation. Async functions run
in the event loop of the run, as its async resources do: a client that one of them opens lives for
all batches. What cannot work for many batches in one run is refused where it is defined
(`asset_forms`).
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
class Body:
    """One asset, or several that one function makes.

    Attributes:
        asset: The definition.
        function: What the user wrote.
        taken_keys: The resources that it takes as parameters, and the batch.
        required_keys: All that it needs, also those that it takes from the context.
        batch_key: What it calls the batch.
    """

    asset: dg.AssetsDefinition
    function: Callable[..., Any]
    taken_keys: tuple[str, ...]
    required_keys: frozenset[str]
    batch_key: str

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, batch_key: str) -> Body:
        """The body of an asset.

        Raises:
            ConfigurationError: It cannot be called for each batch.
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
        """Process a batch; what it made, each asset once.

        Raises:
            ConfigurationError: It returned something that a streaming run cannot keep, or a result
                of a check that is not found among its own.
        """
        context = OpContextOfAsset(step.op_execution_context, self.asset, {self.batch_key: batch})
        said = list(self._said(context))
        yield from Results(self.asset, context).take(said)

    def _said(self, context: OpContextOfAsset) -> Iterator[object]:
        loop = context.get_step_execution_context().event_loop
        # The resource itself: what the context has of it may be a client that it makes.
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


def in_order(bodies: Sequence[Body]) -> tuple[Body, ...]:
    """The bodies, each behind those that it depends on.

    Raises:
        ConfigurationError: Two depend on each other.
    """
    made = {key: body for body in bodies for key in body.asset.keys}
    found: dict[int, Body] = {}

    def add(body: Body, behind: tuple[Body, ...]) -> None:
        if id(body) in found:
            return
        if any(body is one for one in behind):
            msg = (
                f"assets {name_of(behind[-1].asset)} and {name_of(body.asset)} depend on each "
                "other, and a streaming run calls each function once for each batch: make "
                "them one dg.multi_asset, or split the one that makes several assets"
            )
            raise ConfigurationError(msg)
        for spec in body.asset.specs:
            for dep in spec.deps:
                upstream = made.get(dep.asset_key)
                if upstream is not None and upstream is not body:
                    add(upstream, (*behind, body))
        found[id(body)] = body

    for body in bodies:
        add(body, ())
    return tuple(found.values())


def _finished(loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]) -> Any:  # noqa: ANN401 - what the user returns
    """Run an awaitable to its end. If it is interrupted, it does not go on with the next batch."""
    whole = _awaited(awaitable)
    try:
        return loop.run_until_complete(whole)
    finally:
        # An interrupt may arrive before any name stands for the task.
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

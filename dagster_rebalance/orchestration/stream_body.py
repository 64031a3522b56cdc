"""The bodies of a streaming run: the user's assets, called once for each batch.

Owns that an asset needs nothing new to be streamed: its function gets the batch, its resources and
the context of the run as in a run of its own, and what it returns becomes a materialisation. What
cannot work for many batches in one run is refused where it is defined.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

from dagster_rebalance.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dagster_rebalance.orchestration.batch import KafkaBatch

_NO_VALUE = dg.MaterializeResult[Any]().value
"""What stands for no value: None is one, and would go to the IO manager of a run of its own."""
_NO_CONFIG = dg.Field(Any).config_type
"""What stands for an op that takes no run config."""


@dataclass(frozen=True)
class Body:
    """One asset, or several that one function makes.

    Attributes:
        asset: The definition.
        function: What the user wrote.
        has_context: Whether it takes the context as its first argument.
        resource_keys: The resources that it takes as parameters, the batch left out.
        required_keys: All that it needs, also those that it takes from the context.
        batch_key: What it calls the batch.
    """

    asset: dg.AssetsDefinition
    function: Callable[..., Any]
    has_context: bool
    resource_keys: tuple[str, ...]
    required_keys: frozenset[str]
    batch_key: str

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, batch_key: str) -> Body:
        """The body of an asset.

        Raises:
            ConfigurationError: It cannot be called for each batch: it is made of several ops, takes
                another asset's value or run config, does not take the batch, or has a pool, a
                retry policy or hooks.
        """
        name = _name_of(asset)
        op = asset.node_def
        compute = getattr(op, "compute_fn", None) if isinstance(op, dg.OpDefinition) else None
        function = getattr(compute, "decorated_fn", None)
        if compute is None or function is None:
            raise _refused(
                name, "is not made by one decorated function (@dg.asset, @dg.multi_asset)"
            )
        if asset.op.pool:
            raise _refused(
                name,
                "has a pool, which no batch would wait for: remove it, and limit how many runs "
                "work at the same time by the argument `runs`, such as runs=1",
            )
        if asset.op.retry_policy is not None:
            raise _refused(
                name,
                "has a retry_policy, which no batch would be tried again by: remove it, and say "
                "how often by `max_attempts` of the group, whose `retry_delay_s` is the wait",
            )
        if asset.hook_defs:
            raise _refused(
                name,
                "has hooks, which no batch would call: remove them, and let an alert on the check "
                "`no_partition_stopped` or the body itself tell of failures",
            )
        takes_config = asset.op.config_field
        if takes_config is not None and takes_config.config_type is not _NO_CONFIG:
            raise _refused(
                name,
                "takes run config, which no batch has: remove it, and give the asset a resource "
                "with these values",
            )
        has_context = bool(compute.has_context_arg())
        parameters = list(inspect.signature(function).parameters)[int(has_context) :]
        if batch_key not in parameters:
            raise _refused(
                name, f"does not take the batch: give it a parameter `{batch_key}: KafkaBatch`"
            )
        resource_keys = tuple(
            key for key in parameters if key in asset.required_resource_keys and key != batch_key
        )
        others = [key for key in parameters if key not in {batch_key, *resource_keys}]
        if others:
            raise _refused(
                name,
                f"takes {others[0]!r}, which is neither a resource nor the batch: read what "
                "another asset has written from where it is stored, and name that asset in deps",
            )
        required = frozenset(asset.required_resource_keys) - {batch_key}
        return cls(asset, function, has_context, resource_keys, required, batch_key)

    def __call__(
        self, context: dg.AssetExecutionContext, batch: KafkaBatch, resources: object
    ) -> Iterator[dg.MaterializeResult[Any]]:
        """Process a batch; what it made, each asset once.

        Raises:
            ConfigurationError: It returned something that a streaming run cannot keep, or a result
                of a check that is not found among its own.
        """
        given = {key: getattr(resources, key) for key in self.resource_keys}
        said = self.function(
            *([context] if self.has_context else []), **given, **{self.batch_key: batch}
        )
        if inspect.isasyncgen(said):
            self._refuse("an async generator")
        if inspect.iscoroutine(said):
            said = asyncio.run(said)
        results = {
            result.asset_key or self.asset.key: self._with_named_checks(result)
            for result in self._results(said)
        }
        for spec in self.asset.specs:
            result = results.pop(spec.key, None)
            if result is None and not spec.skippable:
                result = dg.MaterializeResult(asset_key=spec.key)
            if result is not None:
                yield result._replace(asset_key=spec.key)
        if results:
            surplus = next(iter(results)).to_user_string()
            self._refuse(f"a result for {surplus}")

    def _results(self, said: object) -> Iterator[dg.MaterializeResult[Any]]:
        if said is None:
            return
        several = isinstance(said, Iterable) and not isinstance(said, dg.MaterializeResult)
        for result in said if several else (said,):  # type: ignore[attr-defined]
            if not isinstance(result, dg.MaterializeResult):
                self._refuse(f"a {type(result).__name__}")
            if result.value is not _NO_VALUE:
                self._refuse("a dg.MaterializeResult with a value")
            yield result

    def _with_named_checks(self, result: dg.MaterializeResult[Any]) -> dg.MaterializeResult[Any]:
        """The same result; what its checks leave out is found in check_specs, as Dagster does."""
        key = result.asset_key or self.asset.key
        named = []
        for check in result.check_results or ():
            fitting = [
                spec
                for spec in self.asset.check_specs
                if check.asset_key in {None, spec.asset_key}
                and check.check_name in {None, spec.name}
            ]
            found = [spec for spec in fitting if spec.asset_key == key] or fitting
            if len(found) != 1:
                self._refuse_check(check)
            named.append(check._replace(asset_key=found[0].asset_key, check_name=found[0].name))
        return result._replace(check_results=named)

    def _refuse_check(self, check: dg.AssetCheckResult) -> NoReturn:
        known = ", ".join(sorted(spec.name for spec in self.asset.check_specs)) or "none"
        msg = (
            f"{_name_of(self.asset)} returned a result of a check "
            f"{check.check_name or 'without a name'}, which must be one of its check_specs "
            f"({known}): declare the check there, and name it in the result by check_name (and "
            "asset_key, where two assets have a check of that name)"
        )
        raise ConfigurationError(msg)

    def _refuse(self, what: str) -> NoReturn:
        msg = (
            f"{_name_of(self.asset)} returned {what}: an asset of a streaming run writes its "
            "output itself, and returns nothing or dg.MaterializeResult without a value"
        )
        raise ConfigurationError(msg)


def in_order(bodies: Sequence[Body]) -> tuple[Body, ...]:
    """The bodies, each behind those that it depends on."""
    made = {key: body for body in bodies for key in body.asset.keys}
    found: dict[int, Body] = {}

    def add(body: Body) -> None:
        if id(body) in found:
            return
        for spec in body.asset.specs:
            for dep in spec.deps:
                upstream = made.get(dep.asset_key)
                if upstream is not None and upstream is not body:
                    add(upstream)
        found[id(body)] = body

    for body in bodies:
        add(body)
    return tuple(found.values())


def _name_of(asset: dg.AssetsDefinition) -> str:
    return ", ".join(sorted(key.to_user_string() for key in asset.keys))


def _refused(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"asset {name} {why}. A streaming run calls the function of each asset once for each batch"
    )

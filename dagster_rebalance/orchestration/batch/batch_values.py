"""Values between the assets of one batch, stored by batch with any IO manager.

Dagster stores the value of an asset by its asset key. Several batches of a group run at the same
time, so a run would load the value of another batch. This module gives the IO manager a separate
key for each batch, and stores nothing.
"""

from __future__ import annotations

import hashlib
import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.orchestration.batch.validation import definition_of, ops_of
from dagster_rebalance.orchestration.storage.run_tags import BATCH_TAG, format_range, ranges_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

DEFAULT_KEY = "io_manager"


def values_by_batch(
    io_manager: Any,  # noqa: ANN401 - anything that Dagster accepts as an IO manager
    *,
    job: str,
    assets: Iterable[dg.AssetKey],
) -> ValuesByBatch:
    """Return an IO manager that stores the values of some assets by batch.

    In a run of `job`, the value of such an asset is stored and loaded with `__batch_<digest>`
    appended to the asset key. In any other run, the value of the batch that materialized the asset
    last is loaded. Values of other assets are not affected.

    `build_kafka_batch_defs` does this for the assets whose values its other assets load. Do the
    same in your own definitions, and if several `Definitions` that you merge share the IO manager.

    Args:
        io_manager: The IO manager, in any form that Dagster accepts.
        job: The name of the job that processes batches.
        assets: The assets of the job whose values its other assets load.

    Returns:
        The wrapper of this IO manager. A second call adds its assets to the same wrapper.

    Raises:
        ConfigurationError: The IO manager has a resource that is configured at launch.
    """
    shared = _shared(io_manager)
    shared.makers.update(dict.fromkeys(assets, job))
    return shared


def with_values_by_batch(
    job: str, assets: Iterable[dg.AssetsDefinition], resources: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the resources of a job, with the values between its assets stored by batch.

    An IO manager that is missing among the resources may be in definitions that are merged with
    these. The first tick of the sensor checks it (`check_values`).
    """
    assets = [asset for asset in assets if asset.is_executable]
    taken = _taken_values(assets)
    kept = dict(resources)
    for value in taken:
        for key in value.manager_keys:
            if key in value.own_resources:
                raise _refused(job, value, key)
            if key in kept or key == DEFAULT_KEY:
                io_manager = kept[key] if key in kept else _default_io_manager()
                kept[key] = values_by_batch(io_manager, job=job, assets=[value.key])
    for key in _keys_inside(assets) & kept.keys():
        kept[key] = values_by_batch(kept[key], job=job, assets=())
    return kept


def check_values(job: dg.JobDefinition) -> None:
    """Check that the values between the assets of a job are stored by batch."""
    for value in _taken_values(job.asset_layer.asset_graph.assets_defs):
        for key in value.manager_keys:
            manager = job.resource_defs.get(key)
            if not isinstance(manager, ValuesByBatch) or manager.makers.get(value.key) != job.name:
                msg = (
                    f"{value} of job {job.name}, and several batches run at the same time: give "
                    f"the resource {key!r} as values_by_batch(..., job={job.name!r}, assets=[...]) "
                    "with the keys of all such assets"
                )
                raise ConfigurationError(msg)


def _default_io_manager() -> dg.ResourceDefinition:
    """Return Dagster's default IO manager, which environment variables may change."""
    return dg.GraphDefinition(name="nothing").to_job().resource_defs[DEFAULT_KEY]


@dataclass(frozen=True)
class _TakenValue:
    """A value that one asset loads from another of the same batch."""

    taker: dg.AssetsDefinition
    maker: dg.AssetsDefinition
    key: dg.AssetKey
    name: str

    @property
    def manager_keys(self) -> set[str]:
        """The keys of the IO managers that store and load the value."""
        node = self.taker.node_def
        own = {
            taken.input_manager_key
            for op in ops_of([node])
            for taken in op.input_defs
            if op is not node or taken.name == self.name  # a graph maps its inputs to its ops
        }
        return {self.maker.get_io_manager_key_for_asset_key(self.key), *filter(None, own)}

    @property
    def own_resources(self) -> set[str]:
        """The keys in `resource_defs` of the two assets."""
        return {*self.taker.resource_defs, *self.maker.resource_defs}

    def __str__(self) -> str:
        takers = ", ".join(sorted(key.to_user_string() for key in self.taker.keys))
        return f"asset {takers} takes the value of asset {self.key.to_user_string()}"


def _taken_values(assets: Iterable[dg.AssetsDefinition]) -> list[_TakenValue]:
    assets = [asset for asset in assets if asset.is_executable]
    makers = {key: asset for asset in assets for key in asset.keys}
    return [
        _TakenValue(taker, makers[key], key, taken.name)
        for taker in assets
        for taken in taker.node_def.input_defs
        if not taken.dagster_type.is_nothing
        and (key := taker.keys_by_input_name[taken.name]) in makers
    ]


def _keys_inside(assets: Iterable[dg.AssetsDefinition]) -> set[str]:
    """Return the keys of the IO managers between the ops of one asset."""
    graphs = [asset.node_def for asset in assets if isinstance(asset.node_def, dg.GraphDefinition)]
    return {made.io_manager_key for op in ops_of(graphs) for made in op.output_defs}


def _refused(job: str, value: _TakenValue, key: str) -> ConfigurationError:
    return ConfigurationError(
        f"{value} of job {job}, and the IO manager {key!r} is part of the definition of an asset, "
        "so batches would load the values of each other: give the asset an io_manager_key in place "
        "of io_manager_def or resource_defs, and add the IO manager to the resources of the "
        "definitions"
    )


class WrappedIOManager(dg.IOManagerDefinition):
    """An IO manager in a wrapper, which `wrap` makes for each run."""

    def __init__(
        self,
        kept: dg.ResourceDefinition,
        wrap: Callable[[Any, dg.InitResourceContext], dg.IOManager],
    ) -> None:
        super().__init__(
            resource_fn=lambda context: _wrapped(kept.resource_fn, context, wrap),  # type: ignore[arg-type]
            config_schema=kept.config_schema,
            description=kept.description,
            required_resource_keys=set(kept.required_resource_keys),
            input_config_schema=getattr(kept, "input_config_schema", None),
            output_config_schema=getattr(kept, "output_config_schema", None),
        )


def _wrapped(
    make: Callable[..., Any],
    context: dg.InitResourceContext,
    wrap: Callable[[Any, dg.InitResourceContext], dg.IOManager],
) -> Iterator[dg.IOManager]:
    made = make(context) if inspect.signature(make).parameters else make()
    if inspect.isgenerator(made):
        made = contextmanager(lambda: made)()
    if hasattr(made, "__enter__"):
        with made as inner:
            yield wrap(inner, context)
    else:
        yield wrap(made, context)


class ValuesByBatch(WrappedIOManager):
    """An IO manager that stores the values of the assets in `makers` by batch of their job."""

    def __init__(self, kept: dg.ResourceDefinition) -> None:
        self.makers: dict[dg.AssetKey, str] = {}
        super().__init__(kept, lambda inner, context: _BatchIOManager(inner, self.makers, context))


_SHARED: dict[int, tuple[Any, ValuesByBatch]] = {}
"""Wrappers by the id of the IO manager, which stays alive, so its id is unique."""


def _shared(io_manager: Any) -> ValuesByBatch:  # noqa: ANN401 - as above
    """Return the one wrapper of an IO manager: Dagster then merges definitions that share it."""
    if isinstance(io_manager, ValuesByBatch):
        return io_manager
    if id(io_manager) not in _SHARED:
        _SHARED[id(io_manager)] = (io_manager, ValuesByBatch(_definition(io_manager)))
    return _SHARED[id(io_manager)][1]


def _definition(resource: Any) -> dg.ResourceDefinition:  # noqa: ANN401 - as above
    definition = definition_of(resource)
    if definition is None:
        return dg.ResourceDefinition.hardcoded_resource(resource)
    if getattr(definition, "nested_partial_resources", None):
        msg = (
            "an IO manager between assets of one batch has a resource that is configured at "
            "launch: configure that resource where it is defined"
        )
        raise ConfigurationError(msg)
    return definition


class _BatchIOManager(dg.IOManager):
    """Passes values to the user's IO manager, under a key for their batch."""

    def __init__(
        self,
        inner: Any,  # noqa: ANN401 - an IO manager, or an input manager
        makers: Mapping[dg.AssetKey, str],
        context: dg.InitResourceContext,
    ) -> None:
        self._inner = inner
        self._makers = makers
        self._run, self._instance = context.run, context.instance

    def handle_output(self, context: dg.OutputContext, obj: Any) -> Iterator[Any]:  # type: ignore[override]  # noqa: ANN401 - any value
        """Store a value."""
        suffix = self._suffix(context)
        keyed = _KeyedOutput(context, suffix) if suffix else context
        result = self._inner.handle_output(keyed, obj)
        if inspect.isgenerator(result):
            yield from result
        elif result is not None:
            yield result
        if isinstance(keyed, _KeyedOutput) and not keyed.is_used:
            msg = (
                f"{type(self._inner).__name__} stored a value between assets of one batch without "
                "reading the key of the asset, so batches would overwrite each other's values: "
                "use an IO manager that stores each value by the key of its asset, such as "
                "dg.FilesystemIOManager"
            )
            raise ConfigurationError(msg)

    def load_input(self, context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        """Load a value."""
        suffix = self._suffix(context)
        return self._inner.load_input(_KeyedInput(context, suffix) if suffix else context)

    def _suffix(self, context: dg.OutputContext | dg.InputContext) -> str:
        """Return the suffix of the key of a value; empty if it is not stored by batch."""
        if not context.has_asset_key:  # between the ops of one asset
            made = context if isinstance(context, dg.OutputContext) else context.upstream_output
            # IO managers of databases use the name of the output, which several steps share.
            return _suffix_in(self._run, made.step_key, made.mapping_key or "") if made else ""
        maker = self._makers.get(context.asset_key)
        if maker is None:
            return ""
        if self._run is not None and self._run.job_name == maker:
            return _suffix_in(self._run)
        return self._suffix_of_last(context.asset_key)

    def _suffix_of_last(self, key: dg.AssetKey) -> str:
        """Return the suffix of the last batch, for a run without a batch."""
        if self._instance is None:
            return ""
        last = self._instance.get_latest_materialization_event(key)
        run = self._instance.get_run_by_id(last.run_id) if last else None
        if run is None:
            msg = (
                f"the values of {key.to_user_string()} are stored by batch, and Dagster has no run "
                "for the last one: load it when the next batch is done"
            )
            raise IllegalStateError(msg)
        return _suffix_in(run)


def _suffix_in(run: dg.DagsterRun | None, *step: str) -> str:
    """Return a suffix that is unique for the batch and the ranges of a run, and for `step`."""
    batch_id = run.tags.get(BATCH_TAG) if run is not None else None
    if run is None or batch_id is None:
        return ""
    ranges = sorted(map(format_range, ranges_in(run.run_config, batch_id)))
    digest = hashlib.sha256("\n".join([batch_id, *ranges, *step]).encode()).hexdigest()
    return f"__batch_{digest[:16]}"


class _Keyed:
    """A Dagster context that appends a suffix to the names of a value."""

    def __init__(self, context: Any, suffix: str) -> None:  # noqa: ANN401 - either kind
        self.__dict__["_original"] = context
        self.__dict__["_suffix"] = suffix
        self.__dict__["is_used"] = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the context has
        return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_original"], name, value)

    def __del__(self) -> None:
        """Do nothing: the original is finalised."""

    def _named(self, name: str) -> str:
        self.__dict__["is_used"] = True
        return f"{name}{self.__dict__['_suffix']}"

    def _keyed(self, key: dg.AssetKey) -> dg.AssetKey:
        return dg.AssetKey([*key.path[:-1], self._named(key.path[-1])])

    @property
    def asset_key(self) -> dg.AssetKey:
        """The asset key, with the suffix."""
        return self._keyed(self.__dict__["_original"].asset_key)


class _KeyedOutput(_Keyed, dg.OutputContext):
    @property
    def asset_spec(self) -> dg.AssetSpec:
        """The asset spec, with the suffix in its key."""
        spec: dg.AssetSpec = self.__dict__["_original"].asset_spec
        return spec.replace_attributes(key=self._keyed(spec.key))

    @property
    def step_key(self) -> str:
        """The step key, with the suffix."""
        return self._named(self.__dict__["_original"].step_key)

    @property
    def name(self) -> str:
        """The output name; between ops of one asset with the suffix, as it may be the only name."""
        original: dg.OutputContext = self.__dict__["_original"]
        return original.name if original.has_asset_key else self._named(original.name)


class _KeyedInput(_Keyed, dg.InputContext):
    @property
    def upstream_output(self) -> dg.OutputContext | None:
        """The output, with the suffix."""
        made: dg.OutputContext | None = self.__dict__["_original"].upstream_output
        return made and _KeyedOutput(made, self.__dict__["_suffix"])

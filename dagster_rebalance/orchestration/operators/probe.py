"""A probe: one run of the assets of a group on chosen records, without effects on the group.

The run is in an instance of Dagster in memory. It joins no group, claims and commits nothing, and
stores no letter. Outputs by range are redirected to a scratch folder, and values between assets
stay in memory. All other effects of the assets and their resources are real.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of a resource.
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import dagster as dg

from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
)
from dagster_rebalance.core.model.letters import Letter
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.printable import one_line
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.kafka.log_bounds import read_bounds
from dagster_rebalance.orchestration.batch.batch_values import WrappedIOManager
from dagster_rebalance.orchestration.batch.resource import KafkaBatch, collecting_batch
from dagster_rebalance.orchestration.batch.validation import definition_of, ops_of
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import format_range, parse_ranges
from dagster_rebalance.outputs.scratch import ScratchOutput, redirect_outputs

BATCH_ID = "r.probe.1"
"""The id of a rerun, so assets skip effects that cannot be replaced."""


@dataclass(frozen=True)
class ProbedAsset:
    """The result of an asset.

    Attributes:
        metadata: The metadata of the materialization, with its values as text.
    """

    key: str
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        job: The job whose assets were executed.
        error: The error with its traceback; empty if the run succeeded.
        assets: The materialized assets.
        failed_checks: The names of checks that failed.
        outputs: The redirected outputs.
        letters: The letters that a run of the group would have stored.
    """

    job: str
    error: str
    assets: tuple[ProbedAsset, ...]
    failed_checks: tuple[str, ...]
    outputs: tuple[ScratchOutput, ...]
    letters: tuple[Letter, ...]


def probe(
    defs: dg.Definitions, ranges: Sequence[OffsetRange], folder: str, *, job: str = ""
) -> ProbeResult:
    """Execute the assets of a group on the records of ranges.

    Args:
        defs: The definitions of the code location.
        ranges: The ranges, of one group.
        folder: The scratch folder of the outputs.
        job: The job of the group; empty for the only one that processes the topics.

    Raises:
        BrokerError: Kafka did not answer, or does not have all of the offsets.
        ConfigurationError: No job processes the topics, or several do.
    """
    chosen, key, batch = _job_of(defs, ranges, job)
    collected: dict[str, Letter] = {}
    own = _batch_class(collected)(
        kafka=batch.kafka, batch_id=BATCH_ID, ranges=[*map(format_range, ranges)]
    )
    with redirect_outputs(folder) as scratch, dg.DagsterInstance.ephemeral() as instance:
        _check_offsets(batch.kafka, ranges, instance)
        result = chosen.execute_in_process(
            instance=instance,
            resources={**_kept_values(defs, chosen), key: own},
            run_config={"loggers": {"console": {"config": {"log_level": "INFO"}}}},
            raise_on_error=False,
        )
    if not result.success:
        _raise_problem_of_resources(result.all_events)
    return ProbeResult(
        chosen.name,
        "" if result.success else _error_of(result.all_events),
        tuple(_assets_of(result.get_asset_materialization_events())),
        tuple(
            f"{one.asset_key.to_user_string()}: {one.check_name}"
            for one in result.get_asset_check_evaluations()
            if not one.passed
        ),
        tuple(scratch.outputs),
        tuple(collected.values()),
    )


def _job_of(
    defs: dg.Definitions, ranges: Iterable[OffsetRange], name: str
) -> tuple[dg.JobDefinition, str, KafkaBatch]:
    """Return the job that processes topics, with the key of its batch."""
    batches = {
        key: resource
        for key, resource in (defs.resources or {}).items()
        if isinstance(resource, KafkaBatch)
    }
    topics = sorted({range_.topic for range_ in ranges})
    jobs = [
        (job, key, batch)
        for job in defs.resolve_all_job_defs()
        if not job.name.startswith("__")
        for key, batch in batches.items()
        if any(key in op.required_resource_keys for op in ops_of([job.graph]))
    ]
    read = {
        (job.name, key): [one for one in topics if Topics.of(_known(batch.kafka.topics)).have(one)]
        for job, key, batch in jobs
    }
    found = [
        one
        for one in jobs
        if (one[0].name == name if name else read[one[0].name, one[1]] == topics)
    ]
    if len(found) == 1:
        return found[0]
    raise ConfigurationError(_why_no_job(name, topics, read, several=bool(found)))


def _why_no_job(
    name: str, topics: Sequence[str], read: Mapping[tuple[str, str], list[str]], *, several: bool
) -> str:
    listed = ", ".join(topics)
    names = ", ".join(sorted({job for job, _ in read}))
    if several and not name:
        fitting = ", ".join(sorted({job for (job, _), its in read.items() if its == topics}))
        return f"several jobs process {listed}: pass --job with one of {fitting}"
    if name and names:
        return f"there is no job {name} with one KafkaBatch: pass --job with one of {names}"
    partly = [f"{job} processes {', '.join(its)}" for (job, _), its in sorted(read.items()) if its]
    if partly:
        return (
            f"no job processes all of {listed} ({'; '.join(partly)}): probe the topics of each "
            "group one after the other"
        )
    return (
        f"no job of these definitions processes {listed}: name the module of the code location "
        "that has the assets of the group"
    )


def _known(topics: Iterable[Any]) -> list[str]:
    values = (topic.get_value() if isinstance(topic, dg.EnvVar) else topic for topic in topics)
    return [value for value in values if value]


class _OffsetsCheck(dg.ConfigurableResource[None]):
    """Checks before the run that Kafka has the offsets, so a problem is no error of the run."""

    kafka: KafkaConsumerResource
    ranges: list[str]

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[None]:  # noqa: ARG002
        ranges = [*parse_ranges(self.ranges)]
        with self.kafka.connect() as consumer:
            bounds = read_bounds(consumer, {range_.topic_partition for range_ in ranges})
        for range_ in ranges:
            there = bounds[range_.topic_partition]
            if not there.start <= range_.start < range_.until <= there.until:
                msg = (
                    f"Kafka has the offsets [{there.start}, {there.until}) of "
                    f"{range_.topic_partition}, and not all of {range_}: name offsets among them"
                )
                raise BrokerError(msg, retriable=False)
        yield


def _check_offsets(
    kafka: KafkaConsumerResource, ranges: Iterable[OffsetRange], instance: dg.DagsterInstance
) -> None:
    check = _OffsetsCheck(kafka=kafka, ranges=[*map(format_range, ranges)])
    try:
        with dg.build_resources({"check": check}, instance=instance):
            pass
    except dg.DagsterError as error:
        problem = _problem_in(error)
        msg = f"the resource of Kafka cannot be set up: {problem}"
        raise (
            problem if isinstance(problem, DagsterRebalanceError) else ConfigurationError(msg)
        ) from error


def _problem_in(error: BaseException) -> DagsterRebalanceError | str:
    """Return the first error of this package among the causes, or the last cause in one line."""
    cause: BaseException | None = error
    last = error
    while cause is not None:
        if isinstance(cause, DagsterRebalanceError):
            return cause
        last, cause = cause, cause.__cause__
    return _in_short(str(last))


def _in_short(problem: str) -> str:
    """Return an error of a config without Dagster's own stack trace."""
    text = problem.partition("Stack Trace")[0]
    return one_line(text.rpartition("PostProcessingError: ")[2])


def _raise_problem_of_resources(events: Sequence[dg.DagsterEvent]) -> None:
    """Raise if a resource could not be set up, and no asset has begun."""
    for event in events:
        if event.event_type is dg.DagsterEventType.RESOURCE_INIT_FAILURE:
            error = getattr(event.event_specific_data, "error", None)
            while error is not None and error.cause is not None:
                error = error.cause
            why = _in_short(event.message or "" if error is None else error.message)
            msg = f"the resources of the job cannot be set up: {why}"
            raise ConfigurationError(msg)


def _batch_class(collected: dict[str, Letter]) -> Callable[..., KafkaBatch]:
    """Return a class of batches that collect letters."""

    class ProbedBatch(collecting_batch(collected)):  # type: ignore[misc] # a class of this call
        """The batch of a probe."""

        def _pipes_extras(self, *_: object, **__: object) -> NoReturn:
            msg = (
                "a probe starts no job of Dagster Pipes, because the outputs of another process "
                "cannot be redirected: call the function of the job in a test, in a block of "
                "dagster_rebalance.redirect_outputs"
            )
            raise ConfigurationError(msg)

        @contextmanager
        def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[KafkaBatch]:  # noqa: ARG002
            with closing(self.kafka.reader()) as reader:
                yield self.read_by(reader)

    return ProbedBatch


class _KeptValues(dg.IOManager):
    """Keeps the values of a run in memory, and loads all others with the user's IO manager."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - an IO manager, or an input manager
        self._inner = inner
        self._values: dict[tuple[str, ...], Any] = {}

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:  # noqa: ANN401 - any value
        self._values[_key_of(context)] = obj

    def load_input(self, context: dg.InputContext) -> Any:  # noqa: ANN401 - any value
        made = context if context.has_asset_key else context.upstream_output
        key = _key_of(made) if made is not None else ()
        return self._values[key] if key in self._values else self._inner.load_input(context)


def _key_of(context: dg.OutputContext | dg.InputContext) -> tuple[str, ...]:
    if context.has_asset_key:
        return ("asset", *context.asset_key.path)
    assert isinstance(context, dg.OutputContext)  # noqa: S101 - an input between ops has one
    return ("op", context.step_key, context.name, context.mapping_key or "")


def _kept_values(defs: dg.Definitions, job: dg.JobDefinition) -> dict[str, WrappedIOManager]:
    given = {key for key, one in (defs.resources or {}).items() if isinstance(one, dg.IOManager)}
    return {
        key: WrappedIOManager(definition, lambda inner, _context: _KeptValues(inner))
        for key, resource in job.resource_defs.items()
        if isinstance(resource, dg.IOManagerDefinition) or key in given
        if (definition := definition_of(resource)) is not None
    }


def _error_of(events: Sequence[dg.DagsterEvent]) -> str:
    """Return the first error of a run with its traceback."""
    failed = [event for event in events if event.is_failure]
    for event in sorted(failed, key=lambda one: not one.is_step_failure):
        error = getattr(event.event_specific_data, "error", None)
        if error is not None:
            return str(error.to_string())
    return failed[0].message or "the run failed" if failed else "the run failed"


def _assets_of(events: Iterable[dg.DagsterEvent]) -> Iterator[ProbedAsset]:
    for event in events:
        made = event.step_materialization_data.materialization
        metadata = {
            name: str(getattr(value, "value", value)) for name, value in made.metadata.items()
        }
        yield ProbedAsset(made.asset_key.to_user_string(), metadata)

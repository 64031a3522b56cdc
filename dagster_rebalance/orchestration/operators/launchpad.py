"""The jobs of operators in Dagster's launchpad: directives, reruns and dead letters.

Their forms read no environment variables. Any text of a `dg.Config` may be `{"env": "NAME"}`, and
Dagster shows the form, so a user with the right to launch runs could read every secret of the run's
process.
"""

# No `from __future__ import annotations` here: Dagster evaluates the annotations of an op.

from collections.abc import Callable, Iterable
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import dagster as dg
from pydantic import Field
from pydantic.fields import FieldInfo

from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.runs.rerun_batch import RECORDS_PER_RUN, RUNS_AT_ONCE
from dagster_rebalance.orchestration.operators.letters import (
    LetterRequest,
    discard,
    letters_text,
    plan_discard,
    plan_replay,
)
from dagster_rebalance.orchestration.operators.requests import (
    DirectiveRequest,
    RerunPlan,
    RerunRequest,
    Reruns,
    issue_directive,
    span_of,
)
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.storage.run_tags import USER_TAG

if TYPE_CHECKING:
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_ROWS_SHOWN = 100
_PARTITIONS = "orders:3 for a partition, orders for a topic, ord* for a pattern, * for all."
_EXAMPLES = "(orders:3, a topic, a pattern, or *)"
_BY = "Your name. Dagster+ fills it in."


class ControlConfig(dg.Config):
    """The form of a directive."""

    action: Literal["choose", "pause", "stop", "resume", "retry"] = Field(
        default="choose",  # the launchpad shows no field whose default is null
        description=(
            "pause: start no new batches, and let running ones finish. stop: also cancel running "
            "batches. resume: continue. retry: retry failed and stopped ranges now."
        ),
    )
    partitions: list[str] = Field(default=[], description=_PARTITIONS)
    reason: str = Field(default="", description="The reason. Optional for resume and retry.")
    by: str = Field(default="", description=_BY)


class RerunConfig(dg.Config):
    """The form of a rerun."""

    partitions: list[str] = Field(default=[], description=_PARTITIONS)
    from_offset: int | None = Field(
        default=None,
        description=(
            "The first offset, for a single partition. Its range is processed as a whole."
        ),
    )
    until_offset: int | None = Field(
        default=None,
        description="The offset after the last one. Default: the committed offset.",
    )
    since: str = Field(
        default="",
        description=(
            "Instead of offsets: commits from this time on, such as 2026-11-23T14:00 (UTC) or "
            "2026-11-23T14:00+01:00."
        ),
    )
    until: str = Field(
        default="", description="Commits before this time, as `since`. Default: now."
    )
    reason: str = Field(default="", description="The reason, shown on the runs.")
    by: str = Field(default="", description=_BY)
    dry_run: bool = Field(
        default=True,
        description=(
            "Only show the plan in the log of this run. Set it to false to start the runs."
        ),
    )
    runs_at_once: int = Field(
        default=RUNS_AT_ONCE, description="The number of runs that may be live at the same time."
    )
    records_per_run: int = Field(
        default=RECORDS_PER_RUN, description="The number of offsets per run."
    )
    cancel: str = Field(
        default="",
        description="The id of a rerun to cancel. Leave the other fields empty.",
    )


class LettersConfig(dg.Config):
    """The form for dead letters."""

    action: Literal["list", "replay", "discard"] = Field(
        default="list",
        description=(
            "list: count the letters in the log of this run. replay: process their records again "
            "with the current code. discard: mark them, because nobody will process them."
        ),
    )
    keys: list[str] = Field(
        default=[], description="The keys of the letters, such as orders-3-1207."
    )
    all_open: bool = Field(default=False, description="All open letters, instead of keys.")
    containing: str = Field(
        default="", description="With all_open: only letters with this text in their reason."
    )
    reason: str = Field(default="", description="The reason. Not for list.")
    by: str = Field(default="", description=_BY)
    dry_run: bool = Field(
        default=True,
        description=(
            "Only show the plan of a replay or discard in the log of this run. Set it to false to "
            "carry it out."
        ),
    )
    topic: str = Field(
        default="", description="The topic of the letters. Default: dead_letter_topic."
    )


_Form = TypeVar("_Form", ControlConfig, RerunConfig, LettersConfig)


def build_kafka_control_job(*, name: str, kafka_key: str = "kafka") -> dg.JobDefinition:
    """Build the job that pauses, stops, resumes and retries partitions of a group.

    Args:
        name: The name of the job.
        kafka_key: The resource key of the `KafkaConsumerResource` of the group.
    """

    def execute(
        context: dg.OpExecutionContext, kafka: "KafkaConsumerResource", form: ControlConfig, by: str
    ) -> None:
        if form.action == "choose":
            msg = (
                "the form is not filled in: set action (pause, stop, resume or retry), partitions "
                f"{_EXAMPLES}, reason and by (your name)"
            )
            raise ConfigurationError(msg)
        request = DirectiveRequest(Action(form.action), form.partitions, by, form.reason)
        context.log.info(issue_directive(context.instance, kafka.group_id, request))

    return _operator_job(
        name,
        kafka_key,
        ControlConfig,
        execute,
        op_description="Stores the request for all members of the group, including later ones.",
        description=(
            "Pauses, stops, resumes or retries partitions of a consumer group. In the launchpad, "
            "fill in action, partitions, reason and by. The asset of the group shows the request."
        ),
    )


def build_kafka_rerun_job(*, name: str, kafka_key: str = "kafka") -> dg.JobDefinition:
    """Build the job that requests reruns of past ranges of a group.

    The group's sensor, and not this job, starts the runs.

    Args:
        name: The name of the job.
        kafka_key: The resource key of the `KafkaConsumerResource` of the group.
    """

    def execute(
        context: dg.OpExecutionContext, kafka: "KafkaConsumerResource", form: RerunConfig, by: str
    ) -> None:
        reruns = Reruns(context.instance, kafka)
        if form.cancel:
            context.log.info(reruns.cancel(form.cancel))
            return
        if not form.partitions:
            msg = (
                f"the form is not filled in: name the partitions {_EXAMPLES}, and set from_offset "
                "or since, reason and by (your name); or set only cancel (the id of a rerun)"
            )
            raise ConfigurationError(msg)
        span = span_of(form.from_offset, form.until_offset, form.since, form.until)
        request = RerunRequest(
            form.partitions, span, by, form.reason, form.records_per_run, form.runs_at_once
        )
        plan = reruns.plan(request)
        _show_and_begin(
            context, _plan_texts(plan), partial(reruns.begin, plan), dry_run=form.dry_run
        )

    return _operator_job(
        name,
        kafka_key,
        RerunConfig,
        execute,
        op_description="Stores the request for a rerun.",
        description=(
            "Processes past ranges of a consumer group again with the current code. Output keyed "
            "by range is replaced. Committed offsets do not change, and the group continues. In "
            "the launchpad, fill in partitions, offsets or times, reason and by. With dry_run: "
            "false, the sensor of the group starts the runs."
        ),
    )


def build_kafka_letters_job(*, name: str, kafka_key: str = "kafka") -> dg.JobDefinition:
    """Build the job that lists, replays and discards dead letters of a group.

    The group's sensor, and not this job, starts the runs of a replay.

    Args:
        name: The name of the job.
        kafka_key: The resource key of the `KafkaConsumerResource` of the group.
    """

    def execute(
        context: dg.OpExecutionContext, kafka: "KafkaConsumerResource", form: LettersConfig, by: str
    ) -> None:
        if form.action == "list":
            context.log.info(letters_text(DeadLetterTopic(kafka, form.topic)))
            return
        request = LetterRequest(
            form.keys, form.all_open, form.containing, by, form.reason, form.topic
        )
        if form.action == "discard":
            discarded = plan_discard(kafka, request)
            begin = partial(discard, context.instance, kafka, discarded)
            _show_and_begin(context, discarded.texts, begin, dry_run=form.dry_run)
            return
        plan = plan_replay(context.instance, kafka, request)
        begin = partial(Reruns(context.instance, kafka).begin, plan)
        _show_and_begin(context, _plan_texts(plan), begin, dry_run=form.dry_run)

    return _operator_job(
        name,
        kafka_key,
        LettersConfig,
        execute,
        op_description="Lists dead letters, or stores the request about them.",
        description=(
            "Lists, replays or discards dead letters of a consumer group. In the launchpad, fill "
            "in action, keys or all_open, reason and by, and set dry_run to false. The sensor of "
            "the group starts the runs of a replay."
        ),
    )


def _show_and_begin(
    context: dg.OpExecutionContext,
    plan_texts: Iterable[str],
    begin: Callable[[], str],
    *,
    dry_run: bool,
) -> None:
    for text in plan_texts:
        context.log.info(text)
    context.log.info("Nothing was started: this is a dry run." if dry_run else begin())


def _operator_job(
    name: str,
    kafka_key: str,
    form: type[_Form],
    execute: Callable[[dg.OpExecutionContext, "KafkaConsumerResource", _Form, str], None],
    *,
    op_description: str,
    description: str,
) -> dg.JobDefinition:
    @dg.op(
        name=f"{name}_request",
        required_resource_keys={kafka_key},
        config_schema={key: _field(key, field) for key, field in form.model_fields.items()},
        description=op_description,
    )
    def request(context: dg.OpExecutionContext) -> None:
        config = form(**context.op_config)
        kafka: KafkaConsumerResource = getattr(context.resources, kafka_key)
        try:
            execute(context, kafka, config, config.by or context.run.tags.get(USER_TAG, ""))
        except DagsterRebalanceError as error:
            raise dg.Failure(str(error), allow_retries=False) from None

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        tags={"dagster/max_retries": "0"},  # a retry would repeat an old request after newer ones
        description=description,
    )
    def job() -> None:
        request()

    return job


def _field(name: str, field: FieldInfo) -> dg.Field:
    default = {} if field.is_required() else {"default_value": field.default}
    return dg.Field(_plain(name, field.annotation), description=field.description, **default)


def _plain(name: str, annotation: Any) -> Any:  # noqa: ANN401 - a type, or one of Dagster's
    """Return a Dagster config type that reads no environment variable."""
    given = get_args(annotation)
    if get_origin(annotation) is Literal:
        return dg.Enum(f"{name}_choice", [dg.EnumValue(choice) for choice in given])
    if NoneType in given:
        (one,) = set(given) - {NoneType}
        return dg.Noneable(_plain(name, one))
    return list(given) if get_origin(annotation) is list else annotation


def _plan_texts(plan: RerunPlan) -> list[str]:
    """Return the ranges to process again and the ranges that are left out, one per line."""
    widened = set(plan.selection.widened)
    texts = [
        f"run {batch.number}: {range_}"
        + (" (as a whole, although only a part was selected)" if range_ in widened else "")
        for batch in plan.batches
        for range_ in batch.ranges
    ]
    if len(texts) > _ROWS_SHOWN:
        texts = [*texts[:_ROWS_SHOWN], f"and {len(texts) - _ROWS_SHOWN} more ranges"]
    return [
        "\n".join(texts),
        *(f"left out: {one}" for one in plan.selection.left_out[:_ROWS_SHOWN]),
    ]

"""Each form of asset that Dagster documents works, or is refused where definitions load.

All forms that work in one form of run are played in one run of it.
"""

from __future__ import annotations

import os
import signal
import warnings
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import KafkaBatch, build_kafka_batch_defs, build_kafka_stream_defs
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.storage.run_tags import run_config, run_tags
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration import asset_table
from tests.orchestration.asset_table import PAGE, ROWS, SEEN, Form, Outcome, page
from tests.orchestration.parts import GROUPS, batch_request, claimed, kafka_in_memory, tp
from tests.orchestration.streaming.stage import BY_THE_SENSOR, QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


BATCH = [form for form in ROWS if not form.batch]
STREAM = [form for form in ROWS if not form.stream]


def outcome_of(instance: dg.DagsterInstance, run_id: str) -> Outcome:
    found = Outcome(seen={name: [*said] for name, said in SEEN.items()})
    for record in instance.get_records_for_run(run_id).records:
        event = record.event_log_entry.dagster_event
        if event is None:
            continue
        if event.event_type is dg.DagsterEventType.ASSET_MATERIALIZATION:
            made = event.step_materialization_data.materialization
            found.made.setdefault(made.asset_key.to_user_string(), []).append(made)
        elif event.event_type is dg.DagsterEventType.ASSET_OBSERVATION:
            observed = event.asset_observation_data.asset_observation
            found.observed.setdefault(observed.asset_key.to_user_string(), []).append(observed)
    keys = {
        spec.key
        for form in ROWS
        for asset in form.given
        if isinstance(asset, dg.AssetsDefinition)
        for spec in asset.check_specs
    }
    latest = instance.event_log_storage.get_latest_asset_check_execution_by_key([*keys])
    for key, checked in latest.items():
        evaluated = checked.event.dagster_event if checked.event else None
        if evaluated and evaluated.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            name = f"{key.asset_key.to_user_string()}:{key.name}"
            found.checked[name] = evaluated.asset_check_evaluation_data.passed
    return found


def resources_of(forms: list[Form]) -> dict[str, Any]:
    return {key: one for form in forms for key, one in form.resources.items()}


@pytest.fixture(scope="module")
def new_instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


@pytest.fixture(scope="module")
def batch_run(new_instance: dg.DagsterInstance) -> Outcome:
    SEEN.clear()
    kafka, batch_id = kafka_in_memory(), unique_name("b")
    GROUPS[kafka.group_id].committed[tp(0)] = claimed(0, 10, batch_id)
    job = build_kafka_batch_defs(
        kafka=kafka,
        assets=[asset for form in BATCH for asset in form.given],
        resources=resources_of(BATCH),
    ).resolve_job_def("kafka_batches")
    done = job.execute_in_process(
        instance=new_instance,
        tags=run_tags(batch_request(batch_id), kafka.group_id),
        run_config=run_config(batch_request(batch_id), "kafka_batch"),
    )
    return outcome_of(new_instance, done.run_id)


@dg.asset
def begins(kafka_batch: KafkaBatch) -> None:
    SEEN.setdefault("begins", []).append(kafka_batch.batch_id)
    if len(SEEN["begins"]) > 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def stream_run(new_instance: dg.DagsterInstance) -> Outcome:
    SEEN.clear()
    kafka = kafka_in_memory(**QUICK)
    given = [asset for form in STREAM for asset in form.given]

    @dg.asset(deps=[key for asset in given for key in asset.keys])
    def ends(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001 - Dagster evaluates it
        os.kill(os.getpid(), signal.SIGTERM)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # of `resource_defs`
        job = build_kafka_stream_defs(
            kafka=kafka,
            assets=[begins, *given, ends],
            name="stream",
            resources=resources_of(STREAM),
        ).resolve_job_def("stream")
    GROUPS[kafka.group_id].produce(tp(0), 3)
    done = job.execute_in_process(instance=new_instance, tags=BY_THE_SENSOR)
    told = [entry.user_message for entry in new_instance.all_logs(done.run_id)]
    assert len(SEEN["begins"]) == 1, [text for text in told if "failed on" in text]
    (run,) = new_instance.get_runs(dg.RunsFilter(run_ids=[done.run_id]))
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert GROUPS[kafka.group_id].committed[tp(0)].offset == 3
    return outcome_of(new_instance, done.run_id)


@pytest.mark.parametrize("form", BATCH, ids=str)
def test_form_works_in_a_per_batch_run(form: Form, batch_run: Outcome) -> None:
    form.check(batch_run)


@pytest.mark.parametrize("form", STREAM, ids=str)
def test_form_works_in_a_streaming_run(form: Form, stream_run: Outcome) -> None:
    form.check(stream_run)


@pytest.mark.parametrize(
    ("build", "form", "why"),
    [
        *((build_kafka_batch_defs, form, form.batch) for form in ROWS if form.batch),
        *((build_kafka_stream_defs, form, form.stream) for form in ROWS if form.stream),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_form_is_refused_with_its_name_and_the_alternative(
    build: Callable[..., dg.Definitions], form: Form, why: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        build(kafka=kafka_in_memory(), assets=[*form.given], resources=form.resources)
    assert form.shown() in str(refused.value)
    assert why in str(refused.value)


def test_page_has_the_table_of_forms() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), f"run python -m {asset_table.__name__}"

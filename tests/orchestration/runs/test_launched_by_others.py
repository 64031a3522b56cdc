"""The config of a run cannot change its resources, and no message shows its variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    PinnedResource,
    build_kafka_batch_defs,
)
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import REFUSED_TAG, run_config, run_tags
from tests.orchestration.parts import GROUPS, batch_request, claimed, kafka_in_memory, tags_of, tp

if TYPE_CHECKING:
    from tests.orchestration.parts import KafkaInMemory

SECRET = "hunter2-of-the-environment"  # noqa: S105 - searched for
JAVA_AGENT = "-javaagent:/tmp/evil.jar"
RESOURCE_OVERRIDES: list[dict[str, Any]] = [
    {"spark": {"remote": "sc://attacker:1"}},
    {"spark": {"remote": {"env": "ETL_SECRET"}}},
    {"spark": {"spark_config": {"spark.driver.extraJavaOptions": JAVA_AGENT}}},
    {"spark": {"resource": {"remote": "sc://attacker:1"}}},
    {"kafka": {"bootstrap_servers": "attacker:9092"}},
    {"kafka": {"resource": {"bootstrap_servers": "attacker:9092"}}},
    {"kafka_batch": {"kafka": {"bootstrap_servers": "attacker:9092"}}},
]


class Stage:
    """A job with a claimed batch, whose asset records its resources."""

    def __init__(self, instance: dg.DagsterInstance, batch_id: str) -> None:
        self.instance = instance
        self.kafka: KafkaInMemory = kafka_in_memory()
        self.batch_request = batch_request(batch_id)
        GROUPS[self.kafka.group_id].committed[tp(0)] = claimed(0, 10, batch_id)
        self.given: list[str | None] = []

        @dg.asset(required_resource_keys={"kafka", "kafka_batch", "spark"})
        def work(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
            resources = context.resources
            self.given += [
                resources.spark.remote,
                resources.kafka.bootstrap_servers,
                resources.kafka_batch.kafka.bootstrap_servers,
            ]

        spark = KafkaSparkResource(remote="sc://ours:15002")
        self.definitions = build_kafka_batch_defs(kafka=self.kafka, assets=[work], spark=spark)

    def run(self, **resources: dict[str, Any]) -> tuple[dg.ExecuteInProcessResult, str]:
        config = run_config(self.batch_request, "kafka_batch")
        for key, settings in resources.items():
            given = config["resources"].setdefault(key, {"config": {}})["config"]
            given.update(settings)
        result = self.definitions.resolve_job_def("kafka_batches").execute_in_process(
            instance=self.instance,
            tags=run_tags(self.batch_request, self.kafka.group_id),
            run_config=config,
            raise_on_error=False,
        )
        return result, "\n".join(str(entry) for entry in self.instance.all_logs(result.run_id))


@pytest.fixture
def stage(instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("ETL_SECRET", SECRET)
    return Stage(instance, batch_id)


def test_run_gets_resources_of_the_definitions(stage: Stage) -> None:
    result, said = stage.run()
    assert result.success, said
    assert stage.given == ["sc://ours:15002", "memory:1", "memory:1"]


@pytest.mark.parametrize("override", RESOURCE_OVERRIDES, ids=str)
def test_run_config_cannot_override_resources(stage: Stage, override: dict[str, Any]) -> None:
    """Another server would receive the login. A JVM option is code."""
    with pytest.raises(dg.DagsterInvalidConfigError, match="unexpected config entry"):
        stage.run(**override)
    assert stage.given == []


def test_run_config_schema_has_only_the_batch(stage: Stage) -> None:
    schema: Any = stage.definitions.resolve_job_def("kafka_batches").run_config_schema.config_type
    resources = schema.fields["resources"].config_type.fields
    open_to_launchers = {
        key: sorted(resources[key].config_type.fields["config"].config_type.fields)
        for key in ("kafka", "kafka_batch", "spark")
    }
    assert open_to_launchers == {"kafka": [], "kafka_batch": ["batch_id", "ranges"], "spark": []}


def test_run_config_of_check_cannot_override_resources(stage: Stage) -> None:
    key = dg.AssetCheckKey(GroupAssets.of(stage.kafka.group_id).offsets, STOPPED_CHECK)
    checks = dg.define_asset_job("checks", selection=dg.AssetSelection.checks(key))
    job = dg.Definitions.merge(stage.definitions, dg.Definitions(jobs=[checks])).resolve_job_def(
        "checks"
    )
    with pytest.raises(dg.DagsterInvalidConfigError, match="unexpected config entry"):
        job.execute_in_process(
            instance=stage.instance,
            run_config={"resources": {"kafka": {"config": {"bootstrap_servers": "attacker:9092"}}}},
        )


@pytest.mark.parametrize(
    "edited",
    [
        {"batch_id": {"env": "ETL_SECRET"}},
        {"ranges": [{"env": "ETL_SECRET"}]},
        {"batch_id": {"env": "ETL_SECRET"}, "ranges": [{"env": "ETL_SECRET"}]},
        {"batch_id": {"env": "ETL_SECRET"}, "ranges": []},
    ],
    ids=str,
)
def test_refusal_shows_no_environment_variable(stage: Stage, edited: dict[str, Any]) -> None:
    """Dagster replaces {"env": NAME} in a config with its value."""
    result, said = stage.run(kafka_batch=edited)
    assert not result.success
    assert stage.given == []
    assert SECRET not in said
    if edited.get("ranges") != []:
        assert f"This run must not process batch {stage.batch_request.batch_id}: " in said
        assert tags_of(stage.instance, result.run_id)[REFUSED_TAG] == result.run_id


def test_own_definitions_can_pin_resources(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETL_BROKERS", "ours:9092")
    seen = []

    @dg.op
    def look(kafka: KafkaConsumerResource, spark: KafkaSparkResource) -> None:
        seen.append((kafka.bootstrap_servers, spark._run_id))

    kafka = KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("ETL_BROKERS"), group_id="etl", topics=["orders"]
    )
    resources = {
        "kafka": PinnedResource(resource=kafka),
        "spark": PinnedResource(resource=KafkaSparkResource()),
    }

    @dg.job(resource_defs={**resources, "kafka_batch": KafkaBatch(kafka=kafka)})
    def looks() -> None:
        look()

    result = looks.execute_in_process(instance=stage.instance)
    assert seen == [("ours:9092", result.run_id)]
    with pytest.raises(dg.DagsterInvalidConfigError, match="unexpected config entry"):
        looks.execute_in_process(
            run_config={"resources": {"kafka": {"config": {"bootstrap_servers": "attacker:9092"}}}}
        )

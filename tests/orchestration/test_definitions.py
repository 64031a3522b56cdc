"""Definitions of both forms of run: their parts, and their refusals before anything runs."""

from __future__ import annotations

import json
import re
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import Log, OffsetAndMetadata
from dagster_rebalance.orchestration import definitions
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import (
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    DRAINED_CHECK,
    GAP_CHECK,
    LAG_CHECK,
    STOPPED_CHECK,
)
from dagster_rebalance.orchestration.resources.client_settings import PinnedResource
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.storage.failure_notes import record_cause
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import RunEvent, record_run_event
from tests.orchestration import asset_table
from tests.orchestration.nested_resources import House, Lake
from tests.orchestration.parts import (
    GROUPS,
    batch_request,
    claimed,
    kafka_in_memory,
    make_run,
    span,
    tp,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.orchestration.parts import KafkaInMemory


def asset(name: str = "work", batch_key: str = "kafka_batch") -> dg.AssetsDefinition:
    @dg.asset(name=name, required_resource_keys={batch_key})
    def work() -> None:
        pass

    return work


def kafka(group_id: str = "etl", **settings: Any) -> KafkaConsumerResource:  # noqa: ANN401 - settings of all kinds
    return KafkaConsumerResource(
        bootstrap_servers="kafka:9092", group_id=group_id, topics=["orders"], **settings
    )


@dg.asset
def streamed(kafka_batch: KafkaBatch) -> None:
    """Never executed."""


BATCH, STREAM = (build_kafka_batch_defs,), (build_kafka_stream_defs,)
BOTH = (*BATCH, *STREAM)
both_forms = pytest.mark.parametrize("build", BOTH)


def test_definitions_load() -> None:
    dg.Definitions.validate_loadable(
        build_kafka_batch_defs(kafka=kafka(), assets=[asset()], name="orders")
    )


def test_job_runs_in_one_process() -> None:
    """A process for each step costs seconds."""
    job = build_kafka_batch_defs(kafka=kafka(), assets=[asset()], name="orders").resolve_job_def(
        "orders"
    )
    assert job.executor_def is dg.in_process_executor
    assert {key.to_user_string() for key in job.asset_layer.executable_asset_keys} == {"work"}


@dg.asset(check_specs=[dg.AssetCheckSpec("own", asset="with_check")])
def with_check(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN201 - two outputs
    """Never executed."""


@dg.asset_check(asset=with_check)
def apart() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@both_forms
def test_separate_check_is_no_step_of_the_job(
    build: Callable[..., dg.Definitions],
) -> None:
    """It takes no batch."""
    made = build(kafka=kafka(), assets=[with_check], name="orders")
    both = dg.Definitions.merge(made, dg.Definitions(asset_checks=[apart]))
    graph = both.resolve_job_def("orders").asset_layer.asset_graph
    assert {key.name for key in graph.asset_check_keys} == {"own"}


def test_sensor_is_stopped_by_default() -> None:
    """Loading code must not join a group."""
    defs = build_kafka_batch_defs(
        kafka=kafka(), assets=[asset()], name="orders", job_tags={"team": "etl"}
    )
    sensor = defs.resolve_sensor_def("orders_sensor")
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    assert sensor.minimum_interval_seconds == 5
    assert [target.job_name for target in sensor.targets] == ["orders"]
    assert defs.resolve_job_def("orders").tags["team"] == "etl"


def test_offsets_are_an_asset_with_a_partition_for_each_topic_partition() -> None:
    """A Dagster partition for each range would be too many within days."""
    defs = build_kafka_batch_defs(kafka=kafka(), assets=[asset("first"), asset("second")])
    graph = defs.resolve_asset_graph()
    group = GroupAssets.of("etl")
    offsets = graph.get(group.offsets)
    assert offsets.parent_keys == {dg.AssetKey("first"), dg.AssetKey("second")}
    assert isinstance(offsets.partitions_def, dg.DynamicPartitionsDefinition)
    assert offsets.partitions_def.name == group.partitions_name
    assert {graph.get(key).group_name for key in (group.offsets, group.group)} == {"streaming"}
    assert offsets.kinds == graph.get(group.group).kinds == {"kafka"}
    assert dg.AssetCheckKey(group.offsets, STOPPED_CHECK) in graph.asset_check_keys


K8S = {"pod_spec_config": {"termination_grace_period_seconds": 70}}


@both_forms
def test_tag_that_is_a_block_reaches_runs_as_json(
    build: Callable[..., dg.Definitions],
) -> None:
    defs = build(
        kafka=kafka(), assets=[streamed], name="orders", job_tags={"dagster-k8s/config": K8S}
    )
    assert json.loads(defs.resolve_job_def("orders").run_tags["dagster-k8s/config"]) == K8S


def test_changed_tag_is_new_code_of_streaming_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer grace period must reach the live pods."""
    versions: list[str] = []

    def noted(_functions: object, settings: str) -> str:
        versions.append(settings)
        return "v"

    monkeypatch.setattr(definitions, "code_version", noted)
    longer = {"pod_spec_config": {"termination_grace_period_seconds": 90}}
    for tags in (
        {"team": "etl", "k8s": {**K8S, "job_config": {}}},
        {"k8s": {"job_config": {}, **K8S}, "team": "etl"},
        {"team": "etl", "k8s": longer},
    ):
        build_kafka_stream_defs(kafka=kafka(), assets=[streamed], job_tags=tags)
    first, reordered, changed = versions
    assert first == reordered != changed


@both_forms
def test_group_has_a_lag_asset_and_a_lag_check_with_a_limit(
    build: Callable[..., dg.Definitions],
) -> None:
    group = GroupAssets.of("etl")
    graph = build(kafka=kafka(), assets=[streamed]).resolve_asset_graph()
    assert graph.get(group.lag).partitions_def is None
    usual = {
        dg.AssetCheckKey(group.offsets, STOPPED_CHECK),
        dg.AssetCheckKey(group.offsets, GAP_CHECK),
        dg.AssetCheckKey(group.group, DRAINED_CHECK),
    }
    assert graph.asset_check_keys == usual
    for limit in ({"lag_within_records": 0}, {"lag_within_s": 60.0}):
        graph = build(kafka=kafka(), assets=[streamed], **limit).resolve_asset_graph()
        assert graph.asset_check_keys - usual == {dg.AssetCheckKey(group.lag, LAG_CHECK)}
    with pytest.raises(ConfigurationError, match="lag_within_s=-1 must be a number above 0"):
        build(kafka=kafka(), assets=[streamed], lag_within_s=-1)


@both_forms
def test_topics_are_upstream_of_the_assets(
    build: Callable[..., dg.Definitions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPIC", "returns")
    resource = KafkaConsumerResource(
        bootstrap_servers="kafka:9092",
        group_id="etl",
        topics=["orders", dg.EnvVar("TOPIC"), dg.EnvVar("NOT_SET")],
    )
    other = build_kafka_batch_defs(
        kafka=kafka("other"),
        assets=[asset("second", "b2")],
        name="other",
        kafka_key="k",
        batch_key="b2",
    )
    graph = dg.Definitions.merge(
        build(kafka=resource, assets=[streamed]), other
    ).resolve_asset_graph()
    topics = {dg.AssetKey(["kafka_topics", topic]) for topic in ("orders", "returns")}
    assert {key for key in graph.get_all_asset_keys() if key.path[0] == "kafka_topics"} == topics
    assert {kind for key in topics for kind in graph.get(key).kinds} == {"kafka"}
    assert graph.get(streamed.key).parent_keys == topics
    assert graph.get(GroupAssets.of("etl").offsets).parent_keys == {streamed.key}


@both_forms
def test_topics_can_be_left_out(build: Callable[..., dg.Definitions]) -> None:
    """Dagster changes the deps of an asset only once."""
    graph = build(kafka=kafka(), assets=[streamed], show_topics=False).resolve_asset_graph()
    assert not graph.get(streamed.key).parent_keys


def test_asset_with_changed_deps_has_no_topics_upstream() -> None:
    changed = asset().map_asset_specs(lambda spec: spec.merge_attributes(deps=["customers"]))
    graph = build_kafka_batch_defs(kafka=kafka(), assets=[changed]).resolve_asset_graph()
    assert graph.get(changed.key).parent_keys == {dg.AssetKey("customers")}


@both_forms
def test_commit_within_s_is_a_freshness_policy_of_the_offsets(
    build: Callable[..., dg.Definitions],
) -> None:
    def offsets(**settings: float) -> dg.FreshnessPolicy | None:
        reads = kafka(record_every_s=89)
        graph = build(kafka=reads, assets=[streamed], **settings).resolve_asset_graph()
        return graph.get(GroupAssets.of("etl").offsets).freshness_policy

    assert offsets() is None
    assert offsets(commit_within_s=90) == dg.FreshnessPolicy.time_window(timedelta(seconds=90))
    with pytest.raises(ConfigurationError, match="commit_within_s=59 must be at least 60"):
        offsets(commit_within_s=59)
    with pytest.raises(ConfigurationError, match="commit_within_s=89 must be above record_every_s"):
        offsets(commit_within_s=89)


def test_two_groups_load_in_one_code_location() -> None:
    two = dg.Definitions.merge(
        *(
            build_kafka_batch_defs(
                kafka=kafka(group_id),
                assets=[asset(f"work_{group_id}", f"batch_{group_id}")],
                name=group_id,
                kafka_key=f"kafka_{group_id}",
                batch_key=f"batch_{group_id}",
            )
            for group_id in ("orders", "clicks")
        )
    )
    dg.Definitions.validate_loadable(two)
    for group_id in ("orders", "clicks"):
        assert two.resolve_sensor_def(f"{group_id}_sensor").required_resource_keys == {
            f"kafka_{group_id}"
        }
    assert {
        key.asset_key
        for key in two.resolve_asset_graph().asset_check_keys
        if key.name == STOPPED_CHECK
    } == {GroupAssets.of("orders").offsets, GroupAssets.of("clicks").offsets}


SECRET = "hunter2"  # noqa: S105 - the secret that must not be seen


def spark(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - settings of all kinds
    return {"spark": KafkaSparkResource(**settings)}


def registry(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    made = SchemaRegistryResource(**{"url": "https://registry", **settings})
    return {"resources": {"registry": made}}


def client(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    return {"kafka": kafka(**settings)}


@both_forms
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (client(sasl_password=SECRET), "sasl_password"),
        *(
            (client(client_config={name: value}), f"client_config['{name}']")
            for name, value in {
                "ssl.key.password": SECRET,
                "kafka.sasl.jaas.config": SECRET,
                "ssl.key.pem": SECRET,
                "sasl.oauthbearer.assertion.private.key.pem": SECRET,
                "sasl.oauthbearer.assertion.private.key.passphrase": SECRET,
                "sasl.oauthbearer.config": f"principal=me secret={SECRET}",
            }.items()
        ),
        *(
            (spark(remote=f"sc://{remote}"), f"{named} in remote")
            for remote, named in {
                "spark:15002/;token=hunter2": "the token",
                "spark:15002/;use_ssl=true;authorization=hunter2": "the authorization",
                "spark:15002/;hunter2": "a parameter without a name",
                "me:hunter2@spark:15002": "the login",
                "spark:15002/token=hunter2": "the login",
            }.items()
        ),
        *(
            (spark(spark_config={name: value}), f"spark_config['{name}']")
            for name, value in {
                "spark.hadoop.fs.s3a.secret.key": SECRET,
                "spark.hadoop.fs.azure.account.key.x.net": SECRET,
                "spark.jars.repositories": f"https://me:{SECRET}@jars",
                "spark.driver.extraJavaOptions": f"-Da.password={SECRET}",
            }.items()
        ),
        (
            spark(kafka_options={"kafka.sasl.jaas.config": SECRET}),
            "kafka_options['kafka.sasl.jaas.config']",
        ),
        (registry(username="etl", password=SECRET), "password of registry"),
        (registry(token=SECRET), "token of registry"),
        (
            registry(client_config={"bearer.auth.client.secret": SECRET}),
            "client_config of registry['bearer.auth.client.secret']",
        ),
        (
            registry(client_config={"basic.auth.user.info": f"etl:{SECRET}"}),
            "client_config['basic.auth.user.info'] of registry",
        ),
        (registry(url=f"https://etl:{SECRET}@registry"), "the login in url of registry"),
    ],
    ids=str,
)
def test_secret_in_the_code_is_refused(
    build: Callable[..., dg.Definitions], given: dict[str, Any], named: str
) -> None:
    """Dagster stores and shows definitions: in its database, its pages and its API."""
    with pytest.raises(ConfigurationError) as refused:
        build(**{"kafka": kafka(), "assets": [streamed], "name": "orders", **given})
    assert f"{named} of orders is plain text" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_run_cannot_redirect_a_registry() -> None:
    """An address in a run's config would collect the login."""
    token = dg.EnvVar("REGISTRY_TOKEN")
    defs = build_kafka_batch_defs(
        kafka=kafka(),
        assets=[asset()],
        resources={"registry": SchemaRegistryResource(url="https://registry", token=token)},
    )
    stored = dg.serialize_value(defs.resolve_job_def("kafka_batches").get_job_snapshot())
    assert isinstance((defs.resources or {})["registry"], PinnedResource)
    assert "https://registry" not in stored
    assert "REGISTRY_TOKEN" not in stored


AWS_LOGIN = "software.amazon.msk.auth.iam.IAMLoginModule"


@pytest.mark.parametrize(
    "given",
    [
        {"remote": "sc://spark:15002/;use_ssl=true;user_id=etl"},
        {"spark_config": {"spark.hadoop.fs.s3a.secret.key": dg.EnvVar("ETL_SECRET")}},
        {"spark_config": {"spark.hadoop.fs.s3a.aws.credentials.provider": "a.b.SecretProvider"}},
        {"spark_config": {"spark.ssl.keyStorePasswordFile": "/etc/x", "spark.ui.enabled": False}},
        {"spark_config": {"spark.sql.shuffle.partitions": 8}},
        {"kafka_options": {"kafka.sasl.jaas.config": f"{AWS_LOGIN} required;"}},
        {
            "kafka_options": {
                "kafka.sasl.jaas.config": 'Login required password="${env:KAFKA_PASSWORD}";'
            }
        },
    ],
)
def test_setting_without_a_secret_is_accepted_in_the_code(given: dict[str, Any]) -> None:
    """A false positive would lead users to bypass the check."""
    dg.Definitions.validate_loadable(
        build_kafka_batch_defs(kafka=kafka(), assets=[asset()], **spark(**given))
    )


def test_stored_definitions_have_no_setting_of_a_resource(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could be a secret, or overridden by a run."""
    monkeypatch.setenv("ETL_SECRET", "hunter2")
    secret = dg.EnvVar("ETL_SECRET")
    defs = build_kafka_batch_defs(
        kafka=kafka(
            sasl_password=secret, client_config={"ssl.key.password": secret, "client.id": "blue"}
        ),
        assets=[asset()],
        **spark(remote=secret),
    )
    stored = dg.serialize_value(defs.resolve_job_def("kafka_batches").get_job_snapshot())
    assert '"kafka_batch"' in stored
    for setting in ("hunter2", "ETL_SECRET", "kafka:9092"):
        assert setting not in stored


def test_downstream_assets_may_have_partitions_and_conditions() -> None:
    with pytest.raises(ConfigurationError) as refused:
        build_kafka_batch_defs(kafka=kafka(), assets=[asset_table.automated], name="orders")
    (advised,) = re.findall(r"such as (dg\..*), since", str(refused.value))
    condition = eval(advised)  # noqa: S307 - as a reader pastes it
    assert ~dg.AutomationCondition.any_deps_in_progress() not in condition.children

    @dg.asset(
        deps=["work"],
        partitions_def=dg.DailyPartitionsDefinition("2026-01-01"),
        automation_condition=condition,
    )
    def behind() -> None:
        """By day."""

    made = build_kafka_batch_defs(kafka=kafka(), assets=[asset()], name="orders")
    dg.Definitions.validate_loadable(dg.Definitions.merge(made, dg.Definitions([behind])))


_RED_LATER = dg.AssetCheckSpec(
    "red", asset="checked", automation_condition=dg.AutomationCondition.eager()
)


@dg.asset(check_specs=[_RED_LATER])
def checked(kafka_batch) -> dg.MaterializeResult:  # type: ignore[no-untyped-def, type-arg] # noqa: ANN001, ARG001 - Dagster evaluates it
    """Declarative Automation starts runs of its check, which are runs of the asset."""
    return dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=True)])


class Other(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource of another kind, as that of dagster-pyspark is."""


@dg.op
def _counted() -> int:
    return 0


@dg.graph_asset(name="inner")
def _graph() -> Any:  # noqa: ANN401 - Dagster's own type of a step's output
    return _counted()


@dg.asset(config_schema={"day": str}, required_resource_keys={"kafka_batch"})
def needs_day() -> None:
    """Never executed."""


@dg.resource(config_schema={"path": str})
def lake_by_function(_context: dg.InitResourceContext) -> str:
    return ""


@dg.resource(required_resource_keys={"lake"})
def behind_lake(_context: dg.InitResourceContext) -> str:
    return ""


@dg.asset
def in_lake(kafka_batch: KafkaBatch, lake: dg.ResourceParam[object]) -> None:
    """Never executed."""


@dg.asset
def behind(kafka_batch: KafkaBatch, house: dg.ResourceParam[object]) -> None:
    """Never executed."""


@dg.op
def flaky(kafka_batch: KafkaBatch) -> int:
    return kafka_batch.records


@dg.graph_asset
def retried_inside() -> int:
    made: int = flaky.with_retry_policy(dg.RetryPolicy(max_retries=1))()
    return made


@dg.multi_asset(
    specs=[
        dg.AssetSpec("first", skippable=True),
        dg.AssetSpec("third", deps=["second"], skippable=True),
    ],
    can_subset=True,
)
def around(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN201 - several outputs
    """Never called."""


def made_as(*key: str, **options: Any) -> dg.AssetsDefinition:  # noqa: ANN401 - options of all kinds
    def make(kafka_batch: KafkaBatch) -> None:
        """Never called."""

    made: dg.AssetsDefinition = dg.asset(key=[*key], **options)(make)
    return made


def with_own_rate(name: str, rate: int) -> dg.AssetsDefinition:
    def make(kafka_batch: KafkaBatch, rate: asset_table.Rate) -> None:
        """Never called."""

    own = asset_table.Rate(rate=rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # of `resource_defs`
        made: dg.AssetsDefinition = dg.asset(name=name, resource_defs={"rate": own})(make)
    return made


AT_LAUNCH = Lake.configure_at_launch()
WAITS = r"the resource '(lake|house)' of job orders is configured at launch"
NO_LIST = r"assets of orders is not a list: give assets=\[\.\.\.\]"
NO_ASSET = r"assets of orders has .*: give functions with @dg\.asset"
NO_BATCH = "of job orders does not take the resource 'kafka_batch'"
TWICE = "of orders has two definitions of"
CONFIG = "takes run config, which no batch has: .* a resource"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    # Assets that no run with a batch would serve
    (
        BOTH,
        {"assets": [asset_table.by_day]},
        "^asset by_day of orders has a partitions_def.* key t",
    ),
    (BOTH, {"assets": [asset_table.automated]}, "^asset automated of orders has an automation_con"),
    (BOTH, {"assets": [checked]}, "^check red of asset checked of orders has an automation_condit"),
    # A step without its batch could be executed again alone, beside the next run.
    (BATCH, {"assets": [asset(), dg.asset(name="outer")(lambda: None)]}, f"^outer {NO_BATCH}"),
    (BATCH, {"assets": [asset(), _graph]}, f"^_counted {NO_BATCH}"),
    # The sensor gives a run its batch alone: Dagster would refuse each run that it requests.
    (BATCH, {"assets": [asset_table.needs_config]}, "needs_config of job orders needs run config"),
    (BATCH, {"assets": [needs_day]}, "needs_day of job orders needs run config"),
    (BOTH, {"assets": [in_lake], "resources": {"lake": AT_LAUNCH}}, WAITS),
    (BOTH, {"assets": [in_lake], "resources": {"lake": lake_by_function}}, WAITS),
    (
        BOTH,
        {"assets": [behind], "resources": {"lake": lake_by_function, "house": behind_lake}},
        WAITS,
    ),
    (
        BOTH,
        {"assets": [behind], "resources": {"lake": AT_LAUNCH, "house": House(lake=AT_LAUNCH)}},
        WAITS,
    ),
    # Dagster would begin the step again in a run that a hold, or its lease, has interrupted.
    (
        BATCH,
        {"assets": [asset_table.retried]},
        "retried of job orders has a retry_policy.*attempts",
    ),
    (BATCH, {"assets": [retried_inside]}, "flaky of job orders has a retry_policy.*attempts"),
    # Assets that a streaming run cannot call for each batch
    (STREAM, {"assets": [asset_table.without_batch]}, "without_batch does not take the batch"),
    (
        STREAM,
        {"assets": [asset_table.takes_value]},
        "takes_value has the parameter 'returns_value', which is neither a resource nor the batch",
    ),
    (STREAM, {"assets": [_graph]}, "inner is not a single function"),
    (STREAM, {"assets": [asset_table.pooled]}, "pooled has a pool, .* with the argument `runs`"),
    (
        STREAM,
        {"assets": [asset_table.retried]},
        "retried has a retry_policy, .* `max_attempts` and",
    ),
    (STREAM, {"assets": [asset_table.hooked]}, "hooked has hooks, which no batch calls"),
    (STREAM, {"assets": [asset_table.has_config]}, f"has_config {CONFIG}"),
    (STREAM, {"assets": [asset_table.has_schema]}, f"has_schema {CONFIG}"),
    # Dagster splits such a multi-asset into two steps; a batch calls its function once.
    (
        STREAM,
        {"assets": [made_as("second", deps=["first"]), around]},
        "assets first, third and second depend on each other, .*: combine them in one",
    ),
    (
        STREAM,
        {"assets": [with_own_rate("one", 1), with_own_rate("two", 2)]},
        "asset two defines another resource 'rate' in",
    ),
    # Names and keys
    (BOTH, {"resources": {"kafka": object()}}, "the resource key 'kafka' is used by orders itself"),
    (
        BOTH,
        {"resources": {"kafka_batch": object()}},
        "the resource key 'kafka_batch' is used by or",
    ),
    (BOTH, {"kafka_key": "kafka_batch"}, "of orders is used twice"),
    (BOTH, {"spark_key": "kafka"}, "of orders is used twice"),
    (BOTH, {"name": "streamed"}, "streamed is the name of an asset and of the job"),
    (BOTH, {"assets": [made_as("a", "b"), made_as("a", "b")]}, f"{TWICE} a/b: "),
    (BOTH, {"assets": [made_as("a", "b"), made_as("a__b")]}, f"{TWICE} a/b and a__b: "),
    (BOTH, {"assets": [streamed, streamed]}, f"{TWICE} streamed: "),
    # Arguments of another type
    (BOTH, {"assets": []}, "orders has no assets"),
    (BOTH, {"assets": ["orders"]}, NO_ASSET),
    (BOTH, {"assets": [lambda: None]}, NO_ASSET),
    (BOTH, {"assets": streamed}, NO_LIST),
    (BOTH, {"assets": dg.Definitions(assets=[streamed])}, NO_LIST),
    (BOTH, {"spark": Other()}, "spark of orders is a Other: .* belongs into `resources`"),
    (BOTH, {"kafka": Other()}, "kafka of orders is a Other: give a KafkaConsumerResource"),
    (BOTH, {"lag_within_records": 0.5}, r"lag_within_records=0\.5 of orders must be a whole numb"),
    (BOTH, {"lag_within_s": -1}, "lag_within_s=-1 .*must be a number above 0"),
    (BOTH, {"commit_within_s": "1h"}, "commit_within_s='1h' of orders must be a number of seconds"),
    (BOTH, {"commit_within_s": 59}, "commit_within_s=59 .*must be at least 60"),
    (STREAM, {"runs": -1}, "runs=-1 of orders must be at least 0"),
    (STREAM, {"runs": 1.5}, r"runs=1\.5 of orders must be a whole number"),
    (STREAM, {"runs": "2"}, "runs='2' of orders must be a whole number"),
    (STREAM, {"max_run_s": "1h"}, "max_run_s='1h' of orders must be a number of seconds"),
    (STREAM, {"max_run_s": float("nan")}, "max_run_s=nan of orders must be a number of seconds"),
    (STREAM, {"max_run_s": 1.0}, "max_run_s=1 of orders must be at least 60"),
    # Otherwise the assets would be named after the variable.
    (BOTH, client(group_id=dg.EnvVar("NOT_SET")), "environment variable NOT_SET, which is not set"),
]


@pytest.mark.parametrize(
    ("build", "given", "why"),
    [(build, given, why) for builds, given, why in REFUSED for build in builds],
)
def test_definitions_that_cannot_work_are_refused(
    build: Callable[..., dg.Definitions], given: dict[str, Any], why: str
) -> None:
    """Where the code loads, and not in a run or a tick, hours later."""
    with pytest.raises(ConfigurationError, match=why):
        build(**{"kafka": kafka(), "assets": [streamed], "name": "orders", **given})


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (build_kafka_batch_defs, {"lease_s": float("nan")}, "lease_s=nan of group etl must be a n"),
        (build_kafka_stream_defs, {"record_every_s": float("nan")}, "record_every_s=nan"),
        (
            build_kafka_batch_defs,
            {"shutdown_timeout_s": -5.0},
            "shutdown_timeout_s=-5 .* at least 0 .0 to",
        ),
        (build_kafka_batch_defs, {"max_records_per_range": -1}, "max_records_per_range=-1 of gr"),
        (build_kafka_stream_defs, {"max_attempts": 0}, "max_attempts=0 of group etl"),
        (build_kafka_batch_defs, {"on_failure": "dead_letter"}, "needs a dead_letter_topic"),
        (build_kafka_batch_defs, {"lease_s": 19.0}, r"lease_s=19 .* at least 20 .* orders_sensor"),
        (build_kafka_batch_defs, {"sasl_mechanism": "PLAIN"}, "security"),
        (build_kafka_stream_defs, {"client_config": {"enable.auto.commit": True}}, "auto.commit"),
        (build_kafka_batch_defs, {"client_config": {"session.timeout.ms": 1}}, "session.timeout"),
    ],
    ids=[
        "lease-nan",
        "record-nan",
        "shutdown",
        "limit",
        "stream",
        "letters",
        "lease",
        "login",
        "auto-commit",
        "session",
    ],
)
def test_settings_that_each_tick_would_refuse_do_not_load(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[..., dg.Definitions],
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("ETL_GROUP", "etl")
    for group_id in ("etl", dg.EnvVar("ETL_GROUP")):
        with pytest.raises(ConfigurationError, match=message):
            build(kafka=kafka(group_id, **settings), assets=[streamed], name="orders")


@both_forms
def test_bisection_allows_one_function_that_gets_the_batch(
    build: Callable[..., dg.Definitions],
) -> None:
    @dg.asset
    def other(kafka_batch: KafkaBatch) -> None: ...

    given = kafka(on_failure="bisect", dead_letter_topic="dead")
    defs = build(kafka=given, assets=[streamed], name="orders")
    records_cause = defs.resolve_job_def("orders").hook_defs == {record_cause}
    assert records_cause is (build is build_kafka_batch_defs)
    with pytest.raises(ConfigurationError, match=r"has the ops .* on_failure='bisect' allows one"):
        build(kafka=given, assets=[streamed, other], name="orders")


@both_forms
@pytest.mark.parametrize(
    "settings",
    [
        {"max_records_per_range": dg.EnvVar.int("MOST")},
        {"on_failure": "dead_letter", "dead_letter_topic": dg.EnvVar("LETTERS")},
        {"sasl_password": dg.EnvVar("PASSWORD"), "security_protocol": dg.EnvVar("PROTOCOL")},
    ],
    ids=["number", "text", "client"],
)
def test_settings_from_variables_are_left_to_the_tick(
    build: Callable[..., dg.Definitions], settings: dict[str, Any]
) -> None:
    build(kafka=kafka(**settings), assets=[streamed], name="orders")


@both_forms
@pytest.mark.parametrize(
    "lake", [Lake(path="/data"), Lake(path=dg.EnvVar("NOT_SET")), Lake.configure_at_launch(path="")]
)
def test_resource_that_has_its_values_is_accepted(
    build: Callable[..., dg.Definitions], lake: object
) -> None:
    """One that no asset takes may wait for runs of other jobs."""
    resources = {"lake": lake, "house": lake_by_function}
    build(kafka=kafka(), assets=[in_lake], resources=resources, name="orders")


def test_config_with_defaults_may_stay_in_per_batch_runs() -> None:
    """Dagster needs no value of it."""
    assets = [asset_table.has_config, asset_table.has_schema]
    build_kafka_batch_defs(kafka=kafka(), assets=assets, name="orders")


def test_group_id_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETL_GROUP", "etl-production")
    defs = build_kafka_batch_defs(kafka=kafka(dg.EnvVar("ETL_GROUP")), assets=[asset()])
    assert (
        GroupAssets.of("etl-production").offsets in defs.resolve_asset_graph().get_all_asset_keys()
    )


class Check:
    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.kafka: KafkaInMemory = kafka_in_memory(max_attempts=2)
        self.group = GROUPS[self.kafka.group_id]
        for number in (0, 1):
            self.group.produce(tp(number), 10)
        self.key = dg.AssetCheckKey(GroupAssets.of(self.kafka.group_id).offsets, STOPPED_CHECK)
        checks = dg.define_asset_job(
            "checks",
            selection=dg.AssetSelection.checks(self.key),
            executor_def=dg.in_process_executor,
        )
        made = build_kafka_batch_defs(kafka=self.kafka, assets=[asset()])
        self.job = dg.Definitions.merge(made, dg.Definitions(jobs=[checks])).resolve_job_def(
            "checks"
        )

    def fail(self, attempt: int = 1, message: str | None = None) -> dg.DagsterRun:
        """A run of batch b-1 that has worked and failed, and of which nothing works any more."""
        run = make_run(
            self.instance,
            batch_request("b-1", attempt=attempt),
            dg.DagsterRunStatus.STARTED,
            group_id=self.kafka.group_id,
        )
        for mark in (RunEvent.BEGAN, RunEvent.FINISHED, RunEvent.OVER):
            record_run_event(self.instance, run, mark)
        self.instance.report_run_failed(run, message)
        return run

    def execute(self) -> tuple[bool, str, list[object]]:
        """Whether it passed, its description, and the partitions that are stopped."""
        result = self.job.execute_in_process(instance=self.instance)
        (evaluation,) = result.get_asset_check_evaluations()
        assert evaluation.asset_check_key == self.key
        table = evaluation.metadata["stopped"]
        assert isinstance(table, dg.TableMetadataValue)
        stopped: list[object] = [row.data["partition"] for row in table.records]
        return evaluation.passed, evaluation.description or "", stopped


@pytest.fixture
def check() -> Iterator[Check]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Check(instance)


def test_manual_check_passes_without_a_member(check: Check) -> None:
    """One failed run of two is no stop."""
    check.group.committed[tp(0)] = claimed(0, 10, "b-1")
    check.fail()
    assert check.execute() == (True, "no partition is stopped or paused", [])


def test_manual_check_finds_each_reason_to_stop(check: Check) -> None:
    check.group.committed[tp(0)] = claimed(0, 10, "b-1")
    check.group.committed[tp(1)] = OffsetAndMetadata(3, "spark-checkpoint-17")
    _, last = check.fail(), check.fail(attempt=2)
    passed, description, stopped = check.execute()
    assert not passed
    assert (
        f"orders-0: 2 runs failed on orders-0 [0, 10), the last one is {last.run_id}" in description
    )
    assert (
        "orders-1: the metadata 'spark-checkpoint-17' was not written by dagster_rebalance"
        in description
    )
    assert stopped == ["orders-0", "orders-1"]


def test_manual_check_has_the_error_and_links_the_run(check: Check) -> None:
    check.group.committed[tp(0)] = claimed(0, 10, "b-1")
    _, last = check.fail(), check.fail(attempt=2, message="the warehouse is away")
    result = check.job.execute_in_process(instance=check.instance)
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.metadata["error of orders-0"].value == "the warehouse is away"
    link = evaluation.metadata[f"run {last.run_id[:8]}"]
    assert link == dg.MetadataValue.dagster_run(last.run_id)


def test_manual_check_finds_deleted_offsets(check: Check) -> None:
    check.group.committed[tp(0)] = OffsetAndMetadata(2)
    check.group.committed[tp(1)] = OffsetAndMetadata(10)
    check.group.delete_before(tp(0), 5)
    passed, description, _ = check.execute()
    assert not passed
    assert description.startswith("orders-0: Kafka's retention deleted records from offset 2 on")


def test_manual_check_finds_lost_offsets_and_records(check: Check) -> None:
    """Only this check can report them while no member is there."""
    catalogue = Catalogue(check.instance, GroupAssets.of(check.kafka.group_id), NO_MEMBER)
    for number in (0, 1):
        done = RecordCommit(span(number), 1, "b", "r", lag=0, claim_to_commit_s=None, drain_s=None)
        catalogue.record_commits([done])
    check.group.committed[tp(1)] = encode(StoredPartition(10, log=Log(leader_epoch=1)))
    check.group.elect(tp(1))
    check.group.elect(tp(1), cut_at=5)
    check.group.produce(tp(1), 20)
    passed, description, _ = check.execute()
    assert not passed
    assert "orders-0: the group has no committed offset in Kafka any more" in description
    assert (
        "orders-1: the group is at offset 10, but the log lost records before that offset"
        in description
    )

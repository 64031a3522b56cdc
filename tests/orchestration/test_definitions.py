"""`build_kafka_batch_defs` gives a team all parts from one call.

The tests also show what it refuses before anything runs.
"""

from __future__ import annotations

import json
import re
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
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.pinned_resource import PinnedResource
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import RunEvent, record_run_event
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


def test_the_definitions_load() -> None:
    """As a code location loads them: every resource and every asset fits."""
    dg.Definitions.validate_loadable(
        build_kafka_batch_defs(kafka=kafka(), assets=[asset()], name="orders")
    )


def test_the_job_runs_in_one_process() -> None:
    """A process for each step costs seconds, and Spark is the parallelism."""
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


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
def test_a_check_that_is_defined_apart_is_no_step_of_the_job(
    build: Callable[..., dg.Definitions],
) -> None:
    """It takes no batch: executed again alone, it would look at no claim and give no sign."""
    made = build(kafka=kafka(), assets=[with_check], name="orders")
    both = dg.Definitions.merge(made, dg.Definitions(asset_checks=[apart]))
    graph = both.resolve_job_def("orders").asset_layer.asset_graph
    assert {key.name for key in graph.asset_check_keys} == {"own"}


def test_the_sensor_is_off_until_it_is_turned_on() -> None:
    """Loading code must not join a group."""
    defs = build_kafka_batch_defs(
        kafka=kafka(), assets=[asset()], name="orders", job_tags={"team": "etl"}
    )
    sensor = defs.resolve_sensor_def("orders_sensor")
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    assert sensor.minimum_interval_seconds == 5
    assert [target.job_name for target in sensor.targets] == ["orders"]
    assert defs.resolve_job_def("orders").tags["team"] == "etl"


def test_the_offsets_are_an_asset_behind_the_others_with_a_partition_for_each_topic_partition() -> (
    None
):
    """Dagster plots row counts, lag and drains for each partition of the asset.

    A Dagster partition for each range would be too many within days.
    """
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


@dg.asset
def streamed(kafka_batch: KafkaBatch) -> None:
    """Never executed."""


both_forms = pytest.mark.parametrize(
    ("build", "made"), [(build_kafka_batch_defs, asset()), (build_kafka_stream_defs, streamed)]
)


K8S = {"pod_spec_config": {"termination_grace_period_seconds": 70}}


@both_forms
def test_a_tag_may_be_a_block_and_reaches_runs_as_json(
    build: Callable[..., dg.Definitions], made: dg.AssetsDefinition
) -> None:
    """As dagster-k8s reads it."""
    defs = build(kafka=kafka(), assets=[made], name="orders", job_tags={"dagster-k8s/config": K8S})
    assert json.loads(defs.resolve_job_def("orders").run_tags["dagster-k8s/config"]) == K8S


def test_another_value_of_a_tag_is_new_code_of_streaming_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer grace must reach the pods that live. In which order tags stand is no matter."""
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
def test_a_group_has_its_lag_as_an_asset_and_a_check_of_it_once_there_is_a_limit(
    build: Callable[..., dg.Definitions], made: dg.AssetsDefinition
) -> None:
    """Dagster plots an asset without partitions over time. Nobody else knows what is too much."""
    group = GroupAssets.of("etl")
    graph = build(kafka=kafka(), assets=[made]).resolve_asset_graph()
    assert graph.get(group.lag).partitions_def is None
    usual = {
        dg.AssetCheckKey(group.offsets, STOPPED_CHECK),
        dg.AssetCheckKey(group.offsets, GAP_CHECK),
        dg.AssetCheckKey(group.group, DRAINED_CHECK),
    }
    assert graph.asset_check_keys == usual
    for limit in ({"lag_within_records": 0}, {"lag_within_s": 60.0}):
        graph = build(kafka=kafka(), assets=[made], **limit).resolve_asset_graph()
        assert graph.asset_check_keys - usual == {dg.AssetCheckKey(group.lag, LAG_CHECK)}
    with pytest.raises(ConfigurationError, match="lag_within_s=-1 must be a number above 0"):
        build(kafka=kafka(), assets=[made], lag_within_s=-1)


@both_forms
def test_the_topics_are_upstream_of_the_assets(
    build: Callable[..., dg.Definitions], made: dg.AssetsDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lineage begins where the records come from. A second group of a topic has the same."""
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
    graph = dg.Definitions.merge(build(kafka=resource, assets=[made]), other).resolve_asset_graph()
    topics = {dg.AssetKey(["kafka_topics", topic]) for topic in ("orders", "returns")}
    assert {key for key in graph.get_all_asset_keys() if key.path[0] == "kafka_topics"} == topics
    assert {kind for key in topics for kind in graph.get(key).kinds} == {"kafka"}
    assert graph.get(made.key).parent_keys == topics
    assert graph.get(GroupAssets.of("etl").offsets).parent_keys == {made.key}


@both_forms
def test_the_topics_can_be_left_out(
    build: Callable[..., dg.Definitions], made: dg.AssetsDefinition
) -> None:
    """Dagster changes the deps of an asset only once, and somebody may have to."""
    graph = build(kafka=kafka(), assets=[made], show_topics=False).resolve_asset_graph()
    assert not graph.get(made.key).parent_keys


def test_an_asset_whose_deps_were_changed_has_no_topics_upstream() -> None:
    """Dagster changes them only once."""
    changed = asset().map_asset_specs(lambda spec: spec.merge_attributes(deps=["customers"]))
    graph = build_kafka_batch_defs(kafka=kafka(), assets=[changed]).resolve_asset_graph()
    assert graph.get(changed.key).parent_keys == {dg.AssetKey("customers")}


@both_forms
def test_the_committed_offsets_are_stale_after_a_while_if_that_is_wanted(
    build: Callable[..., dg.Definitions], made: dg.AssetsDefinition
) -> None:
    """Dagster's own alerts go by it."""

    def offsets(**settings: float) -> dg.FreshnessPolicy | None:
        graph = build(kafka=kafka(), assets=[made], **settings).resolve_asset_graph()
        return graph.get(GroupAssets.of("etl").offsets).freshness_policy

    assert offsets() is None
    assert offsets(commit_within_s=90) == dg.FreshnessPolicy.time_window(timedelta(seconds=90))
    with pytest.raises(ConfigurationError, match="commit_within_s=59 must be at least 60"):
        offsets(commit_within_s=59)


def test_two_groups_live_in_one_code_location() -> None:
    """Each with a name and resource keys of its own."""
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


@pytest.mark.parametrize("key", ["kafka", "kafka_batch"])
def test_a_resource_key_that_is_taken_is_refused(key: str) -> None:
    """One of the two would be used for both, silently."""
    with pytest.raises(
        ConfigurationError, match=f"the resource key '{key}' is used by orders itself"
    ):
        build_kafka_batch_defs(
            kafka=kafka(), assets=[asset()], name="orders", resources={key: object()}
        )


def test_a_job_cannot_be_called_like_its_asset() -> None:
    """Dagster refuses it too, but speaks of conflicting definitions."""
    with pytest.raises(ConfigurationError, match="work is the name of an asset and of the job"):
        build_kafka_batch_defs(kafka=kafka(), assets=[asset("work")], name="work")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sasl_password": "hunter2"}, "sasl_password"),
        ({"client_config": {"ssl.key.password": "hunter2"}}, "client_config['ssl.key.password']"),
        (
            {"client_config": {"kafka.sasl.jaas.config": "hunter2"}},
            "client_config['kafka.sasl.jaas.config']",
        ),
        ({"client_config": {"ssl.key.pem": "hunter2"}}, "client_config['ssl.key.pem']"),
        (
            {"client_config": {"sasl.oauthbearer.assertion.private.key.pem": "hunter2"}},
            "client_config['sasl.oauthbearer.assertion.private.key.pem']",
        ),
        (
            {"client_config": {"sasl.oauthbearer.assertion.private.key.passphrase": "hunter2"}},
            "client_config['sasl.oauthbearer.assertion.private.key.passphrase']",
        ),
        (
            {"client_config": {"sasl.oauthbearer.config": "principal=me secret=hunter2"}},
            "client_config['sasl.oauthbearer.config']",
        ),
        (
            {"spark": KafkaSparkResource(remote="sc://spark:15002/;token=hunter2")},
            "the token in remote",
        ),
        (
            {
                "spark": KafkaSparkResource(
                    remote="sc://spark:15002/;use_ssl=true;authorization=hunter2"
                )
            },
            "the authorization in remote",
        ),
        (
            {"spark": KafkaSparkResource(remote="sc://spark:15002/;hunter2")},
            "a parameter without a name in remote",
        ),
        (
            {"spark": KafkaSparkResource(remote="sc://me:hunter2@spark:15002")},
            "the login in remote",
        ),
        (
            {"spark": KafkaSparkResource(remote="sc://spark:15002/token=hunter2")},
            "the login in remote",
        ),
        (
            {
                "spark": KafkaSparkResource(
                    spark_config={"spark.hadoop.fs.s3a.secret.key": "hunter2"}
                )
            },
            "spark_config['spark.hadoop.fs.s3a.secret.key']",
        ),
        (
            {
                "spark": KafkaSparkResource(
                    spark_config={"spark.hadoop.fs.azure.account.key.x.net": "hunter2"}
                )
            },
            "spark_config['spark.hadoop.fs.azure.account.key.x.net']",
        ),
        (
            {
                "spark": KafkaSparkResource(
                    spark_config={"spark.jars.repositories": "https://me:hunter2@jars"}
                )
            },
            "spark_config['spark.jars.repositories']",
        ),
        (
            {
                "spark": KafkaSparkResource(
                    spark_config={"spark.driver.extraJavaOptions": "-Da.password=hunter2"}
                )
            },
            "spark_config['spark.driver.extraJavaOptions']",
        ),
        (
            {"spark": KafkaSparkResource(kafka_options={"kafka.sasl.jaas.config": "hunter2"})},
            "kafka_options['kafka.sasl.jaas.config']",
        ),
    ],
)
def test_a_secret_that_stands_in_the_code_is_refused(settings: dict[str, Any], named: str) -> None:
    """Dagster stores definitions and shows them.

    A secret in them is in its database, in its pages and in its API.
    """
    spark = settings.pop("spark", None)
    with pytest.raises(ConfigurationError) as refused:
        build_kafka_batch_defs(kafka=kafka(**settings), assets=[asset()], spark=spark)
    assert f"{named} of kafka_batches is given as a plain text" in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"username": "etl", "password": "hunter2"}, "password of registry"),
        ({"token": "hunter2"}, "token of registry"),
        (
            {"client_config": {"bearer.auth.client.secret": "hunter2"}},
            "client_config of registry['bearer.auth.client.secret']",
        ),
        (
            {"client_config": {"basic.auth.user.info": "etl:hunter2"}},
            "client_config['basic.auth.user.info'] of registry",
        ),
        ({"url": "https://etl:hunter2@registry"}, "the login in url of registry"),
    ],
)
def test_a_secret_of_a_registry_that_stands_in_the_code_is_refused(
    build: Any,  # noqa: ANN401 - either function
    settings: dict[str, Any],
    named: str,
) -> None:
    """As those of Kafka and of Spark are."""
    registry = SchemaRegistryResource(**{"url": "https://registry", **settings})
    with pytest.raises(ConfigurationError) as refused:
        build(kafka=kafka(), assets=[asset()], resources={"registry": registry}, name="orders")
    assert f"{named} of orders is given as a plain text" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_run_cannot_redirect_a_registry() -> None:
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


@pytest.mark.parametrize(
    "spark",
    [
        {"remote": "sc://spark:15002/;use_ssl=true;user_id=etl"},
        {"spark_config": {"spark.hadoop.fs.s3a.secret.key": dg.EnvVar("ETL_SECRET")}},
        {"spark_config": {"spark.hadoop.fs.s3a.aws.credentials.provider": "a.b.SecretProvider"}},
        {
            "spark_config": {
                "spark.ssl.keyStorePasswordFile": "/etc/x",
                "spark.sql.shuffle.partitions": 8,
                "spark.ui.enabled": False,
            }
        },
        {
            "kafka_options": {
                "kafka.sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;"
            }
        },
        {
            "kafka_options": {
                "kafka.sasl.jaas.config": 'Login required password="${env:KAFKA_PASSWORD}";'
            }
        },
    ],
)
def test_what_is_no_secret_may_stand_in_the_code(spark: dict[str, Any]) -> None:
    """A refusal that is wrong teaches people to get around it."""
    dg.Definitions.validate_loadable(
        build_kafka_batch_defs(kafka=kafka(), assets=[asset()], spark=KafkaSparkResource(**spark))
    )


def test_no_setting_of_the_resources_is_in_the_stored_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Dagster stores of a job is shown to everybody.

    It must have no secret, and nothing that a run could override.
    """
    monkeypatch.setenv("ETL_SECRET", "hunter2")
    secret = dg.EnvVar("ETL_SECRET")
    spark = KafkaSparkResource(remote=secret)
    defs = build_kafka_batch_defs(
        kafka=kafka(
            sasl_password=secret, client_config={"ssl.key.password": secret, "client.id": "blue"}
        ),
        assets=[asset()],
        spark=spark,
    )
    stored = dg.serialize_value(defs.resolve_job_def("kafka_batches").get_job_snapshot())
    assert '"kafka_batch"' in stored
    for setting in ("hunter2", "ETL_SECRET", "kafka:9092"):
        assert setting not in stored


@dg.asset(partitions_def=dg.DailyPartitionsDefinition("2026-01-01"))
def daily(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
    """Has partitions, and no run of it would have one."""


@dg.asset(automation_condition=dg.AutomationCondition.eager())
def eager(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Declarative Automation starts runs of it, without a batch."""


_RED_LATER = dg.AssetCheckSpec(
    "red", asset="checked", automation_condition=dg.AutomationCondition.eager()
)


@dg.asset(check_specs=[_RED_LATER])
def checked(kafka_batch) -> dg.MaterializeResult:  # type: ignore[no-untyped-def, type-arg] # noqa: ANN001, ARG001 - as above
    """Declarative Automation starts runs of its check, which are runs of the asset."""
    return dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=True)])


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (daily, "^asset daily of orders has a partitions_def.* key the output by the ranges"),
        (eager, "^asset eager of orders has an automation_condition.* would have no batch: remove"),
        (checked, "^check red of asset checked of orders has an automation_condition"),
    ],
)
def test_what_no_run_with_a_batch_would_serve_is_refused(
    build: Callable[..., dg.Definitions], refused: dg.AssetsDefinition, why: str
) -> None:
    """Dagster takes it, and starts runs that fail, or materialises without a partition."""
    with pytest.raises(ConfigurationError, match=why):
        build(kafka=kafka(), assets=[refused], name="orders")


def test_assets_behind_those_of_a_batch_may_have_partitions_and_conditions() -> None:
    """As the refusals advise: the condition is what the text of one says."""
    with pytest.raises(ConfigurationError) as refused:
        build_kafka_batch_defs(kafka=kafka(), assets=[eager], name="orders")
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


def test_without_assets_there_is_nothing_to_run() -> None:
    """An empty selection would select every asset, or none, with a message about neither."""
    with pytest.raises(ConfigurationError, match="orders has no assets"):
        build_kafka_batch_defs(kafka=kafka(), assets=[], name="orders")


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize("keys", [{"kafka_key": "kafka_batch"}, {"spark_key": "kafka"}])
def test_one_resource_key_for_two_things_is_refused(
    build: Callable[..., dg.Definitions], keys: dict[str, str]
) -> None:
    """One of the two would be in the place of the other, and each tick would fail."""
    with pytest.raises(ConfigurationError, match="of orders stands for two things"):
        build(kafka=kafka(), assets=[streamed], name="orders", **keys)


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize("given", ["orders", lambda: None], ids=["text", "function"])
def test_what_is_no_asset_with_a_function_is_refused_in_words(
    build: Callable[..., dg.Definitions], given: object
) -> None:
    """Each has a name like an asset, and an AttributeError says nothing about it."""
    with pytest.raises(ConfigurationError, match=r"assets of orders has .*: give what @dg\.asset"):
        build(kafka=kafka(), assets=[given], name="orders")


def made_as(key: list[str]) -> dg.AssetsDefinition:
    @dg.asset(key=key)
    def made(kafka_batch: KafkaBatch) -> None:
        """Never called."""

    return made


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    ("keys", "shown"),
    [((["a", "b"], ["a", "b"]), "a/b"), ((["a", "b"], ["a__b"]), "a/b and a__b")],
    ids=["same key", "same name"],
)
def test_two_definitions_of_one_asset_are_refused(
    build: Callable[..., dg.Definitions], keys: tuple[list[str], ...], shown: str
) -> None:
    """A streaming run would call both for each batch."""
    given = list(map(made_as, keys))
    with pytest.raises(ConfigurationError, match=f"of orders has two definitions of {shown}: "):
        build(kafka=kafka(), assets=given, name="orders")


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
def test_an_asset_that_is_given_twice_is_refused(build: Callable[..., dg.Definitions]) -> None:
    """As two definitions of it."""
    with pytest.raises(ConfigurationError, match="of orders has two definitions of streamed: "):
        build(kafka=kafka(), assets=[streamed, streamed], name="orders")


class Other(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource of another kind, as that of dagster-pyspark is."""


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"assets": streamed}, r"assets of orders is no list: give assets=\[\.\.\.\]"),
        ({"assets": dg.Definitions(assets=[streamed])}, "assets of orders is no list: give assets"),
        ({"spark": Other()}, "spark of orders is a Other: .* belongs into `resources`"),
        ({"kafka": Other()}, "kafka of orders is a Other: give a KafkaConsumerResource"),
        ({"lag_within_records": 0.5}, r"lag_within_records=0\.5 of orders must be a whole number"),
        ({"commit_within_s": "1h"}, "commit_within_s='1h' of orders must be a number of seconds"),
    ],
    ids=["asset", "definitions", "spark", "kafka", "whole", "seconds"],
)
def test_an_argument_of_another_type_is_refused_by_name(
    build: Callable[..., dg.Definitions], given: dict[str, Any], message: str
) -> None:
    """A TypeError from within says neither which argument it was nor what to give."""
    with pytest.raises(ConfigurationError, match=message):
        build(**{"kafka": kafka(), "assets": [streamed], "name": "orders", **given})


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (build_kafka_batch_defs, {"lease_s": float("nan")}, "lease_s=nan of group etl must be a n"),
        (build_kafka_stream_defs, {"record_every_s": float("nan")}, "record_every_s=nan"),
        (build_kafka_batch_defs, {"shutdown_timeout_s": -5.0}, "shutdown_timeout_s=-5 .* be 0, to"),
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
    """A deploy with them would stop the group, although `dg check defs` was content."""
    monkeypatch.setenv("ETL_GROUP", "etl")
    for group_id in ("etl", dg.EnvVar("ETL_GROUP")):
        with pytest.raises(ConfigurationError, match=message):
            build(kafka=kafka(group_id, **settings), assets=[streamed], name="orders")


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_records_per_range": dg.EnvVar.int("MOST")},
        {"on_failure": "dead_letter", "dead_letter_topic": dg.EnvVar("LETTERS")},
        {"sasl_password": dg.EnvVar("PASSWORD"), "security_protocol": dg.EnvVar("PROTOCOL")},
    ],
    ids=["number", "text", "client"],
)
def test_settings_that_are_variables_are_left_to_the_tick(
    build: Callable[..., dg.Definitions], settings: dict[str, Any]
) -> None:
    """Where the code is checked, they need not be set."""
    build(kafka=kafka(**settings), assets=[streamed], name="orders")


@dg.op
def _counted() -> int:
    return 0


@dg.graph_asset(name="inner")
def _graph() -> Any:  # noqa: ANN401 - Dagster's own type of a step's output
    return _counted()


@pytest.mark.parametrize(
    ("other", "name"), [(dg.asset(name="outer")(lambda: None), "outer"), (_graph, "_counted")]
)
def test_a_step_that_does_not_take_its_batch_is_refused(
    other: dg.AssetsDefinition, name: str
) -> None:
    """A step without its batch could be executed again alone, beside the next run.

    It would look at no claim and give no sign of life.
    """
    with pytest.raises(
        ConfigurationError, match=f"^{name} of job orders does not take the resource 'kafka_batch'"
    ):
        build_kafka_batch_defs(kafka=kafka(), assets=[asset(), other], name="orders")


class Needed(dg.Config):
    day: str


def _needs_config(kafka_batch: KafkaBatch, config: Needed) -> None:
    """Never executed."""


_needs_config.__annotations__["config"] = Needed  # Dagster reads no text there
needs_config = dg.asset(name="needs_config")(_needs_config)


@dg.asset(config_schema={"day": str}, required_resource_keys={"kafka_batch"})
def needs_day() -> None:
    """Never executed."""


@dg.asset(config_schema={"day": dg.Field(str, default_value="")}, required_resource_keys={"k"})
def has_default() -> None:
    """Never executed."""


@pytest.mark.parametrize("needs", [needs_config, needs_day], ids=["class", "schema"])
def test_an_asset_that_needs_run_config_is_refused(needs: dg.AssetsDefinition) -> None:
    """The sensor gives a run its batch alone: Dagster would refuse each run that it requests."""
    with pytest.raises(ConfigurationError, match=r"needs_.* of job orders needs run config"):
        build_kafka_batch_defs(kafka=kafka(), assets=[needs], name="orders")
    build_kafka_batch_defs(kafka=kafka(), assets=[has_default], batch_key="k", name="orders")


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


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    ("taker", "resources"),
    [
        (in_lake, {"lake": Lake.configure_at_launch()}),
        (in_lake, {"lake": lake_by_function}),
        (behind, {"lake": lake_by_function, "house": behind_lake}),
        (
            behind,
            {"lake": (at_launch := Lake.configure_at_launch()), "house": House(lake=at_launch)},
        ),
    ],
    ids=["class", "function", "behind another", "inside another"],
)
def test_a_resource_that_is_configured_at_launch_is_refused(
    build: Callable[..., dg.Definitions], taker: dg.AssetsDefinition, resources: dict[str, Any]
) -> None:
    """The sensor gives a run its batch alone: Dagster would refuse each run that it requests."""
    with pytest.raises(
        ConfigurationError,
        match=r"the resource '(lake|house)' of job orders is configured at launch",
    ):
        build(kafka=kafka(), assets=[taker], resources=resources, name="orders")


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    "lake", [Lake(path="/data"), Lake(path=dg.EnvVar("NOT_SET")), Lake.configure_at_launch(path="")]
)
def test_a_resource_that_has_its_values_is_taken(
    build: Callable[..., dg.Definitions], lake: object
) -> None:
    """Also from a variable; and one that no asset takes may wait for runs of other jobs."""
    resources = {"lake": lake, "house": lake_by_function}
    build(kafka=kafka(), assets=[in_lake], resources=resources, name="orders")


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
def retried(kafka_batch: KafkaBatch) -> None:
    """Never executed."""


@dg.op
def flaky(kafka_batch: KafkaBatch) -> int:
    return kafka_batch.records


@dg.graph_asset
def retried_inside() -> int:
    made: int = flaky.with_retry_policy(dg.RetryPolicy(max_retries=1))()
    return made


@pytest.mark.parametrize(
    ("taker", "named"), [(retried, "retried"), (retried_inside, "flaky")], ids=["asset", "inside"]
)
def test_a_retry_policy_is_refused(taker: dg.AssetsDefinition, named: str) -> None:
    """Dagster would begin the step again in a run that a hold, or its lease, has interrupted."""
    with pytest.raises(
        ConfigurationError, match=rf"{named} of job orders has a retry_policy.*attempts"
    ):
        build_kafka_batch_defs(kafka=kafka(), assets=[taker], name="orders")


def test_a_group_id_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names assets, so it is needed when the code is loaded."""
    monkeypatch.setenv("ETL_GROUP", "etl-production")
    defs = build_kafka_batch_defs(kafka=kafka(dg.EnvVar("ETL_GROUP")), assets=[asset()])
    assert (
        GroupAssets.of("etl-production").offsets in defs.resolve_asset_graph().get_all_asset_keys()
    )


def test_a_group_id_from_a_variable_that_is_not_set_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the assets would be named after the variable."""
    monkeypatch.delenv("ETL_GROUP", raising=False)
    with pytest.raises(
        ConfigurationError, match="environment variable ETL_GROUP, which is not set"
    ):
        build_kafka_batch_defs(kafka=kafka(dg.EnvVar("ETL_GROUP")), assets=[asset()])


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


def test_the_check_executed_by_hand_passes_while_work_goes_on(check: Check) -> None:
    """The check looks for itself, so it answers while no member is there.

    One failed run of two is no stop.
    """
    check.group.committed[tp(0)] = claimed(0, 10, "b-1")
    check.fail()
    assert check.execute() == (True, "every partition goes on", [])


def test_the_check_executed_by_hand_finds_every_reason_to_stop(check: Check) -> None:
    """Runs that failed too often, and a text by somebody else; the reasons name what to look at."""
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


def test_the_check_says_the_error_and_links_the_run(check: Check) -> None:
    """Else a person reads the id in a text, and looks for the run."""
    check.group.committed[tp(0)] = claimed(0, 10, "b-1")
    _, last = check.fail(), check.fail(attempt=2, message="the warehouse is away")
    result = check.job.execute_in_process(instance=check.instance)
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.metadata["error of orders-0"].value == "the warehouse is away"
    link = evaluation.metadata[f"run {last.run_id[:8]}"]
    assert link == dg.MetadataValue.dagster_run(last.run_id)


def test_the_check_executed_by_hand_finds_offsets_that_are_gone(check: Check) -> None:
    """After retention the member shows the stop; by hand it must not look mended."""
    check.group.committed[tp(0)] = OffsetAndMetadata(2)
    check.group.committed[tp(1)] = OffsetAndMetadata(10)
    check.group.delete_before(tp(0), 5)
    passed, description, _ = check.execute()
    assert not passed
    assert description.startswith("orders-0: Kafka's retention deleted records from offset 2 on")


def test_the_check_executed_by_hand_judges_offsets_as_a_member_does(check: Check) -> None:
    """When no member is there, only the check can say that offsets or records were lost.

    A group may lose its offsets, and a topic its records.
    """
    catalogue = Catalogue(check.instance, GroupAssets.of(check.kafka.group_id), NO_MEMBER)
    for number in (0, 1):
        done = RecordCommit(span(number), 1, "b", "r", lag=0, claim_to_commit_s=None, drain_s=None)
        catalogue.record_commit(done)
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

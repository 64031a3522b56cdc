"""`KafkaBatchComponent`: definitions from YAML, errors with file and line, and secrets."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox
from dagster_shared.libraries import DagsterLibraryRegistry
from pydantic import ValidationError

import dagster_rebalance
from dagster_rebalance import (
    KafkaBatchComponent,
    KafkaConsumerResource,
    KafkaSparkResource,
    PinnedResource,
    RecordFilter,
    SchemaRegistryResource,
    build_kafka_batch_defs,
)
from dagster_rebalance.components import component
from dagster_rebalance.components.component import (
    KafkaSettings,
    RegistrySettings,
    SparkSettings,
    Streaming,
)
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs
from tests.components.project import load_error, loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SECRET = "swordfish"  # noqa: S105 - a test value
KAFKA = """\
kafka:
  bootstrap_servers: "{{ env.KAFKA_BROKERS }}"
  group_id: "{{ env.KAFKA_GROUP }}"
  topics: [orders, "{{ env.KAFKA_TOPIC }}"]
"""
SHOP = f"assets: [.work.orders]\n{KAFKA}"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BROKERS", "kafka:9092")
    monkeypatch.setenv("KAFKA_GROUP", "2024")  # a text that a template renders to a number
    monkeypatch.setenv("KAFKA_TOPIC", "7")
    monkeypatch.setenv("KAFKA_USERNAME", "etl")
    monkeypatch.setenv("KAFKA_PASSWORD", SECRET)


def outline(defs: dg.Definitions) -> dict[str, Any]:
    """Return everything in the definitions that the arguments of the two functions decide."""
    graph = defs.resolve_asset_graph()
    sensors = list(defs.sensors or ())
    return {
        "assets": {key: graph.get(key).parent_keys for key in graph.get_all_asset_keys()},
        "checks": graph.asset_check_keys,
        "sensors": [
            (
                sensor.name,
                sensor.minimum_interval_seconds,
                sensor.default_status,
                sorted(sensor.required_resource_keys),
                [target.job_name for target in sensor.targets],
            )
            for sensor in sensors
        ],
        "jobs": [
            (name, defs.resolve_job_def(name).tags)
            for name in (target.job_name for sensor in sensors for target in sensor.targets)
        ],
        "resources": {
            name: repr(inner(resource)) for name, resource in (defs.resources or {}).items()
        },
    }


def inner(resource: Any) -> Any:  # noqa: ANN401 - resources have no common type
    """Return the resource inside a `PinnedResource`, or else the type."""
    return resource.resource if isinstance(resource, PinnedResource) else type(resource)


SETTINGS = """\
name: shop
kafka_key: shop_kafka
spark_key: shop_spark
minimum_interval_seconds: 7
default_status: RUNNING
job_tags: {team: etl}
lag_within_records: 1000
lag_within_s: 60.5
commit_within_s: 900
show_topics: false
spark:
  remote: "{{ env.SPARK_CONNECT_URL }}"
  app_name: shop
  spark_config:
    spark.sql.shuffle.partitions: 3
    spark.hadoop: {"fs.s3a.secret.key": "{{ env('S3_KEY') }}"}
"""
ARGUMENTS: dict[str, Any] = {
    "name": "shop",
    "kafka_key": "shop_kafka",
    "spark_key": "shop_spark",
    "minimum_interval_seconds": 7,
    "default_status": dg.DefaultSensorStatus.RUNNING,
    "job_tags": {"team": "etl"},
    "lag_within_records": 1000,
    "lag_within_s": 60.5,
    "commit_within_s": 900.0,
    "show_topics": False,
    "spark": KafkaSparkResource(
        remote=dg.EnvVar("SPARK_CONNECT_URL"),
        app_name="shop",
        spark_config={
            "spark.sql.shuffle.partitions": 3,
            "spark.hadoop": {"fs.s3a.secret.key": dg.EnvVar("S3_KEY")},
        },
    ),
}


@pytest.mark.parametrize(
    ("attributes", "build", "arguments"),
    [
        ("", build_kafka_batch_defs, {}),
        (SETTINGS, build_kafka_batch_defs, ARGUMENTS),
        ("streaming: {}\n", build_kafka_stream_defs, {}),
        (
            SETTINGS + 'streaming: {runs: 3, version: "1e3", max_run_s: 90}\n',
            build_kafka_stream_defs,
            {**ARGUMENTS, "runs": 3, "version": "1e3", "max_run_s": 90.0},
        ),
    ],
    ids=["batch", "batch with all settings", "streaming", "streaming with all settings"],
)
def test_yaml_and_python_build_the_same_definitions(
    attributes: str, build: Callable[..., dg.Definitions], arguments: Mapping[str, Any]
) -> None:
    kafka = KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="2024", topics=["orders", "7"]
    )
    with loaded(SHOP + attributes) as (component, defs):
        expected = build(kafka=kafka, assets=component.assets, **arguments)
        assert outline(defs) == outline(expected)
        dg.Definitions.validate_loadable(defs)


def test_streaming_settings_reach_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def build(**arguments: Any) -> dg.Definitions:  # noqa: ANN401 - of all kinds
        seen.update(arguments)
        return dg.Definitions()

    monkeypatch.setattr(component, "build_kafka_stream_defs", build)
    with loaded(SHOP + 'streaming: {runs: 3, version: "1e3", max_run_s: 90}\n'):
        assert (seen["runs"], seen["version"], seen["max_run_s"]) == (3, "1e3", 90.0)


@pytest.mark.parametrize("form", ["batch", "stream"])
def test_external_work_is_a_class_or_an_object_by_its_path(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def build(**arguments: Any) -> dg.Definitions:  # noqa: ANN401 - of all kinds
        seen.update(arguments)
        return dg.Definitions()

    monkeypatch.setattr(component, f"build_kafka_{form}_defs", build)
    streaming = "streaming: {}\n" if form == "stream" else ""
    with loaded(f"{SHOP}{streaming}external_work: [.work.Jobs, .work.JOBS]\n"):
        names = [type(work).__name__ for work in seen["external_work"]]
    assert names == ["Jobs", "Jobs"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".work.nothing", "has no 'nothing'"),
        (".work.NOT_CODE", "not an object with a method stop"),
        (".work.orders", "not an object with a method stop"),
    ],
)
def test_external_work_without_a_stop_method_is_refused(path: str, message: str) -> None:
    assert message in load_error(f"{SHOP}external_work: [{path}]\n")


@pytest.mark.parametrize("text", ["12_3", "1e3", "007", "0x10", "12e4567", "1,2", "None", "'a'"])
def test_template_of_a_text_renders_to_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, rest = text[:2], text[2:]
    monkeypatch.setenv("FIRST", first)
    monkeypatch.setenv("REST", rest)
    template = "{{ env.FIRST }}{{ env('REST', '') }}"
    shop = SHOP.replace("{{ env.KAFKA_GROUP }}", template)
    assert template in shop
    with loaded(shop) as (component, _):
        assert component.kafka.group_id == text


TAGS = """\
job_tags:
  release: "{{ env.KAFKA_GROUP }}"
  build: "1_0"
  dagster-k8s/config:
    pod_spec_config: {termination_grace_period_seconds: 70, node_selector: {zone: "1_0"}}
    container_config: {args: ["{{ env.KAFKA_TOPIC }}"]}
"""


def test_tag_that_is_a_block_keeps_its_texts() -> None:
    with loaded(SHOP + TAGS) as (component, defs):
        tags = defs.resolve_job_def("kafka_batches").run_tags
        assert component.job_tags == {
            "release": "2024",
            "build": "1_0",
            "dagster-k8s/config": {
                "pod_spec_config": {
                    "termination_grace_period_seconds": 70,
                    "node_selector": {"zone": "1_0"},
                },
                "container_config": {"args": ["7"]},
            },
        }
        assert json.loads(tags["dagster-k8s/config"]) == component.job_tags["dagster-k8s/config"]


def test_component_made_in_python_builds_the_same_definitions() -> None:
    @dg.asset(required_resource_keys={"kafka_batch"})
    def table() -> None:
        pass

    kafka = KafkaConsumerResource(bootstrap_servers="kafka:9092", group_id="etl", topics=["a"])
    component = KafkaBatchComponent(kafka=kafka, assets=[table], job_tags={"team": "etl"})
    assert outline(dg.component_defs(component=component)) == outline(
        build_kafka_batch_defs(kafka=kafka, assets=[table], job_tags={"team": "etl"})
    )
    assert component.kafka is kafka


def test_filter_of_records_in_yaml_is_the_one_in_python() -> None:
    only = 'only: {header_equals: {kind: "12_3"}, header_in: {region: [eu]}, tombstones: false}'
    with loaded(SHOP.replace("kafka:\n", f"kafka:\n  {only}\n")) as (component, _):
        assert component.kafka.only == RecordFilter(
            header_equals={"kind": "12_3"}, header_in={"region": ["eu"]}, tombstones=False
        )
    for wrong, message in (
        ("{}", "give header_equals"),
        ("{header: {kind: a}}", "its conditions are header_equals"),
        ("{header_equals: {kind: 7}}", "7"),
    ):
        assert message in load_error(SHOP.replace("kafka:\n", f"kafka:\n  only: {wrong}\n"))


def test_yaml_has_each_setting_of_the_resources() -> None:
    for resource, settings in (
        (KafkaConsumerResource, KafkaSettings),
        (KafkaSparkResource, SparkSettings),
        (SchemaRegistryResource, RegistrySettings),
    ):
        shown = {name: field.is_required() for name, field in settings.model().model_fields.items()}
        assert shown == {name: field.is_required() for name, field in resource.model_fields.items()}


def test_subclass_builds_assets_from_its_own_attributes() -> None:
    class Table(KafkaBatchComponent):
        table: str

        def batch_assets(self, context: dg.ComponentLoadContext) -> Sequence[dg.AssetsDefinition]:
            @dg.asset(name=self.table, required_resource_keys={"kafka_batch"})
            def made() -> None:
                pass

            return [made]

    component = Table.from_attributes_dict(
        attributes={
            "table": "sales",
            "kafka": {"bootstrap_servers": "kafka:9092", "group_id": "etl", "topics": ["a"]},
        }
    )
    assert dg.AssetKey("sales") in dg.component_defs(component=component).resolve_all_asset_keys()


DESCRIBED = """\
assets:
  - function: .work.orders
    description: "For {{ env.KAFKA_GROUP }} people"
    group_name: sales
    owners: ["team:{{ env.KAFKA_GROUP }}"]
    tags: {tier: "1"}
    kinds: [parquet]
    metadata: {answer: 42}
    deps: [shop/topic]
    code_version: "2"
    freshness_policy: "{{ dg.FreshnessPolicy.time_window(datetime.timedelta(hours=1)) }}"
  - function: .work.returns
    key: shop/returns
"""
PROCESSING = """\
post_processing:
  assets:
    - attributes: {tags: {team: etl}}
"""


class TestAssets:
    def test_path_may_name_an_asset_or_a_function(self) -> None:
        with loaded(f"assets: [.work.orders, .work.returns]\n{KAFKA}") as (component, _):
            assert [asset.key for asset in component.assets] == [
                dg.AssetKey("orders"),
                dg.AssetKey("returns"),
            ]

    def test_attributes_are_templated_and_added_to_those_in_the_code(self) -> None:
        with loaded(DESCRIBED + KAFKA) as (component, defs):
            spec = component.assets[0].get_asset_spec()
            assert spec.description == "For 2024 people"
            assert (spec.group_name, spec.code_version) == ("sales", "2")
            assert list(spec.owners) == ["team:2024"]
            assert {"from": "code", "tier": "1"}.items() <= spec.tags.items()
            assert spec.kinds == {"parquet"}
            assert spec.metadata["answer"] == 42
            assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey(["shop", "topic"])]
            assert spec.freshness_policy is not None
            assert component.assets[1].key == dg.AssetKey(["shop", "returns"])
            dg.Definitions.validate_loadable(defs)

    @pytest.mark.parametrize("form", ["", "streaming: {}\n"])
    def test_post_processing_applies_to_the_assets(self, form: str) -> None:
        with loaded(SHOP + form, PROCESSING) as (_, defs):
            dg.Definitions.validate_loadable(defs)
            graph = defs.resolve_asset_graph()
            assert graph.get(dg.AssetKey("orders")).tags["team"] == "etl"
            assert defs.resolve_job_def(
                "kafka_stream" if form else "kafka_batches"
            ).asset_layer.executable_asset_keys == {dg.AssetKey("orders")}

    @pytest.mark.parametrize(
        ("asset", "message"),
        [
            ("orders", "is not the path of a function"),
            (".orders", "is not the path of a function"),
            (".work.nothing", "has no 'nothing'"),
            (".nowhere.orders", "No module named"),
            (".work.NOT_CODE", "is a int: give a function"),
        ],
    )
    def test_invalid_path_is_refused_with_its_line(self, asset: str, message: str) -> None:
        error = load_error(f"assets:\n- {asset}\n{KAFKA}")
        assert "defs.yaml:4" in error
        assert message in error

    @pytest.mark.parametrize(
        ("attribute", "message"),
        [
            ("key: shop/orders", "set the key in the code"),
            ("group_name: 7", "Input should be a valid string"),
            ("partitions_def: daily", "partitions_def"),
            ("automation_condition: eager", "automation_condition"),
        ],
    )
    def test_invalid_attribute_is_refused_with_its_line(self, attribute: str, message: str) -> None:
        error = load_error(f"assets:\n- {{function: .work.orders, {attribute}}}\n{KAFKA}")
        assert "defs.yaml:3" in error
        assert message in error


class TestWrongValues:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("  on_lost: explode", "Input should be 'leave' or 'cancel'"),
            ("  hold_limit_s: soon", "Input should be a valid number"),
            ("  max_attempts: '{{ env.KAFKA_BROKERS }}'", "Input should be a valid integer"),
            ("  retry_stopped: perhaps", "Input should be a valid boolean"),
            ("streaming: {runs: -1}", "greater than or equal to 0"),
            ("streaming: {max_run_s: 5}", "greater than or equal to 60"),
            ("streaming:", "streaming"),
            ("runs: 2", "runs"),
            ("default_status: ON", "default_status"),
            ("minimum_interval_seconds: 0", "greater than or equal to 1"),
            ("job_tags: {release: 1.10}", "Input should be a valid string"),
            ("spark: {allow_plaintext: maybe}", "Input should be a valid boolean"),
            ("spark: {kafka_options: {sasl.mechanism: PLAIN}}", "begin with `kafka.`"),
            *(
                (f"  client_config: {{client.id: {word}}}", "quote it to keep it as written")
                for word in ("no", "On", "010", "1_0", "0x1F", "1:30", "1.10", ".inf")
            ),
            ("  client_config: {client.id: }", "it has no value"),
            ("spark: {spark_config: {spark: {app.id: 010}}}", "quote it to keep it as written"),
            ("spark: {kafka_options: {kafka.client.id: no}}", "quote it to keep it as written"),
        ],
    )
    def test_wrong_value_is_refused_with_its_line(self, wrong: str, message: str) -> None:
        error = load_error(SHOP + wrong + "\n")
        assert "defs.yaml:8" in error
        assert message in error

    def test_unambiguous_client_settings_need_no_quotes(self) -> None:
        config = "{retries: 10, linger.ms: 0.5, debug: 'no', a: True, b: false, c: \"010\", d: 1e3}"
        with loaded(f"{SHOP}  client_config:\n    {config}\n") as (component, _):
            assert component.kafka.client_config == {
                "retries": "10",
                "linger.ms": "0.5",
                "debug": "no",
                "a": "true",
                "b": "false",
                "c": "010",
                "d": "1e3",
            }

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("  no_such_setting: 1", "no_such_setting"),
            ("  max_attempts: 0", "max_attempts=0 of group 2024 must be above 0"),
            ("  on_failure: dead_letter", "needs a dead_letter_topic"),
            ("  start_from: 2026-11-23", "has no time zone"),
            ("  start_from: soon", "must be earliest, latest, or a time with its zone"),
            ("  security_protocol: PLAINTEXT\n  ssl_ca_location: /ca.pem", "which has no TLS"),
            ("  client_config: {session.timeout.ms: 6000}", "is decided by the broker"),
            ("  client_config: {oauth_cb: nowhere:token}", "cannot be imported"),
        ],
    )
    def test_contradicting_settings_are_refused_with_the_line_of_their_block(
        self, wrong: str, message: str
    ) -> None:
        error = load_error(SHOP + wrong + "\n")
        assert "defs.yaml:4" in error
        assert message in error

    def test_missing_variable_that_is_needed_at_load_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KAFKA_GROUP")
        error = load_error(SHOP)
        assert "defs.yaml:6" in error
        assert "the environment variable KAFKA_GROUP is not set" in error

    def test_component_without_assets_is_refused(self) -> None:
        assert "kafka_batches has no assets" in load_error(KAFKA)

    def test_validation_error_in_python_does_not_show_the_value(self) -> None:
        with pytest.raises(ValidationError) as caught:
            KafkaBatchComponent(kafka=SECRET)
        assert SECRET not in str(caught.value)


LOGIN = """\
  security_protocol: SASL_SSL
  sasl_mechanism: SCRAM-SHA-512
  sasl_username: "{{ env.KAFKA_USERNAME }}"
  sasl_password: "{{ env.KAFKA_PASSWORD }}"
  client_config:
    client.id: shop
    ssl.key.password: "{{env('KAFKA_PASSWORD')}}"
    socket.keepalive.enable: true
    message.max.bytes: 2000000
"""


class TestSecrets:
    def test_variable_stays_a_dagster_env_var(self) -> None:
        with loaded(SHOP + LOGIN) as (component, defs):
            kafka = component.kafka
            for value, name in (
                (kafka.bootstrap_servers, "KAFKA_BROKERS"),
                (kafka.sasl_username, "KAFKA_USERNAME"),
                (kafka.sasl_password, "KAFKA_PASSWORD"),
                (kafka.client_config["ssl.key.password"], "KAFKA_PASSWORD"),
            ):
                assert isinstance(value, dg.EnvVar)
                assert value.env_var_name == name
            assert kafka.client_config["socket.keepalive.enable"] == "true"
            assert kafka.client_config["message.max.bytes"] == "2000000"
            assert kafka.process_config_and_initialize().sasl_password == SECRET
            shown = [repr(component), repr(defs.resources), str(outline(defs))]
            assert not [text for text in shown if SECRET in text]

    @pytest.mark.parametrize(
        "login",
        [
            "  sasl_password: swordfish",
            '  sasl_password: "{{ env.KAFKA_PASSWORD }}!"',
            "  sasl_password: \"{{ env('KAFKA_PASSWORD', '') }}\"",
            '  client_config: {ssl.key.password: "x{{ env.KAFKA_PASSWORD }}"}',
        ],
    )
    def test_secret_given_as_text_is_refused_and_not_shown(self, login: str) -> None:
        error = load_error(SHOP + "  security_protocol: SASL_SSL\n" + login + "\n")
        assert "is plain text" in error
        assert "{{ env.NAME }}" in error
        assert SECRET not in error

    def test_error_next_to_a_secret_does_not_show_its_value(self) -> None:
        error = load_error(SHOP + LOGIN + "  on_lost: explode\n")
        assert "Input should be 'leave'" in error
        assert "{{ env.KAFKA_PASSWORD }}" in error
        assert SECRET not in error


def test_registry_becomes_a_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_TOKEN", SECRET)
    settings = 'registry:\n  url: https://registry\n  token: "{{ env.REGISTRY_TOKEN }}"\n'
    with loaded(SHOP + settings) as (component, defs):
        registry = inner((defs.resources or {})["registry"])
        assert registry.url == "https://registry"
        assert isinstance(registry.token, dg.EnvVar)
        assert SECRET not in repr(component)
    assert "is plain text" in load_error(SHOP + settings.replace("{{ env.REGISTRY_TOKEN }}", "t"))


class TestScaffolder:
    @pytest.mark.parametrize("form", ["yaml", "python"])
    @pytest.mark.parametrize("streaming", [False, True])
    def test_two_components_of_one_code_location_load_together(
        self, form: Literal["yaml", "python"], *, streaming: bool
    ) -> None:
        with create_defs_folder_sandbox() as sandbox:
            for folder in ("orders", "2024-returns"):
                sandbox.scaffold_component(
                    component_cls=KafkaBatchComponent,
                    defs_path=folder,
                    scaffold_params={"streaming": streaming, "topic": f"all.{folder}"},
                    scaffold_format=form,
                )
            with sandbox.build_all_defs() as defs:
                dg.Definitions.validate_loadable(defs)
                assert {sensor.name for sensor in defs.sensors or ()} == {
                    "orders_batches_sensor",
                    "_2024_returns_batches_sensor",
                }
                batches = "orders_batch" in (defs.resources or {})
                assert batches is not streaming, "a streaming run makes its batches itself"
                kafka = inner((defs.resources or {})["orders_kafka"])
                assert kafka.topics == ["all.orders"]

    def test_commented_settings_are_valid(self) -> None:
        with create_defs_folder_sandbox() as sandbox:
            folder = sandbox.scaffold_component(
                component_cls=KafkaBatchComponent, defs_path="orders"
            )
            file = folder / "defs.yaml"
            lines = file.read_text().splitlines()
            file.write_text("\n".join(uncommented(line) for line in lines))
            with sandbox.load_component_and_build_defs(defs_path=folder) as (component, defs):
                assert isinstance(component, KafkaBatchComponent)
                assert component.streaming == Streaming(runs=1)
                assert isinstance(component.kafka.sasl_password, dg.EnvVar)
                assert component.spark is not None
                assert component.assets[0].get_asset_spec().group_name == "sales"
                dg.Definitions.validate_loadable(defs)

    def test_two_components_with_all_commented_settings_load_together(self) -> None:
        with create_defs_folder_sandbox() as sandbox:
            for name in ("orders", "returns"):
                file = (
                    sandbox.scaffold_component(component_cls=KafkaBatchComponent, defs_path=name)
                    / "defs.yaml"
                )
                file.write_text("\n".join(map(uncommented, file.read_text().splitlines())))
            with sandbox.build_all_defs() as defs:
                dg.Definitions.validate_loadable(defs)
                registries = {
                    key
                    for key, resource in (defs.resources or {}).items()
                    if isinstance(inner(resource), SchemaRegistryResource)
                }
                assert registries == {"orders_registry", "returns_registry"}

    def test_invalid_topic_name_is_refused(self) -> None:
        with (
            create_defs_folder_sandbox() as sandbox,
            pytest.raises(
                dagster_rebalance.ConfigurationError, match="cannot be the name of a topic"
            ),
        ):
            sandbox.scaffold_component(
                component_cls=KafkaBatchComponent, scaffold_params={"topic": "a b"}
            )

    def test_folder_with_a_dot_is_refused(self) -> None:
        with (
            create_defs_folder_sandbox() as sandbox,
            pytest.raises(
                dagster_rebalance.ConfigurationError,
                match=r"the folder shop_orders, and pass --topic shop\.orders$",
            ),
        ):
            sandbox.scaffold_component(component_cls=KafkaBatchComponent, defs_path="shop.orders")


def uncommented(line: str) -> str:
    """Remove the mark of a commented setting; sentences stay comments."""
    return re.sub(r"^( *)# ( *[a-z_]+:( |$))", r"\1\2", line)


def test_dagster_lists_the_component_and_the_version() -> None:
    assert set(KafkaBatchComponent.get_spec().produces) >= {"asset", "sensor", "job", "resource"}
    assert DagsterLibraryRegistry.get()["dagster-rebalance"] == dagster_rebalance.__version__

"""The Spark resource, without Spark."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import dagster as dg
import pytest
from pydantic import PrivateAttr

from dagster_rebalance import PinnedResource
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource, _is_over
from dagster_rebalance.testing.local.host import free_port

CONNECTOR = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{metadata.version('pyspark')}"


@pytest.mark.parametrize(
    ("given", "packages"),
    [
        ({}, CONNECTOR),
        ({"spark.jars.packages": "a:b:1"}, f"a:b:1,{CONNECTOR}"),
        ({"spark": {"jars": {"packages": "a:b:1"}}}, f"a:b:1,{CONNECTOR}"),
        (
            {"spark.jars.packages": "o.a.s:spark-sql-kafka-0-10_2.13:4.9.9"},
            "o.a.s:spark-sql-kafka-0-10_2.13:4.9.9",
        ),
        ({"spark.jars": "/jars/spark-sql-kafka-0-10_2.13-4.0.0.jar"}, None),
    ],
)
def test_connector_is_added_to_the_users_packages(
    given: dict[str, Any], packages: str | None
) -> None:
    assert (
        KafkaSparkResource(spark_config=given)._classic_config().get("spark.jars.packages")
        == packages
    )


def test_session_is_local_by_default() -> None:
    assert KafkaSparkResource()._classic_config()["spark.master"] == "local[*]"
    assert (
        KafkaSparkResource(spark_config={"spark.master": "local[1]"})._classic_config()[
            "spark.master"
        ]
        == "local[1]"
    )
    assert (
        KafkaSparkResource(
            master="yarn", spark_config={"spark.master": "local[1]"}
        )._classic_config()["spark.master"]
        == "yarn"
    )


def test_remote_and_master_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="both `remote` and `master`"):
        KafkaSparkResource(remote="sc://h", master="yarn")
    late = KafkaSparkResource(remote=dg.EnvVar("SPARK_CONNECT_URL"), master="yarn")
    monkeypatch.setenv("SPARK_CONNECT_URL", "")
    with dg.build_resources({"spark": late}) as resources:
        assert resources.spark.master == "yarn"
    monkeypatch.setenv("SPARK_CONNECT_URL", "sc://h")
    with (
        pytest.raises(dg.DagsterResourceFunctionError) as problem,
        dg.build_resources({"spark": late}),
    ):
        pass
    assert "both `remote` and `master`" in str(problem.value.__cause__)


def test_missing_dagster_pyspark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dagster_pyspark", None)
    with pytest.raises(ConfigurationError, match=r"dagster-rebalance\[spark\]"):
        _ = KafkaSparkResource().spark_session


def test_token_in_the_url_is_not_shown() -> None:
    resource = KafkaSparkResource(
        remote="sc://h/;token=hidden", spark_config={"spark.x.password": "hidden"}
    )
    assert "hidden" not in f"{resource!r}{resource}"


def test_spark_setting_can_be_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETL_KEY", "resolved")
    seen = []

    @dg.op
    def look(spark: KafkaSparkResource) -> None:
        seen.append(spark._classic_config()["spark.hadoop.fs.s3a.secret.key"])

    given: dict[str, Any] = {"spark": {"hadoop": {"fs.s3a.secret.key": dg.EnvVar("ETL_KEY")}}}
    for resource in (
        KafkaSparkResource(spark_config=given),
        PinnedResource(resource=KafkaSparkResource(spark_config=given)),
    ):

        @dg.job(resource_defs={"spark": resource})
        def job() -> None:
            look()

        assert job.execute_in_process().success
    assert seen == ["resolved", "resolved"]


@pytest.mark.parametrize(
    "value", [{"env": "ETL_KEY"}, None, ["hidden"], dg.EnvVar.int("ETL_KEY")], ids=repr
)
def test_spark_setting_of_another_type_is_refused_and_not_shown(value: object) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"spark_config has a \w+ for spark\.a\.b: give text, a number, or dg\.EnvVar",
    ) as refused:
        KafkaSparkResource(spark_config={"spark.a": {"b": value}})
    assert "hidden" not in str(refused.value)


def test_spark_settings_are_flattened_to_text() -> None:
    given: dict[str, Any] = {
        "spark": {"ui.enabled": False, "sql": {"shuffle.partitions": 8}},
        "spark.x": "y",
    }
    assert KafkaSparkResource(spark_config=given).spark_config == {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "8",
        "spark.x": "y",
    }


def test_kafka_options_need_their_prefix() -> None:
    with pytest.raises(ConfigurationError, match=r"'sasl\.jaas\.config'.*begin with `kafka\.`"):
        KafkaSparkResource(kafka_options={"sasl.jaas.config": "hidden"})


def test_setup_of_the_resource_starts_no_session() -> None:
    remote = f"sc://127.0.0.1:{free_port()}"

    @dg.op
    def idle(spark: KafkaSparkResource) -> None:
        assert spark._session is None

    @dg.job(resource_defs={"spark": KafkaSparkResource(remote=remote)})
    def job() -> None:
        idle()

    assert job.execute_in_process().success


SEEN: list[tuple[str, bool]] = []


class Watcher(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Records at the end of each step whether the session is still needed."""

    _context: Any = PrivateAttr()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        self._context = context

    def ask(self, step: str) -> None:
        SEEN.append((step, _is_over(self._context)))

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        SEEN.append(("teardown", _is_over(context)))


def test_session_is_kept_until_the_last_step_has_ended() -> None:
    SEEN.clear()

    @dg.op(out=dg.Out(dg.Nothing))
    def first(watcher: Watcher) -> None:
        watcher.ask("first")

    @dg.op(ins={"after": dg.In(dg.Nothing)})
    def second(watcher: Watcher) -> None:
        watcher.ask("second")

    @dg.job(resource_defs={"watcher": Watcher()})
    def job() -> None:
        second(first())

    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance).success
    assert SEEN == [("first", False), ("second", False), ("teardown", True)]


def test_session_is_over_if_steps_after_a_failed_one_never_start() -> None:
    SEEN.clear()

    @dg.op(out=dg.Out(dg.Nothing))
    def fails(watcher: Watcher) -> None:
        watcher.ask("fails")
        raise ValueError

    @dg.op(ins={"after": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
    def second() -> None:
        pass

    @dg.op(ins={"after": dg.In(dg.Nothing)})
    def third(watcher: Watcher) -> None:
        watcher.ask("third")

    @dg.op
    def beside(watcher: Watcher) -> None:
        watcher.ask("beside")

    @dg.job(resource_defs={"watcher": Watcher()})
    def job() -> None:
        third(second(fails()))
        beside()

    with dg.DagsterInstance.ephemeral() as instance:
        assert not job.execute_in_process(instance=instance, raise_on_error=False).success
    assert sorted(SEEN) == [("beside", False), ("fails", False), ("teardown", True)]

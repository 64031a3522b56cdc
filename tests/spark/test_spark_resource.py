"""The Spark session of a run, as far as no Spark is needed to see it."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import dagster as dg
import pytest
from pydantic import PrivateAttr

from dagster_rebalance import FixedResource
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
def test_the_connector_is_added_to_the_users_own_packages(
    given: dict[str, Any], packages: str | None
) -> None:
    """If the connector replaced the user's packages, the user's jars would be missing.

    If it was added beside one of theirs, two versions would clash.
    """
    assert (
        KafkaSparkResource(spark_config=given)._classic_config().get("spark.jars.packages")
        == packages
    )


def test_a_session_is_local_unless_a_master_is_given() -> None:
    """The field wins over the same setting among the settings."""
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


def test_a_server_and_a_master_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would be ignored in silence. What a variable has is known in the run."""
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


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is optional, and the resource can be configured without it."""
    monkeypatch.setitem(sys.modules, "dagster_pyspark", None)
    with pytest.raises(ConfigurationError, match=r"dagster-rebalance\[spark\]"):
        _ = KafkaSparkResource().spark_session


def test_a_token_in_the_url_is_not_shown() -> None:
    """Resources are printed in logs and tracebacks."""
    resource = KafkaSparkResource(
        remote="sc://h/;token=hidden", spark_config={"spark.x.password": "hidden"}
    )
    assert "hidden" not in f"{resource!r}{resource}"


def test_a_setting_of_spark_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of an object store has to come from somewhere else than the code."""
    monkeypatch.setenv("ETL_KEY", "resolved")
    seen = []

    @dg.op
    def look(spark: KafkaSparkResource) -> None:
        seen.append(spark._classic_config()["spark.hadoop.fs.s3a.secret.key"])

    given: dict[str, Any] = {"spark": {"hadoop": {"fs.s3a.secret.key": dg.EnvVar("ETL_KEY")}}}
    for resource in (
        KafkaSparkResource(spark_config=given),
        FixedResource(resource=KafkaSparkResource(spark_config=given)),
    ):

        @dg.job(resource_defs={"spark": resource})
        def job() -> None:
            look()

        assert job.execute_in_process().success
    assert seen == ["resolved", "resolved"]


@pytest.mark.parametrize(
    "value", [{"env": "ETL_KEY"}, None, ["hidden"], dg.EnvVar.int("ETL_KEY")], ids=repr
)
def test_a_setting_of_spark_that_is_no_text_is_refused_and_not_shown(value: object) -> None:
    """Dagster's own form of a variable would silently become a setting called `... .env`."""
    with pytest.raises(
        ConfigurationError,
        match=r"spark_config has a \w+ for spark\.a\.b: give text, a number, or dg\.EnvVar",
    ) as refused:
        KafkaSparkResource(spark_config={"spark.a": {"b": value}})
    assert "hidden" not in str(refused.value)


def test_settings_of_spark_are_text_under_their_full_names() -> None:
    """As Spark spells them."""
    given: dict[str, Any] = {
        "spark": {"ui.enabled": False, "sql": {"shuffle.partitions": 8}},
        "spark.x": "y",
    }
    assert KafkaSparkResource(spark_config=given).spark_config == {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "8",
        "spark.x": "y",
    }


def test_options_for_kafkas_client_are_known_by_their_prefix() -> None:
    """Anything else would be ignored by Spark, without a word."""
    with pytest.raises(ConfigurationError, match=r"'sasl\.jaas\.config'.*begin with `kafka\.`"):
        KafkaSparkResource(kafka_options={"sasl.jaas.config": "hidden"})


def test_setting_the_resource_up_starts_nothing() -> None:
    """A sensor sets its resources up at each tick: a session would start in the code server."""
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
    """Asks at the end of each step whether the run needs the session still."""

    _context: Any = PrivateAttr()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Keep the context."""
        self._context = context

    def ask(self, step: str) -> None:
        """Ask in the middle of a step."""
        SEEN.append((step, _is_over(self._context)))

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Ask when all steps of the process have ended."""
        SEEN.append(("teardown", _is_over(context)))


def test_the_session_of_a_run_is_kept_until_its_last_step_has_ended() -> None:
    """With a process per step, the first one would take the session from the others."""
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


def test_a_session_is_over_although_steps_behind_a_failed_one_never_began() -> None:
    """Steps that never began have no end.

    Waiting for one would leave the session, with its state, to the server's idle limit.
    """
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

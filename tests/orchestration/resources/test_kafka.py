"""`KafkaConsumerResource`: refusals and their messages, and no secret is shown."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from pydantic import ValidationError

from dagster_rebalance import build_kafka_batch_defs, build_kafka_stream_defs
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.topics import StartTime
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from tests.orchestration import vault

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "hunter2-is-secret"  # noqa: S105 - the secret that must not be seen


def resource(**settings: Any) -> KafkaConsumerResource:  # noqa: ANN401 - settings of all kinds
    return KafkaConsumerResource(
        **{"bootstrap_servers": "kafka:9092", "group_id": "etl", "topics": ["orders"], **settings}
    )


@pytest.mark.parametrize(
    ("resource", "settings", "message"),
    [
        (KafkaSparkResource, {"remot": "sc://x"}, "KafkaSparkResource has no setting 'remot': did"),
        (KafkaSparkResource, {"x": 1}, "settings of Spark belong in spark_config"),
        (SchemaRegistryResource, {"url": "https://x", "ca": "f"}, "has no setting 'ca'"),
    ],
)
def test_other_resources_refuse_unknown_settings(
    resource: type[dg.ConfigurableResource[Any]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resource(**settings)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hold_limit", "did you mean hold_limit_s?"),
        ("sasl.password", "did you mean sasl_password?"),
        ("zzz", "client_config"),
    ],
)
def test_unknown_setting_is_refused_with_suggestion(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match="has no setting") as problem:
        resource(**{name: SECRET})
    assert repr(name) in str(problem.value)
    assert hint in str(problem.value)
    assert SECRET not in str(problem.value)


@pytest.mark.parametrize(
    ("name", "field", "settings"),
    [
        ("group.id", "group_id", {}),
        ("bootstrap.servers", "bootstrap_servers", {}),
        ("metadata.broker.list", "bootstrap_servers", {}),
        ("auto.offset.reset", "start_from", {}),
        ("sasl.mechanisms", "sasl_mechanism", {"sasl_mechanism": "PLAIN"}),
        ("sasl.password", "sasl_password", {"sasl_password": SECRET}),
    ],
)
def test_client_config_that_repeats_a_field_is_refused(
    name: str, field: str, settings: dict[str, str]
) -> None:
    with pytest.raises(ConfigurationError, match="has its own field") as problem:
        resource(client_config={name: SECRET}, **settings).consumer_config()
    assert str(problem.value).endswith(f"sets {name}, which has its own field: {field}")
    assert field in KafkaConsumerResource.model_fields


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"max_records_per_range": dg.EnvVar("N")}, r"is a number: give dg\.EnvVar\.int\('N'\)"),
        ({"min_records": dg.EnvVar("N")}, r"is a number: give dg\.EnvVar\.int\('N'\)"),
        ({"hold_limit_s": dg.EnvVar("N")}, r"give its value, such as os\.environ\['N'\]"),
        ({"hold_limit_s": dg.EnvVar.int("N")}, r"give its value, such as os\.environ\['N'\]"),
        ({"topics": dg.EnvVar("N")}, r"give its value, such as os\.environ\['N'\]"),
        ({"sasl_username": dg.EnvVar.int("N")}, r"is a text: give dg\.EnvVar\('N'\)"),
    ],
)
def test_variable_of_another_type_is_refused(settings: dict[str, Any], hint: str) -> None:
    (name,) = settings
    with pytest.raises(ConfigurationError, match=f"^{name} of KafkaConsumerResource .*{hint}"):
        resource(**settings)


def test_fields_and_client_config_become_one_mapping() -> None:
    settings = {
        "fetch.max.bytes": "1000",
        "sasl.mechanism": "PLAIN",
        "security.protocol": "SASL_SSL",
    }
    config = resource(sasl_password=SECRET, client_config=settings).consumer_config()
    assert config["sasl.password"] == SECRET
    assert config["fetch.max.bytes"] == "1000"
    assert config["sasl.mechanism"] == "PLAIN"
    assert "ssl.ca.location" not in config


def test_numbers_and_booleans_become_text() -> None:
    kafka = resource(
        client_config={
            "fetch.max.bytes": 1000,
            "socket.keepalive.enable": True,
            "enable.partition.eof": False,
            "linger.ms": 0.5,
            "client.id": dg.EnvVar("CLIENT_ID"),
        }
    )
    assert kafka.client_config == {
        "fetch.max.bytes": "1000",
        "socket.keepalive.enable": "true",
        "enable.partition.eof": "false",
        "linger.ms": "0.5",
        "client.id": "CLIENT_ID",
    }


def test_variable_beside_a_number_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster resolves variables only in a mapping of texts."""
    monkeypatch.setenv("CLIENT_ID", "etl-7")
    kafka = resource(client_config={"fetch.max.bytes": 1000, "client.id": dg.EnvVar("CLIENT_ID")})
    config = kafka.process_config_and_initialize().consumer_config()
    assert (config["client.id"], config["fetch.max.bytes"]) == ("etl-7", "1000")


def test_function_is_imported_by_its_name() -> None:
    config = resource(
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        client_config={"error_cb": "builtins:print", "oauth_cb": "os.path:join"},
    ).consumer_config()
    assert (config["error_cb"], config["oauth_cb"]) == (print, os.path.join)
    with pytest.raises(ConfigurationError, match=r"function for oauth_cb.*'module:function'"):
        resource(client_config={"oauth_cb": print})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("token", "oauth_cb in client_config of group etl does not name a function: write"),
        (f"{SECRET}=", "does not name a function"),
        ("shop.logins.token", "does not name a function"),
        ("no_such_module_x:token", r"cannot be imported \(ModuleNotFoundError.*install it"),
        ("os.path:no_such", "names a function that module 'os.path' does not define"),
        ("os:sep", "'os:sep', which is a str, not a function"),
    ],
)
def test_missing_function_is_refused_at_start(text: str, message: str) -> None:
    """A text that is no name may be a secret."""
    with pytest.raises(ConfigurationError, match=message) as problem:
        resource(client_config={"oauth_cb": text}).consumer_config()
    assert SECRET not in str(problem.value)


@dg.asset(required_resource_keys={"kafka_batch"})
def batch_by_batch() -> None:
    """Never executed."""


@dg.asset
def in_a_stream(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
    """Never executed."""


@pytest.mark.parametrize(
    ("build", "asset"),
    [(build_kafka_batch_defs, batch_by_batch), (build_kafka_stream_defs, in_a_stream)],
)
def test_missing_function_is_refused_when_code_loads(
    build: Callable[..., dg.Definitions], asset: dg.AssetsDefinition
) -> None:
    def load(name: str) -> None:
        build(kafka=resource(client_config={"error_cb": name}), assets=[asset])

    with pytest.raises(ConfigurationError, match=r"module 'os\.path' does not define, or not yet"):
        load("os.path:no_such")
    load("builtins:print")
    load(dg.EnvVar("TOKENS"))


def test_function_in_run_config_is_refused() -> None:
    calls = []

    @dg.op
    def look(kafka: KafkaConsumerResource) -> None:
        calls.append(kafka.consumer_config())

    @dg.job(resource_defs={"kafka": resource(client_config={"error_cb": "builtins:print"})})
    def looks() -> None:
        look()

    assert looks.execute_in_process().success
    assert calls[0]["error_cb"] is print
    given = {
        "bootstrap_servers": "kafka:9092",
        "group_id": "etl",
        "topics": ["orders"],
        "client_config": {"client.id": "mine"},
    }

    def launch() -> None:
        looks.execute_in_process(run_config={"resources": {"kafka": {"config": given}}})

    launch()
    assert calls[1]["client.id"] == "mine"
    given["client_config"] = {"error_cb": "os:system"}
    with pytest.raises(dg.DagsterError) as refused:
        launch()
    assert "names a function for error_cb in client_config: only code may" in "".join(
        traceback.format_exception(refused.value)
    )
    assert len(calls) == 2


def test_path_in_client_config_becomes_text() -> None:
    kafka = resource(client_config={"ssl.key.location": Path("/etc/kafka/key.pem")})
    assert kafka.client_config == {"ssl.key.location": "/etc/kafka/key.pem"}


def test_login_in_bootstrap_servers_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="contains an @: write each broker") as refused:
        resource(bootstrap_servers=f"etl:{SECRET}@kafka:9092")
    assert SECRET not in str(refused.value)


def test_login_in_place_of_function_is_not_shown() -> None:
    given = {"credentials_cb": "etl:hunter2"}
    with pytest.raises(ConfigurationError, match="cannot be imported") as problem:
        resource(
            security_protocol="SASL_SSL", sasl_mechanism="PLAIN", client_config=given
        ).consumer_config()
    assert "hunter2" not in str(problem.value)


def test_spark_options_have_login_of_credentials_cb(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = resource(
        security_protocol="SASL_SSL",
        sasl_mechanism="PLAIN",
        client_config={"credentials_cb": "tests.orchestration.vault:credentials"},
    )
    monkeypatch.setattr(vault, "login", ("etl", SECRET))
    options = kafka.spark_options()
    assert (options["sasl.username"], options["sasl.password"]) == ("etl", SECRET)
    assert "credentials_cb" not in options


def test_spark_options_do_not_reach_the_client() -> None:
    kafka = resource(
        client_config={"kafka.sasl.jaas.config": "x required;", "fetch.max.bytes": 1000}
    )
    assert kafka.spark_options() == {
        **kafka.consumer_config(),
        "kafka.sasl.jaas.config": "x required;",
    }
    assert not [name for name in kafka.consumer_config() if name.startswith("kafka.")]


@pytest.mark.parametrize(
    "name",
    [
        "hold_limit_s",
        "hold_commit_slice_s",
        "max_records_per_range",
        "max_records_per_batch",
        "max_ranges_per_run",
        "max_runs_in_flight",
        "max_claims_per_partition",
        "min_records",
        "max_attempts",
        "retry_delay_limit_s",
        "lease_s",
        "heartbeat_timeout_s",
        "start_timeout_s",
        "batch_timeout_s",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_limit_of_zero_or_less_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=name):
        resource(**{name: value}).engine_settings()


@pytest.mark.parametrize("name", ["max_records_per_range", "max_records_per_batch"])
def test_min_records_default_is_at_most_a_batch(name: str) -> None:
    assert resource(**{name: 70}).engine_settings().limits.min_records == 70


def test_settings_reach_the_engine() -> None:
    settings = resource(
        heartbeat_timeout_s=30.0,
        start_timeout_s=600.0,
        retry_delay_s=0.0,
        retry_delay_limit_s=60.0,
        retry_stopped=False,
        lag_every_s=30.0,
    ).engine_settings()
    liveness = settings.liveness
    assert (liveness.heartbeat_timeout_s, liveness.start_timeout_s) == (30.0, 600.0)
    assert settings.backoff == RetryBackoff(0.0, 60.0, retry_stopped=False)
    assert settings.lag_every_s == 30
    assert resource(lag_every_s=0).engine_settings().lag_every_s == 0


@pytest.mark.parametrize(
    ("given", "streams", "record_every_s"),
    [(None, False, 0), (None, True, 600), (0.0, True, 0), (60.0, False, 60)],
)
def test_record_interval_reaches_the_engine(
    given: float | None, *, streams: bool, record_every_s: float
) -> None:
    settings = resource(record_every_s=given, records_per_minute=7).engine_settings(streams=streams)
    assert (settings.record_every_s, settings.records_per_minute) == (record_every_s, 7.0)


@pytest.mark.parametrize(("streams", "records"), [(False, 60.0), (True, 4.0)])
def test_budget_of_records_depends_on_the_form_of_run(*, streams: bool, records: float) -> None:
    assert resource().engine_settings(streams=streams).records_per_minute == records


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_every_s": -1.0}, r"record_every_s=-1 .*must be at least 0"),
        ({"records_per_minute": 0.0}, "records_per_minute=0.* must be above 0"),
        ({"lag_every_s": 9.0}, "lag_every_s=9 .*at least 10"),
        ({"lag_every_s": -1.0}, "lag_every_s=-1 .*at least 10"),
        ({"lag_every_s": float("inf")}, "lag_every_s=inf .*at least 10"),
        ({"lag_every_s": float("nan")}, "lag_every_s=nan .*at least 10"),
        ({"topics": []}, "topics is empty"),
        (
            {"hold_limit_s": 30.0, "hold_commit_slice_s": 30.0},
            r"hold_commit_slice_s=30 .* hold_limit_s=30",
        ),
    ],
)
def test_engine_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resource(**settings).engine_settings()


def test_start_time_reaches_the_engine_and_not_the_client() -> None:
    kafka = resource(start_from="1970-01-01T00:00:02Z")
    assert kafka.engine_settings().start_from == StartTime(2000)
    assert kafka.consumer_config()["auto.offset.reset"] == "error"
    assert resource(start_from="latest").consumer_config()["auto.offset.reset"] == "latest"
    with pytest.raises(ConfigurationError, match="start_from='yesterday' must be earliest"):
        resource(start_from="yesterday")
    late = resource(start_from=dg.EnvVar("START"))
    assert late.start_from == dg.EnvVar("START")


@pytest.mark.parametrize(
    ("client_config", "message"),
    [
        # The broker would fence the member during the hold.
        ({"max.poll.interval.ms": "60000"}, r"hold_limit_s=300 .*'max.poll.interval.ms'=60000"),
        ({"enable.auto.commit": "true"}, r"enable\.auto\.commit"),
        ({"enable.auto.commit": "True"}, r"enable\.auto\.commit"),
        ({"enable.auto.commit": "1"}, r"enable\.auto\.commit"),
    ],
)
def test_client_config_that_breaks_a_hold_or_a_commit_is_refused(
    client_config: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resource(client_config=client_config).consumer_config()


def test_consumers_have_the_hold_limit_of_the_resource() -> None:
    """With another hold limit they would refuse a poll interval that the member accepts."""
    with resource(
        hold_limit_s=30.0, client_config={"max.poll.interval.ms": "60000", "log_level": "0"}
    ).connect() as consumer:
        assert consumer.assignment() == frozenset()


def test_secrets_are_not_shown() -> None:
    kafka = resource(
        sasl_username="etl", sasl_password=SECRET, client_config={"ssl.key.password": SECRET}
    )
    for shown in (
        repr(kafka),
        str(kafka),
        repr(KafkaBatch(kafka=kafka)),
        str(KafkaBatch(kafka=kafka)),
    ):
        assert "kafka:9092" in shown
        assert SECRET not in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"sasl_password": [SECRET]},
        {"client_config": {"ssl.key.password": {"value": SECRET}}},
        {"sasl_password": SECRET, "topics": None},
        {"sasl_password": SECRET, "group_protocol": "eager"},
    ],
)
def test_validation_error_does_not_show_the_value(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as problem:
        resource(**settings)
    assert (
        next(iter(settings)) in str(problem.value)
        or "topics" in str(problem.value)
        or "group_protocol" in str(problem.value)
    )
    assert SECRET not in str(problem.value)


def test_password_from_variable_is_resolved_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETL_PASSWORD", SECRET)
    seen = []

    @dg.op
    def look(kafka: KafkaConsumerResource) -> None:
        seen.append(kafka.consumer_config()["sasl.password"])

    @dg.job(
        resource_defs={
            "kafka": resource(security_protocol="SASL_SSL", sasl_password=dg.EnvVar("ETL_PASSWORD"))
        }
    )
    def looks() -> None:
        look()

    assert looks.execute_in_process().success
    assert seen == [SECRET]

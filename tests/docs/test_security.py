"""docs/logins.md and docs/security.md: their settings work with the rights of the tests."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
)
from dagster_rebalance.kafka.client.credentials import Credentials
from dagster_rebalance.kafka.client.msk_iam import token
from dagster_rebalance.kafka.client.oauth import Tokens
from dagster_rebalance.spark.kafka_options import REDACTION, spark_kafka_options
from tests.docs.blocks import ROOT, block_with, blocks, run_block
from tests.kafka.client.test_security import KEY_FORM, LEAST

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "docs/security.md"
LOGINS = "docs/logins.md"


def _made(text: str) -> KafkaConsumerResource:
    """The resource with the login of the block that contains a text."""
    names: dict[str, Any] = {"dg": dg}
    run_block(LOGINS, block_with(LOGINS, "python", text), names)
    return KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id="orders-etl",
        topics=["orders"],
        **names["login"],
    )


@pytest.mark.parametrize("text", ["SCRAM-SHA-512", "ssl.key.location"])
def test_settings_of_the_security_examples_are_accepted(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("KAFKA_BROKERS", "KAFKA_USERNAME", "KAFKA_PASSWORD", "KAFKA_KEY_PASSWORD"):
        monkeypatch.setenv(variable, f"value of {variable}")
    config = _made(text).process_config_and_initialize().consumer_config()
    assert config["bootstrap.servers"] == "value of KAFKA_BROKERS"
    if text == "SCRAM-SHA-512":
        without_files = {name: value for name, value in config.items() if name != "ssl.ca.location"}
        assert spark_kafka_options(without_files)["kafka.security.protocol"] == "SASL_SSL"
    else:
        assert config["ssl.key.password"] == "value of KAFKA_KEY_PASSWORD"


@pytest.mark.parametrize("text", ["SCRAM-SHA-512", "ssl.key.location"])
def test_security_examples_load_before_the_variables_are_set(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("KAFKA_BROKERS", "KAFKA_USERNAME", "KAFKA_PASSWORD", "KAFKA_KEY_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        """Never run."""

    definitions = build_kafka_batch_defs(kafka=_made(text), assets=[orders])
    dg.Definitions.validate_loadable(definitions)


@pytest.mark.parametrize("text", ["token.endpoint.url", "msk_iam"])
def test_token_logins_are_accepted_by_both_clients(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        """Never run."""

    made = _made(text)
    dg.Definitions.validate_loadable(build_kafka_batch_defs(kafka=made, assets=[orders]))
    monkeypatch.setenv("KAFKA_BROKERS", "kafka:9092")
    monkeypatch.setenv("KAFKA_CLIENT_SECRET", "hunter2")
    config = made.process_config_and_initialize().consumer_config()
    options = spark_kafka_options(made.process_config_and_initialize().spark_options())
    if text == "msk_iam":
        assert config["oauth_cb"] is token
        assert options["kafka.sasl.mechanism"] == "AWS_MSK_IAM"
        assert "IAMLoginModule" in options["kafka.sasl.jaas.config"]
    else:
        assert config["sasl.oauthbearer.client.secret"] == "hunter2"
        assert 'clientSecret="hunter2"' in options["kafka.sasl.jaas.config"]


def test_token_functions_of_the_examples_return_a_token_and_its_expiry(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    (tmp_path / "password").write_text("hunter2\n")
    text = block_with(LOGINS, "python", "def kafka()").replace("/etc/kafka", str(tmp_path))
    run_block(LOGINS, text, names)
    assert Credentials(names["kafka"]).current() == ("etl", "hunter2")


def test_token_of_the_example_is_accepted() -> None:
    expires_at = time.time() + 100
    issuer = SimpleNamespace(
        token_for=lambda config: SimpleNamespace(text=f"for {config}", expires_at=expires_at)
    )
    names: dict[str, Any] = {"my_issuer": issuer}
    run_block(LOGINS, block_with(LOGINS, "python", "my_issuer"), names)
    assert Tokens(names["token"])("etl") == ("for etl", expires_at)


def test_certificate_settings_are_those_of_the_tests() -> None:
    made = _made("ssl.key.location")
    assert made.security_protocol == "SSL"
    assert made.client_config.keys() == {
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
    }


def test_key_command_is_that_of_the_tests() -> None:
    assert block_with(LOGINS, "sh", "openssl").startswith(
        f"openssl pkcs8 {' '.join(KEY_FORM)} -in "
    )


def test_secrets_of_the_security_examples_come_from_the_environment() -> None:
    for block in blocks(LOGINS, "python"):
        for line in block.splitlines():
            if re.search(r'(?:username|password|secret)(?:":|=)', line):
                assert "dg.EnvVar(" in line


def test_rights_of_the_commands_are_those_of_the_tests() -> None:
    commands = block_with(PAGE, "sh", "kafka-acls")
    granted = {
        kind: operation.upper()
        for operation, kind in re.findall(r"--operation (\w+) --(topic|group) ", commands)
    }
    assert granted == LEAST


def test_table_of_rights_has_those_of_the_member() -> None:
    rows = re.findall(
        r"^\| member \| `(\w+)` \| (each topic|the group) \|",
        (ROOT / PAGE).read_text(),
        re.MULTILINE,
    )
    assert {place.split()[1]: operation for operation, place in rows} == LEAST


def test_masking_expression_is_that_of_the_tests() -> None:
    assert f"spark.redaction.string.regex  {REDACTION}\n" in block_with(
        PAGE, "text", "spark.redaction"
    )


def test_login_resolved_by_the_server_has_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, Any] = {"dg": dg, "KafkaSparkResource": KafkaSparkResource}
    run_block(PAGE, block_with(PAGE, "python", "config.providers"), names)

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        """Never run."""

    spark: KafkaSparkResource = names["spark"]
    dg.Definitions.validate_loadable(
        build_kafka_batch_defs(kafka=_made("SCRAM-SHA-512"), assets=[orders], spark=spark)
    )
    for variable in ("KAFKA_BROKERS", "KAFKA_USERNAME", "KAFKA_PASSWORD"):
        monkeypatch.setenv(variable, f"value of {variable}")
    config = _made("SCRAM-SHA-512").process_config_and_initialize().consumer_config()
    options = spark_kafka_options(
        {
            **{name: value for name, value in config.items() if name != "ssl.ca.location"},
            **spark.kafka_options,
        }
    )
    assert "${env:KAFKA_PASSWORD}" in options["kafka.sasl.jaas.config"]
    assert "value of KAFKA_PASSWORD" not in " ".join(options.values())


def test_resources_of_the_own_definitions_are_closed_to_runs() -> None:
    names: dict[str, Any] = {"dg": dg, "kafka": _made("SCRAM-SHA-512")}
    run_block(PAGE, block_with(PAGE, "python", "PinnedResource"), names)

    @dg.op(required_resource_keys={"kafka", "spark"})
    def look() -> None:
        """Never run."""

    @dg.job(resource_defs=names["resources"])
    def looks() -> None:
        look()

    for key, setting in (("kafka", "bootstrap_servers"), ("spark", "remote")):
        with pytest.raises(dg.DagsterInvalidConfigError, match="unexpected config entry"):
            dg.validate_run_config(looks, {"resources": {key: {"config": {setting: "attacker:1"}}}})

"""Selection of the group and of Kafka, before anything is connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.cli.target import open_target, read_client_config
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.orchestration.operators.requests import partitions_of
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.cli.command_line import invoke

if TYPE_CHECKING:
    from pathlib import Path

ODD = "shop/eu: 'orders'"
KAFKA = KafkaConsumerResource(
    bootstrap_servers="kafka:9092", group_id=ODD, topics=["orders"], max_attempts=7
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an instance with one group that has published its settings and one that has not."""
    home = tmp_path_factory.mktemp("home")
    (home / "dagster.yaml").touch()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        for group_id, settings in ((ODD, public_settings(KAFKA)), ("older", "")):
            host = MemberIdentity("blue", "sensor", "p")
            catalogue = Catalogue(instance, GroupAssets.of(group_id), host, settings)
            catalogue.add_partitions([TopicPartition("orders", 0), TopicPartition("invoices", 0)])
            catalogue.record_joined()
    return home


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(home))


def test_target_uses_published_settings_and_the_operators_login(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("# mine\n\nsasl.password = a=b \nsecurity.protocol=SASL_SSL\n")
    refused = pytest.raises(ConfigurationError, match=r"login has no bootstrap\.servers: add the b")
    with refused, open_target(ODD, "", login):
        pass
    with open_target(ODD, "", None) as target:
        assert target.kafka.bootstrap_servers == "kafka:9092"
    with open_target(ODD, "kafka:9093", login) as target:
        kafka = target.kafka
    assert (kafka.group_id, kafka.topics) == (ODD, ["orders"])
    assert kafka.engine_settings().max_attempts == 7
    config = kafka.consumer_config()
    assert config["bootstrap.servers"] == "kafka:9093"
    assert config["sasl.password"] == "a=b"
    assert "a=b" not in repr(kafka)


def test_target_with_bootstrap_servers_overrides_the_published_ones(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("bootstrap.servers=outside:1\n")
    with open_target(ODD, "", login) as target:
        assert target.kafka.bootstrap_servers == "outside:1"
    with open_target(ODD, "other:2", login) as target:
        assert target.kafka.bootstrap_servers == "other:2"
    with open_target("older", "other:2", None) as target:
        assert target.kafka.topics == ["invoices", "orders"]


def test_error_for_a_group_without_partitions_tells_whether_the_group_is_known() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        host = MemberIdentity("blue", "sensor", "p")
        Catalogue(instance, GroupAssets.of(ODD), host, public_settings(KAFKA)).record_joined()
        for group, problem in (
            (ODD, "has not been assigned a partition yet: look at the ticks"),
            ("orphan", "has never been assigned a partition .* Groups of the instance: shop_eu"),
        ):
            with pytest.raises(ConfigurationError, match=problem):
                partitions_of(instance, GroupAssets.of(group), group)


HINT = "if this Kafka requires TLS or a login, pass --command-config"


def test_target_without_login_hints_at_it_when_kafka_is_silent(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("bootstrap.servers=kafka:9092\n")
    for file, is_retriable, is_named in (
        (None, True, True),
        (login, True, False),
        (None, False, False),  # it has answered
    ):
        silent = BrokerError("no answer", retriable=is_retriable)
        with pytest.raises(BrokerError, match="no answer") as refused, open_target(ODD, "", file):
            raise silent
        assert (HINT in str(refused.value)) == is_named
        assert refused.value.retriable == is_retriable


def test_produce_without_login_hints_at_it_when_kafka_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(*_: object) -> None:
        msg = "no answer"
        raise BrokerError(msg, retriable=True)

    monkeypatch.setattr(Cluster, "partitions_for", silent)
    with pytest.raises(BrokerError, match=f"^no answer; {HINT}"):
        invoke("produce", "orders", "5", "--bootstrap-server", "kafka:9092")


def no_token(_config: str) -> None:
    """Fail, as `oauth_cb` of a login file."""
    msg = "the issuer is away"
    raise OSError(msg)


@pytest.mark.parametrize("command", [("produce", "orders", "5"), ("status", "--group", ODD)])
def test_login_file_may_name_a_token_function(command: tuple[str, ...], tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text(
        "bootstrap.servers=kafka:9092\nsecurity.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER\n"
        f"oauth_cb={__name__}:no_token\n"
    )
    with pytest.raises(BrokerError, match=r"'oauth_cb' raised .*the issuer is away"):
        invoke(*command, "--command-config", str(login))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["status"], "several consumer groups: pass --group with one of older, shop_eu"),
        (["explain", "--group", "orphan"], "group orphan has never been assigned a partition"),
        (["status", "--group", "older"], "have not published their brokers: pass --bootstrap-s"),
        (["produce", "orders", "5"], "pass --bootstrap-server; .dagster-rebalance broker. prints"),
        (["reset", "--all", "orders", "--to-latest"], "name the partitions to reset"),
        (
            ["reset", "--all", "--to-latest", "-r", "x" * 301],
            "a reason may have at most 300 characters",
        ),
    ],
)
def test_command_with_wrong_arguments_is_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        invoke(*arguments)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ssl.ca.location=x\nsecret\n", "line 2 of .* is not name=value$"),
        ("=secret", "line 1 of .* is not name=value$"),
        ("the secret = x", "line 1 of .* is not name=value$"),
        ("group.id=secret", "line 1 of .* sets group.id: remove it; --group names"),
    ],
)
def test_login_file_with_a_mistake_is_refused_without_showing_values(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "login"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=problem) as refused:
        read_client_config(file)
    assert "secret" not in str(refused.value)


def test_missing_login_file_is_a_usage_error(tmp_path: Path) -> None:
    result = invoke("status", "--command-config", str(tmp_path / "none"))
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("status", "dagster-rebalance status --watch"),
        ("explain", "dagster-rebalance explain orders:3"),
        ("reset", "dagster-rebalance reset orders:3 --to-offset 1200"),
        ("produce", "dagster-rebalance produce orders 1000"),
    ],
)
def test_help_has_examples(command: str, example: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert example in result.output

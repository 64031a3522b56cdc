"""Which group and which Kafka a command means, before anything is connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.cli.target import client_config, open_target
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.cli.typed import typed

if TYPE_CHECKING:
    from pathlib import Path

ODD = "shop/eu: 'orders'"
KAFKA = KafkaConsumerResource(
    bootstrap_servers="kafka:9092", group_id=ODD, topics=["orders"], max_attempts=7
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instance with a group whose members have left their settings, and one without."""
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


def test_members_say_where_kafka_is_and_when_a_partition_stops(tmp_path: Path) -> None:
    """How to log in is said by who asks."""
    login = tmp_path / "login"
    login.write_text("# mine\n\nsasl.password = a=b \nsecurity.protocol=SASL_SSL\n")
    refused = pytest.raises(ConfigurationError, match=r"login has no bootstrap\.servers: add where")
    with refused, open_target(ODD, "", login):
        pass
    with open_target(ODD, "", None) as target:
        assert target.kafka.bootstrap_servers == "kafka:9092"
    with open_target(ODD, "kafka:9093", login) as target:
        kafka = target.kafka
    assert (kafka.group_id, kafka.topics) == (ODD, ["orders"])
    assert kafka.driver_settings().max_attempts == 7
    config = kafka.consumer_config()
    assert config["bootstrap.servers"] == "kafka:9093"
    assert config["sasl.password"] == "a=b"
    assert "a=b" not in repr(kafka)


def test_who_asks_may_say_where_kafka_is(tmp_path: Path) -> None:
    """The members may know it by an address that is reached from there only."""
    login = tmp_path / "login"
    login.write_text("bootstrap.servers=outside:1\n")
    with open_target(ODD, "", login) as target:
        assert target.kafka.bootstrap_servers == "outside:1"
    with open_target(ODD, "other:2", login) as target:
        assert target.kafka.bootstrap_servers == "other:2"
    with open_target("older", "other:2", None) as target:
        assert target.kafka.topics == ["invoices", "orders"]


MISSING = "if this Kafka asks for TLS or a login, give --command-config"


def test_where_kafka_is_silent_a_login_that_was_not_given_is_named(tmp_path: Path) -> None:
    """Kafka hangs up on a client in the clear, which looks as if it were down."""
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
        assert (MISSING in str(refused.value)) == is_named
        assert refused.value.retriable == is_retriable


def test_produce_names_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no Dagster, and so asks nobody else."""

    def silent(*_: object) -> None:
        msg = "no answer"
        raise BrokerError(msg, retriable=True)

    monkeypatch.setattr(Cluster, "partitions_for", silent)
    with pytest.raises(BrokerError, match=f"^no answer; {MISSING}"):
        typed("produce", "orders", "5", "--bootstrap-server", "kafka:9092")


def no_token(_config: str) -> None:
    """A function for `oauth_cb`."""
    msg = "the issuer is away"
    raise OSError(msg)


@pytest.mark.parametrize("command", [("produce", "orders", "5"), ("status", "--group", ODD)])
def test_each_command_takes_a_login_that_names_a_function(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """One file is for all commands, as that for MSK with IAM."""
    login = tmp_path / "login"
    login.write_text(
        "bootstrap.servers=kafka:9092\nsecurity.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER\n"
        f"oauth_cb={__name__}:no_token\n"
    )
    with pytest.raises(BrokerError, match=r"no token to log in with: .*the issuer is away"):
        typed(*command, "--command-config", str(login))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["status"], "several consumer groups: say --group with one of older, shop_eu"),
        (["explain", "--group", "nobody"], "no member of group nobody has had a partition yet"),
        (["status", "--group", "older"], "have not left word of their brokers: give --bootstrap-s"),
        (["produce", "orders", "5"], "say where Kafka is: --bootstrap-server"),
        (["reset", "--all", "orders", "--to-latest"], "say which partitions to move"),
        (["reset", "--all", "--to-latest", "-r", "x" * 301], "a reason may have 300 characters"),
    ],
)
def test_a_slip_of_the_hand_is_answered_with_a_sentence(arguments: list[str], problem: str) -> None:
    """A traceback tells a person nothing."""
    with pytest.raises(ConfigurationError, match=problem):
        typed(*arguments)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ssl.ca.location=x\nsecret\n", "line 2 of .* is not name=value$"),
        ("=secret", "line 1 of .* is not name=value$"),
        ("the secret = x", "line 1 of .* is not name=value$"),
        ("group.id=secret", "line 1 of .* sets group.id: remove it; --group says which"),
    ],
)
def test_a_mistake_in_the_file_is_named_without_showing_it(
    tmp_path: Path, text: str, problem: str
) -> None:
    """What stands there may be a password."""
    file = tmp_path / "login"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=problem) as refused:
        client_config(file)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    """As any other wrong option."""
    result = typed("status", "--command-config", str(tmp_path / "none"))
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
def test_the_help_of_each_command_has_examples(command: str, example: str) -> None:
    """They stand on lines of their own, to be pasted."""
    result = typed(command, "--help")
    assert result.exit_code == 0
    assert example in result.output

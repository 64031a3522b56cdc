"""A Spark Connect server that writes an event log: which secrets of its clients are in it.

One story for all tests: a login in the options, with the documented mask, and logins that Kafka's
config providers look up on the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.kafka_options import (
    REDACTION,
    spark_kafka_options,
)
from dagster_rebalance.spark.ranges import read_ranges
from dagster_rebalance.testing.spark_connect import SparkConnectServer
from tests.kafka.client.test_security import KEY_PASSWORD, pem_settings
from tests.spark.lakes import connected
from tests.spark.producing import produce

if TYPE_CHECKING:
    from dagster_rebalance.testing.secured import SecuredKafka

pytestmark = [pytest.mark.spark, pytest.mark.broker]

MASKED = "masked-in-the-log"
LOOKED_UP = "looked-up-on-the-server"
PASSWORD = f'{MASKED} "quoted" \\ and; ,{{0}} %s'
TOPIC = "event-log"
LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required username="


@dataclass(frozen=True)
class Story:
    """The records that each login has read, and the event log of the server."""

    read: dict[str, list[int]]
    event_log: str


@pytest.fixture(scope="module")
def story(secured_kafka: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("server")
    (folder / "events").mkdir()
    secured_kafka.create_topic(TOPIC)
    produce(secured_kafka.client_config(), TOPIC, map(str, range(10)))
    for user, password in (("in-options", PASSWORD), ("by-reference", LOOKED_UP)):
        secured_kafka.add_user(user, password)
        secured_kafka.allow(user, "READ", topic=TOPIC)
    secured_kafka.add_certificate("certified")
    secured_kafka.allow("certified", "READ", topic=TOPIC)
    (folder / "password").write_text(LOOKED_UP)
    referring = {**secured_kafka.client_config("by-reference"), "sasl.password": "not used"}
    from_environment = {
        "kafka.config.providers": "env",
        "kafka.config.providers.env.class": (
            "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
        ),
        "kafka.sasl.jaas.config": LOGIN + '"by-reference" password="${env:ETL_PASSWORD}";',
    }
    from_folder = {
        "kafka.config.providers": "files",
        "kafka.config.providers.files.class": (
            "org.apache.kafka.common.config.provider.DirectoryConfigProvider"
        ),
        "kafka.sasl.jaas.config": LOGIN
        + f'"by-reference" password="${{files:{folder}:password}}";',
    }
    ways: dict[str, dict[str, Any]] = {
        "login in the options": secured_kafka.client_config("in-options"),
        "key in the options": pem_settings(secured_kafka.client_config("certified"), folder),
        "variable of the server": {**referring, **from_environment},
        "file of the server": {**referring, **from_folder},
    }
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(folder / "events"),
        "spark.redaction.string.regex": REDACTION,
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ETL_PASSWORD", LOOKED_UP)
        with SparkConnectServer(settings=settings) as server, connected(server) as session:
            read = {}
            for way, config in ways.items():
                frame = read_ranges(session, [OffsetRange(TOPIC, 0, 2, 7)], config)
                read[way] = sorted(int(row["value"]) for row in frame.select("value").collect())
                # The server omits the deep parts of a plan, so a plain read shows its options.
                options = {**spark_kafka_options(config), "subscribe": TOPIC}
                assert len(session.read.format("kafka").options(**options).load().collect()) == 10
    written = (file.read_text() for file in (folder / "events").rglob("*") if file.is_file())
    return Story(read, "".join(written))


def test_each_login_reads_the_range(story: Story) -> None:
    assert len(story.read) == 4
    assert all(values == [2, 3, 4, 5, 6] for values in story.read.values()), story.read


def test_documented_expression_masks_secrets_in_the_options(story: Story) -> None:
    assert "kafka.security.protocol" in story.event_log, "the requests of the clients are not seen"
    for secret in (MASKED, KEY_PASSWORD, "PRIVATE KEY"):
        assert secret not in story.event_log


def test_login_looked_up_by_the_server_is_in_no_request(story: Story) -> None:
    assert LOOKED_UP not in story.event_log

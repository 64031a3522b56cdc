"""`dagster-rebalance probe` on a real Kafka, for definitions of both forms."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from tests.cli.command_line import invoke

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

CODE = """
import json

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.arrow.output import write_parquet_by_range


@dg.asset
def orders(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> dg.MaterializeResult:
    context.log.info("a line of the log")
    assert kafka_batch.is_rerun
    for message in kafka_batch.messages():
        if message.offset() == 2:
            raise KeyError("customer")
        if message.offset() == 3:
            kafka_batch.set_aside(message, "no customer\\x1b")
    written = write_parquet_by_range(kafka_batch.arrow(), {out!r})
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=written))


kafka = KafkaConsumerResource(
    bootstrap_servers={brokers!r}, group_id={topic!r}, topics=[{topic!r}], dead_letter_topic="dead"
)
defs = build_kafka_{form}_defs(kafka=kafka, assets=[orders], name="shop")
"""


IN_SPARK = """
import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.spark.output import write_parquet_by_range


@dg.asset
def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
    frame = kafka_batch.dataframe(spark).selectExpr(
        "*", "if(offset = 3, 'no customer', NULL) AS reason"
    )
    write_parquet_by_range(kafka_batch.good_rows(frame, error="reason"), {out!r})


kafka = KafkaConsumerResource(
    bootstrap_servers={brokers!r}, group_id={topic!r}, topics=[{topic!r}], dead_letter_topic="dead"
)
spark = KafkaSparkResource(remote={remote!r})
defs = build_kafka_{form}_defs(kafka=kafka, assets=[orders], spark=spark, name="shop")
"""


class Shop:
    """A topic with 5 records, and code that processes them."""

    def __init__(self, kafka: KafkaCluster, topic: str, folder: Path) -> None:
        self.kafka, self.topic, self.folder = kafka, topic, folder
        self.out = folder / "out"
        producer = Producer(kafka.client_config())
        for number in range(5):
            producer.produce(topic, key=f"k{number}", value=f"v{number}", partition=0)
        assert producer.flush(120) == 0

    def file(self, form: str = "batch", remote: str = "") -> Path:
        path = self.folder / f"{form}_{self.topic.replace('-', '_')}.py"
        brokers = self.kafka.client_config()["bootstrap.servers"]
        values = {"out": str(self.out), "brokers": brokers, "topic": self.topic, "remote": remote}
        text = (IN_SPARK if remote else CODE).replace("{form}", form)
        for name, value in values.items():
            text = text.replace(f"{{{name}!r}}", repr(value))
        path.write_text(text)
        return path

    def committed(self) -> dict[str, int]:
        admin = AdminClient({**self.kafka.client_config()})
        groups = {one.group_id for one in admin.list_consumer_groups().result().valid}
        return {self.topic: 1} if self.topic in groups else {}


@pytest.fixture
def shop(kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path) -> Shop:
    return Shop(kafka_broker, kafka_topic(1), tmp_path)


@pytest.mark.broker
@pytest.mark.parametrize("form", ["batch", "stream"])
def test_records_are_processed_without_effects(shop: Shop, form: str) -> None:
    done = invoke("probe", f"{shop.topic}:0@0", f"{shop.topic}:0@3-5", "-f", str(shop.file(form)))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == (
        f"probe of {shop.topic}-0 [0, 1), {shop.topic}-0 [3, 5) through job shop: succeeded, "
        "nothing was committed"
    )
    assert "asset orders" in lines
    assert "  dagster/row_count: 3" in lines
    assert "  set_aside: 1" in lines
    assert f"output Parquet {shop.out}: 3 rows" in lines
    assert any('"value": "v4"' in line for line in lines)
    assert lines[-2:] == [
        "the group would store 1 dead letter",
        f"  {shop.topic}-0-3: no customer",
    ]
    assert not shop.out.exists()
    assert not shop.committed()


@pytest.mark.broker
@pytest.mark.parametrize("form", ["batch", "stream"])
def test_error_is_shown_with_its_traceback(shop: Shop, form: str, tmp_path: Path) -> None:
    arguments = ("probe", f"{shop.topic}:0@2", "-f", str(shop.file(form)))
    done = invoke(*arguments, "--scratch", str(tmp_path / "scratch"), "--json")
    assert done.exit_code == 1
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown["success"] is False
    assert "KeyError: 'customer'" in shown["error"]
    assert 'raise KeyError("customer")' in shown["error"]
    assert shown["outputs"] == shown["letters"] == []


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.parametrize("form", ["batch", "stream"])
def test_records_are_processed_in_spark(
    shop: Shop, spark_connect_server: SparkConnectServer, form: str
) -> None:
    file = str(shop.file(form, spark_connect_server.remote))
    # In a process: a session with a server changes the environment for all later sessions.
    command = [sys.executable, "-m", "dagster_rebalance.cli", "probe", f"{shop.topic}:0@1-5"]
    done = subprocess.run(
        [*command, "-f", file], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"output Parquet {shop.out}: 3 rows" in lines
    assert lines[-1] == f"  {shop.topic}-0-3: no customer"
    assert not shop.out.exists()
    assert not shop.committed()


@pytest.mark.broker
def test_scratch_folder_is_kept(shop: Shop, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    file = str(shop.file())
    done = invoke("probe", f"{shop.topic}:0@1", "-f", file, "--scratch", str(folder), "--json")
    assert done.exit_code == 0, done.output
    (output,) = json.loads(done.stdout.splitlines()[-1])["outputs"]
    assert output["place"].startswith(str(folder))
    assert [path.name for path in folder.rglob("*.parquet")] == ["1-2.parquet"]


@pytest.mark.broker
def test_offsets_that_kafka_does_not_have_are_refused(shop: Shop) -> None:
    with pytest.raises(BrokerError, match=r"the offsets \[0, 5\) of .*-0, and not all of"):
        invoke("probe", f"{shop.topic}:0@5", "-f", str(shop.file()))
    with pytest.raises(ConfigurationError, match="no job of these definitions processes other"):
        invoke("probe", "other:0@5", "-f", str(shop.file()))


@pytest.mark.parametrize("text", ["orders", "orders:3", "orders@7", "orders:3@x", "orders:3@9-3"])
def test_text_that_is_no_offset_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"orders"):
        invoke("probe", text, "-m", "json")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("other.txt", "", "neither a pyproject.toml"),
        ("pyproject.toml", '[tool.dagster]\nmodule_name = "no_module"', "No module named"),
        ("pyproject.toml", '[tool.dg.project]\nroot_module = "json"', "json.definitions"),
        ("workspace.yaml", "load_from: [{python_module: json}]", "json has 0 dg.Definitions"),
        ("workspace.yaml", "load_from: [{python_file: a.py}, {python_file: b.py}]", "has 2 code"),
        ("workspace.yaml", "load_from: [{python_file: {relative_path: a.py}}]", "a.py cannot be"),
        ("workspace.yaml", "- python_file: a.py", "workspace.yaml names no .* or pass -m"),
        ("workspace.yaml", "load_from: a.py", "does not have the form that Dagster expects"),
        ("workspace.yaml", "load_from: [", "workspace.yaml names no code location: while parsing"),
        ("pyproject.toml", "[tool", "pyproject.toml names no code location: .* or pass -m"),
        ("pyproject.toml", "tool = 1", "does not have the form that Dagster expects"),
    ],
)
def test_code_location_is_that_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=problem):
        invoke("probe", "orders:3@7")


def test_module_and_file_exclude_each_other(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.touch()
    with pytest.raises(ConfigurationError, match="either -m or -f"):
        invoke("probe", "orders:3@7", "-m", "json", "-f", str(file))


TWO_GROUPS = """
import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_batch_defs


def group(topic: str) -> dg.Definitions:
    @dg.asset(name=f"{topic}_rows", required_resource_keys={f"{topic}_batch"})
    def made() -> None:
        raise AssertionError

    kafka = KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("PROBED_BROKERS"), group_id=topic, topics=[topic]
    )
    return build_kafka_batch_defs(
        kafka=kafka, assets=[made], name=topic, kafka_key=f"{topic}_kafka",
        batch_key=f"{topic}_batch", show_topics=False,
    )


defs = dg.Definitions.merge(group("orders"), group("pay"))
"""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["orders:0@3", "pay:0@3"],
            r"processes all of orders, pay \(orders processes orders; pay processes pay\): probe",
        ),
        (["orders:0@3", "--job", "x"], "there is no job x .* --job with one of orders, pay"),
        (["other:0@3"], "no job of these definitions processes other"),
        (["orders:0@3-9", "orders:0@8"], "overlap: name each offset once"),
        (
            ["orders:0@3", "orders:0@3"],
            'set up: You have .* fetch the environment variable "PROBED_BROKERS" which is not set',
        ),
    ],
)
def test_probe_that_cannot_begin_names_the_cause_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.delenv("PROBED_BROKERS", raising=False)
    file = tmp_path / "two_groups.py"
    file.write_text(TWO_GROUPS)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        invoke("probe", *arguments, "-f", str(file))
    assert "\n" not in str(caught.value)


def test_file_that_was_named_is_not_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "broken_code_location.py"
    file.write_text("1 / 0")
    with pytest.raises(ConfigurationError, match=r"division by zero$"):
        invoke("probe", "orders:3@7", "-f", str(file))

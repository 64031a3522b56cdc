"""`dagster-rebalance broker` and the console script, as processes."""

from __future__ import annotations

import re
import signal
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from dagster_rebalance.testing.local.host import accepts_connections
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "dagster_rebalance.cli"]


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the command to its end, and return its exit code and output."""
    with ChildProcess("the command", [*COMMAND, *arguments], log=folder / "log") as child:
        return child.wait(120), child.tail()


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "kill"])
def test_broker_runs_until_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    with ChildProcess(
        "the command", [*COMMAND, "broker", "--topic", "orders:8"], log=tmp_path / "log"
    ) as child:
        child.wait_until_ready(lambda: "to stop" in child.tail(), timeout_s=240)
        found = re.search(r"bootstrap servers +127\.0\.0\.1:(\d+)", child.tail())
        assert found is not None, child.tail()
        port = int(found.group(1))
        assert "starting Kafka" in child.tail(200), "progress is printed to a log, too"
        produce = f"dagster-rebalance produce orders 1000 --bootstrap-server 127.0.0.1:{port}"
        assert produce in child.tail()
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        assert len(admin.list_topics(timeout=120).topics["orders"].partitions) == 8
        child.send(number)
        assert child.wait(120) == 0
        assert child.tail().endswith("Kafka and its data are removed\n")
        assert not accepts_connections(port)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "2"], "A local Kafka has 1 or 3 nodes, not 2."),
        (
            ["--topic", "orders:many"],
            "--topic takes NAME or NAME:PARTITIONS, for example orders:8, not 'orders:many'.",
        ),
        (
            ["--topic", ":8"],
            "--topic takes NAME or NAME:PARTITIONS, for example orders:8, not ':8'.",
        ),
    ],
)
def test_broker_with_wrong_arguments_is_refused(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    assert run(tmp_path, "broker", *arguments) == (1, f"error: {sentence}\n")


def test_help_lists_each_command_with_a_line(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--help")
    assert code == 0
    assert "Run a local Kafka in a temporary folder" in text


def test_version_option_prints_the_version(tmp_path: Path) -> None:
    assert run(tmp_path, "--version") == (0, f"dagster-rebalance {version('dagster-rebalance')}\n")

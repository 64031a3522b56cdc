"""`dagster-rebalance broker`: run a real Kafka in the foreground, for experiments.

Kafka and its data are removed when the command ends, even if the command is killed.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from rich.console import Console

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.testing.broker import KafkaCluster

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parse_topic(text: str) -> tuple[str, int]:
    name, colon, partitions = text.rpartition(":")
    if not colon:
        return text, 1
    if not name or not partitions.isdecimal() or int(partitions) < 1:
        msg = f"--topic takes NAME or NAME:PARTITIONS, for example orders:8, not {text!r}."
        raise ConfigurationError(msg)
    return name, int(partitions)


def broker(nodes: int, port: int | None, topic: list[str] | None) -> None:
    """Run Kafka until Ctrl-C."""
    topics = [_parse_topic(text) for text in topic or []]
    console = Console()
    stop = threading.Event()
    status = console.status("")

    def report_progress(sentence: str) -> None:
        """Update the status line, or print a line if the output is not a terminal."""
        if console.is_terminal:
            status.update(sentence)
        else:
            console.print(sentence, soft_wrap=True, highlight=False)

    cluster = KafkaCluster(nodes=nodes, port=port, tell=report_progress)
    report_progress("starting Kafka, which takes some seconds")
    with status, cluster as kafka:
        for name, partitions in topics:
            report_progress(f"creating topic {name}")
            kafka.create_topic(name, partitions)
        status.stop()
        _print_summary(console, kafka, topics)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        while not stop.wait(0.5):
            if len(kafka.pids) < nodes:
                msg = f"A Kafka node has ended. The nodes' logs end with:\n{kafka.tail()}"
                raise BrokerError(msg)
        console.print("stopping Kafka")
    console.print("Kafka and its data are removed")


def _print_summary(
    console: Console, kafka: KafkaCluster, topics: Sequence[tuple[str, int]]
) -> None:
    rows = {
        "bootstrap servers": kafka.bootstrap_servers,
        "topics": ", ".join(f"{name} ({partitions} partitions)" for name, partitions in topics)
        or "none (--topic NAME:PARTITIONS creates one)",
        "to fill one": f"dagster-rebalance produce {topics[0][0] if topics else 'TOPIC'} 1000 "
        f"--bootstrap-server {kafka.bootstrap_servers}",
        "log": ", ".join(map(str, kafka.logs)),
        "to stop": "Ctrl-C",
    }
    for name, value in rows.items():
        console.print(f"[bold]{name:>18}[/bold]  {value}", soft_wrap=True, highlight=False)

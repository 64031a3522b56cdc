"""The work of the contenders of a deploy, and the count of their output.

A batch takes half a second. Each range is written to a file named by its bounds, so a range that is
processed again replaces its file.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proofs.bench.streams import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from confluent_kafka import Message

BATCH_S = 0.5
POLLED, BLOCKING = "polled", "blocking"
_VARIABLE = "DAGSTER_REBALANCE_BENCH_WORK"
_Range = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Written:
    """A range of the output.

    Attributes:
        partition: Number of the partition.
        start: First offset.
        until: Offset after the last one.
        version: Version of the code that wrote it.
        process: Pid of the writer.
    """

    partition: int
    start: int
    until: int
    version: str
    process: int


@dataclass(frozen=True)
class Work:
    """The settings of a contender.

    Attributes:
        brokers: The Kafka.
        topic: The topic.
        folder: Folder of the output and of the code's version.
        batch_s: Duration of a batch.
    """

    brokers: str
    topic: str
    folder: str
    batch_s: float = BATCH_S

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process."""
        return {_VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": str(ROOT)}

    @classmethod
    def from_environment(cls) -> Work:
        """Return the settings of this process."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    @property
    def version(self) -> Path:
        """The file with the version of the code."""
        return Path(self.folder) / "version"

    @property
    def _output(self) -> Path:
        folder = Path(self.folder) / "output"
        folder.mkdir(exist_ok=True)
        return folder

    def client_config(self, contender: str) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.brokers,
            "group.id": f"{self.topic}-{contender}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }

    def process(self, ranges: Sequence[_Range], version: str) -> None:
        """Take the time of a batch, and write its ranges."""
        at_work, unfinished = (self._output / f"{sign}{os.getpid()}" for sign in "@~")
        for range_ in ranges:
            time.sleep(self.batch_s / len(ranges))
            unfinished.write_text(json.dumps([version, os.getpid()]))
            unfinished.rename(self._output / "-".join(map(str, range_)))
            at_work.touch()
        at_work.unlink()

    def at_work(self) -> list[int]:
        """Return the pids of processes that have written a part of their batch."""
        return [int(file.name[1:]) for file in self._output.glob("@*")]

    def output(self) -> list[Written]:
        found = []
        for file in self._output.glob("[0-9]*"):
            partition, start, until = map(int, file.name.split("-"))
            found.append(Written(partition, start, until, *json.loads(file.read_text())))
        return found


def ranges_of(messages: Iterable[Message]) -> list[_Range]:
    """Return the ranges of polled records, without error messages of the client."""
    bounds: dict[int, tuple[int, int]] = {}
    for message in messages:
        if message.error() is None:
            partition, offset = int(message.partition() or 0), int(message.offset() or 0)
            start, _ = bounds.get(partition, (offset, offset))
            bounds[partition] = (start, offset + 1)
    return [(partition, *one) for partition, one in bounds.items()]


def lost_and_doubled(output: Iterable[Written], ends: Sequence[int]) -> tuple[int, int]:
    """Return the number of missing records, and of records that occur more than once."""
    times = Counter(
        (one.partition, offset) for one in output for offset in range(one.start, one.until)
    )
    doubled = sum(count > 1 for count in times.values())
    produced = {(partition, offset) for partition, end in enumerate(ends) for offset in range(end)}
    return len(produced - times.keys()), doubled

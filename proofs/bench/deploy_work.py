"""What the contenders of a deploy do with their records, and how their output is counted.

A batch takes half a second. Its ranges are written one after the other, each to a file with its
bounds as the name, so that a range that is done again replaces what was written of it. Owns these
files.
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
        partition: The number of its partition.
        start: Its first offset.
        until: The offset behind its last one.
        version: The version of the code that wrote it.
        process: The id of the process that wrote it.
    """

    partition: int
    start: int
    until: int
    version: str
    process: int


@dataclass(frozen=True)
class Work:
    """What a contender works on.

    Attributes:
        brokers: The Kafka.
        topic: The topic.
        folder: Where the output and the code's version are.
        batch_s: How long a batch takes.
    """

    brokers: str
    topic: str
    folder: str
    batch_s: float = BATCH_S

    @property
    def environment(self) -> dict[str, str]:
        """How a process is told."""
        return {_VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": str(ROOT)}

    @classmethod
    def from_environment(cls) -> Work:
        """What this process was told."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    @property
    def version(self) -> Path:
        """The file that says which version the code is."""
        return Path(self.folder) / "version"

    @property
    def _output(self) -> Path:
        folder = Path(self.folder) / "output"
        folder.mkdir(exist_ok=True)
        return folder

    def client_config(self, contender: str) -> dict[str, Any]:
        """The settings of a consumer that commits by itself."""
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
        """The ids of processes that have written a part of their batch, and not all of it."""
        return [int(file.name[1:]) for file in self._output.glob("@*")]

    def output(self) -> list[Written]:
        """All that was written."""
        found = []
        for file in self._output.glob("[0-9]*"):
            partition, start, until = map(int, file.name.split("-"))
            found.append(Written(partition, start, until, *json.loads(file.read_text())))
        return found


def ranges_of(messages: Iterable[Message]) -> list[_Range]:
    """The ranges of polled records; what a client says of itself is left out."""
    bounds: dict[int, tuple[int, int]] = {}
    for message in messages:
        if message.error() is None:
            partition, offset = int(message.partition() or 0), int(message.offset() or 0)
            start, _ = bounds.get(partition, (offset, offset))
            bounds[partition] = (start, offset + 1)
    return [(partition, *one) for partition, one in bounds.items()]


def lost_and_doubled(output: Iterable[Written], ends: Sequence[int]) -> tuple[int, int]:
    """How many of the produced records are missing, and how many are there more than once."""
    times = Counter(
        (one.partition, offset) for one in output for offset in range(one.start, one.until)
    )
    doubled = sum(count > 1 for count in times.values())
    produced = {(partition, offset) for partition, end in enumerate(ends) for offset in range(end)}
    return len(produced - times.keys()), doubled

"""What the contenders of `deploy_duplicates` do with their batches, and how it is counted.

A batch takes a while, and then its offsets are written to a file, in one step. Owns the files: one
line for each range, in a folder of the contender.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BATCH_S = 0.5
OURS, POLLED, BLOCKING = "ours", "polled", "blocking"
_VARIABLE = "DAGSTER_REBALANCE_BENCH_WORK"

Range = tuple[int, int, int]
"""A partition, and the half-open offsets."""


@dataclass(frozen=True)
class Work:
    """What a contender works on.

    Attributes:
        brokers: The Kafka.
        topic: The topic.
        folder: Where the output and the code's version are.
    """

    brokers: str
    topic: str
    folder: str

    @property
    def environment(self) -> dict[str, str]:
        """How a process is told."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Work:
        """What this process was told."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    @property
    def version(self) -> Path:
        """The file that says which version the code is."""
        return Path(self.folder) / "version"

    def client_config(self, group: str) -> dict[str, Any]:
        """The settings of a consumer that commits by itself."""
        return {
            "bootstrap.servers": self.brokers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }

    @staticmethod
    def wait() -> None:
        """Take as long as a batch takes."""
        time.sleep(BATCH_S)

    def write(self, contender: str, batch: str, ranges: Sequence[Range]) -> None:
        """Write the output of a batch under its name, in place of an earlier one."""
        folder = Path(self.folder) / contender
        folder.mkdir(exist_ok=True)
        unfinished = folder / f".{os.getpid()}"
        unfinished.write_text("".join(f"{one[0]} {one[1]} {one[2]}\n" for one in ranges))
        unfinished.rename(folder / batch)

    def output(self, contender: str) -> list[Range]:
        """All that a contender has written."""
        found = []
        for file in (Path(self.folder) / contender).glob("[!.]*"):
            for line in file.read_text().splitlines():
                partition, start, until = map(int, line.split())
                found.append((partition, start, until))
        return found


def lost_and_doubled(output: Iterable[Range], ends: Sequence[int]) -> tuple[int, int]:
    """How many of the produced records are missing, and how many are there more than once."""
    times: Counter[tuple[int, int]] = Counter()
    for partition, start, until in output:
        times.update((partition, offset) for offset in range(start, until))
    doubled = sum(1 for count in times.values() if count > 1)
    lost = sum(
        (partition, offset) not in times
        for partition, end in enumerate(ends)
        for offset in range(end)
    )
    return lost, doubled

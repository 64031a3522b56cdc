"""The groups of the test of bisection: one of each form of run, with the records of one topic.

An attempt writes its output, and then raises if it has a bad record. It appends its process id and
its ranges to the file `calls`. While the file `hold` exists, an attempt on a part of a range waits.
"""

import os
import time

from dagster_rebalance import KafkaBatch
from dagster_rebalance.arrow.output import write_parquet_by_range
from tests.e2e.project.both_forms import ROOT, both_forms


def _process(group: str, batch: KafkaBatch) -> None:
    folder = ROOT / group
    written = write_parquet_by_range(batch.arrow(), str(folder / "output"))
    with (folder / "calls").open("a") as calls:
        calls.write(f"{os.getpid()} {' '.join(one.key for one in batch.offset_ranges)}\n")
    while batch.failed_ranges and (folder / "hold").exists():
        time.sleep(0.1)
    values = [(message.value() or b"").decode() for message in batch.messages()]
    assert len(values) == written
    for value in values:
        if value.startswith("bad"):
            message = f"{value} is no number"
            raise ValueError(message)


defs = both_forms(
    "raising",
    _process,
    on_failure="bisect",
    max_dead_letters="100",
    max_attempts=2,
    retry_delay_s=0.5,
    retry_delay_limit_s=5.0,
)

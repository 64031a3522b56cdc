"""Simulates the work of a real project on a batch. Delete it in yours."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_rebalance import KafkaBatch


def work_on(batch: KafkaBatch) -> None:
    """Take as long as the slowest partition of the batch does.

    The environment variable SIMULATED_WORK_S has the seconds by partition: `2,2,15` is 15 s for
    partitions 2, 5, 8 and so on.
    """
    seconds = [float(text) for text in os.environ.get("SIMULATED_WORK_S", "0").split(",")]
    time.sleep(max(seconds[range_.partition % len(seconds)] for range_ in batch.offset_ranges))

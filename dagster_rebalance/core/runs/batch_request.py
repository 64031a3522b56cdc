"""A request to run a batch, for Dagster or for the worker of a streaming run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A run to start.

    Attributes:
        attempt: The number of this request, starting at 1.
        ranges: The ranges to process: after a rebalance, perhaps a part of the batch.
        failures: The failed attempts on the ranges.
        interruptions: The runs in a row that were interrupted since.
        unsubmitted: The run that Dagster has created but not submitted; empty for none.
        is_own: Whether this member has written the claims.
    """

    batch_id: str
    attempt: int
    ranges: tuple[OffsetRange, ...]
    failures: int = field(default=0, compare=False)
    interruptions: int = field(default=0, compare=False)
    unsubmitted: str = field(default="", compare=False)
    is_own: bool = field(default=False, compare=False)

    @property
    def run_key(self) -> str:
        """The key for which Dagster starts at most one run."""
        digest = zlib.crc32(" ".join(map(str, self.ranges)).encode())
        return f"{self.batch_id}.{digest:08x}.{self.attempt}"

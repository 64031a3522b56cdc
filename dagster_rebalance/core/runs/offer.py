"""A run that the sensor is to request."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange


@dataclass(frozen=True, slots=True)
class Offer:
    """A run to be started.

    Attributes:
        batch_id: The batch.
        attempt: How often a run was asked for, this one included.
        ranges: What the run shall process. After a rebalance that may be a part of the batch.
        failures: The attempts that failed on it.
        interruptions: The runs in a row that were interrupted on it since.
        unsubmitted: The run that Dagster has created for it and not submitted; empty for none.
        is_own: Whether the member has written the claims itself.
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
        """The key under which Dagster starts at most one run."""
        digest = zlib.crc32(" ".join(map(str, self.ranges)).encode())
        return f"{self.batch_id}.{digest:08x}.{self.attempt}"

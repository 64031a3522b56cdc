"""What a member loop works with: the member, its engine, and ports to Dagster."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.reporting.lag import NO_LIMIT
from dagster_rebalance.orchestration.member.log import MemberLog
from dagster_rebalance.orchestration.runs.canceller import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.reporting.lag import LagLimit
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.orchestration.ports import (
        CataloguePort,
        DeadLettersPort,
        MeterPort,
        RunsPort,
        WorkPort,
    )


@dataclass(frozen=True)
class MemberDependencies:
    """What a member loop works with; made and owned by its thread.

    Attributes:
        clock_with_suspension: A clock that also counts while the machine is suspended; None if
            `clock` does.
        work: The worker of a streaming run; None for a member that requests runs.
        lag_limit: How much lag of the group is too much.
        wall_clock: The time in seconds since 1970, as the timestamps of records have it.
        log: Gets what happens.
        meter: Measures it; None where nobody does.
    """

    consumer: RebalanceAwareConsumer
    engine: Engine
    runs: RunsPort
    catalogue: CataloguePort
    topics: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    dead_letters: DeadLettersPort | None = None
    start: Callable[[str, Callable[[], None]], None] = in_thread
    clock_with_suspension: Callable[[], float] | None = None
    work: WorkPort | None = None
    lag_limit: LagLimit = NO_LIMIT
    wall_clock: Callable[[], float] = time.time
    log: MemberLog = field(default_factory=MemberLog)
    meter: MeterPort | None = None

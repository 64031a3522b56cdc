"""The dependencies of a member loop: the member, its engine, its log, and ports to Dagster."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.member_events import json_value
from dagster_rebalance.core.reporting.lag import NO_LIMIT
from dagster_rebalance.orchestration.runs.canceller import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dagster_rebalance.core.engine.engine import Engine
    from dagster_rebalance.core.model.member_events import MemberEvent
    from dagster_rebalance.core.reporting.lag import LagLimit
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.orchestration.member.filter_scanner import FilterScanner
    from dagster_rebalance.orchestration.ports import (
        CataloguePort,
        DeadLettersPort,
        MeterPort,
        NewLettersPort,
        RunsPort,
        WorkPort,
    )

# The name is public: users configure the level of this logger.
_logger = logging.getLogger("dagster_rebalance.orchestration.member.log")


class MemberLog:
    """The log of one member: a record per member event, with the event's name and fields.

    Args:
        of_each: Attributes of every record: `group_id` and `member`, and `member_run_id` of a
            streaming run.
    """

    def __init__(self, of_each: Mapping[str, str] | None = None) -> None:
        self._of_each = dict(of_each or {})

    def write(self, member_event: MemberEvent) -> None:
        """Write one record, if its level is enabled."""
        level = member_event.level
        if _logger.isEnabledFor(level):
            fields = {name: json_value(value) for name, value in member_event.fields.items()}
            extra = {"event_name": member_event.kind.value, **self._of_each, **fields}
            _logger.log(level, "%s", member_event.text, extra=extra)


@dataclass(frozen=True)
class MemberDependencies:
    """The dependencies of a member loop, made and owned by its thread.

    Attributes:
        clock_with_suspension: A clock that also counts while the machine is suspended; None if
            `clock` does so itself.
        work: The worker of a streaming run; None for a member that requests runs.
        new_letters: Reads the dead-letter topic; None without one.
        lag_limit: The limit of the check `lag_within`.
        wall_clock: Seconds since 1970, comparable with the timestamps of records.
        scanner: Applies the filter of the group before ranges are claimed; None without a filter,
            and in streaming runs.
        meter: Measures member events; None without OpenTelemetry.
        dead_letter_topic: The topic for set-aside records, which must exist.
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
    new_letters: NewLettersPort | None = None
    lag_limit: LagLimit = NO_LIMIT
    wall_clock: Callable[[], float] = time.time
    log: MemberLog = field(default_factory=MemberLog)
    meter: MeterPort | None = None
    dead_letter_topic: str | None = None
    scanner: FilterScanner | None = None

"""The weather: how rough a schedule is, drawn from its seed.

It has the protocol, the settings, and the rates and durations of failures. `calm` ends all
failures; the backlog must then be processed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import (
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.orchestration.runs.canceller import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from proofs.simulation.clockwork import Clockwork

PROTOCOLS = ("consumer", "cooperative", "eager")
SESSION_S = 8.0
HOLD_LIMIT_S = 12.0
MAX_POLL_S = 18.0
LAUNCHERS_HANG_S = (2.0, 20.0, 60.0, 1_500.0)
_CALM_SHARE = 0.2
STUCK_S, _STUCK = 40.0, 0.05
"""A request to a slow storage may take this long, and how often."""
_CROWDS = (200, 250, 400)
"""Numbers of partitions in crowded schedules."""
_SPOILED_IN_CROWD = 20
_CROWD_STORAGE_S = 0.05


@dataclass(slots=True)
class Weather:
    """The parameters of one schedule."""

    clockwork: Clockwork
    protocol: str
    partitions: int
    settings: EngineSettings
    roughness: float
    lost_requests: float
    lost_answers: float
    stalls: float
    storage_hangs: float
    overtaken: float
    runs_fail: float
    runs_die: float
    runs_hang: float
    runs_retry: float
    retries_lost: float
    late_requests: float
    requests_break: float
    launches_fail: float
    checks_fail: float
    deaths_noticed: float
    spark_outlives: bool
    same_machine: bool
    assets: tuple[str, ...]
    slow_runs: bool
    slow_storage_s: float = 0.0
    has_slow_storage: bool = False
    is_crowded: bool = False
    torn: float = 0.0
    bad_every: int = 0
    launchers_hang: float = 0.0
    launchers_last_s: float = 0.0
    is_calm: bool = False

    @classmethod
    def drawn(cls, clockwork: Clockwork) -> Weather:
        """Draw the weather of a seed; some schedules are quiet, so faults hide nothing."""
        chance = clockwork.chance
        roughness = chance.choice((0.0, 0.3, 1.0, 1.0, 2.0))

        def often(most: float) -> float:
            return chance.choice((0.0, most / 3, most)) * min(1.0, roughness)

        return cls(
            clockwork=clockwork,
            protocol=chance.choice(PROTOCOLS),
            partitions=chance.randint(1, 4),
            settings=_settings(clockwork),
            roughness=roughness,
            lost_requests=often(0.08),
            lost_answers=often(0.3),
            stalls=often(0.06),
            storage_hangs=often(0.01),
            overtaken=often(0.4),
            runs_fail=often(0.4),
            runs_die=often(0.12),
            runs_hang=often(0.1),
            runs_retry=chance.choice((0.0, 0.5, 1.0)),
            retries_lost=often(0.3),
            late_requests=often(0.4),
            requests_break=often(0.2),
            launches_fail=often(0.2),
            checks_fail=often(0.1),
            deaths_noticed=chance.choice((0.0, 0.7, 1.0)),
            spark_outlives=clockwork.happens(0.5),
            same_machine=clockwork.happens(0.5),
            assets=("orders", "totals")[: chance.randint(1, 2)],
            slow_runs=clockwork.happens(0.4),
        )

    def slow_down(self) -> None:
        """Let Dagster's storage take up to seconds for a request, while the members go on."""
        self.slow_storage_s, self.has_slow_storage = self.clockwork.chance.choice((1.0, 5.0)), True
        self.settings = replace(
            self.settings, record_every_s=self.clockwork.chance.choice((0.0, 2.0, 15.0))
        )

    def crowd(self) -> None:
        """Draw hundreds of partitions, batches with many of them, and records that wait."""
        chance = self.clockwork.chance
        self.is_crowded, self.partitions = True, chance.choice(_CROWDS)
        limits = replace(
            self.settings.limits,
            max_ranges_per_run=chance.choice((50, 200, 1_000)),
            max_runs_in_flight=4,
        )
        record_every_s = chance.choice((0.0, 4.0, 30.0))
        self.settings = replace(
            self.settings,
            limits=limits,
            record_every_s=record_every_s,
            records_per_minute=chance.choice((120.0, 6_000.0)),
        )
        # A member that waits for each of hundreds of records would make no further turn.
        self.slow_storage_s = max(self.slow_storage_s, _CROWD_STORAGE_S)

    def fail_in_parts(self) -> None:
        """Let runs of two assets fail often and stop their partition, for people to re-execute."""
        self.assets, self.roughness, self.runs_fail = ("orders", "totals"), 2.0, 0.5
        self.settings = replace(self.settings, max_attempts=1, dead_letter_topic=None)

    def spoil(self) -> None:
        """Let some records always raise, and bisect their ranges."""
        chance = self.clockwork.chance
        self.bad_every, self.assets = chance.choice((23, 60, 150)), ("orders",)
        self.runs_retry = min(self.runs_retry, 0.5)  # a run that always fails is retried forever
        limits = replace(self.settings.limits, max_records_per_range=chance.choice((10, 40, 120)))
        self.settings = replace(
            self.settings,
            limits=limits,
            max_attempts=max(2, self.settings.max_attempts),
            dead_letter_topic="dead",
            bisects=True,
        )

    def is_bad(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether a record always raises; among hundreds of partitions, in a few of them."""
        number = partition.partition
        if not self.bad_every or (self.is_crowded and number % _SPOILED_IN_CROWD):
            return False
        return (offset + 3 * number) % self.bad_every == 0

    def bad_in(self, range_: OffsetRange) -> int:
        """Return the number of bad records in a range."""
        if not self.bad_every:
            return 0
        offsets = range(range_.start, range_.until)
        return sum(self.is_bad(range_.topic_partition, offset) for offset in offsets)

    def cause_of_failure(self, ranges: Iterable[OffsetRange]) -> FailureCause:
        """Return why a run on ranges fails: by a bad record, or by chance."""
        is_bad = any(map(self.bad_in, ranges))
        return FailureCause.RECORDS if is_bad else FailureCause.ENVIRONMENT

    def storage_takes(self) -> float:
        """Draw the time of a request to a slow storage."""
        if self.has_slow_storage and self.clockwork.happens(_STUCK):
            return STUCK_S
        return self.clockwork.within(0.0, self.slow_storage_s)

    def tear(self) -> None:
        """Enable torn writes, and launchers that answer late or never."""
        chance = self.clockwork.chance
        self.torn, self.launchers_hang = chance.choice((0.05, 0.2)), chance.choice((0.0, 0.1, 0.5))
        self.launchers_last_s = 2 * PATIENCE_S if self.launchers_hang else 0.0

    def calm(self) -> None:
        """End all failures."""
        self.roughness = self.lost_requests = self.lost_answers = self.stalls = (
            self.storage_hangs
        ) = self.overtaken = self.late_requests = self.torn = self.launchers_hang = 0.0
        self.requests_break = self.launches_fail = self.checks_fail = self.runs_fail = (
            self.runs_die
        ) = self.runs_hang = self.retries_lost = 0.0
        self.slow_runs, self.is_calm, self.has_slow_storage = False, True, False
        self.slow_storage_s = _CROWD_STORAGE_S if self.is_crowded else 0.0

    def latency(self) -> float:
        """Draw the latency of an answer."""
        return self.clockwork.chance.choice((0.0, 0.01, 0.1, 0.1 + self.stalls * 20))

    def queueing(self) -> float:
        """Draw the time of a run in the queue."""
        return self._run_takes(0.1, 8.0 if self.slow_runs else 2.0)

    def launching(self) -> float:
        """Draw the launch time of a run."""
        return self._run_takes(0.1, 3.0 if self.slow_runs else 1.0)

    def reaching_its_check(self) -> float:
        """Draw the time until a started run's first heartbeat, sometimes too long for a member."""
        return self.clockwork.within(0.0, 20.0 if self.clockwork.happens(self.stalls * 3) else 0.8)

    def working(self) -> float:
        """Draw the working time of a run."""
        return self._run_takes(0.3, 25.0 if self.slow_runs else 5.0)

    def answering(self) -> float:
        """Draw how long a launcher takes to end a run."""
        if not self.launchers_hang or not self.clockwork.happens(self.launchers_hang):
            return 0.0
        return self.clockwork.chance.choice(LAUNCHERS_HANG_S)

    @property
    def has_launchers(self) -> bool:
        """Whether runs are ended in threads, because a launcher may hang."""
        return self.launchers_last_s > 0

    def stopping(self) -> float:
        """Draw how long a cancelled run continues."""
        return self.clockwork.within(0.1, 5.0)

    def reporting(self) -> float:
        """Draw the delay of Dagster's record of a success."""
        return self.clockwork.within(0.0, 6.0 if self.clockwork.happens(0.2) else 0.3)

    def _run_takes(self, low: float, high: float) -> float:
        """Draw the time of a step; shorter in calm weather, to spend less on the backlog."""
        return self.clockwork.within(low, high) * (_CALM_SHARE if self.is_calm else 1.0)


def _settings(clockwork: Clockwork) -> EngineSettings:
    chance = clockwork.chance
    return EngineSettings(
        limits=BatchLimits(
            max_records_per_range=10,
            max_ranges_per_run=chance.randint(1, 3),
            max_runs_in_flight=chance.randint(1, 4),
            max_claims_per_partition=chance.randint(1, 3),
        ),
        budget=HoldBudget(HOLD_LIMIT_S, 3.0),
        on_deadline=chance.choice(tuple(DeadlinePolicy)),
        on_leave=chance.choice(tuple(LeavePolicy)),
        on_lost=chance.choice(tuple(LossPolicy)),
        max_attempts=chance.randint(1, 4),
        dead_letter_topic=chance.choice((None, None, "dead")),
        lease_s=20.0,
        plan_patience_s=8.0,
        recheck_s=5.0,
        liveness=Liveness(heartbeat_timeout_s=12.0, start_timeout_s=15.0),
        record_every_s=chance.choice((0.0, 0.0, 4.0)),
        records_per_minute=60.0,
        backoff=RetryBackoff(first_s=0.5, limit_s=10.0),
    )

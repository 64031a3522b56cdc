"""One member loop with all that it works with, turn by turn.

The engine, the consumer and the instance are real; the group is in memory.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypeVar

import dagster as dg
import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.reporting.lag import NO_LIMIT
from dagster_rebalance.kafka.consumer.consumer import PollResult, RebalanceAwareConsumer
from dagster_rebalance.kafka.group_ports import CommitResult
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mailbox
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from dagster_rebalance.orchestration.runs.canceller import at_once
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import RunEvent, record_run_event
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.fake_producer import FakeProducer
from tests.orchestration.parts import give_sign, make_run, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dagster_rebalance.core.model import commands
    from dagster_rebalance.core.model.events import LastRecorded
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.reporting.lag import GroupState, LagLimit
    from dagster_rebalance.orchestration.ports import NewLettersPort, RunError

E = TypeVar("E")
Status = dg.DagsterRunStatus
CONFIG = {"bootstrap.servers": "memory:1", "group.id": "etl"}
SETTINGS = EngineSettings(
    limits=BatchLimits(max_ranges_per_run=1), budget=HoldBudget(50.0, 10.0), lease_s=40.0
)


class FaultyConsumer(RebalanceAwareConsumer):
    commits_fail: list[frozenset[TopicPartition]]
    refuses: dict[TopicPartition, str]
    polls_fail: list[BrokerError]
    writes: list[dict[TopicPartition, OffsetAndMetadata]]
    committed_fails: list[BrokerError]
    advance: Callable[[float], None]
    loses_answers = 0
    commit_s = 0.0
    ignores_delays = False

    def delay_revoke(self, partitions: Collection[TopicPartition]) -> bool:  # type: ignore[override]
        return self.ignores_delays or super().delay_revoke(partitions)

    def poll_with_rebalance(self, timeout_s: float) -> PollResult:  # type: ignore[override]
        if self.polls_fail:
            raise self.polls_fail.pop(0)
        return super().poll_with_rebalance(timeout_s)

    def committed(  # type: ignore[override]
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        if self.committed_fails:
            raise self.committed_fails.pop(0)
        return super().committed(partitions, timeout_s)

    def commit_offsets(  # type: ignore[override]
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_s: float | None = None
    ) -> CommitResult:
        self.writes.append(dict(offsets))
        self.advance(self.commit_s)
        failing = self.commits_fail.pop(0) & offsets.keys() if self.commits_fail else frozenset()
        failing |= self.refuses.keys() & offsets.keys()
        result = super().commit_offsets(
            {tp: offset for tp, offset in offsets.items() if tp not in failing}, timeout_s
        )
        if self.loses_answers:
            self.loses_answers -= 1
            message = "timed out"
            raise BrokerError(message, retriable=True)
        failed = {tp: BrokerError(f"{tp} failed", retriable=True) for tp in failing}
        failed |= {tp: BrokerError(self.refuses[tp]) for tp in failing & self.refuses.keys()}
        return CommitResult(result.committed, {**result.failed, **failed})


class WatchedEngine(Engine):
    told: list[events.Event]
    owed: list[int]

    def owe_records(self, records: int, now: float) -> None:
        self.owed += [records] if records else []
        super().owe_records(records, now)

    def apply(self, event: events.Event, now: float) -> tuple[commands.Command, ...]:
        self.told.append(event)
        return super().apply(event, now)

    def heard(self, *kinds: type[E]) -> list[E]:
        return [event for event in self.told if isinstance(event, kinds)]


def _locked() -> OSError:
    return OSError("database is locked")


class FaultyCatalogue(Catalogue):
    failures = 0
    stops_fail = 0
    reads_fail = False
    shows_fail = False

    def last_recorded(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LastRecorded]:
        if self.reads_fail:
            raise _locked()
        return super().last_recorded(partitions)

    def record_commits(
        self,
        commits: Sequence[commands.RecordCommit],
        is_wanted: Callable[[commands.RecordCommit], bool] = lambda _: True,
    ) -> tuple[commands.RecordCommit, ...]:
        if self.failures:
            self.failures -= 1
            raise _locked()
        return super().record_commits(commits, is_wanted)

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        if self.shows_fail:
            raise _locked()
        super().record_assigned(partitions, member_id)

    def leave_request(self) -> events.LeaveRequested | None:
        if self.shows_fail:
            raise _locked()
        return super().leave_request()

    def show_stopped(self, standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        if standing.stopped and self.stops_fail:
            self.stops_fail -= 1
            raise _locked()
        super().show_stopped(standing, errors)


class FaultyLedger(RunLedger):
    why_fails = False
    why: str | None = None
    whys = 0

    def why_failed(self, run_id: str, batch_id: str) -> str:
        self.whys += 1
        if self.why_fails:
            raise _locked()
        return super().why_failed(run_id, batch_id) if self.why is None else self.why


class Bench:
    def __init__(
        self,
        instance: dg.DagsterInstance,
        *,
        partitions: int = 1,
        records: int = 10,
        settings: EngineSettings = SETTINGS,
        topic: str = "orders",
        others: Sequence[str] = (),
        start: Callable[[str, Callable[[], None]], None] = at_once,
        group: FakeGroup | None = None,
        lag_limit: LagLimit = NO_LIMIT,
        new_letters: NewLettersPort | None = None,
    ) -> None:
        self.instance = instance
        self.group = group or FakeGroup({"orders": partitions, "dead": 1})
        for number in range(0 if group else partitions):
            self.group.produce(tp(number), records)
        self.member = self.group.member()
        self.consumer = FaultyConsumer(
            CONFIG, fetch=False, member=self.member, cluster=self.group, clock=self.group.clock
        )
        (
            self.consumer.commits_fail,
            self.consumer.polls_fail,
            self.consumer.committed_fails,
            self.consumer.writes,
        ) = [], [], [], []
        self.consumer.refuses, self.consumer.advance = {}, self.group.clock.advance
        ids = count(1)
        self.engine = WatchedEngine(
            settings, new_batch_id=lambda _: f"b-{next(ids)}", now=self.group.clock()
        )
        self.engine.told, self.engine.owed = [], []
        self.assets = GroupAssets.of("etl")
        self.catalogue = FaultyCatalogue(
            instance, self.assets, MemberIdentity("blue", "sensor", "process-1")
        )
        self.mailbox = Mailbox()
        self.producer = FakeProducer({})
        self.ledger = FaultyLedger(instance, "etl")
        sender = DeadLetterProducer(CONFIG, "dead", make_producer=lambda _config: self.producer)
        letters = DeadLetters(sender, "etl") if settings.dead_letter_topic else None
        parts = MemberDependencies(
            self.consumer,
            self.engine,
            self.ledger,
            self.catalogue,
            [*others, topic],
            self.group.clock,
            letters,
            start,
            lag_limit=lag_limit,
            new_letters=new_letters,
            wall_clock=self.group.clock,
        )
        self.member_loop = MemberLoop(parts, self.mailbox)
        self.ticks = True

    def turn(self, times: int = 1) -> None:
        if not self.member.is_subscribed_to("orders"):
            self.consumer.subscribe(["orders"])
        for _ in range(times):
            if self.ticks:
                self.mailbox.send(events.TickArrived())
            self.member_loop._turn()

    def until(self, condition: Callable[[], object], turns: int = 600) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        pytest.fail(
            f"not within {turns} turns; notes: {self.mailbox.take_notes()}; told: "
            f"{self.engine.told[-5:]}"
        )

    def batch_requests(self, at_least: int = 1) -> None:
        self.until(lambda: len(self.mailbox.mail.batch_requests) >= at_least)

    def run(self, status: dg.DagsterRunStatus, number: int = 0) -> dg.DagsterRun:
        run = make_run(self.instance, self.mailbox.mail.batch_requests[number], status)
        if status is dg.DagsterRunStatus.STARTED:
            give_sign(self.instance, run, "0 ?another machine")
        return run

    def succeed(self, run: dg.DagsterRun) -> None:
        event = dg.DagsterEvent(
            event_type_value=dg.DagsterEventType.RUN_SUCCESS.value, job_name=run.job_name
        )
        self.instance.report_dagster_event(event, run.run_id)

    def fail(self, run: dg.DagsterRun, message: str = "the test wants this run to fail") -> None:
        for mark in (RunEvent.BEGAN, RunEvent.FINISHED):
            record_run_event(self.instance, run, mark)
        self.instance.report_run_failed(run, message)

    def only_note_cancels(self) -> list[tuple[str, bool]]:
        """Let no run be cancelled from now on.

        Returns the list of the requested run ids, each with its `only_unstarted`.
        """
        asked: list[tuple[str, bool]] = []

        def cancel(run_id: str, *, only_unstarted: bool = False) -> None:
            asked.append((run_id, only_unstarted))

        vars(self.ledger)["cancel"] = cancel
        return asked

    def offset(self, number: int = 0) -> int:
        return self.group.committed[tp(number)].offset

    def materialised(self) -> list[tuple[str | None, object, object]]:
        records = self.instance.fetch_materializations(
            self.assets.offsets, limit=100, ascending=True
        ).records
        logged = [
            record.asset_materialization for record in records if record.asset_materialization
        ]
        return [
            (event.partition, event.metadata["start"].value, event.metadata["until"].value)
            for event in logged
        ]

    def observed(self) -> list[dict[str, object]]:
        records = self.instance.fetch_observations(
            self.assets.group, limit=100, ascending=True
        ).records
        return [
            {k: v.value for k, v in r.asset_observation.metadata.items()}
            for r in records
            if r.asset_observation
        ]

    def joined_by_another(self) -> RebalanceAwareConsumer:
        other = RebalanceAwareConsumer(
            CONFIG,
            fetch=False,
            member=self.group.member(),
            cluster=self.group,
            clock=self.group.clock,
        )
        other.subscribe(["orders"])
        other.poll(0)
        return other

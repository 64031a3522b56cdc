"""An in-memory world for the engine: Kafka, Dagster, and members with an engine each.

Commands can fail, or be carried out without an answer. The world asserts in every test: no write
for an ended epoch, no commit that goes back, no commit without a successful run or dead letter, and
member events with exactly the documented fields, which fit into JSON.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.events import LastRecorded, PartitionLookup
from dagster_rebalance.core.model.member_events import EVENT_SPECS, json_value
from dagster_rebalance.core.model.offsets import (
    ANY_BOUNDS,
    Bounds,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
)
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.partitions.recovery import position_to_verify
from dagster_rebalance.core.reporting.event_recorder import record_events
from dagster_rebalance.core.runs.bisection import Part, whole_batch
from dagster_rebalance.core.runs.retry import FailedAttempt, RetryBackoff, with_error
from dagster_rebalance.core.runs.start_check import refusal
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.commands import Receipt
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.member_events import EventKind, MemberEvent
    from dagster_rebalance.core.model.run_snapshot import BatchRequest

ENDED = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELED})


AT_ONCE = RetryBackoff(0.0, 0.0, retry_stopped=False)
"""For tests without delays."""


def tp(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def span(number: int, start: int, until: int) -> OffsetRange:
    return OffsetRange("orders", number, start, until)


@dataclass
class FakeKafka:
    """What one group has committed, and how far the topics reach."""

    stored: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)
    bounds: dict[TopicPartition, Bounds] = field(default_factory=dict)
    commits: list[tuple[TopicPartition, int]] = field(default_factory=list)
    letters: list[commands.StoreDeadLetter] = field(default_factory=list)
    writes: int = 0
    topic_id: str = ""
    elections: dict[TopicPartition, dict[int, int]] = field(default_factory=dict)
    forbidden: dict[TopicPartition, str] = field(default_factory=dict)

    def produce(self, partition: TopicPartition, records: int) -> None:
        bounds = self.bounds.get(partition, Bounds(0, 0))
        self.bounds[partition] = replace(bounds, until=bounds.until + records)

    def elect(self, number: int, *, cut_at: int | None = None) -> None:
        """`orders-<number>` gets a new leader; in an unclean election one whose log is shorter."""
        bounds = self.bounds[tp(number)]
        epoch = 1 if bounds.leader_epoch is None else bounds.leader_epoch + 1
        until = bounds.until if cut_at is None else cut_at
        self.elections.setdefault(tp(number), {})[epoch] = until
        self.bounds[tp(number)] = Bounds(bounds.start, until, epoch)

    def truncated(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """The partitions whose log ends before the position to verify."""
        found = set()
        for partition in partitions:
            position = position_to_verify(self.stored.get(partition), self.bounds[partition])
            later = self.elections.get(partition, {}).items()
            if position and any(
                epoch > (position.leader_epoch or 0) and until < position.offset
                for epoch, until in later
            ):
                found.add(partition)
        return frozenset(found)

    def offset(self, number: int) -> int | None:
        stored = self.stored.get(tp(number))
        return None if stored is None else stored.offset

    def claims(self, number: int) -> list[tuple[int, str]]:
        return [(claim.until, claim.batch_id) for claim in decode(self.stored[tp(number)]).claims]


@dataclass
class FakeDagster:
    """Runs and materializations."""

    runs: dict[str, RunSnapshot] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    recorded: list[commands.RecordCommit] = field(default_factory=list)
    ids: count[int] = field(default_factory=lambda: count(1))

    def request(
        self, batch_request: BatchRequest, state: RunState = RunState.WAITING
    ) -> str | None:
        """Start a run unless its key is known."""
        if batch_request.run_key in self.keys:
            return None
        self.keys.add(batch_request.run_key)
        return self.add(batch_request.batch_id, batch_request.ranges, state)

    def add(
        self, batch_id: str, ranges: tuple[OffsetRange, ...], state: RunState = RunState.STARTED
    ) -> str:
        """Add a run."""
        run_id = f"run{next(self.ids)}"
        self.runs[run_id] = RunSnapshot(run_id, batch_id, ranges, state)
        return run_id

    def end_dead(self, run_ids: Iterable[str]) -> None:
        """Nothing of some runs works any more."""
        for run_id in [run_id for run_id in run_ids if run_id in self.runs]:
            state = self.runs[run_id].state
            if state is RunState.DELETED:
                del self.runs[run_id]
            else:
                self.move(run_id, state if state in ENDED else RunState.FAILED, is_over=True)

    def move(self, run_id: str, state: RunState, **marks: object) -> None:
        """Change a run: its state, and any other attribute of it."""
        self.runs[run_id] = replace(self.runs[run_id], state=state, **marks)  # type: ignore[arg-type]

    def record(self, commit: commands.RecordCommit) -> None:
        known = {
            said
            for one in self.recorded
            if one.range.topic_partition == commit.range.topic_partition
            for said in commands.recorded_commits(one.range.start, one.ends)
        }
        rest = commit.without(known)
        if rest is not None:
            self.recorded.append(rest)

    def last_recorded(self) -> dict[TopicPartition, LastRecorded]:
        return {
            record.range.topic_partition: LastRecorded(record.range.until, record.run_id)
            for record in self.recorded
        }

    def cancel(self, run_ids: Iterable[str], *, only_unstarted: bool = False) -> None:
        for run_id in run_ids:
            state = self.runs[run_id].state
            if state not in ENDED and not (only_unstarted and state is RunState.STARTED):
                self.move(
                    run_id,
                    RunState.CANCELED if state is RunState.WAITING else RunState.CANCELING,
                    is_cancelled_by_member=True,
                )


class Member:
    """An engine with a member loop."""

    def __init__(self, world: World, settings: EngineSettings) -> None:
        self.world = world
        self.engine = Engine(
            settings, new_batch_id=lambda _: f"b{next(world.batch_ids)}", now=world.now
        )
        self.fails: set[type[commands.Command]] = set()
        self.unanswered: set[type[commands.Command]] = set()
        self.done: list[commands.Command] = []
        self.member_events: list[MemberEvent] = []
        self.over: set[tuple[TopicPartition, int]] = set()
        self.to_be_revoked: set[TopicPartition] = set()
        self.is_fenced = False
        self.left: str | None = None

    def feed(
        self, event: events.Event, begin: Callable[[], events.Event | None] = lambda: None
    ) -> list[commands.Command]:
        """Feed an event to the engine, and carry out and return the commands that follow."""
        if isinstance(event, events.PartitionsLost):
            self._end(event.partitions)
            self.to_be_revoked.difference_update(event.partitions)
        if isinstance(event, events.RevokeRequested):
            self.to_be_revoked.update(event.partitions)
        todo = deque([event])
        first = len(self.done)
        while todo:
            epochs = {partition: owned.epoch for partition, owned in self.engine.partitions.items()}
            decided, recorded = record_events(self.engine, [todo.popleft()], self.world.now, begin)
            self.engine.partitions.take_dropped_records()  # a member cancels them
            for member_event in recorded:
                assert tuple(member_event.fields) == EVENT_SPECS[member_event.kind].fields, (
                    member_event
                )
                json.dumps({name: json_value(value) for name, value in member_event.fields.items()})
            self.member_events += recorded
            for command in decided:
                self.done.append(command)
                if type(command) in self.fails:
                    continue
                answer = self._carry_out(command)
                if answer is not None and type(command) not in self.unanswered:
                    todo.append(answer)
                if isinstance(command, commands.EndDeadRuns):
                    todo.extend(events.DeadRunEnded(run_id) for run_id in command.heartbeats)
            todo.extend(self._polled(epochs))
        return self.done[first:]

    def pass_time(self) -> list[commands.Command]:
        return self.feed(events.TimePassed())

    def tick(self, *, state: RunState = RunState.WAITING) -> list[str]:
        """A tick of the sensor whose requests all arrive; returns the runs that were made."""
        self.feed(events.TickArrived())
        made = [
            self.world.dagster.request(batch_request, state)
            for batch_request in self.engine.batch_requests
        ]
        return [run_id for run_id in made if run_id is not None]

    def given(self, kind: type[commands.Command]) -> list[commands.Command]:
        """All commands of a kind so far."""
        return [command for command in self.done if isinstance(command, kind)]

    def event_fields(self, what: EventKind) -> list[dict[str, Any]]:
        """The fields of all occurrences of a name so far."""
        return [dict(one.fields) for one in self.member_events if one.kind is what]

    @property
    def receipts(self) -> list[Receipt]:
        return [
            command.receipt for command in self.done if isinstance(command, commands.RecordReceipt)
        ]

    @property
    def shown(self) -> list[tuple[TopicPartition, str]]:
        return [
            (command.partition, command.reason)
            for command in self.done
            if isinstance(command, commands.ShowStop)
        ]

    def _end(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            owned = self.engine.partitions.get(partition)
            if owned is not None:
                self.over.add((partition, owned.epoch))

    def _polled(self, epochs: Mapping[TopicPartition, int]) -> Iterator[events.Event]:
        """The next poll of the consumer completes the revokes that the engine does not hold."""
        released = tuple(sorted(self.to_be_revoked - self.engine.held))
        if released:
            self.to_be_revoked.difference_update(released)
            self.over |= {(partition, epochs[partition]) for partition in released}
            self.world.released(self, released)
            yield events.PartitionsRevoked(released)

    def _carry_out(  # noqa: C901, PLR0911, PLR0912 - one case for each
        self, command: commands.Command
    ) -> events.Event | None:
        kafka, dagster = self.world.kafka, self.world.dagster
        match command:
            case commands.ReadStoredOffsets(wanted):
                truncated, recorded = kafka.truncated(wanted), dagster.last_recorded()
                return events.StoredOffsetsRead(
                    dict(wanted),
                    {
                        p: PartitionLookup(
                            kafka.stored.get(p),
                            kafka.bounds[p],
                            recorded.get(p),
                            kafka.topic_id,
                            p in truncated,
                        )
                        if p not in kafka.forbidden
                        else PartitionLookup(None, ANY_BOUNDS, refused=kafka.forbidden[p])
                        for p in wanted
                    },
                )
            case commands.ReadDirectives(epoch):
                return events.DirectivesRead(tuple(self.world.orders), epoch)
            case commands.ReadRuns(batch_ids, with_live, look, claims):
                runs = tuple(
                    run
                    for run in dagster.runs.values()
                    if run.batch_id in batch_ids or (with_live and run.is_live)
                )
                runs += self.stream_runs(batch_ids, claims)
                return events.RunsRead(batch_ids, runs, with_live, look)
            case commands.ReadBounds(partitions):
                refused = kafka.forbidden.keys() & set(partitions)
                allowed = [p for p in partitions if p not in refused]
                return events.BoundsRead({p: kafka.bounds[p] for p in allowed}, frozenset(refused))
            case commands.ScanRanges(number, ranges):
                hits = self.world.hits
                found = [
                    (
                        one,
                        any(
                            (one.topic_partition, at) in hits for at in range(one.start, one.until)
                        ),
                    )
                    for one in ranges
                ]
                return events.RangesScanned(number, tuple(found))
            case commands.WriteOffsets(writes):
                return self._written(writes)
            case commands.RecordCommits(commits):
                for commit in commits:
                    dagster.record(commit)
                return events.CommitsRecorded(commits)
            case commands.StoreDeadLetter():
                kafka.letters.append(command)
                return events.DeadLetterStored(command)
            case commands.CancelRuns(run_ids, only_unstarted=only_unstarted):
                dagster.cancel(run_ids, only_unstarted=only_unstarted)
            case commands.EndDeadRuns(signs):
                dagster.end_dead(signs)
            case commands.LeaveGroup(reason):
                self.left = reason
            case _:
                pass
        return None

    def stream_runs(
        self, batch_ids: Iterable[str], claims: Iterable[commands.Claimed]
    ) -> tuple[RunSnapshot, ...]:
        found: list[RunSnapshot] = []
        for batch_id in batch_ids:
            batch = StreamBatch.parse(batch_id)
            for claim in claims:
                if batch is not None and claim[0] == batch_id:
                    run, outcome = self.world.streams[batch.run_id], self.world.notes.get(claim)
                    seen = batch.as_runs((claim[1],), run, outcome)
                    found += with_error(seen, self.world.failed.get(claim[1]))
        return tuple(found)

    def _written(self, writes: tuple[commands.OffsetWrite, ...]) -> events.Event | None:
        if self.is_fenced:
            return None
        kafka = self.world.kafka
        for write in writes:
            assert (write.partition, write.epoch) not in self.over, (
                f"{write} belongs to an epoch that is over"
            )
        stored = {write.partition: kafka.stored.get(write.partition) for write in writes}
        refused = [w for w in writes if w.partition in kafka.forbidden]
        writes = tuple(w for w in writes if w.partition not in kafka.forbidden)
        ids = dict.fromkeys(commands.topics_to_verify(writes), kafka.topic_id)
        done, due, changed = commands.sort_writes(writes, stored, ids)
        for write in due:
            self.world.check_write(write)
            kafka.stored[write.partition] = write.new
            kafka.writes += 1
        return events.OffsetsWritten(
            (*done, *due),
            tuple((write, events.WriteFailure.CHANGED) for write in changed),
            tuple((write, kafka.forbidden[write.partition]) for write in refused),
        )


class World:
    """One group, its members, and the clock."""

    def __init__(self, *, records: int = 0, partitions: int = 1) -> None:
        self.now = 1000.0
        self.kafka = FakeKafka()
        self.dagster = FakeDagster()
        self.batch_ids = count(1)
        self.output: Counter[OffsetRange] = Counter()
        self.streams: dict[str, RunSnapshot] = {}
        self.notes: dict[commands.Claimed, BatchOutcome] = {}
        self.failed: dict[OffsetRange, FailedAttempt] = {}
        self.done_by_streams: set[commands.Claimed] = set()
        self.orders: list[Directive] = []
        self.hits: set[tuple[TopicPartition, int]] = set()
        self.released_by: list[tuple[Member, tuple[TopicPartition, ...]]] = []
        for number in range(partitions):
            self.kafka.produce(tp(number), records)

    def member(
        self,
        *,
        owns: int = 0,
        settings: EngineSettings | None = None,
        backoff: RetryBackoff = AT_ONCE,
    ) -> Member:
        """A new member that is assigned the first `owns` partitions and has been ticked once."""
        member = Member(self, replace(settings or EngineSettings(), backoff=backoff))
        member.feed(events.TickArrived())
        if owns:
            member.feed(events.PartitionsAssigned(tuple(tp(number) for number in range(owns))))
        return member

    def wait(self, seconds: float, *members: Member, step: float = 0.25) -> None:
        """Let time pass, with the pumps turning."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for member in members:
                member.pass_time()

    def start(self, run_id: str) -> str | None:
        """A run starts, visible first, and then makes its check.

        Returns why it refused itself, or None when it works.
        """
        self.dagster.move(run_id, RunState.STARTED, heartbeat="begun")
        return self.check(run_id)

    def check(self, run_id: str) -> str | None:
        me = self.dagster.runs[run_id]
        reason = refusal(me, self.dagster.runs.values(), self.kafka.stored)
        if reason is not None:
            self.dagster.move(run_id, RunState.FAILED, is_refused=True)
        return reason

    def succeed(self, run_id: str) -> None:
        """A run ends well."""
        self.output.update(self.dagster.runs[run_id].ranges)
        self.dagster.move(run_id, RunState.SUCCEEDED)

    def released(self, member: Member, partitions: tuple[TopicPartition, ...]) -> None:
        self.released_by.append((member, partitions))

    def check_write(self, write: commands.OffsetWrite) -> None:
        """Assert the rules for every write."""
        before = self.kafka.stored.get(write.partition)
        if before is None or write.new.offset == before.offset:
            return
        assert write.new.offset > before.offset, f"{write} goes back"
        last = decode(write.new).last_commit
        if last is not None and last.is_left_out:
            assert not decode(before).claims
            passed = range(before.offset, write.new.offset)
            assert not self.hits & {(write.partition, offset) for offset in passed}
            self.kafka.commits.append((write.partition, write.new.offset))
            return
        claim = next((claim for claim in decode(before).ranges(write.partition)), None)
        assert claim is not None, f"{write} commits an unclaimed range"
        range_, batch_id = claim
        assert range_.until == write.new.offset, f"{write} skips or splits {range_}"
        runs = self.dagster.runs.values()
        part = Part.parse(batch_id)
        whole = (whole_batch(batch_id), part.bisected(range_)) if part is not None else None
        done = {
            (run.batch_id, own)
            for run in runs
            if run.state is RunState.SUCCEEDED
            for own in run.ranges
        }
        covered = (batch_id, range_) in done or whole in done
        exhausted = any(
            (letter.range, letter.batch_id) == (range_, batch_id) for letter in self.kafka.letters
        )
        covered = covered or (batch_id, range_) in self.done_by_streams
        assert covered or exhausted, f"{write} commits {range_}, on which no run succeeded"
        self.kafka.commits.append((write.partition, write.new.offset))

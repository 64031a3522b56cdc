"""Stories of members in the in-memory world; `tests/story.py` describes their form.

Partitions are numbers, ranges look like `0[5,9)`, and runs are named `run1`, `run2` and so on.

    ## run_in_queue_is_cancelled_at_once
    join m 1 | tick | wait 1 | revoke 0
    state run1 = CANCELED | outcomes = drained | handed over = 0
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import Claim, StoredPartition, decode, encode
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.member_events import EventKind, json_value
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.reporting.explain import explain_partition, summary
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from tests.core.streams import Stream
from tests.core.world import AT_ONCE, Member, World, tp
from tests.story import ScriptBase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dagster_rebalance.core.model.commands import Receipt
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.owned import OwnedPartition

DEFAULT = "DEFAULT"


def play(story: str, settings: Mapping[str, EngineSettings] | None = None) -> Script:
    """Play a story, with settings that it may name."""
    return Script(settings or {}).play(story)


class Script(ScriptBase):
    """The world of a story and its current member."""

    def __init__(self, settings: Mapping[str, EngineSettings]) -> None:
        self.settings = {DEFAULT: EngineSettings(), **settings}
        self.world = World(records=100)
        self.members: dict[str, Member] = {}
        self.member = Member(self.world, EngineSettings())
        self.made: list[str] = []
        self.counts: dict[str, int] = {}

    # Members and the world

    def do_world(self, records: str, partitions: str = "1") -> None:
        """Begin with other records and partitions than 100 in one."""
        self.world = World(records=int(records), partitions=int(partitions))

    def do_join(self, name: str, owns: str = "0", settings: str = DEFAULT) -> None:
        """A member that owns the first partitions joins and is the current one."""
        self.member = self.members[name] = self.world.member(
            owns=int(owns), settings=self.settings[settings], backoff=self._pace(settings)
        )

    def do_stream(self, name: str, owns: str = "", settings: str = DEFAULT) -> None:
        """A streaming run that owns partitions, such as `0,1`, joins and is the current one."""
        numbers = [int(number) for number in owns.split(",") if number.isdigit()]
        self.member = self.members[name] = Stream(
            self.world,
            name,
            owns=numbers,
            settings=self.settings[settings],
            backoff=self._pace(settings),
        )

    def _pace(self, settings: str) -> Any:  # noqa: ANN401 - its own default means none
        backoff = self.settings[settings].backoff
        return AT_ONCE if backoff == EngineSettings().backoff else backoff

    def do_at_work(self, owns: str, settings: str = DEFAULT, records: str = "100") -> None:
        """A member with a started run on each of its partitions."""
        self.do_world(records, owns)
        self.do_join("m", owns, settings)
        self.do_wait("1.25")
        self.do_tick()
        for run_id in self.made:
            self.do_start(run_id)
        self.do_wait("1")

    def do_as(self, name: str) -> None:
        self.member = self.members[name]

    def do_wait(self, seconds: str, *names: str) -> None:
        members = [self.members[name] for name in names] or [self.member]
        self.world.wait(float(seconds), *members)

    def do_wait_in_steps(self, seconds: str) -> None:
        """A long time passes, in steps of 5 s."""
        self.world.wait(float(seconds), self.member, step=5)

    def do_turns(self, seconds: str) -> None:
        """Time passes, with a tick each second whose requests arrive."""
        for _ in range(int(seconds)):
            self.member.tick()
            self.world.wait(1, self.member)

    def do_tick(self, state: str = "WAITING") -> None:
        """A tick whose requests arrive."""
        self.made = self.member.tick(state=RunState[state])

    def do_ticks(self) -> None:
        """A tick whose requests are lost."""
        self.member.feed(events.TickArrived())

    def do_fails(self, *kinds: str) -> None:
        self.member.fails |= {getattr(commands, kind) for kind in kinds}

    def do_unanswered(self, *kinds: str) -> None:
        """Commands are carried out without an answer."""
        self.member.unanswered |= {getattr(commands, kind) for kind in kinds}

    def do_answers(self) -> None:
        self.member.fails.clear()
        self.member.unanswered.clear()

    def do_mark(self, kind: str) -> None:
        """Count commands of a kind from here on."""
        self.counts[kind] = len(self._given(kind))

    # Kafka

    def do_assign(self, *numbers: str) -> None:
        self.member.feed(events.PartitionsAssigned(_tps(numbers)))

    def do_revoke(self, *numbers: str) -> None:
        self.member.feed(events.RevokeRequested(_tps(numbers)))

    def do_lose(self, *numbers: str) -> None:
        self.member.feed(events.PartitionsLost(_tps(numbers)))

    def do_supersede(self, *numbers: str) -> None:
        self.member.feed(events.PartitionsLost(_tps(numbers), events.LostReason.SUPERSEDED))

    def do_move(self, source: str, target: str, *numbers: str) -> None:
        """Partitions are lost by one member and assigned to another, the current one from now."""
        self.do_as(source)
        self.do_lose(*numbers)
        self.do_as(target)
        self.do_assign(*numbers)

    def do_leave(self, reason: str, *how: str) -> None:
        """The member is to leave, within a number of seconds, or for a `successor`."""
        limit = next((float(one) for one in how if one != "successor"), None)
        self.member.feed(events.LeaveRequested(reason, limit, "successor" in how))

    def do_produce(self, number: str, records: str) -> None:
        self.world.kafka.produce(tp(int(number)), int(records))

    def do_stored(self, number: str, offset: str, metadata: str = "") -> None:
        """Another client commits an offset, or deletes it (`none`)."""
        if offset == "none":
            del self.world.kafka.stored[tp(int(number))]
        else:
            self.world.kafka.stored[tp(int(number))] = OffsetAndMetadata(int(offset), metadata)

    def do_claim(self, number: str, until: str, batch: str, noted: str = "", of: str = "") -> None:
        """Kafka stores a claim at offset 0, and a streaming run may have reported its outcome."""
        claim = Claim(int(until), batch, of)
        self.world.kafka.stored[tp(int(number))] = encode(StoredPartition(0, (claim,)))
        if noted:
            range_ = OffsetRange("orders", int(number), 0, int(until))
            self.world.notes[batch, range_] = BatchOutcome[noted]

    def do_done(self, batch: str, number: str, start: str, until: str) -> None:
        """A run has succeeded on a range that a streaming run has claimed."""
        range_ = OffsetRange("orders", int(number), int(start), int(until))
        self.world.done_by_streams.add((batch, range_))

    def do_topic_id(self, topic_id: str) -> None:
        self.world.kafka.topic_id = topic_id

    def _letter(self) -> commands.StoreDeadLetter:
        (letter,) = {*self.member.given(commands.StoreDeadLetter)}
        assert isinstance(letter, commands.StoreDeadLetter)
        return letter

    def do_stored_letter(self) -> None:
        self.member.feed(events.DeadLetterStored(self._letter()))

    def do_failed_letter(self, reason: str) -> None:
        self.member.feed(events.DeadLetterFailed(self._letter(), reason))

    def do_forbid(self, *numbers: str) -> None:
        forbidden = dict.fromkeys(_tps(numbers), "grant the ACL READ")
        self.world.kafka.forbidden.update(forbidden)

    def do_allow(self) -> None:
        self.world.kafka.forbidden.clear()

    def do_elect(self, number: str, cut_at: str | None = None) -> None:
        """A partition gets a new leader, whose log may end at `cut_at`."""
        self.world.kafka.elect(int(number), cut_at=None if cut_at is None else int(cut_at))

    def do_bounds(self, number: str, start: str, until: str) -> None:
        self.world.kafka.bounds[tp(int(number))] = Bounds(int(start), int(until))

    # Dagster

    def do_start(self, run_id: str) -> None:
        assert self.world.start(run_id) is None

    def do_batches(self, count: str) -> None:
        """Batches succeed one after the other."""
        for _ in range(int(count)):
            self.do_wait("1")
            self.do_tick()
            (run_id,) = self.made
            self.do_start(run_id)
            self.do_succeed(run_id)
            self.do_wait("1")

    def do_refuse(self, run_id: str) -> None:
        assert self.world.start(run_id) is not None

    def do_succeed(self, run_id: str) -> None:
        self.world.succeed(run_id)

    def do_run(self, run_id: str, state: str, *marks: str) -> None:
        """Dagster shows a run in another state, with marks such as `is_over=0`."""
        pairs = (mark.partition("=") for mark in marks)
        texts = {"heartbeat", "parent_id", "refusal"}
        values = {name: value if name in texts else value != "0" for name, _, value in pairs}
        self.world.dagster.move(run_id, RunState[state], **values)

    def do_attempt(self, run_id: str, attempt: str) -> None:
        run = self.world.dagster.runs[run_id]
        self.world.dagster.move(run_id, run.state, attempt=int(attempt))

    def do_add(self, batch_id: str, number: str, start: str, until: str, state: str = "") -> None:
        """Add a run of a batch; without a state it is a started re-execution."""
        range_ = OffsetRange("orders", int(number), int(start), int(until))
        added = self.world.dagster.add(batch_id, (range_,), RunState[state or "STARTED"])
        if not state:
            self.world.dagster.move(added, RunState.STARTED, parent_id="r1")

    def do_delete(self, *run_ids: str) -> None:
        for run_id in run_ids:
            del self.world.dagster.runs[run_id]
        self.world.dagster.keys.clear()

    def do_skip_keys(self) -> None:
        """Dagster ignores the keys of the requested runs until `delete`."""
        self.world.dagster.keys |= {one.run_key for one in self.member.engine.batch_requests}

    def do_order(self, action: str, partitions: str = "orders:0", by: str = "ada") -> None:
        at, reason = 1_700_000_000.0, "the warehouse is away"
        self.world.orders.append(Directive(Action[action], partitions, by, at, reason))

    # Streaming runs

    def do_turn(self, seconds: str = "0.25", times: str = "1") -> None:
        """The member of a streaming run turns; its worker may begin a batch."""
        for _ in range(int(times)):
            self.stream.turn(float(seconds))

    def do_until_work(self, seconds: str = "1") -> None:
        """The member turns until its worker has a batch, up to ten times."""
        for _ in range(10):
            if self.stream.work.at_work is None:
                self.stream.turn(float(seconds))
        assert self.stream.work.at_work is not None

    def do_end(self, outcome: str = "SUCCEEDED") -> None:
        self.stream.end(BatchOutcome[outcome])

    def do_return(self, outcome: str = "SUCCEEDED") -> None:
        """The body returns; the next batch begins at once if it is claimed."""
        self.stream.end(BatchOutcome[outcome], begins=True)

    def do_die(self, name: str) -> None:
        stream = self.members[name]
        assert isinstance(stream, Stream)
        stream.die()

    def do_terminate(self, name: str) -> None:
        """An operator forces the run to end, and it reports nothing more."""
        self.world.streams[name] = replace(self.world.streams[name], state=RunState.CANCELED)

    @property
    def stream(self) -> Stream:
        assert isinstance(self.member, Stream)
        return self.member

    # Queries

    def is_work(self) -> str:
        batch = self.stream.work.at_work
        return "none" if batch is None else _ranges(batch.ranges)

    def is_batch(self) -> str:
        batch = self.stream.work.at_work
        return "none" if batch is None else batch.batch_id

    def is_repeat(self) -> bool:
        """Whether an earlier batch may have processed a part of the batch at work."""
        batch = self.stream.work.at_work
        return batch is not None and batch.is_repeat

    def is_interrupts(self) -> int:
        return self.stream.interrupts

    def is_notes(self) -> str:
        return _list(f"{claim[0]}:{outcome.name}" for claim, outcome in self.world.notes.items())

    def is_released(self) -> str:
        """The completed revokes."""
        return "; ".join(_numbers(gone) for _, gone in self.world.released_by) or "none"

    def is_held(self) -> str:
        return _numbers(self.member.engine.held)

    def is_owns(self) -> str:
        return _numbers(self.member.engine.partitions)

    def is_holds(self) -> int:
        return len(self.member.engine.holds)

    def is_outcomes(self) -> str:
        return _list(f"{one.cause.value} {one.outcome.value}" for one in self.member.receipts)

    def is_receipt(self, attribute: str, index: str = "-1") -> str:
        """An attribute of a receipt, the last one by default."""
        receipt: Receipt = self.member.receipts[int(index)]
        value: Any = str(receipt) if attribute == "text" else getattr(receipt, attribute)
        if isinstance(value, dict):
            return _list(f"{p.partition}:{offset}" for p, offset in value.items())
        if attribute in {"handed_over", "partitions"}:
            return _numbers(value)
        return _list(value) if isinstance(value, tuple) else str(value)

    def is_left(self) -> str:
        return self.member.left or "no"

    def is_commits(self) -> str:
        return _list(f"{p.partition}:{offset}" for p, offset in self.world.kafka.commits)

    def is_offset(self, number: str) -> str:
        offset = self.world.kafka.offset(int(number))
        return "none" if offset is None else str(offset)

    def is_claims(self, number: str) -> str:
        return _list(f"{until}:{batch}" for until, batch in self.world.kafka.claims(int(number)))

    def is_early(self, number: str) -> str:
        """The ends of the claims that Kafka stores as early."""
        claims = decode(self.world.kafka.stored[tp(int(number))]).claims
        return _list(str(claim.until) for claim in claims if claim.is_early)

    def is_recorded(self) -> str:
        rows = (
            f"{_range(one.range)} {one.run_id}{' late' * one.is_late}{' dead' * one.is_dead_letter}"
            for one in self.world.dagster.recorded
        )
        return _list(rows)

    def is_letters(self) -> str:
        return _list(letter.range.key for letter in self.world.kafka.letters)

    def is_letter(self) -> bool:
        return self.owned().dead_letter is not None

    def is_ends(self) -> str:
        return _list(run_id for _, run_id in self.world.dagster.recorded[-1].ends)

    def is_last(self) -> str:
        last = decode(self.world.kafka.stored[tp(0)]).last_commit
        return "none" if last is None else f"{last.start} {last.batch_id} {last.run_id}"

    def is_requests(self) -> str:
        """The requested runs: batch, attempt and ranges."""
        return _list(
            f"{one.batch_id}.{one.attempt} {_ranges(one.ranges)}"
            for one in self.member.engine.batch_requests
        )

    def is_failures(self) -> int:
        return sum(one.failures for one in self.member.engine.batch_requests)

    def is_made(self) -> str:
        return _list(self.made)

    def is_runs(self) -> str:
        return _list(self.world.dagster.runs)

    def is_ranges(self, run_id: str) -> str:
        return _ranges(self.world.dagster.runs[run_id].ranges)

    def is_state(self, run_id: str) -> str:
        return self.world.dagster.runs[run_id].state.name

    def is_phase(self, number: str = "0") -> str:
        return self.owned(number).phase.name

    def is_reason(self, number: str = "0") -> str:
        return self.owned(number).stop_reason

    def is_live(self, number: str = "0") -> str:
        return _list(sorted(self.owned(number).live_runs))

    def is_blocked(self, number: str = "0") -> str:
        return _list(self.owned(number).blocked_by)

    def is_entries(self, number: str = "0") -> str:
        return _ranges(entry.range for entry in self.owned(number).entries)

    def is_committing(self, number: str = "0") -> bool:
        return self.owned(number).committing is not None

    def owned(self, number: str = "0") -> OwnedPartition:
        return self.member.engine.partitions[tp(int(number))]

    def is_shown(self) -> str:
        """The shown stops: each reason, or `resumed`."""
        return _list(
            f"{partition.partition} {'stopped' if reason else 'resumed'}"
            for partition, reason in self.member.shown
        )

    def is_news(self) -> str:
        """The reason of the last shown stop, or `resumed`."""
        return self.member.shown[-1][1] or "resumed"

    def is_kinds(self) -> str:
        """The kinds of the member events."""
        return _list(one.kind.name for one in self.member.member_events)

    def is_values(self, kind: str, field: str) -> str:
        """The values of a field in the member events of a kind."""
        found = self.member.event_fields(EventKind[kind])
        return _list(str(json_value(fields[field])) for fields in found)

    def is_given(self, kind: str) -> int:
        """The number of commands of a kind, since `mark` if there was one."""
        return len(self._given(kind)) - self.counts.get(kind, 0)

    def is_between(self, kind: str, least: str, most: str) -> bool:
        """Whether the number of commands of a kind lies between two numbers."""
        return int(least) <= self.is_given(kind) <= int(most)

    def _given(self, kind: str) -> list[commands.Command]:
        return self.member.given(getattr(commands, kind))

    def is_ended(self) -> str:
        """The dead runs that were ended, with their heartbeats."""
        ends = [c for c in self.member.done if isinstance(c, commands.EndDeadRuns)]
        return _list(f"{run}:{sign}" for end in ends for run, sign in end.heartbeats.items())

    def is_order(self, count: str, *kinds: str) -> str:
        """The last commands of some kinds."""
        wanted = tuple(getattr(commands, kind) for kind in kinds)
        names = [type(one).__name__ for one in self.member.done if isinstance(one, wanted)]
        return " ".join(names[-int(count) :])

    def is_log(self) -> str:
        return "\n".join(one.text for one in self.member.done if isinstance(one, commands.Note))

    def is_summary(self) -> str:
        return "\n".join(summary(self.member.engine, self.world.now))

    def is_explained(self, number: str = "0") -> str:
        return explain_partition(self.owned(number), self.world.now)


def _tps(numbers: Iterable[str]) -> tuple[TopicPartition, ...]:
    return tuple(tp(int(number)) for number in numbers)


def _numbers(partitions: Iterable[TopicPartition]) -> str:
    return " ".join(str(one.partition) for one in sorted(partitions)) or "none"


def _range(range_: OffsetRange) -> str:
    return f"{range_.partition}[{range_.start},{range_.until})"


def _ranges(ranges: Iterable[OffsetRange]) -> str:
    return " ".join(map(_range, ranges)) or "none"


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "none"

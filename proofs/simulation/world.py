"""One world: a group, Dagster, processes that come and go, and the checks of all promises.

Commits, holds and stalls are checked at once, everything else in the calm phase.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import explain_partition
from dagster_rebalance.core.runs.bisection import Part, PartKind
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from proofs.simulation.classic import ClassicGroup
from proofs.simulation.clockwork import Clockwork, Violation
from proofs.simulation.consumer_protocol import ConsumerGroup
from proofs.simulation.disturbances import Disturbances
from proofs.simulation.people import People
from proofs.simulation.process import Process
from proofs.simulation.progress import ORDERS_KNOWN_WITHIN_S, Progress, is_foreign
from proofs.simulation.replicas import Replicas
from proofs.simulation.streams import StreamingDagster
from proofs.simulation.weather import MAX_POLL_S, SESSION_S, Weather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.claims import Claim

_HOLD_SLACK_S = 6.0
_SHOWN_WITHIN_S = 40.0
"""A stop is recorded at most every ten seconds, and each request may be lost."""
_MOST_SIDES = 3
_BURSTS = 0.3
_STREAMS = 0.7
"""The streaming sides."""


class World:
    """Everything, from one seed."""

    def __init__(
        self,
        seed: int,
        *,
        streams: bool = False,
        orders: bool = False,
        parts: bool = False,
        torn: bool = False,
        replicas: bool = False,
        slow: bool = False,
        crowd: bool = False,
        ahead: bool = False,
        bad: bool = False,
    ) -> None:
        self.has_streams = streams
        self.has_orders = orders
        self.has_parts = parts
        self.has_replicas = replicas
        self.clockwork = Clockwork(seed)
        self.weather = Weather.drawn(self.clockwork)
        if torn:
            self.weather.tear()
        if slow:
            self.weather.slow_down()
        if crowd:
            self.weather.crowd()
        if parts:
            self.weather.fail_in_parts()
        if bad:
            self.weather.spoil()
        self.weather.settings = replace(self.weather.settings, claims_ahead=ahead)
        self.most_partitions = self.weather.partitions + 2
        self.group = self._coordinator()
        self.group.on_commit = self._check_commit
        self.dagster = StreamingDagster(self.clockwork, self.group, self.weather)
        self.processes: list[Process] = []
        self.is_calm = False
        self.deleted: set[OffsetRange] = set()
        self.vanished: dict[TopicPartition, OffsetAndMetadata] = {}
        self._committed: list[OffsetRange] = []
        self._stopped_since: dict[TopicPartition, float] = {}
        self._progress = Progress(self.group, self.dagster, self.weather)
        self._batch_ids = count(1)
        self._incarnations = count(1)
        self._sides: set[str] = set()
        self._replicas: dict[str, Replicas] = {}
        self.clockwork.check = self._check_members
        self.clockwork.tell(
            "seed",
            f"{seed}: {self.weather.protocol}, {self.weather.partitions} partitions, "
            f"{self.weather.settings}",
        )
        for side in "ab"[: self.clockwork.chance.randint(1, 2)]:
            self.start(side)
        self._disturbances = Disturbances(self)
        self._look_at_clocks()
        self._produce()
        self.people = People(self)

    def _coordinator(self) -> ClassicGroup | ConsumerGroup:
        partitions = self.weather.partitions
        if self.weather.protocol == "consumer":
            return ConsumerGroup(
                self.clockwork, partitions=partitions, session_s=SESSION_S, rebalance_s=MAX_POLL_S
            )
        is_eager = self.weather.protocol == "eager"
        return ClassicGroup(
            self.clockwork,
            partitions=partitions,
            session_s=SESSION_S,
            rebalance_s=MAX_POLL_S,
            is_eager=is_eager,
        )

    # Processes that come and go

    def start(self, side: str) -> None:
        """Start a process of a side, or two replicas, as the successor of older ones."""
        self._sides.add(side)
        if self.has_replicas:
            self._replicas[side] = Replicas(
                side,
                self.clockwork,
                self.dagster.seats,
                make=lambda: self._started(side),
                goes_on=lambda it: side in self._sides and self._replicas[side] is it,
            )
        else:
            self._started(side)

    def _started(self, side: str) -> Process:
        incarnation = f"{side}.{next(self._incarnations)}"
        self.clockwork.tell(f"member {incarnation}", "starts")
        process = Process(
            incarnation,
            self.clockwork,
            group=self.group,
            dagster=self.dagster,
            weather=self.weather,
            new_batch_id=lambda _: f"{incarnation}-{next(self._batch_ids)}",
            # A group may have both forms, and a side may change its own.
            has_orders=self.has_orders,
            is_streaming=self.has_streams and self.clockwork.happens(_STREAMS),
            is_replica=self.has_replicas,
        )
        process.after_turn = self.check_progress
        process.start_another = lambda: self.ensure(incarnation)
        self.processes = [other for other in self.processes if not other.is_gone]
        self.processes.append(process)
        return process

    def ensure(self, incarnation: str) -> None:
        """Restart the side of a process, unless it has another one or was abandoned."""
        side = incarnation[0]
        replicas = self._replicas.get(side)
        if replicas is not None and not replicas.is_silent:
            return  # their ticks make another member
        if side in self._sides and not any(
            p.incarnation[0] == side and not p.is_gone and not p.is_retired for p in self.processes
        ):
            self.start(side)

    def reload(self, process: Process) -> None:
        """Start a new process; the old one lives on without ticks."""
        self.retire(process)
        if process.work is not None:
            self.clockwork.after(self.clockwork.within(1, 12), None, process.replaced)
        if process.incarnation[0] in self._sides:
            self.start(process.incarnation[0])

    def retire(self, process: Process) -> None:
        """Stop the ticks of a process and its replica."""
        for other in self.processes if self.has_replicas else (process,):
            if other.incarnation[0] == process.incarnation[0] and not other.is_retired:
                other.retire()

    def scale(self) -> None:
        """Add or remove a side."""
        spare = [side for side in "abc"[:_MOST_SIDES] if side not in self._sides]
        if spare and (len(self._sides) == 1 or self.clockwork.happens(0.5)):
            self.start(spare[0])
        elif len(self._sides) > 1:
            side = self.clockwork.chance.choice(sorted(self._sides))
            self._sides.discard(side)
            for process in self.processes:
                if process.incarnation[0] == side:
                    process.leave()

    def cut_off(self, partition: TopicPartition, at: int) -> None:
        """Truncate a log; other records will get the offsets."""
        self.group.cut_off(partition, at)
        self.forget(partition, at)

    def make_topic_anew(self) -> None:
        self.group.make_topic_anew()
        self.vanished.clear()
        for partition in self.group.partitions:
            self.forget(partition, 0)

    def forget(self, partition: TopicPartition, at: int) -> None:
        """Forget the work from an offset on, which does not count for new records."""
        self.dagster.forget(partition, at)
        others = {range_ for range_ in self.deleted if range_.topic_partition != partition}
        mine = {
            range_
            for range_ in self.deleted
            if range_.topic_partition == partition and range_.start < at
        }
        self.deleted = others | {replace(range_, until=min(range_.until, at)) for range_ in mine}

    def forget_unrecorded(self, partition: TopicPartition) -> None:
        """Drop unrecorded commits after an operator has moved an offset."""
        self._committed = [
            done
            for done in self._committed
            if done.topic_partition != partition or self._times_recorded(done)
        ]

    # Continuous activity

    def _look_at_clocks(self) -> None:
        self.group.look_at_clocks()
        self.clockwork.after(0.3, None, self._look_at_clocks)

    def _produce(self) -> None:
        if not self.is_calm:
            partition = self.clockwork.chance.choice(self.group.partitions)
            self.group.ends[partition] += self.clockwork.chance.randint(1, 25)
            if self.weather.is_crowded and self.clockwork.happens(_BURSTS):
                self._produce_burst()
            self.clockwork.after(self.clockwork.within(0.3, 5.0), None, self._produce)

    def _produce_burst(self) -> None:
        """Produce to a third of the partitions at once."""
        partitions = self.group.partitions
        for partition in self.clockwork.chance.sample(partitions, len(partitions) // 3):
            self.group.ends[partition] += self.clockwork.chance.randint(1, 3)

    # Promises

    def _check_commit(
        self,
        member_id: str,
        partition: TopicPartition,
        before: OffsetAndMetadata | None,
        new: OffsetAndMetadata,
    ) -> None:
        process = next((p for p in self.processes if p.member.member_id == member_id), None)
        superseded = process is not None and process.member.is_superseded
        if self.group.owner(partition) != member_id and not superseded:
            msg = f"{member_id} commits {partition}, which belongs to {self.group.owner(partition)}"
            raise Violation(msg)
        if before is not None and is_foreign(before):
            msg = (
                f"{member_id} overwrites what another application has stored for {partition}: "
                f"{before}"
            )
            raise Violation(msg)
        self.clockwork.tell(member_id, f"stores {partition} {new.offset} {new.metadata[13:]}")
        self.dagster.note_claims(partition, new)
        # A write that was in flight when Kafka dropped the offset restores it; the group must
        # continue from this offset.
        before = self.vanished.pop(partition, None) if before is None else before
        if before is None:
            return
        if new.offset < before.offset:
            msg = f"{partition} goes back from {before.offset} to {new.offset}"
            raise Violation(msg)
        if new.offset > before.offset:
            self.dagster.committed(partition, before, new)
            committed = OffsetRange(partition.topic, partition.partition, before.offset, new.offset)
            if (
                partition not in self.group.cuts
            ):  # the work may have been on the records before: the end shows the rest
                self._check_covered(committed)
            self._committed.append(committed)
        kept = {claim.until: claim.batch_id for claim in decode(new).claims}
        claims = kept.items() - {(one.until, one.batch_id) for one in decode(before).claims}
        # A commit also names the next part of a bisected range, whose offsets were claimed before.
        if process is not None and not all(_is_unbegun_part(batch_id) for _, batch_id in claims):
            process.check_claimed(partition)
        if not all(
            _is_kept(claim, kept, new.offset)
            for claim in decode(before).claims
            if claim.until > new.offset
        ):
            msg = f"{partition}: a claim is dropped without a commit: {before} became {new}"
            raise Violation(msg)

    def _check_covered(self, range_: OffsetRange) -> None:
        done = self.dagster.outputs.done.get(range_.topic_partition, [])
        letters = [
            (letter.start, letter.until)
            for letter in self.dagster.letters
            if letter.topic_partition == range_.topic_partition
        ]
        is_whole = self.weather.bad_every > 0  # a re-execution may do a range that is halved
        if not any(
            (start, until) == (range_.start, range_.until)
            or (is_whole and start <= range_.start and range_.until <= until)
            for start, until in [*((s, u) for s, u, _ in done), *letters]
        ):
            msg = f"{range_} is committed, but no run has succeeded on it: it is lost"
            raise Violation(msg)

    def _check_members(self) -> None:
        """Check after each step that no responsive member holds beyond the limit."""
        now = self.clockwork.now
        for process in self.processes:
            if process.is_gone or process.stands_still or self.clockwork.is_waiting(process):
                continue
            for hold in process.engine.holds:
                limit_at = hold.requested_at - process.clock_base + hold.budget.limit_s
                if now > max(limit_at, process.awake_since) + _HOLD_SLACK_S:
                    msg = (
                        f"{process} still holds {', '.join(map(str, hold.epochs))}, "
                        f"{now - limit_at:.0f} s behind the limit"
                    )
                    raise Violation(msg)

    def _check_commits_go_on(self, process: Process) -> None:
        """Check that done work is committed, also while Dagster does not answer."""
        now, done_since = self.clockwork.now, {}
        limit_s = self._progress.commit_slack_s + self.group.refuses_for_s
        for owned in process.engine.partitions.values() if process.is_connected else ():
            entry = owned.ledger.committable if owned.ledger is not None else None
            is_free = owned.phase.may_commit and not owned.has_foreign_write
            if entry is None or not is_free or owned.partition in self.group.forbidden:
                continue
            is_letter = entry.is_dead_letter
            has_room = owned.unrecorded.has_room(len(owned.entries), is_dead_letter=is_letter)
            if owned.unrecorded.issued and not has_room:
                continue  # the metadata cannot name one more record before Dagster has these
            state = (owned.partition, owned.epoch, entry.range.until)
            done_since[state] = since = process.done_since.get(state, now)
            if now - max(since, process.awake_since) > limit_s:
                msg = f"{process} does not commit {entry.range}, which is done"
                raise Violation(msg)
        process.done_since = done_since

    def check_progress(self, process: Process) -> None:
        """Check that lag is processed, or that the member gives the right reason."""
        self._check_commits_go_on(process)
        now, engine, waits_since = self.clockwork.now, process.engine, {}
        for owned in engine.partitions.values() if process.is_served else ():
            its_now = now + process.clock_base
            waits = self._progress.waits_of(engine, owned, its_now)
            streams = bool(engine.settings.worker)
            said = explain_partition(owned, its_now, streams=streams) if waits else ""
            for wait in waits:
                if wait.said not in said:
                    msg = f"{process} says '{said}', but nothing of '{wait.said}'"
                    raise Violation(msg)
                state = (
                    owned.partition,
                    owned.epoch,
                    owned.ledger.next_offset if owned.ledger else -1,
                    wait,
                )
                waits_since[state] = since = process.waits_since.get(state, now)
                if now - max(since, process.awake_since) > wait.limit_s:
                    msg = f"{process} does nothing about {said}"
                    raise Violation(msg)
        process.waits_since = waits_since
        process.look_at_orders()
        self._check_orders_are_known(process)
        self._check_stops_are_shown()

    def _check_orders_are_known(self, process: Process) -> None:
        now = self.clockwork.now
        is_told = process.engine.directives == self.dagster.orders or not process.engine.partitions
        if is_told or not process.is_served:
            process.ignorant_since = None
            return
        since = now if process.ignorant_since is None else process.ignorant_since
        process.ignorant_since = since
        if now - max(since, process.awake_since) > ORDERS_KNOWN_WITHIN_S:
            msg = f"{process} has not read directives that are {now - since:.0f} s old"
            raise Violation(msg)

    def _check_stops_are_shown(self) -> None:
        """Check that Dagster shows the stopped partitions."""
        now = self.clockwork.now
        awake = [
            process
            for process in self.processes
            if not (process.is_gone or process.stands_still or self.clockwork.is_waiting(process))
        ]
        served = [process for process in awake if process.is_served]
        stopped = {
            owned.partition
            for process in served
            for owned in process.engine.partitions.values()
            if owned.phase is Phase.STOPPED
        }
        self._stopped_since = {
            partition: self._stopped_since.get(partition, now)
            for partition in stopped - self.dagster.stopped.keys()
        }
        awake_since = max((process.awake_since for process in served), default=now)
        for partition, since in self._stopped_since.items():
            if now - max(since, awake_since) > _SHOWN_WITHIN_S:
                msg = (
                    f"{partition} is stopped for {now - since:.0f} s, "
                    "and the check in Dagster does not show it"
                )
                raise Violation(msg)

    # The end

    def calm(self) -> None:
        """End all failures, and produce nothing more."""
        self.clockwork.tell("the weather", "is calm from now on")
        self.is_calm = True
        for process in self.processes:
            process.waits_since = {}
        self.weather.calm()
        self._disturbances.calm()
        self.people.resume_all()
        self._sides.add("a")
        self.ensure("a")

    def leave(self) -> None:
        """Let all members leave, including those of processes that were killed a while ago."""
        self._sides.clear()
        for process in self.processes:
            process.leave()

    def is_settled(self) -> bool:
        """Return whether everything is committed and recorded, and no partition is held.

        The next owner records the commits of a killed member.
        """
        for partition in self.group.partitions:
            stored, end = self.group.stored.get(partition), self.group.ends[partition]
            if not _is_at(stored, end) or (stored is not None and decode(stored).claims):
                return False
            if stored is None and self.dagster.recorded.get(partition):
                return False  # it is stopped until an operator sets its offset
        members = [process for process in self.processes if not process.is_gone]
        owned = [o for member in members for o in member.engine.partitions.values()]
        taken_in = {o.partition for o in owned if o.phase is not Phase.RESTORING}
        return (
            taken_in.issuperset(self.group.partitions)
            and not any(member.engine.holds for member in members)
            and not any(o.committing or o.unrecorded for o in owned)
        )

    def standing(self) -> dict[TopicPartition, int]:
        """Return the partitions with lag, and their offsets."""
        stored = {
            partition: self.group.stored.get(partition) for partition in self.group.partitions
        }
        at = {partition: offset.offset if offset else 0 for partition, offset in stored.items()}
        return {
            partition: offset
            for partition, offset in at.items()
            if offset < self.group.ends[partition]
        }

    def why_not_settled(self) -> str:
        """Return the reasons of `is_settled`."""
        texts = []
        for partition in self.group.partitions:
            stored, end = self.group.stored.get(partition), self.group.ends[partition]
            if not _is_at(stored, end):
                texts.append(f"{partition} stands still at {stored}, although it ends at {end}")
        for process in self.processes:
            if not process.is_gone:
                owned = process.engine.partitions.values()
                texts += [f"{process}: {explain_partition(o, process.clock())}" for o in owned]
                texts += [f"{process} holds {hold}" for hold in process.engine.holds]
        return "; ".join(texts) or "no member is there"

    def check_all_is_done(self) -> None:
        """Check that every offset is done once or deleted, and every commit recorded.

        Done once means: in exactly one successful run, or in a dead letter.
        """
        for partition in self.group.partitions:
            covered = [
                (start, until) for start, until, _ in self.dagster.outputs.done.get(partition, [])
            ]
            covered += [
                (r.start, r.until)
                for r in {*self.dagster.letters, *self.deleted}
                if r.topic_partition == partition
            ]
            at = 0
            for start, until in sorted(covered):
                if start > at:
                    break
                at = max(at, until)
            # A letter may be about records of a log that had already been deleted.
            if at < self.group.ends[partition]:
                msg = f"{partition}: offset {at} is in no successful run: it is lost"
                raise Violation(msg)

    def check_bad_records(self) -> None:
        """Check that each bad record is one letter, and the attempts on parts within their bound.

        A letter of a good record is no violation in logs that were cut off.
        """
        dagster, ever_cut = self.dagster, self.group.ever_cut
        for partition in (
            set(self.group.partitions) - set(ever_cut) if self.weather.bad_every else ()
        ):
            letters = {r.start for r in dagster.letters if r.topic_partition == partition}
            gone = {
                offset
                for range_ in self.deleted
                if range_.topic_partition == partition
                for offset in range(range_.start, range_.until)
            }
            offsets = range(self.group.ends[partition])
            bad = {offset for offset in offsets if self.weather.is_bad(partition, offset)}
            done = {
                offset
                for start, until, _ in dagster.outputs.done.get(partition, ())
                for offset in range(start, until)
            }
            if letters - bad or bad - letters - gone or done & bad:
                msg = (
                    f"{partition}: letters {sorted(letters)}, and the bad records are {sorted(bad)}"
                )
                raise Violation(msg)
        for range_, tried in dagster.tried.items():
            levels = max(1, (len(range_) - 1).bit_length())
            most = (2 * levels + 1) * max(1, self.weather.bad_in(range_))
            if range_.topic_partition not in ever_cut and len(tried) > most:
                msg = f"{range_} was bisected in {len(tried)} attempts: {sorted(tried)}"
                raise Violation(msg)

    def check_is_recorded(self) -> None:
        """Check that each commit is recorded once, alone or joined with others."""
        # Where a log was cut off, other commits have had the same offsets.
        for committed in (
            range_
            for range_ in self._committed
            if range_.topic_partition not in self.group.ever_cut
        ):
            times = self._times_recorded(committed)
            if times != 1:
                msg = f"the commit of {committed} is recorded {times} times"
                raise Violation(msg)

    def _times_recorded(self, committed: OffsetRange) -> int:
        ranges = [
            record.range
            for record in self.dagster.recorded.get(committed.topic_partition, ())
            if record.range.overlaps(committed)
        ]
        # A next owner records joined commits as one.
        covered = any(
            range_.start <= committed.start and committed.until <= range_.until for range_ in ranges
        )
        return len(ranges) if covered else 0

    def check_nothing_is_shown_as_stopped(self) -> None:
        """Check that Dagster shows no stop after everything is processed.

        The last report of a suspended member that has left stays until the next one.
        """
        if all(
            process.is_gone or process.incarnation != self.dagster.stopped_said_by
            for process in self.processes
        ):
            return
        for partition, reason in self.dagster.stopped.items():
            msg = (
                f"the check in Dagster still says that {partition} is stopped, "
                f"although it has gone on: {reason}"
            )
            raise Violation(msg)

    def check_gauges(self) -> None:
        """Check that all counters are zero after all members have left.

        Except those of abandoned members.
        """
        for process in (
            process
            for process in self.processes
            if process.has_left and not process.mailbox.is_abandoned
        ):
            left = [name for name, size in process.gauges().items() if size]
            if left:
                msg = f"{process} has left with {', '.join(left)} above zero"
                raise Violation(msg)


def _is_kept(claim: Claim, kept: Mapping[int, str], offset: int) -> bool:
    """Return whether a write keeps a claim: for another batch, or in parts if it is bisected."""
    part = Part.parse(claim.batch_id)
    if part is not None:
        return part.until <= offset or Part.parse(kept.get(part.until, "")) is not None
    other = kept.get(claim.until, "")
    is_stream = StreamBatch.parse(other) is not None
    return other == claim.batch_id or is_stream or Part.parse(other) is not None


def _is_at(stored: OffsetAndMetadata | None, end: int) -> bool:
    """Return whether everything is committed; an empty recreated topic needs no commit."""
    return (stored.offset if stored else 0) == end


def _is_unbegun_part(batch_id: str) -> bool:
    part = Part.parse(batch_id)
    return part is not None and part.kind is not PartKind.TRIED

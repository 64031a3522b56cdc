"""The member loop: the one thread that owns a member.

It polls Kafka all the time, so that membership depends on no tick, run or callback.

It is a user of `RebalanceAwareConsumer` like any other: it polls, tells the engine what happened,
and delays each revoke that the engine holds. It decides nothing, and carries out the engine's
commands. A command that failed is not answered; the engine gives it again. It never waits for
Dagster's storage: what needs that is done by a `StorageWorker`, and the answers are events like any
other.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.engine.dead_letter_policy import is_wanted
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    IllegalStateError,
    PartitionLostError,
)
from dagster_rebalance.core.model.member_events import Occurred, Occurrence
from dagster_rebalance.core.model.printable import shown
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.core.reporting.event_recorder import record_events
from dagster_rebalance.core.reporting.explain import headline, summary
from dagster_rebalance.core.reporting.metrics import MemberState
from dagster_rebalance.kafka.log_bounds import (
    PATIENCE_S,
    READ_LIMIT_S,
    BoundsReader,
    committed,
)
from dagster_rebalance.orchestration.member.group_report import GroupReport
from dagster_rebalance.orchestration.member.mailbox import Mail, Mailbox
from dagster_rebalance.orchestration.member.storage_worker import Job, StorageWorker
from dagster_rebalance.orchestration.runs.canceller import RunCanceller

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping

    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.events import LastRecorded
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
    from dagster_rebalance.orchestration.ports import WorkPort

logger = logging.getLogger(__name__)
_POLL_S = 0.1
_IDLE_POLL_S = 0.25
"""How often the member loop turns while nothing is to be done. News of the group end the wait."""
_SUCCESSOR_POLL_S = 5.0
_SUCCESSOR_POLL_LEAVING_S = 1.0
"""A member that drains for a deploy keeps its successor waiting until it finds it."""
_SEAT_S = 15.0
_STANDSTILL_S = 5.0
_HEARTBEAT_S = 2.0
"""A member that Kafka has evicted learns of it within this time."""
_MOST_WOKEN = 20
"""So many answers can come within that time; errors must not make it poll without a pause."""
_SLOW_S = 3.0
"""A step longer than this keeps the member from hearing of its partitions in time, and is noted."""
_SUMMARY_S = 1.0
_FAREWELL_S = 5.0
"""How long a member that has left may take to show that."""
LETTERS_PER_TURN = 20
"""How many answers of letters are taken between two polls at most: with 1,000 partitions at work
each takes the engine 10 ms."""
_ANSWERS_PER_TURN = 100
"""How many answers of the storage are taken between two polls at most: it may answer as fast as
they are taken."""
_COMMIT_PATIENCE_S = 10.0
"""In the classic protocol no coordinator answers a member that waits for others in a rebalance, and
one of those may hold a revoke."""


class MemberLoop:
    """One member at work."""

    def __init__(self, parts: MemberDependencies, mailbox: Mailbox) -> None:
        self.parts = parts
        self._mailbox = mailbox
        self._left: str | None = None
        self.made_way = False
        self._looked_for_successor_at = float("-inf")
        self._seat_kept_at = float("-inf")
        self._standstill_clock = parts.clock_with_suspension or parts.clock
        self._stood_at = self._standstill_clock()
        self._turned_at = parts.clock()
        self._summary: tuple[str, ...] = ()
        self._glance = ""
        self._has_settled = False
        self._summed_up_at = float("-inf")
        self._ender = RunCanceller(
            parts.runs, self._note, self._dead_run_ended, parts.start, parts.clock
        )
        self._answers_left = _ANSWERS_PER_TURN
        self._storage = StorageWorker(self._note, parts.start, parts.clock, parts.consumer.wakeup)
        self._bounds = BoundsReader(
            parts.consumer, parts.clock, self._note, parts.engine.settings.start_from
        )
        self._report = GroupReport(
            parts, self._bounds, partial(self._show, slot="report"), self._note
        )

    def run(self) -> None:
        """Be a member until the engine leaves the group.

        Raises:
            BrokerError: Kafka refuses, and waiting would not help.
            ConfigurationError: The settings cannot work.
        """
        topics = tuple(self.parts.topics)
        self._tell(
            Occurrence(
                Occurred.MEMBER_JOINED, f"joining to read {', '.join(topics)}", {"topics": topics}
            )
        )
        try:
            left = self._be_member()
        except Exception as error:
            said = shown(f"{type(error).__name__}: {error}")
            self._tell(Occurrence(Occurred.MEMBER_FAILED, f"failed: {said}", {"error": said}))
            raise
        else:
            self._tell(Occurrence(Occurred.MEMBER_LEFT, f"left: {left}", {"reason": left}))
        finally:
            if self.parts.meter is not None:
                self.parts.meter.leave()

    def _be_member(self) -> str:
        """Be a member; the reason for which it has left."""
        parts = self.parts
        wanted = Topics.of(parts.topics)
        parts.consumer.subscribe(wanted.subscription)
        # A topic that is missing keeps only itself from being read, unless there is no other one,
        # and none can come.
        there = self._report.topics(READ_LIMIT_S)
        self._check(there or (() if wanted.patterns else wanted.names))
        self._check_dead_letter_topic()
        self._show(parts.catalogue.record_joined)
        while self._left is None:
            self._turn()
            if self._mailbox.is_abandoned:
                self._left = (
                    "it had not answered for too long, and another member has taken its place"
                )
        parts.consumer.close()  # first, so that the others need not wait for the storage
        if parts.work is not None:
            self._tell_work(parts.work, frozenset())
        self._show(partial(parts.catalogue.record_left, self._left))
        if not self.made_way and not self._mailbox.is_abandoned:
            self._show(parts.catalogue.give_seat_up)
        self._storage.finish(_FAREWELL_S)
        return self._left

    def _check(self, topics: Collection[str]) -> None:
        """Check that Kafka lets the member read at least one of the topics."""
        try:
            self.parts.consumer.cluster.check(topics)
        except BrokerError as error:
            others = [topic for topic in topics if topic not in error.topics]
            if not others or len(others) == len(topics):
                raise
            self._note(str(error))
            self._check(others)

    def _see_to_work(self, work: WorkPort) -> None:
        """Let the worker begin what is its turn, and others know what it has left to them."""
        engine = self.parts.engine
        work.watch()
        begun = work.begin(engine.batch_requests, engine.claimed, engine.log_of)
        if begun is not None:
            self._feed(begun)
        self._tell_work(work, frozenset(engine.partitions))

    def _tell_work(self, work: WorkPort, assigned: frozenset[TopicPartition]) -> None:
        """Tell others what the worker has left to them, and on what it may still work.

        Whoever has left may work on nothing but the batch that is still at work, although its run
        goes on until its resources are torn down.
        """
        untold = work.untold
        if untold or work.says_all_but(assigned):
            what = "telling others what this run works on"
            self._storage.ask(
                Job(
                    what,
                    partial(work.say, assigned),
                    lambda _: None,
                    slot="left",
                    subject=(what, dict(untold), assigned),
                    is_repeated=True,
                )
            )

    def _check_dead_letter_topic(self) -> None:
        topic = self.parts.engine.settings.dead_letter_topic
        if topic is not None and topic not in self.parts.consumer.list_topics():
            msg = (
                f"dead_letter_topic '{topic}' does not exist, or the principal may not see it: "
                "create it, and grant the principal the "
                "ACLs WRITE and DESCRIBE on it"
            )
            raise ConfigurationError(msg)

    def _turn(self) -> None:
        parts = self.parts
        self._answers_left = _ANSWERS_PER_TURN
        arrived = self._poll(_POLL_S if parts.engine.partitions.busy else _IDLE_POLL_S)
        if self._standstill_clock() - self._stood_at > _STANDSTILL_S:
            # This process was suspended, perhaps for longer than its session. What it finds done by
            # its successor is not its own to record. A poll releases what was not delayed since the
            # last one.
            parts.consumer.delay_revoke(parts.consumer.get_to_be_revoked_partitions())
            arrived += self._told_within(_HEARTBEAT_S)
        for event in arrived:
            # One by one: a partition that is assigned and requested back in one poll drains.
            self._feed(event)
            if isinstance(event, events.PartitionsAssigned):
                self._show(
                    partial(
                        parts.catalogue.record_assigned, event.partitions, parts.consumer.member_id
                    )
                )
                self._report.add_news()
        told = self._mailbox.take_events()
        letters = (
            islice(parts.dead_letters.answers(), LETTERS_PER_TURN) if parts.dead_letters else ()
        )
        answers = (
            *(parts.work.ended() if parts.work is not None else ()),
            *letters,
            *told,
            *(answer for answer in self._from_storage() if answer is not None),
        )
        if answers:
            self._feed(*answers)
        self._look_for_successor()
        self._keep_seat()
        self._feed(events.TimePassed())
        if parts.work is not None:
            self._see_to_work(parts.work)
        self._carry_out("looking up what is stopped in the group", self._report.step)
        self._storage.look_after()
        parts.consumer.delay_revoke(parts.engine.held)
        self._turned_at, self._stood_at = parts.clock(), self._standstill_clock()
        self._tell_ticks(has_tick=any(isinstance(event, events.TickArrived) for event in told))

    def _tell_ticks(self, *, has_tick: bool) -> None:
        """Leave for the next tick what it offers and says."""
        parts = self.parts
        has_just_settled = not self._has_settled and parts.engine.has_settled
        self._has_settled |= has_just_settled
        if has_tick or has_just_settled or self._turned_at - self._summed_up_at >= _SUMMARY_S:
            self._summary = summary(parts.engine, self._turned_at)
            self._glance, self._summed_up_at = headline(parts.engine), self._turned_at
            self._show_gauges()
        silence = self._storage.silence
        said = (*self._summary, *self._report.sentences, *([silence] if silence else []))
        self._mailbox.post(Mail(parts.engine.batch_requests, said, self._glance))
        if has_just_settled:
            self._mailbox.settle()

    def _poll(self, timeout_s: float) -> tuple[events.AssignmentEvent, ...]:
        """Poll Kafka; return what happened to the assignment.

        What a failed poll has found is told by the next one.
        """
        try:
            with self._timed("polling Kafka"):
                return self.parts.consumer.poll_with_rebalance(timeout_s).events
        except BrokerError as error:
            self._raise_unless_retriable(error)
            return ()

    def _told_within(self, wait_s: float) -> tuple[events.AssignmentEvent, ...]:
        """Wait for what Kafka tells within a time, also when the member is woken meanwhile."""
        until = self.parts.clock() + wait_s
        for _ in range(_MOST_WOKEN):
            arrived = self._poll(max(until - self.parts.clock(), 0.0))
            if arrived or self.parts.clock() >= until:
                return arrived
        return ()

    def _feed(self, *arrived: events.Event) -> None:
        """Pass events that arrived together to the engine, and carry out its commands.

        The answers to these commands are the next events.
        """
        while arrived:
            decided, told = record_events(self.parts.engine, arrived, self.parts.clock())
            self._tell(*told)
            answers: list[events.Event | None] = []
            for command in decided:
                if self._mailbox.is_abandoned:
                    return
                answers.append(self._carry_out(command.doing, partial(self._answer, command)))
                answers += self._from_storage()
            arrived = tuple(answer for answer in answers if answer is not None)

    def _from_storage(self) -> Iterator[events.Event | None]:
        answers = self._storage.answers()
        while self._answers_left and (answer := next(answers, None)) is not None:
            self._answers_left -= 1
            yield self._carry_out("taking in what Dagster's storage answered", answer)

    def _carry_out(
        self, what: str, action: Callable[[], events.Event | None]
    ) -> events.Event | None:
        try:
            with self._timed(what):
                return action()
        except (ConfigurationError, IllegalStateError):
            raise
        except BrokerError as error:
            self._raise_unless_retriable(error)
        except Exception as error:
            self._note(f"{what} failed and is tried again: {error}")
            logger.warning("%s failed and is tried again", what, exc_info=True)
        return None

    def _answer(self, command: commands.Command) -> events.Event | None:  # noqa: C901, PLR0912 - one case for each command
        parts = self.parts
        match command:
            case commands.ReadStoredOffsets(epochs):
                self._ask(
                    command,
                    partial(self._last_recorded, epochs, frozenset(parts.engine.partitions)),
                    partial(self._stored, epochs),
                    slot="offsets",
                )
            case commands.ReadDirectives(epoch):
                self._ask(
                    command,
                    parts.catalogue.orders,
                    partial(self._ordered, epoch),
                    slot="orders",
                )
            case commands.ReadRuns(batch_ids, live_too, look, claims, own):
                if parts.work is not None and own == batch_ids and not live_too:
                    known = parts.work.known(batch_ids, claims)
                    return events.RunsRead(batch_ids, known, look=look, is_own=True)
                self._ask(
                    command,
                    partial(parts.runs.read, batch_ids, live_too=live_too, claims=claims),
                    lambda runs: events.RunsRead(batch_ids, runs, live_too, look),
                    slot="runs",
                )
            case commands.ReadBounds(partitions):
                bounds = self._bounds.read_beyond(partitions)
                refused = frozenset(p for p in self._bounds.refused if p in partitions)
                return events.BoundsRead(bounds, refused)
            case commands.WriteOffsets(writes):
                return self._written(writes)
            case commands.RecordCommit(range=range_):
                self._ask(
                    command,
                    partial(self._record, command),
                    lambda is_recorded: self._recorded(command) if is_recorded else None,
                    slot=("record", range_),
                )
            case commands.StoreDeadLetter():
                self._ask_why(command)
            case commands.CancelRuns(run_ids, _, only_unstarted, is_again):
                if not is_again:
                    self._mailbox.note(str(command))
                if parts.work is not None and command.is_ordered and not only_unstarted:
                    parts.work.stop(run_ids)
                self._ender.cancel(run_ids, only_unstarted=only_unstarted)
            case commands.EndDeadRuns(signs):
                self._mailbox.note(str(command))
                self._ender.end_dead(signs)
            case commands.LeaveClaims(claims):
                if parts.work is not None:
                    parts.work.leave(claims)
            case commands.ShowHold():
                self._show(partial(parts.catalogue.record_hold, command))
            case commands.RecordReceipt(receipt):
                self._mailbox.note(str(receipt))
                self._show(partial(parts.catalogue.record_receipt, receipt))
            case commands.ShowStop():
                self._mailbox.note(str(command))
                self._report.add_news(is_stop=True)
            case commands.Note(text):
                self._mailbox.note(text)
            case commands.LeaveGroup(reason):
                self._left = reason
        return None

    def _ordered(self, epoch: int, orders: tuple[Directive, ...]) -> events.Event:
        if orders != self.parts.engine.orders:
            self._report.add_news()
        return events.DirectivesRead(orders, epoch)

    def _last_recorded(
        self, partitions: Collection[TopicPartition], assigned: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, LastRecorded]:
        if self.parts.work is not None:
            self.parts.work.say(assigned)
        self.parts.catalogue.add_partitions(partitions)
        return self.parts.catalogue.last_recorded(partitions)

    def _stored(
        self, epochs: Mapping[TopicPartition, int], recorded: Mapping[TopicPartition, LastRecorded]
    ) -> events.Event:
        """Ask Kafka what it stores of partitions.

        It is asked last, and of what is still owned: the storage may have taken its time.
        """
        parts = self.parts
        owned = parts.engine.partitions
        found = self._bounds.find(
            [p for p, epoch in epochs.items() if p in owned and owned[p].epoch == epoch], recorded
        )
        return events.StoredOffsetsRead(
            {partition: epochs[partition] for partition in found}, found
        )

    def _written(self, writes: tuple[commands.OffsetWrite, ...]) -> events.Event:
        """Write offsets, after a look at what is stored: leave alone what nobody expects."""
        stored, unread = committed(
            self.parts.consumer, [write.partition for write in writes], PATIENCE_S
        )
        done, due, changed = commands.compared(
            [write for write in writes if write.partition in stored], stored
        )
        failed = [(write, events.WriteFailure.CHANGED) for write in changed]
        refused = [
            (write, unread[write.partition]) for write in writes if write.partition in unread
        ]
        if due:
            result = self.parts.consumer.commit_offsets(
                {write.partition: write.new for write in due}, _COMMIT_PATIENCE_S
            )
            done += [write for write in due if write.partition in result.committed]
            for write in due:
                error = result.failed.get(write.partition)
                if error is None:
                    continue
                # A loss is told by the assignment, but for that of a topic.
                is_lost = isinstance(error, PartitionLostError) and not error.topics
                if error.retriable or is_lost:
                    failed.append((write, events.WriteFailure.RETRIABLE))
                    self._note(f"the offset of {write.partition} could not be written yet: {error}")
                else:
                    refused.append((write, str(error)))
        return events.OffsetsWritten(tuple(done), tuple(failed), tuple(refused))

    def _record(self, commit: commands.RecordCommit) -> bool:
        """Record a commit, unless the next owner of its partition does, which would show it twice.

        The thread of the storage calls this, perhaps long after the member asked for it.
        """
        owned = self.parts.engine.partitions.get(commit.range.topic_partition)
        if self._left is not None or owned is None or owned.unrecorded != commit:
            return False
        self.parts.catalogue.record_commit(commit)
        return True

    def _recorded(self, commit: commands.RecordCommit) -> events.Event:
        if commit.is_dead_letter:
            self._note(
                f"{commit.range} is committed although no run succeeded: the dead-letter topic has "
                "it"
            )
            self._report.add_news()  # another member may have shown it as stopped meanwhile
        return events.CommitRecorded(commit)

    def _ask_why(self, letter: commands.StoreDeadLetter) -> None:
        letters = self.parts.dead_letters
        if letters is None or not letters.is_under_way(letter.range):
            why = partial(self.parts.runs.why_failed, letter.run_ids[-1], letter.batch_id)
            self._ask(letter, why, partial(self._store, letter), slot=("letter", letter.range))

    def _store(self, letter: commands.StoreDeadLetter, error: str) -> None:
        if self.parts.dead_letters is None:
            msg = (
                f"{letter.range} cannot be stored: the member was made without a producer of dead "
                "letters"
            )
            raise IllegalStateError(msg)
        if is_wanted(self.parts.engine.partitions.get(letter.range.topic_partition), letter):
            self.parts.dead_letters.store(letter, error)

    def _look_for_successor(self) -> None:
        now = self.parts.clock()
        wait_s = (
            _SUCCESSOR_POLL_S if self.parts.engine.leaving is None else _SUCCESSOR_POLL_LEAVING_S
        )
        if now - self._looked_for_successor_at < wait_s:
            return
        self._looked_for_successor_at = now
        self._show(self.parts.catalogue.leave_wanted, self._asked_to_leave, slot="successor")

    def _asked_to_leave(self, wanted: events.LeaveRequested | None) -> events.Event | None:
        self.made_way = self.made_way or (wanted is not None and wanted.has_successor)
        return wanted

    def _keep_seat(self) -> None:
        """Show other processes of this code location that the member lives."""
        now = self.parts.clock()
        if not self.made_way and now - self._seat_kept_at >= _SEAT_S:
            self._seat_kept_at = now
            self._show(self.parts.catalogue.keep_seat, slot="seat")

    def _ask(
        self,
        command: commands.Command,
        work: Callable[[], Any],
        then: Callable[[Any], events.Event | None],
        *,
        slot: Hashable,
    ) -> None:
        """Have the storage answer a command.

        It may take its time: the engine gives the command again, and once is enough.
        """
        self._storage.ask(
            Job(command.doing, work, then, slot=slot, subject=command, is_repeated=True)
        )

    def _show(
        self,
        work: Callable[[], Any],
        then: Callable[[Any], events.Event | None] = lambda _: None,
        *,
        slot: Hashable | None = None,
    ) -> None:
        """Do something with the catalogue that the member's work does not depend on."""
        what = "showing the state of the group in Dagster"
        self._storage.ask(Job(what, work, then, slot=slot, can_wait=True))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Say what has kept this thread for long."""
        began_at = self.parts.clock()
        before, self._mailbox.doing = self._mailbox.doing, what
        try:
            yield
        finally:
            self._mailbox.doing = before
            took_s = self.parts.clock() - began_at
            if took_s > _SLOW_S:
                self._note(f"{what} took {took_s:.1f} s")

    def _raise_unless_retriable(self, error: BrokerError) -> None:
        if not (error.retriable or error.topics):
            raise error
        self._note(str(error))

    def _dead_run_ended(self, run_id: str) -> None:
        self._mailbox.tell(events.DeadRunEnded(run_id))

    def _note(self, text: str) -> None:
        self._mailbox.note(text)
        self._tell(Occurrence(Occurred.NOTED, text))

    def _tell(self, *occurrences: Occurrence) -> None:
        """Log what happened, and count it."""
        for occurrence in occurrences:
            self.parts.log.write(occurrence)
        if self.parts.meter is not None:
            self.parts.meter.add(occurrences)

    def _show_gauges(self) -> None:
        engine = self.parts.engine
        if self.parts.meter is not None:
            owned = tuple(engine.partitions.values())
            state = MemberState(owned, engine.holds, self._turned_at)
            self.parts.meter.show(state, self.parts.clock)

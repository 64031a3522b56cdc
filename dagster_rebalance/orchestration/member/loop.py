"""The member loop: the one thread that owns a member of the consumer group.

It polls Kafka continuously, so membership depends on no tick, run or callback. It uses
`RebalanceAwareConsumer` as any user does: it polls, passes events to the engine, delays the revokes
that the engine holds, and executes the engine's commands. A command that fails gets no answer, and
the engine reissues it. Only the `StorageWorker` accesses Dagster's storage; its answers are events.
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
from dagster_rebalance.core.model.member_events import EventKind, MemberEvent
from dagster_rebalance.core.model.printable import escaped
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
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
    from dagster_rebalance.orchestration.ports import WorkPort

logger = logging.getLogger(__name__)
_POLL_S = 0.1
_IDLE_POLL_S = 0.25
"""Poll timeout while no partition is busy. A group event ends the poll early."""
_SUCCESSOR_POLL_S = 5.0
_SUCCESSOR_POLL_LEAVING_S = 1.0
"""A member that drains for a deploy keeps its successor waiting until it detects it."""
_LEASE_RENEWAL_S = 15.0
_STANDSTILL_S = 5.0
_HEARTBEAT_S = 2.0
"""A member detects within this time that Kafka has evicted it."""
_MOST_WOKEN = 20
"""Limit of polls after a standstill: errors must not make the loop poll without a pause."""
_SLOW_S = 3.0
"""A step that takes longer delays assignment events, and is noted."""
_SUMMARY_S = 1.0
_FAREWELL_S = 5.0
"""How long a member that has left waits for the storage to record that."""
LETTERS_PER_TURN = 20
"""Limit of dead-letter answers between two polls: with 1,000 busy partitions, the engine needs
10 ms for each."""
_ANSWERS_PER_TURN = 100
"""Limit of storage answers between two polls: the storage may answer as fast as they are taken."""
_COMMIT_PATIENCE_S = 10.0
"""In the classic protocol the coordinator answers no commit while another member delays a
rebalance, for example by holding a revoke."""


class MemberLoop:
    """The loop of one member."""

    def __init__(self, dependencies: MemberDependencies, mailbox: Mailbox) -> None:
        self.dependencies = dependencies
        self._consumer = dependencies.consumer
        self._engine = dependencies.engine
        self._catalogue = dependencies.catalogue
        self._clock = dependencies.clock
        self._mailbox = mailbox
        self._left: str | None = None
        self.has_successor = False
        self._successor_read_at = float("-inf")
        self._lease_renewed_at = float("-inf")
        self._standstill_clock = dependencies.clock_with_suspension or self._clock
        self._stood_at = self._standstill_clock()
        self._turned_at = self._clock()
        self._summary: tuple[str, ...] = ()
        self._headline = ""
        self._has_settled = False
        self._summed_up_at = float("-inf")
        self._canceller = RunCanceller(
            dependencies.runs, self._note, self._dead_run_ended, dependencies.start, self._clock
        )
        self._answers_left = _ANSWERS_PER_TURN
        self._storage = StorageWorker(
            self._note, dependencies.start, self._clock, self._consumer.wakeup
        )
        self._bounds = BoundsReader(
            self._consumer, self._clock, self._note, self._engine.settings.start_from
        )
        self._report = GroupReport(
            dependencies, self._bounds, partial(self._show, slot="report"), self._note
        )

    def run(self) -> None:
        """Run until the engine leaves the group.

        Raises:
            BrokerError: Kafka refuses a request, and a retry would not help.
            ConfigurationError: The settings cannot work.
        """
        topics = tuple(self.dependencies.topics)
        self._emit(
            MemberEvent(
                EventKind.MEMBER_JOINED, f"joining to read {', '.join(topics)}", {"topics": topics}
            )
        )
        try:
            reason = self._run_member()
        except Exception as error:
            text = escaped(f"{type(error).__name__}: {error}")
            self._emit(MemberEvent(EventKind.MEMBER_FAILED, f"failed: {text}", {"error": text}))
            raise
        else:
            self._emit(MemberEvent(EventKind.MEMBER_LEFT, f"left: {reason}", {"reason": reason}))
        finally:
            if self.dependencies.meter is not None:
                self.dependencies.meter.leave()

    def _run_member(self) -> str:
        """Return the reason why the member has left."""
        work = self.dependencies.work
        wanted = Topics.of(self.dependencies.topics)
        self._consumer.subscribe(wanted.subscription)
        # A missing topic is fatal only if no topic exists and no pattern could match a later one.
        existing = self._report.topics(READ_LIMIT_S)
        self._check_readable(existing or (() if wanted.patterns else wanted.names))
        self._check_dead_letter_topic()
        self._show(self._catalogue.record_joined)
        while self._left is None:
            self._turn()
            if self._mailbox.is_abandoned:
                self._leave("it did not respond for too long, and another member took its place")
        self._consumer.close()  # first: the other members need not wait for the storage
        if work is not None:
            self._report_work(work, frozenset())
        self._show(partial(self._catalogue.record_left, self._left))
        if not self.has_successor and not self._mailbox.is_abandoned:
            self._show(self._catalogue.release_lease)
        self._storage.finish(_FAREWELL_S)
        return self._left

    def _leave(self, reason: str) -> None:
        self._left = reason
        for owned in self._engine.partitions.values():
            if owned.unrecorded is not None:
                self._storage.cancel(_record_slot(owned.unrecorded.range))

    def _check_readable(self, topics: Collection[str]) -> None:
        """Check that Kafka lets the member read at least one of the topics."""
        try:
            self._consumer.cluster.check(topics)
        except BrokerError as error:
            others = [topic for topic in topics if topic not in error.topics]
            if not others or len(others) == len(topics):
                raise
            self._note(str(error))
            self._check_readable(others)

    def _check_dead_letter_topic(self) -> None:
        topic = self._engine.settings.dead_letter_topic
        if topic is not None and topic not in self._consumer.list_topics():
            msg = (
                f"dead_letter_topic '{topic}' does not exist, or the principal may not see it: "
                "create it, and grant the principal the "
                "ACLs WRITE and DESCRIBE on it"
            )
            raise ConfigurationError(msg)

    def _drive_work(self, work: WorkPort) -> None:
        """Let the worker of a streaming run begin its next batch, and report its claims."""
        work.watch()
        begun = work.begin(self._engine.batch_requests, self._engine.claimed, self._engine.log_of)
        if begun is not None:
            self._feed(begun)
        self._report_work(work, frozenset(self._engine.partitions))

    def _report_work(self, work: WorkPort, assigned: frozenset[TopicPartition]) -> None:
        """Report the claims that the worker has abandoned, and where it may still work.

        After the member has left, the worker may only finish its current batch, although its run
        lives until the resources are torn down.
        """
        unreported = work.unreported
        if unreported or work.must_report(assigned):
            what = "publishing the ranges of this run"
            self._storage.ask(
                Job(
                    what,
                    partial(work.report, assigned),
                    slot="left",
                    subject=(what, dict(unreported), assigned),
                    is_repeated=True,
                )
            )

    def _turn(self) -> None:
        letters, work = self.dependencies.dead_letters, self.dependencies.work
        self._answers_left = _ANSWERS_PER_TURN
        polled = self._poll(_POLL_S if self._engine.partitions.busy else _IDLE_POLL_S)
        if self._standstill_clock() - self._stood_at > _STANDSTILL_S:
            # The process was suspended, perhaps for longer than its session. Commits of a successor
            # must not be recorded here. A poll releases partitions that were not delayed since the
            # last one.
            self._consumer.delay_revoke(self._consumer.get_to_be_revoked_partitions())
            polled += self._poll_until_event(_HEARTBEAT_S)
        for event in polled:
            # One by one: a partition that is assigned and revoked in one poll must drain.
            self._feed(event)
            if isinstance(event, events.PartitionsAssigned):
                self._show(
                    partial(
                        self._catalogue.record_assigned, event.partitions, self._consumer.member_id
                    )
                )
                self._report.add_news()
        mail = self._mailbox.take_events()
        arrived = (
            *(work.results() if work is not None else ()),
            *(islice(letters.answers(), LETTERS_PER_TURN) if letters else ()),
            *mail,
            *self._storage_answers(),
        )
        if arrived:
            self._feed(*arrived)
        self._keep_lease()
        self._feed(events.TimePassed())
        if work is not None:
            self._drive_work(work)
        if self._report.is_due(self._clock()):
            self._execute("scanning the group for stopped partitions", self._report.step)
        self._storage.look_after()
        if self._engine.held:
            self._consumer.delay_revoke(self._engine.held)
        self._turned_at, self._stood_at = self._clock(), self._standstill_clock()
        self._post_mail(has_tick=events.TickArrived() in mail)

    def _post_mail(self, *, has_tick: bool) -> None:
        """Post run requests and a summary for the next tick."""
        has_just_settled = not self._has_settled and self._engine.has_settled
        self._has_settled |= has_just_settled
        if has_tick or has_just_settled or self._turned_at - self._summed_up_at >= _SUMMARY_S:
            self._summary = summary(self._engine, self._turned_at)
            self._headline, self._summed_up_at = headline(self._engine), self._turned_at
            self._show_gauges()
        silence = self._storage.silence
        texts = (*self._summary, *self._report.sentences, *([silence] if silence else []))
        self._mailbox.post(Mail(self._engine.batch_requests, texts, self._headline))
        if has_just_settled:
            self._mailbox.settle()

    def _poll(self, timeout_s: float) -> tuple[events.AssignmentEvent, ...]:
        """Poll Kafka for assignment events. Events of a failed poll come with the next one."""
        try:
            with self._timed("polling Kafka"):
                return self._consumer.poll_with_rebalance(timeout_s).events
        except BrokerError as error:
            self._raise_unless_retriable(error)
            return ()

    def _poll_until_event(self, wait_s: float) -> tuple[events.AssignmentEvent, ...]:
        """Poll until an assignment event or the end of the wait, although wake-ups end polls."""
        until = self._clock() + wait_s
        for _ in range(_MOST_WOKEN):
            polled = self._poll(max(until - self._clock(), 0.0))
            if polled or self._clock() >= until:
                return polled
        return ()

    def _feed(self, *arrived: events.Event) -> None:
        """Pass events that arrived together to the engine, and execute its commands.

        The answers to these commands are the next events.
        """
        while arrived:
            due, member_events = record_events(self._engine, arrived, self._clock())
            self._cancel_dropped_records()
            if member_events:
                self._emit(*member_events)
            answers: list[events.Event] = []
            for command in due:
                if self._mailbox.is_abandoned:
                    return
                answer = self._execute(command.doing, partial(self._answer, command))
                if answer is not None:
                    answers.append(answer)
                answers += self._storage_answers()
            arrived = tuple(answers)

    def _storage_answers(self) -> Iterator[events.Event]:
        answers = self._storage.answers()
        while self._answers_left and (answer := next(answers, None)) is not None:
            self._answers_left -= 1
            event = self._execute("handling the answers of Dagster's storage", answer)
            if event is not None:
                yield event

    def _execute(self, what: str, action: Callable[[], events.Event | None]) -> events.Event | None:
        try:
            with self._timed(what):
                return action()
        except (ConfigurationError, IllegalStateError):
            raise
        except BrokerError as error:
            self._raise_unless_retriable(error)
        except Exception as error:
            self._note(f"{what} failed and is retried: {error}")
            logger.warning("%s failed and is retried", what, exc_info=True)
        return None

    def _answer(self, command: commands.Command) -> events.Event | None:  # noqa: C901, PLR0912 - one case for each command
        runs, work = self.dependencies.runs, self.dependencies.work
        match command:
            case commands.ReadStoredOffsets(epochs):
                self._ask(
                    command,
                    partial(self._read_recorded, epochs, frozenset(self._engine.partitions)),
                    partial(self._read_stored, epochs),
                    slot="offsets",
                )
            case commands.ReadDirectives(epoch):
                self._ask(
                    command,
                    self._catalogue.directives,
                    partial(self._directives_read, epoch),
                    slot="orders",
                )
            case commands.ReadRuns(batch_ids, with_live, look, claims, own):
                if work is not None and own == batch_ids and not with_live:
                    known = work.known_runs(batch_ids, claims)
                    return events.RunsRead(batch_ids, known, sequence=look, is_from_worker=True)
                self._ask(
                    command,
                    partial(runs.read, batch_ids, with_live=with_live, claims=claims),
                    lambda found: events.RunsRead(batch_ids, found, with_live, look),
                    slot="runs",
                )
            case commands.ReadBounds(partitions):
                bounds = self._bounds.read_beyond(partitions)
                refused = frozenset(p for p in self._bounds.refused if p in partitions)
                return events.BoundsRead(bounds, refused)
            case commands.WriteOffsets(writes):
                return self._written(writes)
            case commands.RecordCommit(range=range_):
                owned = self._engine.partitions.get(range_.topic_partition)
                # The same decision may have released the partition: its next owner records it.
                if self._left is None and owned is not None and owned.unrecorded == command:
                    self._ask(
                        command,
                        partial(self._catalogue.record_commit, command),
                        lambda _: self._recorded(command),
                        slot=_record_slot(range_),
                    )
            case commands.StoreDeadLetter():
                self._read_failure(command)
            case commands.CancelRuns(run_ids, _, only_unstarted, is_again):
                if not is_again:
                    self._mailbox.note(str(command))
                if work is not None and command.is_for_directive and not only_unstarted:
                    work.stop(run_ids)
                self._canceller.cancel(run_ids, only_unstarted=only_unstarted)
            case commands.EndDeadRuns(signs):
                self._mailbox.note(str(command))
                self._canceller.end_dead(signs)
            case commands.AbandonClaims(claims):
                if work is not None:
                    work.abandon(claims)
            case commands.ShowHold():
                self._show(partial(self._catalogue.record_hold, command))
            case commands.RecordReceipt(receipt):
                self._mailbox.note(str(receipt))
                self._show(partial(self._catalogue.record_receipt, receipt))
            case commands.ShowStop():
                self._mailbox.note(str(command))
                self._report.add_news(is_stop=True)
            case commands.Note(text):
                self._mailbox.note(text)
            case commands.LeaveGroup(reason):
                self._leave(reason)
        return None

    def _directives_read(self, epoch: int, directives: tuple[Directive, ...]) -> events.Event:
        if directives != self._engine.directives:
            self._report.add_news()
        return events.DirectivesRead(directives, epoch)

    def _read_recorded(
        self, partitions: Collection[TopicPartition], assigned: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, events.LastRecorded]:
        """Read the last recorded commits (storage thread)."""
        if self.dependencies.work is not None:
            self.dependencies.work.report(assigned)
        self._catalogue.add_partitions(partitions)
        return self._catalogue.last_recorded(partitions)

    def _read_stored(
        self,
        epochs: Mapping[TopicPartition, int],
        recorded: Mapping[TopicPartition, events.LastRecorded],
    ) -> events.Event:
        """Read the committed offsets of the partitions that are still owned from Kafka.

        Kafka comes last, because the storage may have taken long.
        """
        owned = self._engine.partitions
        found = self._bounds.find(
            [p for p, epoch in epochs.items() if p in owned and owned[p].epoch == epoch], recorded
        )
        read = {partition: epochs[partition] for partition in found}
        return events.StoredOffsetsRead(read, found)

    def _written(self, writes: tuple[commands.OffsetWrite, ...]) -> events.Event:
        """Write offsets, unless the stored offset is neither the expected nor the new one."""
        stored, unread = committed(
            self._consumer, [write.partition for write in writes], PATIENCE_S
        )
        done, due, changed = commands.sort_writes(
            [write for write in writes if write.partition in stored], stored
        )
        failed = [(write, events.WriteFailure.CHANGED) for write in changed]
        refused = [
            (write, unread[write.partition]) for write in writes if write.partition in unread
        ]
        if due:
            result = self._consumer.commit_offsets(
                {write.partition: write.new for write in due}, _COMMIT_PATIENCE_S
            )
            done += [write for write in due if write.partition in result.committed]
            for write in due:
                error = result.failed.get(write.partition)
                if error is None:
                    continue
                # An assignment event reports a lost partition, but not a lost topic.
                is_lost = isinstance(error, PartitionLostError) and not error.topics
                if error.retriable or is_lost:
                    failed.append((write, events.WriteFailure.RETRIABLE))
                    self._note(f"the offset of {write.partition} could not be written yet: {error}")
                else:
                    refused.append((write, str(error)))
        return events.OffsetsWritten(tuple(done), tuple(failed), tuple(refused))

    def _cancel_dropped_records(self) -> None:
        """Cancel queued records of commits that the next owner of their partition records.

        Otherwise Dagster would show them twice: the storage may write a record long after the
        engine requested it.
        """
        for commit in self._engine.partitions.take_dropped_records():
            self._storage.cancel(_record_slot(commit.range))

    def _recorded(self, commit: commands.RecordCommit) -> events.Event:
        if commit.is_dead_letter:
            self._note(
                f"{commit.range} is committed without a successful run: it is in the dead-letter "
                "topic"
            )
            self._report.add_news()  # another member may show it as stopped
        return events.CommitRecorded(commit)

    def _read_failure(self, letter: commands.StoreDeadLetter) -> None:
        letters = self.dependencies.dead_letters
        if letters is None or not letters.is_under_way(letter.range):
            read = partial(self.dependencies.runs.why_failed, letter.run_ids[-1], letter.batch_id)
            self._ask(letter, read, partial(self._store, letter), slot=("letter", letter.range))

    def _store(self, letter: commands.StoreDeadLetter, error: str) -> None:
        letters = self.dependencies.dead_letters
        if letters is None:
            msg = (
                f"{letter.range} cannot be stored: the member was created without a dead-letter "
                "producer"
            )
            raise IllegalStateError(msg)
        if is_wanted(self._engine.partitions.get(letter.range.topic_partition), letter):
            letters.store(letter, error)

    def _keep_lease(self) -> None:
        """Renew the lease of the sensor, and read from time to time whether a successor has it."""
        now = self._clock()
        since_s = now - self._successor_read_at
        if since_s >= _SUCCESSOR_POLL_S or (
            since_s >= _SUCCESSOR_POLL_LEAVING_S and self._engine.leaving is not None
        ):
            self._successor_read_at = now
            self._show(self._catalogue.leave_request, self._leave_requested, slot="successor")
        if not self.has_successor and now - self._lease_renewed_at >= _LEASE_RENEWAL_S:
            self._lease_renewed_at = now
            self._show(self._catalogue.renew_lease, slot="lease")

    def _leave_requested(self, request: events.LeaveRequested | None) -> events.Event | None:
        self.has_successor = self.has_successor or (request is not None and request.has_successor)
        return request

    def _ask(
        self,
        command: commands.Command,
        work: Callable[[], Any],
        then: Callable[[Any], events.Event | None],
        *,
        slot: Hashable,
    ) -> None:
        """Let the storage answer a command. A reissued command does not queue up twice."""
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
        """Let the catalogue execute a job that no partition waits for."""
        what = "reporting the state of the group to Dagster"
        self._storage.ask(Job(what, work, then, slot=slot, can_wait=True))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Note a step that blocks this thread for long."""
        began_at = self._clock()
        before, self._mailbox.doing = self._mailbox.doing, what
        try:
            yield
        finally:
            self._mailbox.doing = before
            took_s = self._clock() - began_at
            if took_s > _SLOW_S:
                self._note(f"{what} took {took_s:.1f} s")

    def _raise_unless_retriable(self, error: BrokerError) -> None:
        if not (error.retriable or error.topics):
            raise error
        self._note(str(error))

    def _dead_run_ended(self, run_id: str) -> None:
        self._mailbox.send(events.DeadRunEnded(run_id))

    def _note(self, text: str) -> None:
        self._mailbox.note(text)
        self._emit(MemberEvent(EventKind.NOTED, text))

    def _emit(self, *member_events: MemberEvent) -> None:
        """Log and count member events."""
        for member_event in member_events:
            self.dependencies.log.write(member_event)
        if self.dependencies.meter is not None:
            self.dependencies.meter.add(member_events)

    def _show_gauges(self) -> None:
        if self.dependencies.meter is not None:
            owned = tuple(self._engine.partitions.values())
            state = MemberState(owned, self._engine.holds, self._turned_at)
            self.dependencies.meter.show(state, self._clock)


def _record_slot(range_: OffsetRange) -> Hashable:
    return "record", range_

"""The member loop: the one thread that owns a member of the consumer group.

It polls Kafka continuously, so membership depends on no tick, run or callback. It uses
`RebalanceAwareConsumer` as any user does: it polls, passes events to the engine, delays the revokes
that the engine holds, and executes the engine's commands. If a command fails, it gets no answer and
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
from dagster_rebalance.core.partitions.assigned import Role
from dagster_rebalance.core.reporting.event_recorder import record_events
from dagster_rebalance.core.reporting.explain import headline, summary
from dagster_rebalance.core.reporting.metrics import MemberState
from dagster_rebalance.kafka.log_bounds import (
    PATIENCE_S,
    READ_LIMIT_S,
    BoundsReader,
    committed,
    longest_wait_s,
)
from dagster_rebalance.orchestration.member.group_report import GroupReport
from dagster_rebalance.orchestration.member.letter_report import LetterReport
from dagster_rebalance.orchestration.member.mailbox import Mail, Mailbox
from dagster_rebalance.orchestration.member.queued_records import QueuedRecords
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
"""If a step takes longer, it delays assignment events, and a note is logged."""
_SUMMARY_S = 1.0
_FAREWELL_S = 5.0
"""How long a member that has left waits until the storage has recorded it."""
LETTERS_PER_TURN = 20
"""Limit of dead-letter answers between two polls: with 1,000 busy partitions, the engine needs
10 ms for each."""
_ANSWERS_PER_TURN = 100
"""Limit of storage answers between two polls: the storage may answer as fast as they are taken."""
_BOUNDS_PER_TURN, _PARTITIONS_PER_BOUNDS = 5, 1_000
"""Limit of reads of log ends between two polls: a read of thousands may take longer than its
interval, and the next one is due at once. It counts as several."""
_PARTITIONS_PER_ANSWER = 5
"""An answer about more partitions counts as several: to restore 500 takes 0.1 s."""
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
        self._answers_left, self._bounds_left = _ANSWERS_PER_TURN, _BOUNDS_PER_TURN
        self._storage = StorageWorker(
            self._note, dependencies.start, self._clock, self._consumer.wakeup
        )
        self._records = QueuedRecords()
        self._letters: dict[tuple[str, str], dict[OffsetRange, commands.StoreDeadLetter]] = {}
        self._bounds = BoundsReader(
            self._consumer, self._clock, self._note, self._engine.settings.start_from
        )
        self._report = GroupReport(
            dependencies, self._bounds, partial(self._show, slot="report"), self._note
        )

        letters = dependencies.new_letters
        self._letter_report: LetterReport | None = None
        if letters is not None:
            show = partial(self._show, slot="letters")
            self._letter_report = LetterReport(
                dependencies, letters, lambda: self._report.is_observer, show, self._note
            )

    def run(self) -> None:
        """Run until the engine leaves the group.

        Raises:
            BrokerError: Kafka refuses a request, and a retry would not help.
            ConfigurationError: A setting is invalid.
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
        self._show(partial(self._catalogue.record_left, self._left), is_kept=True)
        if not self.has_successor and not self._mailbox.is_abandoned:
            self._show(self._catalogue.release_lease)
        self._storage.finish(_FAREWELL_S)
        return self._left

    def _leave(self, reason: str) -> None:
        self._left = reason
        self._records.clear()

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
        topic = self.dependencies.dead_letter_topic or self._engine.settings.dead_letter_topic
        if topic is not None and topic not in self._consumer.list_topics():
            msg = (
                f"dead_letter_topic '{topic}' does not exist, or the principal may not see it: "
                "create it, and grant the principal the "
                "ACLs WRITE and DESCRIBE on it"
            )
            raise ConfigurationError(msg)

    def _begin_work(self) -> events.Event | None:
        """Let the worker of a streaming run begin its next batch, if it is idle."""
        work, engine = self.dependencies.work, self._engine
        if work is None:
            return None
        return work.begin(engine.batch_requests, engine.claimed, engine.log_of)

    def _drive_work(self, work: WorkPort) -> None:
        """Let the worker of a streaming run begin its next batch, and report its claims."""
        work.watch()
        work.hold(self._engine.given_up)
        begun = self._begin_work()
        if begun is not None:
            self._feed(begun)
        self._report_work(work, self._engine.partitions.assigned)

    def _report_work(self, work: WorkPort, assigned: frozenset[TopicPartition]) -> None:
        """Report the worker's abandoned claims, and the partitions that it may still process.

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
        scanner = self.dependencies.scanner
        self._answers_left, self._bounds_left = _ANSWERS_PER_TURN, _BOUNDS_PER_TURN
        polled = self._poll(_POLL_S if self._engine.partitions.has(Role.BUSY) else _IDLE_POLL_S)
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
                    ),
                    is_kept=True,
                )
                self._report.add_news()
        mail = self._mailbox.take_events()
        arrived = (
            *(work.results() if work is not None else ()),
            *(islice(letters.answers(), LETTERS_PER_TURN) if letters else ()),
            *(scanner.answers() if scanner is not None else ()),
            *mail,
            *self._storage_answers(),
        )
        if arrived:
            self._feed(*arrived, begin=self._begin_work)
        self._keep_lease()
        self._feed(events.TimePassed())
        if work is not None:
            self._drive_work(work)
        if self._report.is_due(self._clock()):
            self._execute("scanning the group for stopped partitions", self._report.step)
        if self._letter_report is not None:
            self._letter_report.step()
        self._storage.replace_hung_thread()
        held = self._engine.held
        if held:
            self._consumer.delay_revoke(held)
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
        """Poll Kafka for assignment events. The next poll returns the events of a failed poll."""
        try:
            with self._timed("polling Kafka"):
                return self._consumer.poll_with_rebalance(timeout_s).events
        except BrokerError as error:
            self._raise_unless_retriable(error)
            return ()

    def _poll_until_event(self, wait_s: float) -> tuple[events.AssignmentEvent, ...]:
        """Poll until an assignment event or the end of the wait. A wake-up ends only one poll."""
        until = self._clock() + wait_s
        for _ in range(_MOST_WOKEN):
            polled = self._poll(max(until - self._clock(), 0.0))
            if polled or self._clock() >= until:
                return polled
        return ()

    def _feed(
        self,
        *arrived: events.Event,
        begin: Callable[[], events.Event | None] = lambda: None,
    ) -> None:
        """Pass events that arrived together to the engine, and execute its commands.

        The answers to these commands are the next events. With the result of a batch, the next
        batch begins before the commands, because a commit takes a request to Kafka.
        """
        while arrived:
            due, member_events = record_events(self._engine, arrived, self._clock(), begin)
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
        while self._answers_left > 0 and (answer := next(answers, None)) is not None:
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

    def _answer(self, command: commands.Command) -> events.Event | None:  # noqa: C901, PLR0912, PLR0915 - one case for each command
        runs, work = self.dependencies.runs, self.dependencies.work
        scanner = self.dependencies.scanner
        match command:
            case commands.ReadStoredOffsets(epochs):
                self._ask(
                    command,
                    partial(self._read_recorded, epochs, self._engine.partitions.assigned),
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
                if self._bounds_left <= 0:
                    return None
                self._bounds_left -= 1 + len(partitions) // _PARTITIONS_PER_BOUNDS
                bounds = self._bounds.read_beyond(partitions)
                refused = frozenset(p for p in self._bounds.refused if p in partitions)
                return events.BoundsRead(bounds, refused)
            case commands.ScanRanges():
                if scanner is not None:
                    scanner.begin(command, self.dependencies.start, self._consumer.wakeup)
            case commands.WriteOffsets(writes):
                return self._written(writes)
            case commands.RecordCommits(commits):
                if self._left is None:
                    self._records.add(commit for commit in commits if self._is_unrecorded(commit))
                    self._record()
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
                now = self.dependencies.wall_clock()
                self._show(partial(self._catalogue.record_hold, command, now), is_kept=True)
            case commands.RecordReceipt(receipt):
                self._mailbox.note(str(receipt))
                now = self.dependencies.wall_clock()
                self._show(partial(self._catalogue.record_receipt, receipt, now), is_kept=True)
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
            self._report.add_directives()
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
        self._answers_left -= len(epochs) // _PARTITIONS_PER_ANSWER
        owned = self._engine.partitions
        found = self._bounds.find(
            [p for p, epoch in epochs.items() if p in owned and owned[p].epoch == epoch], recorded
        )
        read = {partition: epochs[partition] for partition in found}
        return events.StoredOffsetsRead(read, found)

    def _written(self, writes: tuple[commands.OffsetWrite, ...]) -> events.Event:
        """Write offsets, unless the stored offset is neither the expected nor the new one."""
        stored, unread = committed(
            self._consumer, [write.partition for write in writes], longest_wait_s(writes)
        )
        readable = [write for write in writes if write.partition in stored]
        first = commands.topics_to_verify(readable)
        ids = self._consumer.cluster.topic_ids(first, PATIENCE_S) if first else {}
        done, due, changed = commands.sort_writes(readable, stored, ids)
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
        self._records.cancel(self._engine.partitions.take_dropped_records())

    def _is_unrecorded(self, commit: commands.RecordCommit) -> bool:
        """Whether this member still has to record a commit.

        The same decision may have released the partition: its next owner records the commit.
        """
        owned = self._engine.partitions.get(commit.range.topic_partition)
        return owned is not None and commit in owned.unrecorded.parts

    def _record(self) -> None:
        """Let the storage store the queued records, one job at a time."""
        if self._records:
            self._storage.ask(
                Job(
                    commands.RecordCommits.doing,
                    self._store_records,
                    self._recorded,
                    slot="records",
                    subject="records",
                    is_repeated=True,
                )
            )

    def _store_records(self) -> tuple[commands.RecordCommit, ...]:
        """Store queued records (storage thread)."""
        taken = self._records.take()
        return self._catalogue.record_commits(taken.commits, taken.is_wanted)

    def _recorded(self, commits: tuple[commands.RecordCommit, ...]) -> events.Event:
        self._records.cancel(commits)  # requested again while they were stored
        self._record()
        for commit in commits:
            if commit.is_dead_letter:
                self._note(
                    f"{commit.range} is committed without a successful run: it is in the "
                    "dead-letter topic"
                )
                self._report.add_news()  # another member may show it as stopped
        return events.CommitsRecorded(commits)

    def _read_failure(self, letter: commands.StoreDeadLetter) -> None:
        """Read why the last run failed, once for all ranges of the batch, and store the letters.

        Dagster's events of a streaming run do not have the errors of its batches.
        """
        letters = self.dependencies.dead_letters
        if letter.error:
            self._store(letter, letter.error)
            return
        if letters is None or not letters.is_under_way(letter.range):
            attempt = (letter.run_ids[-1], letter.batch_id)
            waiting = self._letters.setdefault(attempt, {})
            is_asked = bool(waiting) and letter.range not in waiting
            waiting[letter.range] = letter
            if not is_asked:
                read = partial(self.dependencies.runs.why_failed, *attempt)
                slot = ("letter", *attempt)
                self._ask(letter, read, partial(self._store_all, attempt), slot=slot)

    def _store_all(self, attempt: tuple[str, str], error: str) -> None:
        for letter in self._letters.pop(attempt, {}).values():
            self._store(letter, error)

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
        is_leaving = self._engine.leaving is not None
        poll_s = _SUCCESSOR_POLL_LEAVING_S if is_leaving else _SUCCESSOR_POLL_S
        if not self.has_successor and since_s >= poll_s:
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
        """Let the storage worker answer a command. A reissued command is queued only once."""
        self._storage.ask(
            Job(command.doing, work, then, slot=slot, subject=command, is_repeated=True)
        )

    def _show(
        self,
        work: Callable[[], Any],
        then: Callable[[Any], events.Event | None] = lambda _: None,
        *,
        slot: Hashable | None = None,
        is_kept: bool = False,
    ) -> None:
        """Let the catalogue execute a job that no partition waits for.

        A job that is not kept is repeated by its caller, or may be lost.
        """
        what = "reporting the state of the group to Dagster"
        if is_kept:  # an observation of the group
            self._engine.owe_records(1, self._clock())
        self._storage.ask(Job(what, work, then, slot=slot, is_kept=is_kept, can_wait=True))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Log a note if a step blocks this thread for long."""
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
        for member_event in member_events:
            self.dependencies.log.write(member_event)
        if self.dependencies.meter is not None:
            self.dependencies.meter.add(member_events)

    def _show_gauges(self) -> None:
        if self.dependencies.meter is not None:
            owned = tuple(self._engine.partitions.values())
            state = MemberState(owned, self._engine.holds, self._turned_at)
            self.dependencies.meter.show(state, self._clock)

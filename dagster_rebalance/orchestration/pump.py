"""The pump: the one thread that owns a member. It polls Kafka all the time, so that membership depends on no tick, run or callback.

It is a user of `RebalanceAwareConsumer` like any other: it polls, asks what is to be revoked, and delays the revoke until the driver has
drained it. It decides nothing: it tells the driver what happened and carries out what the driver says. A command that failed is not
answered; the driver gives it again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dagster_rebalance.consumer.events import LostReason
from dagster_rebalance.consumer.listener import RebalanceListener
from dagster_rebalance.core import commands as do
from dagster_rebalance.core import events as seen
from dagster_rebalance.core.errors import BrokerError, ConfigurationError, IllegalStateError
from dagster_rebalance.core.explain import summary
from dagster_rebalance.orchestration.bounds import PATIENCE_S, BoundsReader
from dagster_rebalance.orchestration.mailbox import Mail, Mailbox
from dagster_rebalance.orchestration.run_ender import RunEnder, in_thread
from dagster_rebalance.orchestration.stopped import stopped_partitions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
    from dagster_rebalance.consumer.view import RebalanceConsumer
    from dagster_rebalance.core.driver import Driver
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.orchestration.catalogue import Catalogue
    from dagster_rebalance.orchestration.dead_letters import DeadLetters
    from dagster_rebalance.orchestration.runs import RunLedger

_T = TypeVar("_T")
_log = logging.getLogger("dagster_rebalance")
_POLL_S = 0.1
_SUCCESSOR_POLL_S = 5.0
_SUCCESSOR_POLL_LEAVING_S = 1.0
"""A member that drains for a deploy keeps its successor waiting until it finds it."""
_SEAT_S = 15.0
_STANDSTILL_S = 5.0
_HEARTBEAT_S = 2.0
"""Within so long a member that was thrown out hears of it."""
_SLOW_S = 3.0
"""A step longer than this keeps the member from hearing of its partitions in time, and is noted."""


@dataclass(frozen=True)
class Parts:
    """What a pump works with; made and owned by its thread."""

    consumer: RebalanceAwareConsumer
    driver: Driver
    ledger: RunLedger
    catalogue: Catalogue
    topics: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    dead_letters: DeadLetters | None = None
    start: Callable[[str, Callable[[], None]], None] = in_thread


class _Witness(RebalanceListener):
    """Keeps what Kafka did to the assignment within one poll, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[type[seen.PartitionsAssigned | seen.PartitionsLost], tuple[TopicPartition, ...]]] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:  # noqa: ARG002 - the listener's signature
        self.seen.append((seen.PartitionsAssigned, tuple(partitions)))

    def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        """Nothing to do: the driver released them."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:  # noqa: ARG002
        self.seen.append((seen.PartitionsLost, tuple(partitions)))


class Pump:
    """One member at work."""

    def __init__(self, parts: Parts, mailbox: Mailbox) -> None:
        self.parts = parts
        self._mailbox = mailbox
        self._witness = _Witness()
        self._left: str | None = None
        self.made_way = False
        self._looked_for_successor_at = float("-inf")
        self._seat_kept_at = float("-inf")
        self._turned_at = parts.clock()
        self._runs = RunEnder(parts.ledger, self._note, parts.start)
        self._bounds = BoundsReader(parts.consumer, parts.clock, self._note)

    def run(self) -> None:
        """Be a member until the driver leaves the group.

        Raises:
            BrokerError: Kafka refuses, and waiting would not help.
            ConfigurationError: The settings cannot work.
        """
        parts = self.parts
        parts.consumer.subscribe(list(parts.topics))
        parts.consumer.check()
        self._check_dead_letter_topic()
        parts.consumer.set_rebalance_listener(self._witness)
        self._show(parts.catalogue.record_joined)
        while self._left is None:
            self._turn()
        self._show(partial(parts.catalogue.record_left, self._left))
        if not self.made_way:
            self._show(parts.catalogue.give_seat_up)

    def _check_dead_letter_topic(self) -> None:
        topic = self.parts.driver.settings.dead_letter_topic
        if topic is not None and topic not in self.parts.consumer.list_topics():
            msg = (
                f"dead_letter_topic '{topic}' does not exist, or the principal may not see it: create it, and grant the principal the "
                "ACLs WRITE and DESCRIBE on it"
            )
            raise ConfigurationError(msg)

    def _turn(self) -> None:
        parts = self.parts
        self._poll(_POLL_S)
        if parts.clock() - self._turned_at > _STANDSTILL_S:
            # This process was suspended, perhaps for longer than its session. What it finds done by its successor is not its own to record.
            # A poll releases what was not delayed since the last one.
            parts.consumer.delay_revoke(parts.consumer.get_to_be_revoked_partitions())
            self._poll(_HEARTBEAT_S)
        for event in self._from_kafka():
            self._feed(event)
            if isinstance(event, seen.PartitionsAssigned):
                self._show(partial(parts.catalogue.record_assigned, event.partitions, parts.consumer.member_id))
                self._show(self._show_stopped)
        for event in self._mailbox.take_events():
            self._feed(event)
        for answer in parts.dead_letters.answers() if parts.dead_letters else ():
            self._feed(answer)
        self._look_for_successor()
        self._keep_seat()
        self._feed(seen.TimePassed())
        parts.consumer.delay_revoke(parts.consumer.get_to_be_revoked_partitions() & parts.driver.held)
        self._mailbox.mail = Mail(parts.driver.offers, summary(parts.driver, parts.clock()))
        self._turned_at = parts.clock()

    def _poll(self, timeout_s: float) -> None:
        try:
            with self._timed("polling Kafka"):
                self.parts.consumer.poll(timeout_s)
        except BrokerError as error:
            self._give_up_unless_retriable(error)

    def _from_kafka(self) -> list[seen.Event]:
        parts = self.parts
        happened, self._witness.seen = self._witness.seen, []
        reasons = parts.consumer.lost_reasons()
        events: list[seen.Event] = []
        for kind, partitions in happened:
            if kind is seen.PartitionsAssigned:
                if partitions:
                    events.append(seen.PartitionsAssigned(partitions))
                continue
            overtaken = tuple(p for p in partitions if reasons.get(p) is LostReason.SUPERSEDED)
            others = tuple(p for p in partitions if p not in overtaken)
            events += [seen.HoldSuperseded(overtaken)] if overtaken else []
            events += [seen.PartitionsLost(others)] if others else []
        requested = parts.consumer.get_to_be_revoked_partitions() - parts.driver.held
        if requested:
            events.append(seen.RevokeRequested(tuple(sorted(requested))))
        return events

    def _feed(self, event: seen.Event) -> None:
        """Tell the driver, and carry out what follows, and what follows from that."""
        todo = deque([event])
        while todo:
            for command in self.parts.driver.handle(todo.popleft(), self.parts.clock()):
                answer = self._carry_out(command)
                if answer is not None:
                    todo.append(answer)

    def _carry_out(self, command: do.Command) -> seen.Event | None:
        try:
            with self._timed(type(command).__name__):
                return self._answer(command)
        except (ConfigurationError, IllegalStateError):
            raise
        except BrokerError as error:
            self._give_up_unless_retriable(error)
        except Exception as error:  # noqa: BLE001 - whatever Dagster's storage raises: it may be away for a while
            self._note(f"{type(command).__name__} failed and is tried again: {error}")
            _log.warning("%s failed and is tried again", type(command).__name__, exc_info=True)
        return None

    def _answer(self, command: do.Command) -> seen.Event | None:  # noqa: C901, PLR0912 - one case for each command
        parts = self.parts
        match command:
            case do.ReadStoredOffsets(epochs):
                return self._stored(dict(epochs))
            case do.ReadRuns(batch_ids, live_too):
                return seen.RunsRead(batch_ids, parts.ledger.read(batch_ids, live_too=live_too), live_too)
            case do.ReadBounds(partitions):
                return seen.BoundsRead(self._bounds.read(partitions))
            case do.WriteOffsets(writes):
                return self._written(writes)
            case do.RecordCommit():
                return self._recorded(command)
            case do.StoreDeadLetter():
                self._store(command)
            case do.CancelRuns(run_ids, reason):
                self._note(f"cancelling {len(run_ids)} run(s): {reason}")
                self._runs.cancel(run_ids)
            case do.EndDeadRuns(run_ids):
                self._note(f"no sign of life from {', '.join(run_ids)}: ended")
                self._runs.end_dead(run_ids)
            case do.ReleasePartitions():
                pass  # what the driver no longer holds is no longer delayed, and so released by the next poll
            case do.RecordReceipt(receipt):
                self._note(str(receipt))
                parts.catalogue.record_receipt(receipt)
            case do.ShowStop(partition, reason):
                self._note(f"stopped: {reason}" if reason else f"{partition} goes on")
                self._show(self._show_stopped)
            case do.Note(text):
                self._note(text)
            case do.LeaveGroup(reason):
                self._left = reason
        return None

    def _stored(self, epochs: dict[TopicPartition, int]) -> seen.Event:
        parts = self.parts
        parts.catalogue.add_partitions(epochs)
        bounds = self._bounds.read(epochs)
        return seen.StoredOffsetsRead(
            epochs={partition: epoch for partition, epoch in epochs.items() if partition in bounds},
            stored=parts.consumer.committed(list(bounds)),
            bounds=bounds,
            recorded_until=parts.catalogue.recorded_until(bounds),
        )

    def _written(self, writes: tuple[do.OffsetWrite, ...]) -> seen.Event:
        """Read before write: what is not as the driver expects is left alone."""
        stored = self.parts.consumer.committed([write.partition for write in writes])
        done = [write for write in writes if _same(stored[write.partition], write.new)]
        due = [write for write in writes if write not in done and _same(stored[write.partition], write.expected)]
        failed = [(write, seen.WriteFailure.CHANGED) for write in writes if write not in done and write not in due]
        if due:
            result = self.parts.consumer.commit_offsets({write.partition: write.new for write in due})
            done += [write for write in due if write.partition in result.committed]
            failed += [(write, seen.WriteFailure.RETRIABLE) for write in due if write.partition in result.failed]
            for partition, error in result.failed.items():
                self._note(f"the offset of {partition} could not be written yet: {error}")
        return seen.OffsetsWritten(tuple(done), tuple(failed))

    def _recorded(self, commit: do.RecordCommit) -> seen.Event:
        self.parts.catalogue.record_commit(commit)
        if commit.is_dead_letter:
            self._note(f"{commit.range} is committed although no run succeeded: the dead-letter topic has it")
            self._show(self._show_stopped)  # another member may have shown it as stopped meanwhile
        return seen.CommitRecorded(commit)

    def _store(self, letter: do.StoreDeadLetter) -> None:
        if self.parts.dead_letters is None:
            msg = f"{letter.range} cannot be stored: the member was made without a producer of dead letters"
            raise IllegalStateError(msg)
        self.parts.dead_letters.store(letter)

    def _show_stopped(self) -> None:
        """Show what is stopped in the whole group; of its own partitions the member knows best."""
        parts = self.parts
        mine = parts.driver.partitions
        seen_from_outside = stopped_partitions(
            parts.consumer, parts.ledger, parts.topics, parts.driver.settings, self._bounds.read, timeout_s=PATIENCE_S
        )
        stopped = {partition: reason for partition, reason in seen_from_outside.items() if partition not in mine}
        parts.catalogue.show_stopped(stopped | {partition: owned.stop_reason for partition, owned in mine.items() if owned.stop_reason})

    def _look_for_successor(self) -> None:
        now = self.parts.clock()
        wait_s = _SUCCESSOR_POLL_S if self.parts.driver.leaving is None else _SUCCESSOR_POLL_LEAVING_S
        if now - self._looked_for_successor_at < wait_s:
            return
        self._looked_for_successor_at = now
        newer = self._show(self.parts.catalogue.successor)
        if newer is not None:
            self.made_way = True
            self._feed(seen.LeaveRequested(f"a newer process of this code location has taken over ({newer})", has_successor=True))

    def _keep_seat(self) -> None:
        """Show other processes of this code location that the member lives."""
        now = self.parts.clock()
        if not self.made_way and now - self._seat_kept_at >= _SEAT_S:
            self._seat_kept_at = now
            self._show(self.parts.catalogue.keep_seat)

    def _show(self, action: Callable[[], _T]) -> _T | None:
        """Do something with the catalogue that the member's work does not depend on."""
        try:
            with self._timed("showing the state of the group in Dagster"):
                return action()
        except Exception as error:  # noqa: BLE001 - whatever Dagster's storage raises
            self._note(f"Dagster's storage did not answer: {error}")
            _log.warning("Dagster's storage did not answer", exc_info=True)
            return None

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Say what has kept this thread for long."""
        began_at = self.parts.clock()
        try:
            yield
        finally:
            took_s = self.parts.clock() - began_at
            if took_s > _SLOW_S:
                self._note(f"{what} took {took_s:.1f} s")

    def _give_up_unless_retriable(self, error: BrokerError) -> None:
        if not error.retriable:
            raise error
        self._note(str(error))

    def _note(self, text: str) -> None:
        self._mailbox.note(text)
        _log.info("%s", text)


def _same(stored: OffsetAndMetadata | None, other: OffsetAndMetadata | None) -> bool:
    """Whether offset and metadata are the same; the leader epoch is the broker's business."""
    if stored is None or other is None:
        return stored is other
    return (stored.offset, stored.metadata) == (other.offset, other.metadata)

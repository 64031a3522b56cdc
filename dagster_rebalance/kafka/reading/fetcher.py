"""The fetcher is a second consumer, outside the group, that reads the member's partitions.

During a hold librdkafka pauses every partition of the member's client, so the fetcher reads with a
client of its own: in a measurement, retained partitions kept 100 % of their steady rate through a
whole hold. The fetcher's client is assigned and never subscribes, never commits, and never decides
what to read: it follows. The client receives offsets only, and looks up none (`start_positions`).
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message

from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    OffsetAndMetadata,
    TopicPartition,
    next_offset,
)
from dagster_rebalance.kafka.client.connection_errors import NO_REASON, ConnectionErrors
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    END_OF_PARTITION,
    OFFSET_RESET_FORBIDDEN,
    Attempt,
    broker_error,
    is_passing,
    is_unreadable,
    kafka_error,
    listed,
    names,
    said,
    unparsable_error,
    unreadable_error,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.types import as_committed, ours, theirs, to_commit
from dagster_rebalance.kafka.cluster.missing_topics import MissingTopics
from dagster_rebalance.kafka.reading.headers import repair_headers
from dagster_rebalance.kafka.reading.recreated_topics import RecreatedTopics
from dagster_rebalance.kafka.reading.stalled_partitions import STANDSTILL_S, StalledPartitions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.reading.start_positions import Start, StartPositions

logger = logging.getLogger(__name__)

_MOST_RECORDS = 1_000_000
"""The client returns no more at a time."""
_RECORDS_FOR_A_POSITION = 5
"""To ask the client for the position of one partition takes as long as to look at so many records,
which made a poll of full batches a third slower."""
_USERS_CALLBACKS = frozenset({"error_cb", "throttle_cb"})
_LOOK_UP_S = 1.0
"""How long a start is looked up, while nothing else is read, and how long after a failure it is
looked up again."""
_KEPT_BACK_S = 5.0
"""The same after a failure of some partitions, whose look-up delays the reading of the others."""
_TOLD_AGAIN_S = 1.0
"""How long after it was told that a partition stands still it is told again."""
_READ_AGAIN_S = 1.0
"""How long after a batch could not be read it is read again."""
_PAST_DAMAGE = (
    "Other partitions go on, and the batch is tried again each second. Restore the log, or seek "
    "behind the batch to go on without its records"
)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a partition was read.

    Attributes:
        offset: The next offset to be returned; None while it has to be looked up.
        start: Where reading has to begin, while that is so.
        leader_epoch: The leader epoch of the last record that was returned, where it is known.
        is_read: Whether a record was returned, or the caller has chosen the offset.
    """

    offset: int | None
    start: Start
    leader_epoch: int | None = None
    is_read: bool = True


class Fetcher:
    """Reads records of assigned partitions.

    Args:
        settings: Validated settings.
        starts: Looks up where reading begins.
        clock: A monotonic clock.

    Raises:
        ConfigurationError: The client refuses a setting; the message names it.
    """

    def __init__(
        self,
        settings: Settings,
        starts: StartPositions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt = Attempt("reading records", settings.brokers)
        self._starts = starts
        self._clock = clock
        self._look_up_at = clock()
        self._unanswered_since: float | None = None
        self._reset = settings.offset_reset
        self._staged: dict[TopicPartition, Start] = {}
        self._started: dict[TopicPartition, OffsetAndMetadata] = {}
        self._looked_up: set[TopicPartition] = set()
        self._asked: list[confluent_kafka.TopicPartition] | None = None
        self._behind_seen: dict[TopicPartition, OffsetAndMetadata] = {}
        self._reached: list[confluent_kafka.TopicPartition] = []
        self._unseen: list[Message] = []
        # A batch of so many records that the client is asked how far it is; none of it is kept.
        self._is_full = False
        self.is_open = False
        """Whether a poll is under way, or was interrupted, so that nobody has seen what it has
        read; to be unset by it when it returns."""
        self._withheld: set[TopicPartition] = set()
        self._problem: Exception | None = None
        self._out_of_range: dict[TopicPartition, KafkaError] = {}
        self._told_again_at = clock()
        # The offsets that their errors name.
        self._doubted: dict[TopicPartition, int | None] = {}
        self._begun_again: dict[TopicPartition, int | None] = {}
        # Errors that are not raised yet, partitions that rest after one, and those that have
        # returned no record since.
        self._unreadable: dict[TopicPartition, KafkaError] = {}
        self._resting: set[TopicPartition] = set()
        self._damaged: set[TopicPartition] = set()
        self._read_again_at = clock()
        self._ends_reached: dict[TopicPartition, int] = {}
        self._standstill = StalledPartitions(clock())
        self._troubles = ConnectionErrors(clock)
        self._statistics = "{}"
        self._missing = MissingTopics()
        self._remade = RecreatedTopics(starts.begin_topic_ids, clock)
        config = {**settings.fetcher(), "stats_cb": self._keep_statistics}
        config.update(
            {
                name: partial(self._call_user, config[name])
                for name in _USERS_CALLBACKS & config.keys()
            }
        )
        self._consumer = made(confluent_kafka.Consumer, self._troubles.noting(config))
        self._login = Login(settings.credentials, self._consumer)

    def stage(self, partitions: Iterable[TopicPartition]) -> None:
        """Prepare to read partitions from their committed offset on.

        A `seek` before the next `read` takes effect before their first record.
        """
        staged: dict[TopicPartition, Start] = dict.fromkeys(partitions, "committed")
        self._missing.found(staged)
        self._staged.update(staged)

    def start_staged(self) -> None:
        """Begin to read what is staged. What cannot be looked up is tried again later.

        Raises:
            BrokerError: The client refused; it is tried again with the next read.
        """
        if not self._staged:  # which is the rule
            return
        may_ask = self._clock() >= self._look_up_at
        wanted = {
            tp: start for tp, start in self._staged.items() if may_ask or isinstance(start, int)
        }
        if not wanted:
            return
        found, problem = self._starts.find(wanted, _LOOK_UP_S)
        if problem is not None:
            self._look_up_at = self._clock() + (_KEPT_BACK_S if problem.partitions else _LOOK_UP_S)
        if may_ask:
            self._hear(problem)
        if found:
            self._begin_at(found)
            self._remade.begun(found)
        for tp in found:
            (
                self._looked_up.discard
                if isinstance(self._staged.pop(tp), int)
                else self._looked_up.add
            )(tp)

    def _hear(self, problem: BrokerError | None) -> None:
        """Report a look-up that failed: a passing failure once it has lasted for a while."""
        now = self._clock()
        if problem is None:
            self._unanswered_since = None
        elif (
            problem.retriable
            and now
            < (now if self._unanswered_since is None else self._unanswered_since) + STANDSTILL_S
        ):
            self._unanswered_since = self._unanswered_since or now
            logger.info("reading begins later: %s", problem)
        else:
            self._unanswered_since = now
            self._problem = problem

    def pin(self, partition: TopicPartition, offset: int) -> None:
        """Begin a staged partition at the offset that the caller has got as its position.

        The log may grow until reading begins.
        """
        if partition in self._staged:
            self._staged[partition] = offset

    def withhold(self, partitions: frozenset[TopicPartition]) -> None:
        """Return no records of these partitions, and of no others.

        What is buffered of them is dropped, and read again once they are not withheld any more,
        from the last record that was returned on.
        """
        silenced, freed = partitions - self._withheld, self._withheld - partitions
        self._consumer.pause([theirs(tp) for tp in silenced.intersection(self._started)])
        self._consumer.resume([theirs(tp) for tp in freed.intersection(self._started)])
        self._withheld = set(partitions)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions and all that is buffered of them."""
        gone = set(partitions)
        if not gone:
            # Every poll comes by here, and to be asked for nothing at all takes the client 0.1 ms.
            return
        try:
            self._stop(gone)
        except KafkaException as problem:
            # Told by the next read: whoever gives partitions up owes that to the group, and must
            # not be kept from it.
            self._problem = broker_error(kafka_error(problem), self._attempt, gone)
        for tp in gone:
            self._staged.pop(tp, None)
        self._forget(gone)

    def seek(self, partition: TopicPartition, start: Start) -> None:
        """Read on from somewhere else. What is buffered of the partition is dropped.

        Raises:
            IllegalStateError: The partition is not assigned, or Kafka has no such offset.
        """
        if isinstance(start, int) and not 0 <= start <= MAX_OFFSET:
            msg = (
                f"seek of {partition} to {start}: an offset is a number from 0 to {MAX_OFFSET}; "
                "use seek_to_beginning or seek_to_end for the ends of the log"
            )
            raise IllegalStateError(msg)
        self.position(partition)
        self._staged[partition] = start
        if partition in self._started:
            # A seek of the client's is refused while the partition's fetching is only starting; a
            # new assignment is not.
            self._stop({partition})
            self._forget({partition})

    def position(self, partition: TopicPartition) -> Position:
        """How far a partition was read.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        if partition in self._staged:
            start = self._staged[partition]
            return Position(start if isinstance(start, int) else None, start)
        if partition not in self._started:
            msg = f"the position of {partition} is not known: it is not assigned to this consumer"
            raise IllegalStateError(msg)
        # Between polls the client's own position, which is also behind the marks of transactions.
        self._note_reached()
        reached = None if self.is_open else self._reached_in(partition)
        is_read = (
            reached is not None
            or partition in self._behind_seen
            or partition not in self._looked_up
        )
        at = reached or self._due(partition)
        return Position(at.offset, at.offset, at.leader_epoch, is_read=is_read)

    def read(self, max_records: int, timeout_s: float) -> list[Message]:
        """At most `max_records` records; returns as soon as there is one, or the time is over.

        Raises:
            BrokerError: An earlier read met an error that does not mend itself. Partitions that
                stand still because `auto.offset.reset` forbids to choose an offset are told
                together, again each second. So are partitions whose next batch cannot be read.
        """
        self._rest_unreadable()
        self._raise_problem()
        self._begin_remade()
        self._raise_problem()
        self.start_staged()
        self._begin_doubted_again()
        self._raise_problem()
        try:
            batch = self._whatever_is_there(min(max_records, _MOST_RECORDS), timeout_s)
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), self._attempt) from problem
        if self._told_again_at == math.inf:
            # Counted from here: who polls seldom would else hear of it each time, and read nothing.
            self._told_again_at = self._clock() + _TOLD_AGAIN_S
        is_drained = len(batch) < min(max_records, _MOST_RECORDS)
        if any(map(Message.error, batch)):
            batch = [message for message in batch if self._is_record(message)]
        if self._damaged:
            self._damaged.difference_update({*map(_partition, batch)} - self._unreadable.keys())
        if is_drained and self._problem is None and self._standstill.is_due(self._clock()):
            self._look_for_standstill()
        records = self._without_withheld(batch) if self._withheld else batch
        repair_headers(records)
        # The client moves on behind a batch that it cannot read.
        if not self._unreadable and len(records) > _RECORDS_FOR_A_POSITION * len(self._started):
            self._is_full = True
        else:
            self._unseen += records
        return records

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def begin(self) -> None:
        """Begin a poll; the records that the poll before returned have reached the user."""
        if self.is_open:
            self.put_back_unseen()
        if self._is_full:
            self._reached = self._positions()
        elif self._unseen:
            self._note_reached()
            last = {(record.topic(), record.partition()): record for record in self._unseen}
            self._behind_seen.update(
                (tp, _behind(record))
                for record in last.values()
                if (tp := _partition(record)) in self._started
            )
        self._forget_unseen()
        self.is_open = True

    def put_back_unseen(self) -> None:
        """Read on behind the last record that has reached the user.

        The client is asked how far it is, because it moves on also when it drops what it was about
        to return: with a signal handler that raises.
        """
        self.is_open = True
        self._forget_unseen()
        self._note_reached()
        ahead = {
            tp: due
            for tp, at in _known(self._positions())
            if (due := self._due(tp)).offset != at.offset
        }
        if ahead:
            self._begin_at(ahead)
        self.is_open = False

    def lag(self, partition: TopicPartition) -> int | None:
        """Count the offsets between the position and the end that the last fetch told.

        Return None while one of them is not known.
        """
        reached = self.position(partition).offset
        if reached is None or partition not in self._started:
            return None
        _, end = self._consumer.get_watermark_offsets(theirs(partition), cached=True)
        return max(end - reached, 0) if end >= 0 else None

    def metrics(self) -> dict[str, Any]:
        """The client's latest statistics; empty before the first."""
        found: dict[str, Any] = json.loads(self._statistics)
        return found

    def _begin_at(self, starts: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        try:
            self._stop(starts)
            self._consumer.incremental_assign([to_commit(tp, starts[tp]) for tp in sorted(starts)])
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), self._attempt, starts) from problem
        self._note_reached()
        self._asked = None
        self._started.update(starts)
        for tp in starts:
            self._out_of_range.pop(tp, None)
            if tp in self._behind_seen:
                self._looked_up.discard(tp)
            self._behind_seen.pop(tp, None)
        self._consumer.pause([theirs(tp) for tp in self._withheld.intersection(starts)])

    def _stop(self, partitions: Collection[TopicPartition]) -> None:
        # The client is asked what it has: whoever was to note that may have been interrupted.
        running = [tp for tp in self._consumer.assignment() if ours(tp) in partitions]
        if running:
            # The client remembers a pause over an unassign, and would be silent about a partition
            # that comes back.
            self._consumer.resume(running)
            self._consumer.incremental_unassign(running)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget where reading began, and how far it has come."""
        self._note_reached()
        self._asked = None
        for tp in partitions:
            self._doubted.pop(tp, None)
            self._begun_again.pop(tp, None)
            self._unreadable.pop(tp, None)
            self._resting.discard(tp)
            self._damaged.discard(tp)
            self._ends_reached.pop(tp, None)
            self._out_of_range.pop(tp, None)
            self._started.pop(tp, None)
            self._behind_seen.pop(tp, None)

    def _forget_unseen(self) -> None:
        self._unseen = []
        self._is_full = False

    def _note_reached(self) -> None:
        """Take in what the client has said at the beginning of a poll.

        That is left to whoever needs it: to read it takes longer than all else that a poll does.
        """
        for tp, at in _known(self._reached):
            if tp in self._started:
                self._behind_seen[tp] = at
        self._reached = []

    def _due(self, partition: TopicPartition) -> OffsetAndMetadata:
        """Behind the last record that the user has; where reading began, before the first."""
        return self._behind_seen.get(partition, self._started[partition])

    def _reached_in(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        if partition not in self._damaged:
            return as_committed(self._consumer.position([theirs(partition)])[0])
        records = [record for record in self._unseen if _partition(record) == partition]
        return _behind(records[-1]) if records else None

    def _positions(self) -> list[confluent_kafka.TopicPartition]:
        """How far the client is in each partition."""
        if self._asked is None:
            self._asked = [theirs(tp) for tp in self._started]
        reached: list[confluent_kafka.TopicPartition] = self._consumer.position(self._asked)
        return reached

    def _whatever_is_there(self, count: int, timeout_s: float) -> list[Message]:
        """Wait for the first record only, and take the others that are there.

        The client would wait until it has all records that the call wants.
        """
        self._login.renew()
        batch = self._consumer.consume(count, 0.0)
        if timeout_s and not batch:
            batch = self._consumer.consume(1, timeout_s)
            if count > 1 and batch:
                batch += self._consumer.consume(count - 1, 0.0)
        return batch

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        unparsable = self._troubles.take_unparsable()
        if unparsable is not None:
            raise unparsable_error(unparsable, self._behind(), self._attempt)
        if self._unreadable:
            unreadable, self._unreadable = self._unreadable, {}
            self._note_reached()
            offsets = {tp: self._due(tp).offset for tp in unreadable}
            raise unreadable_error(unreadable, offsets, self._attempt, _PAST_DAMAGE)
        if self._out_of_range and self._clock() >= self._told_again_at:
            self._told_again_at = math.inf
            first = next(iter(self._out_of_range.values()))
            raise BrokerError(
                self._attempt.explain(first, names(self._out_of_range)),
                partitions={tp: error.str() for tp, error in self._out_of_range.items()},
            )

    def _call_user(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call the user's callback, and keep its exception for the next read.

        An exception that left the callback would take the records along that the client was about
        to return.
        """
        try:
            callback(*arguments)
        except Exception as problem:  # noqa: BLE001 - it is the user's code, and reaches the user with the next read
            self._problem = problem

    def _keep_statistics(self, raw: str) -> None:
        self._statistics = raw

    def _without_withheld(self, batch: list[Message]) -> list[Message]:
        """Remove records of withheld partitions that slipped through a pause.

        A pause drops the records that librdkafka has buffered. Should one slip through all the
        same, the fetcher reads it again after the resume.
        """
        slipped = [message for message in batch if _partition(message) in self._withheld]
        if not slipped:
            return batch
        firsts = {_partition(message): message for message in reversed(slipped)}
        self._begin_at(
            {tp: OffsetAndMetadata(message.offset() or 0) for tp, message in firsts.items()}
        )
        return [message for message in batch if _partition(message) not in self._withheld]

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return not self._unreadable or _partition(message) not in self._unreadable
        if error.code() == END_OF_PARTITION:
            self._ends_reached[_partition(message)] = message.offset() or 0
            return False
        if self._missing.is_known(message, error):
            return False
        if error.code() == OFFSET_RESET_FORBIDDEN:
            self._take_in_out_of_range(_partition(message), message.offset(), error)
        elif is_unreadable(message, error):
            self._take_in_unreadable(_partition(message), error)
        elif is_passing(error):
            logger.info("reading records: %s", said(error))
        else:
            self._problem = broker_error(
                error, self._attempt, [_partition(message)] if message.topic() else ()
            )
        return False

    def _take_in_out_of_range(
        self, partition: TopicPartition, offset: int | None, error: KafkaError
    ) -> None:
        """Choose another offset, or tell that none may be chosen, if the error is of this reading.

        The client keeps the error over an unassign, unlike records: it may be of a reading that a
        seek or a loss has ended since. Where it does not say so by its offset, which a truncation
        does not tell, reading begins once more: an error that is still true comes again, and names
        the same offset or the one that is due. Any other is of yet another reading.
        """
        if partition in self._staged or partition not in self._started:
            return
        self._note_reached()
        if partition in self._damaged and offset != self._due(partition).offset:
            return
        has_come_again = partition in self._begun_again and self._begun_again[partition] == offset
        if offset != self._due(partition).offset and not has_come_again:
            self._doubted[partition] = offset
            return
        self._begun_again.pop(partition, None)
        if self._reset == "error":
            self._out_of_range[partition] = error
            return
        logger.warning(
            "reading goes on from the %s offset of %s: %s", self._reset, partition, said(error)
        )
        self._staged[partition] = self._reset

    def _take_in_unreadable(self, partition: TopicPartition, error: KafkaError) -> None:
        """Stop a partition at a batch that cannot be read.

        librdkafka goes on behind it, at an offset that it takes from the middle of the batch
        (`rd_kafka_buf_skip_to` in `rd_kafka_msgset_reader_v2`, 2.16). What it returns of the
        partition from then on is dropped.
        """
        if not partition.topic:  # the client reports the reason in its callback
            logger.info("reading records: %s", error.str())
        elif partition in self._started and partition not in self._staged:
            self._unreadable.setdefault(partition, error)
            self._damaged.add(partition)

    def _rest_unreadable(self) -> None:
        """Stop partitions with an unreadable batch, and read them again after a while."""
        if self._unreadable:
            self._stop(self._unreadable)
            self._resting.update(self._unreadable)
            self._read_again_at = self._clock() + _READ_AGAIN_S
        elif self._resting and self._clock() >= self._read_again_at:
            self._note_reached()
            self._begin_at({tp: self._due(tp) for tp in self._resting})
            self._resting.clear()

    def _behind(self) -> dict[TopicPartition, int]:
        """The next offset of each partition whose log had more in the last fetch, or may have."""
        silent = self._withheld | self._damaged | self._out_of_range.keys()
        started = [tp for tp in self._started if tp not in silent]
        found = {}
        for tp, position in zip(
            started, self._consumer.position([theirs(tp) for tp in started]), strict=True
        ):
            at = as_committed(position) or self._started[tp]
            reached = max(at.offset, self._ends_reached.get(tp, 0))
            _, end = self._consumer.get_watermark_offsets(theirs(tp), cached=True)
            # Before the first fetch the end is not known. A broker that throttles tells none.
            if reached < end or end < 0:
                found[tp] = reached
        return found

    def _look_for_standstill(self) -> None:
        """Report partitions of which nothing is returned although their leaders have more.

        The ends are asked for, because an open transaction is no standstill.
        """
        suspects = self._standstill.look(self._behind(), self._clock())
        if not suspects:
            return
        self._standstill.reported(suspects)
        ends = self._starts.ends(suspects, _LOOK_UP_S)
        behind = self._behind()
        stuck = {
            tp: behind[tp]
            for tp in sorted(suspects & behind.keys())
            if ends.get(tp, 0) > behind[tp]
        }
        if stuck:
            why = self._troubles.reason or NO_REASON
            problem = f"nothing was read for {STANDSTILL_S:g} s, and its log ends at "
            reasons = {tp: f"{tp} at offset {at}: {problem}{ends[tp]}" for tp, at in stuck.items()}
            self._problem = BrokerError(
                f"{self._attempt.doing} failed for {listed(reasons.values())}: {why}",
                partitions=reasons,
            )

    def _begin_remade(self) -> None:
        """Leave the positions in logs whose topics were made again, as if they were out of range.

        The caller is told in each case: since the new log is there, records of it may have been
        returned, and others left out.
        """
        remade = self._remade.look(self._started)
        if not remade:
            return
        self._note_reached()
        old = [tp for tp, is_old in remade.items() if is_old and tp not in self._staged]
        reasons = {tp: f"{tp} at offset {self._due(tp).offset}" for tp in remade}
        topics = ", ".join(sorted({tp.topic for tp in remade}))
        self._problem = BrokerError(
            f"{self._attempt.doing} found that {topics} was deleted and made again. Records of the "
            f"new log that were read in the meantime may be returned again, others may be missing: "
            f"{listed(reasons.values())}. Reading begins again as 'auto.offset.reset' says, unless "
            "a new assignment has begun it",
            partitions=reasons,
        )
        # Behind the error, which must not be lost if a signal handler raises.
        self._stop(old)
        self._forget_old(old)
        self._remade.told()

    def _forget_old(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            due = self._due(tp)
            self._forget([tp])
            if self._reset == "error":
                self._started[tp] = due
                self._out_of_range[tp] = KafkaError(
                    OFFSET_RESET_FORBIDDEN, f"the topic of {tp} was made again"
                )
            else:
                self._staged[tp] = self._reset

    def _begin_doubted_again(self) -> None:
        if not self._doubted:  # which is the rule
            return
        self._note_reached()
        self._begin_at({tp: self._due(tp) for tp in self._doubted})
        self._begun_again.update(self._doubted)
        self._doubted.clear()


def _known(
    positions: Iterable[confluent_kafka.TopicPartition],
) -> Iterator[tuple[TopicPartition, OffsetAndMetadata]]:
    """The positions that the client knows: of partitions of which it has returned a record."""
    for position in positions:
        at = as_committed(position)
        if at is not None:
            yield ours(position), at


def _behind(record: Message) -> OffsetAndMetadata:
    return OffsetAndMetadata(next_offset(record.offset() or 0), leader_epoch=record.leader_epoch())


def _partition(message: Message) -> TopicPartition:
    return TopicPartition(message.topic() or "", message.partition() or 0)

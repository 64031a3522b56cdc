"""Read the member's partitions with a second consumer, outside the group.

During a hold librdkafka pauses every partition of the member's client. With a separate client,
retained partitions kept 100 % of their rate through a hold. The fetcher's client is assigned at
given offsets, and never subscribes, commits or queries offsets (`start_positions` does).
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
from dagster_rebalance.kafka.client.confluent import (
    create_client,
    from_committed,
    from_confluent,
    partition_of,
    to_commit,
    to_confluent,
)
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    END_OF_PARTITION,
    OFFSET_RESET_FORBIDDEN,
    Operation,
    broker_error,
    error_text,
    first_few,
    is_transient,
    is_unreadable,
    kafka_error,
    partition_names,
    unparsable_error,
    unreadable_error,
)
from dagster_rebalance.kafka.client.reported_errors import (
    NO_REASON,
    ConnectionErrors,
    MissingTopics,
)
from dagster_rebalance.kafka.reading.messages import (
    consume_available,
    last_of_partitions,
    repair_headers,
)
from dagster_rebalance.kafka.reading.partition_watch import (
    STALLED_AFTER_S,
    RecreatedTopics,
    StalledPartitions,
)
from dagster_rebalance.kafka.reading.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.reading.start_positions import Start, StartPositions

logger = logging.getLogger(__name__)

_MOST_RECORDS = 1_000_000
"""The client's limit for one call."""
_RECORDS_FOR_A_POSITION = 5
"""Asking the client for the position of one partition takes as long as inspecting this many
records, which made a poll of full batches a third slower."""
_USER_CALLBACKS = frozenset({"error_cb", "throttle_cb"})
_LOOK_UP_S = 1.0
"""The limit of a look-up, which delays all reading, and the pause before the next after a
failure."""
_PARTIAL_LOOK_UP_S = 5.0
"""The pause after a failure of some partitions, because their look-up delays the others."""
_REPORT_AGAIN_S = 1.0
"""The interval at which partitions without an allowed offset are reported."""
_READ_AGAIN_S = 1.0
"""The interval at which an unreadable batch is read again."""
_WAY_OUT = (
    "Other partitions continue, and the batch is retried each second. Restore the log, or seek "
    "past the batch to continue without its records"
)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a partition: the next offset to be returned, or None before its look-up.

    `is_read` is True if a record was returned, or the caller has chosen the offset.
    """

    offset: int | None
    start: Start
    leader_epoch: int | None = None
    is_read: bool = True


class Fetcher:
    """Reads records of assigned partitions."""

    def __init__(
        self,
        settings: Settings,
        starts: StartPositions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operation = Operation("reading records", settings.brokers)
        self._starts = starts
        self._clock = clock
        self._reset = settings.offset_reset
        # Starts to be looked up, and the partitions that the client reads.
        self._staged: dict[TopicPartition, Start] = {}
        self._started: dict[TopicPartition, OffsetAndMetadata] = {}
        self._looked_up: set[TopicPartition] = set()
        self._look_up_at = clock()
        self._unanswered_since: float | None = None
        # Positions after the last records that the user has received, and records that the user may
        # not have received.
        self._position_request: list[confluent_kafka.TopicPartition] | None = None
        self._positions_seen: dict[TopicPartition, OffsetAndMetadata] = {}
        self._client_positions: list[confluent_kafka.TopicPartition] = []
        self._unseen: list[Message] = []
        self._is_full = False  # the last batch is too large to keep
        self.ahead = ReadAhead()
        self.is_open = False
        """Whether a poll is in progress, or was interrupted before the user saw its records; the
        poll resets it when it returns."""
        self._withheld: set[TopicPartition] = set()
        self._problem: Exception | None = None
        # Out of range: without reset; unconfirmed, with the offset in the error; reassigned for it.
        self._out_of_range: dict[TopicPartition, KafkaError] = {}
        self._report_at = clock()
        self._doubted: dict[TopicPartition, int | None] = {}
        self._reassigned: dict[TopicPartition, int | None] = {}
        # Unreadable batches: errors to raise, partitions that pause, and those without progress.
        self._unreadable: dict[TopicPartition, KafkaError] = {}
        self._resting: set[TopicPartition] = set()
        self._damaged: set[TopicPartition] = set()
        self._read_again_at = clock()
        self._ends_reached: dict[TopicPartition, int] = {}
        self._stalled = StalledPartitions(clock())
        self._errors = ConnectionErrors(clock)
        self._statistics = "{}"
        self._missing = MissingTopics()
        self._recreated = RecreatedTopics(starts.begin_topic_ids, clock)
        config = {**settings.fetcher(), "stats_cb": self._keep_statistics}
        for name in _USER_CALLBACKS & config.keys():
            config[name] = partial(self._call_user, config[name])
        self._consumer = create_client(
            confluent_kafka.Consumer, self._errors.with_callbacks(config)
        )
        self._login = Login(settings.credentials, self._consumer)

    def stage(self, partitions: Iterable[TopicPartition]) -> None:
        """Prepare to read partitions from their committed offset on, unless a `seek` follows."""
        staged: dict[TopicPartition, Start] = dict.fromkeys(partitions, "committed")
        self._missing.mark_found(staged)
        self._staged.update(staged)

    def start_staged(self) -> None:
        """Start reading the staged partitions. A failed look-up of offsets is retried later."""
        if not self._staged:  # the usual case
            return
        may_look_up = self._clock() >= self._look_up_at
        wanted = {
            tp: start for tp, start in self._staged.items() if may_look_up or isinstance(start, int)
        }
        if not wanted:
            return
        found, problem = self._starts.find(wanted, _LOOK_UP_S)
        if problem is not None:
            pause_s = _PARTIAL_LOOK_UP_S if problem.partitions else _LOOK_UP_S
            self._look_up_at = self._clock() + pause_s
        if may_look_up:
            self._note_look_up(problem)
        if found:
            self._assign(found)
            self._recreated.add_started(found)
        for tp in found:
            if isinstance(self._staged.pop(tp), int):
                self._looked_up.discard(tp)
            else:
                self._looked_up.add(tp)

    def _note_look_up(self, problem: BrokerError | None) -> None:
        """Report a failed look-up; a retriable failure only after `STALLED_AFTER_S`."""
        now = self._clock()
        if problem is None:
            self._unanswered_since = None
        elif (
            problem.retriable
            and now
            < (now if self._unanswered_since is None else self._unanswered_since) + STALLED_AFTER_S
        ):
            self._unanswered_since = self._unanswered_since or now
            logger.info("reading starts later: %s", problem)
        else:
            self._unanswered_since = now
            self._problem = problem

    def pin(self, partition: TopicPartition, offset: int) -> None:
        """Start a staged partition at the offset that the caller received, even if the log grew."""
        if partition in self._staged:
            self._staged[partition] = offset

    def withhold(self, partitions: frozenset[TopicPartition]) -> None:
        """Withhold the records of exactly these partitions, and read buffered ones again later."""
        silenced, freed = partitions - self._withheld, self._withheld - partitions
        if silenced:
            self.ahead.is_checked = False
        self._consumer.pause([to_confluent(tp) for tp in silenced.intersection(self._started)])
        self._consumer.resume([to_confluent(tp) for tp in freed.intersection(self._started)])
        self._withheld = set(partitions)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading partitions, and drop their buffered records."""
        gone = set(partitions)
        if not gone:
            # Every poll calls this, and an empty request takes the client 0.1 ms.
            return
        self.ahead.drop(gone)
        try:
            self._unassign(gone)
        except KafkaException as problem:
            # The next read raises the error, which must not delay a revoke.
            self._problem = broker_error(kafka_error(problem), self._operation, gone)
        for tp in gone:
            self._staged.pop(tp, None)
        self._forget(gone)

    def seek(self, partition: TopicPartition, start: Start) -> None:
        """Continue reading at another offset. Buffered records of the partition are dropped."""
        if isinstance(start, int) and not 0 <= start <= MAX_OFFSET:
            msg = (
                f"seek of {partition} to {start}: an offset is a number from 0 to {MAX_OFFSET}; "
                "use seek_to_beginning or seek_to_end for the ends of the log"
            )
            raise IllegalStateError(msg)
        self.position(partition)
        self._staged[partition] = start
        self.ahead.drop({partition})
        if partition in self._started:
            # The client refuses a seek while fetching of the partition starts, but not a new
            # assignment.
            self._unassign({partition})
            self._forget({partition})

    def position(self, partition: TopicPartition) -> Position:
        """Return the position of a partition."""
        if partition in self._staged:
            start = self._staged[partition]
            return Position(start if isinstance(start, int) else None, start)
        if partition not in self._started:
            msg = f"the position of {partition} is not known: it is not assigned to this consumer"
            raise IllegalStateError(msg)
        # Between polls it is the client's own position, which also passes transaction markers.
        self._apply_client_positions()
        reached = None if self.is_open else self._reached(partition)
        is_read = (
            reached is not None
            or partition in self._positions_seen
            or partition not in self._looked_up
        )
        at = reached or self._seen_position(partition)
        return Position(at.offset, at.offset, at.leader_epoch, is_read=is_read)

    def read(self, max_records: int, timeout_s: float, read_ahead: int = 0) -> list[Message]:
        """Return at most `max_records` records, as soon as there is one, or at the timeout.

        If more of up to `read_ahead` records are available, they are kept in `ahead`, and returned
        by the next calls. Until then no error is raised.

        Raises:
            BrokerError: The client does not recover from an error of an earlier read. Partitions
                without an offset that `auto.offset.reset` allows, and partitions with an unreadable
                record batch, are reported together, again each second.
        """
        if self.ahead.left and (records := self._take_ahead(max_records)):
            return records
        self._rest_unreadable()
        self._raise_problem()
        self._restart_recreated()
        self._raise_problem()
        self.start_staged()
        self._reassign_doubted()
        self._raise_problem()
        count = min(max(max_records, read_ahead), _MOST_RECORDS)
        try:
            self._login.renew()
            batch = consume_available(self._consumer, count, timeout_s)
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), self._operation) from problem
        if self._report_at == math.inf:
            # From here on: a caller that seldom polls would otherwise receive the error in each
            # poll, and no records.
            self._report_at = self._clock() + _REPORT_AGAIN_S
        is_drained = len(batch) < count
        if any(map(Message.error, batch)):
            batch = [message for message in batch if self._is_record(message)]
        if self._damaged:
            self._damaged.difference_update({*map(partition_of, batch)} - self._unreadable.keys())
        if is_drained and self._problem is None and self._stalled.is_due(self._clock()):
            self._check_stalled()
        records = self._without_withheld(batch) if self._withheld else batch
        repair_headers(records)
        # The client's position is after a batch that it cannot read.
        if not self._unreadable and len(records) > _RECORDS_FOR_A_POSITION * len(self._started):
            self._is_full = True
        if len(records) > max_records:
            self.ahead.keep(records)
            self.ahead.is_checked = True
            return self.ahead.take(max_records)
        if not self._is_full:
            self._unseen += records
        return records

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def begin(self) -> None:
        """Begin a poll: the records of the last poll have reached the user."""
        if self.is_open:
            self.put_back_unseen()
        left = self.ahead.left
        if self._is_full and not left:
            self._client_positions = self._query_positions()
        elif returned := self._returned():
            self._note_seen(returned)
        if left:
            self.ahead.keep(left)
        else:
            self._forget_unseen()
        self.is_open = True

    def put_back_unseen(self) -> None:
        """Continue reading after the last record that reached the user.

        Queries the client's positions: they also advance if a signal handler raises and the client
        drops its records.
        """
        self.is_open = True
        self._forget_unseen()
        self._apply_client_positions()
        ahead = {
            tp: seen
            for tp, at in _known(self._query_positions())
            if (seen := self._seen_position(tp)).offset != at.offset
        }
        if ahead:
            self._assign(ahead)
        self.is_open = False

    def lag(self, partition: TopicPartition) -> int | None:
        """Return the lag from the position to the high watermark of the last fetch, or None."""
        reached = self.position(partition).offset
        if reached is None or partition not in self._started:
            return None
        _, end = self._consumer.get_watermark_offsets(to_confluent(partition), cached=True)
        return max(end - reached, 0) if end >= 0 else None

    def metrics(self) -> dict[str, Any]:
        """Return the client's latest statistics; empty before the first."""
        statistics: dict[str, Any] = json.loads(self._statistics)
        return statistics

    def _assign(self, starts: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        try:
            self._unassign(starts)
            self._consumer.incremental_assign([to_commit(tp, starts[tp]) for tp in sorted(starts)])
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), self._operation, starts) from problem
        self._apply_client_positions()
        self._position_request = None
        self._started.update(starts)
        for tp in starts:
            self._out_of_range.pop(tp, None)
            if tp in self._positions_seen:
                self._looked_up.discard(tp)
            self._positions_seen.pop(tp, None)
        self._consumer.pause([to_confluent(tp) for tp in self._withheld.intersection(starts)])

    def _unassign(self, partitions: Collection[TopicPartition]) -> None:
        # From the client's own assignment: an interrupt may have left ours incomplete.
        running = [tp for tp in self._consumer.assignment() if from_confluent(tp) in partitions]
        if running:
            # The client remembers a pause over an unassign, and would return no records of a
            # partition that is assigned again.
            self._consumer.resume(running)
            self._consumer.incremental_unassign(running)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        self._apply_client_positions()
        self._position_request = None
        for tp in partitions:
            self._doubted.pop(tp, None)
            self._reassigned.pop(tp, None)
            self._unreadable.pop(tp, None)
            self._resting.discard(tp)
            self._damaged.discard(tp)
            self._ends_reached.pop(tp, None)
            self._out_of_range.pop(tp, None)
            self._started.pop(tp, None)
            self._positions_seen.pop(tp, None)

    def _take_ahead(self, max_records: int) -> list[Message]:
        if not self.ahead.is_checked:
            self.ahead.keep(self._without_withheld(self.ahead.left))
            self.ahead.is_checked = True
        return self.ahead.take(max_records)

    def _returned(self) -> list[Message]:
        """Return the records since the beginning of the last poll, unless they are too many."""
        return self._unseen + self.ahead.records[: self.ahead.taken]

    def _note_seen(self, records: Sequence[Message]) -> None:
        self._apply_client_positions()
        self._positions_seen.update(
            (tp, _behind(record))
            for record in last_of_partitions(records)
            if (tp := partition_of(record)) in self._started
        )

    def _forget_unseen(self) -> None:
        self._unseen = []
        self._is_full = False
        self.ahead.keep([])

    def _apply_client_positions(self) -> None:
        """Apply the client's positions from the beginning of the poll.

        Done only when they are needed: reading them takes longer than the rest of a poll.
        """
        for tp, at in _known(self._client_positions):
            if tp in self._started:
                self._positions_seen[tp] = at
        self._client_positions = []

    def _seen_position(self, partition: TopicPartition) -> OffsetAndMetadata:
        """Return the position after the last record that reached the user, or the start."""
        return self._positions_seen.get(partition, self._started[partition])

    def _reached(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """Return the position after the last poll; None if it is that before the poll."""
        last_taken = self.ahead.last_taken()
        if partition in last_taken:
            taken = last_taken[partition]
            return None if taken is None else _behind(taken)
        if partition not in self._damaged:
            return from_committed(self._consumer.position([to_confluent(partition)])[0])
        records = [record for record in self._returned() if partition_of(record) == partition]
        return _behind(records[-1]) if records else None

    def _query_positions(self) -> list[confluent_kafka.TopicPartition]:
        if self._position_request is None:
            self._position_request = [to_confluent(tp) for tp in self._started]
        positions: list[confluent_kafka.TopicPartition] = self._consumer.position(
            self._position_request
        )
        return positions

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # see `without_frames`
        unparsable = self._errors.take_unparsable()
        if unparsable is not None:
            raise unparsable_error(unparsable, self._lagging(), self._operation)
        if self._unreadable:
            unreadable, self._unreadable = self._unreadable, {}
            self._apply_client_positions()
            offsets = {tp: self._seen_position(tp).offset for tp in unreadable}
            raise unreadable_error(unreadable, offsets, self._operation, _WAY_OUT)
        if self._out_of_range and self._clock() >= self._report_at:
            self._report_at = math.inf
            first = next(iter(self._out_of_range.values()))
            raise BrokerError(
                self._operation.explain(first, partition_names(self._out_of_range)),
                partitions={tp: error.str() for tp, error in self._out_of_range.items()},
            )

    def _call_user(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call the user's callback, and keep its exception for the next read.

        If the callback raised into the client, the client would lose the records of its call.
        """
        try:
            callback(*arguments)
        except Exception as problem:  # noqa: BLE001 - the next read raises it
            self._problem = problem

    def _keep_statistics(self, raw: str) -> None:
        self._statistics = raw

    def _without_withheld(self, batch: list[Message]) -> list[Message]:
        """Remove the rare records of withheld partitions: a pause drops the client's buffer.

        The partitions are assigned again, so these records are read again after the resume.
        """
        withheld = [message for message in batch if partition_of(message) in self._withheld]
        if not withheld:
            return batch
        firsts = {partition_of(message): message for message in reversed(withheld)}
        self._assign(
            {tp: OffsetAndMetadata(message.offset() or 0) for tp, message in firsts.items()}
        )
        return [message for message in batch if partition_of(message) not in self._withheld]

    def _is_record(self, message: Message) -> bool:
        """Return whether a message is a record; handle errors."""
        error = message.error()
        if error is None:
            return not self._unreadable or partition_of(message) not in self._unreadable
        if error.code() == END_OF_PARTITION:
            self._ends_reached[partition_of(message)] = message.offset() or 0
            return False
        if self._missing.is_known(message, error):
            return False
        if error.code() == OFFSET_RESET_FORBIDDEN:
            self._note_out_of_range(partition_of(message), message.offset(), error)
        elif is_unreadable(message, error):
            self._note_unreadable(partition_of(message), error)
        elif is_transient(error):
            logger.info("reading records: %s", error_text(error))
        else:
            partitions = [partition_of(message)] if message.topic() else ()
            self._problem = broker_error(error, self._operation, partitions)
        return False

    def _note_out_of_range(
        self, partition: TopicPartition, offset: int | None, error: KafkaError
    ) -> None:
        """Reset the offset if the error is current, or report that it may not be reset.

        The client drops records on an unassign, but not this error, so the error may belong to an
        assignment that a seek or a loss has ended. An error at the expected offset is current. At
        any other offset (a truncation has none), the partition is assigned again: a current error
        recurs with the same offset or the expected offset.
        """
        if partition in self._staged or partition not in self._started:
            return
        self._apply_client_positions()
        expected = self._seen_position(partition).offset
        if partition in self._damaged and offset != expected:
            return
        has_recurred = partition in self._reassigned and self._reassigned[partition] == offset
        if offset != expected and not has_recurred:
            self._doubted[partition] = offset
            return
        self._reassigned.pop(partition, None)
        if self._reset == "error":
            self._out_of_range[partition] = error
            return
        text = error_text(error)
        logger.warning(
            "reading continues from the %s offset of %s: %s", self._reset, partition, text
        )
        self._staged[partition] = self._reset

    def _reassign_doubted(self) -> None:
        if not self._doubted:  # the usual case
            return
        self._apply_client_positions()
        self._assign({tp: self._seen_position(tp) for tp in self._doubted})
        self._reassigned.update(self._doubted)
        self._doubted.clear()

    def _note_unreadable(self, partition: TopicPartition, error: KafkaError) -> None:
        """Stop a partition at a record batch that cannot be read.

        librdkafka continues after this error, at an offset from the middle of the batch
        (`rd_kafka_buf_skip_to` in `rd_kafka_msgset_reader_v2`, 2.16). The records that it returns
        from there are dropped.
        """
        if not partition.topic:  # the client reports the reason in its callback
            logger.info("reading records: %s", error.str())
        elif partition in self._started and partition not in self._staged:
            self._unreadable.setdefault(partition, error)
            self._damaged.add(partition)

    def _rest_unreadable(self) -> None:
        """Stop partitions with an unreadable batch, and read them again after a while."""
        if self._unreadable:
            self._unassign(self._unreadable)
            self._resting.update(self._unreadable)
            self._read_again_at = self._clock() + _READ_AGAIN_S
        elif self._resting and self._clock() >= self._read_again_at:
            self._apply_client_positions()
            self._assign({tp: self._seen_position(tp) for tp in self._resting})
            self._resting.clear()

    def _lagging(self) -> dict[TopicPartition, int]:
        """Return the next offset of each partition whose log end is later, or unknown."""
        silent = self._withheld | self._damaged | self._out_of_range.keys()
        started = [tp for tp in self._started if tp not in silent]
        found = {}
        for tp, position in zip(
            started, self._consumer.position([to_confluent(tp) for tp in started]), strict=True
        ):
            at = from_committed(position) or self._started[tp]
            reached = max(at.offset, self._ends_reached.get(tp, 0))
            _, end = self._consumer.get_watermark_offsets(to_confluent(tp), cached=True)
            # The end is unknown before the first fetch, and while a broker throttles.
            if reached < end or end < 0:
                found[tp] = reached
        return found

    def _check_stalled(self) -> None:
        """Report partitions without records although their leaders have more.

        The end offsets are queried from the leaders, because an open transaction is not a stall.
        """
        suspects = self._stalled.check(self._lagging(), self._clock())
        if not suspects:
            return
        self._stalled.restart(suspects)
        ends = self._starts.ends(suspects, _LOOK_UP_S)
        lagging = self._lagging()
        stalled = {
            tp: lagging[tp]
            for tp in sorted(suspects & lagging.keys())
            if ends.get(tp, 0) > lagging[tp]
        }
        if stalled:
            why = self._errors.reason or NO_REASON
            problem = f"nothing was read for {STALLED_AFTER_S:g} s, and its log ends at "
            reasons = {
                tp: f"{tp} at offset {at}: {problem}{ends[tp]}" for tp, at in stalled.items()
            }
            self._problem = BrokerError(
                f"{self._operation.name} failed for {first_few(reasons.values())}: {why}",
                partitions=reasons,
            )

    def _restart_recreated(self) -> None:
        """Treat positions in the logs of recreated topics as out of range.

        The reset is reported even if it is allowed: records of the new log may have been returned
        already, and others may be missing.
        """
        recreated = self._recreated.check(self._started)
        if not recreated:
            return
        self._apply_client_positions()
        old = [tp for tp, is_old in recreated.items() if is_old and tp not in self._staged]
        reasons = {tp: f"{tp} at offset {self._seen_position(tp).offset}" for tp in recreated}
        topics = ", ".join(sorted({tp.topic for tp in recreated}))
        self._problem = BrokerError(
            f"{self._operation.name} found that {topics} was deleted and created again. Records of "
            f"the new log that were read in between may be returned again, others may be missing: "
            f"{first_few(reasons.values())}. Reading restarts according to 'auto.offset.reset', "
            "unless a new assignment has started it",
            partitions=reasons,
        )
        # After the error, which must not be lost if a signal handler raises.
        self._unassign(old)
        for tp in old:
            expected = self._seen_position(tp)
            self._forget([tp])
            if self._reset == "error":
                self._started[tp] = expected
                self._out_of_range[tp] = KafkaError(
                    OFFSET_RESET_FORBIDDEN, f"the topic of {tp} was created again"
                )
            else:
                self._staged[tp] = self._reset
        self._recreated.acknowledge()


def _known(
    positions: Iterable[confluent_kafka.TopicPartition],
) -> Iterator[tuple[TopicPartition, OffsetAndMetadata]]:
    """Yield the positions of the partitions that have returned a record."""
    for position in positions:
        at = from_committed(position)
        if at is not None:
            yield from_confluent(position), at


def _behind(record: Message) -> OffsetAndMetadata:
    return OffsetAndMetadata(next_offset(record.offset() or 0), leader_epoch=record.leader_epoch())

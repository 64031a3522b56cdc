"""The commits of one membership: send them in order, and track the group's committed offsets.

One request is in flight at a time, and the next one combines all offsets that arrive in between.
The client itself would retry a failed commit after newer ones, and overwrite a newer offset with an
older one. Must never commit a partition that is not owned: the broker checks only the member.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.commit_requests import (
    UnknownPartitions,
    oversized,
    split_requests,
)
from dagster_rebalance.core.model.errors import PartitionLostError
from dagster_rebalance.core.model.events import LostReason
from dagster_rebalance.core.model.offsets import is_same_commit
from dagster_rebalance.kafka.client.confluent import (
    from_committed,
    from_confluent,
    to_commit,
    to_confluent,
)
from dagster_rebalance.kafka.client.errors import (
    FENCED,
    FENCED_IN_HOLD,
    PARTITION_ERRORS,
    REQUEST_TOO_LARGE,
    TOPIC_ERRORS,
    UNKNOWN_TOPIC_IN_COMMIT,
    Operation,
    commit_error,
    kafka_error,
)
from dagster_rebalance.kafka.cluster import committed_offsets
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import confluent_kafka

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.member.session_view import SessionView


_EPOCH_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""How long to wait for the member's next epoch, which arrives with a heartbeat, as Java's consumer
does. In the classic protocol the caller receives `RebalanceInProgressError` and retries
(KIP-429)."""
_READ_BACK_LIMIT_S = 5.0
_LARGEST_SHARE = 64


@dataclass(frozen=True, slots=True)
class _Ticket:
    number: int
    partitions: frozenset[TopicPartition]
    refused: Mapping[TopicPartition, BrokerError]
    is_awaited: bool


@dataclass(slots=True)
class _Request:
    offsets: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)
    tickets: list[_Ticket] = field(default_factory=list)


class ReadRefusedError(Exception):
    """The broker refuses to report the committed offsets of the partitions in `errors`."""

    def __init__(self, errors: Mapping[TopicPartition, KafkaError]) -> None:
        super().__init__(*errors.values())
        self.errors = errors


class Commits:
    """Stores and reads committed offsets for a session. Used only by the session's thread."""

    def __init__(
        self, session: SessionView, settings: Settings, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._clock = clock
        self._group_id = settings.group_id
        self._unknown = UnknownPartitions()
        self._share = 1
        self._operation = Operation(f"commit in group '{settings.group_id}'", settings.brokers)
        self._known: dict[TopicPartition, OffsetAndMetadata | None] = {}
        self._next = _Request()

    def add(
        self,
        number: int,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        *,
        events_taken: int,
        is_awaited: bool,
    ) -> None:
        """Add offsets to the next request, under the number of a ticket.

        `events_taken` is the number of events that the caller had taken: it must not commit for an
        earlier assignment. `on_commit` is not called if the caller waits (`is_awaited`).
        """
        refused = {
            **oversized(offsets),
            **refusals(tp for tp in offsets if not self._session.owns(tp, events_taken)),
        }
        self._next.tickets.append(_Ticket(number, frozenset(offsets), refused, is_awaited))
        self._next.offsets.update(
            {tp: offset for tp, offset in offsets.items() if tp not in refused}
        )

    def send(self) -> None:
        """Send the next request, and enqueue the results.

        Waits without a limit (librdkafka fails the request after 46 s with a dead broker): an
        abandoned commit could be sent later under a newer generation, and overwrite a commit of the
        next owner.
        """
        request, self._next = self._next, _Request()
        if not request.tickets or self._session.end_reason is not None:
            return
        errors = self._store(request.offsets) if request.offsets else {}
        failed = self._commit_errors(errors)
        for ticket in request.tickets:
            ticket_failed = {
                **{tp: failed[tp] for tp in ticket.partitions if tp in failed},
                **ticket.refused,
            }
            result = CommitResult(ticket.partitions.difference(ticket_failed), ticket_failed)
            self._session.enqueue(CommitAnswered(ticket.number, result))
        if not all(ticket.is_awaited for ticket in request.tickets):
            self._call_user(request.offsets, errors)

    def _commit_errors(
        self, errors: Mapping[TopicPartition, KafkaError]
    ) -> dict[TopicPartition, BrokerError]:
        now, is_held = self._clock(), self._session.hold is not None
        unknown = {tp for tp, error in errors.items() if error.code() in UNKNOWN_TOPIC_IN_COMMIT}
        self._unknown.refused(unknown, now)
        return {
            tp: (self._unknown.gone(tp, now) if tp in unknown else None)
            or commit_error(error, self._operation, [tp], holding=is_held)
            for tp, error in errors.items()
        }

    def _call_user(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        errors: Mapping[TopicPartition, KafkaError],
    ) -> None:
        """Let `on_commit` be called once for each result: the client's partitions have no error.

        The client itself calls it only for asynchronous commits.
        """
        outcomes: dict[int, tuple[KafkaError | None, dict[TopicPartition, OffsetAndMetadata]]] = {}
        for tp, offset in offsets.items():
            error = errors.get(tp)
            outcomes.setdefault(error.code() if error else 0, (error, {}))[1][tp] = offset
        for error, partitions in outcomes.values():
            self._session.call_user("on_commit", error, _to_commit(partitions))

    def read(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offsets; raise `ReadRefusedError` if some are refused."""
        found, refused = self.look_up(partitions, timeout_s)
        if refused:
            raise ReadRefusedError(refused)
        return found

    def look_up(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata | None], dict[TopicPartition, KafkaError]]:
        """Return the group's committed offsets, and the errors of the refused partitions."""
        if not partitions:
            return {}, {}
        answers, waiting = committed_offsets.read(
            self._session.consumer, [to_confluent(tp) for tp in sorted(partitions)], timeout_s
        )
        refused = {from_confluent(tp): tp.error for tp in answers if tp.error is not None}
        refused |= dict.fromkeys(map(from_confluent, waiting), committed_offsets.OPEN_TRANSACTION)
        found = {from_confluent(tp): from_committed(tp) for tp in answers if tp.error is None}
        return found, refused

    def remember(self, found: Mapping[TopicPartition, OffsetAndMetadata | None]) -> None:
        """Record the group's committed offsets."""
        self._known.update(found)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the recorded offsets of partitions."""
        for tp in partitions:
            self._known.pop(tp, None)

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        """Drop all state of partitions that were released or lost."""
        self.forget(partitions)
        self._unknown.forget(partitions)

    def restore(
        self, partition: TopicPartition, stored: int, found: OffsetAndMetadata | None
    ) -> None:
        """Restore the commit of a partition after a broker stored a probe at its offset.

        The restored commit is this member's own or, without one, the commit that was found before.
        """
        own = self._known.get(partition) or found
        self.forget([partition])
        if own is not None and own.offset == stored:
            self._store({partition: own})

    def moved(
        self, found: Mapping[TopicPartition, OffsetAndMetadata | None]
    ) -> list[TopicPartition]:
        """Return the partitions where another member has committed.

        A missing commit does not prove another member: Kafka deletes the offsets together with
        their topic.
        """
        return [
            tp
            for tp, offset in found.items()
            if offset is not None
            and tp in self._known
            and not is_same_commit(self._known[tp], offset)
        ]

    def _store(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, KafkaError]:
        """Store offsets and return the errors. A failed commit may be stored without a response."""
        errors = self._commit(wanted)
        for pause_s in _EPOCH_PAUSES_S:
            late = {
                tp: wanted[tp]
                for tp, error in errors.items()
                if error.code() == KafkaError.STALE_MEMBER_EPOCH
            }
            if self._session.hold is not None or not late:
                break
            time.sleep(pause_s)
            errors = {tp: error for tp, error in errors.items() if tp not in late}
            errors |= self._commit(late)
        self.forget(errors)
        stored = {tp: offset for tp, offset in wanted.items() if tp not in errors}
        self._known.update(stored)
        self._unknown.forget(stored)
        # If the broker does not know the member, its partitions have been reassigned. The client
        # reports the loss some polls later, but not in a hold; no newer generation can arrive then.
        final = FENCED if self._session.hold is None else FENCED_IN_HOLD
        if any(error.code() in final for error in errors.values()):
            self._session.end(LostReason.FENCED)
        return errors

    def _commit(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, KafkaError]:
        """Send as many requests as the offsets need, one after another, and return the errors.

        Stops after a request that fails as a whole: the next request would fail, too, and slowly if
        the broker is dead.
        """
        errors: dict[TopicPartition, KafkaError] = {}
        whole: KafkaError | None = None
        for request in split_requests(wanted, self._group_id, self._share):
            if whole is None:
                failed = self._commit_once(request)
                errors |= failed
                whole = next(
                    (error for error in failed.values() if error.code() not in PARTITION_ERRORS),
                    None,
                )
            else:
                errors |= dict.fromkeys(request, whole)
        return errors

    def _commit_once(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, KafkaError]:
        try:
            answers = self._session.consumer.commit(offsets=_to_commit(wanted), asynchronous=False)
        except KafkaException as problem:
            error = kafka_error(problem)
            if len(wanted) > 1 and error.code() in PARTITION_ERRORS:
                return self._read_back(wanted, error)
            if error.code() in REQUEST_TOO_LARGE and self._can_divide(wanted):
                return self._commit(wanted)
            return dict.fromkeys(wanted, error)
        return {from_confluent(tp): tp.error for tp in answers or () if tp.error is not None}

    def _can_divide(self, wanted: Mapping[TopicPartition, OffsetAndMetadata]) -> bool:
        """Divide requests into smaller ones from now on; return False if that is impossible."""
        for share in (self._share, self._share * 4):
            parts = len(list(split_requests(wanted, self._group_id, share)))
            if parts > 1 and share <= _LARGEST_SHARE:
                self._share = share
                return True
        return False

    def _read_back(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata], error: KafkaError
    ) -> dict[TopicPartition, KafkaError]:
        """Return the errors of a request in which the broker has refused some partitions.

        The broker has stored the other partitions, but confluent-kafka raises the error of one
        partition and drops the results. The offsets are read back, and not committed again: a
        transaction of the caller may have moved one of them since.
        """
        try:
            found, errors = self.look_up(wanted, _READ_BACK_LIMIT_S)
        except KafkaException as problem:
            return dict.fromkeys(wanted, kafka_error(problem))
        refused = {tp for tp, at in found.items() if not is_same_commit(wanted[tp], at)}
        topics = {tp.topic for tp in refused}
        if error.code() in TOPIC_ERRORS or len(topics) == 1:
            return errors | dict.fromkeys(refused, error)
        # Each of several topics may have been refused for another reason.
        for topic in sorted(topics):
            errors |= self._commit_once({tp: wanted[tp] for tp in refused if tp.topic == topic})
        return errors


def refusals(partitions: Iterable[TopicPartition]) -> dict[TopicPartition, BrokerError]:
    """Return the errors of commits for partitions that are not assigned to this member."""
    why = "it is not assigned to this member; stop the work on it"
    return {
        tp: PartitionLostError(f"commit for {tp} refused: {why}", partitions={tp: "not assigned"})
        for tp in partitions
    }


def _to_commit(
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
) -> list[confluent_kafka.TopicPartition]:
    return [to_commit(tp, offset) for tp, offset in offsets.items()]

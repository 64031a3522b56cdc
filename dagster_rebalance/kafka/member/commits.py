"""The commits of one membership: what is stored, and what the group is known to have.

Owns the order of commits: one request at a time. What is asked for meanwhile goes out together when
the answer is there, in requests that the broker can store, and each partition has its own answer.
The client would send a commit that failed for a passing reason again, behind newer ones, and so
store an older offset over a newer one. Must never ask the broker for a partition that is not owned:
it checks who the member is, and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.commit_requests import UnknownPartitions, requests, too_long
from dagster_rebalance.core.model.errors import PartitionLostError
from dagster_rebalance.core.model.events import LostReason
from dagster_rebalance.core.model.offsets import is_same_commit
from dagster_rebalance.kafka.client.errors import (
    FENCED,
    FENCED_IN_A_HOLD,
    MAY_BE_TOO_LARGE,
    OF_A_PARTITION,
    OF_A_TOPIC,
    UNKNOWN_TO_COMMITS,
    Attempt,
    commit_error,
    kafka_error,
)
from dagster_rebalance.kafka.client.types import as_committed, ours, theirs, to_commit
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
"""How long to wait for a newer epoch of the member, which comes with the answer to a heartbeat.

Java's consumer waits for it, too. In the classic protocol nothing is waited for: the caller hears
that the group is stabilising, and tries again (KIP-429).
"""

_READ_BACK_LIMIT_S = 5.0
_LARGEST_SHARE = 64


@dataclass(frozen=True, slots=True)
class _Ticket:
    number: int
    partitions: frozenset[TopicPartition]
    refused: Mapping[TopicPartition, BrokerError]
    is_waited_for: bool


@dataclass(slots=True)
class _Request:
    offsets: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)
    tickets: list[_Ticket] = field(default_factory=list)


class ReadRefusedError(Exception):
    """The broker does not tell what the group has committed for some partitions.

    Attributes:
        errors: The error of each of them.
    """

    def __init__(self, errors: Mapping[TopicPartition, KafkaError]) -> None:
        super().__init__(*errors.values())
        self.errors = errors


class Commits:
    """Stores offsets for a session, and reads them. Only to be used by the session's thread."""

    def __init__(
        self, session: SessionView, settings: Settings, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._clock = clock
        self._group_id = settings.group_id
        self._unknown = UnknownPartitions()
        self._share = 1
        self._attempt = Attempt(f"commit in group '{settings.group_id}'", settings.brokers)
        self._seen: dict[TopicPartition, OffsetAndMetadata | None] = {}
        self._next = _Request()

    def add(
        self,
        number: int,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        *,
        heard: int,
        is_waited_for: bool,
    ) -> None:
        """Have offsets stored by the next request.

        Args:
            number: The ticket.
            offsets: Next offsets.
            heard: How many events the caller has taken: it must not commit for an earlier
                ownership.
            is_waited_for: Whether the caller waits for the answer, so that `on_commit` is not
                called.
        """
        refused = {
            **too_long(offsets),
            **refusals(tp for tp in offsets if not self._session.owns(tp, heard)),
        }
        self._next.tickets.append(_Ticket(number, frozenset(offsets), refused, is_waited_for))
        self._next.offsets.update(
            {tp: offset for tp, offset in offsets.items() if tp not in refused}
        )

    def send(self) -> None:
        """Store what was asked for, and tell the answers.

        Waited for without a limit (librdkafka fails it by itself, after 46 s with a dead broker): a
        commit that is abandoned here could still be sent later, under a newer generation, and
        overwrite what the next owner has committed.
        """
        request, self._next = self._next, _Request()
        if not request.tickets or self._session.ended is not None:
            return
        errors = self._stored(request.offsets) if request.offsets else {}
        failed = self._failed(errors)
        for ticket in request.tickets:
            mine = {
                **{tp: failed[tp] for tp in ticket.partitions if tp in failed},
                **ticket.refused,
            }
            self._session.tell(
                CommitAnswered(
                    ticket.number, CommitResult(ticket.partitions.difference(mine), mine)
                )
            )
        if not all(ticket.is_waited_for for ticket in request.tickets):
            self._call_user(request.offsets, errors)

    def _failed(
        self, errors: Mapping[TopicPartition, KafkaError]
    ) -> dict[TopicPartition, BrokerError]:
        now, is_held = self._clock(), self._session.hold is not None
        unknown = {tp for tp, error in errors.items() if error.code() in UNKNOWN_TO_COMMITS}
        self._unknown.refused(unknown, now)
        return {
            tp: (self._unknown.gone(tp, now) if tp in unknown else None)
            or commit_error(error, self._attempt, [tp], holding=is_held)
            for tp, error in errors.items()
        }

    def _call_user(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        errors: Mapping[TopicPartition, KafkaError],
    ) -> None:
        """Let `on_commit` be called for each outcome: the client's partitions carry no error.

        The client calls it for commits that are not waited for, and here all are.
        """
        outcomes: dict[int, tuple[KafkaError | None, dict[TopicPartition, OffsetAndMetadata]]] = {}
        for tp, offset in offsets.items():
            error = errors.get(tp)
            outcomes.setdefault(error.code() if error else 0, (error, {}))[1][tp] = offset
        for error, partitions in outcomes.values():
            self._session.call_user("on_commit", error, _list(partitions))

    def read(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed.

        Raises:
            KafkaException: No answer, or a refusal of the whole request.
            ReadRefusedError: Some partitions are refused.
        """
        found, refused = self.look_up(partitions, timeout_s)
        if refused:
            raise ReadRefusedError(refused)
        return found

    def look_up(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata | None], dict[TopicPartition, KafkaError]]:
        """What the group has committed, and the errors of the partitions that are refused.

        Raises:
            KafkaException: No answer, or a refusal of the whole request.
        """
        if not partitions:
            return {}, {}
        answers, waiting = committed_offsets.read(
            self._session.consumer, [theirs(tp) for tp in sorted(partitions)], timeout_s
        )
        refused = {ours(tp): tp.error for tp in answers if tp.error is not None}
        refused |= dict.fromkeys(map(ours, waiting), committed_offsets.OPEN_TRANSACTION)
        found = {ours(tp): as_committed(tp) for tp in answers if tp.error is None}
        return found, refused

    def remember(self, found: Mapping[TopicPartition, OffsetAndMetadata | None]) -> None:
        """The group is known to have this."""
        self._seen.update(found)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """It is not known any more what the group has for these."""
        for tp in partitions:
            self._seen.pop(tp, None)

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        """The partitions are not this member's any more."""
        self.forget(partitions)
        self._unknown.forget(partitions)

    def restore(
        self, partition: TopicPartition, stored: int, found: OffsetAndMetadata | None
    ) -> None:
        """Restore the commit of a partition after a probe was stored at its offset.

        The commit is this member's own or, without one, the commit that was found before.
        """
        own = self._seen.get(partition) or found
        self.forget([partition])
        if own is not None and own.offset == stored:
            self._stored({partition: own})

    def moved(
        self, found: Mapping[TopicPartition, OffsetAndMetadata | None]
    ) -> list[TopicPartition]:
        """Return the partitions where another member has committed.

        There the group's commit differs from the one that this member knew. A commit that is gone
        is no sign of another member: Kafka deletes the offsets of a topic together with it.
        """
        return [
            tp
            for tp, offset in found.items()
            if offset is not None
            and tp in self._seen
            and not is_same_commit(self._seen[tp], offset)
        ]

    def _stored(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, KafkaError]:
        """Store, and return what failed.

        What failed may have been stored, with only the answer lost.
        """
        errors = self._ask(wanted)
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
            errors |= self._ask(late)
        self.forget(errors)
        stored = {tp: offset for tp, offset in wanted.items() if tp not in errors}
        self._seen.update(stored)
        self._unknown.forget(stored)
        # A broker that does not know the member has given its partitions away. The client tells
        # that some polls later; in a hold it does not, and no newer generation can be on its way.
        final = FENCED if self._session.hold is None else FENCED_IN_A_HOLD
        if any(error.code() in final for error in errors.values()):
            self._session.end(LostReason.FENCED)
        return errors

    def _ask(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, KafkaError]:
        """Send as many requests as the offsets need, one after another; return what failed.

        A request that fails as a whole is the last one: the next one would fail, too, and a dead
        broker takes its time.
        """
        errors: dict[TopicPartition, KafkaError] = {}
        whole: KafkaError | None = None
        for request in requests(wanted, self._group_id, self._share):
            if whole is None:
                failed = self._ask_once(request)
                errors |= failed
                whole = next(
                    (error for error in failed.values() if error.code() not in OF_A_PARTITION), None
                )
            else:
                errors |= dict.fromkeys(request, whole)
        return errors

    def _ask_once(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, KafkaError]:
        try:
            answers = self._session.consumer.commit(offsets=_list(wanted), asynchronous=False)
        except KafkaException as problem:
            error = kafka_error(problem)
            if len(wanted) > 1 and error.code() in OF_A_PARTITION:
                return self._told_apart(wanted, error)
            if error.code() in MAY_BE_TOO_LARGE and self._divides(wanted):
                return self._ask(wanted)
            return dict.fromkeys(wanted, error)
        return {ours(tp): tp.error for tp in answers or () if tp.error is not None}

    def _divides(self, wanted: Mapping[TopicPartition, OffsetAndMetadata]) -> bool:
        """Whether smaller requests may be stored; they are all smaller from then on."""
        for share in (self._share, self._share * 4):
            parts = len(list(requests(wanted, self._group_id, share)))
            if parts > 1 and share <= _LARGEST_SHARE:
                self._share = share
                return True
        return False

    def _told_apart(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata], error: KafkaError
    ) -> dict[TopicPartition, KafkaError]:
        """Return what failed of a request in which the broker has refused some partitions.

        The broker has stored the others. confluent-kafka raises the error of one partition and
        drops the answers, so the offsets are read back. They are not sent again: a transaction of
        the caller's may have moved one of them since.
        """
        try:
            found, errors = self.look_up(wanted, _READ_BACK_LIMIT_S)
        except KafkaException as problem:
            return dict.fromkeys(wanted, kafka_error(problem))
        refused = {tp for tp, at in found.items() if not is_same_commit(wanted[tp], at)}
        topics = {tp.topic for tp in refused}
        if error.code() in OF_A_TOPIC or len(topics) == 1:
            return errors | dict.fromkeys(refused, error)
        # Of several topics, each may have been refused for a reason of its own.
        for topic in sorted(topics):
            errors |= self._ask_once({tp: wanted[tp] for tp in refused if tp.topic == topic})
        return errors


def refusals(partitions: Iterable[TopicPartition]) -> dict[TopicPartition, BrokerError]:
    """The errors of commits for partitions that are not this member's."""
    why = "it is not assigned to this member; stop the work on it"
    return {
        tp: PartitionLostError(f"commit for {tp} refused: {why}", partitions={tp: "not assigned"})
        for tp in partitions
    }


def _list(
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
) -> list[confluent_kafka.TopicPartition]:
    return [to_commit(tp, offset) for tp, offset in offsets.items()]

"""The commits of one membership: what is stored, what is on its way, and what the group is known to have.

Owns the order of commits: one request at a time. What is asked for meanwhile waits, and goes out as one request when the answer is there:
the client sends a commit that failed for a passing reason again, behind newer ones, and would store an older offset over a newer one.
Must never ask the broker for a partition that is not owned: it checks who the member is, and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.consumer.events import CommitAnswered, CommitResult, LostReason
from dagster_rebalance.consumer.kafka_errors import FENCED, FENCED_IN_A_HOLD, Attempt, commit_error, kafka_error
from dagster_rebalance.consumer.translation import as_committed, ours, theirs, to_commit
from dagster_rebalance.core.errors import PartitionLostError
from dagster_rebalance.core.partition import is_same_commit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import confluent_kafka

    from dagster_rebalance.consumer.session import Hold, Session
    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.errors import BrokerError
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition


_EPOCH_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""A newer epoch of the member is on its way to the client with the answer to a heartbeat. Java's consumer waits for it, too."""
NOBODYS_TICKET = 0
"""The number of a commit that nobody has asked for."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    number: int
    partitions: frozenset[TopicPartition]
    refused: dict[TopicPartition, BrokerError]


@dataclass(slots=True)
class _Request:
    offsets: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)
    tickets: list[_Ticket] = field(default_factory=list)
    hold: Hold | None = None
    losses: int = 0


class Commits:
    """Stores offsets for a session, and reads them."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._attempt = Attempt(f"commit in group '{settings.group_id}'", settings.brokers)
        self._seen: dict[TopicPartition, OffsetAndMetadata | None] = {}
        self._sent: _Request | None = None
        self._next = _Request()
        self._losses = 0

    @property
    def pending(self) -> bool:
        """Whether an answer is waited for."""
        return self._sent is not None

    def store(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store now. Nothing may be pending.

        Waited for without a limit (librdkafka gives up by itself, after 46 s with a dead broker): a commit that was given up here could
        still be sent later, under a newer generation, and overwrite what the next owner has committed.
        """
        refused = _refusals(offsets.keys() - self._session.owned)
        wanted = {tp: offset for tp, offset in offsets.items() if tp not in refused}
        errors = self._ask(wanted) if wanted else {}
        for pause_s in _EPOCH_PAUSES_S:
            if self._session.hold is not None or not any(error.code() == KafkaError.STALE_MEMBER_EPOCH for error in errors.values()):
                break
            time.sleep(pause_s)
            errors = self._ask(wanted)
        failed = {**refused, **self._answered(wanted, errors, holding=self._session.hold is not None)}
        self._end_if_unknown(errors)
        return CommitResult(frozenset(offsets).difference(failed), failed)

    def _ask(self, wanted: Mapping[TopicPartition, OffsetAndMetadata]) -> dict[TopicPartition, KafkaError]:
        """Send one request, wait for its answer, and return what failed."""
        try:
            answers = self._session.consumer.commit(offsets=_list(wanted), asynchronous=False)
        except KafkaException as problem:
            return dict.fromkeys(wanted, kafka_error(problem))
        return {ours(tp): tp.error for tp in answers or () if tp.error is not None}

    def begin(self, number: int, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Store without waiting; the session tells the answer."""
        _list(offsets)  # a value that the client does not take is refused before anything waits for its answer
        refused = _refusals(offsets.keys() - self._session.owned)
        self._next.tickets.append(_Ticket(number, frozenset(offsets), refused))
        self._next.offsets.update({tp: offset for tp, offset in offsets.items() if tp not in refused})
        self.forget(self._next.offsets)
        self._send_next()

    def on_commit(self, error: KafkaError | None, partitions: list[confluent_kafka.TopicPartition]) -> None:
        """The client has the answer. It calls this for requests that were not waited for, and for no others."""
        if self._sent is not None:
            reasons = {ours(tp): tp.error or error for tp in partitions}
            self._finish({tp: reason for tp, reason in reasons.items() if reason is not None})
            self._send_next()

    def lose(self, partitions: Collection[TopicPartition]) -> None:
        """What waits for these must not be sent any more, not even if they are assigned again."""
        self._losses += 1
        self.forget(partitions)
        for tp in partitions:
            self._next.offsets.pop(tp, None)
        for ticket in self._next.tickets:
            ticket.refused.update(_refusals(ticket.partitions.intersection(partitions)))

    def give_up(self) -> None:
        """The membership has ended before the answers: nobody is going to have them."""
        unknown = "the membership ended before the answer, so it is not known whether it was stored"
        unanswered = [self._sent, self._next] if self._sent else []
        self._sent, self._next = None, _Request()
        for request in unanswered:
            lost = {tp: PartitionLostError(f"commit for {tp}: {unknown}", partitions={tp: unknown}) for tp in request.offsets}
            self._tell(request, lost)

    def read(self, partitions: Collection[TopicPartition], timeout_s: float) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed.

        Raises:
            KafkaException: No answer, or a refusal.
        """
        if not partitions:
            return {}
        found = self._session.consumer.committed([theirs(tp) for tp in sorted(partitions)], timeout=timeout_s)
        for tp in found:
            if tp.error is not None:
                raise KafkaException(tp.error)
        return {ours(tp): as_committed(tp) for tp in found}

    def remember(self, found: Mapping[TopicPartition, OffsetAndMetadata | None]) -> None:
        """The group is known to have this, save where a commit is on its way."""
        self._seen.update(found)
        self.forget(self._under_way())

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """It is not known any more what the group has for these."""
        for tp in partitions:
            self._seen.pop(tp, None)

    def restore(self, stored: Mapping[TopicPartition, int], found: Mapping[TopicPartition, OffsetAndMetadata | None]) -> None:
        """A probe was stored, at these offsets: store again what was there, this member's own commit or what was `found` before it."""
        own = {tp: self._seen.get(tp) or found.get(tp) for tp in stored.keys() - self._under_way()}
        self.forget(stored)
        again = {tp: offset for tp, offset in own.items() if offset and offset.offset == stored[tp]}
        if again:
            self.begin(NOBODYS_TICKET, again)

    def moved(self, found: Mapping[TopicPartition, OffsetAndMetadata | None]) -> list[TopicPartition]:
        """Where the group has something else than it was known to have: somebody else has committed."""
        return [tp for tp, offset in found.items() if tp in self._seen and not is_same_commit(self._seen[tp], offset)]

    def _under_way(self) -> frozenset[TopicPartition]:
        """The partitions of which a commit waits for its answer, or to be sent."""
        return frozenset([*self._sent.offsets, *self._next.offsets]) if self._sent else frozenset()

    def _send_next(self) -> None:
        while self._sent is None and self._next.tickets:
            request, self._next = self._next, _Request()
            request.hold, request.losses = self._session.hold, self._losses
            self._sent = request
            if not request.offsets:
                self._finish({})
                continue
            try:
                self._session.consumer.commit(offsets=_list(request.offsets), asynchronous=True)
            except KafkaException as problem:
                self._finish(dict.fromkeys(request.offsets, kafka_error(problem)))

    def _finish(self, errors: Mapping[TopicPartition, KafkaError]) -> None:
        request, self._sent = self._sent, None
        if request is not None:
            # A generation that was stale before the hold began says nothing about the hold.
            holding = request.hold is not None and request.hold is self._session.hold
            self._tell(request, self._answered(request.offsets, errors, holding=holding))
            if request.losses == self._losses:
                self._end_if_unknown(errors)
            self.forget(self._next.offsets)

    def _tell(self, request: _Request, failed: Mapping[TopicPartition, BrokerError]) -> None:
        for ticket in request.tickets:
            mine = {**{tp: failed[tp] for tp in ticket.partitions if tp in failed}, **ticket.refused}
            self._session.tell(CommitAnswered(ticket.number, CommitResult(ticket.partitions.difference(mine), mine)))

    def _answered(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], errors: Mapping[TopicPartition, KafkaError], *, holding: bool
    ) -> dict[TopicPartition, BrokerError]:
        # What failed may have been stored all the same, with only the answer lost.
        self.forget(errors)
        self._seen.update({tp: offset for tp, offset in offsets.items() if tp not in errors})
        if holding and any(error.code() in FENCED_IN_A_HOLD for error in errors.values()):
            self._session.ended = self._session.ended or LostReason.FENCED
        return {tp: commit_error(error, self._attempt, [tp], holding=holding) for tp, error in errors.items()}

    def _end_if_unknown(self, errors: Mapping[TopicPartition, KafkaError]) -> None:
        """A broker that does not know the member has given its partitions away; the client tells that some polls later."""
        if any(error.code() in FENCED for error in errors.values()):
            self._session.ended = self._session.ended or LostReason.FENCED


def _refusals(partitions: Iterable[TopicPartition]) -> dict[TopicPartition, BrokerError]:
    why = "it is not assigned to this member; stop the work on it"
    return {tp: PartitionLostError(f"commit for {tp} refused: {why}", partitions={tp: "not assigned"}) for tp in partitions}


def _list(offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> list[confluent_kafka.TopicPartition]:
    return [to_commit(tp, offset) for tp, offset in offsets.items()]

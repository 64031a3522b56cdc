"""The commits of one membership: what is stored, and what the group is known to have.

Owns the order of commits: one request at a time. What is asked for meanwhile goes out as one
request when the answer is there. The client would send a commit that failed for a passing reason
again, behind newer ones, and so store an older offset over a newer one. Must never ask the broker
for a partition that is not owned: it checks who the member is, and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.consumer.events import CommitAnswered, CommitResult
from dagster_rebalance.consumer.kafka_errors import (
    FENCED,
    FENCED_IN_A_HOLD,
    Attempt,
    commit_error,
    kafka_error,
)
from dagster_rebalance.consumer.translation import as_committed, ours, theirs, to_commit
from dagster_rebalance.core.errors import PartitionLostError
from dagster_rebalance.core.events import LostReason
from dagster_rebalance.core.partition import is_same_commit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import confluent_kafka

    from dagster_rebalance.consumer.session_view import SessionView
    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.errors import BrokerError
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition


_EPOCH_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""How long to wait for a newer epoch of the member, which comes with the answer to a heartbeat.

Java's consumer waits for it, too. In the classic protocol nothing is waited for: the caller hears
that the group is stabilising, and tries again (KIP-429).
"""


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


class Commits:
    """Stores offsets for a session, and reads them. Only to be used by the session's thread."""

    def __init__(self, session: SessionView, settings: Settings) -> None:
        self._session = session
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
        refused = refusals(tp for tp in offsets if not self._session.owns(tp, heard))
        self._next.tickets.append(_Ticket(number, frozenset(offsets), refused, is_waited_for))
        self._next.offsets.update(
            {tp: offset for tp, offset in offsets.items() if tp not in refused}
        )

    def send(self) -> None:
        """Store what was asked for, in one request, and tell the answers.

        Waited for without a limit (librdkafka fails it by itself, after 46 s with a dead broker): a
        commit that is abandoned here could still be sent later, under a newer generation, and
        overwrite what the next owner has committed.
        """
        request, self._next = self._next, _Request()
        if not request.tickets or self._session.ended is not None:
            return
        answers, errors = self._stored(request.offsets) if request.offsets else ([], {})
        is_held = self._session.hold is not None
        failed = {
            tp: commit_error(error, self._attempt, [tp], holding=is_held)
            for tp, error in errors.items()
        }
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
        if request.offsets and not all(ticket.is_waited_for for ticket in request.tickets):
            # The client calls it for commits that nobody waits for; here the session's thread waits
            # for all.
            is_refused = len(errors) == len(request.offsets)
            self._session.call_user(
                "on_commit", next(iter(errors.values())) if is_refused else None, answers
            )

    def read(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed.

        Raises:
            KafkaException: No answer, or a refusal.
        """
        if not partitions:
            return {}
        found = self._session.consumer.committed(
            [theirs(tp) for tp in sorted(partitions)], timeout=timeout_s
        )
        for tp in found:
            if tp.error is not None:
                raise KafkaException(tp.error)
        return {ours(tp): as_committed(tp) for tp in found}

    def remember(self, found: Mapping[TopicPartition, OffsetAndMetadata | None]) -> None:
        """The group is known to have this."""
        self._seen.update(found)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """It is not known any more what the group has for these."""
        for tp in partitions:
            self._seen.pop(tp, None)

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
        """Return the partitions where somebody else has committed.

        There the group's commit differs from the one that this member knew.
        """
        return [
            tp
            for tp, offset in found.items()
            if tp in self._seen and not is_same_commit(self._seen[tp], offset)
        ]

    def _stored(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> tuple[list[confluent_kafka.TopicPartition], dict[TopicPartition, KafkaError]]:
        """Store, and return the answers and what failed.

        What failed may have been stored, with only the answer lost.
        """
        answers, errors = self._ask(wanted)
        for pause_s in _EPOCH_PAUSES_S:
            is_late = any(
                error.code() == KafkaError.STALE_MEMBER_EPOCH for error in errors.values()
            )
            if self._session.hold is not None or not is_late:
                break
            time.sleep(pause_s)
            answers, errors = self._ask(wanted)
        self.forget(errors)
        self._seen.update({tp: offset for tp, offset in wanted.items() if tp not in errors})
        # A broker that does not know the member has given its partitions away. The client tells
        # that some polls later; in a hold it does not, and no newer generation can be on its way.
        final = FENCED if self._session.hold is None else FENCED_IN_A_HOLD
        if any(error.code() in final for error in errors.values()):
            self._session.end(LostReason.FENCED)
        return answers, errors

    def _ask(
        self, wanted: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> tuple[list[confluent_kafka.TopicPartition], dict[TopicPartition, KafkaError]]:
        """Send one request and wait for its answer."""
        sent = _list(wanted)
        try:
            answers = self._session.consumer.commit(offsets=sent, asynchronous=False) or sent
        except KafkaException as problem:
            return sent, dict.fromkeys(wanted, kafka_error(problem))
        return answers, {ours(tp): tp.error for tp in answers if tp.error is not None}


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

"""Looks at a consumer group from outside, and moves its committed offsets.

Owns what only somebody who is no member may ask or do. Kafka moves the offsets of a group without
members only. Not for members: librdkafka 2.16 aborts the process when the coordinator goes away
while it describes a group.
"""

from __future__ import annotations

import time
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
)
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import is_same_commit, named
from dagster_rebalance.core.model.printable import shown
from dagster_rebalance.core.reporting.group_status import GroupMember
from dagster_rebalance.kafka.client.defaults import ClientKind
from dagster_rebalance.kafka.client.errors import (
    COORDINATOR_MOVES,
    TROUBLES_KEPT,
    Attempt,
    answered,
    broker_error,
    cause_among,
    configuration_error,
    kafka_error,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.types import as_committed, ours, theirs, to_commit
from dagster_rebalance.kafka.cluster import committed_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from confluent_kafka.admin import ConsumerGroupDescription, MemberAssignment

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings

_Answer = TypeVar("_Answer")
_PAUSE_S = 0.2
_HAS_MEMBERS = {
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
}
"""What Kafka says then depends on the protocol, and on what the group is about."""


class GroupAdmin:
    """Looks at one group, and moves its offsets. It connects with the first call.

    Args:
        settings: Validated settings; the group and those about the connection are used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._troubles: deque[KafkaError] = deque(maxlen=TROUBLES_KEPT)

    def members(self, timeout_s: float = 10.0) -> tuple[GroupMember, ...]:
        """The members of the group; none of a group that Kafka does not know.

        Raises:
            BrokerError: Kafka did not answer, or refused.
        """
        group_id = self._settings.group_id

        def ask(limit_s: float) -> ConsumerGroupDescription:
            asked = self._admin.describe_consumer_groups([group_id], request_timeout=limit_s)
            described: ConsumerGroupDescription = asked[group_id].result()
            return described

        try:
            found = self._answer(ask, timeout_s)
        except KafkaException as problem:
            if kafka_error(problem).code() == KafkaError.GROUP_ID_NOT_FOUND:
                return ()
            raise self._error(problem, f"describing group '{group_id}'") from problem
        if found.state is ConsumerGroupState.DEAD:
            return ()
        return tuple(
            GroupMember(
                member.member_id,
                shown(f"{member.client_id}@{member.host.removeprefix('/')}"),
                _partitions(member.assignment),
                _partitions(member.target_assignment),
            )
            for member in found.members
        )

    def move(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        *,
        shown: Mapping[TopicPartition, OffsetAndMetadata | None],
        timeout_s: float = 10.0,
    ) -> None:
        """Store committed offsets in the name of nobody.

        Args:
            offsets: What is to be stored.
            shown: What must be stored before: what the person has seen who moves the offsets.
                Kafka has no conditional write, so a commit in the milliseconds between the two
                requests is overwritten.
            timeout_s: How long Kafka may take for each of the two, in seconds.

        Raises:
            BrokerError: Something else is stored than was shown, and nothing was moved; the group
                has members; or Kafka did not answer or refused. Of several partitions, some may be
                stored in the last two cases.
        """
        group_id = self._settings.group_id
        found = self._committed(offsets, timeout_s)
        changed = [p for p in offsets if not is_same_commit(found[p], shown[p])]
        if changed:
            msg = (
                f"nothing was moved: what group '{group_id}' has committed for {named(changed)} "
                "has changed since it was shown. Somebody else commits to this group, or has just "
                "moved its offsets: run the command again to see what is there now"
            )
            raise BrokerError(msg)
        wanted = ConsumerGroupTopicPartitions(
            group_id, [to_commit(partition, offset) for partition, offset in offsets.items()]
        )

        def ask(limit_s: float) -> None:
            asked = self._admin.alter_consumer_group_offsets([wanted], request_timeout=limit_s)
            for partition in asked[group_id].result().topic_partitions:
                if partition.error is not None:
                    raise KafkaException(partition.error)

        try:
            self._answer(ask, timeout_s)
        except KafkaException as problem:
            if kafka_error(problem).code() in _HAS_MEMBERS:
                msg = f"the offsets of group '{group_id}' were not moved: it has members again"
                raise BrokerError(msg) from problem
            raise self._error(problem, f"moving the offsets of group '{group_id}'") from problem

    def _committed(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        group_id = self._settings.group_id
        wanted = list(map(theirs, partitions))
        # A consumer that never joins, and not list_consumer_group_offsets: librdkafka 2.16 crashes
        # there while the coordinator moves, because it looks it up again for a membership that such
        # a client does not have.
        reader = made(
            Consumer,
            {
                **self._settings.connection(ClientKind.OFFSET_READER),
                "error_cb": self._troubles.append,
            },
        )

        def ask(limit_s: float) -> dict[TopicPartition, OffsetAndMetadata | None]:
            try:
                answers, waiting = committed_offsets.read(reader, wanted, limit_s)
            except KafkaException:
                reader.poll(0)  # the client tells why in its callback
                raise
            if waiting:
                raise KafkaException(committed_offsets.OPEN_TRANSACTION)
            found = {}
            for partition in answers:
                if partition.error is not None:
                    raise KafkaException(partition.error)
                found[ours(partition)] = as_committed(partition)
            return found

        try:
            return self._answer(ask, timeout_s)
        except KafkaException as problem:
            raise self._error(problem, f"reading the offsets of group '{group_id}'") from problem
        finally:
            reader.close()

    def _answer(self, ask: Callable[[float], _Answer], timeout_s: float) -> _Answer:
        """Ask, and ask again while the coordinator moves.

        Raises:
            KafkaException: No answer, or an error.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return answered(ask, max(deadline - time.monotonic(), _PAUSE_S), self._cause)
            except KafkaException as problem:
                is_passing = kafka_error(problem).code() in COORDINATOR_MOVES
                if not is_passing or time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _error(self, problem: KafkaException, doing: str) -> BrokerError:
        attempt = Attempt(doing, self._settings.brokers)
        return broker_error(self._cause(kafka_error(problem)), attempt)

    def _cause(self, error: KafkaError) -> KafkaError:
        """The reason behind a time-out."""
        self._admin.poll(0)
        return cause_among(self._troubles, error)

    @cached_property
    def _admin(self) -> AdminClient:
        config: dict[str, Any] = {**self._settings.connection(), "error_cb": self._troubles.append}
        try:
            return AdminClient(config)
        except (KafkaException, ValueError, TypeError) as problem:
            raise configuration_error(problem) from None


def _partitions(assignment: MemberAssignment | None) -> frozenset[TopicPartition]:
    return frozenset(map(ours, assignment.topic_partitions if assignment else ()))

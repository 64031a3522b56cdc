"""Describe a consumer group from outside, and move its committed offsets.

Kafka moves the offsets only of a group without members. Must never be used by a member: librdkafka
2.16 aborts the process if the coordinator disconnects while it describes a group.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
)

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import is_same_commit, names_of
from dagster_rebalance.core.model.printable import escaped as printable
from dagster_rebalance.core.reporting.group_status import GroupMember
from dagster_rebalance.kafka.client.confluent import (
    create_client,
    from_committed,
    from_confluent,
    to_commit,
    to_confluent,
)
from dagster_rebalance.kafka.client.defaults import ClientKind
from dagster_rebalance.kafka.client.errors import (
    COORDINATOR_MOVES,
    NOT_ANSWERED,
    NOT_CONNECTED,
    REFUSALS,
    kafka_error,
    with_timeout,
)
from dagster_rebalance.kafka.cluster import committed_offsets
from dagster_rebalance.kafka.cluster.admin_connection import AdminConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from confluent_kafka import TopicPartition as ConfluentPartition
    from confluent_kafka.admin import ConsumerGroupDescription, MemberAssignment

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition

_Answer = TypeVar("_Answer")
_PAUSE_S = 0.2
_STEP_S = 1.0
_COORDINATOR_AWAY = COORDINATOR_MOVES | {NOT_CONNECTED}
_HAS_MEMBERS = {
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
}
"""Errors of a group with members. They depend on the protocol and on the state of the group."""


class GroupAdmin(AdminConnection):
    """Describes one group and moves its offsets. Connects with the first call."""

    def members(self, timeout_s: float = 10.0) -> tuple[GroupMember, ...]:
        """Return the members of the group; an unknown group has none."""
        group_id = self._settings.group_id

        def describe(limit_s: float) -> ConsumerGroupDescription:
            answers = self._admin.describe_consumer_groups([group_id], request_timeout=limit_s)
            description: ConsumerGroupDescription = self._result(answers[group_id])
            return description

        try:
            group = self._retried(describe, timeout_s)
        except KafkaException as problem:
            error = kafka_error(problem)
            if error.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return ()
            raise self._error(error, f"describing group '{group_id}'") from problem
        if group.state is ConsumerGroupState.DEAD:
            return ()
        return tuple(
            GroupMember(
                member.member_id,
                printable(f"{member.client_id}@{member.host.removeprefix('/')}"),
                _partitions(member.assignment),
                _partitions(member.target_assignment),
            )
            for member in group.members
        )

    def move(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        *,
        shown: Mapping[TopicPartition, OffsetAndMetadata | None],
        timeout_s: float = 10.0,
    ) -> None:
        """Store committed offsets for a group without members.

        Kafka has no conditional write, so a commit in the milliseconds between the two requests is
        overwritten.

        `shown` has the offsets that the operator has seen: they must still be stored.
        `timeout_s` limits each of the two requests.

        Raises:
            BrokerError: Kafka stores other offsets than `shown`, so nothing was moved; the group
                has members; or Kafka did not answer or refused. In the last two cases, the offsets
                of some partitions may have been moved.
        """
        group_id = self._settings.group_id
        found = self._committed(offsets, timeout_s)
        changed = [p for p in offsets if not is_same_commit(found[p], shown[p])]
        if changed:
            msg = (
                f"nothing was moved: the committed offset of group '{group_id}' for "
                f"{names_of(changed)} has changed since it was shown. Another client commits to "
                "this group, or has just moved its offsets: run the command again to see the "
                "current offsets"
            )
            raise BrokerError(msg)
        request = ConsumerGroupTopicPartitions(
            group_id, [to_commit(partition, offset) for partition, offset in offsets.items()]
        )

        def alter(limit_s: float) -> None:
            answers = self._admin.alter_consumer_group_offsets([request], request_timeout=limit_s)
            for partition in self._result(answers[group_id]).topic_partitions:
                if partition.error is not None:
                    raise KafkaException(partition.error)

        try:
            self._retried(alter, timeout_s)
        except KafkaException as problem:
            error = kafka_error(problem)
            if error.code() in _HAS_MEMBERS:
                msg = f"the offsets of group '{group_id}' were not moved: it has members again"
                raise BrokerError(msg) from problem
            raise self._error(error, f"moving the offsets of group '{group_id}'") from problem

    def _committed(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        group_id = self._settings.group_id
        wanted = list(map(to_confluent, partitions))
        # A consumer that never joins, because list_consumer_group_offsets crashes librdkafka 2.16
        # while the coordinator moves: it looks the coordinator up for a membership that such a
        # client does not have.
        config = self._settings.connection(ClientKind.OFFSET_READER)
        reader = create_client(Consumer, {**config, "error_cb": self._recent_errors.append})

        def request(
            limit_s: float,
        ) -> tuple[list[ConfluentPartition], list[ConfluentPartition]]:
            try:
                return committed_offsets.read(reader, wanted, limit_s)
            except KafkaException:
                reader.poll(0)  # the client reports the reason in its callback
                raise

        def read(limit_s: float) -> dict[TopicPartition, OffsetAndMetadata | None]:
            answers, waiting = with_timeout(request, limit_s, self._root_cause)
            errors = [partition.error for partition in answers if partition.error is not None]
            if waiting or errors:
                raise KafkaException(committed_offsets.OPEN_TRANSACTION if waiting else errors[0])
            return {from_confluent(tp): from_committed(tp) for tp in answers}

        try:
            return self._retried(read, timeout_s)
        except KafkaException as problem:
            operation = f"reading the offsets of group '{group_id}'"
            raise self._error(kafka_error(problem), operation) from problem
        finally:
            reader.close()

    def _result(self, answer: Future[_Answer]) -> _Answer:
        """Wait for the result of a request, but stop after a second if Kafka refused the client.

        A request without a response leaves a coordinator lookup in its client. librdkafka 2.16
        aborts the process if a broker becomes available later, so the client is dropped at once.
        """
        while not wait([answer], _STEP_S).done:
            error = self._root_cause(KafkaError(NOT_ANSWERED))
            if error.code() in REFUSALS:
                self._drop_client()
                raise KafkaException(error)
        try:
            return answer.result()
        except KafkaException as problem:
            if kafka_error(problem).code() < 0:  # not an answer of Kafka
                self._drop_client()
            raise

    def _retried(self, call: Callable[[float], _Answer], timeout_s: float) -> _Answer:
        """Call a function, and retry while the coordinator moves or restarts."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), _PAUSE_S)
                return call(left_s)
            except KafkaException as problem:
                is_moving = kafka_error(problem).code() in _COORDINATOR_AWAY
                if not is_moving or time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE_S)


def _partitions(assignment: MemberAssignment | None) -> frozenset[TopicPartition]:
    return frozenset(map(from_confluent, assignment.topic_partitions if assignment else ()))

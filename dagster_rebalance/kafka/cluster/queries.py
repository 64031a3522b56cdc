# ruff: noqa: D102 - `ClusterView` documents them
"""Read-only queries to the cluster: offsets, topics, and checks of settings and rights.

Retries transient errors, and queries many partitions in one request. Must never use the member's
client: a list of all topics makes that client compare its subscription, which during a hold can
supersede the hold.
"""

from __future__ import annotations

import logging
import re
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka.admin import AclOperation, ListOffsetsResultInfo, OffsetSpec

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import LogPosition
from dagster_rebalance.kafka.client.confluent import to_confluent
from dagster_rebalance.kafka.client.errors import (
    NO_LEADER_KNOWN,
    NOT_ANSWERED,
    RETRIABLE,
    UNKNOWN_TOPIC,
    broker_error,
    error_text,
    is_topic_error,
    kafka_error,
    with_timeout,
)
from dagster_rebalance.kafka.cluster.admin_connection import AdminConnection
from dagster_rebalance.kafka.cluster.log_ends import LogEnds
from dagster_rebalance.kafka.cluster.truncation import find_truncated
from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp, PartitionInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from confluent_kafka.admin import TopicMetadata

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.1
_MOST_AT_ONCE = 100
"""Partitions in a request for offsets: one with 10,000 takes seconds of CPU, and 500 take twice the
CPU of five requests."""
_NEW_TOPIC_GRACE_S = 2.0
_LEADER_PATIENCE_S = 2.0
"""How long to wait for a leader before it is looked up again: the client keeps sending requests to
a former leader."""
_TOPIC_IDS_TIMEOUT_S = 5.0
_CONTROLLER_PATIENCE_S = 0.25
_LONGEST_CONTROLLER_PATIENCE_S = 1.0
"""Descriptions come from the node that the metadata names as controller, any broker with KRaft. If
that node is unavailable, the client tries no other one: it reconnects without a pause (2.16: half a
core) until the timeout. The metadata contains a stopped node for some seconds, so the first limit
is short and new metadata follows; the second one is long enough for a slow login."""
_IDS_COUNT_FOR, _IDS_COUNT_AT_MOST_S = 10, 3.0
"""Ids of topics count for this many times the duration of their read: the description of a topic
with 10,000 partitions may take a second, and a member restores its partitions in parts."""
_MAYBE_NEW = UNKNOWN_TOPIC | {NO_LEADER_KNOWN}


class Cluster(AdminConnection):
    """The brokers (implements `ClusterView`)."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(settings)
        self._clock = clock
        self._pause = pause
        self._ends = LogEnds(settings, clock, reads_committed=settings.reads_committed)
        self._marks = LogEnds(settings, clock, reads_committed=False)
        self._ids_of: frozenset[str] = frozenset()
        self._known_ids: dict[str, str] = {}
        self._ids_until = float("-inf")

    def beginning_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        found = self._many(self._ends, partitions, timeout_s, OFFSET_BEGINNING)
        missing = [tp for tp in partitions if tp not in found]
        return found | self._offset_numbers(missing, OffsetSpec.earliest(), timeout_s)

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the offsets of the next records, in one request.

        With `read_committed` and an open transaction, this is the transaction's first offset.
        """
        return self._offset_numbers(partitions, OffsetSpec.latest(), timeout_s)

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        found = self._many(self._marks, partitions, timeout_s, OFFSET_END)
        missing = [tp for tp in partitions if tp not in found]
        level = IsolationLevel.READ_UNCOMMITTED
        return found | self._offset_numbers(missing, OffsetSpec.latest(), timeout_s, level)

    def _many(
        self,
        reader: LogEnds,
        partitions: Collection[TopicPartition],
        timeout_s: float,
        at: int,
    ) -> dict[TopicPartition, int]:
        """Return the offsets of many partitions that a reader of log ends finds."""
        if len(partitions) <= _MOST_AT_ONCE:
            return {}
        found = reader.read(partitions, timeout_s / 3, at)
        return {tp: position.offset for tp, position in found.items()}

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        started_at = self._clock()
        ends = self._ends.read(partitions, timeout_s / 3)
        if len(ends) < len(partitions):
            missing = [tp for tp in partitions if tp not in ends]
            left_s = max(timeout_s / 3, started_at + timeout_s - self._clock())
            found = self._offsets(dict.fromkeys(missing, OffsetSpec.latest()), left_s)
            ends |= {
                tp: LogPosition(at.offset, at.leader_epoch if (at.leader_epoch or 0) >= 0 else None)
                for tp, at in found.items()
            }
        return ends

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        found = self._offsets(
            {tp: OffsetSpec.for_timestamp(at) for tp, at in timestamps.items()}, timeout_s
        )
        return {
            tp: OffsetAndTimestamp(answer.offset, answer.timestamp) if answer.offset >= 0 else None
            for tp, answer in found.items()
        }

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        return find_truncated(self._settings, positions, timeout_s, self._clock)

    def topic_ids(self, topics: Collection[str], timeout_s: float = 10.0) -> dict[str, str]:
        """Return the known ids of topics. Brokers before Kafka 2.8 have no topic ids.

        If a read takes long, its ids count for a while.
        """
        began_at = self._clock()
        if began_at >= self._ids_until or not self._ids_of.issuperset(topics):
            self._known_ids = self._ids(self._descriptions(topics, timeout_s))
            now = self._clock()
            self._ids_of = frozenset(topics)
            self._ids_until = now + min(_IDS_COUNT_FOR * (now - began_at), _IDS_COUNT_AT_MOST_S)
        return {topic: self._known_ids[topic] for topic in topics if topic in self._known_ids}

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        answers = self._admin.describe_topics(
            TopicCollection(sorted(topics)), request_timeout=_TOPIC_IDS_TIMEOUT_S
        )

        def result() -> dict[str, str] | None:
            if not all(future.done() for future in answers.values()):
                return None
            try:
                return self._ids(answers)
            except BrokerError as problem:
                logger.info("the ids of topics are not known: %s", problem)
                return {}

        return result

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        described: dict[str, list[PartitionInfo]] = {}
        for name, topic in self._topics(timeout_s).items():
            if topic.error is None:
                described[name] = _partitions_of(name, topic)
            else:
                logger.info("topic '%s' is left out: %s", name, error_text(topic.error))
        return described

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        # A request for one topic would create it on a broker with auto.create.topics.enable.
        found = _partitions_of(topic, self._metadata(topic, self._topics(timeout_s)))
        return sorted(found, key=lambda info: info.partition)

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        topics = self._topics(timeout_s)
        if isinstance(subscription, re.Pattern):
            return
        for topic in subscription:
            self._metadata(topic, topics)
        if subscription:
            self._check_rights(subscription, timeout_s)

    def _check_rights(self, topics: Collection[str], timeout_s: float) -> None:
        """Check for the right READ, without which the first commit would fail after its claim."""
        for topic, answer in self._descriptions(topics, timeout_s, with_rights=True).items():
            try:
                allowed = answer.result().authorized_operations
            except KafkaException as problem:
                # Some brokers do not support the query. A missing right shows later in that case.
                text = error_text(kafka_error(problem))
                logger.info("the rights on topic '%s' are not known: %s", topic, text)
                continue
            if allowed and AclOperation.READ not in allowed:
                error = KafkaError(
                    KafkaError.TOPIC_AUTHORIZATION_FAILED,
                    "the principal may describe it but not read it",
                )
                raise self._lookup_error(error, topic)

    def _topics(self, timeout_s: float) -> dict[str, TopicMetadata]:
        try:
            return with_timeout(
                lambda limit_s: self._admin.list_topics(timeout=limit_s).topics,
                timeout_s,
                self._root_cause,
            )
        except KafkaException as problem:
            raise self._error(kafka_error(problem), "listing the topics") from problem

    def _metadata(self, name: str, topics: Mapping[str, TopicMetadata]) -> TopicMetadata:
        if name not in topics:
            error = KafkaError(
                KafkaError.UNKNOWN_TOPIC_OR_PART,
                "it does not exist, or the principal may not see it (ACL READ on the topic)",
            )
            raise self._lookup_error(error, name)
        refusal = topics[name].error
        if refusal is not None:
            operation = self._operation(f"describing topic '{name}'")
            raise broker_error(refusal, operation, topics=[name])
        return topics[name]

    def _lookup_error(self, error: KafkaError, topic: str) -> BrokerError:
        return broker_error(error, self._operation(f"looking up topic '{topic}'"), topics=[topic])

    def _descriptions(
        self, topics: Collection[str], timeout_s: float, *, with_rights: bool = False
    ) -> dict[str, Future[Any]]:
        """Request the descriptions of topics, with new metadata while the controller is silent."""
        started_at, patience_s = self._clock(), _CONTROLLER_PATIENCE_S
        wanted = TopicCollection(sorted(topics))
        while True:
            left_s = started_at + timeout_s - self._clock()
            limit_s = min(max(left_s, _RETRY_PAUSE_S), patience_s)
            answers = self._admin.describe_topics(
                wanted, include_authorized_operations=with_rights, request_timeout=limit_s
            )
            problems = [answer.exception() for answer in answers.values()]
            is_silent = any(
                isinstance(one, KafkaException) and kafka_error(one).code() == NOT_ANSWERED
                for one in problems
            )
            if not is_silent or left_s <= limit_s:
                return answers
            patience_s = min(2 * patience_s, _LONGEST_CONTROLLER_PATIENCE_S)
            self._topics(max(started_at + timeout_s - self._clock(), _RETRY_PAUSE_S))

    def _ids(self, answers: Mapping[str, Future[Any]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for topic, answer in answers.items():
            try:
                topic_id = answer.result().topic_id
            except KafkaException as problem:
                error = kafka_error(problem)
                # Other requests report that the topic may not be read.
                if error.code() in UNKNOWN_TOPIC or is_topic_error(error):
                    continue
                raise self._error(error, f"describing topic '{topic}'") from problem
            if topic_id is not None and (
                topic_id.get_most_significant_bits() or topic_id.get_least_significant_bits()
            ):
                found[topic] = str(topic_id)
        return found

    def _offset_numbers(
        self,
        partitions: Collection[TopicPartition],
        spec: OffsetSpec,
        timeout_s: float,
        level: IsolationLevel | None = None,
    ) -> dict[TopicPartition, int]:
        found = self._offsets(dict.fromkeys(partitions, spec), timeout_s, level)
        return {tp: info.offset for tp, info in found.items()}

    def _offsets(
        self,
        wanted: Mapping[TopicPartition, OffsetSpec],
        timeout_s: float,
        level: IsolationLevel | None = None,
    ) -> dict[TopicPartition, ListOffsetsResultInfo]:
        """List offsets in one request; retry while a leader is unavailable, moving or unknown.

        Raises:
            BrokerError: Some partitions have no result; the error names all of them.
        """
        started_at = self._clock()
        found: dict[TopicPartition, ListOffsetsResultInfo] = {}
        while len(found) < len(wanted):
            missing = {tp: spec for tp, spec in wanted.items() if tp not in found}
            left_s = started_at + timeout_s - self._clock()
            refused: dict[TopicPartition, KafkaError] = {}
            for tp, answer in self._request_offsets(missing, left_s, level).items():
                try:
                    end = answer.result()
                except KafkaException as problem:
                    refused[tp] = kafka_error(problem)
                    continue
                if end.offset == OFFSET_INVALID:  # librdkafka's value for a timeout
                    refused[tp] = KafkaError(NOT_ANSWERED, f"the leader of {tp} did not answer")
                else:
                    found[tp] = end
            waited = self._clock() - started_at
            for error in refused.values():
                new_topic = error.code() in _MAYBE_NEW and waited < _NEW_TOPIC_GRACE_S
                if waited >= timeout_s or not (new_topic or error.code() in RETRIABLE):
                    raise self._error(error, "reading offsets", refused)
            if refused:
                self._pause(_RETRY_PAUSE_S)
                # The client refreshes its metadata only on request: it finds no leader for newer
                # partitions, and keeps sending requests to a former leader.
                self._topics(max(started_at + timeout_s - self._clock(), _RETRY_PAUSE_S))
        # An earlier obstacle, such as an unavailable token issuer, explains no later timeout.
        self._recent_errors.clear()
        return found

    def _request_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        timeout_s: float,
        level: IsolationLevel | None,
    ) -> dict[TopicPartition, Future[ListOffsetsResultInfo]]:
        if level is None:
            level = (
                IsolationLevel.READ_COMMITTED
                if self._settings.reads_committed
                else IsolationLevel.READ_UNCOMMITTED
            )
        limit_s = min(max(timeout_s, _RETRY_PAUSE_S), _LEADER_PATIENCE_S)
        wanted = iter(specs.items())
        answers: dict[TopicPartition, Future[ListOffsetsResultInfo]] = {}
        # All requests are sent at once. The client searches a request for each of its answers.
        while part := {to_confluent(tp): (tp, spec) for tp, spec in islice(wanted, _MOST_AT_ONCE)}:
            request = {name: spec for name, (_, spec) in part.items()}
            found = self._admin.list_offsets(
                request, isolation_level=level, request_timeout=limit_s
            )
            answers |= {part[name][0]: answer for name, answer in found.items()}
        return answers


def _partitions_of(name: str, topic: TopicMetadata) -> list[PartitionInfo]:
    return [
        PartitionInfo(name, p.id, p.leader, tuple(p.replicas), tuple(p.isrs))
        for p in topic.partitions.values()
    ]

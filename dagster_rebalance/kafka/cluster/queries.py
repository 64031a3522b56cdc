"""Read-only questions to the cluster: offsets, topics, and whether anything can work at all.

Owns retries of what is retriable, and asking for many partitions in one request. Must never go
through the member's client: a list of all topics there makes it compare its subscription, which
during a hold can supersede it.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka.admin import AclOperation, AdminClient, ListOffsetsResultInfo, OffsetSpec

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import LogPosition
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    NO_LEADER_KNOWN,
    NOT_ANSWERED,
    RETRIABLE,
    TROUBLES_KEPT,
    UNKNOWN_TOPIC,
    Attempt,
    answered,
    broker_error,
    cause_among,
    is_of_a_topic,
    kafka_error,
    said,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.types import theirs
from dagster_rebalance.kafka.cluster.truncation import ask_leaders
from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp, PartitionInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from confluent_kafka.admin import TopicMetadata

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.1
_NEW_TOPIC_GRACE_S = 2.0
_LEADER_PATIENCE_S = 2.0
"""How long to wait for a leader before it is looked up again: the client goes on asking one that is
gone."""
_LATER_S = 5.0
"""How long an answer may take that nobody waits for."""
_CONTROLLER_PATIENCE_S = 0.25
_LONGEST_CONTROLLER_PATIENCE_S = 1.0
"""Descriptions come from the node that the metadata names as controller, any broker with KRaft. The
client does not look for another one when that node is away: it tries to connect without a pause
(2.16: half a core) until its time is up. Kafka names a node for some seconds after it has gone, so
new metadata is worth more than patience; a slow login needs the longer one."""
_MAYBE_NEW = UNKNOWN_TOPIC | {NO_LEADER_KNOWN}


class Cluster:
    """The brokers, asked (implements `ClusterView`).

    Args:
        settings: Validated settings; those about the connection are used.
        clock: A monotonic clock.
        pause: Waits between two attempts.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._pause = pause
        self._troubles: deque[KafkaError] = deque(maxlen=TROUBLES_KEPT)

    def beginning_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The first offset that exists, for all partitions in one request."""
        return {
            tp: found.offset
            for tp, found in self._offsets(
                dict.fromkeys(partitions, OffsetSpec.earliest()), timeout_s
            ).items()
        }

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the offsets that the next records will get, in one request.

        With `read_committed`, an open transaction ends the log: the offset is that of its first
        record.
        """
        return {
            tp: found.offset
            for tp, found in self._offsets(
                dict.fromkeys(partitions, OffsetSpec.latest()), timeout_s
            ).items()
        }

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        """Ask for the end offsets and their leader epochs in one request.

        Each epoch is the one in which the leader told the offset.
        """
        found = self._offsets(dict.fromkeys(partitions, OffsetSpec.latest()), timeout_s)
        return {
            tp: LogPosition(end.offset, end.leader_epoch if (end.leader_epoch or 0) >= 0 else None)
            for tp, end in found.items()
        }

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """Return the offsets that the next records will get, in one request.

        An open transaction does not lower the offset.
        """
        wanted = dict.fromkeys(partitions, OffsetSpec.latest())
        return {
            tp: found.offset
            for tp, found in self._offsets(
                wanted, timeout_s, IsolationLevel.READ_UNCOMMITTED
            ).items()
        }

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        """Tell whether the log no longer reaches each position.

        The answer lacks partitions whose leaders do not answer in time.
        """
        return ask_leaders(self._settings, positions, timeout_s, self._clock)

    def topic_ids(self, topics: Collection[str], timeout_s: float = 10.0) -> dict[str, str]:
        """The ids of topics, of those for which they are known.

        Brokers before Kafka 2.8 have none.
        """
        return self._ids(self._descriptions(topics, timeout_s))

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """Ask for the ids of topics without waiting.

        Returns:
            A function that returns the ids as `topic_ids`, or None before the answer.
        """
        answers = self._admin.describe_topics(
            TopicCollection(sorted(topics)), request_timeout=_LATER_S
        )

        def answer() -> dict[str, str] | None:
            if not all(future.done() for future in answers.values()):
                return None
            try:
                return self._ids(answers)
            except BrokerError as problem:
                logger.info("the ids of topics are not known: %s", problem)
                return {}

        return answer

    def _ids(self, answers: Mapping[str, Future[Any]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for topic, answer in answers.items():
            try:
                topic_id = answer.result().topic_id
            except KafkaException as problem:
                error = kafka_error(problem)
                # Other requests for the topic tell that it may not be read.
                if error.code() in UNKNOWN_TOPIC or is_of_a_topic(error):
                    continue
                raise broker_error(
                    self._cause(error), self._attempt(f"describing topic '{topic}'")
                ) from problem
            if topic_id is not None and (
                topic_id.get_most_significant_bits() or topic_id.get_least_significant_bits()
            ):
                found[topic] = str(topic_id)
        return found

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Find the first record at or after a time in milliseconds; None where there is none."""
        found = self._offsets(
            {tp: OffsetSpec.for_timestamp(at) for tp, at in timestamps.items()}, timeout_s
        )
        return {
            tp: OffsetAndTimestamp(answer.offset, answer.timestamp) if answer.offset >= 0 else None
            for tp, answer in found.items()
        }

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """All topics that the principal may see, but for those that the brokers cannot describe."""
        described: dict[str, list[PartitionInfo]] = {}
        for name, topic in self._topics(timeout_s).items():
            if topic.error is None:
                described[name] = _partitions_of(name, topic)
            else:
                logger.info("topic '%s' is left out: %s", name, said(topic.error))
        return described

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """The partitions of a topic.

        Raises:
            BrokerError: There is no such topic, the principal may not see it, or the brokers cannot
                describe it.
        """
        # Not a request for the one topic, which would create it on a broker with
        # auto.create.topics.enable.
        found = _partitions_of(topic, self._described(topic, self._topics(timeout_s)))
        return sorted(found, key=lambda info: info.partition)

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        """Find problems early: with brokers, credentials, topics, or the right to read them."""
        topics = self._topics(timeout_s)
        if isinstance(subscription, re.Pattern):
            return
        for topic in subscription:
            self._described(topic, topics)
        if subscription:
            self._check_rights(subscription, timeout_s)

    def _topics(self, timeout_s: float) -> dict[str, TopicMetadata]:
        try:
            return answered(
                lambda limit_s: self._admin.list_topics(timeout=limit_s).topics,
                timeout_s,
                self._cause,
            )
        except KafkaException as problem:
            raise broker_error(
                self._cause(kafka_error(problem)), self._attempt("listing the topics")
            ) from problem

    def _described(self, name: str, topics: Mapping[str, TopicMetadata]) -> TopicMetadata:
        if name not in topics:
            raise self._missing(name)
        error = topics[name].error
        if error is not None:
            raise broker_error(error, self._attempt(f"describing topic '{name}'"), topics=[name])
        return topics[name]

    @property
    def _admin(self) -> AdminClient:
        self._login.renew()
        return self._client

    @cached_property
    def _client(self) -> AdminClient:
        return made(AdminClient, {**self._settings.connection(), "error_cb": self._troubles.append})

    @cached_property
    def _login(self) -> Login:
        return Login(self._settings.credentials, self._client)

    def _check_rights(self, topics: Collection[str], timeout_s: float) -> None:
        """Check that the principal may read the topics.

        A principal that may see a topic need not be allowed to read it. Otherwise the first commit
        would show that, with a claim already planned.
        """
        for topic, answer in self._descriptions(topics, timeout_s, with_rights=True).items():
            try:
                allowed = answer.result().authorized_operations
            except KafkaException as problem:
                # Not every broker knows the question; what is forbidden shows later then.
                logger.info(
                    "the rights on topic '%s' are not known: %s", topic, said(kafka_error(problem))
                )
                continue
            if allowed and AclOperation.READ not in allowed:
                error = KafkaError(
                    KafkaError.TOPIC_AUTHORIZATION_FAILED,
                    "the principal may see it and not read it",
                )
                raise broker_error(
                    error, self._attempt(f"looking up topic '{topic}'"), topics=[topic]
                )

    def _descriptions(
        self, topics: Collection[str], timeout_s: float, *, with_rights: bool = False
    ) -> dict[str, Future[Any]]:
        """Ask for the descriptions of topics.

        While the node that should answer does not, ask again with new metadata.
        """
        started_at, patience_s = self._clock(), _CONTROLLER_PATIENCE_S
        asked = TopicCollection(sorted(topics))
        while True:
            left_s = started_at + timeout_s - self._clock()
            limit_s = min(max(left_s, _RETRY_PAUSE_S), patience_s)
            answers = self._admin.describe_topics(
                asked, include_authorized_operations=with_rights, request_timeout=limit_s
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

    def _offsets(
        self,
        wanted: Mapping[TopicPartition, OffsetSpec],
        timeout_s: float,
        level: IsolationLevel | None = None,
    ) -> dict[TopicPartition, ListOffsetsResultInfo]:
        """Ask for all offsets in one request.

        Ask again for partitions whose leader is away, is just moving, or is not known yet.

        Raises:
            BrokerError: Some have no answer; it names all of these.
        """
        started_at = self._clock()
        found: dict[TopicPartition, ListOffsetsResultInfo] = {}
        while len(found) < len(wanted):
            missing = (
                {tp: spec for tp, spec in wanted.items() if tp not in found} if found else wanted
            )
            refused: dict[TopicPartition, KafkaError] = {}
            for tp, answer in self._ask(
                missing, started_at + timeout_s - self._clock(), level
            ).items():
                try:
                    end = answer.result()
                except KafkaException as problem:
                    refused[tp] = kafka_error(problem)
                    continue
                if end.offset == OFFSET_INVALID:
                    # So librdkafka says that the leader did not answer in time.
                    refused[tp] = KafkaError(NOT_ANSWERED, f"the leader of {tp} did not answer")
                else:
                    found[tp] = end
            waited = self._clock() - started_at
            for error in refused.values():
                new_topic = error.code() in _MAYBE_NEW and waited < _NEW_TOPIC_GRACE_S
                if waited >= timeout_s or not (new_topic or error.code() in RETRIABLE):
                    raise broker_error(
                        self._cause(error), self._attempt("reading offsets"), refused
                    )
            if refused:
                self._pause(_RETRY_PAUSE_S)
                # The client finds no leader for partitions that are newer than its metadata, and
                # goes on asking one that is gone: it does not refresh its metadata by itself.
                self._topics(max(started_at + timeout_s - self._clock(), _RETRY_PAUSE_S))
        # What was in the way, such as an issuer of tokens, is no reason for what comes later.
        self._troubles.clear()
        return found

    def _ask(
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
        names = {theirs(tp): tp for tp in specs}
        request = {name: specs[tp] for name, tp in names.items()}
        limit_s = min(max(timeout_s, _RETRY_PAUSE_S), _LEADER_PATIENCE_S)
        answers = self._admin.list_offsets(request, isolation_level=level, request_timeout=limit_s)
        return {names[name]: answer for name, answer in answers.items()}

    def _cause(self, error: KafkaError) -> KafkaError:
        """The reason behind a time-out."""
        self._admin.poll(0)
        return cause_among(self._troubles, error)

    def _missing(self, topic: str) -> BrokerError:
        attempt = self._attempt(f"looking up topic '{topic}'")
        error = KafkaError(
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            "it does not exist, or the principal may not see it (ACL READ on the topic)",
        )
        return broker_error(error, attempt, topics=[topic])

    def _attempt(self, doing: str) -> Attempt:
        return Attempt(doing, self._settings.brokers)


def _partitions_of(name: str, topic: TopicMetadata) -> list[PartitionInfo]:
    return [
        PartitionInfo(name, p.id, p.leader, tuple(p.replicas), tuple(p.isrs))
        for p in topic.partitions.values()
    ]

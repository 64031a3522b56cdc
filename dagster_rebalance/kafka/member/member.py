# ruff: noqa: D102 - `GroupMember` documents them
"""The group member in the caller's thread; a `Session` is its part in the client's thread.

The assigned, held and lost partitions follow from the events that `poll` has returned. A failed
hold (fenced, superseded, expired) or a fatal error of the client ends the membership: the member
reports all of its partitions lost exactly once, and rejoins with a new client.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    IllegalStateError,
    PartitionLostError,
)
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.kafka.client.confluent import to_commit
from dagster_rebalance.kafka.client.errors import (
    NOT_ANSWERED,
    POLL_FIRST,
    Operation,
    broker_error,
    kafka_error,
    root_cause,
    with_timeout,
)
from dagster_rebalance.kafka.cluster import committed_offsets
from dagster_rebalance.kafka.group_ports import (
    CallbackFailed,
    CommitAnswered,
    CommitResult,
    GroupEvent,
    RequestFailed,
)
from dagster_rebalance.kafka.member.commits import ReadRefusedError, refusals
from dagster_rebalance.kafka.member.session import Session
from dagster_rebalance.kafka.member.session_view import UserCallback
from dagster_rebalance.kafka.member.topic_discovery import Discovery

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.member.session_view import SessionEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")

_READ_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 10.0
_WAIT_SLICE_S = 1.0
"""How often a waiting caller is recorded as present, and the session checked."""
_EXTRA_WAIT_S = 0.2
"""The caller waits this much longer than the client, to receive the client's own error."""
_CALLBACKS_S = 0.2
_ENDED = "the membership has ended"
_REJOIN_AFTER_S = 1.0
"""The pause before a member rejoins after a failure or a fatal error of its client."""
_OVERDUE_S = 1.0
"""How long after the end of a hold the member itself ends the session, whose thread may be waiting
for a broker."""


class Member:
    """A member of a consumer group that can hold a revoke; for one thread at a time.

    Implements `GroupMember`.

    Args:
        probe_interval_s: How often to probe for fencing during a hold.
        discovery_interval_s: How often to discover new topics and partitions, between holds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        probe_interval_s: float = 3.0,
        discovery_interval_s: float = 30.0,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._probe_interval_s = probe_interval_s
        self._discovery_interval_s = discovery_interval_s
        self._subscription: Collection[str] | re.Pattern[str] = ()
        self._tickets = itertools.count(1)
        self._in_flight: dict[int, frozenset[TopicPartition]] = {}
        self._awaited: dict[int, CommitResult | None] = {}
        self._events: list[GroupEvent] = []
        self._events_taken = 0
        self._woken = False
        self._callbacks: deque[UserCallback] = deque()
        self._left_sessions: list[Session] = []
        self._in_callback = self._closed = False
        self._rejoin_at = -math.inf
        self._only_visible = False
        self._owned: set[TopicPartition] = set()
        self._held: frozenset[TopicPartition] = frozenset()
        self._session = self._new_session()

    @property
    def member_id(self) -> str:
        return "" if self._closed else self._session.member_id

    @property
    def held(self) -> frozenset[TopicPartition]:
        return self._held

    @property
    def has_news(self) -> bool:
        return bool(self._events or self._session.has_news)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset() if self._closed else frozenset(self._owned)

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part in the group for these topics, from the next poll on.

        During a hold, a subscription takes effect after the release. A pattern must match the whole
        name. The member matches it with Python's rules against Kafka's list of topics; internal
        topics (`__...`) never match.
        """
        self._check_usable("subscribe")
        self._subscription = subscription

    def unsubscribe(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        self._check_usable("unsubscribe")
        deadline = self._clock() + timeout_s
        self._subscription = ()
        self.settle(timeout_s)
        self._fail_in_flight()
        self._events = [event for event in self._events if isinstance(event, CommitAnswered)]
        left = self._replace_session()
        left.wait_until_left(deadline - self._clock())

    def close(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        if self._closed:
            return
        self._check_usable("close")
        deadline = self._clock() + timeout_s
        try:
            self.settle(timeout_s)
        finally:
            self._closed = True
            self._session.leave()
            for session in (*self._left_sessions, self._session):
                session.wait_until_left(deadline - self._clock())

    def abandon(self) -> None:
        """Leave the group in the background. Any thread may call this method, at any time."""
        self._session.leave()

    def poll(self, timeout_s: float) -> list[GroupEvent]:
        self._check_usable("poll")
        if self._session.leave_requested:  # after a fatal error, or without a new client
            self._try_rejoin()
        self._session.set_subscription(self._subscription)
        self._wait(lambda: self._has_events() or self._woken, self._clock() + timeout_s)
        self._woken = False
        self._events_taken = self._session.events_taken
        return self._take_events()

    def wake(self) -> None:
        self._woken = True
        self._session.notify()

    def release(self) -> None:
        """Let the group complete the held revoke, for all of its partitions at once.

        The release is sent after all earlier commits of the caller. If the hold was superseded, the
        member sends nothing, and the next poll reports the loss.
        """
        self._check_usable("release")
        if not self._held:
            msg = "release without a held revoke"
            raise IllegalStateError(msg)
        self._session.submit_or_end(self._session.release)
        self._owned -= self._held
        self._held = frozenset()

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        self._check_usable("commit", nested=True)
        ticket = next(self._tickets)
        self._awaited[ticket] = None
        try:
            self._send(ticket, offsets)
            self._wait(lambda: self._awaited[ticket] is not None, math.inf)
        finally:
            result = self._awaited.pop(ticket)
        return result or CommitResult(frozenset())

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        self._check_usable("commit_async", nested=True)
        ticket = next(self._tickets)
        self._send(ticket, offsets)
        return ticket

    def settle(self, timeout_s: float) -> bool:
        self._check_usable("a commit with a timeout")
        return self._wait(lambda: not self._in_flight, self._clock() + timeout_s)

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = _READ_TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self._check_usable("committed", nested=True)
        operation = Operation(
            f"reading the committed offsets of group '{self._settings.group_id}' for "
            f"{names_of(partitions)}",
            self._settings.brokers,
        )
        try:
            found = with_timeout(
                lambda limit_s: self._query(
                    lambda session: session.commits.read(partitions, limit_s),
                    committed_offsets.longest(limit_s) + _EXTRA_WAIT_S,
                ),
                timeout_s,
                self._root_cause,
            )
        except KafkaException as problem:
            raise broker_error(self._root_cause(kafka_error(problem)), operation) from problem
        except ReadRefusedError as problem:
            first = next(iter(problem.errors.values()))
            alike = [tp for tp, error in problem.errors.items() if error.code() == first.code()]
            raise broker_error(first, operation, alike) from problem
        self._session.recent_errors.clear()
        return found

    def metrics(self) -> dict[str, Any]:
        return {} if self._closed else self._session.metrics()

    def group_metadata(self) -> object:
        self._check_usable("group_metadata", nested=True)
        self._session.probe.offsets_may_move = True
        operation = Operation(
            f"reading the metadata of group '{self._settings.group_id}'", self._settings.brokers
        )
        try:
            metadata = self._query(
                lambda session: session.consumer.consumer_group_metadata(), _READ_TIMEOUT_S
            )
            # A loss may have preceded the answer. With the new metadata of the member, the broker
            # would accept the offsets of lost partitions.
            self._drain_events()
            if any(isinstance(event, PartitionsLost) for event in self._events):
                msg = "partitions were lost, which no poll has returned yet"
                raise _poll_first(msg)
        except KafkaException as problem:
            raise broker_error(self._root_cause(kafka_error(problem)), operation) from problem
        return metadata

    # The session

    def _new_session(self) -> Session:
        discovery = Discovery(
            self._settings, self._clock, self._discovery_interval_s, only_visible=self._only_visible
        )
        return Session(self._settings, self._clock, discovery, self._probe_interval_s)

    def _replace_session(self) -> Session:
        """Start a new session, and leave the current one in the background.

        Waiting for an unavailable broker would delay the report of a loss.
        """
        left = self._session
        left.leave()
        before = dict.fromkeys((*self._left_sessions, left))
        self._left_sessions = [session for session in before if session.is_leaving]
        self._owned, self._held = set(), frozenset()
        self._session, self._events_taken = self._new_session(), 0
        self._session.probe.offsets_may_move = left.probe.offsets_may_move
        return left

    def _wait(self, is_done: Callable[[], object], deadline: float) -> bool:
        """Drain events until a condition holds or the deadline has passed."""
        while True:
            self._session.polled_at = self._clock()
            self._drain_events()
            if is_done():
                return True
            left_s = deadline - self._clock()
            if left_s <= 0:
                return False
            self._session.wait(min(left_s, _WAIT_SLICE_S))

    def _drain_events(self) -> None:
        session = self._session
        hold, end_reason = session.hold, session.end_reason
        # One by one, and removed only once applied: a signal handler may raise in between.
        while (event := session.next_event) is not None:
            self._apply(event)
            session.take_event()
        if (
            hold is not None
            and self._clock() > hold.requested_at + self._settings.max_poll_interval_s + _OVERDUE_S
        ):
            session.end(LostReason.EXPIRED)
        if end_reason is not None and not session.leave_requested:
            self._end_membership(end_reason)

    def _apply(self, event: SessionEvent) -> None:
        match event:
            case UserCallback():
                self._callbacks.append(event)
                return
            case CommitAnswered(ticket, result):
                self._in_flight.pop(ticket, None)
                if ticket in self._awaited:
                    self._awaited[ticket] = result
                    return
            case PartitionsAssigned(partitions):
                self._owned.update(partitions)
            case RevokeRequested(partitions):
                self._held = frozenset(partitions)
            case PartitionsLost(partitions):
                self._owned.difference_update(partitions)
            case _:
                pass
        if not (self._events and self._events[-1] is event):
            self._events.append(event)

    def _take_events(self) -> list[GroupEvent]:
        events, self._events = self._events, []
        return events

    def _has_events(self) -> bool:
        """Run the user's callbacks, and return whether there are events."""
        self._in_callback = True
        try:
            while self._callbacks:
                callback = self._callbacks.popleft()
                try:
                    callback.function(*callback.arguments)
                except Exception as problem:  # noqa: BLE001 - an event passes it to the user
                    self._events.append(CallbackFailed(problem))
        finally:
            self._in_callback = False
        return bool(self._events)

    def _end_membership(self, reason: LostReason) -> None:
        lost = frozenset(self._owned)
        self._fail_in_flight()
        logger.warning(
            "group '%s': %s lost (%s); rejoining",
            self._settings.group_id,
            names_of(lost),
            reason.value,
        )
        # First: the creation of the next client may fail.
        if lost:
            self._events.append(PartitionsLost(tuple(sorted(lost)), reason))
            self._owned, self._held = set(), frozenset()
        if self._session.fatal_error is None and reason is LostReason.FAILED:
            self._session.leave()
            self._rejoin_at = self._clock() + _REJOIN_AFTER_S
        elif self._session.fatal_error is None:
            self._rejoin()
        else:
            # The broker would most likely refuse the next client as well, if it joined at once.
            self._session.leave()
            self._only_visible |= bool(self._session.fatal_error.topics)
            self._rejoin_later(self._session.fatal_error)

    def _rejoin(self) -> None:
        try:
            self._replace_session()
        except (BrokerError, ConfigurationError) as problem:
            self._rejoin_later(problem)

    def _rejoin_later(self, problem: BrokerError | ConfigurationError) -> None:
        """Report why there is no session; `_try_rejoin` creates one later."""
        self._rejoin_at = math.inf
        self._events.append(RequestFailed(problem))

    def _try_rejoin(self) -> None:
        """Rejoin, but not in the poll after the one that reported the failure.

        The reporting poll raised an exception; the poll after it returns the other events.
        """
        if self._rejoin_at == math.inf:
            self._rejoin_at = self._clock() + _REJOIN_AFTER_S
        elif self._clock() >= self._rejoin_at:
            self._rejoin()

    def _send(self, ticket: int, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        for tp, offset in offsets.items():
            # Refuse invalid values before any call waits for their answer.
            to_commit(tp, offset)
        session, wanted, is_awaited = self._session, dict(offsets), ticket in self._awaited
        if session.leave_requested:  # and there is no new session yet: nothing is assigned
            self._apply(CommitAnswered(ticket, CommitResult(frozenset(), refusals(wanted))))
            return
        taken = self._events_taken
        self._in_flight[ticket] = frozenset(wanted)
        session.submit_or_end(
            lambda: session.commits.add(ticket, wanted, events_taken=taken, is_awaited=is_awaited)
        )

    def _fail_in_flight(self) -> None:
        unknown = "the membership ended before the answer, so it is not known whether it was stored"
        for ticket, partitions in list(self._in_flight.items()):
            failed = {
                tp: PartitionLostError(f"commit for {tp}: {unknown}", partitions={tp: unknown})
                for tp in partitions
            }
            self._apply(CommitAnswered(ticket, CommitResult(frozenset(), failed)))

    def _query(self, function: Callable[[Session], T], timeout_s: float) -> T:
        """Run a function in the session's thread, and return its result."""
        self._drain_events()
        session = self._session

        def run() -> T:
            # After the end of the membership, the thread runs its remaining jobs on a closed
            # client.
            if session.end_reason is not None:
                raise _poll_first(_ENDED)
            return function(session)

        if session.leave_requested:  # and there is no new session yet
            raise _poll_first(_ENDED)
        try:
            return session.submit(run).result(timeout_s)
        except FutureTimeoutError:
            why = "the member's thread did not answer in time: it waits for the coordinator"
            raise KafkaException(KafkaError(NOT_ANSWERED, why)) from None

    def _root_cause(self, error: KafkaError) -> KafkaError:
        """Return the reported error that caused a timeout."""
        self._session.wait_for_callbacks(_CALLBACKS_S)
        return root_cause(self._session.recent_errors, error)

    def _check_usable(self, call: str, *, nested: bool = False) -> None:
        if self._closed:
            msg = f"{call} on a closed consumer: create a new one"
            raise IllegalStateError(msg)
        if self._in_callback and not nested:
            msg = f"{call} inside a callback of poll: return from the callback first"
            raise IllegalStateError(msg)


def _poll_first(what: str) -> KafkaException:
    return KafkaException(KafkaError(POLL_FIRST, f"{what}: poll, then retry"))

"""The member of the group is the control plane, and never reads a record.

It heartbeats, holds, probes, commits and releases.

The member is the caller's side of a `Session`, which lives in a thread of its own. A poll tells the
caller what happened. Until then the member does not hold the caller to it: the assigned, held and
lost partitions are those that it has told. A hold that went wrong (fenced, superseded, expired) and
a client that reports a fatal error end the membership: the member reports all of its partitions
lost exactly once, and joins anew with a new client.

Must only be used by one thread at a time.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from concurrent.futures import TimeoutError as NotAnsweredError
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
from dagster_rebalance.core.model.offsets import named
from dagster_rebalance.kafka.client.errors import (
    NOT_ANSWERED,
    POLL_FIRST,
    Attempt,
    answered,
    broker_error,
    cause_among,
    kafka_error,
)
from dagster_rebalance.kafka.client.types import to_commit
from dagster_rebalance.kafka.cluster import committed_offsets
from dagster_rebalance.kafka.group_ports import (
    CallbackFailed,
    CommitAnswered,
    CommitResult,
    MemberEvent,
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
    from dagster_rebalance.kafka.member.session import Told

logger = logging.getLogger(__name__)

T = TypeVar("T")

_READ_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 10.0
_WAIT_SLICE_S = 1.0
"""How often a caller that waits is noted to be there, and the session looked after."""
_ASKED_S = 0.2
"""How much longer than the client the caller waits, so that it hears the client's own reason."""
_CALLBACKS_S = 0.2
_AGAIN_S = 1.0
"""How long after a failure, or a fatal error of its client, a member tries to join again."""
_OVERDUE_S = 1.0
"""How much later than itself the member sees that its session has missed the end of a hold: its
thread waits for a broker."""


class Member:
    """A member of a consumer group that can hold a revoke (implements `GroupMember`).

    Args:
        settings: Validated settings.
        clock: A monotonic clock.
        probe_interval_s: How often fencing is looked for during a hold.
        discovery_interval_s: How often new topics and partitions are looked for, between holds.

    Raises:
        ConfigurationError: The client refuses a setting; the message names it.
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
        self._open: dict[int, frozenset[TopicPartition]] = {}
        self._answers: dict[int, CommitResult | None] = {}
        self._carried: list[MemberEvent] = []
        self._heard = 0
        self._woken = False
        self._due: deque[UserCallback] = deque()
        self._left: list[Session] = []
        self._busy = self._closed = False
        self._again_at = -math.inf
        self._only_visible = False
        self._owned: set[TopicPartition] = set()
        self._held: frozenset[TopicPartition] = frozenset()
        self._session = self._new_session()

    @property
    def member_id(self) -> str:
        """The id the group knows this member by.

        Before it joined it is empty in classic; in the consumer protocol the client chose it.
        """
        return "" if self._closed else self._session.member_id

    @property
    def held(self) -> frozenset[TopicPartition]:
        """The partitions of the revoke that was requested and is not released yet."""
        return self._held

    def assignment(self) -> frozenset[TopicPartition]:
        """What this member owns as far as it has told, held partitions included."""
        return frozenset() if self._closed else frozenset(self._owned)

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part in the group for these topics, from the next poll on.

        During a hold it takes effect after the release.

        A pattern must match the whole name. It is matched here, against Kafka's list of topics and
        with Python's rules; internal topics (`__...`) never match.
        """
        self._check_usable("subscribe")
        self._subscription = subscription

    def unsubscribe(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        """Leave the group within `timeout_s`; what is still held goes with it."""
        self._check_usable("unsubscribe")
        deadline = self._clock() + timeout_s
        self._subscription = ()
        self.settle(timeout_s)
        self._refuse_open()
        self._carried = [event for event in self._carried if isinstance(event, CommitAnswered)]
        left = self._start_over()
        left.wait_until_left(deadline - self._clock())

    def close(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        """Leave the group within `timeout_s`; may be called again."""
        if self._closed:
            return
        self._check_usable("close")
        deadline = self._clock() + timeout_s
        try:
            self.settle(timeout_s)
        finally:
            self._closed = True
            self._session.leave()
            for session in (*self._left, self._session):
                session.wait_until_left(deadline - self._clock())

    def abandon(self) -> None:
        """Leave the group in the background. Any thread may call it, at any time."""
        self._session.leave()

    def poll(self, timeout_s: float) -> list[MemberEvent]:
        """Take part in the group for at most `timeout_s`, and tell what happened, in its order.

        Returns early when something did, and after `wake`.
        """
        self._check_usable("poll")
        if self._session.was_left:  # broken, or the next one could not be made
            self._try_again()
        self._session.want(self._subscription)
        self._wait(lambda: self._has_news() or self._woken, self._clock() + timeout_s)
        self._woken = False
        self._heard = self._session.heard
        told, self._carried = self._carried, []
        return told

    def wake(self) -> None:
        """Let the poll that waits, or else the next one, return at once."""
        self._woken = True
        self._session.ring()

    def release(self) -> None:
        """Let the group complete the held revoke, for all of its partitions at once.

        The release goes out behind all commits that the caller made before. Should it turn out that
        the hold was superseded, the member sends nothing, and the next poll reports the loss.
        """
        self._check_usable("release")
        if not self._held:
            msg = "release without a held revoke: there is nothing to give up"
            raise IllegalStateError(msg)
        self._session.do(self._session.release)
        self._owned -= self._held
        self._held = frozenset()

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store next offsets and metadata, in as few requests as the broker can store.

        Each partition has its own result. One that is not assigned fails without a request.
        """
        self._check_usable("commit", nested=True)
        ticket = next(self._tickets)
        self._answers[ticket] = None
        try:
            self._send(ticket, offsets)
            self._wait(lambda: self._answers[ticket] is not None, math.inf)
        finally:
            result = self._answers.pop(ticket)
        return result or CommitResult(frozenset())

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Store like `commit`, without waiting, and return a number.

        A `CommitAnswered` with this number follows.
        """
        self._check_usable("commit_async", nested=True)
        ticket = next(self._tickets)
        self._send(ticket, offsets)
        return ticket

    def settle(self, timeout_s: float) -> bool:
        """Wait until no commit is on its way; whether that came about.

        What happens meanwhile is told by the next poll.
        """
        self._check_usable("a commit with a time-out")
        return self._wait(lambda: not self._open, self._clock() + timeout_s)

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = _READ_TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where it has nothing."""
        self._check_usable("committed", nested=True)
        attempt = Attempt(
            f"reading what group '{self._settings.group_id}' has committed for {named(partitions)}",
            self._settings.brokers,
        )
        try:
            found = answered(
                lambda limit_s: self._ask(
                    lambda session: session.commits.read(partitions, limit_s),
                    committed_offsets.longest(limit_s) + _ASKED_S,
                ),
                timeout_s,
                self._cause,
            )
        except KafkaException as problem:
            raise broker_error(self._cause(kafka_error(problem)), attempt) from problem
        except ReadRefusedError as problem:
            first = next(iter(problem.errors.values()))
            alike = [tp for tp, error in problem.errors.items() if error.code() == first.code()]
            raise broker_error(first, attempt, alike) from problem
        self._session.troubles.clear()
        return found

    def metrics(self) -> dict[str, Any]:
        """Return the client's latest statistics, parsed.

        There are none while `statistics.interval.ms` is off, and before the first ones.
        """
        return {} if self._closed else self._session.metrics()

    def group_metadata(self) -> object:
        """Return the object with which a transactional producer commits this member's offsets.

        It is the client's own object, and opaque.
        """
        self._check_usable("group_metadata", nested=True)
        self._session.probe.others_commit = True
        attempt = Attempt(
            f"asking for the metadata of group '{self._settings.group_id}'", self._settings.brokers
        )
        try:
            metadata = self._ask(
                lambda session: session.consumer.consumer_group_metadata(), _READ_TIMEOUT_S
            )
            # A loss may have come before the answer.
            self._take_in()
            if any(isinstance(event, PartitionsLost) for event in self._carried):
                # With what the member is since, the broker would take the offsets of those.
                what = "partitions were lost, which no poll has told yet"
                raise _poll_first(what)
        except KafkaException as problem:
            raise broker_error(self._cause(kafka_error(problem)), attempt) from problem
        return metadata

    # The session

    def _new_session(self) -> Session:
        discovery = Discovery(
            self._settings,
            self._clock,
            self._discovery_interval_s,
            only_visible=self._only_visible,
        )
        return Session(self._settings, self._clock, discovery, self._probe_interval_s)

    def _start_over(self) -> Session:
        """Leave in the background, and start a new session.

        The caller must hear of a loss now, and a broker that is away would keep it waiting.
        """
        left = self._session
        left.leave()
        before = dict.fromkeys((*self._left, left))
        self._left = [session for session in before if session.is_leaving]
        self._owned, self._held = set(), frozenset()
        self._session, self._heard = self._new_session(), 0
        self._session.probe.others_commit = left.probe.others_commit
        return left

    def _wait(self, until: Callable[[], object], deadline: float) -> bool:
        """Take in what the session tells until something is the case, or the deadline has come."""
        while True:
            self._session.seen_at = self._clock()
            self._take_in()
            if until():
                return True
            left_s = deadline - self._clock()
            if left_s <= 0:
                return False
            self._session.wait(min(left_s, _WAIT_SLICE_S))

    def _take_in(self) -> None:
        session = self._session
        hold, ended = session.hold, session.ended
        # Taken one by one, and only once it is noted: a signal handler may raise in between.
        while (event := session.news) is not None:
            self._note(event)
            session.taken()
        if (
            hold is not None
            and self._clock() > hold.requested_at + self._settings.max_poll_interval_s + _OVERDUE_S
        ):
            session.end(LostReason.EXPIRED)
        if ended is not None and not session.was_left:
            self._end_membership(ended)

    def _note(self, event: Told) -> None:
        match event:
            case UserCallback():
                self._due.append(event)
                return
            case CommitAnswered(ticket, result):
                self._open.pop(ticket, None)
                if ticket in self._answers:
                    self._answers[ticket] = result
                    return
            case PartitionsAssigned(partitions):
                self._owned.update(partitions)
            case RevokeRequested(partitions):
                self._held = frozenset(partitions)
            case PartitionsLost(partitions):
                self._owned.difference_update(partitions)
            case _:
                pass
        if not (self._carried and self._carried[-1] is event):
            self._carried.append(event)

    def _has_news(self) -> bool:
        """Call the user back, and see whether there is something to tell."""
        self._busy = True
        try:
            while self._due:
                due = self._due.popleft()
                try:
                    due.function(*due.arguments)
                except Exception as problem:  # noqa: BLE001 - it is the user's code, and reaches the user
                    self._carried.append(CallbackFailed(problem))
        finally:
            self._busy = False
        return bool(self._carried)

    def _end_membership(self, reason: LostReason) -> None:
        lost = frozenset(self._owned)
        self._refuse_open()
        logger.warning(
            "group '%s': %s lost (%s); joining anew",
            self._settings.group_id,
            named(lost),
            reason.value,
        )
        # Told before anything else: making the next client may fail.
        if lost:
            self._carried.append(PartitionsLost(tuple(sorted(lost)), reason))
            self._owned, self._held = set(), frozenset()
        if self._session.broken is None:
            self._join_anew()
        else:
            # What the next client does at once, the broker would most likely refuse again.
            self._session.leave()
            self._only_visible |= bool(self._session.broken.topics)
            self._join_later(self._session.broken)

    def _join_anew(self) -> None:
        """Start a new session. Why there is none is told behind what has happened before."""
        try:
            self._start_over()
        except (BrokerError, ConfigurationError) as problem:
            self._join_later(problem)

    def _join_later(self, problem: BrokerError | ConfigurationError) -> None:
        """Tell why there is no session, and leave it to `_try_again` to make one."""
        self._again_at = math.inf
        self._carried.append(RequestFailed(problem))

    def _try_again(self) -> None:
        """Join anew, but not in the poll behind the one that told the failure.

        The caller has got an exception from that one, and hears in this one what else it found.
        """
        if self._again_at == math.inf:
            self._again_at = self._clock() + _AGAIN_S
        elif self._clock() >= self._again_at:
            self._join_anew()

    def _send(self, ticket: int, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        for tp, offset in offsets.items():
            # Refuse a value that the client does not take before anything waits for its answer.
            to_commit(tp, offset)
        session, wanted, is_waited_for = self._session, dict(offsets), ticket in self._answers
        if session.was_left:  # and there is no other one yet: nothing is assigned
            self._note(CommitAnswered(ticket, CommitResult(frozenset(), refusals(wanted))))
            return
        heard = self._heard
        self._open[ticket] = frozenset(wanted)
        session.do(
            lambda: session.commits.add(ticket, wanted, heard=heard, is_waited_for=is_waited_for)
        )

    def _refuse_open(self) -> None:
        """The membership has ended before the answers: nobody is going to have them."""
        unknown = "the membership ended before the answer, so it is not known whether it was stored"
        for ticket, partitions in list(self._open.items()):
            failed = {
                tp: PartitionLostError(f"commit for {tp}: {unknown}", partitions={tp: unknown})
                for tp in partitions
            }
            self._note(CommitAnswered(ticket, CommitResult(frozenset(), failed)))

    def _ask(self, function: Callable[[Session], T], timeout_s: float) -> T:
        """Have something answered by the session's thread.

        Raises:
            KafkaException: It was refused, or not answered in time.
        """
        self._take_in()
        session = self._session
        over = _poll_first("the membership has ended")

        def answer() -> T:
            # The thread ends its jobs behind the end of the membership, when the client is closed.
            if session.ended is not None:
                raise over
            return function(session)

        if session.was_left:  # and the next one could not be made
            raise over
        try:
            return session.ask(answer).result(timeout_s)
        except NotAnsweredError:
            why = "the member's thread did not answer in time: it waits for the coordinator"
            raise KafkaException(KafkaError(NOT_ANSWERED, why)) from None

    def _cause(self, error: KafkaError) -> KafkaError:
        """The reason behind a time-out: a client tells it through its callbacks only."""
        self._session.wait_for_callbacks(_CALLBACKS_S)
        return cause_among(self._session.troubles, error)

    def _check_usable(self, call: str, *, nested: bool = False) -> None:
        if self._closed:
            msg = f"{call} on a closed consumer: make a new one"
            raise IllegalStateError(msg)
        if self._busy and not nested:
            msg = f"{call} inside a callback of poll: return from the callback first"
            raise IllegalStateError(msg)


def _poll_first(what: str) -> KafkaException:
    return KafkaException(KafkaError(POLL_FIRST, f"{what}: poll, then ask again"))

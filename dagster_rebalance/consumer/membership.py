"""The member of the group: the control plane, which heartbeats, holds, probes, commits and releases, and never reads a record.

Owns how long a membership lasts. A hold that went wrong (fenced, superseded, expired) is told by nobody, so it is looked for. Then the
membership ends, all of its partitions are reported lost exactly once, and the member joins anew with a new client: the unassign of a
stale hold is never sent, because librdkafka would apply it to partitions that it was granted in the meantime.

Must only be used by one thread at a time.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from dagster_rebalance.consumer.client_check import check_client
from dagster_rebalance.consumer.discovery import Discovery
from dagster_rebalance.consumer.events import CommitAnswered, CommitResult, HoldSuperseded, LostReason, MemberEvent, PartitionsLost
from dagster_rebalance.consumer.kafka_errors import (
    Attempt,
    answered,
    broker_error,
    cause_among,
    kafka_error,
    names,
)
from dagster_rebalance.consumer.probe import Probe
from dagster_rebalance.consumer.session import Session
from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Mapping

    from confluent_kafka import KafkaError

    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 10.0
_CONFIRM_TIMEOUT_S = 5.0


class Member:
    """A member of a consumer group that can hold a revoke (implements `GroupMember`).

    Args:
        settings: Validated settings.
        clock: A monotonic clock.
        probe_interval_s: How often fencing is looked for during a hold.
        discovery_interval_s: How often new topics and partitions are looked for, between holds.

    Raises:
        ConfigurationError: The client refuses a setting, or is one that a revoke cannot be held with; the message names it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        probe_interval_s: float = 3.0,
        discovery_interval_s: float = 30.0,
    ) -> None:
        check_client()
        self._settings = settings
        self._clock = clock
        self._probe_interval_s = probe_interval_s
        self._discovery = Discovery(settings, clock, discovery_interval_s)
        self._probe = Probe(settings)
        self._probe_at = clock()
        self._tickets = itertools.count(1)
        self._carried: list[MemberEvent] = []
        self._left: list[Session] = []
        self._busy = self._closed = False
        self._session = Session(settings, clock, self._probe.answered)

    @property
    def member_id(self) -> str:
        """The id the group knows this member by. Before it joined it is empty in classic; in the consumer protocol the client chose it."""
        return "" if self._closed else self._session.member_id

    @property
    def held(self) -> frozenset[TopicPartition]:
        """The partitions of the revoke that was requested and is not released yet."""
        return self._session.hold.partitions if self._session.hold else frozenset()

    def assignment(self) -> frozenset[TopicPartition]:
        """What this member owns, held partitions included."""
        return frozenset() if self._closed else self._session.owned

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part in the group for these topics. During a hold it takes effect after the release.

        A pattern must match the whole name. It is matched here, against Kafka's list of topics and with Python's rules; internal topics
        (`__...`) never match.
        """
        self._check_usable("subscribe")
        self._discovery.want(subscription)

    def unsubscribe(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        """Leave the group within `timeout_s`; what is still held goes with it."""
        self._check_usable("unsubscribe")
        deadline = self._clock() + timeout_s
        self._discovery.want(())
        self._settle(timeout_s)
        self._session.commits.give_up()
        self._carried += [event for event in self._session.take() if isinstance(event, CommitAnswered)]
        left = self._start_over()
        left.wait(max(0.0, deadline - self._clock()))

    def close(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        """Leave the group within `timeout_s`; may be called again."""
        if self._closed:
            return
        self._check_usable("close")
        deadline = self._clock() + timeout_s
        try:
            self._settle(timeout_s)
        finally:
            self._closed = True
            self._session.leave()
            for session in (*self._left, self._session):
                session.wait(max(0.0, deadline - self._clock()))

    def poll(self, timeout_s: float) -> list[MemberEvent]:
        """Take part in the group for at most `timeout_s`, and tell what happened, in its order. Returns early when something did."""
        self._check_usable("poll")
        try:
            # In here: a signal handler that raises may do so between any two lines.
            self._busy = True
            return self._poll(timeout_s)
        finally:
            self._busy = False

    def release(self) -> None:
        """Let the group complete the held revoke, for all of its partitions at once.

        Should it turn out that the hold was superseded, nothing is sent, and the next poll reports the loss.
        """
        self._check_usable("release")
        hold = self._session.hold
        if hold is not None:
            # A commit that reached the broker after the release could overwrite what the next owner has committed.
            if not self._settle(hold.requested_at + self._settings.max_poll_interval_s - self._clock()):
                # Seen with a broker that is frozen, not gone: no answer for minutes. The next poll gives the membership up.
                self._session.ended = LostReason.EXPIRED
            if self._settings.is_classic and self._settings.refreshes_metadata:
                self._confirm_hold()
            if not self.held:
                return
        if self._session.ended is None:
            self._session.release()

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store next offsets and metadata, all in one request; a partition that is not assigned fails without being asked for."""
        self._check_usable("commit", nested=True)
        if self._busy and self._session.commits.pending:
            msg = "commit inside a callback of poll while another commit is on its way: use commit_async there"
            raise IllegalStateError(msg)
        self._settle()
        return self._session.commits.store(offsets)

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Store like `commit`, without waiting: a `CommitAnswered` with the number that this returns follows."""
        self._check_usable("commit_async", nested=True)
        ticket = next(self._tickets)
        self._session.commits.begin(ticket, offsets)
        return ticket

    def settle(self, timeout_s: float) -> bool:
        """Wait until no commit is on its way; whether that came about. What happens meanwhile is told by the next poll."""
        self._check_usable("settle")
        return self._settle(timeout_s)

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = _READ_TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where it has nothing."""
        self._check_usable("committed", nested=True)
        attempt = self._attempt(f"reading what group '{self._settings.group_id}' has committed for {names(partitions)}")
        try:
            found = answered(lambda limit_s: self._session.commits.read(partitions, limit_s), timeout_s, self._cause)
        except KafkaException as problem:
            raise broker_error(self._cause(kafka_error(problem)), attempt) from problem
        self._session.troubles.clear()
        return found

    def _cause(self, error: KafkaError) -> KafkaError:
        """The reason behind a time-out: a member that is asked before its first poll has told nobody why it cannot connect."""
        if not self._busy:
            self._session.serve(0)
        return cause_among(self._session.troubles, error)

    def metrics(self) -> dict[str, Any]:
        """The client's latest statistics, parsed; none while `statistics.interval.ms` is off, and before the first."""
        return {} if self._closed else self._session.metrics()

    def group_metadata(self) -> object:
        """What a transactional producer is given to commit this member's offsets: the client's own object, opaque."""
        self._check_usable("group_metadata", nested=True)
        self._probe.others_commit = True
        return self._session.consumer.consumer_group_metadata()

    def _settle(self, timeout_s: float = math.inf) -> bool:
        """Without a limit the client gives up by itself, as with a commit that is waited for."""
        was_busy, self._busy = self._busy, True
        try:
            return self._session.settle(self._clock() + timeout_s)
        finally:
            self._busy = was_busy

    def _poll(self, timeout_s: float) -> list[MemberEvent]:
        session = self._session
        if session.hold is not None:
            self._watch()
        elif session.ended is None:
            self._probe_at = self._clock()
            if not (session.is_settling and self._settings.is_classic):
                self._discovery.look(session)
        if session.ended is None:
            session.serve(timeout_s)
        if session.ended is not None:
            return self._give_up(session.ended)
        return self._take()

    def _take(self) -> list[MemberEvent]:
        carried, self._carried = self._carried, []
        return [*carried, *self._session.take()]

    def _watch(self) -> None:
        """Look for the signs of a hold that went wrong, since the client names none."""
        session, now = self._session, self._clock()
        hold = session.hold
        if hold is None or session.ended is not None:
            return
        if now >= hold.requested_at + self._settings.max_poll_interval_s:
            session.ended = LostReason.EXPIRED
        elif session.member_id != hold.member_id:
            session.ended = LostReason.FENCED
        elif now >= self._probe_at:
            self._probe_at = now + self._probe_interval_s
            self._probe.look(session)

    def _confirm_hold(self) -> None:
        """Wait for statistics that are newer than the wish to release: a stale unassign would give away what was granted since."""
        session, deadline = self._session, self._clock() + _CONFIRM_TIMEOUT_S
        wanted = session.reports_in_hold + 2
        while session.hold is not None and session.ended is None and session.reports_in_hold < wanted and self._clock() < deadline:
            session.serve(0.1)

    def _give_up(self, reason: LostReason) -> list[MemberEvent]:
        held, lost = self.held, self.assignment()
        self._session.commits.give_up()
        happened = self._take()
        logger.warning("group '%s': %s lost (%s); joining anew", self._settings.group_id, names(lost), reason.value)
        self._start_over()
        told: list[MemberEvent] = [HoldSuperseded(tuple(sorted(held)))] if reason is LostReason.SUPERSEDED else []
        return [*happened, *told, PartitionsLost(tuple(sorted(lost)), reason)]

    def _start_over(self) -> Session:
        """Leave in the background: the caller must hear of a loss now, and a broker that is away would keep it waiting."""
        left = self._session
        left.leave()
        self._left = [session for session in (*self._left, left) if session.is_leaving]
        self._session = Session(self._settings, self._clock, self._probe.answered)
        self._discovery.start_over()
        return left

    def _attempt(self, doing: str) -> Attempt:
        return Attempt(doing, self._settings.brokers)

    def _check_usable(self, call: str, *, nested: bool = False) -> None:
        if self._closed:
            msg = f"{call} on a closed consumer: make a new one"
            raise IllegalStateError(msg)
        if self._busy and not nested:
            msg = f"{call} inside a callback of poll: return from the callback first"
            raise IllegalStateError(msg)

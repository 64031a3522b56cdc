"""The member of the group: the control plane, which heartbeats, holds, probes, commits and releases, and never reads a record.

Owns how long a membership lasts. A hold that went wrong (fenced, superseded, expired) is told by nobody, so it is looked for. Then the
membership ends, all of its partitions are reported lost exactly once, and the member joins anew with a new client: the unassign of a
stale hold is never sent, because librdkafka would apply it to partitions that it was granted in the meantime.

Must only be used by one thread at a time.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.consumer.cluster import Cluster
from dagster_rebalance.consumer.discovery import Discovery
from dagster_rebalance.consumer.events import CommitResult, HoldSuperseded, LostReason, MemberEvent, PartitionsLost
from dagster_rebalance.consumer.kafka_errors import FENCED_IN_A_HOLD, Attempt, broker_error, commit_error, kafka_error, names
from dagster_rebalance.consumer.session import Session
from dagster_rebalance.consumer.translation import as_committed, ours, theirs, to_commit
from dagster_rebalance.core.errors import BrokerError, IllegalStateError, PartitionLostError

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
        roster: The ids of the members that the coordinator knows; raises KafkaException without an answer.

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
        roster: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._probe_interval_s = probe_interval_s
        self._discovery = Discovery(settings, clock, discovery_interval_s)
        self._roster = roster or Cluster(settings, clock=clock).roster
        self._probe_at = clock()
        self._seen: dict[TopicPartition, OffsetAndMetadata | None] = {}
        self._busy = self._closed = False
        self._session = Session(settings, clock)

    @property
    def member_id(self) -> str:
        """The id the group knows this member by; empty before it joined."""
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

    def unsubscribe(self) -> None:
        """Leave the group; what is still held goes with it."""
        self._check_usable("unsubscribe")
        self._discovery.want(())
        self._start_over()

    def close(self, timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
        """Leave the group within `timeout_s`; may be called again."""
        if self._closed:
            return
        self._check_usable("close")
        self._closed = True
        self._session.close(timeout_s)

    def poll(self, timeout_s: float) -> list[MemberEvent]:
        """Take part in the group for at most `timeout_s`, and tell what happened, in its order. Returns early when something did."""
        self._check_usable("poll")
        self._busy = True
        try:
            return self._poll(timeout_s)
        finally:
            self._busy = False

    def release(self) -> None:
        """Let the group complete the held revoke, for all of its partitions at once.

        Should it turn out that the hold was superseded, nothing is sent, and the next poll reports the loss.
        """
        self._check_usable("release")
        if self._settings.is_classic and self._settings.refreshes_metadata and self.held:
            self._confirm_hold()
            if not self.held:
                return
        if self._session.ended is None:
            self._session.release()

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store next offsets and metadata, all in one request; a partition that is not assigned fails without being asked for."""
        self._check_usable("commit", nested=True)
        owned = self.assignment()
        failed: dict[TopicPartition, BrokerError] = {
            tp: PartitionLostError(
                f"commit for {tp} refused: it is not assigned to this member; stop the work on it", partitions={tp: "not assigned"}
            )
            for tp in offsets
            if tp not in owned
        }
        wanted = {tp: offset for tp, offset in offsets.items() if tp in owned}
        if wanted:
            failed.update(self._store(wanted))
        return CommitResult(frozenset(offsets).difference(failed), failed)

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = _READ_TIMEOUT_S
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where it has nothing."""
        self._check_usable("committed", nested=True)
        attempt = self._attempt(f"reading the committed offsets of {len(partitions)} partitions")
        try:
            found = self._read(partitions, timeout_s)
        except KafkaException as problem:
            raise broker_error(kafka_error(problem), attempt) from problem
        if self._session.hold is None:
            self._seen.update(found)
        return found

    def _poll(self, timeout_s: float) -> list[MemberEvent]:
        session = self._session
        if session.hold is None:
            self._probe_at = self._clock()
            self._discovery.look(session)
        else:
            self._watch()
        if session.ended is None:
            session.serve(timeout_s)
        events = session.take()
        if session.ended is not None:
            events += self._give_up(session.ended)
        for event in events:
            if isinstance(event, PartitionsLost):
                for tp in event.partitions:
                    self._seen.pop(tp, None)
        return events

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
            session.ended = self._probe()

    def _probe(self) -> LostReason | None:
        """Ask the broker whether it still knows us: read what is committed, and commit one of it back unchanged.

        What was committed by somebody else shows a supersession, and must not be overwritten. One partition is enough: the broker checks
        the member, not the partition (and preferably a retained one, which nobody else can own). Where nothing is committed yet, the
        coordinator is asked for its members; reading alone is answered to anybody.
        """
        try:
            found = self._read(self.assignment(), _READ_TIMEOUT_S)
        except KafkaException as problem:
            return self._verdict(kafka_error(problem))
        moved = [tp for tp, offset in found.items() if tp in self._seen and _differs(self._seen[tp], offset)]
        if moved:
            logger.warning("group '%s': somebody else committed %s, which this member holds", self._settings.group_id, names(moved))
            return LostReason.SUPERSEDED
        self._seen.update(found)
        anchors = sorted((tp in self.held, tp, offset) for tp, offset in found.items() if offset is not None)
        try:
            if anchors:
                _, tp, offset = anchors[0]
                self._session.consumer.commit(offsets=[to_commit(tp, offset)], asynchronous=False)
            elif self._session.member_id not in self._roster():
                return LostReason.FENCED
        except KafkaException as problem:
            return self._verdict(kafka_error(problem))
        return None

    def _verdict(self, error: KafkaError) -> LostReason | None:
        if error.code() in FENCED_IN_A_HOLD:
            return LostReason.FENCED
        logger.info("group '%s': a probe during a hold got no answer: %s", self._settings.group_id, error.str())
        return None

    def _confirm_hold(self) -> None:
        """Wait for statistics that are newer than the wish to release: a stale unassign would give away what was granted since."""
        session, deadline = self._session, self._clock() + _CONFIRM_TIMEOUT_S
        wanted = session.reports_in_hold + 2
        while session.hold is not None and session.ended is None and session.reports_in_hold < wanted and self._clock() < deadline:
            session.serve(0.1)

    def _give_up(self, reason: LostReason) -> list[MemberEvent]:
        held, lost = self.held, self.assignment()
        logger.warning("group '%s': %s lost (%s); joining anew", self._settings.group_id, names(lost), reason.value)
        self._start_over()
        told: list[MemberEvent] = [HoldSuperseded(tuple(sorted(held)))] if reason is LostReason.SUPERSEDED else []
        return [*told, PartitionsLost(tuple(sorted(lost)), reason)]

    def _start_over(self) -> None:
        self._session.close(_LEAVE_TIMEOUT_S)
        self._session = Session(self._settings, self._clock)
        self._discovery.start_over()
        self._seen.clear()

    def _read(self, partitions: Collection[TopicPartition], timeout_s: float) -> dict[TopicPartition, OffsetAndMetadata | None]:
        if not partitions:
            return {}
        found = self._session.consumer.committed([theirs(tp) for tp in sorted(partitions)], timeout=timeout_s)
        for tp in found:
            if tp.error is not None:
                raise KafkaException(tp.error)
        return {ours(tp): as_committed(tp) for tp in found}

    def _store(self, wanted: Mapping[TopicPartition, OffsetAndMetadata]) -> dict[TopicPartition, BrokerError]:
        errors: dict[TopicPartition, KafkaError] = {}
        # Waited for without a limit (librdkafka gives up by itself, after 46 s with a dead broker): a commit that was given up here could
        # still be sent later, under a newer generation, and overwrite what the next owner has committed.
        try:
            answers = self._session.consumer.commit(offsets=[to_commit(tp, offset) for tp, offset in wanted.items()], asynchronous=False)
        except KafkaException as problem:
            errors = dict.fromkeys(wanted, kafka_error(problem))
        else:
            errors = {ours(tp): tp.error for tp in answers or () if tp.error is not None}
        for tp, offset in wanted.items():
            if tp in errors:
                # It may have been stored all the same, with only the answer lost.
                self._seen.pop(tp, None)
            else:
                self._seen[tp] = offset
        holding = self._session.hold is not None
        if holding and any(error.code() in FENCED_IN_A_HOLD for error in errors.values()):
            self._session.ended = self._session.ended or LostReason.FENCED
        attempt = self._attempt(f"commit in group '{self._settings.group_id}'")
        return {tp: commit_error(error, attempt, [tp], holding=holding) for tp, error in errors.items()}

    def _attempt(self, doing: str) -> Attempt:
        return Attempt(doing, self._settings.brokers)

    def _check_usable(self, call: str, *, nested: bool = False) -> None:
        if self._closed:
            msg = f"{call} on a closed consumer: make a new one"
            raise IllegalStateError(msg)
        if self._busy and not nested:
            msg = f"{call} inside a callback of poll: return from the callback first"
            raise IllegalStateError(msg)


def _differs(one: OffsetAndMetadata | None, other: OffsetAndMetadata | None) -> bool:
    """Whether two commits are not the same. The leader epoch does not count: not every broker gives back what was sent."""
    return (one and (one.offset, one.metadata)) != (other and (other.offset, other.metadata))

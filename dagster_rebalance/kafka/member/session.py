"""A session is one membership in the group: a confluent Consumer with a thread of its own.

The membership lasts from joining to leaving.

To hold a revoke, the thread stays in `on_revoke`, which the client calls in it, until the member
releases the partitions. Meanwhile librdkafka heartbeats by itself, the thread commits from inside
the callback, and the group gives the partitions to nobody else. Then the callback unassigns them
and returns. `docs/held-revoke.md` has the measurements.

Owns the client: every call of it is made by this thread, because a commit from another thread was
seen to hang while this one is in `poll`. Owns what is assigned, and the hold. Every partition stays
paused, because records come from elsewhere. Callbacks never raise. What follows from the end of a
membership is the member's to decide.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from concurrent.futures import TimeoutError as NotAnsweredError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import named
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    CREDENTIALS,
    PASSING,
    POLLED_TOO_LATE,
    TROUBLES_KEPT,
    Attempt,
    broker_error,
    is_final,
    is_login_not_renewed,
    is_of_a_topic,
    kafka_error,
    said,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.owner_thread import OwnerThread
from dagster_rebalance.kafka.client.types import ours, theirs
from dagster_rebalance.kafka.cluster.missing_topics import MissingTopics
from dagster_rebalance.kafka.group_ports import MemberEvent, RequestFailed
from dagster_rebalance.kafka.member.commits import Commits
from dagster_rebalance.kafka.member.fencing_probe import Probe
from dagster_rebalance.kafka.member.leave import leave, unassign
from dagster_rebalance.kafka.member.session_view import HeldRevoke, UserCallback

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.member.topic_discovery import Discovery

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 0.1
"""How long the thread waits for requests before it lets the client call back: how late a rebalance
is noticed."""


Told: TypeAlias = "MemberEvent | UserCallback"


class Session:
    """One confluent Consumer in the group.

    Args:
        settings: Validated settings.
        clock: A monotonic clock.
        discovery: Which topics to take part for.
        probe_interval_s: How often fencing is looked for during a hold.

    Attributes:
        consumer: The client. Only to be called by this session's thread.
        member_id: The id the broker knows this member by; empty while it is not known there.
        hold: The revoke that was requested and is not released yet.
        broken: The fatal error after which the client does nothing any more. It ended the
            membership.
        seen_at: When the caller polled last. Must be kept up to date by the caller.
        heard: How many of its events were taken.

    Raises:
        ConfigurationError: The client refuses a setting; the message names it.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        discovery: Discovery,
        probe_interval_s: float,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._discovery = discovery
        self._owned: dict[TopicPartition, int] = {}
        self._events_told = 0
        self._ends: deque[LostReason] = deque()
        self._is_leaving = False
        self._is_settling = False
        self._has_unsubscribed = False
        self._topics: tuple[str, ...] = ()
        self._has_joined = False
        self._statistics = ""
        self._missing = MissingTopics()
        self._told: deque[Told] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._polled = threading.Event()
        self._attempt = Attempt(f"membership in group '{settings.group_id}'", settings.brokers)
        self.troubles: deque[KafkaError] = deque(maxlen=TROUBLES_KEPT)
        self.hold: HeldRevoke | None = None
        self.broken: BrokerError | None = None
        self.seen_at = clock()
        self.heard = 0
        self.commits = Commits(self, settings, clock)
        self.probe = Probe(settings, self.commits, clock, probe_interval_s)
        self.consumer = self._connect()
        self._login = Login(settings.credentials, self.consumer)
        self.member_id = self.consumer.memberid() or ""
        self._thread = OwnerThread(f"member of {settings.group_id}")
        self._life = self._thread.submit(self._live, nested=False)

    # For the caller, from any thread

    @property
    def ended(self) -> LostReason | None:
        """Why the membership is over: the first reason that anybody found."""
        return self._ends[0] if self._ends else None

    def end(self, reason: LostReason) -> None:
        """End the membership: the group is left, and nothing more is told.

        The first reason stays.
        """
        self._ends.append(reason)
        self.ring()

    def end_broken(self, error: KafkaError) -> None:
        """End the membership, because the client does nothing any more. The first error stays."""
        self.broken = self.broken or broker_error(error, self._attempt, topics=self._topics)
        self.end(LostReason.SESSION)

    def want(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part for these topics."""
        self._discovery.want(subscription)

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Have something answered by this session's thread, in the order of the calls."""
        return self._thread.submit(function)

    def do(self, function: Callable[[], None]) -> None:
        """Have something done that nobody waits for, in the same order.

        The membership ends if it fails.
        """
        self._thread.submit(partial(self._attempted, function))

    def wait(self, timeout_s: float) -> None:
        """Wait for something to tell, or for `ring`."""
        with suppress(Empty):
            self._bell.get(timeout=timeout_s)
            while True:
                self._bell.get_nowait()

    def ring(self) -> None:
        """End the wait of the caller. Any thread and a signal handler may do so."""
        # A queue that is written in C: an event's lock may be held by the thread that a signal
        # interrupts. One entry is enough, and a caller that never waits takes none out.
        if self._bell.empty():
            self._bell.put(None)

    def wait_for_callbacks(self, timeout_s: float) -> None:
        """Wait until the session has polled the client once more; not in a hold.

        By then the client has told why it cannot connect.
        """
        self._polled.clear()
        self._polled.wait(timeout_s)

    @property
    def news(self) -> Told | None:
        """The oldest event that the caller has not taken; None when there is none."""
        return self._told[0] if self._told else None

    def taken(self) -> None:
        """The caller has taken the oldest event."""
        self.heard += 1
        self._told.popleft()

    def metrics(self) -> dict[str, Any]:
        """The client's latest statistics; none when they are switched off, or before the first."""
        parsed: dict[str, Any] = json.loads(self._statistics or "{}")
        return parsed

    def leave(self) -> None:
        """Leave the group in the background; a hold that is not released yet goes with it."""
        self._is_leaving = True
        self._thread.stop()

    @property
    def was_left(self) -> bool:
        """Whether `leave` was called."""
        return self._is_leaving

    @property
    def is_leaving(self) -> bool:
        """Whether the client is not gone yet, after `leave`."""
        return self._is_leaving and not self._life.done()

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until the client is gone, after `leave`.

        A leave that takes longer goes on in the background.
        """
        timeout_s = min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        try:
            self._life.result(timeout_s)
        except NotAnsweredError:
            logger.warning(
                "leaving group '%s' takes longer than %g s: it goes on in the background",
                self._settings.group_id,
                timeout_s,
            )

    # For this session's parts, in its thread

    def owns(self, partition: TopicPartition, heard: int) -> bool:
        """Return whether a partition is assigned and the caller has heard of that.

        `heard` counts the events that the caller had taken.
        """
        return partition in self._owned and self._owned[partition] <= heard

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What is assigned and neither released nor lost."""
        return frozenset(self._owned)

    def tell(self, event: Told) -> None:
        """Let the caller's next poll return an event."""
        self._events_told += 1
        self._told.append(event)
        self.ring()

    def call_user(self, callback: str, *arguments: object) -> None:
        """Let the caller's next poll call back what the user has set, if anything."""
        function = self._settings.user.get(callback)
        if function is not None:
            self.tell(UserCallback(function, arguments))

    def subscribe(self, topics: list[str]) -> None:
        """Join the group for these topics, or change them; with none, leave it by a revoke."""
        self._has_unsubscribed = not topics
        self._topics = tuple(topics)
        if not topics:
            self.consumer.unsubscribe()
            return
        self._attempt = Attempt(
            f"membership in group '{self._settings.group_id}' for {_listed(topics)}",
            self._settings.brokers,
        )
        self.consumer.subscribe(
            topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def release(self) -> None:
        """Complete the held revoke, for all of its partitions.

        The release goes out behind all commits that the caller made before.
        """
        self.commits.send()
        hold = self.hold
        if hold is None or self.ended is not None:
            return
        try:
            unassign(self.consumer, hold.partitions, eager=self._settings.is_eager)
        except KafkaException as problem:
            # The client does not hold them any more: another rebalance was faster.
            logger.warning("the release of %s was refused: %s", named(hold.partitions), problem)
            self.end(LostReason.SUPERSEDED)
            return
        self._disown(hold.partitions)
        # No rebalance follows the release of a client that leaves.
        self._is_settling = not self._has_unsubscribed
        self.hold = None

    # The thread

    def _live(self) -> None:
        self._attempted(self._take_turns)
        try:
            leave(self.consumer)
        except (KafkaException, RuntimeError) as problem:
            logger.warning("leaving group '%s' failed: %s", self._settings.group_id, problem)

    def _take_turns(self) -> None:
        while self._goes_on():
            # Not in a hold: the client can take a new login in no callback of its own.
            self._login.renew()
            self._take_part()
            self._serve()

    def _attempted(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            logger.exception("group '%s': the member's thread failed", self._settings.group_id)
            self.end(LostReason.SESSION)

    def _goes_on(self) -> bool:
        return self.ended is None and not self._is_leaving

    def _serve(self) -> None:
        """Do what is asked for, and see whether whoever asks is still there."""
        self._thread.serve(_SLICE_S)
        self.commits.send()
        if (
            self._discovery.wanted
            and self._clock() - self.seen_at > self._settings.max_poll_interval_s
        ):
            logger.warning(
                "group '%s': `poll` was not called for %g s ('max.poll.interval.ms'): the "
                "partitions are given up",
                self._settings.group_id,
                self._settings.max_poll_interval_s,
            )
            self.end(LostReason.SESSION)

    def _take_part(self) -> None:
        """Let the client call back, and look for topics.

        All that is queued is taken: behind the news that `poll` came too late lies the callback
        that tells the loss.
        """
        if not (self._is_settling and self._settings.is_classic):
            self._discovery.look(self)
        try:
            message = self.consumer.poll(0)
            while message is not None:
                self._note_of(message)
                message = self.consumer.poll(0)
        except KafkaException as problem:
            self._note(kafka_error(problem))
        self.member_id = self.consumer.memberid() or ""
        self._polled.set()

    def _connect(self) -> confluent_kafka.Consumer:
        config = self._settings.member()
        config.update({"error_cb": self._on_error, "stats_cb": self._on_statistics})
        config.pop(
            "on_commit", None
        )  # it is called for commits that are not waited for, and here all are
        if "throttle_cb" in config:
            config["throttle_cb"] = partial(self.call_user, "throttle_cb")
        return made(confluent_kafka.Consumer, config)

    def _on_assign(
        self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
    ) -> None:
        self._is_settling = False
        if not self._goes_on():
            return
        # A partition that is granted twice would raise _CONFLICT out of poll.
        known = {ours(tp) for tp in consumer.assignment()}
        fresh = [tp for tp in map(ours, partitions) if tp not in known]
        # An absolute offset keeps the client from looking up the committed one: nothing is ever
        # read here.
        starts = [theirs(tp, 0) for tp in fresh]
        try:
            if self._settings.is_eager:
                consumer.assign(starts)
            else:
                consumer.incremental_assign(starts)
            consumer.pause(starts)
        except KafkaException as problem:
            self._note(kafka_error(problem))
            return
        self._missing.found(fresh)
        self._has_joined = True
        self.member_id = consumer.memberid() or ""
        self.tell(PartitionsAssigned(tuple(fresh)))
        self._owned.update(dict.fromkeys(fresh, self._events_told))

    def _on_revoke(
        self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
    ) -> None:
        """Hold: the client waits for the end of this callback."""
        if not partitions or not self._goes_on():
            return
        held = tuple(map(ours, partitions))
        # The id from before the callback: the client calls back for a revoke also when the session
        # ended before that, and has no id then (librdkafka#5604).
        self.hold = hold = HeldRevoke(frozenset(held), self._clock(), self.member_id)
        self.tell(RevokeRequested(held))
        self.probe.begin()
        while self._holds(hold) and self._goes_on():
            self._watch(hold)
            self._serve()
        if not self._holds(hold):
            return
        # The membership is over. A client that has unsubscribed is granted nothing that a late
        # unassign could give away.
        try:
            consumer.unsubscribe()
            unassign(consumer, hold.partitions, eager=self._settings.is_eager)
        except KafkaException as problem:
            logger.info("group '%s': ending a hold: %s", self._settings.group_id, problem)

    def _holds(self, hold: HeldRevoke) -> bool:
        return self.hold is hold

    def _watch(self, hold: HeldRevoke) -> None:
        """Look for the signs of a hold that went wrong, since the client names none."""
        self.member_id = self.consumer.memberid() or ""
        if self._clock() >= hold.requested_at + self._settings.max_poll_interval_s:
            self.end(LostReason.EXPIRED)
        elif self.member_id != hold.member_id:
            self.end(LostReason.FENCED)
        else:
            self.probe.look(self)

    def _on_lost(
        self, _consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
    ) -> None:
        self._is_settling = False
        gone = self._owned.keys() & set(map(ours, partitions))
        if gone and self._goes_on():  # a membership that has ended is told as lost as a whole
            self._disown(gone)
            self.tell(PartitionsLost(tuple(sorted(gone)), LostReason.SESSION))

    def _disown(self, partitions: Collection[TopicPartition]) -> None:
        """What is committed for these is the next owner's from now on."""
        for tp in partitions:
            self._owned.pop(tp, None)
        self.commits.disown(partitions)

    def _on_error(self, error: KafkaError) -> None:
        self.troubles.append(error)
        if error.code() in CREDENTIALS or is_final(error):
            self._note(error)
        else:
            logger.info("group '%s': %s", self._settings.group_id, said(error))
        self.call_user("error_cb", error)

    def _note_of(self, message: confluent_kafka.Message) -> None:
        error = message.error()
        if error is not None and not self._missing.is_known(message, error):
            topic = message.topic()
            if topic is None and is_of_a_topic(error):
                self._discovery.leave_hidden_out()
            self._note(error, self._topics if topic is None else [topic])

    def _note(self, error: KafkaError, topics: Collection[str] = ()) -> None:
        self.troubles.append(error)
        if is_final(error):
            self.end_broken(error)
        elif error.code() == POLLED_TOO_LATE:
            # The client tells of the loss by itself, and joins again.
            logger.warning("group '%s': %s", self._settings.group_id, self._attempt.explain(error))
        elif self._has_joined and is_login_not_renewed(error):
            # What it has may be valid for long. When it is not, what is asked of Kafka will fail.
            logger.warning("group '%s': %s", self._settings.group_id, said(error))
        elif error.code() in PASSING:
            logger.info("group '%s': %s", self._settings.group_id, said(error))
        else:
            self.tell(RequestFailed(broker_error(error, self._attempt, topics=topics)))

    def _on_statistics(self, raw: str) -> None:
        self._statistics = raw
        self.call_user("stats_cb", raw)


def _listed(topics: list[str], most: int = 5) -> str:
    more = f" and {len(topics) - most} more topics" if len(topics) > most else ""
    return ", ".join(f"'{topic}'" for topic in topics[:most]) + more

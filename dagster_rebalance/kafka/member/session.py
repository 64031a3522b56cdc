# ruff: noqa: D102 - `SessionView` documents the methods without a docstring
"""One membership in the group: a confluent Consumer with a separate thread, from join to leave.

To hold a revoke, the thread stays in the client's `on_revoke` callback until the member releases
the partitions. librdkafka heartbeats, the thread commits from inside the callback, and the group
gives the partitions to no other member (docs/held-revoke.md). A callback never raises, and the
client never keeps a partition that is not in `owned`: both end the membership.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.kafka.client.confluent import create_client, from_confluent, to_confluent
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    CREDENTIALS,
    POLLED_TOO_LATE,
    RECENT_ERRORS,
    TRANSIENT,
    Operation,
    broker_error,
    error_text,
    is_final,
    is_renewal_failure,
    is_topic_error,
    kafka_error,
)
from dagster_rebalance.kafka.client.owner_thread import OwnerThread
from dagster_rebalance.kafka.client.reported_errors import MissingTopics
from dagster_rebalance.kafka.group_ports import RequestFailed
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
    from dagster_rebalance.kafka.member.session_view import SessionEvent
    from dagster_rebalance.kafka.member.topic_discovery import Discovery

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Arguments = ParamSpec("_Arguments")

_SLICE_S = 0.1
"""How long the thread waits for requests between two polls of the client: the delay with which it
notices a rebalance."""


def _callback(
    function: Callable[Concatenate[Session, _Arguments], None],
) -> Callable[Concatenate[Session, _Arguments], None]:
    """Let a failing callback of the client end the membership instead of raising."""

    @wraps(function)
    def run(session: Session, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        session.run_or_end(partial(function, session, *args, **kwargs))

    return run


class Session:
    """One confluent Consumer in the group, with all partitions paused: a fetcher reads the records.

    Only its thread calls the client, because a commit from another thread may hang during a `poll`.
    The caller sets `polled_at` at each of its polls.
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
        self._owned_since_event: dict[TopicPartition, int] = {}
        """The number of the event that reported each partition as assigned."""
        self._events_queued = 0
        # The first one counts. `append` is atomic, and two threads may end the membership.
        self._end_reasons: deque[LostReason] = deque()
        self.leave_requested = False
        self._is_settling = False
        """Whether a release was sent, and the assignment that follows it has not arrived."""
        self._has_unsubscribed = False
        self._topics: tuple[str, ...] = ()
        self._has_joined = False
        self._statistics = ""
        self._missing = MissingTopics()
        self._events: deque[SessionEvent] = deque()
        self._notifications: SimpleQueue[None] = SimpleQueue()
        self._polled = threading.Event()
        self._operation = Operation(f"membership in group '{settings.group_id}'", settings.brokers)
        self.recent_errors: deque[KafkaError] = deque(maxlen=RECENT_ERRORS)
        self.hold: HeldRevoke | None = None
        self.fatal_error: BrokerError | None = None
        self.polled_at = clock()
        self.events_taken = 0
        self.commits = Commits(self, settings, clock)
        self.probe = Probe(settings, self.commits, clock, probe_interval_s)
        self.consumer = self._connect()
        self._login = Login(settings.credentials, self.consumer)
        self.member_id = self.consumer.memberid() or ""
        self._thread = OwnerThread(f"member of {settings.group_id}")
        self._life = self._thread.submit(self._live, nested=False)

    # For the caller, from any thread

    @property
    def end_reason(self) -> LostReason | None:
        return self._end_reasons[0] if self._end_reasons else None

    def end(self, reason: LostReason) -> None:
        self._end_reasons.append(reason)
        self.notify()

    def fail(self, error: KafkaError) -> None:
        self.fatal_error = self.fatal_error or broker_error(
            error, self._operation, topics=self._topics
        )
        self.end(LostReason.SESSION)

    def set_subscription(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Subscribe to these topics at the next refresh."""
        self._discovery.set_subscription(subscription)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in this session's thread, in the order of the calls."""
        return self._thread.submit(function)

    def submit_or_end(self, function: Callable[[], None]) -> None:
        """Run a function as `submit` does, and end the membership if it fails."""
        self._thread.submit(partial(self.run_or_end, function))

    def wait(self, timeout_s: float) -> None:
        """Wait for an event, or for `notify`."""
        with suppress(Empty):
            self._notifications.get(timeout=timeout_s)
            while True:
                self._notifications.get_nowait()

    def notify(self) -> None:
        """End the wait of the caller. Any thread and a signal handler may call it."""
        # `SimpleQueue.put` is reentrant. A signal handler could deadlock on a `threading.Event`. At
        # most about one entry is queued.
        if self._notifications.empty():
            self._notifications.put(None)

    def wait_for_callbacks(self, timeout_s: float) -> None:
        """Wait for the next poll of the client, which serves queued callbacks.

        A callback may report why the client cannot connect. The wait times out during a hold.
        """
        self._polled.clear()
        self._polled.wait(timeout_s)

    @property
    def has_news(self) -> bool:
        """Whether there are events that the caller has not taken, or the membership has ended."""
        return bool(self._events or self._end_reasons)

    @property
    def next_event(self) -> SessionEvent | None:
        """The oldest event that the caller has not taken, or None."""
        return self._events[0] if self._events else None

    def take_event(self) -> None:
        """Remove the oldest event."""
        self.events_taken += 1
        self._events.popleft()

    def metrics(self) -> dict[str, Any]:
        """Return the client's latest statistics; empty while they are off, or before the first."""
        parsed: dict[str, Any] = json.loads(self._statistics or "{}")
        return parsed

    def leave(self) -> None:
        """Leave the group in the background, and give up a hold that is not released yet."""
        self.leave_requested = True
        self._thread.stop()

    @property
    def is_leaving(self) -> bool:
        """Whether `leave` was called, and the client is not closed yet."""
        return self.leave_requested and not self._life.done()

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait after `leave` until the client is closed.

        After the timeout, the leave continues in the background.
        """
        timeout_s = min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        try:
            self._life.result(timeout_s)
        except FutureTimeoutError:
            logger.warning(
                "leaving group '%s' takes longer than %g s: it continues in the background",
                self._settings.group_id,
                timeout_s,
            )

    # For commits, probe and discovery, in this session's thread

    def owns(self, partition: TopicPartition, events_taken: int) -> bool:
        since = self._owned_since_event.get(partition)
        return since is not None and since <= events_taken

    @property
    def owned(self) -> frozenset[TopicPartition]:
        return frozenset(self._owned_since_event)

    def enqueue(self, event: SessionEvent) -> None:
        self._events_queued += 1
        self._events.append(event)
        self.notify()

    def call_user(self, callback: str, *arguments: object) -> None:
        function = self._settings.user.get(callback)
        if function is not None:
            self.enqueue(UserCallback(function, arguments))

    def subscribe(self, topics: list[str]) -> None:
        self._has_unsubscribed = not topics
        self._topics = tuple(topics)
        if not topics:
            self.consumer.unsubscribe()
            return
        self._operation = Operation(
            f"membership in group '{self._settings.group_id}' for {_topic_names(topics)}",
            self._settings.brokers,
        )
        self.consumer.subscribe(
            topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def release(self) -> None:
        """Complete the held revoke, after all earlier commits of the caller."""
        self.commits.send()
        hold = self.hold
        if hold is None or self.end_reason is not None:
            return
        try:
            unassign(self.consumer, hold.partitions, eager=self._settings.is_eager)
        except KafkaException as problem:
            # The client no longer has them: another rebalance has already removed them.
            logger.warning("the release of %s was refused: %s", names_of(hold.partitions), problem)
            self.end(LostReason.SUPERSEDED)
            return
        self._disown(hold.partitions)
        # No rebalance follows the release of a client that leaves.
        self._is_settling = not self._has_unsubscribed
        self.hold = None

    # The thread

    def _live(self) -> None:
        self.run_or_end(self._run)
        try:
            leave(self.consumer)
        except (KafkaException, RuntimeError) as problem:
            logger.warning("leaving group '%s' failed: %s", self._settings.group_id, problem)

    def _run(self) -> None:
        while self._is_active():
            # Not in a hold: the client cannot take a new login inside one of its callbacks. A login
            # that expires during a hold is not renewed.
            self._login.renew()
            self._poll_client()
            self._serve()

    def run_or_end(self, function: Callable[[], None]) -> None:
        """Run a function in this session's thread, and end the membership if it fails."""
        try:
            function()
        except Exception:
            logger.exception("group '%s': the member's thread failed", self._settings.group_id)
            self.end(LostReason.FAILED)

    def _is_active(self) -> bool:
        return self.end_reason is None and not self.leave_requested

    def _serve(self) -> None:
        """Run the caller's requests, send commits, and check that the caller still polls."""
        self._thread.serve(_SLICE_S)
        self.commits.send()
        if (
            self._discovery.subscription
            and self._clock() - self.polled_at > self._settings.max_poll_interval_s
        ):
            logger.warning(
                "group '%s': `poll` was not called for %g s ('max.poll.interval.ms'): the "
                "partitions are given up",
                self._settings.group_id,
                self._settings.max_poll_interval_s,
            )
            self.end(LostReason.SESSION)

    def _poll_client(self) -> None:
        """Refresh the subscription, and empty the queue of the client.

        After a late poll, the client queues the error first and `on_lost` after it.
        """
        if not (self._is_settling and self._settings.is_classic):
            self._discovery.refresh(self)
        try:
            message = self.consumer.poll(0)
            while message is not None:
                self._handle_message(message)
                message = self.consumer.poll(0)
        except KafkaException as problem:
            self._handle_error(kafka_error(problem))
        self.member_id = self.consumer.memberid() or ""
        self._polled.set()

    def _connect(self) -> confluent_kafka.Consumer:
        config = self._settings.member()
        config.update({"error_cb": self._on_error, "stats_cb": self._on_statistics})
        # `Commits` calls it. The client would call it for asynchronous commits only.
        config.pop("on_commit", None)
        if "throttle_cb" in config:
            config["throttle_cb"] = partial(self.call_user, "throttle_cb")
        return create_client(confluent_kafka.Consumer, config)

    @_callback
    def _on_assign(
        self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
    ) -> None:
        self._is_settling = False
        if not self._is_active():
            return
        # A partition that is granted twice would raise _CONFLICT out of poll.
        known = {from_confluent(tp) for tp in consumer.assignment()}
        fresh = [tp for tp in map(from_confluent, partitions) if tp not in known]
        # With an absolute offset, the client does not look up the committed one, which it does not
        # need: it reads no records.
        starts = [to_confluent(tp, 0) for tp in fresh]
        try:
            if self._settings.is_eager:
                consumer.assign(starts)
            else:
                consumer.incremental_assign(starts)
            consumer.pause(starts)
        except KafkaException as problem:
            # The client may have partitions that the member does not have.
            self._handle_error(kafka_error(problem))
            self.end(LostReason.FAILED)
            return
        self._missing.mark_found(fresh)
        self._has_joined = True
        self.member_id = consumer.memberid() or ""
        self.enqueue(PartitionsAssigned(tuple(fresh)))
        self._owned_since_event.update(dict.fromkeys(fresh, self._events_queued))

    @_callback
    def _on_revoke(
        self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
    ) -> None:
        """Hold the revoke: the client waits until this callback returns."""
        if not partitions or not self._is_active():
            return
        held = frozenset(map(from_confluent, partitions))
        # `_check_hold` compares with the id from before: if the session has already ended, the
        # client still calls `on_revoke`, without an id (librdkafka#5604).
        self.hold = hold = HeldRevoke(held, self._clock(), self.member_id)
        self.run_or_end(partial(self._keep, hold))
        if not self._holds(hold):
            return
        # The membership is over. Unsubscribe first: otherwise a new assignment could arrive, and
        # the unassign would remove it.
        try:
            consumer.unsubscribe()
            unassign(consumer, hold.partitions, eager=self._settings.is_eager)
        except KafkaException as problem:
            logger.info("group '%s': ending a hold: %s", self._settings.group_id, problem)

    def _keep(self, hold: HeldRevoke) -> None:
        self.enqueue(RevokeRequested(tuple(sorted(hold.partitions))))
        self.probe.start()
        while self._holds(hold) and self._is_active():
            self._check_hold(hold)
            self._serve()

    def _holds(self, hold: HeldRevoke) -> bool:
        return self.hold is hold

    def _check_hold(self, hold: HeldRevoke) -> None:
        """Detect a failed hold: the client reports no such failure."""
        self.member_id = self.consumer.memberid() or ""
        if self._clock() >= hold.requested_at + self._settings.max_poll_interval_s:
            self.end(LostReason.EXPIRED)
        elif self.member_id != hold.member_id:
            self.end(LostReason.FENCED)
        else:
            self.probe.check(self)

    @_callback
    def _on_lost(
        self, _consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
    ) -> None:
        self._is_settling = False
        gone = self._owned_since_event.keys() & set(map(from_confluent, partitions))
        if gone and self._is_active():  # the end of a membership reports all partitions as lost
            self._disown(gone)
            self.enqueue(PartitionsLost(tuple(sorted(gone)), LostReason.SESSION))

    def _disown(self, partitions: Collection[TopicPartition]) -> None:
        for tp in partitions:
            self._owned_since_event.pop(tp, None)
        self.commits.disown(partitions)

    @_callback
    def _on_error(self, error: KafkaError) -> None:
        if error.code() in CREDENTIALS or is_final(error):
            self._handle_error(error)
        else:
            self.recent_errors.append(error)
            logger.info("group '%s': %s", self._settings.group_id, error_text(error))
        self.call_user("error_cb", error)

    def _handle_message(self, message: confluent_kafka.Message) -> None:
        error = message.error()
        if error is not None and not self._missing.is_known(message, error):
            topic = message.topic()
            if topic is None and is_topic_error(error):
                self._discovery.exclude_invisible()
            self._handle_error(error, self._topics if topic is None else [topic])

    def _handle_error(self, error: KafkaError, topics: Collection[str] = ()) -> None:
        self.recent_errors.append(error)
        group_id = self._settings.group_id
        if is_final(error):
            self.fail(error)
        elif error.code() == POLLED_TOO_LATE:
            # The client reports the loss, and rejoins.
            logger.warning("group '%s': %s", group_id, self._operation.explain(error))
        elif self._has_joined and is_renewal_failure(error):
            # The current login may stay valid for some time; once it expires, requests fail.
            logger.warning("group '%s': %s", group_id, error_text(error))
        elif error.code() in TRANSIENT:
            logger.info("group '%s': %s", group_id, error_text(error))
        else:
            self.enqueue(RequestFailed(broker_error(error, self._operation, topics=topics)))

    @_callback
    def _on_statistics(self, raw: str) -> None:
        self._statistics = raw
        self.call_user("stats_cb", raw)


def _topic_names(topics: list[str], most: int = 5) -> str:
    more = f" and {len(topics) - most} more topics" if len(topics) > most else ""
    return ", ".join(f"'{topic}'" for topic in topics[:most]) + more

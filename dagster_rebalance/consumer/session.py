"""One membership in the group: from joining to leaving, one confluent Consumer, told as a list of events.

Owns the callbacks of the client, which partitions are assigned, and the hold. Every partition stays paused: records come from elsewhere.
Callbacks never raise and never block; they note what happened. Must never decide what follows from it: probing, giving up and joining anew
are the member's.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.consumer import held_revoke
from dagster_rebalance.consumer.commits import Commits
from dagster_rebalance.consumer.events import (
    CallbackFailed,
    LostReason,
    MemberEvent,
    PartitionsAssigned,
    PartitionsLost,
    RequestFailed,
    RevokeRequested,
)
from dagster_rebalance.consumer.kafka_errors import (
    CREDENTIALS,
    PASSING,
    POLLED_TOO_LATE,
    TROUBLES_KEPT,
    Attempt,
    broker_error,
    configuration_error,
    is_final,
    kafka_error,
    names,
)
from dagster_rebalance.consumer.leaving import leave
from dagster_rebalance.consumer.missing_topics import MissingTopics
from dagster_rebalance.consumer.probe import is_probe
from dagster_rebalance.consumer.translation import ours, theirs
from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.errors import BrokerError
    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

ProbeAnswered: TypeAlias = "Callable[[Session, list[confluent_kafka.TopicPartition], KafkaError | None], None]"

_HOLDING_STATE = "wait-unassign-call"
_SETTLE_SLICE_S = 0.01
"""The client goes on waiting after it has called back, so this is how long an answer lies unnoticed."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A revoke that was requested and is not released yet."""

    partitions: frozenset[TopicPartition]
    requested_at: float
    member_id: str


class Session:
    """One confluent Consumer in the group.

    Args:
        settings: Validated settings.
        clock: A monotonic clock.
        on_probe: Called with the answers to probes.

    Attributes:
        is_settling: Whether a release has not yet been followed by the assignment, possibly of nothing, that ends its rebalance.

    Raises:
        ConfigurationError: The client refuses a setting; the message names it.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float], on_probe: ProbeAnswered | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._on_probe = on_probe
        self._events: list[MemberEvent] = []
        self._owned: set[TopicPartition] = set()
        self._closing = False
        self._leaving: threading.Thread | None = None
        self._reports_in_hold = 0
        self._statistics = ""
        self._missing = MissingTopics()
        self.troubles: deque[KafkaError] = deque(maxlen=TROUBLES_KEPT)
        self._attempt = Attempt(f"membership in group '{settings.group_id}'", settings.brokers)
        self.hold: Hold | None = None
        self.broken: BrokerError | None = None
        self.ended: LostReason | None = None
        self.is_settling = False
        self.commits = Commits(self, settings)
        self.consumer = self._connect()

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What is assigned and neither released nor lost."""
        return frozenset(self._owned)

    @property
    def member_id(self) -> str:
        """The id the broker knows this member by; empty while it is not known there."""
        return self.consumer.memberid() or ""

    def subscribe(self, topics: list[str]) -> None:
        """Join the group for these topics, or change them."""
        self._attempt = Attempt(f"membership in group '{self._settings.group_id}' for {_listed(topics)}", self._settings.brokers)
        self.consumer.subscribe(topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def serve(self, timeout_s: float) -> None:
        """Let the client call back, for at most `timeout_s`.

        All that is queued is taken: behind the news that `poll` came too late lies the callback that tells the loss, and
        until that is told the caller would be given records of somebody else's partitions.
        """
        try:
            message = self.consumer.poll(timeout_s)
            while message is not None:
                self._note_of(message)
                message = self.consumer.poll(0)
        except KafkaException as problem:
            self._note(kafka_error(problem))

    def settle(self, deadline: float) -> bool:
        """Serve until no commit is pending or the deadline has come; whether none is."""
        while self.commits.pending and self._clock() < deadline:
            self.serve(_SETTLE_SLICE_S)
        return not self.commits.pending

    def metrics(self) -> dict[str, Any]:
        """The client's latest statistics; none when they are switched off, or before the first."""
        parsed: dict[str, Any] = json.loads(self._statistics or "{}")
        return parsed

    def tell(self, event: MemberEvent) -> None:
        """Let the next `take` return an event."""
        self._events.append(event)

    def take(self) -> list[MemberEvent]:
        """What happened since the last call, in its order."""
        happened, self._events = self._events, []
        # A client that reported a fatal error does nothing any more, and says no more about it.
        return [*happened, RequestFailed(self.broken)] if self.broken else happened

    def release(self) -> None:
        """Complete the held revoke, for all of its partitions.

        Raises:
            IllegalStateError: Nothing is held.
        """
        if self.hold is None:
            msg = "release without a held revoke: there is nothing to give up"
            raise IllegalStateError(msg)
        try:
            held_revoke.complete(self.consumer, self.hold.partitions, eager=self._settings.is_eager)
        except KafkaException as problem:
            # The client does not hold them any more: another rebalance was faster.
            logger.warning("the release of %s was refused: %s", names(self.hold.partitions), problem)
            self.ended = LostReason.SUPERSEDED
            return
        self._owned -= self.hold.partitions
        self.commits.forget(self.hold.partitions)
        self.hold = None
        self.is_settling = True

    def leave(self) -> None:
        """Leave the group in the background; a hold that is not released yet goes with it."""
        self._closing = True
        self._leaving = threading.Thread(target=self._leave, name=f"leave-{self._settings.group_id}", daemon=True)
        self._leaving.start()

    @property
    def is_leaving(self) -> bool:
        """Whether the client is not gone yet, after `leave`."""
        return self._leaving is not None and self._leaving.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait until the client is gone, after `leave`; what takes longer goes on in the background."""
        if self._leaving is not None:
            self._leaving.join(timeout_s)
        if self.is_leaving:
            logger.warning("leaving group '%s' takes longer than %g s: it goes on in the background", self._settings.group_id, timeout_s)

    def _leave(self) -> None:
        # For the client a superseded hold is none: it has moved on.
        held = self.hold.partitions if self.hold and self.ended is not LostReason.SUPERSEDED else frozenset()
        try:
            leave(self.consumer, held, eager=self._settings.is_eager)
        except (KafkaException, RuntimeError) as problem:
            logger.warning("leaving group '%s' failed: %s", self._settings.group_id, problem)

    def _connect(self) -> confluent_kafka.Consumer:
        config = self._settings.member()
        config.update({"error_cb": self._on_error, "on_commit": self._on_commit, "stats_cb": self._on_statistics})
        if "throttle_cb" in config:
            config["throttle_cb"] = partial(self._call_user, "throttle_cb")
        try:
            return confluent_kafka.Consumer(config)
        except (KafkaException, ValueError, TypeError) as problem:
            raise configuration_error(problem) from problem

    def _on_assign(self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.is_settling = False
        granted = [ours(tp) for tp in partitions]
        if self.hold is not None and (self._settings.is_eager or not self.hold.partitions.isdisjoint(granted)):
            self.ended = LostReason.SUPERSEDED
        # A partition that is granted twice would raise _CONFLICT out of poll (seen after a superseded hold).
        known = {ours(tp) for tp in consumer.assignment()}
        fresh = [tp for tp in granted if tp not in known]
        # An absolute offset keeps the client from looking up the committed one: nothing is ever read here.
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
        self._owned.update(fresh)
        self._missing.found(fresh)
        # Another owner may have committed since this member had them last.
        self.commits.forget(fresh)
        self._events.append(PartitionsAssigned(tuple(fresh)))

    def _on_revoke(self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if self._closing or not partitions:
            return
        if self.hold is not None:
            self.ended = LostReason.SUPERSEDED
            return
        held = tuple(map(ours, partitions))
        held_revoke.suppress_unassign(consumer)
        self.hold = Hold(frozenset(held), self._clock(), self.member_id)
        self._reports_in_hold = 0
        self._events.append(RevokeRequested(held))

    def _on_lost(self, _consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if self._closing:
            return
        self.is_settling = False
        # The client names the retained partitions only; held ones are as lost as they are.
        gone = set(map(ours, partitions)) & self._owned
        if self.hold is not None:
            gone |= self.hold.partitions
            self.hold = None
        self._owned -= gone
        self.commits.lose(gone)
        if gone:
            self._events.append(PartitionsLost(tuple(sorted(gone)), LostReason.SESSION))

    def _on_commit(self, error: KafkaError | None, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if self._closing:
            return
        if is_probe(partitions):
            if self._on_probe:
                self._on_probe(self, partitions, error)
            return
        self.commits.on_commit(error, partitions)
        self._call_user("on_commit", error, partitions)

    def _on_error(self, error: KafkaError) -> None:
        self.troubles.append(error)
        if error.code() in CREDENTIALS or is_final(error):
            self._note(error)
        else:
            logger.info("group '%s': %s", self._settings.group_id, error.str())
        self._call_user("error_cb", error)

    def _note_of(self, message: confluent_kafka.Message) -> None:
        error = message.error()
        if error is not None and not self._missing.is_known(message, error):
            self._note(error)

    def _note(self, error: KafkaError) -> None:
        self.troubles.append(error)
        if is_final(error):
            self.broken = broker_error(error, self._attempt)
        elif error.code() == POLLED_TOO_LATE:
            logger.warning("group '%s': %s", self._settings.group_id, self._attempt.explain(error))
            # Without a hold the client tells of the loss by itself, and joins again.
            if self.hold is not None:
                self.ended = LostReason.SESSION
        elif error.code() in PASSING:
            logger.info("group '%s': %s", self._settings.group_id, error.str())
        else:
            self._events.append(RequestFailed(broker_error(error, self._attempt)))

    def _on_statistics(self, raw: str) -> None:
        self._statistics = raw
        if self.hold is not None and self._settings.is_classic:
            self._reports_in_hold += 1
            # The first report may have been made before the hold began.
            if self._reports_in_hold > 1 and _join_state(raw) != _HOLDING_STATE:
                self.ended = LostReason.SUPERSEDED
        self._call_user("stats_cb", raw)

    def _call_user(self, callback: str, *arguments: object) -> None:
        """An exception that left a callback would interrupt whatever the client was asked for; the caller gets it as an event."""
        function = self._settings.user.get(callback)
        if function is None or self._closing:
            return
        try:
            function(*arguments)
        except Exception as problem:  # noqa: BLE001 - it is the user's code, and reaches the user
            self._events.append(CallbackFailed(problem))

    @property
    def reports_in_hold(self) -> int:
        """How many statistics were looked at since the hold began."""
        return self._reports_in_hold


def _join_state(raw: str) -> str:
    # The statistics of a member with many partitions are megabytes; the part about the group is a few hundred characters at the end.
    start = raw.rfind('"cgrp":')
    if start < 0:
        return _HOLDING_STATE
    group: Mapping[str, Any] = json.JSONDecoder().raw_decode(raw, raw.index("{", start))[0]
    return str(group.get("join_state", _HOLDING_STATE))


def _listed(topics: list[str], most: int = 5) -> str:
    more = f" and {len(topics) - most} more topics" if len(topics) > most else ""
    return ", ".join(f"'{topic}'" for topic in topics[:most]) + more

"""`RebalanceAwareConsumer`: a consumer of a group that may delay a revoke while it goes on reading (KIP-983).

Owns the order of things within a poll: complete what is due, take part in the group, tell the listener, read. Must be used by one thread at
a time; every decision about the lists is made by `core.revokes`.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from dagster_rebalance.consumer.cluster import Cluster
from dagster_rebalance.consumer.events import (
    HoldSuperseded,
    LostReason,
    MemberEvent,
    PartitionsAssigned,
    PartitionsLost,
    RequestFailed,
    RevokeRequested,
)
from dagster_rebalance.consumer.fetcher import Fetcher
from dagster_rebalance.consumer.listener import RebalanceConsumer, RebalanceListener
from dagster_rebalance.consumer.membership import Member
from dagster_rebalance.consumer.operations import ConsumerOperations
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.core.errors import IllegalStateError
from dagster_rebalance.core.revokes import RevokeLists

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterator, Mapping
    from types import TracebackType
    from typing import Any

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.consumer.port import ClusterView, GroupMember
    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

_IDLE_SLICE_S = 0.1
"""The client goes on waiting after it has called back, so a long wait is cut into slices to return early on a request."""
_READ_SLICE_S = 0.05


class RebalanceAwareConsumer(ConsumerOperations):
    """A consumer whose revokes can be delayed.

    A revoke that is requested in one poll is completed at the start of the next one, unless it is delayed. Meanwhile the partitions are
    still assigned, their offsets can be committed, and `poll` returns no more records of them; all others keep their full speed. Kafka is
    told when the last partition of a request is completed.

    Args:
        config: A librdkafka config mapping, with `bootstrap.servers` and `group.id`. The group protocol is `consumer` (KIP-848, Kafka 4)
            unless `group.protocol` is `classic`.
        hold_limit_s: How long revokes are going to be delayed at most; `max.poll.interval.ms` is derived from it.
            Beyond it the partitions are lost.
        fetch: Whether records are read. Without, `poll` returns none, and the consumer only takes part in the group.
        complete_revoke_in_same_poll: Complete each revoke in the poll that it is requested in, as other consumers do.
        probe_interval_s: How often the broker is asked during a hold whether it still knows the member.
        discovery_interval_s: How often new partitions (classic protocol) and topics (patterns) are looked for.
        clock: A monotonic clock.
        member: Plays the group, for tests without Kafka (`dagster_rebalance.testing.fake_group`).
        cluster: Plays the cluster, likewise.

    Raises:
        ConfigurationError: A setting cannot work; the message names it.

    Example:
        ```python
        with RebalanceAwareConsumer({"bootstrap.servers": "localhost:9092", "group.id": "etl"}) as consumer:
            consumer.subscribe(["orders"])
            while True:
                work.start(consumer.poll(1.0))
                consumer.commit_sync(work.finished())
                unfinished = {tp for tp in consumer.get_to_be_revoked_partitions() if work.is_busy(tp)}
                consumer.delay_revoke(unfinished)
                work.abort(consumer.get_lost_partitions())
        ```
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        hold_limit_s: float = 300.0,
        fetch: bool = True,
        complete_revoke_in_same_poll: bool = False,
        probe_interval_s: float = 3.0,
        discovery_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        member: GroupMember | None = None,
        cluster: ClusterView | None = None,
    ) -> None:
        settings = validated(config, hold_limit_s=hold_limit_s)
        super().__init__(
            member or Member(settings, clock=clock, probe_interval_s=probe_interval_s, discovery_interval_s=discovery_interval_s),
            cluster or Cluster(settings, clock=clock),
            Fetcher(settings) if fetch else None,
            settings.offset_reset,
        )
        self._same_poll = complete_revoke_in_same_poll
        self._clock = clock
        self._lists = RevokeLists()
        self._lost_reasons: dict[TopicPartition, LostReason] = {}
        self._subscription: Collection[str] | re.Pattern[str] = ()
        self._listener: RebalanceListener | None = None
        self._next_listener: RebalanceListener | None = None
        self._problem: Exception | None = None
        self._turn = threading.Lock()
        self._turn_of = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def subscribe(self, topics: Collection[str] | re.Pattern[str], listener: RebalanceListener | None = None) -> None:
        """Take part in the group for these topics, or for those whose whole name matches a compiled pattern.

        Args:
            topics: Names, or a pattern. A pattern is matched with Python's rules, and never matches internal topics (`__...`). No names at
                all is the same as `unsubscribe`.
            listener: Told when partitions come and go; `set_rebalance_listener` overrides it.
        """
        if not topics:
            self.unsubscribe()
            return
        with self._own_turn("subscribe"):
            if isinstance(topics, str):
                msg = f"subscribe takes a list of topics or a compiled pattern, not the text '{topics}'"
                raise IllegalStateError(msg)
            self._subscription = topics
            if listener is not None:
                self._next_listener = listener
            self._member.subscribe(topics)

    def set_rebalance_listener(self, listener: RebalanceListener | None) -> None:
        """Who is told when partitions come and go, from the next poll on; None for nobody. The last one set wins."""
        self._next_listener = listener

    def unsubscribe(self) -> None:
        """Give all partitions up and leave the group."""
        with self._own_turn("unsubscribe"):
            self._subscription = ()
            self._leave_behind()
            self._member.unsubscribe()
        self._raise_problem()

    def close(self, timeout_s: float = 10.0) -> None:
        """Give all partitions up and leave the group, within `timeout_s` on the network's side; may be called again.

        What is still held is released. Drain and commit before.
        """
        if self._closed:
            return
        with self._own_turn("close"):
            self._leave_behind()
            self._closed = True
            self._member.close(timeout_s)
            if self._fetcher:
                self._fetcher.close()
        self._raise_problem()

    def check(self, timeout_s: float = 10.0) -> None:
        """Find out now what would go wrong later: brokers, credentials, the subscribed topics.

        Raises:
            BrokerError: What is wrong, and what to do about it.
        """
        self._cluster.check(self._subscription, timeout_s)

    def get_to_be_revoked_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the next poll, unless they are delayed."""
        return self._lists.to_be_revoked

    def get_lost_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that were lost during the last poll. Stop the work on them, and commit nothing for them."""
        return self._lists.lost

    def lost_reasons(self) -> Mapping[TopicPartition, LostReason]:
        """Why each of the lost partitions was taken away."""
        return dict(self._lost_reasons)

    def delay_revoke(self, partitions: Collection[TopicPartition]) -> bool:
        """Delay the revoke of partitions from the next poll to the one after it; to be asked for again after each poll.

        Partitions that are not to be revoked are left as they are.

        Returns:
            False when some of the partitions were lost: it is too late for them. The others are delayed all the same.
        """
        return self._lists.delay(partitions)

    def poll(self, timeout_s: float, max_records: int = 500) -> list[Message]:
        """Complete what is due, take part in the group, and return at most `max_records` records of what is assigned.

        Returns early when there are records, when a revoke is requested, and when partitions are lost.

        Raises:
            BrokerError: Something does not mend itself, with what to do about it. The consumer stays usable.
            IllegalStateError: Called inside a callback, by two threads at a time, or after `close`.
        """
        with self._own_turn("poll"):
            self._listener = self._next_listener
            self._complete_due()
            deadline = self._clock() + timeout_s
            while True:
                remaining = max(0.0, deadline - self._clock())
                urgent = self._take_part(0.0 if self._fetcher else min(remaining, _IDLE_SLICE_S))
                if self._problem is not None:
                    break
                records = self._fetcher.read(max_records, 0.0 if urgent else min(remaining, _READ_SLICE_S)) if self._fetcher else []
                if records or urgent or not remaining:
                    return records
        self._raise_problem()
        return []

    def _take_part(self, timeout_s: float) -> bool:
        """Let the member work, and carry out what it tells; whether the caller must hear of it at once."""
        events = self._member.poll(timeout_s)
        for event in events:
            self._carry_out(event)
        return any(isinstance(event, (RevokeRequested, PartitionsLost)) for event in events)

    def _carry_out(self, event: MemberEvent) -> None:
        match event:
            case PartitionsAssigned(partitions):
                self._lists.assign(partitions)
                self._assigned.update(partitions)
                if self._fetcher:
                    self._fetcher.stage(partitions)
                self._tell("assigned", partitions)
                if self._fetcher:
                    self._fetcher.start_staged()
            case RevokeRequested(partitions):
                self._request(partitions)
            case PartitionsLost(partitions, reason):
                gone = self._assigned.intersection(partitions)
                # What this very poll has completed is no loss to the caller, though Kafka did not hear of its release any more.
                self._lists.lose(gone | self._lists.unreleased.intersection(partitions))
                self._lost_reasons.update(dict.fromkeys(gone, reason))
                self._forget(gone)
                self._tell("lost", gone)
            case HoldSuperseded(partitions):
                logger.warning("the hold of %s was superseded by another rebalance", ", ".join(map(str, partitions)))
            case RequestFailed(error):
                self._problem = self._problem or error

    def _request(self, partitions: Collection[TopicPartition]) -> None:
        if self._same_poll:
            self._tell("revoked", partitions)
            self._forget(partitions)
            self._member.release()
            return
        self._lists.request(partitions)
        self._giving_up = self._lists.unreleased
        if self._fetcher:
            self._fetcher.withhold(partitions)

    def _complete_due(self) -> None:
        self._tell("revoked", self._lists.to_be_revoked)
        started = self._lists.start_poll()
        self._lost_reasons = {}
        self._forget(started.completed)
        if started.release:
            self._member.release()
        self._giving_up = self._lists.unreleased

    def _leave_behind(self) -> None:
        self._listener = self._next_listener
        self._tell("revoked", self.assignment())
        self._lists = RevokeLists()
        self._giving_up = frozenset()
        self._forget(self.assignment())

    def _forget(self, partitions: Collection[TopicPartition]) -> None:
        self._assigned.difference_update(partitions)
        self._paused.difference_update(partitions)
        if self._fetcher:
            self._fetcher.drop(partitions)

    def _tell(self, what: Literal["assigned", "revoked", "lost"], partitions: Collection[TopicPartition]) -> None:
        """Call the listener back. Its exception waits for the end of the rebalance; only the first one of a poll reaches the caller."""
        if self._listener is None or not (partitions or what == "assigned"):
            return
        view = RebalanceConsumer(self)
        try:
            getattr(self._listener, f"on_partitions_{what}")(tuple(sorted(partitions)), view)
        except Exception as problem:
            if self._problem is not None:
                logger.exception("a rebalance listener failed after another error of the same poll")
            self._problem = self._problem or problem
        finally:
            view.expire()

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    @contextmanager
    def _own_turn(self, call: str) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            nested = self._turn_of == threading.get_ident()
            where = (
                "inside a rebalance callback: return from it first"
                if nested
                else "while another thread uses the consumer: give it one owner"
            )
            msg = f"{call} {where}"
            raise IllegalStateError(msg)
        try:
            self._turn_of = threading.get_ident()
            if self._closed:
                msg = f"{call} on a closed consumer: make a new one"
                raise IllegalStateError(msg)
            yield
        finally:
            self._turn.release()

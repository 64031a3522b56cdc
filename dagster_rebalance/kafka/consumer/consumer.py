"""`RebalanceAwareConsumer` is a group consumer that may delay a revoke and read on (KIP-983).

Owns the surface that users see, and the order of things within a poll: complete what is due, take
part in the group, read. Must be used by one thread at a time.
"""

from __future__ import annotations

import time
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.kafka.client.settings import checked_seconds, validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.consumer.arguments import (
    given_count,
    given_partitions,
    given_seconds,
    given_topics,
)
from dagster_rebalance.kafka.consumer.guard import in_turn
from dagster_rebalance.kafka.consumer.rebalance import GroupConsumer
from dagster_rebalance.kafka.member.member import Member
from dagster_rebalance.kafka.reading.fetcher import Fetcher
from dagster_rebalance.kafka.reading.start_positions import StartPositions

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Any, NoReturn

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.core.model.events import AssignmentEvent
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.arguments import AnyPartition
    from dagster_rebalance.kafka.consumer.listener import AnyRebalanceListener
    from dagster_rebalance.kafka.consumer.operations import PauseMarksPolicy
    from dagster_rebalance.kafka.ports import ClusterView, GroupMember

_IDLE_SLICE_S = 0.1
"""The client goes on waiting after it has called back, so a long wait is cut into slices to return
early on a request."""
_READ_SLICE_S = 0.05
_LEAVE_S = 10.0
DEFAULT_POLL_S = 1.0
"""How long a poll waits unless it is told."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one poll has to say (KIP-983, variant 1).

    Attributes:
        records: The records, as `poll` returns them.
        to_be_revoked: The partitions that will be revoked in the next poll, unless they are
            delayed.
        lost: The partitions that were lost during this poll.
        events: What happened to the assignment since the poll before, in its order. What a poll has
            found that ended with an error is told by the next one; of two kinds of polls on one
            consumer, each tells its own.
    """

    records: list[Message]
    to_be_revoked: frozenset[TopicPartition]
    lost: frozenset[TopicPartition]
    events: tuple[AssignmentEvent, ...] = ()


class RebalanceAwareConsumer(GroupConsumer):
    """A consumer whose revokes can be delayed.

    A revoke that is requested in one poll is completed at the start of the next one, unless it is
    delayed. Meanwhile the partitions are still assigned, their offsets can be committed, and `poll`
    returns no more records of them; all others keep their full speed. Kafka is told when the last
    partition of a request is completed.

    Args:
        config: A librdkafka config mapping, with `bootstrap.servers` and `group.id`. The group
            protocol is `consumer` (KIP-848, Kafka 4) unless `group.protocol` is `classic`.
        hold_limit_s: How long revokes are going to be delayed at most. Nothing ends a delay then:
            all partitions are lost at `max.poll.interval.ms`, which is 15 s longer unless it is set
            (in the classic protocol at least the session time-out).
        fetch: Whether records are read. Without, `poll` returns none, and the consumer only takes
            part in the group.
        complete_revoke_in_same_poll: Let `poll` complete each revoke in the poll that it is
            requested in, as other consumers do.
        pause_marks: What happens to the marks of `pause` when their partitions go: `keep` them for
            when the partitions come back, `clear` them (KAFKA-20385), or let the partitions `carry`
            them to the next owner. Marks of topics and of everything always stay.
        probe_interval_s: How often the broker is asked during a hold whether it still knows the
            member.
        discovery_interval_s: How often new partitions (classic protocol) and topics (patterns) are
            looked for.
        clock: A monotonic clock.
        member: Plays the group, for tests without Kafka (`dagster_rebalance.testing.fake_group`).
        cluster: Plays the cluster, likewise.

    Raises:
        ConfigurationError: A setting cannot work; the message names it.

    Example:
        ```python
        settings = {"bootstrap.servers": "localhost:9092", "group.id": "etl"}
        with RebalanceAwareConsumer(settings) as consumer:
            consumer.subscribe(["orders"])
            while True:
                records = consumer.poll(1.0)
                work.abort(consumer.get_lost_partitions())
                work.start(records)
                consumer.commit_sync(work.finished())
                due = consumer.get_to_be_revoked_partitions()
                consumer.delay_revoke({tp for tp in due if work.is_busy(tp)})
        ```
    """

    _woken = False

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        hold_limit_s: float = 300.0,
        fetch: bool = True,
        complete_revoke_in_same_poll: bool = False,
        pause_marks: PauseMarksPolicy = "keep",
        probe_interval_s: float = 3.0,
        discovery_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        member: GroupMember | None = None,
        cluster: ClusterView | None = None,
    ) -> None:
        settings = validated(config, hold_limit_s=hold_limit_s)
        checked_seconds("probe_interval_s", probe_interval_s)
        checked_seconds("discovery_interval_s", discovery_interval_s)
        with ExitStack() as if_it_fails:
            if member is None:
                member = Member(
                    settings,
                    clock=clock,
                    probe_interval_s=probe_interval_s,
                    discovery_interval_s=discovery_interval_s,
                )
                if_it_fails.callback(member.close)
            if cluster is None:
                cluster = Cluster(settings, clock=clock)
            fetcher = None
            if fetch:
                fetcher = Fetcher(
                    settings, StartPositions(member, cluster, settings.offset_reset), clock
                )
                if_it_fails.callback(fetcher.close)
            super().__init__(member, cluster, fetcher, settings, pause_marks, clock=clock)
            if_it_fails.pop_all()
        self._same_poll = complete_revoke_in_same_poll
        if isinstance(member, Member):
            # At the end of the interpreter, the broker finds out by the session time-out.
            weakref.finalize(self, member.abandon).atexit = False

    def __reduce__(self) -> NoReturn:
        msg = (
            "a consumer cannot be copied or pickled: it is one member of its group. Make another "
            "consumer with the same settings"
        )
        raise TypeError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def subscribe(
        self,
        topics: Iterable[str] | re.Pattern[str],
        listener: AnyRebalanceListener | None = None,
    ) -> None:
        """Take part in the group for these topics, or for those that match a compiled pattern.

        The pattern must match the whole name of a topic.

        Args:
            topics: Names, or a pattern. A pattern is matched with Python's rules, and never matches
                internal topics (`__...`). No names at all is the same as `unsubscribe`.
            listener: Deprecated (KAFKA-20385): use `set_rebalance_listener`. Told when partitions
                come and go.
        """
        wanted = given_topics("subscribe", topics)
        if listener is not None:
            warnings.warn(
                "subscribe(..., listener) is deprecated: use set_rebalance_listener",
                DeprecationWarning,
                stacklevel=2,
            )
            self.set_rebalance_listener(listener)
        if not wanted:
            self.unsubscribe()
            return
        with self._turn.of("subscribe"):
            self._subscription = wanted
            self._member.subscribe(wanted)

    @property
    def cluster(self) -> ClusterView:
        """Return the view for questions to the cluster that do not concern the group.

        Kafka's own consumer does not have these questions.
        """
        return self._cluster

    def set_rebalance_listener(self, listener: AnyRebalanceListener | None) -> None:
        """Who is told when partitions come and go, from the next poll on; None for nobody.

        The last one set wins.

        `on_partitions_revoked` is called when a revoke is completed, while the partitions are still
        in the assignment; with delayed revokes that is in the first poll after the last delay. The
        request itself is told by `get_to_be_revoked_partitions`.
        """
        self._callbacks.listen(listener)

    def unsubscribe(self) -> None:
        """Give all partitions up and leave the group."""
        with self._turn.of("unsubscribe"):
            self._subscription = ()
            self._member.unsubscribe(self._leave_behind(_LEAVE_S))
        self._callbacks.raise_noted()

    def close(self, timeout_s: float = 10.0) -> None:
        """Give all partitions up and leave the group; may be called again.

        The leave takes at most `timeout_s` on the network's side. The consumer releases the
        partitions that it still holds: drain and commit before. In a fork of the process that made
        the consumer nothing is given up.
        """
        if self._turn.is_over:
            return
        if self._turn.is_elsewhere:
            self._turn.is_over = True
            return
        with self._turn.of("close"):
            left_s = given_seconds("close", timeout_s)
            try:
                left_s = self._leave_behind(left_s)
            finally:
                # Whatever interrupted it, Ctrl-C too: a member that stays would keep partitions
                # that nobody reads.
                self._turn.is_over = True
                self._end(left_s)
        self._callbacks.raise_noted()

    def _end(self, timeout_s: float) -> None:
        try:
            self._member.close(timeout_s)
        finally:
            if self._fetcher:
                self._fetcher.close()

    @in_turn
    def check(self, timeout_s: float = 10.0) -> None:
        """Find out now what would go wrong later: brokers, credentials, the subscribed topics.

        Raises:
            BrokerError: What is wrong, and what to do about it.
        """
        self._cluster.check(self._subscription, given_seconds("check", timeout_s))

    @in_turn
    def get_to_be_revoked_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the next poll, unless they are delayed."""
        return self._lists.to_be_revoked

    @in_turn
    def get_lost_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that were lost during the last poll.

        Stop the work on them, and commit nothing for them.
        """
        return self._lists.lost

    @in_turn
    def delay_revoke(self, partitions: Iterable[AnyPartition]) -> bool:
        """Delay the revoke of partitions from the next poll to the one after it.

        Call it again after each poll. Partitions that are assigned and not to be revoked stay as
        they are. With an eager strategy all partitions of a member are to be revoked, and the whole
        group waits while one of its members delays.

        Returns:
            False when some of the partitions are not assigned: lost, given up already, or never
            owned. It is too late for them. The others are delayed all the same.
        """
        return self._lists.delay(given_partitions("delay_revoke", partitions))

    def poll(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> list[Message]:
        """Complete due revokes, take part in the group, and return up to `max_records` records.

        The records come from assigned partitions. The poll returns early when there are records,
        when the group requests a revoke, when partitions are lost, and after `wakeup`.

        Args:
            timeout_s: How long to wait for records, 1 s by default; below 0 is without end.
            max_records: How many records are returned at most.
            timeout: The same as `timeout_s`, by confluent-kafka's name.

        Raises:
            BrokerError: Something does not mend itself, with what to do about it. The consumer
                stays usable: after a fatal error of the client its partitions are lost, and it
                joins the group anew.
            IllegalStateError: Called inside a callback, by two threads at a time, or after `close`.
        """
        records = self._poll_once(patience_s(timeout_s, timeout), max_records)
        self._woken = False
        # Plain steps, without a call: a signal handler may raise in between.
        self._is_told = True
        if self._fetcher:
            self._fetcher.is_open = False
        return records

    def poll_with_rebalance(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> PollResult:
        """Poll, and get what happened together with the records (KIP-983, variant 1).

        A revoke that is requested in such a poll is completed in the next one, also with
        `complete_revoke_in_same_poll`.

        Raises:
            BrokerError: Something does not mend itself, with what to do about it. The consumer
                stays usable: after a fatal error of the client its partitions are lost, and it
                joins the group anew.
            IllegalStateError: Called inside a callback, by two threads at a time, or after `close`.
        """
        records = self._poll(patience_s(timeout_s, timeout), max_records, same_poll=False)
        self._woken = False
        result = PollResult(
            records, self._lists.to_be_revoked, self._lists.lost, tuple(self._events)
        )
        # Plain steps, without a call: a signal handler may raise in between.
        self._is_told = True
        if self._fetcher:
            self._fetcher.is_open = False
        return result

    def wakeup(self) -> None:
        """Let the poll that waits, or else the next one, return at once with what there is.

        It returns and raises nothing, so no record and no news of a rebalance is lost with it. An
        iteration over the consumer ends. Any thread and a signal handler may call it.
        """
        # A plain flag: a signal handler must not wait for a lock that the thread it interrupts has.
        self._woken = True
        self._member.wake()

    def __iter__(self) -> Self:
        """Iterate over the records, until `wakeup`."""
        return self

    def __next__(self) -> Message:
        """The next record.

        Each is polled for by itself, so the position is behind the last record that was returned,
        and a partition is given up between two records. Work that goes on beyond that needs `poll`
        and `delay_revoke`.

        Raises:
            StopIteration: `wakeup` was called.
            BrokerError: As in `poll`; the iteration can go on.
        """
        for record in self._next_or_nothing():
            # Plain steps, without a call: a signal handler may raise in between.
            self._is_told = True
            if self._fetcher:
                self._fetcher.is_open = False
            return record
        raise StopIteration

    def _next_or_nothing(self) -> list[Message]:
        """The next record, or nothing once the iteration has to end."""
        while not self._has_to_return():
            records = self._poll_once(DEFAULT_POLL_S, 1)
            if records:
                return records
            # An iteration goes on over what a poll has found.
            self._is_told = True
            if self._fetcher:
                self._fetcher.is_open = False
        self._woken = False
        return []

    def _has_to_return(self) -> bool:
        """Whether a poll has to return with what there is."""
        return self._woken

    def _poll_once(self, timeout_s: float, max_records: int) -> list[Message]:
        return self._poll(timeout_s, max_records, same_poll=self._same_poll)

    def _poll(self, timeout_s: float, max_records: int, *, same_poll: bool) -> list[Message]:
        given_count("poll", max_records)
        has_begun = False
        try:
            with self._turn.of("poll"):
                if self._fetcher:
                    self._fetcher.begin()
                has_begun = True
                return self._wait_for_records(
                    self._clock() + timeout_s, max_records, same_poll=same_poll
                )
        except BaseException:
            # A signal handler may raise anywhere, even between the client's return with records and
            # ours.
            if has_begun:
                self._untell()
            raise

    def _wait_for_records(
        self, deadline: float, max_records: int, *, same_poll: bool
    ) -> list[Message]:
        self._callbacks.begin()
        news = self._complete_due()
        while True:
            remaining = 0.0 if news or self._has_to_return() else max(0.0, deadline - self._clock())
            urgent = self._take_part(
                0.0 if self._fetcher else min(remaining, _IDLE_SLICE_S), same_poll=same_poll
            )
            self._callbacks.raise_noted()
            records = (
                self._fetcher.read(max_records, 0.0 if urgent else min(remaining, _READ_SLICE_S))
                if self._fetcher
                else []
            )
            if records or urgent or not remaining:
                return records
            self._between_slices()

    def _between_slices(self) -> None:
        """Called while a poll waits, about ten times a second."""


def patience_s(timeout_s: float | None, timeout: float | None) -> float:
    """Return how long a poll waits, by this package's name or by confluent-kafka's.

    Raises:
        TypeError: Both are given, or it is no number.
    """
    if timeout_s is not None and timeout is not None:
        msg = "give timeout_s or timeout, not both: they mean the same"
        raise TypeError(msg)
    given: object = timeout if timeout_s is None else timeout_s
    return given_seconds("poll", DEFAULT_POLL_S if given is None else given)

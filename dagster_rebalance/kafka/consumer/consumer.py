"""`RebalanceAwareConsumer`, a group consumer that can delay a revoke and read on (KIP-983)."""

from __future__ import annotations

import time
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.kafka.client.settings import checked_seconds, validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.consumer.arguments import (
    parse_max_records,
    parse_names,
    parse_offsets,
    parse_partitions,
    parse_pattern,
    parse_seconds,
    parse_subscription,
)
from dagster_rebalance.kafka.consumer.operations import ConsumerOperations, guarded, parse_limit
from dagster_rebalance.kafka.consumer.rebalance import RebalanceHandler
from dagster_rebalance.kafka.consumer.state import ConsumerState
from dagster_rebalance.kafka.member.member import Member
from dagster_rebalance.kafka.reading.fetcher import Fetcher
from dagster_rebalance.kafka.reading.read_ahead import ReadAhead
from dagster_rebalance.kafka.reading.start_positions import StartPositions

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, NoReturn

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.core.model.events import AssignmentEvent
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets, AnyPartition
    from dagster_rebalance.kafka.consumer.listener import AnyRebalanceListener
    from dagster_rebalance.kafka.consumer.state import PauseMarksPolicy
    from dagster_rebalance.kafka.group_ports import ClusterView, CommitResult, GroupMember

_IDLE_SLICE_S = 0.1
"""The client continues to wait after a callback, so long waits are sliced to return early on a
revoke request."""
_READ_SLICE_S = 0.05
_LEAVE_S = 10.0
_MOST_AHEAD = 500
"""CPython collects garbage after 700 new objects, which takes longer than reading them."""
DEFAULT_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class PollResult:
    """Result of `poll_with_rebalance` (KIP-983, variant 1).

    Attributes:
        records: The records, as `poll` returns them.
        to_be_revoked: The partitions that will be revoked in the next poll, unless they are
            delayed.
        lost: The partitions that were lost during this poll.
        events: The assignment changes since the previous poll, in order. If a poll raises an error,
            the next poll returns its events. Changes in calls of `poll` are not included.
    """

    records: list[Message]
    to_be_revoked: frozenset[TopicPartition]
    lost: frozenset[TopicPartition]
    events: tuple[AssignmentEvent, ...] = ()


class RebalanceAwareConsumer(ConsumerOperations):
    """Consumer whose revokes can be delayed. Use it from one thread at a time.

    A revoke that is requested in one poll is completed at the start of the next one, unless it is
    delayed. Until then the partitions are still assigned and their offsets can be committed, but
    `poll` returns no more of their records; all other partitions are read at full speed. The revoke
    is released to Kafka when the last partition of the request is completed.

    Args:
        config: A librdkafka config mapping, with `bootstrap.servers` and `group.id`. The group
            protocol is `consumer` (KIP-848, Kafka 4) unless `group.protocol` is `classic`.
        hold_limit_s: The longest time that you will delay a revoke. The consumer does not end a
            delay at this limit. At `max.poll.interval.ms` all partitions are lost; its default is
            this limit plus 15 s (in the classic protocol, at least the session timeout).
        fetch: Whether records are read. If False, `poll` returns no records, and the consumer only
            takes part in the group.
        complete_revoke_in_same_poll: Let `poll` complete each revoke in the call that receives the
            request, as other consumers do.
        pause_marks: The effect on the marks of `pause` when their partitions leave the assignment:
            `keep` them until the partitions return, `clear` them (KAFKA-20385), or `carry` them to
            the next owner. Marks of topics and of the whole consumer always stay.
        probe_interval_s: How often the consumer verifies its membership with the broker during a
            hold.
        discovery_interval_s: How often new partitions (classic protocol) and topics (patterns) are
            discovered.
        clock: A monotonic clock.
        member: A group member for tests without Kafka (`dagster_rebalance.testing.fake_group`).
        cluster: A cluster for tests without Kafka.

    Raises:
        ConfigurationError: A setting is invalid; the message names it.

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
        with ExitStack() as on_error:
            if member is None:
                member = Member(
                    settings,
                    clock=clock,
                    probe_interval_s=probe_interval_s,
                    discovery_interval_s=discovery_interval_s,
                )
                on_error.callback(member.close)
            if cluster is None:
                cluster = Cluster(settings, clock=clock)
            starts = StartPositions(member, cluster, settings.offset_reset)
            fetcher = None
            if fetch:
                fetcher = Fetcher(settings, starts, clock)
                on_error.callback(fetcher.close)
            state = ConsumerState(
                member, cluster, fetcher, starts, settings, pause_marks=pause_marks, clock=clock
            )
            super().__init__(state)
            on_error.pop_all()
        self._rebalances = RebalanceHandler(state)
        self._same_poll = complete_revoke_in_same_poll
        self.ahead = fetcher.ahead if fetcher else ReadAhead()
        self._read_ahead = 1
        if isinstance(member, Member):
            # At the end of the interpreter, the broker detects the end by the session timeout.
            weakref.finalize(self, member.abandon).atexit = False

    def __reduce__(self) -> NoReturn:
        msg = (
            "a consumer cannot be copied or pickled: it is one member of its group. Create another "
            "consumer with the same settings"
        )
        raise TypeError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def member_id(self) -> str:
        """The id of this member in the group; empty before it joined."""
        return self._state.member.member_id

    @property
    def cluster(self) -> ClusterView:
        """Queries to the cluster that do not concern the group and that Kafka's consumer lacks."""
        return self._state.cluster

    def subscribe(
        self,
        topics: Iterable[str] | re.Pattern[str],
        listener: AnyRebalanceListener | None = None,
    ) -> None:
        """Subscribe to topics, or to the topics whose whole name matches a compiled pattern.

        Args:
            topics: Names, or a pattern. A pattern is matched with Python's rules, and never matches
                internal topics (`__...`). Without any names this is the same as `unsubscribe`.
            listener: Deprecated (KAFKA-20385): use `set_rebalance_listener`.
        """
        subscription = parse_subscription("subscribe", topics)
        if listener is not None:
            warnings.warn(
                "subscribe(..., listener) is deprecated: use set_rebalance_listener",
                DeprecationWarning,
                stacklevel=2,
            )
            self.set_rebalance_listener(listener)
        if not subscription:
            self.unsubscribe()
            return
        with self._state.guard.exclusive("subscribe"):
            self._state.subscription = subscription
            self._state.member.subscribe(subscription)
            self._rebalances.poll_again()

    def set_rebalance_listener(self, listener: AnyRebalanceListener | None) -> None:
        """Set the listener for assignment changes from the next poll on; None removes it.

        `on_partitions_revoked` is called when a revoke is completed, while the partitions are still
        in the assignment. A delayed revoke is completed in the first poll after the last delay.
        `get_to_be_revoked_partitions` reports the request.
        """
        self._rebalances.callbacks.set_listener(listener)

    def unsubscribe(self) -> None:
        """Give up all partitions and leave the group."""
        with self._state.guard.exclusive("unsubscribe"):
            self._state.subscription = ()
            self._state.member.unsubscribe(self._rebalances.give_up_all(_LEAVE_S))
        self._rebalances.callbacks.raise_deferred()

    def close(self, timeout_s: float = 10.0) -> None:
        """Give up all partitions and leave the group; further calls have no effect.

        The consumer releases held partitions: drain and commit before you close it. In a fork of
        the process that created the consumer, nothing is given up.

        Args:
            timeout_s: The time limit of the network requests of the leave.
        """
        guard = self._state.guard
        if guard.is_closed:
            return
        if guard.is_forked:
            guard.is_closed = True
            return
        with guard.exclusive("close"):
            left_s = parse_seconds("close", timeout_s)
            try:
                left_s = self._rebalances.give_up_all(left_s)
            finally:
                # Also after an interruption (Ctrl-C): a member that stays would keep partitions
                # that are not read.
                guard.is_closed = True
                self._end(left_s)
        self._rebalances.callbacks.raise_deferred()

    def _end(self, timeout_s: float) -> None:
        try:
            self._state.member.close(timeout_s)
        finally:
            if self._state.fetcher:
                self._state.fetcher.close()

    @guarded
    def check(self, timeout_s: float = 10.0) -> None:
        """Check the brokers, the credentials and the subscribed topics.

        Raises:
            BrokerError: The problem, and what to do about it.
        """
        self._state.cluster.check(self._state.subscription, parse_seconds("check", timeout_s))

    @guarded
    def get_to_be_revoked_partitions(self) -> frozenset[TopicPartition]:
        """Return the partitions that will be revoked in the next poll, unless they are delayed."""
        return self._state.revokes.to_be_revoked

    @guarded
    def get_lost_partitions(self) -> frozenset[TopicPartition]:
        """Return the partitions that were lost during the last poll.

        Stop the work on them, and commit nothing for them.
        """
        return self._state.revokes.lost

    @guarded
    def delay_revoke(self, partitions: Iterable[AnyPartition]) -> bool:
        """Delay the revoke of partitions from the next poll to the one after it.

        Call it again after each poll. Assigned partitions that are not to be revoked are ignored.
        With an eager strategy all partitions of a member are to be revoked, and the whole group
        waits while one of its members delays.

        Returns:
            True if all of the partitions are assigned. If some are not (lost, revoked or never
            owned), the others are still delayed.
        """
        return self._state.revokes.delay(parse_partitions("delay_revoke", partitions))

    @guarded
    def commit_offsets(self, offsets: AnyOffsets, timeout_s: float | None = None) -> CommitResult:
        """Commit next offsets and metadata in one request; return the result of each partition.

        A partition that is not assigned fails with `PartitionLostError`, without a request.

        Args:
            offsets: The next offset of each partition.
            timeout_s: Maximum wait for the result, as for `commit_sync`. A commit without a result
                in time counts as failed, but may still be stored.
        """
        return self._state.commits.commit(
            parse_offsets("commit_offsets", offsets), parse_limit("commit_offsets", timeout_s)
        )

    @guarded
    def pause_topics(self, topics: Iterable[str]) -> None:
        """Let `poll` return no records of topics, new partitions included, until `resume_topics`.

        Raises:
            IllegalStateError: A topic is not subscribed to.
        """
        names = parse_names("pause_topics", topics)
        for name in names:
            if not self._state.subscribes(name):
                msg = (
                    f"pause_topics of '{name}': this consumer does not subscribe to it; "
                    "use pause_pattern for topics that do not exist yet"
                )
                raise IllegalStateError(msg)
        self._state.pauses.pause_topics(names)
        self._state.withhold()

    @guarded
    def resume_topics(self, topics: Iterable[str]) -> None:
        """Undo `pause_topics`, or exempt topics from a paused pattern.

        Pauses of single partitions stay.
        """
        self._state.pauses.resume_topics(parse_names("resume_topics", topics))
        self._state.withhold()

    @guarded
    def pause_pattern(self, pattern: re.Pattern[str]) -> None:
        """Let `poll` return no records of topics whose whole name matches, until `resume_pattern`.

        The pause also covers topics that do not exist yet.
        """
        self._state.pauses.pause_topics([parse_pattern("pause_pattern", pattern)])
        self._state.withhold()

    @guarded
    def resume_pattern(self, pattern: re.Pattern[str]) -> None:
        """Undo the pauses of all topics whose whole name matches, by name or by pattern."""
        self._state.pauses.resume_topics([parse_pattern("resume_pattern", pattern)])
        self._state.withhold()

    @guarded
    def pause_all(self) -> None:
        """Let `poll` return no records until `resume_all`, but keep the consumer in its group."""
        self._state.pauses.is_everything_paused = True
        self._state.withhold()

    @guarded
    def resume_all(self) -> None:
        """Undo `pause_all`. Pauses of single partitions and topics stay."""
        self._state.pauses.is_everything_paused = False
        self._state.withhold()

    def poll(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> list[Message]:
        """Complete due revokes, take part in the group, and return records of assigned partitions.

        The poll returns early when there are records, when the group requests a revoke, when
        partitions are lost, and after `wakeup`.

        Args:
            timeout_s: How long to wait for records, 1 s by default; values below 0 are infinite.
            max_records: The maximum number of records to return.
            timeout: The same as `timeout_s`, under confluent-kafka's name.

        Raises:
            BrokerError: An error that needs action; the message names the action. The consumer
                stays usable. After a fatal error of the client, its partitions are lost, and the
                consumer rejoins the group.
            IllegalStateError: Called inside a callback, by two threads at a time, or after `close`.
        """
        records = self._poll_once(poll_timeout_s(timeout_s, timeout), max_records)
        self._woken = False
        # Plain steps, without a call: a signal handler may raise in between.
        self._state.is_delivered = True
        if self._state.fetcher:
            self._state.fetcher.is_open = False
        return records

    def poll_with_rebalance(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> PollResult:
        """Poll, and return the records and the assignment changes (KIP-983, variant 1).

        A revoke that is requested in this poll is completed in the next one, also with
        `complete_revoke_in_same_poll`. Arguments and errors are those of `poll`.
        """
        wait_s = poll_timeout_s(timeout_s, timeout)
        records = self._poll(wait_s, max_records, same_poll=False)
        self._woken = False
        revokes = self._state.revokes
        result = PollResult(
            records, revokes.to_be_revoked, revokes.lost, tuple(self._rebalances.events)
        )
        # Plain steps, without a call: a signal handler may raise in between.
        self._state.is_delivered = True
        if self._state.fetcher:
            self._state.fetcher.is_open = False
        return result

    def wakeup(self) -> None:
        """Let the poll that waits, or else the next one, return at once without an error.

        No record and no event of a rebalance is lost. An iteration over the consumer ends. Any
        thread and a signal handler may call this method.
        """
        # A plain flag: a signal handler must not wait for a lock of the thread it interrupts.
        self._woken = True
        self._state.member.wake()

    def __iter__(self) -> Self:
        """Iterate over the records, until `wakeup`."""
        return self

    def __next__(self) -> Message:
        """Return the next record.

        The position is after the last returned record, and a partition can be revoked between two
        records. The consumer reads ahead. It drops records of partitions that leave the assignment
        or are paused in between. Work that continues beyond the next record needs `poll` and
        `delay_revoke`.

        Raises:
            StopIteration: `wakeup` was called.
            BrokerError: As in `poll`; you can continue the iteration.
        """
        ahead = self.ahead
        records, taken = ahead.records, ahead.taken
        if (
            taken < len(records)
            and not self._woken
            and self._state.guard.is_free
            and self._rebalances.is_quiet
            # Plain steps, without a call: a signal handler may raise or take records in between.
            and ahead.is_checked
            and ahead.records is records
            and ahead.taken == taken
        ):
            ahead.taken = taken + 1
            return records[taken]
        for record in self._next_or_nothing():
            # Likewise.
            self._state.is_delivered = True
            if self._state.fetcher:
                self._state.fetcher.is_open = False
            return record
        raise StopIteration

    def _next_or_nothing(self) -> list[Message]:
        while not self._has_to_return():
            records = self._poll_ahead()
            if records:
                return records
            # An iteration discards the events of a poll.
            self._state.is_delivered = True
            if self._state.fetcher:
                self._state.fetcher.is_open = False
        self._woken = False
        return []

    def _poll_ahead(self) -> list[Message]:
        """Poll for one record, and read ahead as many as the caller takes until the next poll."""
        is_fast = not self.ahead.left and self._rebalances.is_quiet
        self._read_ahead = (
            min(self._read_ahead * 2, _MOST_AHEAD) if is_fast else max(self._read_ahead // 2, 1)
        )
        return self._poll(DEFAULT_POLL_S, 1, same_poll=self._same_poll, read_ahead=self._read_ahead)

    def _has_to_return(self) -> bool:
        return self._woken

    def _poll_once(self, timeout_s: float, max_records: int) -> list[Message]:
        return self._poll(timeout_s, max_records, same_poll=self._same_poll)

    def _poll(
        self, timeout_s: float, max_records: int, *, same_poll: bool, read_ahead: int = 0
    ) -> list[Message]:
        parse_max_records("poll", max_records)
        has_begun = False
        try:
            with self._state.guard.exclusive("poll"):
                if self._state.fetcher:
                    self._state.fetcher.begin()
                has_begun = True
                return self._wait_for_records(
                    self._state.clock() + timeout_s, max_records, read_ahead, same_poll=same_poll
                )
        except BaseException:
            # A signal handler may raise anywhere, even after the client has returned records.
            if has_begun:
                self._rebalances.redeliver()
            raise

    def _wait_for_records(
        self, deadline: float, max_records: int, read_ahead: int, *, same_poll: bool
    ) -> list[Message]:
        clock, fetcher, rebalances = self._state.clock, self._state.fetcher, self._rebalances
        if (
            fetcher
            and rebalances.is_quiet
            and (records := fetcher.read(max_records, 0.0, read_ahead))
        ):
            return records
        rebalances.callbacks.begin()
        must_return = rebalances.start_poll()
        while True:
            left_s = 0.0 if must_return or self._has_to_return() else max(0.0, deadline - clock())
            is_urgent = rebalances.poll_member(
                0.0 if fetcher else min(left_s, _IDLE_SLICE_S), same_poll=same_poll
            )
            rebalances.callbacks.raise_deferred()
            wait_s = 0.0 if is_urgent else min(left_s, _READ_SLICE_S)
            records = fetcher.read(max_records, wait_s, read_ahead) if fetcher else []
            if records or is_urgent or not left_s:
                return records
            self._between_slices()

    def _between_slices(self) -> None:
        """Run about ten times a second while a poll waits; a hook for subclasses."""


def poll_timeout_s(timeout_s: float | None, timeout: float | None) -> float:
    """Return the timeout of a poll, by this package's name or by confluent-kafka's.

    Raises:
        TypeError: Both are given, or it is not a number.
    """
    if timeout_s is not None and timeout is not None:
        msg = "pass timeout_s or timeout, not both: they are the same argument"
        raise TypeError(msg)
    value: object = timeout if timeout_s is None else timeout_s
    return parse_seconds("poll", DEFAULT_POLL_S if value is None else value)

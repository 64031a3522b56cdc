# ruff: noqa: D102 - `kafka.group_ports` documents them
"""A consumer group in memory, with cooperative rebalances, held revokes, fencing and commits.

It implements `kafka.group_ports`, with a clock that advances only while members poll. It stores
offsets, not records. The contract tests of the member run on it and on a real broker.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.commit_requests import (
    MAX_METADATA_BYTES,
    UnknownPartitions,
    oversized,
)
from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError, PartitionLostError
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    LogPosition,
    OffsetAndMetadata,
    TopicPartition,
)
from dagster_rebalance.kafka.group_ports import (
    CallbackFailed,
    CommitAnswered,
    CommitResult,
    GroupEvent,
    OffsetAndTimestamp,
    PartitionInfo,
    RequestFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


class ManualClock:
    """A monotonic clock that tests advance explicitly."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self._now += seconds


class FakeGroup:
    """A group and its cluster (implements `ClusterView`).

    Args:
        topics: Number of partitions of each topic.
        max_poll_interval_s: Time after which a held revoke is lost.
        probe_interval_s: Time until a holding member detects that it was fenced or superseded.

    Attributes:
        answers_commits: Set it to False to simulate the classic protocol while another member holds
            a revoke: commits get no response.

    Example:
        ```python
        group = FakeGroup({"orders": 4})
        blue = RebalanceAwareConsumer(
            config, fetch=False, member=group.member(), cluster=group, clock=group.clock
        )
        ```
    """

    def __init__(
        self,
        topics: Mapping[str, int],
        *,
        max_poll_interval_s: float = 60.0,
        probe_interval_s: float = 3.0,
    ) -> None:
        self.clock = ManualClock()
        self.max_poll_interval_s = max_poll_interval_s
        self.probe_interval_s = probe_interval_s
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.answers_commits = True
        self._topics = dict(topics)
        self._members: list[FakeMember] = []
        self._owner: dict[TopicPartition, FakeMember] = {}
        self._produced: dict[TopicPartition, list[int]] = {}
        self._deleted: dict[TopicPartition, int] = {}
        self._elections: dict[TopicPartition, dict[int, int]] = {}
        self._open: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, str] = {}
        self._silent: frozenset[TopicPartition] = frozenset()
        self._forbidden: frozenset[str] = frozenset()
        self._joined = self._made = 0

    def member(self) -> FakeMember:
        """Return a new member, which joins with its first poll after `subscribe`."""
        return FakeMember(self)

    @property
    def members(self) -> tuple[FakeMember, ...]:
        """The members in the coordinator's view."""
        return tuple(self._members)

    def owner(self, partition: TopicPartition) -> FakeMember | None:
        """Return the owner of a partition in the coordinator's view."""
        return self._owner.get(partition)

    def add_partitions(self, topic: str, total: int) -> None:
        """Create a topic with `total` partitions, or extend it."""
        self._topics[topic] = total
        self.rebalance()

    def fence(self, member: FakeMember) -> None:
        """Remove a member from the group and reassign its partitions; it detects that later."""
        self._forget(member)
        member.pending_loss = LostReason.FENCED if member.held else LostReason.SESSION
        self.rebalance()

    def supersede(self, member: FakeMember) -> None:
        """Supersede the member's hold by another rebalance without a callback.

        A metadata change does so in the classic protocol.
        """
        if not member.held:
            msg = f"{member.member_id} holds no revoke that could be superseded"
            raise IllegalStateError(msg)
        for tp in member.held:
            del self._owner[tp]
        member.pending_loss = LostReason.SUPERSEDED
        self.rebalance()

    def produce(self, partition: TopicPartition, count: int = 1, timestamp: int = 0) -> None:
        """Append records with the same timestamp in milliseconds."""
        self._produced.setdefault(partition, []).extend([timestamp] * count)

    def delete_before(self, partition: TopicPartition, offset: int) -> None:
        """Delete the records before an offset, as retention does."""
        self._deleted[partition] = offset

    def elect(self, partition: TopicPartition, *, cut_at: int | None = None) -> None:
        """Elect a new leader; in an unclean election its log ends at `cut_at`."""
        log = self._produced.setdefault(partition, [])
        if cut_at is not None:
            del log[cut_at:]
        elections = self._elections.setdefault(partition, {})
        elections[max(elections, default=0) + 1] = len(log)

    def recreate_topic(self, topic: str) -> None:
        """Delete and create a topic; its records and committed offsets are deleted."""
        for number in range(self._topics[topic]):
            tp = TopicPartition(topic, number)
            self._produced.pop(tp, None)
            self._deleted.pop(tp, None)
            self._elections.pop(tp, None)
            self.committed.pop(tp, None)
        self._made += 1
        self._topic_ids[topic] = f"id-{self._made}"

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records and committed offsets."""
        self.recreate_topic(topic)
        del self._topics[topic]
        self.rebalance()

    def forbid(self, *topics: str) -> None:
        """Forbid members to read exactly these topics; they can still be listed."""
        self._forbidden = frozenset(topics)

    def check_allowed(self, partitions: Collection[TopicPartition]) -> None:
        """Raise the error of a request for partitions of a forbidden topic."""
        refused = sorted(tp for tp in partitions if tp.topic in self._forbidden)
        if refused:
            raise _forbidden(refused)

    def has(self, partition: TopicPartition) -> bool:
        """Return whether the partition exists."""
        return partition.partition < self._topics.get(partition.topic, 0)

    def refusal(self, partition: TopicPartition) -> BrokerError | None:
        """Return the error of commits for a partition, if they are refused."""
        if not self.has(partition):
            return BrokerError(
                f"commit for {_unknown(str(partition))}",
                retriable=True,
                partitions={partition: "unknown"},
            )
        return _forbidden([partition]) if partition.topic in self._forbidden else None

    def open_transaction(self, partition: TopicPartition, offset: int | None) -> None:
        """Open a transaction at an offset, or close it with None."""
        self._open.pop(partition, None)
        if offset is not None:
            self._open[partition] = offset

    def silence(self, *partitions: TopicPartition) -> None:
        """Silence the leaders of exactly these partitions, as in an outage of a broker."""
        self._silent = frozenset(partitions)

    def _check_leaders(self, partitions: Collection[TopicPartition]) -> None:
        self.check_allowed(partitions)
        silent = dict.fromkeys(self._silent & set(partitions), "its leader did not answer")
        if silent:
            msg = f"reading offsets failed for {', '.join(map(str, sorted(silent)))}"
            raise BrokerError(msg, retriable=True, partitions=silent)

    def beginning_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        self._check_leaders(partitions)
        return {tp: self._deleted.get(self._existing(tp), 0) for tp in partitions}

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        self._check_leaders(partitions)
        return {
            tp: min(len(self._produced.get(self._existing(tp), [])), self._open.get(tp, MAX_OFFSET))
            for tp in partitions
        }

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        """Return the end offsets, after the first election with the leader epoch."""
        ends = self.end_offsets(partitions, timeout_s)
        return {
            tp: LogPosition(end, max(self._elections[tp]) if tp in self._elections else None)
            for tp, end in ends.items()
        }

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        self._check_leaders(partitions)
        return {tp: len(self._produced.get(self._existing(tp), [])) for tp in partitions}

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        """Return whether a later election has truncated the log below a position."""
        return {
            tp: any(
                until < position.offset
                for epoch, until in self._elections.get(tp, {}).items()
                if epoch > (position.leader_epoch or 0)
            )
            for tp, position in positions.items()
            if tp not in self._silent
        }

    def topic_ids(self, topics: Collection[str], timeout_s: float = 10.0) -> dict[str, str]:
        """Return the ids of recreated topics; other topics have no id."""
        return {topic: self._topic_ids[topic] for topic in topics if topic in self._topic_ids}

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        return lambda: self.topic_ids(topics)

    def offsets_for_times(
        self,
        timestamps: Mapping[TopicPartition, int],
        timeout_s: float = 10.0,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        offsets: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for tp, since in timestamps.items():
            later = (
                (offset, at) for offset, at in enumerate(self._produced.get(tp, [])) if at >= since
            )
            first = next(later, None)
            offsets[tp] = OffsetAndTimestamp(*first) if first else None
        return offsets

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """Return all topics; broker 1 leads all partitions."""
        return {
            topic: [PartitionInfo(topic, number, 1, (1,), (1,)) for number in range(total)]
            for topic, total in self._topics.items()
        }

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        partitions = self.list_topics(timeout_s).get(topic)
        if partitions is None:
            raise BrokerError(_unknown(topic))
        return partitions

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        for topic in () if isinstance(subscription, re.Pattern) else subscription:
            self.check_allowed([TopicPartition(topic, 0)])
            self.partitions_for(topic, timeout_s)

    def join(self, member: FakeMember) -> str:
        """Add a member; called by the member."""
        self._joined += 1
        self._members.append(member)
        return f"member-{self._joined}"

    def leave(self, member: FakeMember) -> None:
        """Remove a member; called by the member."""
        self._forget(member)
        self.rebalance()

    def release(self, partitions: Collection[TopicPartition]) -> None:
        """Free partitions for their next owner; called by the member."""
        for tp in partitions:
            self._owner.pop(tp, None)
        self.rebalance()

    def rebalance(self) -> None:
        """Revoke surplus partitions and assign free ones; a holding member has no new revoke."""
        target = {
            tp: member for topic in self._topics for tp, member in self._share_out(topic).items()
        }
        for member in self._members:
            surplus = [
                tp
                for tp, owner in self._owner.items()
                if owner is member and target.get(tp) is not member
            ]
            if surplus and not member.held:
                member.deliver(RevokeRequested(tuple(sorted(surplus))))
        for member in self._members:
            granted = sorted(
                tp for tp, wanted in target.items() if wanted is member and tp not in self._owner
            )
            if granted:
                self._owner.update(dict.fromkeys(granted, member))
                member.deliver(PartitionsAssigned(tuple(granted)))

    def _share_out(self, topic: str) -> dict[TopicPartition, FakeMember]:
        """Assign a topic evenly to its subscribers, with as few moves as possible."""
        subscribers = [member for member in self._members if member.is_subscribed_to(topic)]
        partitions = [TopicPartition(topic, number) for number in range(self._topics[topic])]
        if not subscribers:
            return {}
        owned = {
            member: [tp for tp in partitions if self._owner.get(tp) is member]
            for member in subscribers
        }
        least, extra = divmod(len(partitions), len(subscribers))
        shares: dict[TopicPartition, FakeMember] = {}
        vacancies: list[FakeMember] = []
        for rank, member in enumerate(sorted(subscribers, key=lambda other: -len(owned[other]))):
            quota = least + (rank < extra)
            shares.update(dict.fromkeys(owned[member][:quota], member))
            vacancies += [member] * (quota - len(owned[member][:quota]))
        free = [tp for tp in partitions if tp not in shares]
        return {**shares, **dict(zip(free, vacancies, strict=True))}

    def _forget(self, member: FakeMember) -> None:
        self._owner = {tp: owner for tp, owner in self._owner.items() if owner is not member}
        self._members = [other for other in self._members if other is not member]

    def _existing(self, partition: TopicPartition) -> TopicPartition:
        if not self.has(partition):
            raise BrokerError(_unknown(str(partition)))
        return partition


class FakeMember:
    """A member of a `FakeGroup` (implements `GroupMember`)."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self._subscription: Collection[str] | re.Pattern[str] = ()
        self._owned: set[TopicPartition] = set()
        self._events: list[GroupEvent] = []
        self._closed = False
        self._held_since = 0.0
        self._asked = 0
        self._unknown = UnknownPartitions()
        self._pending: list[tuple[int, dict[TopicPartition, OffsetAndMetadata]]] = []
        self.member_id = ""
        self.held: frozenset[TopicPartition] = frozenset()
        self.pending_loss: LostReason | None = None

    def is_subscribed_to(self, topic: str) -> bool:
        """Return whether the member is subscribed to a topic."""
        if isinstance(self._subscription, re.Pattern):
            return self._subscription.fullmatch(topic) is not None
        return topic in self._subscription

    def deliver(self, event: GroupEvent) -> None:
        """Let the member's next poll return an event."""
        self._events.append(event)
        match event:
            case PartitionsAssigned(partitions):
                self._owned.update(partitions)
            case RevokeRequested(partitions):
                self.held = frozenset(partitions)
                self._held_since = self._group.clock()
            case PartitionsLost() | RequestFailed():
                self._owned.clear()
                self.held = frozenset()
            case CommitAnswered() | CallbackFailed():
                pass

    def fail(self, error: BrokerError) -> None:
        """Let the next poll report an error, as the client reports refused credentials."""
        self._events.append(RequestFailed(error))

    @property
    def has_news(self) -> bool:
        is_joining = bool(self._subscription) and not self.member_id
        return bool(self._events or self._pending or self.pending_loss) or is_joining

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._owned)

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        self._check_open("subscribe")
        self._subscription = subscription
        if self.member_id and not self.held:
            self._group.rebalance()

    def unsubscribe(self, timeout_s: float = 10.0) -> None:
        self._check_open("unsubscribe")
        self.settle()
        self._subscription = ()
        self._leave()

    def poll(self, timeout_s: float) -> list[GroupEvent]:
        """Return the events, or advance the group's clock by `timeout_s` if there are none."""
        self._check_open("poll")
        self.settle()
        if self._subscription and not self.member_id:
            self.member_id = self._group.join(self)
            self._group.rebalance()
        if not self._events:
            self._group.clock.advance(timeout_s)
            self._notice_loss()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Do nothing: no poll waits."""

    def release(self) -> None:
        """Release the held partitions, unless they are already lost."""
        if not self.held:
            msg = "release without a held revoke"
            raise IllegalStateError(msg)
        self.settle()
        if self.pending_loss is not None:
            return
        released, self.held = self.held, frozenset()
        self._owned -= released
        self._group.release(released)

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Commit the offsets that the coordinator accepts."""
        self._check_open("commit")
        if not self._group.answers_commits:
            msg = (
                "commit without a timeout while the coordinator answers no commits: it would never "
                "return"
            )
            raise IllegalStateError(msg)
        self.settle()
        return self._store(offsets)

    def _store(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        failed: dict[TopicPartition, BrokerError] = oversized(offsets)
        refused = self._refused(offsets)
        for tp, offset in offsets.items():
            if tp in failed:
                continue
            if tp not in self._owned:
                failed[tp] = PartitionLostError(
                    f"commit for {tp} refused: it is not assigned to this member",
                    partitions={tp: "not assigned"},
                )
            elif self not in self._group.members:
                failed[tp] = PartitionLostError(
                    f"commit for {tp} refused: the member was fenced", partitions={tp: "fenced"}
                )
            elif len(offset.metadata) > MAX_METADATA_BYTES:
                failed[tp] = BrokerError(
                    f"commit for {tp} refused: more than {MAX_METADATA_BYTES:,} characters of "
                    "metadata",
                    partitions={tp: "too large"},
                )
            elif tp in refused:
                failed[tp] = refused[tp]
            else:
                self._group.committed[tp] = offset
        self._unknown.forget(frozenset(offsets).difference(failed))
        return CommitResult(frozenset(offsets).difference(failed), failed)

    def _refused(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, BrokerError]:
        now = self._group.clock()
        refused = {tp: why for tp in partitions if (why := self._group.refusal(tp)) is not None}
        unknown = [tp for tp in refused if not self._group.has(tp)]
        self._unknown.refused(unknown, now)
        return {tp: self._unknown.gone(tp, now) or why for tp, why in refused.items()}

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Commit with the next poll, or before the next call that needs the result."""
        self._check_open("commit_async")
        self._asked += 1
        self._pending.append((self._asked, dict(offsets)))
        return self._asked

    def settle(self, timeout_s: float = 10.0) -> bool:
        self._check_open("settle")
        if not self._group.answers_commits:
            return not self._pending
        pending, self._pending = self._pending, []
        for ticket, offsets in pending:
            self._events.append(CommitAnswered(ticket, self._store(offsets)))
        return True

    def metrics(self) -> dict[str, Any]:
        return {}

    def group_metadata(self) -> object:
        return None

    def committed(
        self,
        partitions: Collection[TopicPartition],
        timeout_s: float = 10.0,
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self._check_open("committed")
        self._group.check_allowed(partitions)
        return {tp: self._group.committed.get(tp) for tp in partitions}

    def close(self, timeout_s: float = 10.0) -> None:
        if not self._closed:
            self.settle()
            self._closed = True
            self._leave()

    def _notice_loss(self) -> None:
        """Detect a loss: by a heartbeat or, during a hold, by a probe or the deadline."""
        waited = self._group.clock() - self._held_since
        if self.held and self.pending_loss is None and waited >= self._group.max_poll_interval_s:
            self._group.fence(self)
            self.pending_loss = LostReason.EXPIRED
        if self.pending_loss is None or (self.held and waited < self._group.probe_interval_s):
            return
        lost, reason = tuple(sorted(self._owned)), self.pending_loss
        self._leave()
        self.deliver(PartitionsLost(lost, reason))

    def _leave(self) -> None:
        self.member_id, self.pending_loss, self.held = "", None, frozenset()
        self._owned.clear()
        # Pending commits are answered even after the member has left.
        self._events = [event for event in self._events if isinstance(event, CommitAnswered)]
        self._group.leave(self)

    def _check_open(self, call: str) -> None:
        if self._closed:
            msg = f"{call} on a closed consumer: create a new one"
            raise IllegalStateError(msg)


def _forbidden(partitions: Sequence[TopicPartition]) -> BrokerError:
    topics = sorted({tp.topic for tp in partitions})
    return BrokerError(
        f"a request failed for {', '.join(topics)}: grant the principal the ACL READ",
        partitions=dict.fromkeys(partitions, "forbidden"),
        topics=topics,
    )


def _unknown(what: str) -> str:
    return f"{what} does not exist; create the topic, or correct its name"

"""The fake group is a consumer group in memory that really rebalances.

Its rebalances are cooperative, with held revokes, fencing, supersession and committed metadata. It
owns what Kafka's coordinator and the client decide together, with a clock of its own that moves
only while its members poll. It plays the ports of `kafka.group_ports`, and the contract tests
of the member hold it to what the real one does. It keeps offsets, not records.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.commit_requests import (
    MAX_METADATA_BYTES,
    UnknownPartitions,
    too_long,
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
    MemberEvent,
    OffsetAndTimestamp,
    PartitionInfo,
    RequestFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


class ManualClock:
    """A monotonic clock that moves when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class FakeGroup:
    """A group and its cluster (implements `ClusterView`).

    Args:
        topics: The number of partitions of each topic.
        max_poll_interval_s: When a held revoke is lost.
        probe_interval_s: How long a member takes to find out during a hold that it was fenced or
            superseded.

    Attributes:
        answers_commits: False is what a member meets in classic that waits in a rebalance for
            another one, which holds a revoke.

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
        """A new member; it joins with its first poll after `subscribe`."""
        return FakeMember(self)

    @property
    def members(self) -> tuple[FakeMember, ...]:
        """The members that the coordinator knows."""
        return tuple(self._members)

    def owner(self, partition: TopicPartition) -> FakeMember | None:
        """Who owns a partition in the coordinator's eyes."""
        return self._owner.get(partition)

    def add_partitions(self, topic: str, total: int) -> None:
        """Let a topic have `total` partitions (a new topic, too).

        Members hear of it between holds.
        """
        self._topics[topic] = total
        self.rebalance()

    def fence(self, member: FakeMember) -> None:
        """The coordinator forgets a member and gives its partitions away.

        The member finds out later.
        """
        self._forget(member)
        member.undone = LostReason.FENCED if member.held else LostReason.SESSION
        self.rebalance()

    def supersede(self, member: FakeMember) -> None:
        """Let another rebalance overtake the member's hold, without a callback.

        A metadata change does so in the classic protocol.
        """
        if not member.held:
            msg = f"{member.member_id} holds nothing that could be superseded"
            raise IllegalStateError(msg)
        for tp in member.held:
            del self._owner[tp]
        member.undone = LostReason.SUPERSEDED
        self.rebalance()

    def produce(self, partition: TopicPartition, count: int = 1, timestamp: int = 0) -> None:
        """Append records, all of one time in milliseconds."""
        self._produced.setdefault(partition, []).extend([timestamp] * count)

    def delete_before(self, partition: TopicPartition, offset: int) -> None:
        """Let retention remove the records before an offset."""
        self._deleted[partition] = offset

    def elect(self, partition: TopicPartition, *, cut_at: int | None = None) -> None:
        """A new leader leads a partition; in an unclean election one whose log ends at `cut_at`."""
        log = self._produced.setdefault(partition, [])
        if cut_at is not None:
            del log[cut_at:]
        elections = self._elections.setdefault(partition, {})
        elections[max(elections, default=0) + 1] = len(log)

    def make_anew(self, topic: str) -> None:
        """Delete a topic and make it again.

        Kafka drops its records, and what groups have committed for it.
        """
        for number in range(self._topics[topic]):
            tp = TopicPartition(topic, number)
            self._produced.pop(tp, None)
            self._deleted.pop(tp, None)
            self._elections.pop(tp, None)
            self.committed.pop(tp, None)
        self._made += 1
        self._topic_ids[topic] = f"id-{self._made}"

    def delete_topic(self, topic: str) -> None:
        """Delete a topic for good, with its records and what groups have committed for it."""
        self.make_anew(topic)
        del self._topics[topic]
        self.rebalance()

    def forbid(self, *topics: str) -> None:
        """Forbid members to read these topics, and no others.

        The topics can still be listed.
        """
        self._forbidden = frozenset(topics)

    def check_allowed(self, partitions: Collection[TopicPartition]) -> None:
        """Raise the error of a request for partitions of a topic that may not be read."""
        refused = sorted(tp for tp in partitions if tp.topic in self._forbidden)
        if refused:
            raise _forbidden(refused)

    def has(self, partition: TopicPartition) -> bool:
        """Whether the partition exists."""
        return partition.partition < self._topics.get(partition.topic, 0)

    def refusal(self, partition: TopicPartition) -> BrokerError | None:
        """Why commits for a partition are refused, if they are."""
        if not self.has(partition):
            return BrokerError(
                f"commit for {_unknown(str(partition))}",
                retriable=True,
                partitions={partition: "unknown"},
            )
        return _forbidden([partition]) if partition.topic in self._forbidden else None

    def open_transaction(self, partition: TopicPartition, offset: int | None) -> None:
        """A transaction has been open since an offset; None when none is."""
        self._open.pop(partition, None)
        if offset is not None:
            self._open[partition] = offset

    def silence(self, *partitions: TopicPartition) -> None:
        """Silence the leaders of these partitions, and of no others.

        They do not answer, as while their broker is away.
        """
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
        """The first offset that exists."""
        self._check_leaders(partitions)
        return {tp: self._deleted.get(self._existing(tp), 0) for tp in partitions}

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The offset that the next record will get."""
        self._check_leaders(partitions)
        return {
            tp: min(len(self._produced.get(self._existing(tp), [])), self._open.get(tp, MAX_OFFSET))
            for tp in partitions
        }

    def log_ends(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, LogPosition]:
        """The end offsets; the leader epoch is known from the first election on."""
        ends = self.end_offsets(partitions, timeout_s)
        return {
            tp: LogPosition(end, max(self._elections[tp]) if tp in self._elections else None)
            for tp, end in ends.items()
        }

    def high_watermarks(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The end offsets, behind an open transaction too."""
        self._check_leaders(partitions)
        return {tp: len(self._produced.get(self._existing(tp), [])) for tp in partitions}

    def truncated(
        self, positions: Mapping[TopicPartition, LogPosition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, bool]:
        """Whether an election since has cut the log off below a position."""
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
        """The ids of the topics that were made again; of the others none is known."""
        return {topic: self._topic_ids[topic] for topic in topics if topic in self._topic_ids}

    def begin_topic_ids(self, topics: Collection[str]) -> Callable[[], dict[str, str] | None]:
        """As `topic_ids`, answered at once."""
        return lambda: self.topic_ids(topics)

    def offsets_for_times(
        self,
        timestamps: Mapping[TopicPartition, int],
        timeout_s: float = 10.0,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after a time in milliseconds; None where there is none."""
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for tp, wanted in timestamps.items():
            later = (
                (offset, at) for offset, at in enumerate(self._produced.get(tp, [])) if at >= wanted
            )
            first = next(later, None)
            found[tp] = OffsetAndTimestamp(*first) if first else None
        return found

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """All topics, led by broker 1."""
        return {
            topic: [PartitionInfo(topic, number, 1, (1,), (1,)) for number in range(total)]
            for topic, total in self._topics.items()
        }

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """The partitions of a topic."""
        found = self.list_topics(timeout_s).get(topic)
        if found is None:
            raise BrokerError(_unknown(topic))
        return found

    def check(
        self, subscription: Collection[str] | re.Pattern[str], timeout_s: float = 10.0
    ) -> None:
        """Refuse topics that do not exist."""
        for topic in () if isinstance(subscription, re.Pattern) else subscription:
            self.check_allowed([TopicPartition(topic, 0)])
            self.partitions_for(topic, timeout_s)

    def join(self, member: FakeMember) -> str:
        """Take a member in; called by the member."""
        self._joined += 1
        self._members.append(member)
        return f"member-{self._joined}"

    def leave(self, member: FakeMember) -> None:
        """Let a member go; called by the member."""
        self._forget(member)
        self.rebalance()

    def release(self, partitions: Collection[TopicPartition]) -> None:
        """Make partitions free for their next owner; called by the member."""
        for tp in partitions:
            self._owner.pop(tp, None)
        self.rebalance()

    def rebalance(self) -> None:
        """Ask members to give up what they have too much of, and hand out what is free.

        Nothing is taken from a member that holds.
        """
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
                member.told(RevokeRequested(tuple(sorted(surplus))))
        for member in self._members:
            granted = sorted(
                tp for tp, wanted in target.items() if wanted is member and tp not in self._owner
            )
            if granted:
                self._owner.update(dict.fromkeys(granted, member))
                member.told(PartitionsAssigned(tuple(granted)))

    def _share_out(self, topic: str) -> dict[TopicPartition, FakeMember]:
        """A fair share for everybody who subscribed, with as few moves as possible."""
        takers = [member for member in self._members if member.wants(topic)]
        everything = [TopicPartition(topic, number) for number in range(self._topics[topic])]
        if not takers:
            return {}
        has = {
            member: [tp for tp in everything if self._owner.get(tp) is member] for member in takers
        }
        least, extra = divmod(len(everything), len(takers))
        shares: dict[TopicPartition, FakeMember] = {}
        room: list[FakeMember] = []
        for rank, member in enumerate(sorted(takers, key=lambda taker: -len(has[taker]))):
            quota = least + (rank < extra)
            shares.update(dict.fromkeys(has[member][:quota], member))
            room += [member] * (quota - len(has[member][:quota]))
        rest = [tp for tp in everything if tp not in shares]
        return {**shares, **dict(zip(rest, room, strict=True))}

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
        self._events: list[MemberEvent] = []
        self._closed = False
        self._held_since = 0.0
        self._asked = 0
        self._unknown = UnknownPartitions()
        self._pending: list[tuple[int, dict[TopicPartition, OffsetAndMetadata]]] = []
        self.member_id = ""
        self.held: frozenset[TopicPartition] = frozenset()
        self.undone: LostReason | None = None

    def wants(self, topic: str) -> bool:
        """Whether the member subscribed to a topic."""
        if isinstance(self._subscription, re.Pattern):
            return self._subscription.fullmatch(topic) is not None
        return topic in self._subscription

    def told(self, event: MemberEvent) -> None:
        """What the member hears with its next poll."""
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

    def assignment(self) -> frozenset[TopicPartition]:
        """What this member believes to own."""
        return frozenset(self._owned)

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part for these topics."""
        self._check_open("subscribe")
        self._subscription = subscription
        if self.member_id and not self.held:
            self._group.rebalance()

    def unsubscribe(self, timeout_s: float = 10.0) -> None:
        """Leave the group."""
        self._check_open("unsubscribe")
        self.settle()
        self._subscription = ()
        self._leave()

    def poll(self, timeout_s: float) -> list[MemberEvent]:
        """Tell what happened; the group's clock moves by `timeout_s` when nothing did."""
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
        """No poll waits: the group's clock moves at once."""

    def release(self) -> None:
        """Hand the held partitions over; nothing is sent for a hold that is not ours any more."""
        if not self.held:
            msg = "release without a held revoke: there is nothing to give up"
            raise IllegalStateError(msg)
        self.settle()
        if self.undone is not None:
            return
        given, self.held = self.held, frozenset()
        self._owned -= given
        self._group.release(given)

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store what the coordinator accepts."""
        self._check_open("commit")
        if not self._group.answers_commits:
            msg = (
                "commit without a limit while the coordinator answers none: it would wait for as "
                "long as that lasts"
            )
            raise IllegalStateError(msg)
        self.settle()
        return self._store(offsets)

    def _store(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        failed: dict[TopicPartition, BrokerError] = too_long(offsets)
        refused = self._refused(offsets)
        for tp, wanted in offsets.items():
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
            elif len(wanted.metadata) > MAX_METADATA_BYTES:
                failed[tp] = BrokerError(
                    f"commit for {tp} refused: more than {MAX_METADATA_BYTES:,} characters of "
                    "metadata",
                    partitions={tp: "too large"},
                )
            elif tp in refused:
                failed[tp] = refused[tp]
            else:
                self._group.committed[tp] = wanted
        self._unknown.forget(frozenset(offsets).difference(failed))
        return CommitResult(frozenset(offsets).difference(failed), failed)

    def _refused(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, BrokerError]:
        now = self._group.clock()
        refused = {tp: why for tp in partitions if (why := self._group.refusal(tp)) is not None}
        unknown = [tp for tp in refused if not self._group.has(tp)]
        self._unknown.refused(unknown, now)
        return {tp: self._unknown.gone(tp, now) or why for tp, why in refused.items()}

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Store with the next poll, or before anything that waits for it."""
        self._check_open("commit_async")
        self._asked += 1
        self._pending.append((self._asked, dict(offsets)))
        return self._asked

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Let what was asked for reach the coordinator."""
        self._check_open("settle")
        if not self._group.answers_commits:
            return not self._pending
        pending, self._pending = self._pending, []
        for ticket, offsets in pending:
            self._events.append(CommitAnswered(ticket, self._store(offsets)))
        return True

    def metrics(self) -> dict[str, Any]:
        """There is no client that has any."""
        return {}

    def group_metadata(self) -> object:
        """There is no client that a producer could vouch for."""
        return None

    def committed(
        self,
        partitions: Collection[TopicPartition],
        timeout_s: float = 10.0,
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed."""
        self._check_open("committed")
        self._group.check_allowed(partitions)
        return {tp: self._group.committed.get(tp) for tp in partitions}

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave for good."""
        if not self._closed:
            self.settle()
            self._closed = True
            self._leave()

    def _notice_loss(self) -> None:
        """Notice a loss as a real member does.

        A real member finds out by a heartbeat or, during a hold, by a probe and its own deadline.
        """
        waited = self._group.clock() - self._held_since
        if self.held and self.undone is None and waited >= self._group.max_poll_interval_s:
            self._group.fence(self)
            self.undone = LostReason.EXPIRED
        if self.undone is None or (self.held and waited < self._group.probe_interval_s):
            return
        lost, reason = tuple(sorted(self._owned)), self.undone
        self._leave()
        self.told(PartitionsLost(lost, reason))

    def _leave(self) -> None:
        self.member_id, self.undone, self.held = "", None, frozenset()
        self._owned.clear()
        # The answer to a commit is owed also to a member that is out.
        self._events = [event for event in self._events if isinstance(event, CommitAnswered)]
        self._group.leave(self)

    def _check_open(self, call: str) -> None:
        if self._closed:
            msg = f"{call} on a closed consumer: make a new one"
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

"""A simulated member stands for librdkafka, `kafka.member.session` and `kafka.member.member`.

It implements `GroupMember`, and does what those do with the coordinator's answers. Heartbeats
go on in the background, as long as the process lives; the next poll tells what they bring. Nobody
tells of a hold that went wrong; the client finds it out a little later. Owns what the member
believes; it must never ask to commit what it was not told to own.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import (
    BrokerError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult, MemberEvent
from proofs.simulation.classic import ClassicGroup
from proofs.simulation.clockwork import Violation
from proofs.simulation.coordinator import Grant, Refusal

if TYPE_CHECKING:
    import re
    from collections.abc import Collection, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from proofs.simulation.consumer_protocol import ConsumerGroup
    from proofs.simulation.process import Process

_BEAT_S = (0.4, 1.6)
_PROBE_S = 3.0


class SimulatedMember:
    """One member.

    Args:
        process: Where it lives: its clock, and the network between it and the coordinator.
        group: Its coordinator.
    """

    def __init__(self, process: Process, group: ClassicGroup | ConsumerGroup) -> None:
        self._process = process
        self._group = group
        self._inbox: deque[tuple[str, Grant | Refusal]] = deque()
        self._answers: list[CommitAnswered] = []
        self._tickets = count(1)
        self._owned: set[TopicPartition] = set()
        self._subscribed = self._closed = False
        self._epoch = -1
        self._held_since = self._found_out_at = self._polled_at = 0.0
        self._undone: LostReason | None = None
        self.member_id = ""
        self.held: frozenset[TopicPartition] = frozenset()
        self._beat_later()

    @property
    def is_superseded(self) -> bool:
        """Whether its hold was overtaken and it does not know yet."""
        return self._undone is LostReason.SUPERSEDED

    def assignment(self) -> frozenset[TopicPartition]:
        """What this member believes to own."""
        return frozenset(self._owned)

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part."""
        self._subscribed = True
        self._polled_at = self._process.clockwork.now

    def unsubscribe(self, timeout_s: float) -> None:
        """Leave the group."""
        self._subscribed = False
        self._leave()

    def poll(self, timeout_s: float) -> list[MemberEvent]:
        """Tell what happened.

        Time goes on for this process only: a poll may take longer than was asked for.
        """
        self._polled_at = self._process.clockwork.now
        events: list[MemberEvent] = []
        while self._inbox:
            member_id, answer = self._inbox.popleft()
            if member_id == self.member_id:
                events += self._taken_in(answer)
        events += self._found_out()
        events, self._answers = [*self._answers, *events], []
        if not events:
            self._process.skew += timeout_s
        return events

    def wake(self) -> None:
        """No poll waits: time goes on in steps."""

    def release(self) -> None:
        """Give the held partitions back; nothing is sent for a hold that is not ours any more."""
        if self._undone is not None:
            return
        self._process.check_drained()
        given, self.held = self.held, frozenset()
        self._owned -= given
        self._process.tell(f"gives back {_names(given)}")
        self._join_anew()

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Store, unless the coordinator refuses, or the request or its answer is lost."""
        for partition in sorted(offsets.keys() - self._owned):
            msg = f"{self._process} asks for a commit of {partition}, which it was told not to own"
            raise Violation(msg)
        if not self._process.reaches("kafka", wait=not self.is_superseded):
            return _failed(offsets, BrokerError("no connection", retriable=True))
        forbidden = offsets.keys() & self._group.forbidden
        allowed = {
            partition: offset for partition, offset in offsets.items() if partition not in forbidden
        }
        refusal = self._group.commit(self.member_id, self._epoch, allowed)
        if refusal is not None:
            self._process.tell(f"commit refused: {refusal.value}")
            if self.held and refusal is not Refusal.REBALANCING:
                self._undone, self._found_out_at = self._undone or LostReason.FENCED, 0.0
            fenced = refusal is Refusal.UNKNOWN_MEMBER
            return _failed(
                offsets,
                PartitionLostError("fenced") if fenced else RebalanceInProgressError(refusal.value),
            )
        if not self._process.reaches("kafka"):
            self._process.tell("the answer to a commit is lost")
            return _failed(offsets, BrokerError("no answer", retriable=True))
        return CommitResult(
            frozenset(allowed),
            dict.fromkeys(forbidden, BrokerError("the right is missing", retriable=False)),
        )

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Store at once; the next poll tells."""
        ticket = next(self._tickets)
        self._answers.append(CommitAnswered(ticket, self.commit(offsets)))
        return ticket

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Nothing is ever on its way."""
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
        """What the group has committed; anybody is told."""
        self._process.must_reach("kafka")
        return {partition: self._group.stored.get(partition) for partition in partitions}

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave for good."""
        if not self._closed:
            self._closed = True
            self._leave()

    def topic_changed(self) -> None:
        """The client sees new metadata.

        In the classic protocol that overtakes a hold: it joins anew, without the held partitions.
        """
        if (
            self._process.is_gone
            or self._process.is_paused
            or self._process.clockwork.is_waiting(self._process)
        ):
            return
        if (
            isinstance(self._group, ClassicGroup)
            and self.held
            and self._undone is None
            and self._knows()
        ):
            self._process.tell(f"its hold of {_names(self.held)} is superseded, and nobody tells")
            self._undone = LostReason.SUPERSEDED
            self._found_out_at = self._process.clockwork.now + self._process.clockwork.within(
                0.2, _PROBE_S
            )
            self._group.join(self.member_id, self._owned - self.held)

    def _join_anew(self) -> None:
        if isinstance(self._group, ClassicGroup) and self._knows():
            self._group.join(self.member_id, self._owned)

    # In the background

    def _beat_later(self) -> None:
        self._process.clockwork.after(self._process.clockwork.within(*_BEAT_S), self, self._beat)

    def _beat(self) -> None:
        if self._closed or self._process.is_gone:
            return
        self._beat_later()
        if self._process.is_paused or not self._subscribed or not self._process.is_connected:
            return
        clockwork = self._process.clockwork
        if clockwork.now - self._polled_at > self._group.rebalance_s:
            self._group.leave(self.member_id)
        if not self.member_id:
            self._join()
            return
        answer = self._asked()
        if answer is not None and not clockwork.happens(self._process.weather.lost_answers):
            self._inbox.append((self.member_id, answer))

    def _join(self) -> None:
        self.member_id = self._group.new_member_id()
        self._process.tell(f"joins as {self.member_id}")
        if isinstance(self._group, ClassicGroup):
            self._group.join(self.member_id, ())
        else:
            self._inbox.append((self.member_id, self._group.join(self.member_id)))

    def _asked(self) -> Grant | Refusal | None:
        if isinstance(self._group, ClassicGroup):
            answer = self._group.heartbeat(self.member_id)
            if self.is_superseded and answer is Refusal.REBALANCING:
                self._group.join(self.member_id, self._owned - self.held)
            return None if self.is_superseded and self._followed(answer) else answer
        return self._group.heartbeat(self.member_id, self._epoch, self._owned)

    def _followed(self, answer: Grant | Refusal | None) -> bool:
        """A superseded client goes on in the new generation."""
        if isinstance(answer, Grant):
            self._epoch = answer.epoch
        return not isinstance(answer, Refusal) or answer is Refusal.REBALANCING

    def _knows(self) -> bool:
        return self.member_id in self._group.seats

    # In a poll

    def _taken_in(self, answer: Grant | Refusal) -> list[MemberEvent]:
        if answer is Refusal.UNKNOWN_MEMBER:
            return self._thrown_out()
        if isinstance(answer, Grant):
            return self._granted(answer)
        return self._asked_to_join_anew()

    def _granted(self, grant: Grant) -> list[MemberEvent]:
        if grant.epoch < self._epoch or self._undone is not None:
            return []
        if self.held:
            # The client takes in nothing new before the release, other than its epoch.
            self._epoch = grant.epoch
            return []
        self._epoch = grant.epoch
        gone, new = self._owned - grant.partitions, grant.partitions - self._owned
        if gone:
            return self._asked_back(gone)
        if not new:
            return []
        self._owned |= new
        self._process.tell(f"is assigned {_names(new)} in epoch {grant.epoch}")
        return [PartitionsAssigned(tuple(sorted(new)))]

    def _asked_to_join_anew(self) -> list[MemberEvent]:
        group = self._group
        if self.held or not isinstance(group, ClassicGroup) or not self._knows():
            return []
        if group.is_eager and self._owned:
            return self._asked_back(set(self._owned))
        if group.is_preparing:
            group.join(self.member_id, self._owned)
        return []

    def _asked_back(self, partitions: set[TopicPartition]) -> list[MemberEvent]:
        self.held, self._held_since = frozenset(partitions), self._process.clockwork.now
        self._process.tell(f"is asked for {_names(partitions)}")
        self._process.expects_drain(self.held)
        if self._process.clockwork.happens(self._process.weather.overtaken):
            self._process.clockwork.after(
                self._process.clockwork.within(0.0, 4.0), None, self.topic_changed
            )
        return [RevokeRequested(tuple(sorted(partitions)))]

    def _thrown_out(self) -> list[MemberEvent]:
        if self.held:
            if self._undone is None:
                self._undone = LostReason.FENCED
                self._found_out_at = self._process.clockwork.now + self._process.clockwork.within(
                    0.0, _PROBE_S
                )
            return []
        return self._start_over(LostReason.SESSION)

    def _found_out(self) -> list[MemberEvent]:
        now = self._process.clockwork.now
        if self.held and self._undone is None and now >= self._held_since + self._group.rebalance_s:
            self._undone, self._found_out_at = LostReason.EXPIRED, now
        if self._undone is None or now < self._found_out_at:
            return []
        return self._start_over(self._undone)

    def _start_over(self, reason: LostReason) -> list[MemberEvent]:
        lost = tuple(sorted(self._owned))
        self._process.tell(f"has lost {_names(lost)}: {reason.value}")
        self._leave()
        return [PartitionsLost(lost, reason)] if lost else []

    def _leave(self) -> None:
        self._group.leave(self.member_id)
        self.member_id, self._epoch, self._undone, self.held = "", -1, None, frozenset()
        self._owned.clear()
        self._inbox.clear()


def _names(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(map(str, sorted(partitions))) or "nothing"


def _failed(
    offsets: Mapping[TopicPartition, OffsetAndMetadata], error: BrokerError
) -> CommitResult:
    return CommitResult(frozenset(), dict.fromkeys(offsets, error))

"""A simulated member in place of librdkafka, `kafka.member.session` and `kafka.member.member`.

It implements `GroupMember`. Heartbeats continue in the background while the process lives, and the
next poll returns their results. As in librdkafka, nothing reports a lost hold: the client detects
it later. It never commits partitions that it was not assigned.
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
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult, GroupEvent
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
        process: Its process: the clock, and the network to the coordinator.
        group: The coordinator.
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
        """Whether its hold is superseded, which it has not detected yet."""
        return self._undone is LostReason.SUPERSEDED

    has_news = True

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._owned)

    def subscribe(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        self._subscribed = True
        self._polled_at = self._process.clockwork.now

    def unsubscribe(self, timeout_s: float) -> None:
        self._subscribed = False
        self._leave()

    def poll(self, timeout_s: float) -> list[GroupEvent]:
        """Return the events.

        Only the time of this process advances: a poll may take longer than its timeout.
        """
        self._polled_at = self._process.clockwork.now
        events: list[GroupEvent] = []
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
        """Do nothing: no poll waits."""

    def release(self) -> None:
        """Release the held partitions, unless the hold is lost already."""
        if self._undone is not None:
            return
        self._process.check_drained()
        given, self.held = self.held, frozenset()
        self._owned -= given
        self._process.tell(f"gives back {_names(given)}")
        self._join_anew()

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Commit, unless the coordinator refuses or the request or its answer is lost."""
        for partition in sorted(offsets.keys() - self._owned):
            msg = (
                f"{self._process} asks for a commit of {partition}, which it has learned not to own"
            )
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
        """Commit at once; the next poll returns the result."""
        ticket = next(self._tickets)
        self._answers.append(CommitAnswered(ticket, self.commit(offsets)))
        return ticket

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Return True: no commit is in flight."""
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
        self._process.must_reach("kafka")
        return {partition: self._group.stored.get(partition) for partition in partitions}

    def close(self, timeout_s: float = 10.0) -> None:
        if not self._closed:
            self._closed = True
            self._leave()

    def topic_changed(self) -> None:
        """Refresh the metadata.

        With the classic protocol that supersedes a hold: the member joins again without the held
        partitions.
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
            self._process.tell(f"its hold of {_names(self.held)} is superseded, without an event")
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
        """Continue a superseded client in the new generation."""
        if isinstance(answer, Grant):
            self._epoch = answer.epoch
        return not isinstance(answer, Refusal) or answer is Refusal.REBALANCING

    def _knows(self) -> bool:
        return self.member_id in self._group.seats

    # In a poll

    def _taken_in(self, answer: Grant | Refusal) -> list[GroupEvent]:
        if answer is Refusal.UNKNOWN_MEMBER:
            return self._thrown_out()
        if isinstance(answer, Grant):
            return self._granted(answer)
        return self._asked_to_join_anew()

    def _granted(self, grant: Grant) -> list[GroupEvent]:
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

    def _asked_to_join_anew(self) -> list[GroupEvent]:
        group = self._group
        if self.held or not isinstance(group, ClassicGroup) or not self._knows():
            return []
        if group.is_eager and self._owned:
            return self._asked_back(set(self._owned))
        if group.is_preparing:
            group.join(self.member_id, self._owned)
        return []

    def _asked_back(self, partitions: set[TopicPartition]) -> list[GroupEvent]:
        self.held, self._held_since = frozenset(partitions), self._process.clockwork.now
        self._process.tell(f"is asked for {_names(partitions)}")
        self._process.expects_drain(self.held)
        if self._process.clockwork.happens(self._process.weather.overtaken):
            self._process.clockwork.after(
                self._process.clockwork.within(0.0, 4.0), None, self.topic_changed
            )
        return [RevokeRequested(tuple(sorted(partitions)))]

    def _thrown_out(self) -> list[GroupEvent]:
        if self.held:
            if self._undone is None:
                self._undone = LostReason.FENCED
                self._found_out_at = self._process.clockwork.now + self._process.clockwork.within(
                    0.0, _PROBE_S
                )
            return []
        return self._start_over(LostReason.SESSION)

    def _found_out(self) -> list[GroupEvent]:
        now = self._process.clockwork.now
        if self.held and self._undone is None and now >= self._held_since + self._group.rebalance_s:
            self._undone, self._found_out_at = LostReason.EXPIRED, now
        if self._undone is None or now < self._found_out_at:
            return []
        return self._start_over(self._undone)

    def _start_over(self, reason: LostReason) -> list[GroupEvent]:
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

"""Clients of confluent-kafka without a broker, scripted by a test."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message

from dagster_rebalance.kafka.client.confluent import from_committed, from_confluent, to_commit
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.member import leave
from dagster_rebalance.kafka.member import session as session_module
from dagster_rebalance.kafka.member.member import Member
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.group_ports import GroupEvent
    from dagster_rebalance.kafka.member.session import Session

CONFIG: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}
LIMIT_S = 120.0
REQUEST_LIMIT_S = 10.0
"""The member limits each of its requests to less."""
LONGEST_METADATA = 4_096


class RefusedPartition(confluent_kafka.TopicPartition):
    """A partition in an answer, with an error: Python cannot set one on the client's own."""

    error: KafkaError

    @classmethod
    def of(cls, partition: confluent_kafka.TopicPartition, code: int) -> RefusedPartition:
        made = cls(partition.topic, partition.partition)
        cls.error = KafkaError(code)
        return made


class ScriptedConsumer(confluent_kafka.Consumer):
    """A client whose polls run the test's script and whose commits are answered on demand.

    Attributes:
        asked: The commits, as partition, offset and metadata.
        answers: The error codes of the next commits; None or no entry is a success.
        probe_answer: The same for probes.
        refused: The refused partitions of a commit, each with an error code. The others are stored,
            and the client raises the last error.
        unreadable: The partitions whose committed offset the broker refuses to return.
        kept_back: The partitions with an offset in an open transaction.
        too_many: The number of partitions from which on a request is too large.
        may_answer: A commit waits for it.
        stored: The group's committed offsets.
        unassigned: The unassigned partitions.
        calls: The calls of a leave, in order.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        self.script: queue.SimpleQueue[Callable[[], Message | None]] = queue.SimpleQueue()
        self.asked: list[list[tuple[int, int, str]]] = []
        self.answers: list[int | None] = []
        self.probe_answer: int | None = KafkaError.OFFSET_METADATA_TOO_LARGE
        self.refused: dict[TopicPartition, int] = {}
        self.unreadable: dict[TopicPartition, int] = {}
        self.kept_back: frozenset[TopicPartition] = frozenset()
        self.too_many = 1_000
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.stored: dict[TopicPartition, OffsetAndMetadata | None] | int = {}
        self.unassigned: list[list[int]] = []
        self.calls: list[str] = []
        self.is_closed = False
        self.id = "member-1"
        self.polls = self.reads = 0

    def poll(self, timeout: float = -1) -> Message | None:
        self.polls += 1
        while not self.script.empty():
            message = self.script.get()()
            if message is not None:
                return message
        return None

    def commit(self, **request: Any) -> list[confluent_kafka.TopicPartition]:  # type: ignore[override]  # noqa: ANN401
        offsets = request["offsets"]
        assert not request["asynchronous"], "in a hold no poll would return the answer"
        self.asked.append([(tp.partition, tp.offset, tp.metadata or "") for tp in offsets])
        assert self.may_answer.wait(LIMIT_S)
        is_probe = len(offsets[0].metadata or "") > LONGEST_METADATA
        answer = self.probe_answer if is_probe else next(iter(self.answers), None)
        if not is_probe:
            self.answers = self.answers[1:]
        if len(offsets) >= self.too_many:
            answer = KafkaError.UNKNOWN
        if answer is not None:
            raise KafkaException(KafkaError(answer))
        self._store(offsets)
        return list(offsets)

    def _store(self, offsets: list[confluent_kafka.TopicPartition]) -> None:
        errors = []
        for tp in offsets:
            code = self.refused.get(from_confluent(tp))
            if code is not None:
                errors.append(KafkaError(code))
            elif self.refused and isinstance(self.stored, dict):
                self.stored[from_confluent(tp)] = from_committed(tp)
        if errors:
            raise KafkaException(errors[-1])

    def committed(
        self, partitions: list[confluent_kafka.TopicPartition], timeout: float = -1
    ) -> list[confluent_kafka.TopicPartition]:
        assert 0 < timeout < REQUEST_LIMIT_S
        self.reads += 1
        stored = self.stored
        if isinstance(stored, int):
            raise KafkaException(KafkaError(stored))
        if not self.kept_back.isdisjoint(map(from_confluent, partitions)):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        wanted = [(tp, stored.get(from_confluent(tp))) for tp in partitions]
        return [
            RefusedPartition.of(tp, self.unreadable[from_confluent(tp)])
            if from_confluent(tp) in self.unreadable
            else to_commit(from_confluent(tp), found)
            if found
            else tp
            for tp, found in wanted
        ]

    def memberid(self) -> str:
        return self.id

    def unsubscribe(self) -> None:
        self.calls.append("unsubscribe")
        super().unsubscribe()

    def incremental_unassign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.calls.append("unassign")
        super().incremental_unassign(partitions)
        self.unassigned.append([tp.partition for tp in partitions])

    def close(self) -> None:
        self.is_closed = True
        super().close()


class ScriptedMember:
    """A member whose client is scripted, and what Kafka does to it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clients: list[ScriptedConsumer] = []
        self.told: list[GroupEvent] = []
        monkeypatch.setattr(confluent_kafka, "Consumer", self._make)
        monkeypatch.setattr(session_module, "_SLICE_S", 0.001)
        monkeypatch.setattr(leave, "_LEAVE_LIMIT_S", 0.01)  # no callback reports an unassign
        config = {**CONFIG, **(settings or {})}
        self.member = Member(validated(config, hold_limit_s=10), clock=clock, probe_interval_s=0.02)
        self.session: Session = self.member._session
        self.client = self.clients[0]

    def grant(self, *partitions: TopicPartition) -> None:
        self.do(lambda: self.session._on_assign(self.client, _theirs(partitions)))

    def ask_for(self, *partitions: TopicPartition) -> None:
        self.client.script.put(lambda: self.session._on_revoke(self.client, _theirs(partitions)))
        wait_until(lambda: self.session.hold, timeout_s=LIMIT_S, what="the hold", interval_s=0.001)

    def lose(self, *partitions: TopicPartition) -> None:

        def taken() -> None:
            self.session._on_lost(self.client, _theirs(partitions))
            super(ScriptedConsumer, self.client).incremental_unassign(
                _theirs(partitions)
            )  # as the client does

        self.do(taken)

    def do(self, action: Callable[[], Message | None]) -> None:
        self.client.script.put(action)
        self.pass_time()

    def pass_time(self) -> None:
        if self.session.end_reason is None and self.session.hold is None:
            seen = self.client.polls
            wait_until(
                lambda: (
                    self.client.polls > seen + 2 or self.session.end_reason or self.session.hold
                ),
                timeout_s=LIMIT_S,
                what="the session's thread",
                interval_s=0.001,
            )

    def until(self, condition: Callable[[], object], what: str) -> None:

        def step() -> bool:
            self.told += self.member.poll(0)
            return bool(condition())

        wait_until(step, timeout_s=LIMIT_S, what=what, interval_s=0.001)

    def poll(self) -> list[GroupEvent]:
        return self.member.poll(0)

    def close(self) -> None:
        for client in self.clients:
            client.may_answer.set()
        self.member.close(5.0)

    def _make(self, config: Mapping[str, Any]) -> ScriptedConsumer:
        callbacks = {name: value for name, value in config.items() if callable(value)}
        plain = {
            **CONFIG,
            "log_level": 0,
            "partition.assignment.strategy": "cooperative-sticky",
            "group.protocol": "classic",
        }
        self.clients.append(ScriptedConsumer({**plain, **callbacks}))
        return self.clients[-1]


def trouble(code: int, topic: str | None = None) -> Message:
    return Message(topic=topic, error=KafkaError(code))


def _theirs(partitions: tuple[TopicPartition, ...]) -> list[confluent_kafka.TopicPartition]:
    return [confluent_kafka.TopicPartition(tp.topic, tp.partition) for tp in partitions]

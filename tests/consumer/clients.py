"""Clients of confluent-kafka that no broker answers: a test says what they are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message

from dagster_rebalance.consumer.membership import Member
from dagster_rebalance.consumer.settings import validated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dagster_rebalance.consumer.session import Session
    from dagster_rebalance.core.partition import TopicPartition

CONFIG: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}


class ScriptedConsumer(confluent_kafka.Consumer):
    """A client whose polls do what the test has queued, one thing each, and whose commits wait for the test's answer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        self.script: list[Callable[[], Message | None]] = []
        self.asked: list[list[confluent_kafka.TopicPartition]] = []
        self.unassigned: list[list[int]] = []
        self.refuses: int | None = None

    def poll(self, timeout: float = -1) -> Message | None:  # noqa: ARG002 - the client's signature
        """The next thing of the script."""
        return self.script.pop(0)() if self.script else None

    def commit(self, **request: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        """Note it, or refuse it."""
        if self.refuses is not None:
            raise KafkaException(KafkaError(self.refuses))
        self.asked.append(request["offsets"])

    def incremental_unassign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        """Note what was given up."""
        super().incremental_unassign(partitions)
        self.unassigned.append([tp.partition for tp in partitions])


class ScriptedMember:
    """A member whose client is scripted, and what Kafka does to it."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        config = {**CONFIG, **(settings or {})}
        self.member = Member(validated(config, hold_limit_s=10), probe_interval_s=0)
        self.session: Session = self.member._session
        self.session.consumer.close()
        self.client = ScriptedConsumer({**CONFIG, "partition.assignment.strategy": "cooperative-sticky", "group.protocol": "classic"})
        self.session.consumer = self.client

    def grant(self, *partitions: TopicPartition) -> None:
        """Kafka assigns."""
        self.session._on_assign(self.client, _theirs(partitions))

    def ask_for(self, *partitions: TopicPartition) -> None:
        """Kafka asks for partitions."""
        self.session._on_revoke(self.client, _theirs(partitions))

    def lose(self, *partitions: TopicPartition) -> None:
        """Kafka takes away."""
        self.session._on_lost(self.client, _theirs(partitions))

    def answer(self, code: int | None = None, request: int = -1) -> None:
        """Kafka answers a commit."""
        error = None if code is None else KafkaError(code)
        self.session._on_commit(error, self.client.asked[request])

    def report(self, join_state: str) -> None:
        """The client tells its statistics."""
        self.session._on_statistics(json.dumps({"cgrp": {"join_state": join_state}}))

    def close(self) -> None:
        """Leave."""
        self.client.script.clear()
        self.member.close(5.0)


def trouble(code: int, topic: str | None = None) -> Message:
    """A message that carries an error."""
    return Message(topic=topic, error=KafkaError(code))


def _theirs(partitions: tuple[TopicPartition, ...]) -> list[confluent_kafka.TopicPartition]:
    return [confluent_kafka.TopicPartition(tp.topic, tp.partition) for tp in partitions]

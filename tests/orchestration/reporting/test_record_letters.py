"""Letters of single records that bisection has found: stored once, within their limit."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import DeadLetterFailed, DeadLetterStored
from dagster_rebalance.core.model.letters import Letter, LetterKind, parse_record
from dagster_rebalance.core.model.offsets import Bounds, OffsetRange, TopicPartition
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from dagster_rebalance.orchestration.reporting.record_letters import RecordLetters
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.testing.deadline import wait_until
from tests.kafka.fake_producer import FakeProducer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AT_MS = 100 * 3_600_000


def wanted(offset: int) -> StoreDeadLetter:
    range_ = OffsetRange("orders", 0, offset, offset + 1)
    return StoreDeadLetter(range_, 1, "b-1.n0-40", ("run1", "run2"), is_record=True)


class Kafka(KafkaConsumerResource):
    """Kafka with some records, and a dead-letter topic in memory."""

    def reader(self) -> Any:  # noqa: ANN401 - as far as it is read
        return Reader(self)

    letter_reader = reader


class Reader:
    missing: frozenset[int] = frozenset()
    producer = FakeProducer({})

    def __init__(self, _kafka: Kafka) -> None: ...

    def read_lists(self, ranges: Sequence[OffsetRange]) -> Iterator[list[Message]]:
        (range_,) = ranges
        if range_.start in self.missing:
            return
        if range_.start == 99:
            msg = "Kafka is away"
            raise BrokerError(msg)
        if range_.start == 98:
            raise TypeError
        given: dict[str, Any] = {
            "value": b"v",
            "key": b"k",
            "headers": [("h", b"1")],
            "timestamp": (1, AT_MS),
        }
        yield [Message(topic="orders", partition=0, offset=range_.start, **given)]

    def topic_log(self, topic: str) -> tuple[str, dict[TopicPartition, Bounds]]:
        return "id", {TopicPartition(topic, 0): Bounds(0, len(self.producer.sent))}

    def read_topic(self, topic: str, **_: object) -> Iterator[list[Message]]:
        sent = zip(self.producer.sent, self.producer.headers, strict=True)
        yield [
            Message(
                topic=topic, partition=0, offset=at, key=key.encode(), value=value, headers=headers
            )
            for at, ((_, key, value), headers) in enumerate(sent)
        ]

    def close(self) -> None: ...


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> FakeProducer:
    made = FakeProducer({})
    produce = made.produce

    def produce_and_end(*given: Any, **more: Any) -> None:  # noqa: ANN401 - as of the producer
        produce(*given, **more)
        made.end(None)

    monkeypatch.setattr(made, "produce", produce_and_end)
    monkeypatch.setattr(
        DeadLetterProducer.__init__, "__kwdefaults__", {"make_producer": lambda _: made}
    )
    monkeypatch.setattr(Reader, "producer", made)
    return made


@contextmanager
def member(limit: str | None = None) -> Iterator[DeadLetters]:
    kafka = Kafka(
        bootstrap_servers="x",
        group_id="etl",
        topics=["orders"],
        dead_letter_topic="dead",
        on_failure="bisect",
        max_dead_letters=limit,
    )
    with RecordLetters(kafka) as records:
        sender: Any = FakeSender()
        yield DeadLetters(sender, "etl", records)


class FakeSender:
    """No letter of a range is sent."""

    def deliveries(self) -> tuple[()]:
        return ()


def answer(letters: DeadLetters, letter: StoreDeadLetter) -> DeadLetterStored | DeadLetterFailed:
    letters.store(letter, "ValueError: no price")
    assert letters.is_under_way(letter.range)
    letters.store(letter, "ValueError: no price")
    found = wait_until(lambda: [*letters.answers()] or None, timeout_s=120, what="an answer")
    assert not letters.is_under_way(letter.range)
    (only,) = found
    assert only.letter == letter
    return only


def test_letter_of_a_record_has_the_record_and_the_error(producer: FakeProducer) -> None:
    with member() as letters:
        assert answer(letters, wanted(7)) == DeadLetterStored(wanted(7))
    (found,) = Reader(Kafka).read_topic("dead")  # type: ignore[arg-type]
    (stored,) = found
    letter = parse_record(stored.key(), stored.value(), stored.headers())  # type: ignore[arg-type]
    assert isinstance(letter, Letter)
    assert (letter.kind, letter.key, letter.value) == (LetterKind.RECORD, "orders-0-7", b"v")
    assert (letter.record_key, letter.headers) == (b"k", (("h", b"1"),))
    assert (letter.reason, letter.group_id) == ("ValueError: no price", "etl")
    assert (letter.batch_id, letter.run_id, letter.attempt) == ("b-1.n0-40", "run2", 2)
    assert len(producer.sent) == 1


def test_next_owner_stores_no_second_letter(producer: FakeProducer) -> None:
    for _ in range(2):
        with member() as letters:
            assert answer(letters, wanted(7)) == DeadLetterStored(wanted(7))
    assert len(producer.sent) == 1


@pytest.mark.usefixtures("producer")
def test_limit_of_letters_refuses_the_next_one() -> None:
    with member("2") as letters:
        for offset in (1, 2):
            assert isinstance(answer(letters, wanted(offset)), DeadLetterStored)
        refused = answer(letters, wanted(3))
    assert isinstance(refused, DeadLetterFailed)
    assert "max_dead_letters allows 2" in refused.reason


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (5, "Kafka has no record at orders-0 [5, 6), so the asset raises without a record"),
        (99, "Kafka is away"),
        (98, "TypeError"),
    ],
)
def test_record_that_cannot_be_stored_is_reported(
    monkeypatch: pytest.MonkeyPatch, offset: int, reason: str
) -> None:
    monkeypatch.setattr(Reader, "missing", frozenset({5}))
    with member() as letters:
        refused = answer(letters, wanted(offset))
        assert isinstance(refused, DeadLetterFailed)
        assert reason in refused.reason
        assert isinstance(answer(letters, wanted(1)), DeadLetterStored)


def test_letter_is_answered_although_no_client_can_be_created(
    monkeypatch: pytest.MonkeyPatch, producer: FakeProducer
) -> None:
    """As without a token of an OAuth server; the client is created for each letter again."""
    calls: list[str] = []

    def fail_twice(_: object) -> FakeProducer:
        calls.append("create")
        if len(calls) <= 2:
            raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "no thread"))
        return producer

    given = {"make_producer": fail_twice}
    monkeypatch.setattr(DeadLetterProducer.__init__, "__kwdefaults__", given)
    with member() as letters:
        refused = answer(letters, wanted(7))
        assert isinstance(refused, DeadLetterFailed)
        assert "no thread" in refused.reason
        assert answer(letters, wanted(7)) == DeadLetterStored(wanted(7))


@pytest.mark.usefixtures("producer")
def test_letter_is_answered_although_no_reader_can_be_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        msg = "the secret is missing"
        raise ValueError(msg)

    monkeypatch.setattr(Kafka, "reader", fail)
    with member() as letters:
        refused = answer(letters, wanted(7))
        assert isinstance(refused, DeadLetterFailed)
        assert "the secret is missing" in refused.reason

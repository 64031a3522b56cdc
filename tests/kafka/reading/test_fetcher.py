"""The fetcher on librdkafka's mock cluster: records without Java."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading import fetcher as fetcher_module
from dagster_rebalance.kafka.reading.fetcher import Fetcher
from dagster_rebalance.kafka.reading.messages import consume_available
from dagster_rebalance.kafka.reading.start_positions import StartPositions
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import FakeGroup, ManualClock
from tests.kafka.contract.stages import MockCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata
    from dagster_rebalance.kafka.reading.start_positions import Start

EACH = 20


class Log:
    """A topic of four partitions with records, and a fetcher that reads it."""

    def __init__(
        self, cluster: MockCluster, clock: Callable[[], float] = time.monotonic, **settings: object
    ) -> None:
        self.topic = cluster.topic()
        self.config: dict[str, Any] = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "etl",
            "auto.offset.reset": "earliest",
            **settings,
        }
        group = FakeGroup({self.topic: 4})
        self.fetcher = Fetcher(
            validated(self.config, hold_limit_s=10),
            StartPositions(group.member(), group, "earliest"),
            clock,
        )
        self.seen: dict[TopicPartition, list[int]] = {}
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 0})

    def tp(self, number: int) -> TopicPartition:
        return TopicPartition(self.topic, number)

    def produce(self, *numbers: int, each: int = EACH) -> None:
        for number in numbers:
            for _ in range(each):
                self._producer.produce(self.topic, b"record", partition=number)
        assert self._producer.flush(120) == 0

    def start(self, *numbers: int) -> None:
        self.fetcher.stage(map(self.tp, numbers))
        for number in numbers:
            self.fetcher.seek(self.tp(number), "earliest")
        self.fetcher.start_staged()

    def read(self, max_records: int = 500) -> list[Message]:
        records = self.fetcher.read(max_records, 0.1)
        for record in records:
            tp = TopicPartition(record.topic() or "", record.partition() or 0)
            self.seen.setdefault(tp, []).append(
                -1 if (offset := record.offset()) is None else offset
            )
        return records

    def read_until(self, tp: TopicPartition, count: int) -> None:

        def enough() -> bool:
            self.read()
            return len(self.seen.get(tp, [])) >= count

        wait_until(enough, timeout_s=120, what=f"{count} records of {tp}", interval_s=0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    made = MockCluster()
    yield made
    made.close()


@pytest.fixture
def log(cluster: MockCluster) -> Iterator[Log]:
    made = Log(cluster)
    yield made
    made.fetcher.close()


def test_read_returns_records_once_in_order(log: Log) -> None:
    log.produce(0, 2)
    log.start(0, 2)
    log.read_until(log.tp(0), EACH)
    log.read_until(log.tp(2), EACH)
    log.read()
    assert log.seen == {key: list(range(EACH)) for key in [log.tp(0), log.tp(2)]}


def test_put_back_records_are_returned_again(log: Log) -> None:
    log.produce(0, 1)
    log.start(0, 1)
    log.fetcher.seek(log.tp(0), 5)
    log.fetcher.seek(log.tp(1), 8)
    taken: list[Message] = []

    def all_read() -> bool:
        taken.extend(log.fetcher.read(500, 0.1))
        return len(taken) == EACH - 5 + EACH - 8

    wait_until(all_read, timeout_s=120, what="all records", interval_s=0)
    log.fetcher.put_back_unseen()
    log.read_until(log.tp(0), EACH - 5)
    log.read_until(log.tp(1), EACH - 8)
    assert log.seen == {log.tp(0): list(range(5, EACH)), log.tp(1): list(range(8, EACH))}


def test_withheld_partition_continues_where_it_was(log: Log) -> None:
    log.produce(0, 1)
    log.start(0, 1)
    log.fetcher.withhold(frozenset({log.tp(0)}))
    log.read_until(log.tp(1), EACH)
    assert log.tp(0) not in log.seen
    log.fetcher.withhold(frozenset())
    log.read_until(log.tp(0), EACH)
    assert log.seen[log.tp(0)] == list(range(EACH))


def test_lag_is_known_after_the_first_fetch(log: Log) -> None:
    log.produce(0)
    log.start(0)
    assert log.fetcher.lag(log.tp(0)) is None
    wait_until(
        lambda: log.read(max_records=8), timeout_s=120, what="the first records", interval_s=0
    )
    read = len(log.seen[log.tp(0)])
    assert 0 < read <= 8
    assert log.fetcher.position(log.tp(0)).offset == read
    assert log.fetcher.lag(log.tp(0)) == EACH - read


@pytest.mark.parametrize("offset", [-5, -2, -1, 2**63])
def test_seek_to_an_invalid_offset_is_refused(log: Log, offset: int) -> None:
    log.produce(0)
    log.start(0)
    wait_until(lambda: log.read(max_records=1), timeout_s=120, what="a record", interval_s=0)
    with pytest.raises(
        IllegalStateError, match=rf"seek of {log.tp(0)} to {offset}: .*seek_to_beginning"
    ):
        log.fetcher.seek(log.tp(0), offset)
    log.read_until(log.tp(0), EACH)
    assert log.seen[log.tp(0)] == list(range(EACH))
    log.fetcher.drop([log.tp(0)])


def test_refused_start_is_reported_and_retried(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.produce(0)
    with monkeypatch.context() as patch:
        patch.setattr(log.fetcher, "_consumer", Refusing())
        log.fetcher.stage([log.tp(0)])
        log.fetcher.seek(log.tp(0), 3)
        with pytest.raises(BrokerError, match=f"reading records failed for {log.tp(0)}"):
            log.fetcher.start_staged()
    log.read_until(log.tp(0), EACH - 3)
    assert log.seen[log.tp(0)] == list(range(3, EACH))


def test_drop_succeeds_if_the_client_refuses(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read reports it: the release must not wait."""
    log.start(0)
    with monkeypatch.context() as patch:
        patch.setattr(log.fetcher, "_consumer", Refusing(log.tp(0)))
        log.fetcher.drop([log.tp(0)])
    with pytest.raises(BrokerError, match=str(log.tp(0))):
        log.read()
    assert log.read() == []


def test_exception_of_a_user_callback_loses_no_record(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ValueError("a bug of the user's")
    configs: list[dict[str, Any]] = []
    make = confluent_kafka.Consumer

    def fail(_error: object) -> None:
        raise problem

    def noted(config: dict[str, Any]) -> confluent_kafka.Consumer:
        configs.append(config)
        return make(config)

    with monkeypatch.context() as patch:
        patch.setattr(confluent_kafka, "Consumer", noted)
        log = Log(cluster, error_cb=fail)
    log.produce(0)
    log.start(0)
    configs[0]["error_cb"](KafkaError(KafkaError._TRANSPORT))
    with pytest.raises(ValueError, match="a bug of the user's"):
        log.read()
    log.read_until(log.tp(0), EACH)
    assert log.seen[log.tp(0)] == list(range(EACH))
    log.fetcher.close()


def test_recreated_topic_does_not_replace_an_earlier_error(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail() -> None:
        message = "of the user's callback"
        raise ValueError(message)

    log.start(0)
    log.fetcher._call_user(fail)
    monkeypatch.setattr(log.fetcher._recreated, "check", lambda _: {log.tp(0): False})
    with pytest.raises(ValueError, match="of the user"):
        log.fetcher.read(500, 0.0)
    with pytest.raises(BrokerError, match="created again"):
        log.fetcher.read(500, 0.0)


def test_missing_topic_is_reported_once_until_assigned_again(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Message(topic="gone", partition=0, error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    away = Message(
        topic="gone", partition=0, error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    )

    def told(*what: Message) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(fetcher_module, "consume_available", lambda *_: list(what))
            assert log.read() == []
        try:
            log.fetcher._raise_problem()
        except BrokerError as problem:
            return "gone" in str(problem)
        return False

    assert [told(missing), told(missing), told(away), told(missing)] == [True, False, True, False]
    log.fetcher.stage([TopicPartition("gone", 0)])
    log.fetcher.drop([TopicPartition("gone", 0)])
    assert told(missing)


OUT_OF_RANGE = KafkaError._AUTO_OFFSET_RESET


def out_of_range(tp: TopicPartition, offset: int) -> Message:
    return Message(
        topic=tp.topic,
        partition=tp.partition,
        offset=offset,
        error=KafkaError(OUT_OF_RANGE, "offset out of range"),
    )


def told_by_the_client(
    log: Log, monkeypatch: pytest.MonkeyPatch, *messages: Message
) -> list[Message]:
    with monkeypatch.context() as patch:
        patch.setattr(fetcher_module, "consume_available", lambda *_: list(messages))
        return log.fetcher.read(500, 0.0)


def test_out_of_range_error_of_an_earlier_assignment_does_not_undo_a_seek(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client keeps the error over an unassign."""
    log.produce(0)
    log.start(0)
    log.fetcher.seek(log.tp(0), 500)
    log.fetcher.start_staged()
    log.fetcher.seek(log.tp(0), 3)
    assert told_by_the_client(log, monkeypatch, out_of_range(log.tp(0), 500)) == []
    log.read_until(log.tp(0), EACH - 3)
    assert log.seen[log.tp(0)] == list(range(3, EACH))


def test_out_of_range_errors_of_several_assignments_do_not_undo_a_seek(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.produce(0)
    log.start(0)
    for offset in (500, 600, 3):
        log.fetcher.seek(log.tp(0), offset)
        log.fetcher.start_staged()
    for offset in (500, 600):
        assert told_by_the_client(log, monkeypatch, out_of_range(log.tp(0), offset)) == []
        assert log.fetcher.position(log.tp(0)).start == 3
    log.read_until(log.tp(0), EACH - 3)
    assert log.seen[log.tp(0)] == list(range(3, EACH))


def test_position_stays_before_an_unreadable_batch(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.produce(0)
    log.start(0)
    log.fetcher.begin()
    records: list[Message] = []

    def all_there() -> bool:
        records.extend(consume_available(log.fetcher._consumer, 500, 0.1))
        return len(records) == EACH

    wait_until(all_there, timeout_s=120, what="the records of the client", interval_s=0)
    unreadable = Message(
        topic=log.topic, partition=0, error=KafkaError(KafkaError._BAD_MSG, "failed CRC32C check")
    )
    read = told_by_the_client(log, monkeypatch, *records[:8], unreadable, *records[8:])
    assert [record.offset() for record in read] == list(range(8))
    log.fetcher.is_open = False
    assert log.fetcher.position(log.tp(0)).offset == 8
    log.fetcher.begin()
    with pytest.raises(BrokerError, match="at offset 8: failed CRC32C check"):
        log.fetcher.read(500, 0.0)
    assert log.fetcher.position(log.tp(0)).offset == 8


def test_out_of_range_error_does_not_start_a_lost_partition(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.produce(0)
    log.start(0)
    log.fetcher.drop([log.tp(0)])
    told_by_the_client(log, monkeypatch, out_of_range(log.tp(0), 0))
    assert log.read() == []
    assert log.fetcher._consumer.assignment() == []


def test_deleted_offset_is_reset_as_configured(log: Log) -> None:
    log.produce(0)
    log.start(0)
    log.fetcher.seek(log.tp(0), 500)
    log.read_until(log.tp(0), EACH)
    assert log.seen[log.tp(0)] == list(range(EACH))


def test_out_of_range_error_with_another_offset_counts_when_it_recurs(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncation has no offset. Records that arrive with it are not returned twice."""
    log.produce(0)
    log.start(0)
    log.fetcher.begin()
    with monkeypatch.context() as patch:
        consumer = log.fetcher._consumer
        truncated = [out_of_range(log.tp(0), -1)]
        patch.setattr(
            fetcher_module,
            "consume_available",
            lambda *_: consume_available(consumer, 5, 10.0) + truncated,
        )
        seen = [record.offset() for record in log.fetcher.read(5, 10.0)]
    assert seen == list(range(len(seen)))
    log.fetcher.is_open = False
    log.fetcher.begin()
    log.read_until(log.tp(0), EACH - len(seen))
    assert log.seen[log.tp(0)] == list(range(len(seen), EACH))
    told_by_the_client(log, monkeypatch, *truncated)
    assert log.fetcher.position(log.tp(0)).start == "earliest"


def test_partitions_without_reset_are_reported_together_until_sought(cluster: MockCluster) -> None:
    clock = ManualClock()
    log = Log(cluster, clock, **{"auto.offset.reset": "error"})
    log.produce(0, 1, 2)
    log.start(0, 1, 2)
    stuck, advice = {log.tp(0), log.tp(1)}, set[bool]()
    for tp in stuck:
        log.fetcher.seek(tp, 500)

    def told() -> set[TopicPartition]:
        clock.advance(1.0)  # as if the caller took its time between all polls
        try:
            log.read()
        except BrokerError as problem:
            advice.add("seek to an offset that exists" in str(problem))
            log.read()
            return set(problem.partitions)
        return set()

    wait_until(
        lambda: told() == stuck, timeout_s=120, what="the error that names both", interval_s=0
    )
    log.read_until(log.tp(2), EACH)
    assert told() == stuck
    log.fetcher.seek(log.tp(0), 3)
    assert told() == {log.tp(1)}
    log.fetcher.drop([log.tp(1)])
    log.read_until(log.tp(0), EACH - 3)
    assert log.seen[log.tp(0)] == list(range(3, EACH))
    assert told() == set()
    assert advice == {True}
    log.fetcher.close()


class Refusing:
    """A client that is broken."""

    def __init__(self, *assigned: TopicPartition) -> None:
        self._assigned = assigned

    def assignment(self) -> list[confluent_kafka.TopicPartition]:
        return [confluent_kafka.TopicPartition(tp.topic, tp.partition) for tp in self._assigned]

    def resume(self, partitions: object) -> None:
        """Take it."""

    def incremental_assign(self, partitions: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL, f"broken: {partitions}"))

    incremental_unassign = incremental_assign


def test_look_up_is_reported_after_failing_for_a_while() -> None:
    group = FakeGroup({"orders": 1})
    tp = TopicPartition("orders", 0)
    starts = Kept(group.member(), group, "earliest")
    settings = validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, hold_limit_s=10)
    fetcher = Fetcher(settings, starts, group.clock)
    fetcher.stage([tp])
    told = []
    for _ in range(14):
        fetcher.start_staged()
        try:
            fetcher.read(1, 0)
        except BrokerError as problem:
            told.append((group.clock(), problem.partitions))
        group.clock.advance(5)
    began = told[0][0] - 30
    assert told == [(began + 30, {tp: "kept"}), (began + 60, {tp: "kept"})]
    fetcher.close()


class Kept(StartPositions):
    """A look-up of partitions that a transaction keeps back."""

    def find(
        self, wanted: Mapping[TopicPartition, Start], timeout_s: float
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], BrokerError | None]:
        return {}, BrokerError("kept", retriable=True, partitions=dict.fromkeys(wanted, "kept"))


def test_poll_returns_no_record_of_held_partitions(log: Log) -> None:
    group = FakeGroup({log.topic: 4})
    log.produce(0, 1, 2, 3)
    blue = RebalanceAwareConsumer(log.config, member=group.member(), cluster=group)
    green = RebalanceAwareConsumer(log.config, fetch=False, member=group.member(), cluster=group)
    for consumer in (blue, green):
        consumer.subscribe([log.topic])
    blue.poll(0)
    for number in range(4):
        blue.seek(log.tp(number), 0)
    green.poll(0)
    seen = [record.partition() for record in blue.poll(0)]
    held = blue.get_to_be_revoked_partitions()
    assert len(held) == 2

    def all_of_the_others() -> bool:
        assert blue.delay_revoke(held)
        seen.extend(record.partition() for record in blue.poll(0.1))
        return len(seen) == 2 * EACH

    wait_until(
        all_of_the_others,
        timeout_s=120,
        what="the records of the retained partitions",
        interval_s=0,
    )
    assert set(seen) == {number for number in range(4) if log.tp(number) not in held}
    blue.close()
    green.close()

"""Reads of ranges with batches and errors in an order that a broker seldom produces."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, Message, ThrottleEvent

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.kafka.client.errors import END_OF_PARTITION, OFFSET_RESET_FORBIDDEN
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.reading.range_reader import RangeReader

if TYPE_CHECKING:
    from collections.abc import Collection

CONFIG = {"bootstrap.servers": "memory:1", "group.id": "etl"}


def record(partition: int, offset: int) -> Message:
    return Message(topic="orders", partition=partition, offset=offset)


def end(partition: int, offset: int) -> Message:
    return Message(
        topic="orders", partition=partition, offset=offset, error=KafkaError(END_OF_PARTITION)
    )


def trouble(code: int, text: str = "") -> Message:
    return Message(topic="orders", partition=0, error=KafkaError(code, text))


class ScriptedClient:
    """A client that returns given batches, and then nothing more."""

    def __init__(self, batches: list[list[Message]]) -> None:
        self.batches = deque(batches)
        self.assigned: list[confluent_kafka.TopicPartition] = []
        self.begun: list[int] = []
        self.is_closed = False

    def consume(self, _most: int, timeout: float) -> list[Message]:
        return self.batches.popleft() if timeout and self.batches else []

    def incremental_assign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.assigned += partitions
        self.begun += [tp.offset for tp in partitions]

    def incremental_unassign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.assigned = [tp for tp in self.assigned if tp not in partitions]

    def assignment(self) -> list[confluent_kafka.TopicPartition]:
        return list(self.assigned)

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """A clock that advances with each call."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.now = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


class Script(Protocol):
    """Makes a reader whose client returns given batches; each log reaches from 0 to 100."""

    def __call__(self, *batches: list[Message]) -> tuple[RangeReader, ScriptedClient]:
        """Make one."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:

    def ends(_: Cluster, asked: Collection[TopicPartition], __: float) -> dict[TopicPartition, int]:
        return dict.fromkeys(asked, 100)

    def starts(
        _: Cluster, asked: Collection[TopicPartition], __: float
    ) -> dict[TopicPartition, int]:
        return dict.fromkeys(asked, 0)

    monkeypatch.setattr(Cluster, "high_watermarks", ends)
    monkeypatch.setattr(Cluster, "beginning_offsets", starts)
    monkeypatch.setattr(Cluster, "end_offsets", ends)

    def make(*batches: list[Message]) -> tuple[RangeReader, ScriptedClient]:
        client = ScriptedClient(list(batches))
        monkeypatch.setattr(
            "dagster_rebalance.kafka.reading.range_reader.confluent_kafka.Consumer",
            lambda _: client,
        )
        return RangeReader(validated(CONFIG, hold_limit_s=10), Clock()), client

    return make


def offsets(reader: RangeReader, *ranges: OffsetRange) -> list[tuple[int | None, int | None]]:
    return [(message.partition(), message.offset()) for message in reader.read(ranges, 60.0)]


BOTH = OffsetRange("orders", 0, 0, 3), OffsetRange("orders", 1, 0, 3)


def test_end_of_partition_counts_after_the_records_of_its_batch(script: Script) -> None:
    reader, client = script([record(0, 0), record(0, 1), end(0, 3), record(1, 1), end(1, 3)])
    assert offsets(reader, *BOTH) == [(0, 0), (0, 1), (1, 1)]
    assert not client.assigned
    assert not client.is_closed


def test_records_after_a_range_end_it_and_are_omitted(script: Script) -> None:
    reader, _ = script([record(0, 2), record(1, 0), record(0, 7)], [record(1, 9)])
    assert offsets(reader, *BOTH) == [(0, 2), (1, 0)]


def test_transient_errors_do_not_extend_the_timeout(script: Script) -> None:
    """The last one is the reason."""
    away = [trouble(KafkaError._TRANSPORT, "connection refused")]
    reader, client = script([record(0, 0)], *[away] * 1000)
    with pytest.raises(
        BrokerError, match=r"orders-0 at offset 1 could be read for 60 s.*refused"
    ) as caught:
        offsets(reader, OffsetRange("orders", 0, 0, 3))
    assert caught.value.retriable
    assert client.is_closed


def test_timeout_blames_a_transaction_only_at_the_last_stable_offset(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = script([record(0, 0)])
    with pytest.raises(BrokerError, match="the client reports no reason") as caught:
        offsets(reader, *BOTH)
    assert "transaction" not in str(caught.value)
    monkeypatch.setattr(Cluster, "end_offsets", lambda _, asked, __: dict.fromkeys(asked, 1))
    reader, _ = script([record(0, 0), record(1, 2)])
    with pytest.raises(
        BrokerError, match=r"orders-0 at offset 1 .*transaction is open: orders-0 .* to offset 1$"
    ):
        offsets(reader, *BOTH)


def test_timeout_names_no_error_from_before_the_last_progress(script: Script) -> None:
    away = trouble(KafkaError._TRANSPORT, "connection refused")
    reader, _ = script([away], [record(0, 0)])
    with pytest.raises(BrokerError, match="the client reports no reason"):
        offsets(reader, OffsetRange("orders", 0, 0, 3))


def test_timeout_names_no_log_query_from_before_the_last_progress(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, client = script([record(0, 0)], [end(0, 1)])
    vars(reader)["_clock"] = Clock(step_s=0.5)

    def away(*_: object) -> dict[TopicPartition, int]:
        client.batches.append([record(0, 1)])
        message = "the leader is away"
        raise BrokerError(message, retriable=True)

    monkeypatch.setattr(Cluster, "high_watermarks", away)
    with pytest.raises(BrokerError, match="the client reports no reason"):
        list(reader.read([OffsetRange("orders", 0, 0, 3)], 2.0))


def test_unreadable_batch_after_the_range_is_ignored(script: Script) -> None:
    damaged = trouble(KafkaError._BAD_MSG, "failed CRC32C check")
    reader, _ = script([record(0, 0), record(0, 2), damaged])
    assert offsets(reader, OffsetRange("orders", 0, 0, 3)) == [(0, 0), (0, 2)]


def test_timeout_has_the_reason_that_the_client_reported(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callbacks of the user are called, too."""
    reader, client = script([record(0, 0)])
    heard: list[object] = []
    config = {**CONFIG, "throttle_cb": heard.append, "error_cb": heard.append}
    made: list[dict[str, Any]] = []

    def make(settings: dict[str, Any]) -> ScriptedClient:
        made.append(settings)
        return client

    monkeypatch.setattr(
        "dagster_rebalance.kafka.reading.range_reader.confluent_kafka.Consumer", make
    )
    reader = RangeReader(validated(config, hold_limit_s=10), Clock())
    records = reader.read([OffsetRange("orders", 0, 0, 3)], 60.0)
    assert next(records).offset() == 0
    throttled = ThrottleEvent("broker", 1, 11.0)
    made[0]["throttle_cb"](throttled)
    with pytest.raises(BrokerError, match="the broker throttles this client for 11 s"):
        next(records)
    too_large = KafkaError(KafkaError._BAD_MSG, "increase receive.message.max.bytes")
    client.batches.append([record(0, 0)])
    records = reader.read([OffsetRange("orders", 0, 0, 3)], 60.0)
    next(records)
    made[1]["error_cb"](too_large)
    made[1]["error_cb"](KafkaError(KafkaError._ALL_BROKERS_DOWN))
    with pytest.raises(BrokerError, match=r"increase receive.*orders-0 at offset 1"):
        next(records)
    assert heard == [throttled, too_large, KafkaError(KafkaError._ALL_BROKERS_DOWN)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "grant the principal the ACL READ"),
        (OFFSET_RESET_FORBIDDEN, "no offset reset"),
    ],
)
def test_permanent_errors_are_raised_at_once(script: Script, code: int, said: str) -> None:
    reader, client = script([trouble(code, "no offset reset")])
    with pytest.raises(BrokerError, match=said):
        offsets(reader, OffsetRange("orders", 0, 0, 3))
    assert client.is_closed


def test_truncated_log_that_has_grown_again_is_refused(script: Script) -> None:
    cut_off = trouble(OFFSET_RESET_FORBIDDEN, f"{KafkaError(KafkaError._LOG_TRUNCATION).str()}: x")
    reader, _ = script([record(0, 0), cut_off])
    with pytest.raises(
        BrokerError, match=r"reading records failed for orders-0.*truncat.*dagster-rebalance reset"
    ) as caught:
        offsets(reader, OffsetRange("orders", 0, 0, 3))
    assert "auto.offset.reset" not in str(caught.value), "a batch can neither set it nor seek"
    assert not caught.value.retriable


def test_out_of_range_error_of_an_earlier_read_is_ignored(script: Script) -> None:
    of_earlier = [
        Message(
            topic="orders",
            partition=partition,
            offset=70,
            error=KafkaError(OFFSET_RESET_FORBIDDEN, "offset out of range"),
        )
        for partition in (0, 5)
    ]
    reader, client = script([record(0, 0), *of_earlier], [record(0, 1)], [record(0, 2)])
    assert offsets(reader, OffsetRange("orders", 0, 0, 3)) == [(0, 0), (0, 1), (0, 2)]
    assert client.begun == [0, 1], "an error that is of this read comes again"


def test_queries_for_a_topic_wait_no_longer_than_its_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def partitions_for(_cluster: Cluster, _topic: str, timeout_s: float = 0.0) -> list[object]:
        limits.append(timeout_s)
        return []

    monkeypatch.setattr(Cluster, "partitions_for", partitions_for)
    reader = RangeReader(validated(CONFIG, hold_limit_s=10))
    for timeout_s in (5.0, 60.0):
        assert not [*reader.read_topic("dead", timeout_s=timeout_s)]
    assert limits == [5.0, 10.0]


def test_forked_child_creates_new_clients(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [OffsetRange("orders", 0, 0, 1)]
    reader, of_parent = script([record(0, 0)], [record(0, 0)])
    assert len(list(reader.read(wanted))) == 1
    own = ScriptedClient([[record(0, 0)]])
    monkeypatch.setattr(
        "dagster_rebalance.kafka.reading.range_reader.confluent_kafka.Consumer", lambda _: own
    )
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert len(list(reader.read(wanted))) == 1
    assert len(of_parent.batches) == 1
    reader.close()
    assert (own.is_closed, of_parent.is_closed) == (True, False)


class Stolen(list[object]):
    """Idle clients, the last of which another thread takes between a check and a `pop`."""

    def __bool__(self) -> bool:
        return True


def test_read_creates_a_client_if_another_thread_takes_the_idle_one(script: Script) -> None:
    reader, _ = script([record(0, 0)])
    vars(reader)["_idle"] = Stolen()
    assert offsets(reader, OffsetRange("orders", 0, 0, 1)) == [(0, 0)]


def test_close_ends_if_another_thread_takes_the_idle_client(script: Script) -> None:
    reader, _ = script()
    vars(reader)["_idle"] = Stolen()
    reader.close()


def test_client_of_a_read_that_ends_during_a_close_is_closed(script: Script) -> None:
    reader, client = script([record(0, 0)])
    records = reader.read_lists([OffsetRange("orders", 0, 0, 2)])
    next(records)
    unassign = client.incremental_unassign

    def unassign_during_a_close(partitions: list[confluent_kafka.TopicPartition]) -> None:
        unassign(partitions)
        reader.close()

    client.incremental_unassign = unassign_during_a_close  # type: ignore[method-assign]
    records.close()  # type: ignore[attr-defined]
    assert client.is_closed
